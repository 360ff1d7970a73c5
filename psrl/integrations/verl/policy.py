"""The adapter's policy: psRL's placement, and the best of a few cuts.

The `psrl` policy compares some forty cuts of every rank and the plans of other policies. That is
worth its time offline; inside a training step planning must take less than it saves.
"""

from itertools import product

import numpy as np

from psrl.core.samples.sample import IntArray
from psrl.planner.micro_batching.best_cuts import MEMORY_WEIGHT, best_group_program
from psrl.planner.micro_batching.built import BuiltProgram, GroupProgram, join_groups
from psrl.planner.micro_batching.cut_rules import CutRule
from psrl.planner.micro_batching.rank_tree import tree_of_rank
from psrl.planner.placement.nested_samples import move_nested_samples
from psrl.planner.placement.placement import Placement
from psrl.planner.placement.two_level import GAP_TOLERANCE, two_level_leaves
from psrl.planner.policies.policies import Draft, with_our_cuts
from psrl.planner.problem import ProgramProblem

QUICK = f"{__name__}:quick"
"""The name by which the planner finds it."""

# Micro-batches as multiples of the fewest; units: one is fastest, many hold least.
_COUNT_FACTORS = (1.0, 2.0)
_NUM_UNITS = (1, 16)


def quick(subproblem: ProgramProblem) -> Draft:
    """Two-level placement, cuts in units, dropped activations where memory demands it."""
    rank = _place(subproblem)
    if subproblem.problem.setup.parallel.coupled_ranks > 1:
        return with_our_cuts(subproblem, rank)  # ranks that share experts are cut together
    placement = Placement(subproblem, rank, np.zeros(len(rank), np.int64))
    return Draft(placement, lambda: _few_cuts(placement))


def _place(subproblem: ProgramProblem) -> IntArray:
    planning, tree = subproblem.problem.setup.planning, subproblem.cost_tree
    num_ranks = subproblem.problem.num_ranks
    if num_ranks == 1:
        return np.zeros(subproblem.samples.num_samples, np.int64)
    leaf_rank = two_level_leaves(
        tree, num_ranks, subproblem.rank_cost_bound_s, planning.search_iterations, planning.seed
    )
    goal_s = subproblem.rank_cost_bound_s * (1.0 + GAP_TOLERANCE)
    return move_nested_samples(subproblem, leaf_rank[tree.leaf_of_sample], goal_s)


def _few_cuts(placement: Placement) -> BuiltProgram:
    """The best of few cuts on every rank; if a rank fits with none of them, of all cuts."""
    # Forward-only, nothing is held: a plain even cut is best.
    units = _NUM_UNITS if placement.subproblem.is_update else _NUM_UNITS[:1]
    rules = [CutRule(factor, unit, 1.0) for factor, unit in product(_COUNT_FACTORS, units)]
    groups: list[GroupProgram] = []
    for rank in range(placement.problem.num_ranks):
        choice = best_group_program([tree_of_rank(placement, rank)], rules, MEMORY_WEIGHT)
        groups.append(choice.program)
    built = join_groups(placement, groups)
    return built if built.fits else with_our_cuts(placement.subproblem, placement.rank).build()
