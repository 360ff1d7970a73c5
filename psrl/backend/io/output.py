"""Writes what an execution leaves behind into a run directory."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from safetensors.torch import save_file

from psrl.backend.executable import check_executable
from psrl.backend.execute import execute_plan
from psrl.backend.execution import Execution
from psrl.backend.launch import in_torchrun, is_first_process, run_ranks
from psrl.backend.options import ExecuteOptions
from psrl.backend.train.inputs import LossTokens
from psrl.backend.train.token_advantages import read_token_advantages
from psrl.core.files import remove_leftovers
from psrl.core.plan.plan import Plan
from psrl.core.run.metrics import run_metrics
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace

from .checkpoint import check_resumable, latest_checkpoint


def execution_metrics(plan: Plan, batch: SampleBatch, execution: Execution) -> dict[str, Any]:
    """`run_metrics`, with loss and gradient norm per mini-batch, and how far the policy moved.

    `max_ratio_deviation` is the largest |update probability / old probability - 1| over the
    first mini-batch, before any step: rounding only, if phases agree.
    """
    metrics = run_metrics(plan, batch, execution.events)
    metrics |= {
        "loss": execution.loss,
        "gradient_norm": execution.gradient_norm,
        "skipped_mini_batches": execution.skipped_mini_batches,
        "router_loss": execution.router_loss,
        "expert_load_max_over_mean": [
            float((load.max(axis=1) / load.mean(axis=1)).max()) for load in execution.expert_load
        ],
        "dtype": execution.dtype,
        "implementation": execution.implementation,
    }
    for key, path in (
        ("resumed_from", execution.resumed_from),
        ("checkpoint", execution.checkpoint),
    ):
        if path is not None:
            metrics[key] = str(path)
    updates = plan.phase_programs("update")
    if updates:
        first = np.isin(execution.loss_tokens.sample, updates[0].assignments.sample)
        shift = (execution.logprob - execution.old_logprob)[first]
        known = shift[~np.isnan(shift)]
        if len(known):
            metrics["max_ratio_deviation"] = float(np.abs(np.expm1(known)).max())
    return metrics


def write_execution(directory: Path, execution: Execution) -> None:
    """Write events.parquet, logprobs.parquet and, if kept, gradients.safetensors.

    logprobs.parquet has a row per trained token: sample (in the iteration), token (position in
    the sample), old_logprob, ref_logprob, logprob (of the update's forward); NaN if unknown.
    """
    execution.events.save(directory / "events.parquet")
    columns = {
        "sample": execution.loss_tokens.sample,
        "token": execution.loss_tokens.token,
        "old_logprob": execution.old_logprob,
        "ref_logprob": execution.reference_logprob,
        "logprob": execution.logprob,
    }
    pq.write_table(pa.table(columns), directory / "logprobs.parquet", compression="zstd")
    if execution.gradients:
        contiguous = {name: value.contiguous() for name, value in execution.gradients.items()}
        save_file(contiguous, directory / "gradients.safetensors")


def execute_to_directory(
    plan: Plan, trace: Trace, options: ExecuteOptions, directory: Path
) -> dict[str, Any]:
    """Execute a plan on as many processes as it needs; rank 0 writes into the directory.

    Starts the processes here, or joins those that torchrun started.

    Returns:
        The metrics; an empty dict on the other ranks under torchrun.

    Raises:
        PsrlError: see `check_executable` and `run_ranks`.
    """
    check_executable(plan, trace, options)
    if options.checkpoint is not None and is_first_process():
        check_resumable(options.checkpoint, latest_checkpoint(options.checkpoint), options.resume)
    if options.token_advantages is not None:
        read_token_advantages(options.token_advantages, LossTokens(trace.iteration(plan.iteration)))
    world_size = plan.parallel.world_size
    try:
        return run_ranks(
            _execute_rank, world_size, plan, trace, options, directory, timeout_s=options.timeout_s
        )[0]
    except BaseException:
        # Under torchrun other ranks may still be writing; the next attempt replaces it.
        if options.checkpoint is not None and not in_torchrun():
            remove_leftovers(options.checkpoint)
        raise


def _execute_rank(
    plan: Plan, trace: Trace, options: ExecuteOptions, directory: Path
) -> dict[str, Any]:
    execution = execute_plan(plan, trace, options)
    if dist.get_rank() != 0:
        return {}
    metrics = execution_metrics(plan, trace.iteration(plan.iteration), execution)
    write_execution(directory, execution)
    return metrics
