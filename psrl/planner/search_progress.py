"""How the gap of `psrl`'s placement falls with the steps of its local search."""

from typing import NamedTuple

from psrl.planner.placement.cost_tree import rank_costs
from psrl.planner.placement.two_level import GAP_TOLERANCE, two_level_leaves

from .problem import PlanningProblem

_STEPS = (0, 3, 10, 30, 100, 300, 1000)


class SearchPoint(NamedTuple):
    """The most loaded rank's work over the proven bound, minus 1, after some search steps."""

    program: int
    steps: int
    gap: float


def search_progress(problem: PlanningProblem) -> list[SearchPoint]:
    """Gaps of all programs after few to all steps that the set-up allows.

    A longer search goes on where a shorter one ends, so each is run from the start; together they
    take about twice the time of the longest.
    """
    planning, num_ranks = problem.setup.planning, problem.num_ranks
    points = []
    for index, target in enumerate(problem.programs()):
        tree, bound_s = target.cost_tree, target.rank_cost_bound_s
        most = planning.search_iterations
        for steps in (*(s for s in _STEPS if s < most), most):
            leaf_rank = two_level_leaves(tree, num_ranks, bound_s, steps, planning.seed)
            worst_s = float(rank_costs(tree, leaf_rank, num_ranks).max())
            gap = worst_s / bound_s - 1.0 if bound_s else 0.0
            points.append(SearchPoint(index, steps, gap))
            if gap <= GAP_TOLERANCE:
                break
    return points
