"""Tree attention on CPU without masks: one flash call per part of what a chain of queries sees.

A chain has two parts: its own causal square and, without a mask, all earlier rows that it sees.
Their outputs are merged by log-sum-exp; backward gives each part the merged output and
log-sum-exp, which makes its gradient exact. Earlier rows are read in place if they are one run, and
copied behind each other otherwise: a call per run would cost more than the copy.

Dimension letters as in `reference`; [G, R, T, D] views let R query heads read one key head.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psrl.core.errors import BackendError
from psrl.core.plan.packing import LOCAL, Chain, KeyRun, PackedMicroBatch

from .store import KeyValueStore, accumulator_dtype, add_reader_gradients, write_cached

QUERIES_PER_SQUARE = 256
"""torch's backward computes the whole of a causal square: bigger squares waste half of it,
smaller ones cost more calls (39 -> 50 GFLOP/s at 256 against uncut, 64 loses it again)."""

FORWARD_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu_backward"


class _Operators(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash_operators() -> _Operators:
    forward = getattr(torch.ops.aten, FORWARD_OPERATOR, None)
    backward = getattr(torch.ops.aten, BACKWARD_OPERATOR, None)
    if forward is None or backward is None:
        raise BackendError(
            f"torch {torch.__version__} has no operator aten::{FORWARD_OPERATOR} with a backward",
            'use implementation="reference"',
        )
    return _Operators(forward, backward)


def parts_attention(
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
        BackendError: if the tensors are not on the CPU, or torch lacks the operators.
    """
    _flash_operators()
    if q_THD.device.type != "cpu":
        raise BackendError(
            f'implementation="parts" runs on the CPU, the tensors are on {q_THD.device}',
            'use implementation="reference"',
        )
    return _PartsAttention.apply(q_THD, k_TGD, v_TGD, packed, store, layer, scale)


def split_chains(chains: Iterable[Chain], max_queries: int) -> list[Chain]:
    """Chains of at most `max_queries` queries that see the same keys.

    Example: chain (0, 5) cut at 3 gives (0, 3) and (3, 5) with local run (0, 3).
    """
    short = []
    for start, end, runs in chains:
        for cut in range(start, end, max_queries):
            earlier = _append_local(runs, start, cut) if cut > start else runs
            short.append(Chain(cut, min(cut + max_queries, end), earlier))
    return short


def _append_local(runs: tuple[KeyRun, ...], start: int, end: int) -> tuple[KeyRun, ...]:
    if runs and runs[-1].source == LOCAL and runs[-1].end == start:
        return (*runs[:-1], runs[-1]._replace(end=end))
    return (*runs, KeyRun(LOCAL, start, end))


def _visible(
    sources: dict[int, tuple[Tensor, Tensor]], runs: tuple[KeyRun, ...]
) -> tuple[Tensor, Tensor]:
    """[N, G, D] keys and values of all runs behind each other."""
    rows = [[x[run.start : run.end] for x in sources[run.source]] for run in runs]
    k_NGD, v_NGD = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*rows, strict=True))
    return k_NGD, v_NGD


def _query_heads(x_THD: Tensor, num_groups: int) -> Tensor:
    """[G, R, T, D] view of a per-query-head tensor."""
    return x_THD.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)


def _key_heads(x_NGD: Tensor, num_repeats: int) -> Tensor:
    """[G, R, N, D] view of a per-key-head tensor; the repeats share memory."""
    return x_NGD.transpose(0, 1).unsqueeze(1).expand(-1, num_repeats, -1, -1)


def _sources(
    k_TGD: Tensor, v_TGD: Tensor, packed: PackedMicroBatch, store: Any, layer: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values by source. Read again in backward: nothing holds on to a block's tensors."""
    cached = {block: store.read(block, layer) for block in sorted(packed.read_blocks)}
    return {LOCAL: (k_TGD, v_TGD)} | cached


class _PartsAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        packed: PackedMicroBatch,
        store: Any,
        layer: int,
        scale: float | None,
    ) -> Tensor:
        flash = _flash_operators().forward
        num_groups, repeats = k_TGD.shape[1], q_THD.shape[1] // k_TGD.shape[1]
        write_cached(store, layer, packed.cached, k_TGD, v_TGD)
        sources = _sources(k_TGD, v_TGD, packed, store, layer)
        dtype = accumulator_dtype(q_THD.dtype)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        lse_GRT = q_THD.new_empty(num_groups, repeats, q_THD.shape[0], dtype=dtype)
        q_GRTD, out_GRTD = (_query_heads(x, num_groups) for x in (q_THD, out_THD))

        def attend(queries: slice, runs: tuple[KeyRun, ...], causal: bool) -> tuple[Tensor, Tensor]:
            k, v = (_key_heads(x, repeats) for x in _visible(sources, runs))
            out, lse = flash(q_GRTD[:, :, queries], k, v, 0.0, causal, scale=scale)
            return out.to(dtype), lse

        chains = split_chains(packed.chains, QUERIES_PER_SQUARE)
        for start, end, runs in chains:
            queries = slice(start, end)
            out, lse = attend(queries, (KeyRun(LOCAL, start, end),), True)
            if runs:
                part_out, part_lse = attend(queries, runs, False)
                merged_lse = torch.logaddexp(lse, part_lse)
                share = (part_lse - merged_lse).exp().unsqueeze(-1)
                out, lse = out.lerp(part_out, share), merged_lse
            out_GRTD[:, :, queries], lse_GRT[:, :, queries] = out, lse
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_GRT)
        ctx.packed, ctx.store, ctx.layer, ctx.scale = packed, store, layer, scale
        ctx.chains = chains
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_GRT = ctx.saved_tensors
        packed, store, layer = ctx.packed, ctx.store, ctx.layer
        flash_backward = _flash_operators().backward
        num_groups, repeats = k_TGD.shape[1], q_THD.shape[1] // k_TGD.shape[1]
        sources = _sources(k_TGD, v_TGD, packed, store, layer)
        dtype = accumulator_dtype(q_THD.dtype)
        dq_THD, dk_TGD, dv_TGD = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_THD, k_TGD, v_TGD)
        )
        dout_GRTD, q_GRTD, out_GRTD, dq_GRTD = (
            _query_heads(x, num_groups) for x in (dout_THD, q_THD, out_THD, dq_THD)
        )
        for start, end, runs in ctx.chains:
            queries = slice(start, end)
            dout, q, out = (x[:, :, queries] for x in (dout_GRTD, q_GRTD, out_GRTD))
            lse = lse_GRT[:, :, queries]
            own = (KeyRun(LOCAL, start, end),)
            for part, causal in ((own, True), (runs, False)) if runs else ((own, True),):
                k, v = (_key_heads(x, repeats) for x in _visible(sources, part))
                dq, dk, dv = flash_backward(dout, q, k, v, out, lse, 0.0, causal, scale=ctx.scale)
                dq_GRTD[:, :, queries] += dq
                dk_NGD, dv_NGD = (d.sum(1, dtype=dtype).transpose(0, 1) for d in (dk, dv))
                sizes = [run.end - run.start for run in part]
                for run, dk, dv in zip(part, dk_NGD.split(sizes), dv_NGD.split(sizes), strict=True):
                    if run.source == LOCAL:
                        dk_TGD[run.start : run.end] += dk
                        dv_TGD[run.start : run.end] += dv
                    else:
                        store.add_gradient(run.source, layer, run.start, run.end, dk, dv)
        add_reader_gradients(store, layer, packed.cached, dk_TGD, dv_TGD)
        gradients = (d.to(q_THD.dtype) for d in (dq_THD, dk_TGD, dv_TGD))
        return (*gradients, None, None, None, None)
