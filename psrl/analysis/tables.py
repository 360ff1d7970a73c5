"""Tables of a comparison: one row per policy, for files (fixed units) and for people."""

import math
from pathlib import Path

import pandas as pd

from psrl.analysis.report.comparison import Comparison, load_comparison
from psrl.core.errors import ConfigError

from .units import bytes_unit, number, percent, time_unit, times

_COPIED = (
    "worker_time_min_s",
    "worker_time_max_s",
    "worker_time_max_over_min",
    "bubble_fraction",
    "executed_tokens",
    "logical_tokens",
    "unique_tokens",
    "prefix_match_rate",
    "num_samples",
    "logical_tokens_per_s",
    "unique_tokens_per_s",
    "peak_memory_bytes",
    "peak_kv_bytes",
    "lower_bound_s",
    "gap",
)


def comparison_table(run: Path, baseline: str = "verl") -> pd.DataFrame:
    """One row per policy, the baseline first; NaN where a policy has no such number.

    Columns are the metrics of docs/metrics.md, and relative to the baseline `speedup` (its time
    over the policy's; also per update and forward phases), `flop_ratio`, `speedup_bound` and
    `memory_ratio` (the policy's peak over its peak); `merged_speedup` is the speed-up over
    merged_dense. Wall time to plan comes from the manifest, if that is written yet.

    Raises:
        ConfigError: naming the file or key that is missing.
    """
    return policy_table(load_comparison(run, baseline))


def policy_table(comparison: Comparison) -> pd.DataFrame:
    """`comparison_table` of a run that is loaded already."""
    forward = comparison.forward_phases
    update = ("update",) if "update" in comparison.phases else ()
    base = comparison.metrics[comparison.baseline]
    rows = []
    for policy in comparison.policies:
        metrics = comparison.metrics[policy]
        row = {
            "policy": policy,
            "makespan_s": comparison.makespan_s(policy),
            "speedup": comparison.speedup(policy),
            "merged_speedup": comparison.over_merged(policy),
            "update_makespan_s": comparison.makespan_s(policy, update),
            "update_speedup": comparison.speedup(policy, update),
            "forward_makespan_s": comparison.makespan_s(policy, forward),
            "forward_speedup": comparison.speedup(policy, forward),
        }
        row["flop_ratio"] = comparison.flop_ratio(policy)
        row["speedup_bound"] = comparison.bound(policy)
        row |= {k: math.nan if metrics[k] is None else metrics[k] for k in _COPIED}
        row["memory_ratio"] = metrics["peak_memory_bytes"] / base["peak_memory_bytes"]
        row["plan_time_s"] = comparison.plan_time_s.get(policy, math.nan)
        rows.append(row)
    return pd.DataFrame(rows)


def write_comparison(run: Path, baseline: str = "verl") -> pd.DataFrame:
    """Write comparison.csv (base units, six significant digits) and return the whole table.

    The file leaves out `plan_time_s`, so that equal inputs give equal bytes.
    """
    table = comparison_table(run, baseline)
    write_csv(table.drop(columns="plan_time_s"), run / "comparison.csv")
    return table


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table with integers whole and floats at six significant digits."""
    table.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def display_table(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that people read, as texts with one unit per column."""
    time = time_unit(table["makespan_s"].max())
    memory = bytes_unit(table["peak_memory_bytes"].max())
    kv = bytes_unit(table["peak_kv_bytes"].max())
    has_forward = bool(table["forward_makespan_s"].notna().any())
    has_update = bool(table["update_makespan_s"].notna().any())
    shown = {
        "policy": table["policy"],
        f"time ({time.name})": time.column(table["makespan_s"].tolist()),
        "speed-up": [times(v) for v in table["speedup"]],
    }
    if table["merged_speedup"].notna().any():
        shown["over merged"] = [times(v) for v in table["merged_speedup"]]
    if has_update and has_forward:
        shown["update"] = [times(v) for v in table["update_speedup"]]
        shown["forward"] = [times(v) for v in table["forward_speedup"]]
    shown |= {
        "max/min": [times(v) for v in table["worker_time_max_over_min"]],
        "bubbles": [percent(v) for v in table["bubble_fraction"]],
        "tokens": [f"{v:,}" for v in table["executed_tokens"]],
        f"memory ({memory.name})": memory.column(table["peak_memory_bytes"].tolist()),
        "ratio": [times(v) for v in table["memory_ratio"]],
        f"K/V ({kv.name})": kv.column(table["peak_kv_bytes"].tolist()),
    }
    if table["gap"].notna().any():
        shown["gap"] = ["-" if math.isnan(v) else f"{100 * v:.2f} %" for v in table["gap"]]
    if table["plan_time_s"].notna().any():
        shown["planning (s)"] = [number(v) for v in table["plan_time_s"]]
    return pd.DataFrame(shown)


def format_comparison(table: pd.DataFrame) -> str:
    """A comparison table for the terminal."""
    return aligned(display_table(table))


def executed_table(run: Path, baseline: str = "verl") -> pd.DataFrame:
    """What ran on devices: a row per policy and phase, and one per policy with phase "all".

    Columns: policy, phase, executed_tokens, makespan_s, speedup (NaN unless the baseline ran),
    peak_memory_bytes, peak_kv_bytes.

    Raises:
        ConfigError: if nothing was executed, or a file is missing.
    """
    comparison = load_comparison(run, baseline)
    if not comparison.executed:
        raise ConfigError(
            f"{run / 'executed'} holds no run", "run one of its plans with `psrl execute` first"
        )
    return measured_table(comparison)


def measured_table(comparison: Comparison) -> pd.DataFrame:
    """`executed_table` of a run that is loaded already."""
    columns = ("executed_tokens", "makespan_s", "peak_memory_bytes", "peak_kv_bytes")
    rows = []
    base = comparison.executed.get(comparison.baseline)
    for policy, metrics in comparison.executed.items():
        for phase, entry in (*metrics["phases"].items(), ("all", metrics)):
            row = {"policy": policy, "phase": phase} | {c: entry[c] for c in columns}
            reference = base and (base if phase == "all" else base["phases"].get(phase))
            row["speedup"] = (
                reference["makespan_s"] / entry["makespan_s"] if reference else math.nan
            )
            rows.append(row)
    order = ["policy", "phase", "executed_tokens", "makespan_s", "speedup", *columns[2:]]
    return pd.DataFrame(rows, columns=order)


def format_executed(table: pd.DataFrame) -> str:
    """An executed table for the terminal."""
    return aligned(display_executed(table))


def display_executed(table: pd.DataFrame) -> pd.DataFrame:
    """The executed table as texts with one unit per column."""
    time = time_unit(table["makespan_s"].max())
    memory = bytes_unit(table["peak_memory_bytes"].max())
    kv = bytes_unit(table["peak_kv_bytes"].max())
    return pd.DataFrame(
        {
            "policy": table["policy"],
            "phase": table["phase"],
            "tokens": [f"{v:,}" for v in table["executed_tokens"]],
            f"time ({time.name})": time.column(table["makespan_s"].tolist()),
            "speed-up": [times(v) for v in table["speedup"]],
            f"memory ({memory.name})": memory.column(table["peak_memory_bytes"].tolist()),
            f"K/V ({kv.name})": kv.column(table["peak_kv_bytes"].tolist()),
        }
    )


def aligned(shown: pd.DataFrame) -> str:
    """Columns padded to their widest cell: names left, numbers right."""
    columns = [[name, *map(str, shown[name])] for name in shown.columns]
    padded = []
    for name, cells in zip(shown.columns, columns, strict=True):
        width = max(map(len, cells))
        left = name in ("policy", "phase", "rung")
        padded.append([c.ljust(width) if left else c.rjust(width) for c in cells])
    lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
