"""Attention of other libraries on the same tree, to compare with; each where it is installed.

Torch's fused operator sees the tree through a dense mask and FlexAttention through a block mask;
FlashAttention sees every sample whole, as training without sharing does.

Dimension letters: T tokens, H query heads, G key/value heads, D head dimension.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from psrl.core.errors import BackendError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.kernels.attention.key_rows import key_runs, local_rows

from .check import Inputs
from .forests import Segment

MAX_MASK_ENTRIES = {"cpu": 2**29, "cuda": 2**32}
"""Of a dense mask, which the operator widens to the dtype of the scores."""

BASELINES = ("sdpa", "flex_attention", "unshared")


class Baseline(NamedTuple):
    """One way to compute the same attention.

    Attributes:
        attention: called with q, k, v of `inputs` and the micro-batch.
        inputs: rows in the order that it wants.
        rows: token of the tree that each of its rows stands for; None for the same order.
    """

    attention: Callable[..., Tensor]
    inputs: Inputs
    rows: Tensor | None = None


def make_baseline(
    name: str, segments: list[Segment], packed: PackedMicroBatch, inputs: Inputs
) -> Baseline:
    """One of BASELINES, on the device of the inputs.

    Raises:
        BackendError: if it cannot run there; the message says why.
    """
    if name == "sdpa":
        return _dense_mask(packed, inputs)
    return _block_mask(packed, inputs) if name == "flex_attention" else _unshared(segments, inputs)


def _dense_mask(packed: PackedMicroBatch, inputs: Inputs) -> Baseline:
    total, device = packed.total_tokens, inputs.q.device
    if total * total > MAX_MASK_ENTRIES[device.type]:
        raise BackendError(f"a dense mask of {total:,} tokens is too large for {device.type}")
    query_end = torch.from_numpy(local_rows(key_runs(packed)).query_end).to(device)
    token = torch.arange(total, device=device)
    mask = (token[:, None] >= token) & (token[:, None] < query_end)

    def run(q: Tensor, k: Tensor, v: Tensor, _: object) -> Tensor:
        return _by_heads(q, k, v, attn_mask=mask)

    return Baseline(run, inputs)


def _by_heads(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TGD, v_TGD))
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return out.squeeze(0).transpose(0, 1)


def _block_mask(packed: PackedMicroBatch, inputs: Inputs) -> Baseline:
    if inputs.q.device.type != "cuda":
        raise BackendError("FlexAttention has no backward on a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query_end = torch.from_numpy(local_rows(key_runs(packed)).query_end).to(inputs.q.device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < query_end[key])

    total = packed.total_tokens
    mask = create_block_mask(visible, None, None, total, total, inputs.q.device.type, _compile=True)
    attend = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor, _: object) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out: Any = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.squeeze(0).transpose(0, 1)

    return Baseline(run, inputs)


def sample_rows(segments: list[Segment]) -> tuple[Tensor, Tensor]:
    """Rows of all leaf paths one after the other, and [samples + 1] where each begins."""
    starts = torch.tensor([0] + [s.num_tokens for s in segments]).cumsum(0).tolist()
    inner = {s.parent for s in segments}
    rows, lengths = [], [0]
    for leaf in (v for v in range(len(segments)) if v not in inner):
        path, node = [], leaf
        while node >= 0:
            path.append(torch.arange(starts[node], starts[node + 1]))
            node = segments[node].parent
        rows.append(torch.cat(path[::-1]))
        lengths.append(len(rows[-1]))
    return torch.cat(rows), torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _unshared(segments: list[Segment], inputs: Inputs) -> Baseline:
    """Every sample whole: flash-attn, else torch's own FlashAttention."""
    rows, bounds = sample_rows(segments)
    rows = rows.to(inputs.q.device)
    samples = Inputs(*(x[rows] for x in inputs))
    attend = _varlen_cuda if inputs.q.device.type == "cuda" else _one_by_one
    longest = int(bounds.diff().max())
    bounds = bounds.to(inputs.q.device)

    def run(q: Tensor, k: Tensor, v: Tensor, _: object) -> Tensor:
        return attend(q, k, v, bounds, longest)

    return Baseline(run, samples, rows)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Torch's operator has no variable lengths on a CPU."""
    lengths = bounds.diff().tolist()
    samples = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_by_heads(*sample, is_causal=True) for sample in samples])


def _varlen_cuda(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    if find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        out: Tensor = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
        return out
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    flash = torch.ops.aten._flash_attention_forward
    return flash(q, k, v, bounds, bounds, longest, longest, 0.0, True, False)[0]
