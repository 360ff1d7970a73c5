"""Exact and solver placements against trying every placement, and bounds against the optimum."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.plan.check_bound import is_proven
from psrl.planner import make_plan
from psrl.planner.bounds.forced_copies import rank_cost_bound
from psrl.planner.bounds.group_bound import prices_that_refute, raise_by_groups
from psrl.planner.placement.cost_tree import CostTree, rank_costs
from psrl.planner.placement.cp_search import improve_few_ranks, place_items
from psrl.planner.placement.subsets import SetCosts, best_items, leaf_set_costs, lowest_maximum
from tests.planner.cases import make_setup, problem_of, tree_batch, update_of
from tests.planner.test_bounds import claim_of


def random_tree(rng: np.random.Generator, num_leaves: int) -> list:
    """Nested `(num_tokens, children)` with groups of very different size and depth."""

    def below(count: int, depth: int) -> list:
        if count == 1 or depth == 3:
            return [(int(rng.integers(1, 60)), []) for _ in range(count)]
        parts = rng.multinomial(count, rng.dirichlet(np.ones(min(count, 3))))
        return [
            (int(rng.integers(1, 60)), below(int(p), depth + 1) if p > 1 else [])
            for p in parts
            if p
        ]

    return below(num_leaves, 0)


def every_placement_s(tree: CostTree, num_ranks: int) -> float:
    """Lowest maximum by trying all placements of leaves, the first leaf on rank 0."""
    placements = product(range(num_ranks), repeat=len(tree.leaves) - 1)
    return min(rank_costs(tree, np.array([0, *p]), num_ranks).max() for p in placements)


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), num_leaves=st.integers(2, 7), num_ranks=st.integers(2, 3))
@settings(max_examples=60)
def test_subsets_and_solver_find_the_lowest_maximum_and_no_bound_exceeds_it(
    seed: int, num_leaves: int, num_ranks: int
) -> None:
    rng = np.random.default_rng(seed)
    tree = update_of(tree_batch(random_tree(rng, num_leaves)), make_setup(num_ranks)).cost_tree
    best = every_placement_s(tree, num_ranks)
    costs = leaf_set_costs(tree, np.arange(len(tree.leaves)))
    assert lowest_maximum(costs, num_ranks) == pytest.approx(best)
    item_rank = best_items(costs, num_ranks)
    assert rank_costs(tree, item_rank, num_ranks).max() == pytest.approx(best)
    assert costs.of_ranks(item_rank, num_ranks) == pytest.approx(
        rank_costs(tree, item_rank, num_ranks)
    )
    hint = rng.integers(num_ranks, size=len(tree.leaves))
    solved = place_items(costs, num_ranks, hint, 0.0, 5.0, 0)
    assert solved.item_rank is not None
    assert costs.of_ranks(solved.item_rank, num_ranks).max() == pytest.approx(best, rel=1e-4)
    assert best * (1.0 - 1e-4) <= solved.bound_s <= best * (1.0 + 1e-9)
    bound = rank_cost_bound(tree, num_ranks)
    assert bound.limit_s <= raise_by_groups(tree, num_ranks, bound).limit_s <= best
    assert prices_that_refute(tree, num_ranks, best * (1.0 + 1e-6)) is None


def test_groups_bound_what_copies_do_not() -> None:
    # Three groups on two ranks: one group must be split, and its large root is paid twice.
    batch = tree_batch([(60, [(30, [])] * 4)] * 3)
    subproblem = update_of(batch, make_setup(2))
    tree = subproblem.cost_tree
    bound = rank_cost_bound(tree, 2)
    raised = raise_by_groups(tree, 2, bound)
    best = every_placement_s(tree, 2)
    assert raised.kind == "group configurations"
    assert is_proven(claim_of(subproblem, raised))
    assert bound.limit_s * 1.05 < raised.limit_s <= best
    assert raised.limit_s > 0.95 * best


def test_the_total_is_least_among_the_lowest_maxima() -> None:
    # Item 3 decides the maximum; the others are cheaper together.
    costs = SetCosts(4, (1, 2, 4, 7, 8), (1.0, 1.0, 1.0, 2.0, 9.0))
    rank = best_items(costs, 3)
    assert len(set(rank[:3].tolist())) == 1
    assert rank[3] != rank[0]


def few_leaves() -> tuple[CostTree, np.ndarray, float]:
    rng = np.random.default_rng(3)
    groups = [(int(n), [(int(m), []) for m in rng.integers(20, 200, 6)]) for n in [100, 40] * 4]
    subproblem = update_of(tree_batch(groups), make_setup(16))
    return subproblem.cost_tree, np.arange(48) // 3, subproblem.bound.limit_s


@pytest.mark.slow
def test_a_few_ranks_at_a_time_improve_the_placement_reproducibly() -> None:
    tree, start, bound_s = few_leaves()
    runs = [improve_few_ranks(tree, start, 16, bound_s, 0.5, 1) for _ in range(2)]
    assert np.array_equal(runs[0], runs[1])
    before, after = (rank_costs(tree, r, 16).max() for r in (start, runs[0]))
    assert bound_s <= after < before * (1.0 - 1e-6)
    assert np.array_equal(improve_few_ranks(tree, start, 16, bound_s, 0.0, 1), start)


@pytest.mark.parametrize("num_ranks", [2, 12])
def test_optimal_is_never_slower_than_psrl_and_says_what_proves_it(num_ranks: int) -> None:
    rng = np.random.default_rng(1)
    batch = tree_batch(random_tree(rng, 20))
    setup = make_setup(num_ranks, max_tokens=256, search_iterations=5)
    planning = setup.planning.model_copy(update={"solver_work_limit": 1.0})
    problem = problem_of(batch, setup.model_copy(update={"planning": planning}), ("update",))
    ours, best = make_plan(problem, "psrl"), make_plan(problem, "optimal")
    assert best.predicted["makespan_s"] <= ours.predicted["makespan_s"]
    assert best.predicted["lower_bound_s"] >= ours.predicted["lower_bound_s"]
    assert best.predicted["placement_gap"] >= 0.0
    assert best.programs[0].bound is not None
