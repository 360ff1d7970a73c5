"""What the bound by leaves adds to the others."""

import numpy as np
import pytest

from psrl.core.plan.check_bound import is_proven
from psrl.core.samples.sample import make_batch
from psrl.planner import POLICIES
from psrl.planner.bounds.forced_copies import rank_cost_bound
from psrl.planner.bounds.group_bound import raise_by_groups
from psrl.planner.bounds.leaf_bound import raise_by_leaves
from psrl.planner.placement import search as placement_search
from psrl.planner.placement.cost_tree import rank_costs
from psrl.planner.placement.two_level import two_level_leaves
from tests.planner.cases import make_setup, tree_batch, update_of
from tests.planner.test_bounds import claim_of
from tests.planner.test_placement_optimal import every_placement_s, random_tree


@pytest.mark.slow
def test_leaves_are_nearly_exact_where_copies_are_not() -> None:
    by_copies, by_leaves = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        num_ranks = int(rng.integers(2, 4))
        batch = tree_batch(random_tree(rng, int(rng.integers(3, 6))))
        tree = update_of(batch, make_setup(num_ranks)).cost_tree
        optimum = every_placement_s(tree, num_ranks)
        copies = rank_cost_bound(tree, num_ranks)
        groups = raise_by_groups(tree, num_ranks, copies)
        leaves = raise_by_leaves(tree, num_ranks, groups, tree.total_s, 40)
        assert copies.limit_s <= groups.limit_s <= leaves.limit_s <= optimum
        by_copies.append(copies.limit_s / optimum)
        by_leaves.append(leaves.limit_s / optimum)
    assert np.mean(by_leaves) > 0.99 > np.mean(by_copies)


def test_rows_of_a_shared_leaf_are_not_certain() -> None:
    two = tree_batch([(50, [(20, []), (30, [])])])
    tree = update_of(two, make_setup(2)).cost_tree
    assert tree.head_s.tolist() == [0.0, 0.0, 0.0]
    # A second sample ends at the first leaf and trains other rows of it.
    tokens = [np.concatenate([[0] * 50, [1] * 20]), np.concatenate([[0] * 50, [2] * 30])]
    spans = [[(60, 70)], [(51, 80)], [(52, 62)]]
    both = make_batch([tokens[0], tokens[1], tokens[0]], spans)
    tree = update_of(both, make_setup(2)).cost_tree
    unit = update_of(both, make_setup(2)).unit_costs
    # Rows 60..61 are of both, 52..59 and 62..69 of one: whoever trains it is not certain.
    assert tree.head_s == pytest.approx(np.array([0.0, 16 * unit.head_s, 0.0]))
    # A duplicate changes nothing.
    again = update_of(two.select(np.array([0, 0, 1])), make_setup(2)).cost_tree
    assert again.shared_s == pytest.approx(update_of(two, make_setup(2)).cost_tree.shared_s)


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
    tree, low = subproblem.cost_tree, subproblem.bound
    leaf_rank = two_level_leaves(tree, 10, low.limit_s, 30, 0)
    worst_s = rank_costs(tree, leaf_rank, 10).max()
    raised = raise_by_leaves(tree, 10, low, worst_s, 40)
    assert raised.kind == "leaf configurations"
    assert is_proven(claim_of(subproblem, raised))
    assert 1.003 * low.limit_s < raised.limit_s <= worst_s
    assert raise_by_leaves(tree, 10, low, worst_s, 0) == low


@pytest.mark.slow
def test_optimal_reports_the_raised_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_search, "_ROUNDS_PER_WORK", 150)
    subproblem = few_leaves_per_rank()
    draft = POLICIES["optimal"](subproblem)
    assert draft.bound.kind == "leaf configurations"
    assert draft.bound.limit_s > subproblem.bound.limit_s
