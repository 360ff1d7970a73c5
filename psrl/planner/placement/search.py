"""The placements of `psrl` and `optimal`: exact where there are few samples, searched above."""

import numpy as np

from psrl.core.plan.bound import Bound
from psrl.core.samples.sample import IntArray
from psrl.planner.bounds.leaf_bound import raise_by_leaves
from psrl.planner.problem import ProgramProblem

from .cost_tree import rank_costs
from .cp_search import improve_few_ranks, place_items
from .nested_samples import move_nested_samples
from .placement import rank_work_s, shared_placement
from .subsets import MAX_ITEMS, best_items
from .two_level import GAP_TOLERANCE, dfs_cut_leaves, two_level_leaves

# With more leaves per rank the local search is as good and much faster.
_FEW_LEAVES_PER_RANK = 4
# Rounds of prices of the bound by leaves, for each unit of the work limit.
_ROUNDS_PER_WORK = 5
# Local-search steps, as a multiple of those of the psrl policy.
_MORE_ITERATIONS = 10


def psrl_ranks(subproblem: ProgramProblem, num_iterations: int) -> IntArray:
    """[S] rank of each sample: the best of few, or of what the searches on the tree found.

    Args:
        num_iterations: steps of the local search; 0 is the heuristic alone.
    """
    problem, seed = subproblem.problem, subproblem.problem.setup.planning.seed
    num_ranks, tree, costs = problem.num_ranks, subproblem.cost_tree, subproblem.set_costs
    if num_ranks == 1 or not len(tree.leaf_of_sample):
        return np.zeros(len(tree.leaf_of_sample), np.int64)
    found: list[IntArray] = []
    if costs is not None and costs.num_items <= MAX_ITEMS:
        found.append(best_items(costs, num_ranks)[subproblem.items.of_sample])
        if subproblem.items.is_exact:
            return found[0]
    bound_s = subproblem.bound.limit_s
    searched = two_level_leaves(tree, num_ranks, bound_s, num_iterations, seed)
    # The tree's seconds are not always a rank's: the contiguous cut may be better than it seems.
    for leaf_rank in (searched, dfs_cut_leaves(tree, num_ranks)):
        found.append(leaf_rank[tree.leaf_of_sample])
    best = min(found, key=lambda rank: _worst_and_total(subproblem, rank))
    return move_nested_samples(subproblem, best, bound_s * (1.0 + GAP_TOLERANCE))


def optimal_ranks(subproblem: ProgramProblem, rank: IntArray) -> tuple[IntArray, Bound]:
    """[S] rank of each sample, not worse than the given ranks of `psrl`, and the best bound."""
    problem, planning = subproblem.problem, subproblem.problem.setup.planning
    num_ranks, tree, bound = problem.num_ranks, subproblem.cost_tree, subproblem.bound
    if num_ranks == 1 or not len(rank) or _is_settled(subproblem):
        return rank, bound
    goal_s, limit = bound.limit_s * (1.0 + GAP_TOLERANCE), planning.solver_work_limit
    found = [rank]
    if subproblem.set_costs is not None:
        if limit > 0.0:
            found += _by_one_model(subproblem, rank)
    else:
        leaf_rank = np.empty(len(tree.leaves), np.int64)
        leaf_rank[tree.leaf_of_sample] = rank
        more = _MORE_ITERATIONS * planning.search_iterations
        longer = two_level_leaves(tree, num_ranks, bound.limit_s, more, planning.seed)
        starts = [rank_costs(tree, r, num_ranks) for r in (leaf_rank, longer)]
        if (starts[1].max(), starts[1].sum()) < (starts[0].max(), starts[0].sum()):
            leaf_rank = longer
        if len(tree.leaves) < _FEW_LEAVES_PER_RANK * num_ranks:
            leaf_rank = improve_few_ranks(tree, leaf_rank, num_ranks, goal_s, limit, planning.seed)
        found.append(move_nested_samples(subproblem, leaf_rank[tree.leaf_of_sample], goal_s))
    best = min(found, key=lambda r: _worst_and_total(subproblem, r))
    worst_s, _ = _worst_and_total(subproblem, best)
    num_rounds = int(planning.solver_work_limit * _ROUNDS_PER_WORK)
    return best, raise_by_leaves(tree, num_ranks, bound, worst_s, num_rounds)


def _is_settled(subproblem: ProgramProblem) -> bool:
    costs = subproblem.set_costs
    return costs is not None and costs.num_items <= MAX_ITEMS and subproblem.items.is_exact


def _worst_and_total(subproblem: ProgramProblem, rank: IntArray) -> tuple[float, float]:
    work_s = rank_work_s(shared_placement(subproblem, rank))
    return float(work_s.max()), float(work_s.sum())


def _by_one_model(subproblem: ProgramProblem, rank: IntArray) -> list[IntArray]:
    """CP-SAT over all leaves, from the placement that their longest samples have."""
    costs, items = subproblem.set_costs, subproblem.items
    assert costs is not None
    planning, num_ranks = subproblem.problem.setup.planning, subproblem.problem.num_ranks
    limit, seed = planning.solver_work_limit, planning.seed
    hint = rank[items.makers]
    found = place_items(costs, num_ranks, hint, subproblem.bound.limit_s, limit, seed)
    return [] if found.item_rank is None else [found.item_rank[items.of_sample]]
