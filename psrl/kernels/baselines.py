"""Attention of other libraries on the same work, where they are installed; CUDA only.

FlexAttention sees the same tree through a block mask; FlashAttention sees every sample whole, as
training without sharing does.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from psrl.core.packing import PackedMicroBatch

from .check import Inputs
from .forests import Segment
from .key_rows import key_runs, local_rows

Baseline = tuple[Callable[..., Tensor], Inputs]


def flex_baseline(packed: PackedMicroBatch, inputs: Inputs) -> Baseline:
    """FlexAttention with the tree as block mask; call it with `inputs` of the same tokens."""
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

    return run, inputs


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


def unshared_baseline(segments: list[Segment], inputs: Inputs) -> Baseline | None:
    """FlashAttention over whole samples (flash-attn, else torch's own); None if there is none."""
    attend = _varlen_attention()
    if attend is None:
        return None
    rows, bounds = sample_rows(segments)
    bounds = bounds.to(inputs.q.device)
    longest = int(bounds.diff().max())
    samples = Inputs(*(x[rows.to(x.device)] for x in inputs))

    def run(q: Tensor, k: Tensor, v: Tensor, _: object) -> Tensor:
        return attend(q, k, v, bounds, longest)

    return run, samples


def _varlen_attention() -> Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] | None:
    if find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        return lambda q, k, v, bounds, longest: flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest, causal=True
        )
    flash = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if flash is None:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        return flash(q, k, v, bounds, bounds, longest, longest, 0.0, True, False)[0]

    return attend
