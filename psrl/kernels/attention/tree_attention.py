"""The public entry to tree attention: checks its arguments, then runs the chosen implementation."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.plan.packing import PackedMicroBatch

from .parts import parts_attention
from .reference import reference_attention
from .sdpa import sdpa_attention
from .store import KeyValueStore

Implementation = Literal["parts", "reference", "sdpa", "triton"]


def tree_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    packed: PackedMicroBatch,
    *,
    implementation: Implementation,
    store: KeyValueStore | None = None,
    layer: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention in which every token sees exactly its path in the prefix tree.

    Forward copies the rows of `packed.cached` into the store and reads those of earlier
    micro-batches from it. Backward adds the gradient of what it read to the store, and takes what
    readers left there for its own rows: so run it once per micro-batch, after the backward of
    every reader. Forward may run any number of times.

    Args:
        q_THD: [T, H, D] queries, already rotated to `packed.position_ids`.
        k_TGD, v_TGD: [T, G, D] keys and values; H is a multiple of G (grouped-query attention).
        packed: T tokens of a rank's tree; see `psrl.core.plan.packing.pack_rank`.
        implementation: "triton" (fast, CUDA), "parts" (fast, CPU), "reference" (the
            specification, any device) or "sdpa" (torch's operator with a dense mask).
        store: cached keys and values; needed if the micro-batch reads or caches any.
        layer: which layer's keys and values to use in the store.
        scale: factor of the scores; None for 1 / sqrt(D).

    Returns:
        [T, H, D] outputs in the dtype of the inputs.

    Raises:
        BackendError: if shapes, dtypes, devices or strides do not fit, or the store is missing.
    """
    attention = _find(implementation)
    _check_tensors(q_THD, k_TGD, v_TGD, packed)
    num_read, num_cached = len(packed.read_blocks), len(packed.cached)
    if store is None and num_read + num_cached:
        raise BackendError(
            f"micro-batch {packed.index} reads {num_read} blocks and caches {num_cached}, but "
            "store is None",
            "pass one store, for example a DictStore, to all micro-batches of the program",
        )
    return attention(q_THD, k_TGD, v_TGD, packed, store, layer, scale)


def prepare_attention(
    packed: PackedMicroBatch,
    *,
    implementation: Implementation,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
    store: KeyValueStore | None = None,
) -> None:
    """Do ahead what the host does once per micro-batch for all layers, forward and backward.

    Call it while the device is busy with the micro-batch before, with the store that
    `tree_attention` will get and the blocks that the micro-batch reads placed in it. Only
    "triton" has such work; without this call, the first layer does it.

    Raises:
        BackendError: if the implementation, dtype or head dimension does not fit.
        PlanError: if the tokens are not packed in depth-first order.
    """
    _find(implementation)
    if implementation == "triton":
        from psrl.kernels.triton.attention import prepare_triton

        prepare_triton(packed, store, dtype, head_dim, device)


def _find(implementation: str) -> Callable[..., Any]:
    if implementation == "triton":
        if find_spec("triton") is None:
            raise BackendError(
                'implementation="triton" needs Triton, which is not installed',
                "pip install 'psrl[gpu]', or use implementation=\"parts\" on a CPU",
            )
        from psrl.kernels.triton.attention import triton_attention

        return triton_attention
    found = {"parts": parts_attention, "reference": reference_attention, "sdpa": sdpa_attention}
    if implementation not in found:
        raise BackendError(
            f"unknown implementation {implementation!r}",
            f"use one of {list(get_args(Implementation))}",
        )
    return found[implementation]


def _check_tensors(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packed: PackedMicroBatch) -> None:
    tensors = {"q": q_THD, "k": k_TGD, "v": v_TGD}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    if any(x.dim() != 3 for x in tensors.values()) or k_TGD.shape != v_TGD.shape:
        raise BackendError(f"expected q [T, H, D] and k, v [T, G, D], got {shapes}")
    num_tokens, num_heads, head_dim = q_THD.shape
    if k_TGD.shape[0] != num_tokens or packed.total_tokens != num_tokens:
        raise BackendError(
            f"micro-batch {packed.index} has {packed.total_tokens} tokens, got {shapes}"
        )
    if k_TGD.shape[2] != head_dim or head_dim < 1:
        raise BackendError(f"q, k and v need one head dimension >= 1, got {shapes}")
    if k_TGD.shape[1] < 1 or num_heads < 1 or num_heads % k_TGD.shape[1]:
        raise BackendError(f"query heads must be a multiple of key/value heads, got {shapes}")
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) > 1 or not q_THD.dtype.is_floating_point:
        raise BackendError(
            f"q, k and v need one float dtype, got {q_THD.dtype}, {k_TGD.dtype}, {v_TGD.dtype}"
        )
    if len({x.device for x in tensors.values()}) > 1:
        raise BackendError(
            f"q, k and v are on different devices: {q_THD.device}, {k_TGD.device}, {v_TGD.device}"
        )
    for name, x in tensors.items():
        if x.stride(-1) != 1 and head_dim > 1:
            raise BackendError(
                f"{name} has stride {x.stride(-1)} along the head dimension, expected 1",
                f"pass {name}.contiguous()",
            )
