"""Block lifetimes follow the plan's table: allocated by forwards, released by the named op."""

import numpy as np
import pytest

from psrl.core.errors import PlanError
from psrl.core.plan.block_cache import BlockCache
from psrl.core.plan.schedule import Op
from psrl.core.plan.tables import Blocks


def table(*rows: tuple[int, int, int, str, int]) -> Blocks:
    """Rows of (block, owner, allocated tokens, release op, its micro-batch)."""
    block, owner, size, op, reader = zip(*rows, strict=True)
    return Blocks(
        rank=np.zeros(len(rows), np.int64),
        block=np.array(block),
        micro_batch=np.array(owner),
        start_row=np.zeros(len(rows), np.int64),
        num_tokens=np.array(size) - 1,
        allocated_tokens=np.array(size),
        release_op=np.array(op),
        release_micro_batch=np.array(reader),
    )


def test_forward_only_blocks_die_after_their_last_reader() -> None:
    cache = BlockCache(table((10, 0, 5, "forward", 1), (11, 0, 7, "forward", 2)))
    live = []
    for micro_batch in range(3):
        op = Op("forward", micro_batch)
        started = cache.begin(op)
        assert started == ([10, 11] if micro_batch == 0 else [])
        during = cache.live_tokens
        live.append((during, cache.end(op), cache.live_tokens))
    assert live == [(12, [], 12), (12, [10], 7), (7, [11], 0)]
    cache.end_program()
    assert cache.allocator.peak_tokens == 12


def test_gradients_live_from_first_reader_to_owners_backward() -> None:
    cache = BlockCache(table((3, 0, 4, "backward", 0)))
    for op in (Op("forward", 0), Op("forward", 1)):
        cache.begin(op)
        cache.end(op)
    assert (cache.gradient_tokens, cache.has_gradient(3)) == (0, False)
    assert [cache.touch_gradient(3), cache.touch_gradient(3)] == [True, False]
    assert (cache.gradient_tokens, cache.has_gradient(3)) == (4, True)
    assert cache.end(Op("backward", 1)) == []
    assert cache.end(Op("backward", 0)) == [3]
    assert (cache.gradient_tokens, cache.live_tokens, cache.has_gradient(3)) == (0, 0, False)


def test_recompute_allocates_nothing() -> None:
    cache = BlockCache(table((3, 0, 4, "backward", 0)))
    cache.begin(Op("forward", 0))
    assert cache.begin(Op("recompute", 0)) == []
    assert cache.live_tokens == 4


@pytest.mark.parametrize("reader", [-1, 0])
def test_blocks_kept_to_the_end(reader: int) -> None:
    cache = BlockCache(table((3, 0, 4, "end", reader)))
    cache.begin(Op("forward", 0))
    assert cache.end(Op("forward", 0)) == []
    cache.end_program()
    assert cache.live_tokens == 0


def test_block_whose_release_never_runs() -> None:
    cache = BlockCache(table((3, 0, 4, "forward", 7)))
    cache.begin(Op("forward", 0))
    with pytest.raises(PlanError, match=r"1 blocks \(4 tokens\) are never released"):
        cache.end_program()


def test_dead_blocks_have_no_extent_and_no_gradient() -> None:
    cache = BlockCache(table((3, 0, 4, "backward", 0)))
    for access in (cache.extent, cache.touch_gradient):
        with pytest.raises(PlanError, match="block 3 is read or released while it is not alive"):
            access(3)


def test_capacity_bounds_the_live_tokens() -> None:
    cache = BlockCache(table((1, 0, 4, "end", -1), (2, 1, 4, "end", -1)), capacity_tokens=7)
    cache.begin(Op("forward", 0))
    with pytest.raises(PlanError, match="buffer of 7 tokens"):
        cache.begin(Op("forward", 1))
