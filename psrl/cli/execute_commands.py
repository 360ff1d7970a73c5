"""`psrl execute` and `psrl verify`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from psrl.backend.executable import check_executable
from psrl.backend.options import ExecuteOptions, changed
from psrl.core.errors import ConfigError, ExitCode
from psrl.core.files import IfExists, write_file
from psrl.core.plan.plan import Plan
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import Trace, open_trace

from .output import OutputOptions, describe_metrics


@dataclass(frozen=True)
class Execute:
    """Run a plan's phases with Megatron-core: log-old-prob, reference, update.

    Starts one process per rank on this machine, or joins the processes that torchrun started.
    With --emit it only writes a script that starts them.
    """

    plan: tyro.conf.Positional[Path]
    """plan directory"""
    trace: Path
    """the trace that the plan was made for"""
    run_dir: Path
    """run directory to write"""
    execution: ExecuteOptions
    output: OutputOptions
    if_exists: IfExists = "error"
    emit: Literal["torchrun", "sbatch"] | None = None
    """write RUN_DIR.sh, which runs the plan on the hosts of its cluster, and run nothing"""

    def run(self) -> ExitCode:
        plan, trace = Plan.load(self.plan), open_trace(self.trace)
        check_executable(plan, trace, self.execution)
        if self.emit is not None:
            return self._emit(plan, self.emit)
        from psrl.api.execution import execute
        from psrl.backend.launch import is_first_process

        run = partial(execute, plan, trace, self.run_dir, self.execution, plan_path=self.plan)
        if not is_first_process():
            run()
            return ExitCode.OK
        with self.output.step(f"executing {plan.policy} on {plan.parallel.world_size} process(es)"):
            metrics = run(if_exists=self.if_exists)
        text = describe_metrics(metrics)
        for key, what in (("resumed_from", "resumed from"), ("checkpoint", "saved checkpoint")):
            if key in metrics:
                text += f"\n{what} {metrics[key]}"
        self.output.emit(metrics, text)
        return ExitCode.OK

    def _emit(self, plan: Plan, kind: Literal["torchrun", "sbatch"]) -> ExitCode:
        from psrl.backend.io.launch_scripts import launch_script

        path = self.run_dir.with_name(self.run_dir.name + ".sh")
        if path.exists() and self.if_exists == "error":
            raise ConfigError(f"{path} exists already", "pass --if-exists overwrite")
        write_file(path, launch_script(kind, plan, self.command_line(), path.name))
        self.output.emit({"script": str(path)}, f"wrote {path}")
        return ExitCode.OK

    def command_line(self) -> list[str]:
        """This command without --emit, with absolute paths, as a list of arguments."""
        command = ["psrl", "execute", str(self.plan.resolve())]
        command += ["--trace", str(self.trace.resolve()), "--run-dir", str(self.run_dir.resolve())]
        for flag, value in changed(self.execution):
            command.append(flag)
            if value is not True:
                command.append(str(value.resolve() if isinstance(value, Path) else value))
        if self.if_exists != "error":
            command += ["--if-exists", self.if_exists]
        return command


@dataclass(frozen=True)
class Verify:
    """Compare logprobs, loss and gradients of two executed runs of the same trace."""

    run_a: tyro.conf.Positional[Path]
    run_b: tyro.conf.Positional[Path]
    output: OutputOptions
    tolerance: float = 5e-6
    """largest relative difference that passes; float32"""

    def run(self) -> ExitCode:
        from psrl.analysis.compare_runs import exactness
        from psrl.api.execution import require_exact

        rows = exactness(self.run_a, self.run_b, self.tolerance)
        self.output.emit({"differences": rows, "tolerance": self.tolerance}, format_exactness(rows))
        require_exact(rows)
        return ExitCode.OK


def execute_policies(
    run: RunDir,
    policies: Sequence[str],
    baseline: str,
    trace: Trace,
    options: ExecuteOptions,
    tolerance: float,
    output: OutputOptions,
) -> list[dict[str, Any]]:
    """Execute the saved plans of a comparison; compare each result with the baseline's.

    Returns:
        Largest relative differences, as `psrl verify` reports them, over all policies.
    """
    from psrl.analysis.compare_runs import exactness
    from psrl.api.execution import execute

    for name in policies:
        folder = run.path / "policies" / name / "plan"
        plan = Plan.load(folder)
        with output.step(f"executing {name} on {plan.parallel.world_size} process(es)"):
            execute(plan, trace, run.path / "executed" / name, options, plan_path=folder)
    executed = run.path / "executed"
    rows: dict[str, dict[str, Any]] = {}
    for name in policies:
        for row in (
            exactness(executed / name, executed / baseline, tolerance) if name != baseline else []
        ):
            worst = rows.setdefault(row["quantity"], row)
            if row["largest_relative_difference"] > worst["largest_relative_difference"]:
                rows[row["quantity"]] = row
    run.write_json("exactness.json", list(rows.values()))
    return list(rows.values())


def format_exactness(rows: Sequence[dict[str, Any]]) -> str:
    """One line per compared quantity."""
    return "\n".join(
        f"{row['quantity']:<28} largest relative difference "
        f"{row['largest_relative_difference']:.1e}"
        for row in rows
    )
