"""`psrl execute` and `psrl verify`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from psrl.core.errors import ExitCode, ToleranceError
from psrl.core.plan import Plan
from psrl.core.run import IfExists, RunDir
from psrl.core.trace import Trace, open_trace

from .output import OutputOptions
from .plan_commands import describe_metrics, plan_batch

TOLERANCE = {"float32": 5e-6, "float64": 1e-10, "bfloat16": 2.5e-2}


@dataclass(frozen=True)
class Execute:
    """Run a plan's phases with Megatron-core: log-old-prob, reference, update."""

    plan: tyro.conf.Positional[Path]
    """plan directory"""
    trace: Path
    """the trace that the plan was made for"""
    run_dir: Path
    """run directory to write"""
    output: OutputOptions
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    seed: int = 0
    """seed of the random initial weights"""
    save_gradients: bool = True
    """keep the gradients, so that `psrl verify` can compare two runs"""
    if_exists: IfExists = "error"

    def run(self) -> ExitCode:
        raise SystemExit


@dataclass(frozen=True)
class Verify:
    """Compare logprobs, loss and gradients of two executed runs of the same trace."""

    run_a: tyro.conf.Positional[Path]
    run_b: tyro.conf.Positional[Path]
    output: OutputOptions
    tolerance: float = 5e-6
    """largest relative difference that passes"""

    def run(self) -> ExitCode:
        from psrl.analysis.compare_runs import exactness

        rows = exactness(self.run_a, self.run_b)
        self.output.emit({"differences": rows, "tolerance": self.tolerance}, format_exactness(rows))
        worst = max(rows, key=lambda row: float(row["largest_relative_difference"]))
        if worst["largest_relative_difference"] > self.tolerance:
            raise ToleranceError(
                f"{worst['quantity']} differs by {worst['largest_relative_difference']:.1e}, "
                f"more than {self.tolerance:.1e}"
            )
        return ExitCode.OK


def format_exactness(rows: list[dict[str, Any]]) -> str:
    """One line per compared quantity."""
    return "\n".join(
        f"{row['quantity']:<12} largest relative difference "
        f"{row['largest_relative_difference']:.1e}"
        for row in rows
    )
def execute_policies(run: RunDir, plans: dict[str, Plan], trace: Trace, output: OutputOptions) -> str:
    return ""
