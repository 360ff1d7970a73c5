"""First-fit extents: live ones never overlap, free space is conserved and merged."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psrl.core.errors import PlanError
from psrl.core.plan.block_allocator import BlockAllocator, Extent


class Allocation(RuleBasedStateMachine):
    """The allocator against a plain array of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator()
        self.live: dict[int, Extent] = {}
        self.next_block = 0
        self.peak = self.high_water = 0

    @rule(num_tokens=st.integers(1, 6))
    def allocate(self, num_tokens: int) -> None:
        extent = self.allocator.allocate(self.next_block, num_tokens)
        assert extent == (self.first_fit(num_tokens), num_tokens)
        self.live[self.next_block] = extent
        self.next_block += 1
        self.peak = max(self.peak, sum(e.num_tokens for e in self.live.values()))
        self.high_water = max(self.high_water, extent.end)

    def first_fit(self, num_tokens: int) -> int:
        taken = {row for e in self.live.values() for row in range(e.start, e.end)}
        start = 0
        while any(row in taken for row in range(start, start + num_tokens)):
            start += 1
        return start

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.live)))
        assert self.allocator.release(block) == self.live.pop(block)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def allocate_live_block_again(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.live)))
        with pytest.raises(PlanError, match=f"block {block}: cannot allocate 2 tokens twice"):
            self.allocator.allocate(block, 2)

    @rule()
    def release_unknown_block(self) -> None:
        with pytest.raises(PlanError, match="not alive"):
            self.allocator.release(self.next_block)

    @invariant()
    def rows_are_conserved(self) -> None:
        rows = [row for e in self.live.values() for row in range(e.start, e.end)]
        assert len(rows) == len(set(rows)) == self.allocator.live_tokens
        assert self.allocator.num_live_blocks == len(self.live)
        assert self.allocator.peak_tokens == self.peak
        assert self.allocator.high_water_tokens == self.high_water
        for block, extent in self.live.items():
            assert self.allocator.extent(block) == extent


Allocation.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_allocation = Allocation.TestCase


def test_neighbouring_holes_become_one() -> None:
    allocator = BlockAllocator()
    for block in range(5):
        allocator.allocate(block, 2)
    for block in (1, 3, 2):
        allocator.release(block)
    assert allocator.allocate(9, 6) == (2, 6)
    assert allocator.high_water_tokens == 10


def test_hole_at_the_end_is_extended() -> None:
    allocator = BlockAllocator()
    allocator.allocate(0, 4)
    allocator.allocate(1, 2)
    allocator.release(1)
    assert allocator.allocate(2, 5) == (4, 5)
    assert allocator.high_water_tokens == 9


def test_capacity_is_kept_and_a_refused_block_changes_nothing() -> None:
    allocator = BlockAllocator(capacity_tokens=8)
    allocator.allocate(0, 5)
    allocator.allocate(1, 3)
    allocator.release(1)
    with pytest.raises(PlanError, match=r"buffer of 8 tokens cannot place 4 more \(5 live\)"):
        allocator.allocate(2, 4)
    assert (allocator.live_tokens, allocator.high_water_tokens) == (5, 8)
    assert allocator.allocate(2, 3) == (5, 3)


def test_empty_block_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot allocate 0 tokens"):
        BlockAllocator().allocate(0, 0)
