"""Which cached blocks live when, driven by the plan's block table.

The simulator accounts bytes with it and the backend owns buffers through it, so the simulated
curve and the executed one are the same bookkeeping. Dynamic block caching (a block dies after
its last reader) and keep-everything differ only in the table's release columns.
"""

from collections import defaultdict

from psrl.core.errors import PlanError

from .block_allocator import BlockAllocator, Extent
from .schedule import Op
from .tables import Blocks


class BlockCache:
    """Live blocks of one rank while its ops run in order.

    Args:
        blocks: one rank's block table.
        capacity_tokens: rows of the real buffer; None only accounts.
    """

    def __init__(self, blocks: Blocks, capacity_tokens: int | None = None) -> None:
        self.allocator = BlockAllocator(capacity_tokens)
        self.gradient_tokens = 0
        self._size = dict(zip(blocks.block.tolist(), blocks.allocated_tokens.tolist(), strict=True))
        self._owned: dict[int, list[int]] = defaultdict(list)
        self._released: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._with_gradient: set[int] = set()
        for block, owner, op, reader in zip(
            blocks.block.tolist(),
            blocks.micro_batch.tolist(),
            blocks.release_op.tolist(),
            blocks.release_micro_batch.tolist(),
            strict=True,
        ):
            self._owned[owner].append(block)
            self._released[op, -1 if op == "end" else reader].append(block)

    @property
    def live_tokens(self) -> int:
        """Allocated tokens of the live blocks."""
        return self.allocator.live_tokens

    def blocks_of(self, micro_batch: int) -> list[int]:
        """Blocks that a micro-batch's forward fills."""
        return self._owned[micro_batch]

    def begin(self, op: Op) -> list[int]:
        """Allocate what the op fills; returns those blocks. Recomputing refills live blocks."""
        if op.kind != "forward":
            return []
        for block in self._owned[op.micro_batch]:
            self.allocator.allocate(block, self._size[block])
        return self._owned[op.micro_batch]

    def touch_gradient(self, block: int) -> bool:
        """Allocate a live block's gradient accumulators at its first reader's backward.

        Returns whether they are new, so that the caller zeroes them once.
        """
        self.allocator.extent(block)
        if block in self._with_gradient:
            return False
        self._with_gradient.add(block)
        self.gradient_tokens += self._size[block]
        return True

    def has_gradient(self, block: int) -> bool:
        return block in self._with_gradient

    def end(self, op: Op) -> list[int]:
        """Release what dies with the op; returns those blocks."""
        released = self._released.get((op.kind, op.micro_batch), [])
        self._release(released)
        return released

    def end_program(self) -> None:
        """Release blocks kept to the end.

        Raises:
            PlanError: if a block outlives the program: its release op never ran.
        """
        self._release(self._released.get(("end", -1), []))
        if self.allocator.num_live_blocks:
            raise PlanError(
                f"{self.allocator.num_live_blocks} blocks ({self.live_tokens} tokens) are never "
                "released"
            )

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.allocator.release(block)
            if block in self._with_gradient:
                self._with_gradient.remove(block)
                self.gradient_tokens -= self._size[block]

    def extent(self, block: int) -> Extent:
        """Buffer rows of a live block."""
        return self.allocator.extent(block)
