"""The block index of a micro-batch on its device: built once, then found again by every layer.

Backward and recompute find the same index; it is built anew only if a block has moved, or for
other tiles or another device.
"""

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from psrl.core.plan.packing import LOCAL, PackedMicroBatch
from psrl.kernels.attention.buffer_store import BufferStore
from psrl.kernels.attention.key_rows import KeyRuns, cached_rows, key_runs, local_rows

from .block_index import key_index, query_index
from .configs import KernelTiles, Tiles


class QueryTensors(NamedTuple):
    """`block_index.QueryIndex` on the device, in the order of the kernels' arguments."""

    query_start: Tensor
    query_end: Tensor
    offsets: Tensor
    row: Tensor
    slot: Tensor
    order: Tensor


class KeyTensors(NamedTuple):
    """`block_index.KeyIndex` on the device, in the order of the kernel's arguments."""

    query_start: Tensor
    query_end: Tensor
    ranges: Tensor
    row: Tensor
    order: Tensor


class AttentionIndex(NamedTuple):
    """What the three kernels need.

    Attributes:
        reads: (block, start, end) of the cached rows that queries see, neighbours joined.
        forward, dq: visits of query blocks.
        local, cached: query blocks per tile of the micro-batch's own and of cached keys.
    """

    reads: tuple[tuple[int, int, int], ...]
    forward: QueryTensors
    dq: QueryTensors
    local: KeyTensors
    cached: KeyTensors


_indices: dict[int, dict[Any, AttentionIndex]] = {}


def attention_index(
    packed: PackedMicroBatch, store: Any, tiles: KernelTiles, device: torch.device
) -> AttentionIndex:
    """Index of a micro-batch, built at the first call.

    Raises:
        PlanError: if the tokens are not packed in depth-first order.
    """
    extents = None
    if isinstance(store, BufferStore):
        extents = {block: store.extent(block).start for block in packed.read_blocks}
    shapes = tuple((t.block_q, t.block_k) for t in (tiles.forward, tiles.dq, tiles.dkv))
    key = (shapes, device, None if extents is None else tuple(sorted(extents.items())))
    if id(packed) not in _indices:
        _indices[id(packed)] = {}
        weakref.finalize(packed, _indices.pop, id(packed), None)
    found = _indices[id(packed)]
    if key not in found:
        found[key] = _build(packed, extents, tiles, device)
    return found[key]


def _build(
    packed: PackedMicroBatch,
    extents: dict[int, int] | None,
    tiles: KernelTiles,
    device: torch.device,
) -> AttentionIndex:
    runs = key_runs(packed)
    cached = cached_rows(runs, None if extents is None else extents.__getitem__)
    local, num_queries = local_rows(runs), packed.total_tokens

    def visits(shape: Tiles) -> QueryTensors:
        index = query_index(cached, local, num_queries, shape.block_q, shape.block_k)
        return QueryTensors(*_upload([getattr(index, f) for f in QueryTensors._fields], device))

    forward = visits(tiles.forward)
    same = (tiles.dq.block_q, tiles.dq.block_k) == (tiles.forward.block_q, tiles.forward.block_k)
    keys = []
    for rows in (local, cached):
        index = key_index(rows, num_queries, tiles.dkv.block_q, tiles.dkv.block_k)
        keys.append(KeyTensors(*_upload([getattr(index, f) for f in KeyTensors._fields], device)))
    return AttentionIndex(_reads(runs), forward, forward if same else visits(tiles.dq), *keys)


def _reads(runs: KeyRuns) -> tuple[tuple[int, int, int], ...]:
    reads: list[tuple[int, int, int]] = []
    for block, start, end in zip(
        runs.source.tolist(), runs.start.tolist(), runs.end.tolist(), strict=True
    ):
        if block == LOCAL:
            continue
        if reads and reads[-1][0] == block and reads[-1][2] == start:
            start = reads.pop()[1]
        reads.append((block, start, end))
    return tuple(reads)


def _upload(arrays: list[Any], device: torch.device) -> list[Tensor]:
    """One copy for all arrays, that does not wait for the device."""
    host = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]))
    if device.type == "cuda":
        host = host.pin_memory()
    parts = host.to(device, non_blocking=True).split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]
