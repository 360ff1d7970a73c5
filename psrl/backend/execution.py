"""What an execution leaves behind, and how events of several runs, ranks and phases are joined."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psrl.backend.train.engine import ProgramRun
from psrl.backend.train.inputs import LossTokens, RankProgram
from psrl.core.errors import BackendError
from psrl.core.plan.plan import PHASES
from psrl.core.run.events import Events
from psrl.core.samples.sample import FloatArray

from .compat import parallel_state


@dataclass(frozen=True)
class Execution:
    """Result of a plan's execution, gathered from all ranks.

    Attributes:
        old_logprob, reference_logprob, logprob: [number of loss tokens] of the three phases, in
            the order of `loss_tokens`; NaN if the phase did not run.
        loss, gradient_norm: per update program, in order; the norm before clipping.
        skipped_mini_batches: those whose step was left out because a number was not finite.
        router_loss: per update program, what the routers add to the loss; 0 for a dense model.
        expert_load: per update program, [layers, experts] logical tokens that each expert got;
            empty for a dense model.
        gradients: full gradients by "mini_batch<k>.<name>", on the first process if they were kept.
        dtype: working precision that ran.
        implementation: attention that ran.
        resumed_from: the checkpoint that the policy and its optimizer came from, if any.
        checkpoint: the checkpoint that was saved, if any.
    """

    events: Events
    loss_tokens: LossTokens
    old_logprob: FloatArray
    reference_logprob: FloatArray
    logprob: FloatArray
    loss: list[float]
    gradient_norm: list[float]
    skipped_mini_batches: list[int]
    router_loss: list[float]
    expert_load: list[FloatArray]
    gradients: dict[str, Tensor]
    dtype: str
    implementation: str
    resumed_from: Path | None = None
    checkpoint: Path | None = None


def concatenate_events(parts: list[Events]) -> Events:
    """Rows of several event tables: by phase in the order they ran, then rank and stage."""
    joined = Events(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Events)}
    )
    phase = np.array([PHASES.index(name) for name in joined.phase.tolist()], np.int64)
    order = np.lexsort((np.arange(len(joined)), joined.stage, joined.rank, phase))
    return joined.where(order)


def median_times(runs: list[Events]) -> Events:
    """The last run's events with the median start and end of each over all runs."""
    start, end = (
        np.median(np.stack([getattr(run, name) for run in runs]), axis=0)
        for name in ("start_s", "end_s")
    )
    return replace(runs[-1], start_s=start, end_s=end)


def sum_over_ranks(values: FloatArray, device: torch.device) -> FloatArray:
    """Sum over data-parallel ranks and stages; tensor-parallel ranks hold the same values."""
    mine = values if _is_first_tensor_rank() else np.zeros_like(values)
    tensor = torch.from_numpy(mine.astype(np.float64)).to(device)
    dist.all_reduce(tensor)
    return np.asarray(tensor.cpu().numpy(), np.float64)


def _is_first_tensor_rank() -> bool:
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)


def merge_logprobs(
    loss_tokens: LossTokens,
    runs: Sequence[ProgramRun],
    programs: Sequence[RankProgram],
    phase: str,
    device: torch.device,
) -> FloatArray:
    """Logprobs of all last stages; each loss token must be computed by one of them.

    Args:
        runs: of each of the phase's programs on this rank.

    Raises:
        BackendError: if a loss token has none, or more than one.
    """
    mine, expected = np.full(len(loss_tokens), np.nan), np.zeros(len(loss_tokens))
    for run, rank_program in zip(runs, programs, strict=True):
        np.copyto(mine, run.logprobs, where=~np.isnan(run.logprobs))
        expected[rank_program.numbers] = 1.0
    is_mine = ~np.isnan(mine)
    count, total = sum_over_ranks(np.stack([is_mine, np.where(is_mine, mine, 0.0)]), device)
    wrong = np.flatnonzero(count != expected)
    if len(wrong):
        first = int(wrong[0])
        raise BackendError(
            f"phase {phase}: {len(wrong)} of {int(expected.sum())} loss tokens have no finite "
            f"logprob or were computed twice; the first is token {int(loss_tokens.token[first])} "
            f"of sample {int(loss_tokens.sample[first])}, with {int(count[first])} values",
            "if the model's weights are finite, the plan is wrong: run check_plan on it",
        )
    return np.where(expected > 0, total, np.nan)


def gather_events(events: Events) -> list[Events]:
    """Events of all (rank, stage); tensor-parallel ranks do the same at the same time."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, events if _is_first_tensor_rank() else None)
    return [events for events in gathered if events is not None]
