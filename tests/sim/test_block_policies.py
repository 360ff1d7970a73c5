"""Block policies: what they cache, what they waste, and what evictions cost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.check_plan import check_plan
from psrl.core.errors import ConfigError
from psrl.core.packing import pack_rank
from psrl.core.plan import Blocks, Plan
from psrl.core.sample import SampleBatch, make_batch
from psrl.sim import simulate
from psrl.sim.block_policies import BlockPolicy
from psrl.sim.block_replay import apply_block_policy
from tests.random_plans import random_batch, random_program
from tests.sim.cases import PlainCostModel, make_plan

cases = st.tuples(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from([1, 2]))
few = settings(max_examples=25)
COSTS = PlainCostModel(forward_token_s=1.0)


def valid_plan(seed: int, num_ranks: int, num_stages: int) -> tuple[Plan, SampleBatch]:
    """A forward-only program and one update that pass `check_plan`, with dynamic caching."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    programs = [
        random_program(rng, batch, num_ranks=num_ranks, is_update=is_update).program
        for is_update in (False, True)
    ]
    return make_plan(programs, num_ranks, num_stages), batch


@few
@given(
    cases,
    st.sampled_from(["adaptive", "fixed:1", "fixed:3", "fixed:16"]),
    st.sampled_from(["dynamic", "everything"]),
)
def test_a_plan_with_other_blocks_is_valid_and_takes_the_same_time(
    case: tuple[int, int, int], blocks: str, cache: str
) -> None:
    plan, batch = valid_plan(*case)
    other, _ = apply_block_policy(plan, batch, BlockPolicy.parse(blocks, cache))
    check_plan(other, batch, memory_fraction=None)
    assert np.array_equal(simulate(other, batch).end_s, simulate(plan, batch).end_s)


def allocated_per_op(plan: Plan, batch: SampleBatch) -> np.ndarray:
    return simulate(plan, batch).kv_bytes


@few
@given(cases)
def test_each_policy_holds_at_least_as_much_as_the_finer_one(case: tuple[int, int, int]) -> None:
    plan, batch = valid_plan(*case)

    def live(blocks: str, cache: str = "dynamic") -> np.ndarray:
        other, _ = apply_block_policy(plan, batch, BlockPolicy.parse(blocks, cache))
        return allocated_per_op(other, batch)

    finest = live("fixed:1")
    assert (live("adaptive") == finest).all()
    assert (live("fixed:4") >= finest).all()
    assert (live("adaptive", "everything") >= finest).all()
    # Random plans cache what is read until its last use, in blocks of whole runs.
    assert (allocated_per_op(plan, batch) >= finest).all()


@few
@given(cases, st.integers(1, 40), st.sampled_from(["recompute", "offload"]))
def test_a_capacity_trades_memory_for_misses(
    case: tuple[int, int, int], capacity: int, retention: str
) -> None:
    plan, batch = valid_plan(*case)

    def section(cache: str) -> dict[str, float]:
        return apply_block_policy(plan, batch, BlockPolicy.parse("fixed:1", cache), COSTS)[1]

    free, tight = section("dynamic"), section(f"{retention}:{capacity}")
    assert tight["peak_cached_bytes"] <= free["peak_cached_bytes"]
    assert free["cache_hit_rate"] == 1.0
    assert free["extra_s"] == 0.0
    missed = tight["recomputed_tokens"] + tight["fetched_tokens"]
    assert (tight["cache_hit_rate"] < 1.0) == (missed > 0) == (tight["extra_s"] > 0.0)
    roomy = section(f"{retention}:100000")
    assert {**roomy, "retention": "", "capacity_tokens": 0} == {
        **free,
        "retention": "",
        "capacity_tokens": 0,
    }
    assert tight["offloaded_tokens"] <= sum(p.unique_tokens for p in plan.programs)


def two_branches() -> tuple[Plan, SampleBatch]:
    """A prefix of 5 tokens; three samples of 2 more; a micro-batch each, forward only."""
    batch = make_batch(
        [[1, 2, 3, 4, 5, 6, 6], [1, 2, 3, 4, 5, 7, 7], [1, 2, 3, 4, 5, 8, 8]], [[(5, 7)]] * 3
    )
    rng = np.random.default_rng(0)
    program = random_program(rng, batch, is_update=False, max_micro_batches=1).program
    segments = program.segments
    micro_batch = np.searchsorted(np.cumsum(segments.num_tokens), [7, 9, 11])
    owner = np.searchsorted(micro_batch, np.arange(len(segments)))
    table = program.micro_batches
    program = replace(
        program,
        phases=("reference",),
        segments=replace(segments, micro_batch=owner),
        micro_batches=type(table)(
            rank=np.zeros(3, np.int64),
            micro_batch=np.arange(3),
            activation=np.array(["keep"] * 3),
            num_tokens=np.array([7, 2, 2]),
            pairs=np.array([28, 13, 13]),
            head_tokens=np.array([2, 2, 2]),
            forward_s=np.zeros(3),
            backward_s=np.zeros(3),
        ),
        schedule=type(program.schedule)(
            rank=np.zeros(3, np.int64),
            op=np.array(["forward"] * 3),
            micro_batch=np.arange(3),
        ),
        blocks=Blocks(
            *(np.array([value]) for value in (0, 0, 0, 0, 5, 5, "forward", 2)),
        ),
    )
    return make_plan([program]), batch


def test_padding_metadata_and_lost_hits_by_hand() -> None:
    plan, batch = two_branches()
    found = {
        blocks: apply_block_policy(plan, batch, BlockPolicy.parse(blocks, "dynamic"))[1]
        for blocks in ("adaptive", "fixed:1", "fixed:4")
    }
    adaptive, tokens, fours = found.values()
    assert (adaptive["num_blocks"], adaptive["num_block_reads"]) == (1, 2)
    assert (tokens["num_blocks"], tokens["num_block_reads"]) == (5, 10)
    # The owner's chain has 7 rows: blocks of 4 and 3, of which the second holds one read row.
    assert (fours["num_blocks"], fours["num_block_reads"]) == (2, 4)
    assert fours["internal_fragmentation"] == pytest.approx(1 / 8)
    assert fours["unread_fraction"] == pytest.approx(2 / 7)
    assert adaptive["internal_fragmentation"] == adaptive["unread_fraction"] == 0.0
    # In whole blocks of 4 two samples match 4 tokens instead of 5, of 21.
    assert fours["hit_rate_lost"] == pytest.approx(2 / 21)
    assert adaptive["hit_rate_lost"] == 0.0
    everything = apply_block_policy(plan, batch, BlockPolicy.parse("adaptive", "everything"))[1]
    assert everything["unread_fraction"] == pytest.approx(1 - 5 / 11)


def test_evictions_by_hand() -> None:
    plan, batch = two_branches()

    def section(blocks: str, cache: str) -> dict[str, float]:
        policy = BlockPolicy.parse(blocks, cache)
        return apply_block_policy(plan, batch, policy, COSTS, pcie_bytes_per_s=1e3)[1]

    # LRU caches all rows: 7, then 2 more exceed 8, and the two least recently used go: rows 5, 6.
    lru = section("fixed:1", "lru:8")
    assert (lru["cache_hit_rate"], lru["extra_s"]) == (1.0, 0.0)
    # Two blocks of 4 stay in use for good; with one branch's rows on top nothing can be evicted.
    assert section("fixed:4", "lru:1")["cache_hit_rate"] == 1.0
    assert section("adaptive", "recompute:1")["recomputed_tokens"] == 0


@pytest.mark.parametrize(
    ("blocks", "cache"),
    [
        ("fixed", "dynamic"),
        ("fixed:0", "dynamic"),
        ("adaptive:4", "dynamic"),
        ("paged:4", "dynamic"),
        ("adaptive", "lru"),
        ("adaptive", "dynamic:7"),
        ("adaptive", "offload:-1"),
        ("adaptive", "belady:7"),
    ],
)
def test_other_words_are_refused(blocks: str, cache: str) -> None:
    with pytest.raises(ConfigError, match=r"blocks|cache"):
        BlockPolicy.parse(blocks, cache)


def test_the_plan_of_every_rank_keeps_its_reads() -> None:
    plan, batch = valid_plan(4, 2, 1)
    other, _ = apply_block_policy(plan, batch, BlockPolicy.parse("fixed:2", "dynamic"))
    for before, after in zip(plan.programs, other.programs, strict=True):
        tree = before.tree(batch)
        for rank in range(2):
            packed = pack_rank(after.on_rank(rank), tree)
            assert [p.pairs for p in packed] == [
                p.pairs for p in pack_rank(before.on_rank(rank), tree)
            ]
