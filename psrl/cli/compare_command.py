"""`psrl compare`: policies on one trace, or a simulated run against the executed one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.backend.options import DTYPE_OF_BYTES, ExecuteOptions, PhaseOptions, changed
from psrl.core.errors import ConfigError, ExitCode, ToleranceError
from psrl.core.files import IfExists
from psrl.core.plan.plan import PHASES
from psrl.core.plan.policy_names import DEFAULT_POLICIES
from psrl.core.run.config import load_setup
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import open_trace

from .execute_commands import execute_policies, format_exactness
from .output import OutputOptions, format_warnings
from .trace_commands import format_stats

# Largest relative difference that rounding explains.
TOLERANCE = {"bfloat16": 2.5e-2, "float32": 5e-6, "float64": 1e-10}


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
    """merged_dense, dense training of step samples merged where that is exact, is added to them"""
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

    def _compare_policies(self, trace_path: Path, cluster: Path, run_dir: Path) -> ExitCode:
        from psrl.analysis.report.ladder import display_ladder, ladder
        from psrl.analysis.report.report import write_report
        from psrl.analysis.report.sentences import merging_sentence
        from psrl.analysis.tables import (
            aligned,
            executed_table,
            format_comparison,
            format_executed,
            write_comparison,
        )
        from psrl.api.comparison import compare, comparison_details
        from psrl.api.execution import require_exact

        self._check_names()
        setup, trace = load_setup(cluster, self.set), open_trace(trace_path)
        if self.execute:
            self.execution.check(setup.model, PHASES)
        dtype = self.execution.dtype or DTYPE_OF_BYTES[setup.cluster.device.dtype_bytes]
        tolerance = TOLERANCE[dtype]
        differences: list[dict[str, Any]] = []
        details, inputs = comparison_details(trace), (trace_path, cluster)
        with RunDir(run_dir, "compare", self.if_exists, details, inputs) as run:
            compared = compare(
                trace,
                setup,
                self.policies,
                baseline=self.baseline,
                iteration=self.iteration,
                step=self.output.step,
                progress=self.output.progress,
            )
            compared.write(run, {"cluster": str(cluster), "set": list(self.set)})
            if self.execute:
                options = ExecuteOptions(**vars(self.execution), keep_gradients=True)
                differences = execute_policies(
                    run, self.execute, self.baseline, trace, options, tolerance, self.output
                )
            with self.output.step("writing tables, plots and report"):
                write_comparison(run.path, self.baseline)
                write_report(run.path, self.baseline, run_dir)
            executed = executed_table(run.path, self.baseline) if self.execute else None
        table, warnings, summary = compared.table(), compared.warnings, compared.summary()
        parts = [format_stats(compared.sharing), "simulated\n" + format_comparison(table)]
        rungs = ladder(summary)
        if len(rungs):
            parts.append(f"ladder\n{aligned(display_ladder(rungs))}")
        if summary.merging is not None:
            parts.append(merging_sentence(summary))
        if warnings:
            parts.append("\n".join(format_warnings(warnings)))
        if executed is not None:
            parts.append("executed\n" + format_executed(executed))
            parts.append(f"against {self.baseline}\n" + format_exactness(differences))
        result = {
            "run": str(run_dir),
            "policies": table.to_dict("records"),
            "ladder": rungs.to_dict("records"),
            "merging": summary.merging,
            "differences": differences,
            "warnings": warnings,
        }
        parts.append(f"report: {run_dir / 'report.html'}")
        self.output.emit(result, "\n\n".join(parts))
        require_exact(differences)
        return ExitCode.OK

    def _check_names(self) -> None:
        for name in self.policies:
            if "/" in name:
                raise ConfigError(
                    f"policy {name!r}: a comparison keeps each policy in a folder of its name",
                    "pass module:function, or file.py:function from the file's own folder",
                )
        if self.execute and self.baseline not in self.execute:
            raise ConfigError(
                f"the baseline {self.baseline!r} is not executed, so nothing can be compared",
                f"add it: --execute {' '.join((self.baseline, *self.execute))}",
            )
        for name in self.execute:
            if name not in self.policies:
                raise ConfigError(
                    f"{name!r} is not among the compared policies {', '.join(self.policies)}",
                    f"add it: --policies {' '.join((*self.policies, name))}",
                )

    def _compare_with_measured(self) -> ExitCode:
        """Print the agreement of two runs of one plan, phase by phase.

        Raises:
            ToleranceError: if they disagree.
        """
        from psrl.analysis.figures.agreement_plots import write_kv_curves
        from psrl.analysis.simulated_vs_measured import (
            agreement,
            disagreements,
            format_agreement,
            kv_curves,
        )
        from psrl.analysis.tables import write_csv

        measured, simulated, others = (
            self.measured,
            self.simulated,
            (self.trace, self.cluster, self.execute),
        )
        if measured is None or simulated is None or any(others):
            raise ConfigError(
                "a measured run is compared with a simulated one and nothing else",
                "pass --measured RUN and --simulated RUN, without --trace, --cluster and --execute",
            )
        if not self.tolerance >= 0:
            raise ConfigError(f"--tolerance {self.tolerance} is negative", "0.1 means 10 %")
        table = agreement(measured, simulated)
        found = disagreements(table, self.tolerance)
        rows = table.to_dict("records")
        result = {"phases": rows, "tolerance": self.tolerance, "disagreements": found}
        text = format_agreement(table)
        if self.run_dir is not None:
            details = {"kind": "agreement", "measured": str(measured), "simulated": str(simulated)}
            inputs = (measured, simulated)
            with RunDir(self.run_dir, "compare", self.if_exists, details, inputs) as run:
                run.write_json("metrics.json", result)
                write_csv(table, run.path / "agreement.csv")
                write_kv_curves(kv_curves(measured, simulated), run.path / "plots")
            text += f"\n\nwritten: {self.run_dir}"
        self.output.emit(result, text)
        if found:
            raise ToleranceError(
                f"{len(found)} disagreement(s) beyond {self.tolerance:.1%}: " + "; ".join(found),
                "calibrate with `psrl calibrate --measured`, simulate with --calibration, and "
                "execute with --warmup and --repeat on an idle machine",
            )
        return ExitCode.OK
