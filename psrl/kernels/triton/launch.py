"""Launches of the tree-attention kernels: arguments, strides, descriptors.

Dimension letters: T tokens of the micro-batch, H query heads, G key/value heads, D head dimension.
`cache` holds the keys and values of earlier micro-batches, [rows, G, D] each, that the index
addresses; None if it visits none.
"""

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from psrl.core.errors import BackendError

from .attention_index import KeyTensors, QueryTensors
from .backward import dkv_kernel, dq_kernel
from .configs import Tiles, padded_head_dim
from .forward import forward_kernel

LOG2_E = math.log2(math.e)


def attention_forward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cache: tuple[Tensor, Tensor] | None,
    index: QueryTensors,
    scale: float,
    tiles: Tiles,
    use_tma: bool,
) -> tuple[Tensor, Tensor]:
    """[T, H, D] outputs, and [H, T] log-sum-exp of the scores in base 2 (float32)."""
    num_tokens, num_heads, head_dim = q_THD.shape
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    lse_HT = q_THD.new_empty(num_heads, num_tokens, dtype=torch.float32)
    if not num_tokens:
        return out_THD, lse_HT
    k_cache, v_cache = _check_cache(cache, k_TGD, v_TGD)
    wide = _descriptor if use_tma else _plain
    with _on_device(q_THD):
        forward_kernel[len(index.order), num_heads](
            wide(q_THD, tiles.block_q),
            *(wide(x, tiles.block_k) for x in (k_TGD, v_TGD, k_cache, v_cache)),
            out_THD,
            lse_HT,
            *index,
            scale * LOG2_E,
            num_tokens,
            num_heads // k_TGD.shape[1],
            *_strides(q_THD, k_TGD, v_TGD, k_cache),
            num_heads * head_dim,
            HAS_CACHE=cache is not None,
            **_constants(head_dim, tiles, use_tma),
        )
    return out_THD, lse_HT


def query_gradient(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cache: tuple[Tensor, Tensor] | None,
    dout_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    index: QueryTensors,
    scale: float,
    tiles: Tiles,
    use_tma: bool,
) -> tuple[Tensor, Tensor]:
    """[T, H, D] dQ, and [H, T] sum over D of out * dout (float32)."""
    num_tokens, num_heads, head_dim = q_THD.shape
    dq_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    delta_HT = torch.empty_like(lse_HT)
    if not num_tokens:
        return dq_THD, delta_HT
    k_cache, v_cache = _check_cache(cache, k_TGD, v_TGD)
    wide = _descriptor if use_tma else _plain
    with _on_device(q_THD):
        dq_kernel[len(index.order), num_heads](
            wide(q_THD, tiles.block_q),
            *(wide(x, tiles.block_k) for x in (k_TGD, v_TGD, k_cache, v_cache)),
            wide(dout_THD, tiles.block_q),
            out_THD,
            dq_THD,
            lse_HT,
            delta_HT,
            *index,
            scale,
            scale * LOG2_E,
            num_tokens,
            num_heads // k_TGD.shape[1],
            *_strides(q_THD, k_TGD, v_TGD, k_cache),
            num_heads * head_dim,
            HAS_CACHE=cache is not None,
            **_constants(head_dim, tiles, use_tma),
        )
    return dq_THD, delta_HT


def key_gradients(
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    index: KeyTensors,
    q_THD: Tensor,
    dout_THD: Tensor,
    lse_HT: Tensor,
    delta_HT: Tensor,
    scale: float,
    tiles: Tiles,
    use_tma: bool,
    add: bool,
) -> None:
    """Write or add the gradients of the keys and values [rows, G, D] in the tiles of `index`."""
    num_tokens, num_heads, head_dim = q_THD.shape
    if not len(index.order):
        return
    num_groups = k.shape[1]
    if dk.stride() != dv.stride() or dk.stride()[1:] != (head_dim, 1):
        raise BackendError(
            f"gradient rows need equal strides and contiguous heads, got {dk.stride()} and "
            f"{dv.stride()}"
        )
    wide = _descriptor if use_tma else _plain
    with _on_device(q_THD):
        dkv_kernel[len(index.order), num_groups](
            wide(q_THD, tiles.block_q),
            wide(k, tiles.block_k),
            wide(v, tiles.block_k),
            wide(dout_THD, tiles.block_q),
            wide(dk, tiles.block_k),
            wide(dv, tiles.block_k),
            lse_HT,
            delta_HT,
            *index,
            scale,
            scale * LOG2_E,
            num_tokens,
            num_heads // num_groups,
            *_strides(q_THD, k, v),
            num_heads * head_dim,
            dk.stride(0),
            ADD=add,
            SPLIT=tiles.split,
            **_constants(head_dim, tiles, use_tma),
        )


def _check_cache(
    cache: tuple[Tensor, Tensor] | None, k_TGD: Tensor, v_TGD: Tensor
) -> tuple[Tensor, Tensor]:
    """The cached keys and values; stand-ins without a cache, which the kernels do not touch."""
    if cache is None:
        return k_TGD, k_TGD
    k, v = cache
    shapes = f"keys {list(k.shape)} {k.dtype}, values {list(v.shape)} {v.dtype}"
    if k.stride() != v.stride() or k.stride(-1) != 1 or k.shape[1:] != k_TGD.shape[1:]:
        raise BackendError(
            f"cached rows need the heads of k {list(k_TGD.shape)} and equal strides, got {shapes}"
        )
    if not k.dtype == v.dtype == k_TGD.dtype:
        raise BackendError(f"cached rows need the dtype {k_TGD.dtype} of k, got {shapes}")
    return k, v


def _strides(*tensors: Tensor) -> list[int]:
    """Row and head stride of each tensor."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _constants(head_dim: int, tiles: Tiles, use_tma: bool) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "USE_TMA": use_tma,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _plain(x: Tensor, num_rows: int) -> Tensor:
    return x


def _descriptor(x: Tensor, num_rows: int) -> TensorDescriptor:
    """Descriptor of [rows, heads, D] as a matrix with a head at every `stride(1)` columns."""
    columns = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    return TensorDescriptor(x, [x.shape[0], columns], [x.stride(0), 1], [num_rows, x.shape[2]])


def is_aligned(x: Tensor) -> bool:
    """Whether a descriptor can address [rows, heads, D]: rows begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _on_device(x: Tensor) -> Any:
    """Launches go to the current device: make it the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
