"""Real key/value buffers of one rank's program, placed and released by the plan's block table.

Rows of all layers share one placement: block b owns the same rows in every layer's buffer. The
same bookkeeping (`psrl.core.plan.block_cache`) gives the simulated curve. The store is a
`psrl.kernels.attention.buffer_store.BufferStore`: kernels may read and add in place.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.plan.block_allocator import Extent
from psrl.core.plan.block_cache import BlockCache
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import Op


def buffer_rows(program: Program, ops: Iterable[Op]) -> int:
    """Rows that first-fit placement of one rank's blocks needs, from a dry run of a stage's ops.

    Raises:
        PlanError: if a block is never released.
    """
    cache = BlockCache(program.blocks)
    for op in ops:
        cache.begin(op)
        cache.end(op)
    cache.end_program()
    return cache.allocator.high_water_tokens


class BlockStore:
    """Keys and values of live blocks, and the gradients that readers add to them.

    Dimension letters: N rows of a block, G key/value heads of the rank, D head dimension.

    Args:
        program: one rank's program.
        num_rows: rows of the buffer, see `buffer_rows`.
        num_layers: layers of the stage.
        first_layer: number of its first layer in the whole model; `layer` arguments are such
            numbers.
    """

    def __init__(
        self,
        program: Program,
        num_rows: int,
        num_layers: int,
        num_groups: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        first_layer: int = 0,
    ) -> None:
        self._first_layer = first_layer
        self._cache = BlockCache(program.blocks, capacity_tokens=num_rows)
        table = program.blocks
        self._num_rows = dict(zip(table.block.tolist(), table.num_tokens.tolist(), strict=True))
        shape = (num_layers, 2, num_rows, num_groups, head_dim)
        # Kernels read rows beside visible ones with weight zero, so no row may hold a NaN.
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._sums: Tensor | None = None

    def begin(self, op: Op) -> None:
        """Place the blocks that the op fills."""
        self._cache.begin(op)

    def end(self, op: Op) -> None:
        """Release the blocks that die with the op."""
        self._cache.end(op)

    def finish(self) -> None:
        """End the program.

        Raises:
            PlanError: if a block was never released.
        """
        self._cache.end_program()

    def extent(self, block: int) -> Extent:
        """Rows of a live block in every layer's buffers.

        Raises:
            PlanError: if the block is not alive: its rows may hold another block by now.
        """
        return self._cache.extent(block)

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [rows, G, D] each."""
        rows = self._buffer[layer - self._first_layer]
        return rows[0], rows[1]

    def gradient_buffers(self, layer: int, blocks: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Accumulators of a layer, [rows, G, D] each, to which gradients of `blocks` are added."""
        sums = self._touch(blocks)[layer - self._first_layer]
        return sums[0], sums[1]

    def _touch(self, blocks: Iterable[int]) -> Tensor:
        """Zero the accumulators of blocks whose first reader's backward this is.

        The accumulators have the rows of the key/value buffer, in float32 or wider, and exist
        from the first backward that needs them.
        """
        if self._sums is None:
            dtype = torch.promote_types(self._buffer.dtype, torch.float32)
            self._sums = torch.empty_like(self._buffer, dtype=dtype)
        for block in blocks:
            if self._cache.touch_gradient(block):
                rows = self._cache.extent(block)
                self._sums[:, :, rows.start : rows.end] = 0
        return self._sums

    def write(self, block: int, layer: int, k_NGD: Tensor, v_NGD: Tensor) -> None:
        """Copy a live block's rows into the buffer.

        Raises:
            BackendError: if the number of rows is not the plan's.
            PlanError: if the block is not alive.
        """
        if len(k_NGD) != self._num_rows.get(block) or len(v_NGD) != len(k_NGD):
            raise BackendError(
                f"block {block} has {self._num_rows.get(block)} rows in the plan, got "
                f"{len(k_NGD)} keys and {len(v_NGD)} values"
            )
        k, v = self.read(block, layer)
        k.copy_(k_NGD.detach())
        v.copy_(v_NGD.detach())

    def read(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a live block's keys and values, [N, G, D] each.

        Raises:
            PlanError: if the block is not alive.
        """
        return self._rows(self._buffer, block, layer)

    def _rows(self, buffer: Tensor, block: int, layer: int) -> tuple[Tensor, Tensor]:
        start = self._cache.extent(block).start
        rows = buffer[layer - self._first_layer, :, start : start + self._num_rows[block]]
        return rows[0], rows[1]

    def add_gradient(
        self, block: int, layer: int, start: int, end: int, dk: Tensor, dv: Tensor
    ) -> None:
        """Add a reader's gradient of rows `[start, end)`, [end - start, G, D] each.

        Raises:
            PlanError: if the block is not alive.
        """
        sum_k, sum_v = self._rows(self._touch([block]), block, layer)
        sum_k[start:end] += dk
        sum_v[start:end] += dv

    def gradient(self, block: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """Accumulated dK and dV, [N, G, D] each; None if no reader has added any."""
        if self._sums is None or not self._cache.has_gradient(block):
            return None
        return self._rows(self._sums, block, layer)

    def _row_bytes(self, buffer: Tensor) -> int:
        layers, _, _, groups, head_dim = buffer.shape
        return 2 * layers * groups * head_dim * buffer.element_size()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the rows that live blocks own."""
        return self._cache.live_tokens * self._row_bytes(self._buffer)

    @property
    def kv_gradient_bytes(self) -> int:
        """Bytes of the accumulators of live blocks that some reader has added to."""
        if self._sums is None:
            return 0
        return self._cache.gradient_tokens * self._row_bytes(self._sums)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the whole key/value buffer: the placement's high-water mark."""
        return self._buffer.nbytes

    @property
    def buffer(self) -> Tensor:
        """[layers, 2, rows, G, D] keys and values of all blocks."""
        return self._buffer
