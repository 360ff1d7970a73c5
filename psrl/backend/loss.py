"""Logprobs at loss edges without materialising all logits, and losses as functions of edges.

An edge is one prediction of one sample: samples that share a trained token have an edge each,
with their own advantage and old logprob. A loss maps edges to one term per edge; the caller sums
the terms and divides by the loss tokens of the whole mini-batch over all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from psrl.core.errors import BackendError

from .compat import GPTModel, parallel_state, reduce_from_tensor_model_parallel_region
from .inputs import EdgeInputs
from .model import logits

LossKind = Literal["ppo_clip", "sft"]


@dataclass(frozen=True)
class LossOptions:
    """Which loss, and its coefficients.

    Attributes:
        clip_ratio: PPO clips the probability ratio to `[1 - clip_ratio, 1 + clip_ratio]`.
        kl_coefficient: weight of the KL penalty to the reference policy; 0 for none.
        temperature: logits are divided by it, in all phases.
    """

    kind: LossKind = "ppo_clip"
    clip_ratio: float = 0.2
    kl_coefficient: float = 0.0
    temperature: float = 1.0

    @property
    def needs_old_logprob(self) -> bool:
        return self.kind == "ppo_clip"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient != 0.0


@dataclass(frozen=True)
class EdgeValues:
    """[E] known numbers of the edges; NaN where a loss does not need them."""

    advantage: Tensor
    old_logprob: Tensor
    reference_logprob: Tensor


EdgeLoss = Callable[[Tensor, EdgeValues, LossOptions], Tensor]


def ppo_clip(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] clipped policy-gradient terms (Schulman et al., 2017, equation 7), negated."""
    ratio = (logprob_E - values.old_logprob).exp()
    clipped = ratio.clamp(1.0 - options.clip_ratio, 1.0 + options.clip_ratio)
    return -torch.minimum(ratio * values.advantage, clipped * values.advantage)


def sft(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] negative log-likelihoods."""
    return -logprob_E


LOSSES: dict[str, EdgeLoss] = {"ppo_clip": ppo_clip, "sft": sft}


def low_variance_kl(logprob_E: Tensor, reference_E: Tensor) -> Tensor:
    """[E] estimates of KL(policy || reference): `r - 1 - log r`, r = reference / policy.

    Unbiased and never negative (Schulman, "Approximating KL divergence", 2020, estimator k3).
    """
    log_ratio = reference_E - logprob_E
    return log_ratio.exp() - 1.0 - log_ratio


def edge_terms(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] loss terms, KL penalty included."""
    terms = LOSSES[options.kind](logprob_E, values, options)
    if options.needs_reference:
        penalty = low_variance_kl(logprob_E, values.reference_logprob)
        terms = terms + options.kl_coefficient * penalty
    return terms


def check_loss(options: LossOptions, phases: set[str]) -> None:
    """Check that the phases which a loss reads from are there.

    Raises:
        BackendError: naming the missing phase, or an unknown loss.
    """
    if options.kind not in LOSSES:
        raise BackendError(f"unknown loss '{options.kind}'", f"use one of {sorted(LOSSES)}")
    if options.temperature <= 0:
        raise BackendError(f"temperature is {options.temperature}, it must be positive")
    for needed, phase, what in (
        (options.needs_old_logprob, "log_old_prob", f"loss '{options.kind}'"),
        (options.needs_reference, "reference", "a KL penalty"),
    ):
        if needed and phase not in phases:
            raise BackendError(
                f"{what} needs phase {phase}, the plan has {sorted(phases)}",
                f"plan phase {phase} too, or change the loss",
            )


def edge_logprobs(
    gpt: GPTModel, hidden_TH: Tensor, edges: EdgeInputs, temperature: float
) -> Tensor:
    """[E] logprobs of the edges' targets, in float32 or wider.

    Logits exist for one chunk of rows at a time: the backward computes them again.
    """
    rows = hidden_TH.index_select(0, edges.rows).split([c.num_rows for c in edges.chunks])
    parts = []
    for chunk, hidden_RH in zip(edges.chunks, rows, strict=True):
        span = slice(chunk.edge_start, chunk.edge_end)
        arguments = (gpt, hidden_RH, edges.chunk_row[span], edges.target[span], temperature)
        if torch.is_grad_enabled():
            parts.append(
                checkpoint(
                    _chunk_logprobs, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            )
        else:
            parts.append(_chunk_logprobs(*arguments))
    return torch.cat(parts)


def _chunk_logprobs(
    gpt: GPTModel, hidden_RH: Tensor, row_E: Tensor, target_E: Tensor, temperature: float
) -> Tensor:
    wide = torch.promote_types(hidden_RH.dtype, torch.float32)
    logits_RV = logits(gpt, hidden_RH).to(wide)
    if temperature != 1.0:
        logits_RV = logits_RV / temperature
    group = parallel_state.get_tensor_model_parallel_group()
    return vocab_parallel_logprobs(logits_RV, row_E, target_E, group)


def vocab_parallel_logprobs(
    logits_RV: Tensor, row_E: Tensor, target_E: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """[E] logprobs of targets, from logits sliced by vocabulary over a tensor-parallel group.

    Megatron's own function computes in float32 and needs one row of logits per edge.
    """
    own = torch.logsumexp(logits_RV, dim=1)
    local_E = target_E - group.rank() * logits_RV.shape[1]
    is_mine = (local_E >= 0) & (local_E < logits_RV.shape[1])
    picked = logits_RV[row_E, local_E.clamp(0, logits_RV.shape[1] - 1)]
    if group.size() == 1:
        return picked - own[row_E]
    peak = own.detach().clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    # The reduction works in place, and exp keeps its result for the backward.
    total = reduce_from_tensor_model_parallel_region((own - peak).exp().clone(), group)
    masked = torch.where(is_mine, picked, torch.zeros_like(picked))
    target_logit = reduce_from_tensor_model_parallel_region(masked, group)
    return target_logit - (peak + total.log())[row_E]
