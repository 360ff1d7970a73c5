"""Costs of placements against an independent count, and the shapes of the searches' results."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.planner.placement.cost_tree import CostTree, rank_costs
from psrl.planner.placement.local_search import LocalSearch
from psrl.planner.placement.two_level import dfs_cut_leaves, two_level_leaves
from tests.planner.cases import make_setup, nasty_batch, tree_batch, update_of, workloads


def costs_by_marking(tree: CostTree, leaf_rank: np.ndarray, num_ranks: int) -> np.ndarray:
    held = np.zeros((num_ranks, tree.num_nodes), bool)
    for leaf, rank in zip(tree.leaves.tolist(), leaf_rank.tolist(), strict=True):
        while leaf >= 0:
            held[rank, leaf] = True
            leaf = int(tree.parent[leaf])
    return held @ tree.cost_s


@given(seed=st.integers(0, 10_000), num_samples=st.integers(1, 20), num_ranks=st.integers(1, 4))
@settings(max_examples=60)
def test_costs_and_search_state_agree_with_marking(
    seed: int, num_samples: int, num_ranks: int
) -> None:
    tree = update_of(nasty_batch(seed, num_samples), make_setup(num_ranks)).cost_tree
    rng = np.random.default_rng(seed)
    leaf_rank = rng.integers(num_ranks, size=len(tree.leaves))
    expected = costs_by_marking(tree, leaf_rank, num_ranks)
    assert rank_costs(tree, leaf_rank, num_ranks) == pytest.approx(expected, rel=1e-9, abs=1e-18)
    search = LocalSearch(tree, leaf_rank, num_ranks, seed)
    assert search.objective == pytest.approx((expected.max(), expected.sum()))
    if num_ranks > 1:
        search.descend(0.0, 20)
        search.iterate(0.0, 10)
        after = costs_by_marking(tree, search.leaf_rank(), num_ranks)
        assert search.objective == pytest.approx((after.max(), after.sum()))
        assert after.max() <= expected.max() * (1.0 + 1e-9)


@pytest.mark.parametrize("shape", sorted(workloads()))
def test_dfs_cut_runs_are_contiguous_and_the_search_is_not_worse(shape: str) -> None:
    subproblem = update_of(workloads()[shape], make_setup(4))
    tree = subproblem.cost_tree
    contiguous = dfs_cut_leaves(tree, 4)
    assert (np.diff(contiguous) >= 0).all()
    assert (np.diff(contiguous) <= 1).all()
    assert contiguous[-1] <= 3
    searched = two_level_leaves(tree, 4, subproblem.rank_cost_bound_s, 100, 0)
    assert rank_costs(tree, searched, 4).max() <= rank_costs(tree, contiguous, 4).max()


def test_whole_groups_stay_together_when_they_balance() -> None:
    batch = tree_batch([(200, [(100, [])] * 3) for _ in range(4)])
    subproblem = update_of(batch, make_setup(4))
    leaf_rank = two_level_leaves(subproblem.cost_tree, 4, subproblem.rank_cost_bound_s, 50, 0)
    assert np.ptp(leaf_rank.reshape(4, 3), axis=1).tolist() == [0, 0, 0, 0]
    assert sorted(leaf_rank[::3].tolist()) == [0, 1, 2, 3]


def test_one_group_is_split_when_it_must_be() -> None:
    subproblem = update_of(tree_batch([(100, [(100, [])] * 8)]), make_setup(4))
    leaf_rank = two_level_leaves(subproblem.cost_tree, 4, subproblem.rank_cost_bound_s, 50, 0)
    assert np.bincount(leaf_rank).tolist() == [2, 2, 2, 2]


def test_chains_of_samples_merge_into_one_node() -> None:
    # Three samples, each a prefix of the next: one leaf, and all ride on it.
    subproblem = update_of(nasty_chain(), make_setup(2))
    assert subproblem.tree.num_nodes == 4
    assert subproblem.cost_tree.num_nodes == 1
    assert subproblem.cost_tree.leaf_of_sample.tolist() == [0, 0, 0]


def nasty_chain():
    from psrl.core.samples.sample import make_batch

    return make_batch([[1, 2], [1, 2, 3], [1, 2, 3, 4]], [[(1, 2)], [(2, 3)], [(3, 4)]])
