"""Tree attention by Triton kernels: choice of tiles, cached rows, the autograd function.

Dimension letters: T tokens of the micro-batch, C visible cached rows, H query heads, G key/value
heads, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psrl.core.errors import BackendError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.kernels.attention.buffer_store import BufferStore
from psrl.kernels.attention.store import KeyValueStore, add_reader_gradients, write_cached

from .attention_index import AttentionIndex, attention_index
from .configs import INTERPRETER, KernelTiles, can_use_tma, kernel_tiles
from .launch import attention_forward, is_aligned, key_gradients, query_gradient
from .tiles import INTERPRETED


def triton_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    packed: PackedMicroBatch,
    store: KeyValueStore | None = None,
    layer: int = 0,
    scale: float | None = None,
    tiles: KernelTiles | None = None,
    use_tma: bool | None = None,
) -> Tensor:
    """Attention of a packed micro-batch; arguments and gradients as in `tree_attention`.

    Args:
        tiles: tile shapes; None for the table of `configs`.
        use_tma: read through tensor descriptors; None where the device and the strides allow.
            Cached rows that no query sees must then hold finite numbers.

    Returns:
        [T, H, D] outputs.

    Raises:
        BackendError: if the tensors are not on a CUDA device (or in the interpreter), or dtype,
            head dimension or strides do not fit.
    """
    interpreted = bool(INTERPRETED.value)
    if q_THD.device.type != "cuda" and not interpreted:
        raise BackendError(
            f'implementation="triton" needs a CUDA device, the tensors are on {q_THD.device}',
            'use implementation="parts", or set TRITON_INTERPRET=1 before Triton is imported',
        )
    aligned = all(is_aligned(x) for x in (q_THD, k_TGD, v_TGD))
    if use_tma is None:
        use_tma = aligned and _has_tma(q_THD.dtype, q_THD.shape[2], q_THD.device)
    elif use_tma and not aligned:
        raise BackendError(
            "tensor descriptors need addresses and row strides in multiples of 16 bytes",
            "pass contiguous tensors, or use_tma=False",
        )
    if tiles is None:
        tiles = _shipped_tiles(q_THD.dtype, q_THD.shape[2], use_tma)
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    return _TritonAttention.apply(q_THD, k_TGD, v_TGD, packed, store, layer, scale, tiles, use_tma)


def prepare_triton(
    packed: PackedMicroBatch,
    store: KeyValueStore | None,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
) -> None:
    """Build the lists of visits of a micro-batch whose rows will be aligned to 16 bytes.

    Raises:
        BackendError: if dtype or head dimension do not fit.
        PlanError: if the tokens are not packed in depth-first order.
    """
    tiles = _shipped_tiles(dtype, head_dim, _has_tma(dtype, head_dim, device))
    attention_index(packed, store, tiles, device)


def _has_tma(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return can_use_tma(capability, dtype, head_dim)


def _shipped_tiles(dtype: torch.dtype, head_dim: int, use_tma: bool) -> KernelTiles:
    tiles = kernel_tiles(dtype, head_dim, use_tma)
    return INTERPRETER if INTERPRETED.value else tiles


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        packed: PackedMicroBatch,
        store: Any,
        layer: int,
        scale: float,
        tiles: KernelTiles,
        use_tma: bool,
    ) -> Tensor:
        write_cached(store, layer, packed.cached, k_TGD, v_TGD)
        index = attention_index(packed, store, tiles, q_THD.device)
        cache = _read_cache(index, store, layer)
        out_THD, lse_HT = attention_forward(
            q_THD, k_TGD, v_TGD, cache, index.forward, scale, tiles.forward, use_tma
        )
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_HT)
        ctx.packed, ctx.store, ctx.layer, ctx.scale = packed, store, layer, scale
        ctx.tiles, ctx.use_tma = tiles, use_tma
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_HT = ctx.saved_tensors
        packed, store, layer, tiles = ctx.packed, ctx.store, ctx.layer, ctx.tiles
        index = attention_index(packed, store, tiles, q_THD.device)
        cache = _read_cache(index, store, layer)
        dout_THD = dout_THD.contiguous()
        dq_THD, delta_HT = query_gradient(
            q_THD,
            k_TGD,
            v_TGD,
            cache,
            dout_THD,
            out_THD,
            lse_HT,
            index.dq,
            ctx.scale,
            tiles.dq,
            ctx.use_tma,
        )
        sides = (q_THD, dout_THD, lse_HT, delta_HT, ctx.scale, tiles.dkv, ctx.use_tma)
        # Readers add float32 to cached rows: round once, after that.
        dtype = torch.float32 if packed.cached else k_TGD.dtype
        dk_TGD, dv_TGD = (torch.empty(k_TGD.shape, dtype=dtype, device=k_TGD.device) for _ in "kv")
        key_gradients(k_TGD, v_TGD, dk_TGD, dv_TGD, index.local, *sides, add=False)
        if cache is not None:
            _cache_gradients(index, store, layer, cache, sides)
        add_reader_gradients(store, layer, packed.cached, dk_TGD, dv_TGD)
        dk_TGD, dv_TGD = (d.to(q_THD.dtype) for d in (dk_TGD, dv_TGD))
        return dq_THD, dk_TGD, dv_TGD, None, None, None, None, None, None


def _read_cache(index: AttentionIndex, store: Any, layer: int) -> tuple[Tensor, Tensor] | None:
    """Keys and values that `index.cached` addresses: the store's buffers, or gathered rows."""
    if not index.reads:
        return None
    if isinstance(store, BufferStore):
        return store.buffers(layer)
    rows = [tuple(x[a:z] for x in store.read(block, layer)) for block, a, z in index.reads]
    k_CGD, v_CGD = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return k_CGD, v_CGD


def _cache_gradients(
    index: AttentionIndex, store: Any, layer: int, cache: tuple[Tensor, Tensor], sides: Any
) -> None:
    """Add the gradients of the cached rows to the store."""
    if isinstance(store, BufferStore):
        targets = store.gradient_buffers(layer, [block for block, _, _ in index.reads])
        key_gradients(*cache, *targets, index.cached, *sides, add=True)
        return
    dk_CGD, dv_CGD = (torch.empty_like(x, dtype=torch.float32) for x in cache)
    key_gradients(*cache, dk_CGD, dv_CGD, index.cached, *sides, add=False)
    row = 0
    for block, start, end in index.reads:
        rows = slice(row, row + end - start)
        store.add_gradient(block, layer, start, end, dk_CGD[rows], dv_CGD[rows])
        row = rows.stop
