"""A store whose blocks are extents of one buffer per layer, which kernels read and add to in place.

`BufferStore` is the contract; `LinearStore` keeps it with first-fit placement.
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.plan.block_allocator import BlockAllocator, Extent

from .store import KeyValueStore, accumulator_dtype


@runtime_checkable
class BufferStore(KeyValueStore, Protocol):
    """Rows of a block are rows `extent(block)` of the buffers of every layer.

    A block stays at its extent while it is alive. Rows outside live blocks hold finite numbers:
    tensor descriptors read them beside visible rows, with weight zero.
    """

    def extent(self, block: int) -> Extent:
        """Where a live block is."""

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [capacity, G, D] each, with equal strides."""

    def gradient_buffers(self, layer: int, blocks: Iterable[int]) -> tuple[Tensor, Tensor]:
        """float32 accumulators of a layer, [capacity, G, D] each, heads contiguous.

        The caller adds to rows of `blocks`, which are zero before the first reader adds.
        """


class LinearStore:
    """Buffers of fixed capacity; a block is placed by its first write.

    Args:
        capacity_tokens: rows of the buffers.
    """

    def __init__(
        self,
        capacity_tokens: int,
        num_layers: int,
        num_groups: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._allocator = BlockAllocator(capacity_tokens)
        shape = (num_layers, 2, capacity_tokens, num_groups, head_dim)
        self._rows = torch.zeros(shape, dtype=dtype, device=device)
        self._sums = torch.zeros(shape, dtype=accumulator_dtype(dtype), device=device)
        self._live: set[int] = set()
        self._has_gradient: set[tuple[int, int]] = set()

    def extent(self, block: int) -> Extent:
        """Where a live block is.

        Raises:
            PlanError: if the block is not alive.
        """
        return self._allocator.extent(block)

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [capacity, G, D] each."""
        return self._rows[layer, 0], self._rows[layer, 1]

    def gradient_buffers(self, layer: int, blocks: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Accumulators of a layer, [capacity, G, D] each; `blocks` have a gradient from now on."""
        self._has_gradient.update((block, layer) for block in blocks)
        return self._sums[layer, 0], self._sums[layer, 1]

    def write(self, block: int, layer: int, k_NGD: Tensor, v_NGD: Tensor) -> None:
        """Copy the rows of a block.

        Raises:
            PlanError: if the buffer has no room.
            BackendError: if the block has another number of rows already.
        """
        if block not in self._live:
            self._allocator.allocate(block, len(k_NGD))
            self._live.add(block)
        k, v = self.read(block, layer)
        if len(k_NGD) != len(k) or len(v_NGD) != len(k):
            raise BackendError(
                f"block {block} has {len(k)} rows, got {len(k_NGD)} keys and {len(v_NGD)} values"
            )
        k.copy_(k_NGD.detach())
        v.copy_(v_NGD.detach())

    def read(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a block's keys and values, [N, G, D] each."""
        return self._views(self._rows, block, layer)

    def add_gradient(
        self, block: int, layer: int, start: int, end: int, dk: Tensor, dv: Tensor
    ) -> None:
        """Add a reader's gradient of rows `[start, end)`, [end - start, G, D] each."""
        self._has_gradient.add((block, layer))
        sum_k, sum_v = self._views(self._sums, block, layer)
        sum_k[start:end] += dk
        sum_v[start:end] += dv

    def gradient(self, block: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """Accumulated dK and dV, [N, G, D] each; None if no reader has added any."""
        if (block, layer) not in self._has_gradient:
            return None
        return self._views(self._sums, block, layer)

    def release(self, block: int) -> None:
        """Forget a block's rows and gradients in all layers."""
        extent = self._allocator.release(block)
        self._sums[:, :, extent.start : extent.end] = 0
        self._live.remove(block)
        self._has_gradient = {key for key in self._has_gradient if key[0] != block}

    def _views(self, buffer: Tensor, block: int, layer: int) -> tuple[Tensor, Tensor]:
        extent = self._allocator.extent(block)
        rows = buffer[layer, :, extent.start : extent.end]
        return rows[0], rows[1]
