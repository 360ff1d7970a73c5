"""Compare an implementation of tree attention with plain float64 attention over parent pointers.

Tests use it in Triton's interpreter, benchmarks on the device before they print a time.

Dimension letters: T tokens of the forest, H query heads, G key/value heads, D head dimension.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from psrl.core.plan.packing import PackedMicroBatch
from psrl.core.run.relative_error import relative_error
from psrl.core.samples.sample import IntArray
from psrl.kernels.attention.store import DictStore, KeyValueStore

from .forests import Segment, pack_forest, parents

Attention = Callable[[Tensor, Tensor, Tensor, PackedMicroBatch, KeyValueStore], Tensor]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}
"""Largest relative L2 error of outputs and gradients."""


class Inputs(NamedTuple):
    """Queries and output gradients [T, H, D], keys and values [T, G, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Result(NamedTuple):
    """Outputs and gradients of all tokens."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def random_inputs(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Normal inputs; `heads` are the numbers of query and of key/value heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, h, head_dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    return Inputs(*(torch.randn(s, generator=generator).to(device, dtype) for s in shapes))


def run_micro_batches(
    micro_batches: list[PackedMicroBatch],
    inputs: Inputs,
    attention: Attention,
    store: KeyValueStore,
) -> Result:
    """Forward in order, then backward in reverse, as a training step would."""
    live, first = [], 0
    for packed in micro_batches:
        rows = slice(first, first + packed.total_tokens)
        leaves = [x[rows].detach().requires_grad_() for x in inputs[:3]]
        live.append((leaves, attention(*leaves, packed, store), inputs.dout[rows]))
        first = rows.stop
    parts = [
        (out.detach(), *torch.autograd.grad(out, leaves, dout))
        for leaves, out, dout in reversed(live)
    ]
    return Result(*(torch.cat(part[::-1]) for part in zip(*parts, strict=True)))


def ancestor_mask(parent: IntArray) -> Tensor:
    """[T, T] whether a query sees a key, from parent pointers alone."""
    mask = np.eye(len(parent), dtype=bool)
    for token, above in enumerate(parent.tolist()):
        if above >= 0:
            mask[token] |= mask[above]
    return torch.from_numpy(mask)


def exact_result(parent: IntArray, inputs: Inputs) -> tuple[Result, Tensor]:
    """Result in float64, and the log-sum-exp [H, T] of the scores."""
    leaves = [x.double().detach().requires_grad_() for x in inputs[:3]]
    q, (k, v) = (
        leaves[0],
        (x.repeat_interleave(inputs.q.shape[1] // x.shape[1], 1) for x in leaves[1:]),
    )
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~ancestor_mask(parent).to(q.device), -torch.inf)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    gradients = torch.autograd.grad(out, leaves, inputs.dout.double())
    return Result(out.detach(), *gradients), scores.detach().logsumexp(-1)


def summed_sizes(inputs: Inputs, visible: Tensor) -> Result:
    """Outputs and gradients with every term by its magnitude, in float64.

    The gradient of a score is p (dp - sum of p dp), whose terms cancel: a query that sees one key
    has gradients of zero, up to the rounding of dp.

    Args:
        visible: [T, T] whether a query sees a key.
    """
    q, k, v, dout = (x.detach().double() for x in inputs)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    dp = torch.einsum("thd,shd->hts", dout.abs(), v.abs())
    ds = scale * p * (dp + (p * dp).sum(-1, keepdim=True))
    dk = torch.einsum("hts,thd->shd", ds, q.abs())
    dv = torch.einsum("hts,thd->shd", p, dout.abs())
    return Result(
        torch.einsum("hts,shd->thd", p, v.abs()),
        torch.einsum("hts,shd->thd", ds, k.abs()),
        *(x.unflatten(1, (inputs.k.shape[1], -1)).sum(2) for x in (dk, dv)),
    )


def relative_errors(result: Result, expected: Result, sizes: Result) -> dict[str, float]:
    """Relative L2 error of each part, given its `summed_sizes`.

    Sums are in float32 at least; those that cancel, dp, have D terms.
    """
    wide = torch.promote_types(result.dq.dtype, torch.float32)
    return {
        name: relative_error(
            float((got.double() - want.double()).norm()),
            float(want.double().norm()),
            size=float(size.norm()),
            epsilon=torch.finfo(wide).eps,
            num_terms=result.out.shape[-1],
        )
        for name, got, want, size in zip(Result._fields, result, expected, sizes, strict=True)
    }


def check_forest(
    segments: list[Segment],
    attention: Attention,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    cuts: list[int] | None = None,
    store: KeyValueStore | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, float]:
    """Errors of an implementation on a forest cut into micro-batches; see `relative_errors`."""
    parent = parents(segments)
    inputs = random_inputs(len(parent), heads, head_dim, dtype, device, seed)
    micro_batches = pack_forest(segments, cuts)
    result = run_micro_batches(micro_batches, inputs, attention, store or DictStore())
    sizes = summed_sizes(inputs, ancestor_mask(parent).to(device))
    return relative_errors(result, exact_result(parent, inputs)[0], sizes)
