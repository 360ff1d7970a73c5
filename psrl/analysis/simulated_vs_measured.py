"""How well a simulated run agrees with an executed run of the same plan, phase by phase."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import kendalltau

from psrl.core.errors import ConfigError
from psrl.core.plan.plan import PHASES
from psrl.core.run.events import Events
from psrl.core.run.run_directory import read_manifest

from .tables import aligned
from .units import bytes_unit, percent, time_unit

_KEYS = ("program", "rank", "stage", "micro_batch")


def agreement(measured: Path, simulated: Path) -> pd.DataFrame:
    """One row per phase that both runs have; docs/metrics.md has the columns.

    Args:
        measured: run directory of `psrl execute`.
        simulated: run directory of `psrl simulate`, or a policy's folder in a comparison.

    Raises:
        ConfigError: if a run is missing or they ran different traces, plans or phases.
        PlanError: if an event log is damaged.
    """
    _check_kinds(measured, simulated)
    logs = [Events.load(run / "events.parquet") for run in (measured, simulated)]
    ran = [set(events.phase.tolist()) for events in logs]
    if ran[0] != ran[1] or not ran[0]:
        raise ConfigError(
            f"{measured} ran {_names(ran[0])}, {simulated} ran {_names(ran[1])}",
            "compare runs of one plan",
        )
    rows = []
    for phase in (p for p in PHASES if p in ran[0]):
        real, predicted = (_sorted(e.where(e.phase == phase)) for e in logs)
        if not all(np.array_equal(_key(real, n), _key(predicted, n)) for n in ("op", *_KEYS)):
            raise ConfigError(
                f"{measured} ran {len(real)} ops in {phase} and {simulated} {len(predicted)} ops, "
                "and they are not the same",
                "simulate the plan that was executed, or execute the plan that was simulated",
            )
        rows.append({"phase": phase} | _phase_row(real, predicted))
    return pd.DataFrame(rows)


def _check_kinds(measured: Path, simulated: Path) -> None:
    hashes = []
    for run, kind in ((measured, "executed"), (simulated, "simulated")):
        if not (run / "events.parquet").exists():
            raise ConfigError(
                f"{run} has no events.parquet",
                "pass a run directory of `psrl execute` and one of `psrl simulate`",
            )
        path = run / "manifest.json"
        # The folder of a policy inside a comparison has none; it is simulated.
        manifest = read_manifest(run) if path.exists() else {"kind": "simulated"}
        if manifest.get("kind") != kind:
            raise ConfigError(
                f"{run} holds a run of kind {manifest.get('kind')!r}, expected {kind!r}",
                "--measured takes a run of `psrl execute`, --simulated one of `psrl simulate`",
            )
        hashes.append(manifest.get("trace_hash"))
    if None not in hashes and hashes[0] != hashes[1]:
        raise ConfigError(
            f"{measured} ran trace {str(hashes[0])[:12]}, {simulated} ran {str(hashes[1])[:12]}",
            "compare runs of one plan",
        )


def _names(phases: set[str]) -> str:
    return ", ".join(p for p in PHASES if p in phases) or "nothing"


def _key(events: Events, name: str) -> npt.NDArray[Any]:
    column: npt.NDArray[Any] = getattr(events, name)
    return column


def _sorted(events: Events) -> Events:
    """In an order that does not depend on times."""
    return events.where(np.lexsort([_key(events, n) for n in ("op", *reversed(_KEYS))]))


def _phase_row(real: Events, predicted: Events) -> dict[str, Any]:
    """Both logs hold the same ops in the same order of rows."""
    simulated_s, measured_s = float(predicted.end_s.max()), float(real.end_s.max())
    kv = [e.kv_bytes + e.kv_gradient_bytes for e in (real, predicted)]
    working = _working_bytes(real, predicted)
    same_order, num_workers = _workers_in_order(real, predicted)
    return {
        "simulated_s": simulated_s,
        "measured_s": measured_s,
        "time_error": simulated_s / measured_s - 1.0 if measured_s else math.inf,
        "num_ops": len(real),
        "workers_in_order": same_order / num_workers,
        "kendall_tau": _kendall_tau(real, predicted),
        "kv_ops_equal": float(np.mean(kv[0] == kv[1])),
        "kv_largest_difference_bytes": int(np.abs(kv[0] - kv[1]).max()),
        "simulated_peak_kv_bytes": int(kv[1].max()),
        "measured_peak_kv_bytes": int(kv[0].max()),
        "simulated_peak_memory_bytes": int(predicted.total_bytes.max()),
        "measured_peak_memory_bytes": int(real.total_bytes.max()),
        "simulated_peak_working_bytes": working[1],
        "measured_peak_working_bytes": working[0],
        "memory_error": working[1] / working[0] - 1.0 if working[0] else math.inf,
    }


def _working_bytes(real: Events, predicted: Events) -> tuple[int, int]:
    """Peaks of what comes and goes: activations, logits, K/V and dK/dV.

    Weights and optimizer states are left out: a forward-only engine holds no gradients, a
    simulated device always holds the whole training state. So are activations where the run
    recorded none.
    """
    has_activations = bool(real.activation_bytes.any())
    peaks = [
        int(
            (
                e.activation_bytes * has_activations
                + e.logits_bytes
                + e.kv_bytes
                + e.kv_gradient_bytes
            ).max()
        )
        for e in (real, predicted)
    ]
    return peaks[0], peaks[1]


def _workers_in_order(real: Events, predicted: Events) -> tuple[int, int]:
    """(rank, stage) pairs that ran their ops in the predicted order, and all of them."""
    workers = np.unique(np.stack([real.rank, real.stage]), axis=1).T
    same = 0
    for rank, stage in workers.tolist():
        mine = np.flatnonzero((real.rank == rank) & (real.stage == stage))
        ran, expected = (np.argsort(e.start_s[mine], kind="stable") for e in (real, predicted))
        same += np.array_equal(ran, expected)
    return same, len(workers)


def _kendall_tau(real: Events, predicted: Events) -> float:
    """Tau-b of the start times of all ops of all workers; 1 for fewer than two distinct times."""
    if len(np.unique(real.start_s)) < 2 or len(np.unique(predicted.start_s)) < 2:
        return 1.0
    return float(kendalltau(real.start_s, predicted.start_s).statistic)


def kv_curves(measured: Path, simulated: Path) -> pd.DataFrame:
    """K/V and dK/dV bytes op by op on the device with the highest measured peak, per phase.

    Columns: phase, rank, stage, position, op, micro_batch, measured_bytes, simulated_bytes.
    """
    logs = [Events.load(run / "events.parquet") for run in (measured, simulated)]
    parts = []
    for phase in (p for p in PHASES if (logs[0].phase == p).any()):
        real, predicted = (_sorted(e.where(e.phase == phase)) for e in logs)
        kv = real.kv_bytes + real.kv_gradient_bytes
        worst = int(kv.argmax())
        mine = np.flatnonzero((real.rank == real.rank[worst]) & (real.stage == real.stage[worst]))
        mine = mine[np.argsort(real.start_s[mine], kind="stable")]
        parts.append(
            pd.DataFrame(
                {
                    "phase": phase,
                    "rank": real.rank[mine],
                    "stage": real.stage[mine],
                    "position": np.arange(len(mine)),
                    "op": real.op[mine],
                    "micro_batch": real.micro_batch[mine],
                    "measured_bytes": kv[mine],
                    "simulated_bytes": (predicted.kv_bytes + predicted.kv_gradient_bytes)[mine],
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def disagreements(table: pd.DataFrame, tolerance: float) -> list[str]:
    """What lies outside: times and peaks beyond the tolerance, any other order or K/V byte."""
    found = []
    for row in table.to_dict("records"):
        for name, what in (("time_error", "time"), ("memory_error", "peak memory")):
            if not abs(row[name]) <= tolerance:
                found.append(f"{row['phase']}: {what} is off by {100 * row[name]:+.1f} %")
        if row["workers_in_order"] < 1:
            found.append(f"{row['phase']}: ops ran in another order")
        if row["kv_ops_equal"] < 1:
            unit = bytes_unit(row["kv_largest_difference_bytes"])
            found.append(
                f"{row['phase']}: K/V bytes differ by up to "
                f"{unit.text(row['kv_largest_difference_bytes'])}"
            )
    return found


def display_agreement(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that people read, as texts with one unit per column."""
    time = time_unit(table[["simulated_s", "measured_s"]].to_numpy().max())
    peaks = table[["simulated_peak_working_bytes", "measured_peak_working_bytes"]]
    memory = bytes_unit(peaks.to_numpy().max())
    return pd.DataFrame(
        {
            "phase": table["phase"],
            f"simulated ({time.name})": time.column(table["simulated_s"].tolist()),
            f"measured ({time.name})": time.column(table["measured_s"].tolist()),
            "error": [f"{100 * v:+.1f} %" for v in table["time_error"]],
            "ops": [f"{v:,}" for v in table["num_ops"]],
            "in order": [percent(v) for v in table["workers_in_order"]],
            "tau": [f"{v:.3f}" for v in table["kendall_tau"]],
            "K/V equal": [percent(v) for v in table["kv_ops_equal"]],
            f"peak ({memory.name})": memory.column(peaks.iloc[:, 0].tolist()),
            f"measured ({memory.name})": memory.column(peaks.iloc[:, 1].tolist()),
            "peak error": [f"{100 * v:+.1f} %" for v in table["memory_error"]],
        }
    )


def format_agreement(table: pd.DataFrame) -> str:
    """An agreement table for the terminal."""
    return aligned(display_agreement(table))
