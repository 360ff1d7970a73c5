"""`psrl compare`: policies on one trace, or a simulated run against the executed one."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.backend.options import DTYPE_OF_BYTES, ExecuteOptions, PhaseOptions, changed
from psrl.core.cost.calibrated_cost_model import prediction_warnings
from psrl.core.errors import ConfigError, ExitCode
from psrl.core.files import IfExists
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.config import Setup, load_setup
from psrl.core.run.events import Events
from psrl.core.run.metrics import run_metrics
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace, open_trace

from .execute_commands import execute_policies, format_exactness, require_exact
from .output import OutputOptions, print_result
from .plan_commands import format_warnings
from .trace_output import format_stats, mode_stats

# Largest relative difference that rounding explains.
TOLERANCE = {"bfloat16": 2.5e-2, "float32": 5e-6, "float64": 1e-10}
DEFAULT_POLICIES = ("verl", "sglang_ps", "dfs_cut", "psrl")


@dataclass(frozen=True)
class Compare:
    """Plan and simulate a trace under several policies: table, plots, self-contained report.

    With --measured and --simulated instead of --trace and --cluster: how well a simulated run
    agrees with the executed run of the same plan, in time, op order, cached bytes and memory.
    """

    execution: PhaseOptions
    output: OutputOptions
    trace: Path | None = None
    """trace directory"""
    cluster: Path | None = None
    """cluster file (TOML)"""
    run_dir: Path | None = None
    """run directory to write; optional with --measured"""
    measured: Path | None = None
    """run directory of `psrl execute`, to compare with --simulated"""
    simulated: Path | None = None
    """run directory of `psrl simulate` for the same plan"""
    tolerance: float = 0.1
    """largest relative error of a phase's time and peak memory with --measured; exit code 4 beyond
    it, or if op order or cached bytes differ at all"""
    policies: tuple[str, ...] = DEFAULT_POLICIES
    baseline: str = "verl"
    """policy that speed-ups refer to; it must be among the policies"""
    execute: tuple[str, ...] = ()
    """also execute these policies' plans on this machine and compare their results"""
    iteration: int = 0
    set: tuple[str, ...] = ()
    """change a value of the cluster file, e.g. parallel.data_parallel_size=4"""
    if_exists: IfExists = "error"

    def run(self) -> ExitCode:
        if not self.execute:
            self._refuse_execution()
        if self.measured is not None or self.simulated is not None:
            return self._compare_with_measured()
        if self.trace is None or self.cluster is None or self.run_dir is None:
            raise ConfigError(
                "compare needs a trace, a cluster and a run directory, or two runs",
                "pass --trace, --cluster and --run-dir, or --measured and --simulated",
            )
        return self._compare_policies(self.trace, self.cluster, self.run_dir)

    def _refuse_execution(self) -> None:
        if given := " and ".join(flag for flag, _ in changed(self.execution)):
            raise ConfigError(
                f"{given} would have no effect: no plan is executed",
                "add --execute POLICY ..., or leave these flags out",
            )

    def _compare_with_measured(self) -> ExitCode:
        from .agreement import compare_with_measured

        others = (self.trace, self.cluster, self.execute)
        if self.measured is None or self.simulated is None or any(others):
            raise ConfigError(
                "a measured run is compared with a simulated one and nothing else",
                "pass --measured RUN and --simulated RUN, without --trace, --cluster and --execute",
            )
        return compare_with_measured(
            self.measured,
            self.simulated,
            self.tolerance,
            self.run_dir,
            self.if_exists,
            self.output,
        )

    def _compare_policies(self, trace_path: Path, cluster: Path, run_dir: Path) -> ExitCode:
        from psrl.analysis.report.report import write_report
        from psrl.analysis.tables import (
            executed_table,
            format_comparison,
            format_executed,
            write_comparison,
        )

        self._check_names()
        setup = load_setup(cluster, self.set)
        trace = open_trace(trace_path)
        batch = trace.iteration(self.iteration)
        if self.execute:
            self.execution.check(setup.model, PHASES)
        details = {"trace_hash": trace.content_hash, "kind": "comparison"}
        dtype = self.execution.dtype or DTYPE_OF_BYTES[setup.cluster.device.dtype_bytes]
        tolerance = TOLERANCE[dtype]
        differences: list[dict[str, Any]] = []
        inputs = [trace_path, cluster]
        with RunDir(run_dir, "compare", self.if_exists, details, inputs) as run:
            stats = mode_stats(trace, batch)
            self._say(format_stats(stats))
            self._write_inputs(run, setup, trace, stats)
            plan_time_s, warnings = self._plan_and_simulate(run, setup, trace, batch)
            run.note(plan_time_s=plan_time_s)
            if self.execute:
                options = ExecuteOptions(**vars(self.execution), keep_gradients=True)
                differences = execute_policies(
                    run, self.execute, self.baseline, trace, options, tolerance, self.output
                )
            with self.output.step("writing tables, plots and report"):
                table = write_comparison(run.path, self.baseline)
                write_report(run.path, self.baseline, run_dir)
            table["plan_time_s"] = [plan_time_s[name] for name in table["policy"]]
            text = "\nsimulated\n" + format_comparison(table)
            if warnings:
                text += "\n\n" + "\n".join(format_warnings(warnings))
            if self.execute:
                executed = executed_table(run.path, self.baseline)
                text += "\n\nexecuted\n" + format_executed(executed)
                text += f"\n\nagainst {self.baseline}\n" + format_exactness(differences)
        result = {
            "run": str(run_dir),
            "policies": table.to_dict("records"),
            "differences": differences,
            "warnings": warnings,
        }
        self.output.emit(result, f"{text}\n\nreport: {run_dir / 'report.html'}")
        require_exact(differences)
        return ExitCode.OK

    def _say(self, text: str) -> None:
        if not self.output.json:
            print_result(text)

    def _check_names(self) -> None:
        for name in self.policies:
            if "/" in name:
                raise ConfigError(
                    f"policy {name!r}: a comparison keeps each policy in a folder of its name",
                    "pass module:function, or file.py:function from the file's own folder",
                )
        executed = (self.baseline, *self.execute) if self.execute else ()
        if self.execute and self.baseline not in self.execute:
            raise ConfigError(
                f"the baseline {self.baseline!r} is not executed, so nothing can be compared",
                f"add it: --execute {' '.join((self.baseline, *self.execute))}",
            )
        for name in (self.baseline, *executed):
            if name not in self.policies:
                raise ConfigError(
                    f"{name!r} is not among the compared policies {', '.join(self.policies)}",
                    f"add it: --policies {' '.join((*self.policies, name))}",
                )

    def _write_inputs(
        self, run: RunDir, setup: Setup, trace: Trace, stats: dict[str, dict[str, Any]]
    ) -> None:
        header = trace.header
        run.write_json("setup.json", setup.model_dump())
        run.write_json(
            "config.json",
            {
                "trace": str(self.trace),
                "cluster": str(self.cluster),
                "iteration": self.iteration,
                "policies": list(self.policies),
                "baseline": self.baseline,
                "set": list(self.set),
            },
        )
        run.write_json(
            "sharing.json",
            {
                **stats,
                "trace": {
                    "path": str(self.trace),
                    "content_hash": trace.content_hash,
                    "source": header.source,
                    "licence": header.licence,
                    "sampling_mode": header.sampling_mode,
                },
            },
        )

    def _plan_and_simulate(
        self, run: RunDir, setup: Setup, trace: Trace, batch: SampleBatch
    ) -> tuple[dict[str, float], list[str]]:
        """Planning time per policy, and warnings about the predictions."""
        from psrl.analysis.report.merge_warnings import merge_warnings
        from psrl.planner import PlanningProblem, make_plan
        from psrl.sim.breakdown import speedup_factors
        from psrl.sim.replay.engine import simulate

        from .simulate_output import iteration_section, show_progress

        problem = PlanningProblem(batch, trace.content_hash, self.iteration, setup)
        plans: dict[str, Plan] = {}
        events: dict[str, Events] = {}
        plan_time_s: dict[str, float] = {}
        warnings: dict[str, tuple[str, ...]] = {}
        for name in self.policies:
            folder = run.path / "policies" / name
            folder.mkdir(parents=True)
            with self.output.step(f"planning and simulating {name}"):
                started_s = time.perf_counter()
                plans[name] = make_plan(problem, name)
                plan_time_s[name] = time.perf_counter() - started_s
                plans[name].save(folder / "plan")
                progress = None if self.output.quiet or self.output.json else show_progress()
                events[name] = simulate(plans[name], batch, progress=progress)
            events[name].save(folder / "events.parquet")
            metrics = run_metrics(plans[name], batch, events[name])
            warnings[name] = prediction_warnings(plans[name])
            metrics["warnings"] = list(warnings[name])
            metrics |= iteration_section(batch, metrics, None, None)
            run.write_json(f"policies/{name}/metrics.json", metrics)
        for name in self.policies:
            factors = speedup_factors(
                plans[self.baseline], events[self.baseline], plans[name], events[name], batch
            )
            run.write_json(f"policies/{name}/factors.json", factors)
        return plan_time_s, merge_warnings(warnings)
