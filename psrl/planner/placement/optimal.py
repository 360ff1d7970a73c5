"""Placements by exact search where there are few samples, and by OR-Tools above."""

import numpy as np

from psrl.core.samples.sample import FloatArray, IntArray
from psrl.planner.bounds.forced_copies import Bound
from psrl.planner.bounds.leaf_bound import raise_by_leaves
from psrl.planner.problem import ProgramProblem

from .cost_tree import rank_costs
from .cp_search import improve_few_ranks, place_items
from .subset_search import MAX_ITEMS, best_items
from .two_level import GAP_TOLERANCE, two_level_leaves

# With more leaves per rank the local search is as good and much faster.
_FEW_LEAVES_PER_RANK = 4
# Rounds of prices of the bound by leaves, for each unit of the work limit.
_ROUNDS_PER_WORK = 5
# Local-search steps, as a multiple of those of the psrl policy.
_MORE_ITERATIONS = 10


def optimal_ranks(subproblem: ProgramProblem, rank: IntArray) -> tuple[IntArray, Bound | None]:
    """[S] rank of each sample, not worse than the given ranks, and a bound if one was proven."""
    problem, planning = subproblem.problem, subproblem.problem.setup.planning
    num_ranks = problem.num_ranks
    costs = subproblem.set_costs
    if num_ranks == 1 or not len(rank):
        return rank, None
    if costs is not None and costs.num_items <= MAX_ITEMS:
        return best_items(costs, num_ranks)[subproblem.item_of_sample], None
    if costs is not None and planning.solver_work_limit > 0.0:
        return _by_one_model(subproblem, rank)
    tree, bound_s = subproblem.cost_tree, subproblem.bound.cost_s
    leaf_rank = np.empty(len(tree.leaves), np.int64)
    leaf_rank[tree.leaf_of_sample] = rank
    more = _MORE_ITERATIONS * planning.search_iterations
    longer = two_level_leaves(tree, num_ranks, bound_s, more, planning.seed)
    leaf_rank = min(
        (leaf_rank, longer), key=lambda r: _worst_and_total(rank_costs(tree, r, num_ranks))
    )
    if len(tree.leaves) < _FEW_LEAVES_PER_RANK * num_ranks:
        goal_s, limit = bound_s * (1.0 + GAP_TOLERANCE), planning.solver_work_limit
        leaf_rank = improve_few_ranks(tree, leaf_rank, num_ranks, goal_s, limit, planning.seed)
    num_rounds = int(planning.solver_work_limit * _ROUNDS_PER_WORK)
    worst_s, _ = _worst_and_total(rank_costs(tree, leaf_rank, num_ranks))
    raised_s = raise_by_leaves(tree, num_ranks, bound_s, worst_s, num_rounds)
    proven = Bound(raised_s * (1.0 - 1e-9), "configurations of leaves")
    return leaf_rank[tree.leaf_of_sample], proven if raised_s > bound_s else None


def _worst_and_total(cost_s: FloatArray) -> tuple[float, float]:
    return float(cost_s.max()), float(cost_s.sum())


def _by_one_model(subproblem: ProgramProblem, rank: IntArray) -> tuple[IntArray, Bound | None]:
    """CP-SAT over all items; with every cost unavoidable its bound is a proof."""
    costs, least = subproblem.set_costs, subproblem.least_set_costs
    assert costs is not None
    assert least is not None
    planning, num_ranks = subproblem.problem.setup.planning, subproblem.problem.num_ranks
    hint = np.empty(costs.num_items, np.int64)
    hint[subproblem.item_of_sample] = rank
    limit, seed = planning.solver_work_limit, planning.seed
    found = place_items(costs, num_ranks, hint, subproblem.bound.cost_s, limit, seed)
    best = hint
    if found.item_rank is not None:
        new_s = costs.of_ranks(found.item_rank, num_ranks).max()
        if new_s < costs.of_ranks(hint, num_ranks).max():
            best = found.item_rank
    proof = found if least == costs else place_items(least, num_ranks, best, 0.0, limit, seed)
    return best[subproblem.item_of_sample], Bound(proof.bound_s * (1.0 - 1e-9), "OR-Tools CP-SAT")
