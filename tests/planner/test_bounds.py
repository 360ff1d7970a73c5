"""No bound exceeds the optimum of tiny cases, found by trying every placement; each is verified."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.plan.bound import Bound
from psrl.core.plan.check_bound import BoundClaim, is_proven
from psrl.core.samples.sample import make_batch
from psrl.planner import POLICIES, make_plan
from psrl.planner.bounds.forced_copies import is_refuted, rank_cost_bound
from psrl.planner.bounds.group_bound import raise_by_groups
from psrl.planner.bounds.leaf_bound import raise_by_leaves
from psrl.planner.placement.cost_tree import rank_costs
from psrl.planner.placement.two_level import dfs_cut_leaves, two_level_leaves
from psrl.planner.problem import ProgramProblem
from tests.planner.cases import (
    grouped_chains,
    make_setup,
    nasty_batch,
    tree_batch,
    update_of,
)
from tests.planner.placement_oracle import PlacementOracle

CASES_PER_TEST = 10


def random_case(seed: int) -> ProgramProblem:
    """Up to 9 samples on 2 to 4 ranks."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    batch = nasty_batch(seed, count) if seed % 2 else grouped_chains(rng, count)
    return update_of(batch, make_setup(int(rng.integers(2, 5)), search_iterations=5))


def claim_of(subproblem: ProgramProblem, bound: Bound) -> BoundClaim:
    return BoundClaim(
        bound,
        subproblem.tree,
        subproblem.loss_rows,
        subproblem.unit_costs,
        subproblem.problem.num_ranks,
    )


def every_bound(subproblem: ProgramProblem) -> list[Bound]:
    """What each way to prove one finds, small problem or not."""
    tree, num_ranks = subproblem.cost_tree, subproblem.problem.num_ranks
    copies = rank_cost_bound(tree, num_ranks)
    groups = raise_by_groups(tree, num_ranks, copies)
    leaves = raise_by_leaves(tree, num_ranks, copies, tree.total_s, 40)
    return [copies, groups, leaves, subproblem.bound]


def check_cases(first: int) -> None:
    for seed in range(first, first + CASES_PER_TEST):
        subproblem = random_case(seed)
        oracle = PlacementOracle(subproblem)
        optimum_s = oracle.optimum_s(subproblem.problem.num_ranks)
        for bound in every_bound(subproblem):
            assert bound.limit_s <= optimum_s, (seed, bound.kind)
            assert is_proven(claim_of(subproblem, bound)), (seed, bound.kind)
            above = bound.model_copy(update={"limit_s": optimum_s * (1.0 + 1e-6)})
            assert not is_proven(claim_of(subproblem, above)), (seed, bound.kind)
        assert subproblem.bound.limit_s == pytest.approx(optimum_s, rel=1e-6)
        for name in ("psrl", "optimal"):
            rank = POLICIES[name](subproblem).placement.rank
            assert oracle.worst_s(rank.tolist()) <= optimum_s * (1.0 + 1e-9), (seed, name)


@pytest.mark.parametrize("first", range(0, 300, CASES_PER_TEST))
def test_no_bound_is_above_the_optimum_and_psrl_is_at_it(first: int) -> None:
    check_cases(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, 2000, CASES_PER_TEST))
def test_no_bound_is_above_the_optimum_in_2000_cases(first: int) -> None:
    check_cases(first)


@pytest.mark.parametrize("seed", range(12))
def test_the_plan_of_psrl_is_at_the_optimum_and_says_why(seed: int) -> None:
    subproblem = random_case(seed)
    plan = make_plan(subproblem.problem, "psrl")
    (program,) = plan.programs
    oracle = PlacementOracle(subproblem)
    optimum_s = oracle.optimum_s(plan.num_ranks)
    assert oracle.worst_s(program.assignments.rank.tolist()) <= 1.005 * optimum_s
    assert program.bound == subproblem.bound


def chains_with_nested_samples(num_tasks: int) -> ProgramProblem:
    """A head, its continuation and an unrelated sample per task: two ranks for each task."""
    tokens, spans = [], []
    for task in range(num_tasks):
        head, alone = [task] + [7] * 99, [100 + task] + [9] * 47
        tokens += [head, [*head, *[8] * 70], alone]
        spans += [[(1, 100)], [(100, 170)], [(1, 48)]]
    return update_of(make_batch(tokens, spans), make_setup(2 * num_tasks, search_iterations=5))


def test_a_rank_need_not_hold_the_whole_chain_to_train_a_sample_inside() -> None:
    subproblem = chains_with_nested_samples(7)
    placed = PlacementOracle(subproblem).worst_s([2 * (s // 3) + (s % 3 != 1) for s in range(21)])
    for bound in every_bound(subproblem):
        assert bound.limit_s <= placed


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
    alone = PlacementOracle(subproblem).worst_s([0, 1, 1])
    assert subproblem.rank_cost_bound_s == pytest.approx(alone, rel=1e-6)


def test_a_prompt_that_no_rank_can_avoid_is_counted_on_each() -> None:
    # Four equal answers to one prompt on two ranks: two answers and the prompt on each.
    batch = tree_batch([(300, [(100, [])] * 4)])
    subproblem = update_of(batch, make_setup(2))
    best = PlacementOracle(subproblem).worst_s([0, 0, 1, 1])
    assert subproblem.rank_cost_bound_s == pytest.approx(best, rel=1e-4)
    assert subproblem.cost_tree.total_s / 2 < 0.9 * best


def test_refutation_is_monotone_enough_to_bisect() -> None:
    subproblem = update_of(nasty_batch(11, 12), make_setup(3))
    bound = rank_cost_bound(subproblem.cost_tree, 3).limit_s
    assert not is_refuted(subproblem.cost_tree, 3, subproblem.cost_tree.total_s)
    assert not is_refuted(subproblem.cost_tree, 3, bound * 1.001)
