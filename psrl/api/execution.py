"""Plans executed with Megatron-core, and whether two executions agree."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psrl.analysis.compare_runs import TOLERANCE, exactness
from psrl.backend.options import ExecuteOptions
from psrl.core.errors import ToleranceError
from psrl.core.files import IfExists
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.plan import Plan
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import Trace


def execute(
    plan: Plan,
    trace: Trace,
    run_dir: str | Path,
    options: ExecuteOptions | None = None,
    *,
    plan_path: str | Path | None = None,
    if_exists: IfExists = "error",
) -> dict[str, Any]:
    """Check a plan and run its phases, one process per rank on this machine.

    Under torchrun every process calls this and runs one rank; the first writes the directory.

    Args:
        run_dir: gets metrics.json, events.parquet, logprobs.parquet and, with
            `options.keep_gradients`, gradients.safetensors.
        plan_path: where the plan lies, for the manifest.

    Returns:
        The metrics of docs/metrics.md, with loss and gradient norm per optimizer step.

    Raises:
        PlanError: if the plan belongs to another trace or breaks a rule.
        BackendError: if something cannot be executed exactly, with what to change.
    """
    from psrl.backend.io.output import execute_to_directory
    from psrl.backend.launch import is_first_process

    options = options or ExecuteOptions()
    if not is_first_process():
        return execute_to_directory(plan, trace, options, Path(os.devnull))
    check_plan(plan, plan.batch_of(trace))
    details: dict[str, Any] = {"trace_hash": plan.trace_hash, "kind": "executed"}
    details["seed"] = options.seed
    inputs = [trace.path]
    if plan_path is not None:
        details["plan"] = str(plan_path)
        inputs.append(Path(plan_path))
    with RunDir(Path(run_dir), "execute", if_exists, details, inputs) as run:
        metrics = execute_to_directory(plan, trace, options, run.path)
        run.write_json("metrics.json", metrics)
    return metrics


def verify(
    run_a: str | Path, run_b: str | Path, tolerance: float = TOLERANCE
) -> list[dict[str, Any]]:
    """Largest relative differences of logprobs, loss and gradients of two executed runs.

    Args:
        run_b: the reference.

    Raises:
        ToleranceError: naming the worst quantity beyond the tolerance.
        ConfigError: if the runs are not of one trace, or a file is missing.
    """
    rows = exactness(Path(run_a), Path(run_b), tolerance)
    require_exact(rows)
    return rows


def require_exact(rows: Sequence[dict[str, Any]]) -> None:
    """Raise unless all differences of `exactness` are within their tolerances.

    Raises:
        ToleranceError: naming the worst quantity.
    """
    for row in rows:
        # Written so that NaN fails too.
        if not row["largest_relative_difference"] <= row["tolerance"]:
            raise ToleranceError(
                f"{row['quantity']} differs by {row['largest_relative_difference']:.1e}, more "
                f"than {row['tolerance']:.1e}",
                "sharing changed a result: check that both runs used the same weights and dtype",
            )
