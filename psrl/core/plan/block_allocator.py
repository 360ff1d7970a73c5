"""Extents of cached tokens inside one linear key/value buffer.

Torch-free bookkeeping, used by the simulator to account bytes and by the backend to place real
tensors, so that both see the same addresses.
"""

from bisect import bisect
from typing import NamedTuple

from psrl.core.errors import PlanError


class Extent(NamedTuple):
    """Rows `[start, start + num_tokens)` of the buffer."""

    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class BlockAllocator:
    """First-fit allocation of variable-size extents; neighbouring free extents are merged.

    Args:
        capacity_tokens: rows of the buffer; None grows without limit and only records the
            high-water mark, which is the capacity a real buffer needs.
    """

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.live_tokens = 0
        self.peak_tokens = 0
        self.high_water_tokens = 0
        self._free: list[Extent] = []
        self._live: dict[int, Extent] = {}

    def allocate(self, block: int, num_tokens: int) -> Extent:
        """Place a block.

        Raises:
            PlanError: if the block is live already, empty, or does not fit.
        """
        if block in self._live or num_tokens < 1:
            raise PlanError(
                f"block {block}: cannot allocate {num_tokens} tokens"
                + (" twice" if block in self._live else "")
            )
        extent = self._take_first_fit(num_tokens)
        self._live[block] = extent
        self.live_tokens += num_tokens
        self.peak_tokens = max(self.peak_tokens, self.live_tokens)
        return extent

    def _take_first_fit(self, num_tokens: int) -> Extent:
        for i, hole in enumerate(self._free):
            if hole.num_tokens >= num_tokens:
                rest = Extent(hole.start + num_tokens, hole.num_tokens - num_tokens)
                self._free[i : i + 1] = [rest] if rest.num_tokens else []
                return Extent(hole.start, num_tokens)
        start = self.high_water_tokens
        last_is_free = bool(self._free) and self._free[-1].end == start
        if last_is_free:
            start = self._free[-1].start
        if self.capacity_tokens is not None and start + num_tokens > self.capacity_tokens:
            raise PlanError(
                f"key/value buffer of {self.capacity_tokens} tokens cannot place {num_tokens} more "
                f"({self.live_tokens} live)"
            )
        if last_is_free:
            self._free.pop()
        self.high_water_tokens = start + num_tokens
        return Extent(start, num_tokens)

    def release(self, block: int) -> Extent:
        """Free a live block.

        Raises:
            PlanError: if the block is not live.
        """
        extent = self.extent(block)
        del self._live[block]
        self.live_tokens -= extent.num_tokens
        start, end = extent.start, extent.end
        at = bisect(self._free, extent)
        if at < len(self._free) and self._free[at].start == end:
            end = self._free.pop(at).end
        if at and self._free[at - 1].end == start:
            at -= 1
            start = self._free.pop(at).start
        self._free.insert(at, Extent(start, end - start))
        return extent

    def extent(self, block: int) -> Extent:
        """Where a live block is.

        Raises:
            PlanError: if the block is not live: its rows may hold another block by now.
        """
        if block not in self._live:
            raise PlanError(f"block {block} is read or released while it is not alive")
        return self._live[block]

    @property
    def num_live_blocks(self) -> int:
        return len(self._live)
