"""Specification of tree attention: one dense mask built from the visibility rule, plain softmax.

Slow and clear, on any device, in any float dtype (float64 included). Every faster implementation
is tested against it.

Dimension letters: T tokens of the micro-batch, S key slots (cached rows, then the T tokens),
H query heads, G key/value heads, R = H / G, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psrl.core.plan.packing import CachedRows, KeyRun, PackedMicroBatch

from .store import KeyValueStore, accumulator_dtype, add_reader_gradients, write_cached
from .visibility_rule import visibility


def reference_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    packed: PackedMicroBatch,
    store: KeyValueStore | None = None,
    layer: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention of a packed micro-batch; arguments and gradients as in `tree_attention`.

    Returns:
        [T, H, D] outputs.

    Raises:
        PlanError: if the tokens are not packed in depth-first order.
    """
    rule = visibility(packed)
    k_SGD, v_SGD = JoinCached.apply(k_TGD, v_TGD, store, layer, rule.runs, packed.cached)
    visible_TS = torch.from_numpy(rule.mask(packed.total_tokens)).to(q_THD.device)
    q_TGRD = q_THD.unflatten(1, (k_TGD.shape[1], -1))
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    scores_GRTS = torch.einsum("tgrd,sgd->grts", q_TGRD, k_SGD) * scale
    weights_GRTS = scores_GRTS.masked_fill(~visible_TS, -torch.inf).softmax(-1)
    return torch.einsum("grts,sgd->tgrd", weights_GRTS, v_SGD).flatten(1, 2)


class JoinCached(torch.autograd.Function):
    """Cached keys and values before the micro-batch's own; backward passes through the store."""

    @staticmethod
    def forward(
        ctx: Any,
        k_TGD: Tensor,
        v_TGD: Tensor,
        store: Any,
        layer: int,
        runs: tuple[KeyRun, ...],
        cached: tuple[CachedRows, ...],
    ) -> tuple[Tensor, Tensor]:
        write_cached(store, layer, cached, k_TGD, v_TGD)
        ctx.store, ctx.layer, ctx.runs, ctx.cached = store, layer, runs, cached
        keys, values = [], []
        for run in runs:
            k_NGD, v_NGD = store.read(run.source, layer)
            keys.append(k_NGD[run.start : run.end])
            values.append(v_NGD[run.start : run.end])
        return torch.cat([*keys, k_TGD]), torch.cat([*values, v_TGD])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_SGD: Tensor, dv_SGD: Tensor) -> tuple[Tensor | None, ...]:
        slot = 0
        for run in ctx.runs:
            slots = slice(slot, slot + run.end - run.start)
            ctx.store.add_gradient(
                run.source, ctx.layer, run.start, run.end, dk_SGD[slots], dv_SGD[slots]
            )
            slot = slots.stop
        dtype = accumulator_dtype(dk_SGD.dtype)
        # A copy: autograd may still use the incoming gradient elsewhere.
        dk_TGD, dv_TGD = (d[slot:].to(dtype, copy=True) for d in (dk_SGD, dv_SGD))
        add_reader_gradients(ctx.store, ctx.layer, ctx.cached, dk_TGD, dv_TGD)
        return dk_TGD.to(dk_SGD.dtype), dv_TGD.to(dv_SGD.dtype), None, None, None, None
