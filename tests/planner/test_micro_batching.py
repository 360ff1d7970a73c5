"""Units and token-wise cuts by hand, and that cuts cover a rank within the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.planner.micro_batching.assemble import build_rank
from psrl.planner.micro_batching.best_cuts import best_group_program, cut_group, least_time_s
from psrl.planner.micro_batching.cut_rules import all_rules, cut_all, cut_rank
from psrl.planner.micro_batching.rank_tree import RankTree, tree_of_rank
from psrl.planner.micro_batching.token_cuts import cut_units, segments_of, unit_starts
from psrl.planner.placement.placement import Placement
from tests.planner.cases import (
    make_moe_setup,
    make_setup,
    nasty_batch,
    tree_batch,
    update_of,
    workloads,
)


def view_of(batch, num_ranks: int = 1, rank: int = 0, **setup: object) -> RankTree:
    subproblem = update_of(batch, make_setup(num_ranks, **setup))
    ranks = np.arange(batch.num_samples) % num_ranks
    return tree_of_rank(Placement(subproblem, ranks, np.zeros(batch.num_samples, np.int64)), rank)


def small_tree() -> list:
    """A prompt of 400 tokens with four answers of 100, then two single samples of 100."""
    return [(400, [(100, [])] * 4), (100, []), (100, [])]


def test_one_unit_holds_everything() -> None:
    rank_tree = view_of(tree_batch(small_tree()))
    assert unit_starts(rank_tree, float("inf"), 1e-9) == [0]


def test_a_big_head_stands_alone_and_siblings_run_together() -> None:
    rank_tree = view_of(tree_batch(small_tree()))
    answer_s = rank_tree.cost_before_s[2] - rank_tree.cost_before_s[1]
    # Two answers to a unit: prompt | a a | a a | single single.
    assert unit_starts(rank_tree, 2.1 * answer_s, answer_s) == [0, 1, 3, 5]


def test_a_small_head_joins_the_unit_behind_it() -> None:
    rank_tree = view_of(tree_batch([(10, [(100, [])] * 4)]))
    answer_s = rank_tree.cost_before_s[2] - rank_tree.cost_before_s[1]
    assert unit_starts(rank_tree, 2.2 * answer_s, answer_s) == [0, 3]


def test_units_are_cut_evenly_by_cost_inside_a_node() -> None:
    rank_tree = view_of(tree_batch([(1000, [])]))
    bounds = cut_units(rank_tree, [0], float(rank_tree.cost_before_s[-1]) / 2, 10_000)
    # Later tokens see more keys, so the second half of the cost is fewer tokens.
    first, second = np.diff(bounds).tolist()
    assert first > second + 50
    assert first + second == 1000
    table = build_rank(rank_tree.placement, 0, segments_of(rank_tree, bounds)).program.micro_batches
    unit = rank_tree.placement.subproblem.unit_costs
    cost_s = unit.token_s * table.num_tokens + unit.pair_s * table.pairs
    cost_s = cost_s + unit.head_s * table.head_tokens
    assert cost_s[0] == pytest.approx(cost_s[1], rel=5e-3)


def test_a_cut_close_to_a_boundary_moves_there() -> None:
    rank_tree = view_of(tree_batch([(499, []), (505, [])]))
    bounds = cut_units(rank_tree, [0], float(rank_tree.cost_before_s[-1]) / 2, 10_000)
    assert bounds.tolist() == [0, 499, 1004]


def test_equal_tokens_where_equal_costs_break_the_budget() -> None:
    rank_tree = view_of(tree_batch([(1000, [])]))
    bounds = cut_units(rank_tree, [0], float(rank_tree.cost_before_s[-1]), 1)
    assert np.diff(bounds).tolist() == [1] * 1000


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    num_samples=st.integers(1, 12),
    max_tokens=st.integers(1, 30),
    num_stages=st.sampled_from([1, 2]),
)
@settings(max_examples=40)
def test_cuts_cover_the_rank_once_within_the_budget(
    seed: int, num_samples: int, max_tokens: int, num_stages: int
) -> None:
    batch = nasty_batch(seed, num_samples)
    rank_tree = view_of(batch, 2, 1, max_tokens=max_tokens, pipeline_model_parallel_size=num_stages)
    for rule in all_rules([rank_tree]):
        segments = segments_of(rank_tree, cut_rank(rank_tree, rule))
        sizes = np.bincount(segments.micro_batch, segments.num_tokens)
        assert not len(sizes) or (sizes.max() <= max_tokens and sizes.min() >= 1)
        computed = np.bincount(
            segments.node, segments.num_tokens, minlength=rank_tree.placement.tree.num_nodes
        )
        expected = np.zeros_like(computed)
        expected[rank_tree.node] = rank_tree.num_tokens
        assert np.array_equal(computed, expected)


def test_smaller_units_hold_less() -> None:
    rank_tree = view_of(workloads()["stars"], max_tokens=256)
    whole, *_, fine = [r for r in all_rules([rank_tree]) if r.count_factor == 2.0]
    assert (whole.num_units, fine.num_units) == (1, 16)
    assert cut_group([rank_tree], fine).peak_bytes < 0.7 * cut_group([rank_tree], whole).peak_bytes


def test_holding_more_than_forced_fills_a_pipeline() -> None:
    rank_tree = view_of(workloads()["stars"], max_tokens=128, pipeline_model_parallel_size=4)
    rules = [r for r in all_rules([rank_tree]) if (r.count_factor, r.num_units) == (1.0, 16)]
    lean, *_, full = [cut_group([rank_tree], rule) for rule in rules]
    assert full.time_s < lean.time_s
    assert full.peak_bytes > lean.peak_bytes


def test_the_chosen_cut_is_the_fastest_and_memory_decides_among_equals() -> None:
    rank_tree = view_of(workloads()["stars"], max_tokens=256, pipeline_model_parallel_size=2)
    rules = all_rules([rank_tree])
    times = [cut_group([rank_tree], rule).time_s for rule in rules]
    assert best_group_program([rank_tree], rules, 0.0).program.time_s == min(times)
    lean = best_group_program([rank_tree], rules, 0.02).program
    assert lean.time_s <= 1.02 * min(times)
    assert lean.peak_bytes <= best_group_program([rank_tree], rules, 0.0).program.peak_bytes


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.sampled_from([1, 2]),
    num_stages=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "full"]),
    link_bytes_per_s=st.sampled_from([1e11, 1e9, 1e7]),
)
@settings(max_examples=30)
def test_no_candidate_is_faster_than_its_bound(
    seed: int, num_ranks: int, num_stages: int, recompute: str, link_bytes_per_s: float
) -> None:
    batch = nasty_batch(seed, 8)
    setup = make_moe_setup(num_ranks, num_stages, num_ranks, max_tokens=8)
    parallel = setup.parallel.model_copy(update={"recompute": recompute})
    links = {"intra_host_bytes_per_s": link_bytes_per_s, "inter_host_bytes_per_s": link_bytes_per_s}
    cluster = setup.cluster.model_copy(update=links)
    subproblem = update_of(
        batch, setup.model_copy(update={"parallel": parallel, "cluster": cluster})
    )
    samples = np.arange(batch.num_samples)
    placement = Placement(subproblem, samples % num_ranks, np.zeros_like(samples))
    rank_trees = [tree_of_rank(placement, rank) for rank in range(num_ranks)]
    for rule in all_rules(rank_trees)[::7]:
        time_s = cut_group(rank_trees, rule).time_s
        least_s = least_time_s(rank_trees, cut_all(rank_trees, rule))
        assert least_s <= time_s * (1.0 + 1e-9)
        if num_stages == 1:
            assert least_s == pytest.approx(time_s)


def test_costs_and_sizes_before_any_token_are_sums_over_the_tokens() -> None:
    rank_tree = view_of(nasty_batch(3, 12), 2, 1)
    everything = np.arange(rank_tree.total_tokens + 1)
    unit, sizes = rank_tree.placement.subproblem.unit_costs, rank_tree.sizes_before(everything)
    cost_s = (
        unit.token_s * sizes.num_tokens
        + unit.pair_s * sizes.pairs
        + unit.head_s * sizes.head_tokens
    )
    assert cost_s[rank_tree.tokens_before] == pytest.approx(rank_tree.cost_before_s)
    table = build_rank(
        rank_tree.placement, 1, segments_of(rank_tree, everything)
    ).program.micro_batches
    assert np.array_equal(np.diff(sizes.pairs), table.pairs)
    assert np.array_equal(np.diff(sizes.head_tokens), table.head_tokens)
    assert np.array_equal(rank_tree.tokens_at(cost_s, np.zeros(len(cost_s))), everything)
