"""`psrl sweep`: policies over device counts and traces."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psrl.core.cost.calibrated_cost_model import prediction_warnings
from psrl.core.cost.cluster import check_layout
from psrl.core.errors import ConfigError, ExitCode, InfeasibleError
from psrl.core.files import IfExists
from psrl.core.run.config import Setup, load_setup
from psrl.core.run.metrics import run_metrics
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import Trace, open_trace

from .compare_command import DEFAULT_POLICIES
from .output import OutputOptions
from .plan_commands import format_warnings

if TYPE_CHECKING:
    import pandas as pd

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

        if self.baseline not in self.policies:
            raise ConfigError(
                f"the baseline {self.baseline!r} is not among {', '.join(self.policies)}",
                f"add it: --policies {' '.join((self.baseline, *self.policies))}",
            )
        setup = load_setup(self.cluster, self.set)
        setups = [on_hosts(setup, n) for n in self.hosts or (setup.cluster.num_hosts,)]
        traces = [open_trace(path) for path in self.trace]
        rows: list[dict[str, Any]] = []
        warnings: dict[str, None] = {}
        inputs = [*self.trace, self.cluster]
        with RunDir(self.run_dir, "sweep", self.if_exists, {"kind": "sweep"}, inputs) as run:
            for trace in traces:
                for one in setups:
                    rows += self._policies(trace, one, warnings)
            table = pd.DataFrame(rows)
            write_csv(table, run.path / "sweep.csv")
            drawn = write_sweep_figures(table, run.path / "plots")
            result = {"run": str(self.run_dir), "rows": rows, "warnings": list(warnings)}
            run.write_json("metrics.json", result)
        lines = [format_sweep(table), *format_warnings(warnings)]
        lines += [f"picture: {self.run_dir / 'plots' / path.name}" for path in drawn.values()]
        self.output.emit(result, "\n".join(lines))
        return ExitCode.OK

    def _policies(
        self, trace: Trace, setup: Setup, warnings: dict[str, None]
    ) -> list[dict[str, Any]]:
        from psrl.planner import PlanningProblem, make_plan
        from psrl.sim import simulate

        from .simulate_output import show_progress

        batch = trace.iteration(self.iteration)
        problem = PlanningProblem(batch, trace.content_hash, self.iteration, setup)
        rows: list[dict[str, Any]] = []
        for policy in (self.baseline, *(p for p in self.policies if p != self.baseline)):
            row: dict[str, Any] = {
                "trace": trace.path.name,
                "num_devices": setup.cluster.num_devices,
                "data_parallel_size": setup.parallel.data_parallel_size,
                "policy": policy,
                "speedup": math.nan,
                "reason": "",
            }
            row |= dict.fromkeys(_COPIED, math.nan)
            progress = None if self.output.quiet or self.output.json else show_progress()
            what = f"{trace.path.name} on {setup.cluster.num_devices:,} devices with {policy}"
            try:
                with self.output.step(what):
                    plan = make_plan(problem, policy)
                    events = simulate(plan, batch, progress=progress)
                metrics = run_metrics(plan, batch, events)
                row |= {name: metrics[name] for name in (*_COPIED, "prefix_match_rate")}
                warnings |= dict.fromkeys(prediction_warnings(plan))
            except InfeasibleError as error:
                row["reason"] = error.message
            rows.append(row)
            row["speedup"] = rows[0]["makespan_s"] / row["makespan_s"]
        return rows


def on_hosts(setup: Setup, num_hosts: int) -> Setup:
    """The setup on another number of hosts, with the data-parallel size in proportion.

    Raises:
        ConfigError: if that size is not whole.
    """
    before, data = setup.cluster.num_hosts, setup.parallel.data_parallel_size
    if num_hosts < 1 or data * num_hosts % before:
        raise ConfigError(
            f"{num_hosts} hosts: data_parallel_size {data} * {num_hosts} / {before} is not a "
            "positive whole number",
            f"choose multiples of {before // math.gcd(before, data)} hosts",
        )
    cluster = setup.cluster.model_copy(update={"num_hosts": num_hosts})
    size = {"data_parallel_size": data * num_hosts // before}
    parallel = setup.parallel.model_copy(update=size)
    check_layout(setup.model, cluster, parallel)
    return setup.model_copy(update={"cluster": cluster, "parallel": parallel})


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
