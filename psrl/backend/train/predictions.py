"""Logprobs and entropies at loss edges, without materialising all logits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from psrl.backend.compat import GPTModel, parallel_state, reduce_from_tensor_model_parallel_region
from psrl.backend.model.model import logits
from psrl.backend.options import LossOptions

from .inputs import EdgeInputs


def edge_predictions(
    gpt: GPTModel,
    hidden_TH: Tensor,
    edges: EdgeInputs,
    options: LossOptions,
    with_entropy: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[E] logprobs of the edges' targets, and [E] entropies of the distributions they are from.

    Logprobs in float64, from logits in float32 or wider. Logits exist for one chunk of rows at a
    time: the backward computes them again.

    Args:
        with_entropy: None computes entropies only if they are rewarded and gradients are on.
    """
    rows = hidden_TH.index_select(0, edges.rows).split([c.num_rows for c in edges.chunks])
    if with_entropy is None:
        with_entropy = options.entropy_coefficient != 0.0 and torch.is_grad_enabled()
    logprobs, entropies = [], []
    for chunk, hidden_RH in zip(edges.chunks, rows, strict=True):
        span = slice(chunk.edge_start, chunk.edge_end)
        arguments = (
            gpt,
            hidden_RH,
            edges.chunk_row[span],
            edges.target[span],
            options.temperature,
            with_entropy,
        )
        if torch.is_grad_enabled():
            logprob_E, entropy_E = checkpoint(
                _chunk_predictions, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            logprob_E, entropy_E = _chunk_predictions(*arguments)
        logprobs.append(logprob_E)
        entropies.append(entropy_E)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _chunk_predictions(
    gpt: GPTModel,
    hidden_RH: Tensor,
    row_E: Tensor,
    target_E: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    wide = torch.promote_types(hidden_RH.dtype, torch.float32)
    logits_RV = logits(gpt, hidden_RH).to(wide)
    if temperature != 1.0:
        logits_RV = logits_RV / temperature
    group = parallel_state.get_tensor_model_parallel_group()
    logprob_E = vocab_parallel_logprobs(logits_RV, row_E, target_E, group)
    entropy_E = vocab_parallel_entropy(logits_RV, group)[row_E] if with_entropy else None
    return logprob_E, entropy_E


def vocab_parallel_entropy(logits_RV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R] entropies of softmax(logits), sliced by vocabulary over a tensor-parallel group."""
    peak_R = logits_RV.detach().amax(dim=1)
    if group.size() > 1:
        dist.all_reduce(peak_R, op=dist.ReduceOp.MAX, group=group)
    shifted_RV = logits_RV - peak_R[:, None]
    mass_RV = shifted_RV.exp()
    sums_2R = torch.stack([mass_RV.sum(dim=1), (mass_RV * shifted_RV).sum(dim=1)])
    if group.size() > 1:
        sums_2R = reduce_from_tensor_model_parallel_region(sums_2R, group)
    total_R, weighted_R = sums_2R
    return total_R.log() - weighted_R / total_R


class _LogSumExp(torch.autograd.Function):
    """torch.logsumexp over rows, but its result keeps what the sum knows beyond float32.

    The logarithm of a sum over a vocabulary is around 10, where neighbouring float32 numbers are
    1e-6 apart: more than a ratio of two policies may be off.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor) -> Tensor:
        peak_R = logits_RV.amax(dim=1)
        mass_R = (logits_RV - peak_R[:, None]).exp_().sum(dim=1)
        ctx.save_for_backward(logits_RV, peak_R, mass_R)
        return peak_R.double() + mass_R.double().log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> Tensor:
        logits_RV, peak_R, mass_R = ctx.saved_tensors
        scale_R = (gradient_R / mass_R).to(logits_RV.dtype)
        result: Tensor = (logits_RV - peak_R[:, None]).exp_().mul_(scale_R[:, None])
        return result


def vocab_parallel_logprobs(
    logits_RV: Tensor, row_E: Tensor, target_E: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """[E] float64 logprobs of targets; logits are sliced by vocabulary over the group.

    Megatron's own function computes in float32 and needs one row of logits per edge.
    """
    own: Tensor = _LogSumExp.apply(logits_RV)
    local_E = target_E - group.rank() * logits_RV.shape[1]
    is_mine = (local_E >= 0) & (local_E < logits_RV.shape[1])
    picked = logits_RV[row_E, local_E.clamp(0, logits_RV.shape[1] - 1)].double()
    if group.size() == 1:
        return picked - own[row_E]
    peak = own.detach().clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    # The reduction works in place, and exp keeps its result for the backward.
    total = reduce_from_tensor_model_parallel_region((own - peak).exp().clone(), group)
    masked = torch.where(is_mine, picked, torch.zeros_like(picked))
    target_logit = reduce_from_tensor_model_parallel_region(masked, group)
    return target_logit - (peak + total.log())[row_E]
