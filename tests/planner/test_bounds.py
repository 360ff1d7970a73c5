"""The bound never exceeds the optimum of tiny cases, found by trying every placement."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.planner.bounds.forced_copies import is_refuted, rank_cost_bound
from psrl.planner.placement.cost_tree import rank_costs
from psrl.planner.placement.two_level import dfs_cut_leaves, two_level_leaves
from psrl.planner.problem import ProgramProblem
from tests.planner.cases import make_setup, nasty_batch, tree_batch, update_of


def sample_placement_work_s(subproblem: ProgramProblem, rank: list[int], num_ranks: int) -> float:
    """Exact work of the slowest rank, by sets of tokens and of predicted rows."""
    unit, samples, work = subproblem.unit_costs, subproblem.samples, [0.0] * num_ranks
    for r in range(num_ranks):
        paths, rows = set(), set()
        for s in np.flatnonzero(np.array(rank) == r).tolist():
            symbols = samples.sample_symbols(s).tolist()
            lengths = samples.occurrence_tokens[samples.symbol_offsets[s] :].tolist()
            pairs = zip(symbols, lengths, strict=False)
            tokens = tuple((symbol, i) for symbol, count in pairs for i in range(count))
            paths |= {tokens[: i + 1] for i in range(len(tokens))}
            for a, z in samples.sample_loss_spans(s).tolist():
                rows |= {tokens[:t] for t in range(a, z)}
        work[r] = sum(unit.token_s + unit.pair_s * len(p) for p in paths)
        work[r] += unit.head_s * len(rows)
    return max(work)


@given(seed=st.integers(0, 10_000), num_samples=st.integers(1, 5), num_ranks=st.integers(1, 3))
@settings(max_examples=60)
def test_bound_is_below_the_brute_force_optimum(
    seed: int, num_samples: int, num_ranks: int
) -> None:
    subproblem = update_of(nasty_batch(seed, num_samples), make_setup(num_ranks))
    optimum = min(
        sample_placement_work_s(subproblem, list(rank), num_ranks)
        for rank in product(range(num_ranks), repeat=subproblem.samples.num_samples)
    )
    assert 0.0 < subproblem.rank_cost_bound_s <= optimum


@given(seed=st.integers(0, 10_000), num_leaves=st.integers(2, 7), num_ranks=st.integers(2, 3))
@settings(max_examples=40)
def test_search_is_close_to_the_best_placement_of_leaves(
    seed: int, num_leaves: int, num_ranks: int
) -> None:
    rng = np.random.default_rng(seed)
    half = [(int(n), []) for n in rng.integers(1, 40, size=num_leaves)]
    batch = tree_batch([(int(rng.integers(1, 40)), half[:3]), *half[3:]])
    subproblem = update_of(batch, make_setup(num_ranks))
    tree, bound = subproblem.cost_tree, subproblem.rank_cost_bound_s
    optimum = min(
        rank_costs(tree, np.array(rank), num_ranks).max()
        for rank in product(range(num_ranks), repeat=len(tree.leaves))
    )
    for leaf_rank in (
        two_level_leaves(tree, num_ranks, bound, 100, 0),
        dfs_cut_leaves(tree, num_ranks),
    ):
        found = rank_costs(tree, leaf_rank, num_ranks).max()
        assert bound <= optimum <= found * (1.0 + 1e-9)
    found = rank_costs(tree, two_level_leaves(tree, num_ranks, bound, 100, 0), num_ranks).max()
    assert found <= 1.01 * optimum


def test_the_longest_sample_is_a_bound() -> None:
    subproblem = update_of(tree_batch([(1000, []), (10, []), (10, [])]), make_setup(3))
    alone = sample_placement_work_s(subproblem, [0, 1, 1], 2)
    assert subproblem.rank_cost_bound_s == pytest.approx(alone, rel=1e-6)


def test_a_prompt_that_no_rank_can_avoid_is_counted_on_each() -> None:
    # Four equal answers to one prompt on two ranks: two answers and the prompt on each.
    batch = tree_batch([(300, [(100, [])] * 4)])
    subproblem = update_of(batch, make_setup(2))
    best = sample_placement_work_s(subproblem, [0, 0, 1, 1], 2)
    assert subproblem.rank_cost_bound_s == pytest.approx(best, rel=1e-4)
    assert subproblem.cost_tree.total_s / 2 < 0.9 * best


def test_refutation_is_monotone_enough_to_bisect() -> None:
    subproblem = update_of(nasty_batch(11, 12), make_setup(3))
    bound = rank_cost_bound(subproblem.cost_tree, 3).cost_s
    assert not is_refuted(subproblem.cost_tree, 3, subproblem.cost_tree.total_s)
    assert not is_refuted(subproblem.cost_tree, 3, bound * 1.001)
