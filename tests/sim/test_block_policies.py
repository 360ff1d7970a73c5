"""Block policies: what they cache, what they waste, and what evictions cost."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import ConfigError
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.packing import pack_rank
from psrl.core.plan.plan import Plan
from psrl.core.plan.schedule import Op
from psrl.core.plan.tables import Blocks
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.sim import simulate
from psrl.sim.blocks.block_effects import apply_block_policy
from psrl.sim.blocks.block_policies import BlockPolicy, CachedReads, policy_blocks
from psrl.sim.blocks.block_replay import Replay, replay_blocks
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
def test_a_plan_with_other_blocks_is_valid_and_its_bytes_are_those_of_its_tables(
    case: tuple[int, int, int], blocks: str, cache: str
) -> None:
    plan, batch = valid_plan(*case)
    other = apply_block_policy(plan, batch, BlockPolicy.parse(blocks, cache))
    check_plan(other.plan, batch, memory_fraction=None)
    tables = simulate(other.plan, batch)
    assert np.array_equal(tables.end_s, simulate(plan, batch).end_s)
    replayed = simulate(other.plan, batch, effects=other.effects)
    assert np.array_equal(replayed.kv_bytes, tables.kv_bytes)
    assert np.array_equal(replayed.activation_bytes, tables.activation_bytes)


@few
@given(
    cases,
    st.sampled_from(["adaptive", "fixed:1", "fixed:3"]),
    st.sampled_from(["everything", "lru:7", "recompute:3", "offload:3"]),
)
def test_an_op_lasts_longer_by_exactly_what_its_blocks_cost(
    case: tuple[int, int, int], blocks: str, cache: str
) -> None:
    plan, batch = valid_plan(*case)
    policy = BlockPolicy.parse(blocks, cache)
    other = apply_block_policy(plan, batch, policy, COSTS, pcie_bytes_per_s=1e3)
    bare = simulate(plan, batch, COSTS)
    dearer = simulate(other.plan, batch, COSTS, effects=other.effects)
    per_token = MemoryModel(plan.model, plan.cluster, plan.parallel).kv_bytes_per_token
    for index, program in enumerate(plan.programs):
        effect = other.effects[index]
        first = np.searchsorted(np.sort(program.schedule.rank), np.arange(plan.num_ranks + 1))
        for phase, rank, stage in product(program.phases, range(case[1]), range(case[2])):
            mask = (bare.phase == phase) & (bare.rank == rank) & (bare.stage == stage)
            mask &= (bare.program == index) & (bare.micro_batch >= 0)
            before, after = bare.where(mask), dearer.where(mask)
            mine = stage, slice(first[rank], first[rank + 1])
            added = (after.end_s - after.start_s) - (before.end_s - before.start_s)
            np.testing.assert_allclose(added, effect.extra_s[mine], atol=1e-9)
            assert (after.kv_bytes == effect.live_tokens[mine] * per_token).all()
            more = after.activation_bytes - before.activation_bytes
            # An update's activations hold the stage inputs already; one stage needs only ids.
            may_keep = not program.is_update and case[2] > 1 and ":" in cache
            assert (more >= 0).all() if may_keep else not more.any()


def allocated_per_op(plan: Plan, batch: SampleBatch) -> np.ndarray:
    return simulate(plan, batch).kv_bytes


@pytest.mark.slow
@few
@given(cases)
def test_each_policy_holds_at_least_as_much_as_the_finer_one(case: tuple[int, int, int]) -> None:
    plan, batch = valid_plan(*case)

    def live(blocks: str, cache: str = "dynamic") -> np.ndarray:
        other = apply_block_policy(plan, batch, BlockPolicy.parse(blocks, cache))
        return allocated_per_op(other.plan, batch)

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
        policy = BlockPolicy.parse("fixed:1", cache)
        return apply_block_policy(plan, batch, policy, COSTS).metrics

    free, tight = section("dynamic"), section(f"{retention}:{capacity}")
    assert tight["peak_cached_bytes"] <= free["peak_cached_bytes"]
    assert free["cache_hit_rate"] == 1.0
    assert free["recompute_s"] == free["transfer_s"] == 0.0
    # Stages evict for themselves; the counts are those of the last one.
    missed = tight["recomputed_tokens"] + tight["fetched_tokens"]
    assert (tight["cache_hit_rate"] < 1.0) == (missed > 0)
    assert missed == 0 or tight["recompute_s"] + tight["transfer_s"] > 0.0
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


def test_a_block_dies_with_the_reader_that_runs_last() -> None:
    """Whatever the readers' numbers; rows that nobody reads do not matter, in updates either."""
    plan, batch = two_branches()
    (program,) = plan.programs
    packed = pack_rank(program, program.tree(batch))
    whole = BlockPolicy(block_tokens=8)
    for order in ([0, 1, 2], [0, 2, 1]):
        ordered = replace(program, schedule=replace(program.schedule, micro_batch=np.array(order)))
        reads = CachedReads.of(ordered, packed)
        blocks = policy_blocks(ordered, packed, reads, whole)
        assert blocks.release_micro_batch.tolist() == [order[-1]]
    trained = replace(program, is_update=True)
    blocks = policy_blocks(trained, packed, CachedReads.of(trained, packed), whole)
    assert blocks.num_tokens.tolist() == [7]
    assert blocks.release_micro_batch.tolist() == [0]


def test_padding_metadata_and_lost_hits_by_hand() -> None:
    plan, batch = two_branches()
    found = {
        blocks: apply_block_policy(plan, batch, BlockPolicy.parse(blocks, "dynamic")).metrics
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
    everything = apply_block_policy(plan, batch, BlockPolicy.parse("adaptive", "everything"))
    assert everything.metrics["unread_fraction"] == pytest.approx(1 - 5 / 11)


def test_look_ups_by_hand() -> None:
    """2 heads in 4 layers; 0.8 of 100 GB/s; two readers of one query tile each, one phase."""
    plan, batch = two_branches()
    found = {
        blocks: apply_block_policy(plan, batch, BlockPolicy.parse(blocks, "dynamic")).metrics
        for blocks in ("adaptive", "fixed:1", "fixed:4")
    }
    per_byte_s = 2 * 4 / (0.8 * 1e11)
    expected = {"adaptive": 2 * 16, "fixed:1": 2 * 5 * 8, "fixed:4": 2 * 2 * 8}
    for blocks, nbytes in expected.items():
        assert found[blocks]["access_s"] == pytest.approx(nbytes * per_byte_s)
        assert found[blocks]["metadata_bytes"] == nbytes / 2


def test_a_backward_looks_up_twice() -> None:
    plan, batch = valid_plan(3, 1, 1)
    other = apply_block_policy(plan, batch, BlockPolicy.parse("fixed:2", "dynamic"))
    update = plan.programs[1].schedule
    access_s = other.effects[1].access_s[0]
    of = {(o, m): s for o, m, s in zip(update.op, update.micro_batch, access_s, strict=True)}
    forward_s = np.array([of["forward", m] for m in np.unique(update.micro_batch)])
    backward_s = np.array([of["backward", m] for m in np.unique(update.micro_batch)])
    assert forward_s.any()
    np.testing.assert_allclose(backward_s, 2 * forward_s)


def cache_of(sizes: list[int], readers: list[int], cache: str) -> Replay:
    """Block k is written by forward k; then a forward per entry of `readers` reads that block."""
    count = len(sizes)
    table = Blocks(
        rank=np.zeros(count, np.int64),
        block=np.arange(count),
        micro_batch=np.arange(count),
        start_row=np.zeros(count, np.int64),
        num_tokens=np.array(sizes),
        allocated_tokens=np.array(sizes),
        release_op=np.array(["end"] * count),
        release_micro_batch=np.full(count, -1),
    )
    ops = [Op("forward", m) for m in range(count + len(readers))]
    reading = {m: [readers[m - count]] if m >= count else [] for m in range(len(ops))}
    return replay_blocks(ops, table, reading, BlockPolicy.parse("adaptive", cache))


def test_lru_below_the_working_set_by_hand() -> None:
    """Three blocks of a token, read in turn: with room for two, LRU always drops the next one."""
    turns = [0, 1, 2]
    lru = cache_of([1, 1, 1], turns, "lru:2")
    assert lru.miss_tokens.tolist() == [0, 0, 0, 1, 1, 1]
    assert lru.hit_tokens.tolist() == [0] * 6
    assert lru.missing == ((), (), (), (0,), (1,), (2,))
    assert lru.live_tokens.tolist() == [1, 2, 2, 2, 2, 2]
    # Dropping what is needed last keeps 0 and 2; 1 comes back in place of 0, which is done.
    best = cache_of([1, 1, 1], turns, "recompute:2")
    assert best.miss_tokens.tolist() == [0, 0, 0, 0, 1, 0]
    assert best.evicted_tokens.tolist() == [0, 0, 1, 1, 0, 0]
    assert cache_of([1, 1, 1], turns, "lru:3").miss_tokens.sum() == 0


def test_a_block_is_copied_to_the_host_once_by_hand() -> None:
    offload = cache_of([2, 2], [0, 1, 0, 1], "offload:2")
    assert offload.miss_tokens.tolist() == [0, 0, 2, 2, 2, 2]
    assert offload.sent_tokens.tolist() == [0, 2, 2, 0, 0, 0]
    assert offload.live_tokens.tolist() == [2] * 6


def two_tasks(num_stages: int = 1) -> tuple[Plan, SampleBatch]:
    """Two prefixes of 5 tokens with two samples of 2 more each, in turns, forward only."""
    plan, _ = two_branches()
    samples = [[*range(first, first + 5), end, end] for first in (1, 11) for end in (6, 7)]
    batch = make_batch(samples, [[(5, 7)]] * 4)
    rng = np.random.default_rng(0)
    program = random_program(rng, batch, is_update=False, max_micro_batches=1).program
    before = plan.programs[0]
    ends = np.cumsum(program.segments.num_tokens)
    # In tree order: the first prefix with its first sample, its second sample, the same again.
    owner = np.array([0, 2, 1, 3])[np.searchsorted([7, 9, 16, 18], ends)]
    by_owner = np.argsort(owner, kind="stable")
    repeated = np.zeros(4, np.int64)
    program = replace(
        program,
        phases=("reference",),
        segments=replace(program.segments, micro_batch=owner).rows(by_owner),
        micro_batches=type(before.micro_batches)(
            rank=repeated,
            micro_batch=np.arange(4),
            activation=np.array(["keep"] * 4),
            num_tokens=np.array([7, 7, 2, 2]),
            pairs=np.array([28, 28, 13, 13]),
            head_tokens=np.array([2, 2, 1, 1]),
            forward_s=np.zeros(4),
            backward_s=np.zeros(4),
        ),
        schedule=type(before.schedule)(
            rank=repeated, op=np.array(["forward"] * 4), micro_batch=np.arange(4)
        ),
        blocks=Blocks(
            rank=np.zeros(2, np.int64),
            block=np.arange(2),
            micro_batch=np.arange(2),
            start_row=np.zeros(2, np.int64),
            num_tokens=np.array([5, 5]),
            allocated_tokens=np.array([5, 5]),
            release_op=np.array(["forward"] * 2),
            release_micro_batch=np.array([2, 3]),
        ),
    )
    return make_plan([program], num_stages=num_stages), batch


@pytest.mark.parametrize(
    ("cache", "op_s", "cached_tokens"),
    [
        ("dynamic", [7, 7, 2, 2], [5, 10, 10, 5]),
        # Each reader finds its prefix of 5 rows evicted by the other one's.
        ("recompute:5", [7, 7, 2 + 5, 2 + 5], [5, 5, 5, 5]),
        # LRU caches whole chains of 7, so 7 rows are missing; with its own rows an op needs 9.
        ("lru:7", [7, 7, 2 + 7, 2 + 7], [7, 7, 9, 9]),
        # 128 bytes per token at 1 kB/s: 0.64 s per prefix and direction; A out, A in and B out,
        # B in.
        ("offload:5", [7, 7 + 0.64, 2 + 1.28, 2 + 0.64], [5, 5, 5, 5]),
    ],
)
def test_misses_and_copies_are_in_the_op_times_by_hand(
    cache: str, op_s: list[float], cached_tokens: list[int]
) -> None:
    plan, batch = two_tasks()
    check_plan(plan, batch, memory_fraction=None)
    policy = BlockPolicy.parse("adaptive", cache)
    other = apply_block_policy(plan, batch, policy, COSTS, pcie_bytes_per_s=1e3)
    events = simulate(other.plan, batch, COSTS, effects=other.effects)
    np.testing.assert_allclose(events.end_s - events.start_s, op_s, atol=1e-6)
    assert (events.kv_bytes // 128).tolist() == cached_tokens
    found = other.metrics
    assert found["extra_s"] == pytest.approx(events.end_s.max() - 18, abs=1e-9)
    assert found["peak_cached_bytes"] == events.kv_bytes.max()
    assert found["cache_hit_rate"] == (1.0 if cache == "dynamic" else 0.0)


def test_an_evicted_prefix_keeps_its_stage_input() -> None:
    plan, batch = two_tasks(num_stages=2)
    policy = BlockPolicy.parse("adaptive", "recompute:5")
    other = apply_block_policy(plan, batch, policy, COSTS)
    bare = simulate(plan, batch, COSTS)
    events = simulate(other.plan, batch, COSTS, effects=other.effects)
    extra = events.activation_bytes - bare.activation_bytes
    # 8 values of 2 bytes per token: A while B is cached, then B until its own reader comes.
    assert extra.tolist() == [0, 5 * 16, 5 * 16, 0] * 2


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
    other = apply_block_policy(plan, batch, BlockPolicy.parse("fixed:2", "dynamic"))
    for before, after in zip(plan.programs, other.plan.programs, strict=True):
        tree = before.tree(batch)
        for rank in range(2):
            packed = pack_rank(after.on_rank(rank), tree)
            assert [p.pairs for p in packed] == [
                p.pairs for p in pack_rank(before.on_rank(rank), tree)
            ]
