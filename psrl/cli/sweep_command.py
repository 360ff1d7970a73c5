"""`psrl sweep`: policies over device counts and traces."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psrl.api.inputs import on_hosts
from psrl.core.errors import ExitCode
from psrl.core.files import IfExists
from psrl.core.plan.policy_names import DEFAULT_POLICIES
from psrl.core.run.config import Setup, load_setup
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import Trace, open_trace

from .output import OutputOptions, format_warnings

if TYPE_CHECKING:
    import pandas as pd

    from psrl.api.comparison import PolicyComparison

_COPIED = (
    "makespan_s",
    "logical_tokens_per_s",
    "worker_time_max_over_min",
    "bubble_fraction",
    "peak_memory_bytes",
)


@dataclass(frozen=True)
class Sweep:
    """Simulate policies over several traces and cluster sizes: scaling and prefix-rate curves."""

    trace: tuple[Path, ...]
    """trace directories; several draw the speed-up against the prefix-match rate"""
    cluster: Path
    """cluster file (TOML)"""
    run_dir: Path
    """run directory to write"""
    output: OutputOptions
    policies: tuple[str, ...] = DEFAULT_POLICIES
    """merged_dense, dense training of step samples merged where that is exact, is added to them"""
    baseline: str = "verl"
    """policy that speed-ups refer to; it must be among the policies"""
    hosts: tuple[int, ...] = ()
    """numbers of hosts, with the data-parallel size in proportion; default the file's own"""
    iteration: int = 0
    set: tuple[str, ...] = ()
    """change a value of the cluster file, e.g. planning.search_iterations=0"""
    if_exists: IfExists = "error"

    def run(self) -> ExitCode:
        import pandas as pd

        from psrl.analysis.figures.sweep_plots import write_sweep_figures
        from psrl.analysis.tables import write_csv
        from psrl.api.comparison import compare

        setup = load_setup(self.cluster, self.set)
        setups = [on_hosts(setup, n) for n in self.hosts or (setup.cluster.num_hosts,)]
        traces = [open_trace(path) for path in self.trace]
        rows: list[dict[str, Any]] = []
        warnings: dict[str, None] = {}
        details, inputs = {"kind": "sweep"}, (self.cluster, *self.trace)
        with RunDir(self.run_dir, "sweep", self.if_exists, details, inputs) as run:
            for trace in traces:
                for one in setups:
                    compared = compare(
                        trace,
                        one,
                        self.policies,
                        baseline=self.baseline,
                        iteration=self.iteration,
                        keep_infeasible=True,
                        step=self._step(trace, one),
                        progress=self.output.progress,
                    )
                    rows += sweep_rows(compared)
                    for policy_run in compared.runs.values():
                        warnings |= dict.fromkeys(policy_run.metrics["warnings"])
            table = pd.DataFrame(rows)
            write_csv(table, run.path / "sweep.csv")
            drawn = write_sweep_figures(table, run.path / "plots")
            result = {"run": str(self.run_dir), "rows": rows, "warnings": list(warnings)}
            run.write_json("metrics.json", result)
        lines = [format_sweep(table), *format_warnings(warnings)]
        lines += [f"picture: {self.run_dir / 'plots' / path.name}" for path in drawn.values()]
        self.output.emit(result, "\n".join(lines))
        return ExitCode.OK

    def _step(self, trace: Trace, setup: Setup) -> Callable[[str], AbstractContextManager[None]]:
        where = f"{trace.path.name} on {setup.cluster.num_devices:,} devices"
        return lambda what: self.output.step(f"{where}: {what}")


def sweep_rows(compared: "PolicyComparison") -> list[dict[str, Any]]:
    """A row per policy, the baseline first; NaN and a reason where it does not fit."""
    setup, runs = compared.problem.setup, compared.runs
    base = runs.get(compared.baseline)
    summary = None if base is None else compared.summary()
    rows = []
    for policy in compared.names:
        row: dict[str, Any] = {
            "trace": compared.trace.path.name,
            "num_devices": setup.cluster.num_devices,
            "data_parallel_size": setup.parallel.data_parallel_size,
            "policy": policy,
            "speedup": math.nan,
            "speedup_bound": math.nan,
            "reason": compared.infeasible.get(policy, ""),
        }
        row |= dict.fromkeys(_COPIED, math.nan)
        if policy in runs:
            row |= {name: runs[policy].metrics[name] for name in (*_COPIED, "prefix_match_rate")}
            if summary is not None:
                row["speedup"] = summary.speedup(policy)
                row["speedup_bound"] = summary.bound(policy)
        rows.append(row)
    return rows


def format_sweep(table: "pd.DataFrame") -> str:
    """A line per trace, device count and policy."""
    lines = [
        f"{'trace':<24}{'match':>8}{'devices':>9}  {'policy':<18}{'time':>11}{'speed-up':>10}"
        f"{'tokens/s':>14}{'max/min':>9}"
    ]
    for row in table.to_dict("records"):
        start = f"{row['trace'][:23]:<24}"
        where = f"{row['num_devices']:>9,}  {row['policy']:<18}"
        if row["reason"]:
            lines.append(f"{start}{'':>8}{where}  {row['reason'].split(';')[0]}")
            continue
        ratio, speedup = row["worker_time_max_over_min"], row["speedup"]
        gain = "-" if math.isnan(speedup) else f"{speedup:.2f}x"
        lines.append(
            f"{start}{row['prefix_match_rate']:>8.1%}{where}{row['makespan_s']:>9.3f} s"
            f"{gain:>10}{row['logical_tokens_per_s']:>14,.0f}{ratio:>9.2f}"
        )
    return "\n".join(lines)
