"""The numbers behind each figure, as tables in base units."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from psrl.analysis.report.comparison import FACTORS, Comparison
from psrl.core.run.events import Events

MAX_TIMELINE_ROWS = 12


def gain_series(comparison: Comparison) -> pd.DataFrame:
    """Speed-up over the baseline per policy and part (update, forward phases, end to end)."""
    parts: dict[str, tuple[str, ...]] = {"end to end": comparison.phases}
    if "update" in comparison.phases and comparison.forward_phases:
        parts = {"update": ("update",), "forward phases": comparison.forward_phases} | parts
    rows = [
        {
            "policy": policy,
            "part": part,
            "makespan_s": comparison.makespan_s(policy, phases),
            "speedup": comparison.speedup(policy, phases),
        }
        | {
            "flop_ratio": comparison.flop_ratio(policy, phases),
            "speedup_bound": comparison.bound(policy, phases),
        }
        for part, phases in parts.items()
        for policy in comparison.policies
    ]
    return pd.DataFrame(rows)


def factors_series(comparison: Comparison) -> pd.DataFrame:
    """Cuts, placement and sharing per policy and phase; their product is `speedup`.

    Phases whose factors are equal for every policy share a row, e.g. "log_old_prob, reference".
    """
    columns = (*FACTORS, "speedup")

    def values(phase: str) -> tuple[float, ...]:
        return tuple(f[phase][c] for f in comparison.factors.values() for c in columns)

    rows = [
        {"policy": policy, "phases": ", ".join(phases)}
        | {c: comparison.factors[policy][phases[0]][c] for c in columns}
        for phases in _equal_phases(comparison, values)
        for policy in comparison.factors
    ]
    return pd.DataFrame(rows, columns=["policy", "phases", *columns])


def _equal_phases(
    comparison: Comparison, values: Callable[[str], tuple[float, ...]]
) -> list[list[str]]:
    """Phases grouped by equal values, the update first."""
    merged: dict[tuple[float, ...], list[str]] = {}
    for phase in reversed(comparison.phases):
        merged.setdefault(values(phase), []).insert(0, phase)
    return list(merged.values())


def memory_series(comparison: Comparison) -> pd.DataFrame:
    """Bytes over time in the main phase, on each policy's fullest device.

    `view` is "all memory" (the device whose total peaks highest) or "cached keys and values"
    (keys, values and their gradients, on the device where those peak highest). Bytes hold from
    `time_s` to the next row's; a last row marks the end of the phase.
    """
    parts = []
    for policy in comparison.policies:
        events = _main_events(comparison, policy)
        views = {
            "all memory": (events.total_bytes, events.static_bytes),
            "cached keys and values": (
                events.kv_bytes + events.kv_gradient_bytes,
                np.zeros(len(events), np.int64),
            ),
        }
        for view, (nbytes, static) in views.items():
            worst = int(np.argmax(nbytes))
            rank, stage = int(events.rank[worst]), int(events.stage[worst])
            mine = np.flatnonzero((events.rank == rank) & (events.stage == stage))
            mine = mine[np.argsort(events.start_s[mine], kind="stable")]
            frame = pd.DataFrame(
                {
                    "policy": policy,
                    "view": view,
                    "rank": rank,
                    "stage": stage,
                    "time_s": np.append(events.start_s[mine], events.end_s[mine].max()),
                    "static_bytes": np.append(static[mine], static[mine][-1]),
                    "bytes": np.append(nbytes[mine], nbytes[mine][-1]),
                }
            )
            parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def worker_series(comparison: Comparison) -> pd.DataFrame:
    """Time that each data-parallel rank works in the main phase, and the policy's idle share."""
    parts = []
    num_ranks = comparison.setup.parallel.data_parallel_size
    for policy in comparison.policies:
        worked = worker_times(_main_events(comparison, policy), num_ranks)
        phase = comparison.metrics[policy]["phases"][comparison.main_phase]
        parts.append(
            pd.DataFrame(
                {
                    "policy": policy,
                    "rank": worked.index,
                    "worker_time_s": worked.to_numpy(),
                    "bubble_fraction": phase["bubble_fraction"],
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def worker_times(events: Events, num_ranks: int) -> "pd.Series[float]":
    """Time per rank as docs/metrics.md defines it; 0 for a rank without micro-batches.

    The spans from first start to last end of a rank's programs, overlaps counted once.
    """
    compute = events.where(events.micro_batch >= 0)
    frame = pd.DataFrame({n: getattr(compute, n) for n in ("rank", "program", "start_s", "end_s")})
    spans = frame.groupby(["rank", "program"]).agg({"start_s": "min", "end_s": "max"})
    until = spans["end_s"].groupby(level="rank").cummax().groupby(level="rank").shift()
    start = np.fmax(spans["start_s"], until)
    worked = (spans["end_s"] - start).clip(lower=0.0).groupby(level="rank").sum()
    return worked.reindex(range(num_ranks), fill_value=0.0)


def timeline_series(comparison: Comparison) -> pd.DataFrame:
    """Ops of the main phase for the baseline and the policy in focus.

    Where all (rank, stage) pairs would not fit a picture, the slowest and the fastest rank are
    kept, then others by number.
    """
    chosen = dict.fromkeys((comparison.baseline, comparison.focus))
    num_ranks = comparison.setup.parallel.data_parallel_size
    parts = []
    for policy in chosen:
        events = _main_events(comparison, policy)
        num_stages = len(np.unique(events.stage))
        by_time = worker_times(events, num_ranks).sort_values(kind="stable").index.tolist()
        extremes_first = dict.fromkeys([by_time[-1], by_time[0], *sorted(by_time)])
        kept = list(extremes_first)[: max(1, MAX_TIMELINE_ROWS // num_stages)]
        events = events.where(np.isin(events.rank, kept))
        columns = ("rank", "stage", "op", "micro_batch", "start_s", "end_s")
        parts.append(
            pd.DataFrame({"policy": policy} | {name: getattr(events, name) for name in columns})
        )
    return pd.concat(parts, ignore_index=True)


def token_series(comparison: Comparison) -> pd.DataFrame:
    """Tokens computed per policy and phase, beside the logical and the unique tokens.

    Phases with equal counts share a row, as in `factors_series`.
    """
    metrics = comparison.metrics

    def executed(phase: str) -> tuple[float, ...]:
        return tuple(metrics[p]["phases"][phase]["executed_tokens"] for p in comparison.policies)

    rows = [
        {
            "policy": policy,
            "phases": ", ".join(phases),
            "executed_tokens": count,
            "logical_tokens": metrics[policy]["logical_tokens"],
            "unique_tokens": metrics[policy]["unique_tokens"],
        }
        for phases in _equal_phases(comparison, executed)
        for policy, count in zip(comparison.policies, executed(phases[0]), strict=True)
    ]
    return pd.DataFrame(rows)


def predicted_series(comparison: Comparison) -> pd.DataFrame:
    """Simulated against executed time per policy and phase; `error` is relative to the latter."""
    rows = []
    for policy, executed in comparison.executed.items():
        for phase, entry in executed["phases"].items():
            simulated = comparison.metrics[policy]["phases"].get(phase)
            if simulated is None:
                continue
            predicted, measured = simulated["makespan_s"], entry["makespan_s"]
            error = predicted / measured - 1.0
            rows.append((policy, phase, predicted, measured, error))
    return pd.DataFrame(rows, columns=["policy", "phase", "predicted_s", "measured_s", "error"])


def _main_events(comparison: Comparison, policy: str) -> Events:
    events = comparison.events(policy)
    return events.where(events.phase == comparison.main_phase)
