"""What an execution leaves behind, and how events of several runs, ranks and phases are joined."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from psrl.backend.train.inputs import LossTokens
from psrl.core.plan.plan import PHASES
from psrl.core.run.events import Events
from psrl.core.samples.sample import FloatArray


@dataclass(frozen=True)
class Execution:
    """Result of a plan's execution, gathered from all ranks.

    Attributes:
        old_logprob, reference_logprob, logprob: [number of loss tokens] of the three phases, in
            the order of `loss_tokens`; NaN if the phase did not run.
        loss, gradient_norm: per update program, in order; the norm before clipping.
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
