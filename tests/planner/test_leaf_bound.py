"""Every bound against the optimum of 200 random cases, and what the bound by leaves adds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.planner import POLICIES
from psrl.planner.bounds.forced_copies import rank_cost_bound
from psrl.planner.bounds.group_bound import raise_by_groups
from psrl.planner.bounds.leaf_bound import least_node_s, raise_by_leaves
from psrl.planner.placement import optimal as placement_optimal
from psrl.planner.placement.cost_tree import rank_costs
from psrl.planner.placement.two_level import two_level_leaves
from tests.planner.cases import make_setup, nasty_batch, tree_batch, update_of
from tests.planner.test_bounds import sample_placement_work_s
from tests.planner.test_placement_optimal import every_placement_s, random_tree


@pytest.mark.slow
def test_no_bound_exceeds_the_optimum_of_200_cases() -> None:
    by_copies, by_leaves = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        num_ranks = int(rng.integers(2, 4))
        batch = tree_batch(random_tree(rng, int(rng.integers(3, 6))))
        tree = update_of(batch, make_setup(num_ranks)).cost_tree
        optimum = every_placement_s(tree, num_ranks)
        copies = rank_cost_bound(tree, num_ranks).cost_s
        groups = raise_by_groups(tree, num_ranks, copies)
        leaves = raise_by_leaves(tree, num_ranks, groups, tree.total_s, 40)
        assert copies <= groups <= leaves <= optimum
        by_copies.append(copies / optimum)
        by_leaves.append(leaves / optimum)
    assert np.mean(by_leaves) > 0.99 > np.mean(by_copies)


@given(seed=st.integers(0, 10_000), num_samples=st.integers(2, 5), num_ranks=st.integers(2, 3))
@settings(max_examples=40)
def test_it_holds_where_samples_ride_with_others(
    seed: int, num_samples: int, num_ranks: int
) -> None:
    # Duplicates and prefixes of others may train their rows on another rank than their leaf's.
    subproblem = update_of(nasty_batch(seed, num_samples), make_setup(num_ranks))
    tree, count = subproblem.cost_tree, subproblem.samples.num_samples
    optimum = min(
        sample_placement_work_s(
            subproblem, list(np.unravel_index(i, [num_ranks] * count)), num_ranks
        )
        for i in range(num_ranks**count)
    )
    low = rank_cost_bound(tree, num_ranks).cost_s
    assert low <= raise_by_leaves(tree, num_ranks, low, tree.total_s, 60) <= optimum * (1 + 1e-12)


def test_rows_of_a_shared_leaf_are_not_certain() -> None:
    subproblem = update_of(tree_batch([(50, [(20, []), (30, [])])]), make_setup(2))
    tree = subproblem.cost_tree
    assert least_node_s(tree) == pytest.approx(tree.shared_s + tree.head_s)
    twice = subproblem.samples.select(np.array([0, 0, 1]))
    tree = update_of(twice, make_setup(2)).cost_tree
    certain = least_node_s(tree)
    assert certain[tree.leaves[0]] == tree.shared_s[tree.leaves[0]]
    assert certain[tree.leaves[1]] > tree.shared_s[tree.leaves[1]]


def few_leaves_per_rank():
    rng = np.random.default_rng(1)
    groups = [
        (int(rng.integers(100, 400)), [(int(n), []) for n in rng.integers(50, 400, size=6)])
        for _ in range(6)
    ]
    setup = make_setup(10, search_iterations=5)
    planning = setup.planning.model_copy(update={"solver_work_limit": 0.2})
    return update_of(tree_batch(groups), setup.model_copy(update={"planning": planning}))


def test_it_raises_the_bound_where_ranks_hold_few_leaves() -> None:
    subproblem = few_leaves_per_rank()
    tree, low = subproblem.cost_tree, subproblem.bound.cost_s
    leaf_rank = two_level_leaves(tree, 10, low, 30, 0)
    worst_s = rank_costs(tree, leaf_rank, 10).max()
    raised = raise_by_leaves(tree, 10, low, worst_s, 40)
    assert 1.003 * low < raised <= worst_s
    assert raise_by_leaves(tree, 10, low, worst_s, 0) == low


@pytest.mark.slow
def test_optimal_reports_the_raised_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_optimal, "_ROUNDS_PER_WORK", 150)
    subproblem = few_leaves_per_rank()
    draft = POLICIES["optimal"](subproblem)
    assert draft.bound.source == "configurations of leaves"
    assert draft.bound.cost_s > subproblem.bound.cost_s
