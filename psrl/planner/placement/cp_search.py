"""Placements by OR-Tools' CP-SAT: whole small problems, and a few ranks of large ones.

One worker, a fixed seed and limits on deterministic time: the result does not depend on the
clock. A model of everything at once is far behind local search on large problems, so there
CP-SAT only redistributes the leaves of a few ranks at a time.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from psrl.core.samples.sample import FloatArray, IntArray

from .cost_tree import CostTree, rank_costs
from .subsets import SetCosts, leaf_set_costs

# Cost of the most loaded rank of the hint, in the integers that CP-SAT counts in.
_RESOLUTION = 1_000_000
# Ranks of a neighbourhood in turn, and the most leaves that they may hold together.
_NUM_RANKS = (5, 4, 6)
_MAX_LEAVES = 48
_WORK_PER_NEIGHBOURHOOD = 0.5
# Some solves take no measurable work; their number is limited too.
_MAX_SOLVES_PER_WORK = 40


class CpResult(NamedTuple):
    """Outcome of one search.

    Attributes:
        item_rank: [N] rank of each item; None if no solution was found.
        bound_s: no placement of the items has a lower maximum.
        work: deterministic time used.
    """

    item_rank: IntArray | None
    bound_s: float
    work: float


def place_items(
    costs: SetCosts, num_ranks: int, hint: IntArray, bound_s: float, work_limit: float, seed: int
) -> CpResult:
    """Minimise the most loaded rank.

    Args:
        hint: [N] rank of each item to start from.
        bound_s: proven lower bound; the search need not look below.
        work_limit: most deterministic time.
    """
    worst_s = float(costs.of_ranks(hint, num_ranks).max())
    if worst_s <= 0.0:
        return CpResult(hint, 0.0, 0.0)
    per_s = _RESOLUTION / worst_s
    # Rounded down, so that the solver's bound holds for the true costs.
    whole = [int(cost_s * per_s) for cost_s in costs.cost_s]
    hint = _by_load(costs, whole, hint, num_ranks)
    model = cp_model.CpModel()
    ranks = range(num_ranks)
    held = [[model.new_bool_var("") for _ in ranks] for _ in range(costs.num_items)]
    for item, where in enumerate(held):
        model.add_exactly_one(where)
        for rank in ranks:
            model.add_hint(where[rank], int(hint[item]) == rank)
    load: list[list[cp_model.LinearExprT]] = [[] for _ in ranks]
    for members, cost in zip(costs.members, whole, strict=True):
        items = [i for i in range(costs.num_items) if members >> i & 1]
        paid = held[items[0]]
        if len(items) > 1:
            paid = [model.new_bool_var("") for _ in ranks]
            model.add_bool_or(paid)
            for rank in ranks:
                here = {int(hint[i]) == rank for i in items}
                model.add_hint(paid[rank], True in here)
                for i in items:
                    model.add_implication(held[i][rank], paid[rank])
        for rank in ranks:
            load[rank].append(cost * paid[rank])
    low = max(int(bound_s * per_s) - len(whole) - 1, -(-sum(whole) // num_ranks), 0)
    maximum = model.new_int_var(low, max(_RESOLUTION, low), "")
    for rank in ranks:
        model.add(sum(load[rank]) <= maximum)
    for rank in ranks[:-1]:
        model.add(sum(load[rank]) >= sum(load[rank + 1]))
    model.minimize(maximum)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = work_limit
    # An interrupt must end the program, not only this search.
    solver.parameters.catch_sigint_signal = False
    status = _solve(solver, model)
    work = float(solver.response_proto.deterministic_time)
    proven_s = max(bound_s, solver.best_objective_bound / per_s * (1.0 - 1e-9))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CpResult(None, bound_s, work)
    found = [next(r for r in ranks if solver.boolean_value(w[r])) for w in held]
    return CpResult(np.array(found, np.int64), proven_s, work)


def _solve(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Solve in another thread, so that this one hears an interrupt at once and stops the search."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(solver.solve, model).result()
        except BaseException:
            solver.stop_search()
            raise


def _by_load(costs: SetCosts, whole: list[int], hint: IntArray, num_ranks: int) -> IntArray:
    """The hint with its ranks renumbered by decreasing load; all ranks are alike."""
    load = [0] * num_ranks
    for members, cost in zip(costs.members, whole, strict=True):
        for rank in {int(hint[i]) for i in range(costs.num_items) if members >> i & 1}:
            load[rank] += cost
    number = np.empty(num_ranks, np.int64)
    number[np.argsort(-np.array(load), kind="stable")] = np.arange(num_ranks)
    return number[hint]


def improve_few_ranks(
    tree: CostTree,
    leaf_rank: IntArray,
    num_ranks: int,
    goal_s: float,
    work_limit: float,
    seed: int,
) -> IntArray:
    """[L] a placement that is not worse: CP-SAT on the heaviest and a few other ranks, repeated.

    Args:
        goal_s: stop when no rank costs more.
        work_limit: deterministic time of all searches together.
    """
    rng = np.random.default_rng(seed)
    leaf_rank = leaf_rank.copy()
    load_s = rank_costs(tree, leaf_rank, num_ranks)
    left, solves = work_limit, int(work_limit * _MAX_SOLVES_PER_WORK)
    for number in range(solves):
        if left <= 0.0 or load_s.max() <= goal_s:
            break
        ranks = _some_ranks(rng, load_s, leaf_rank, _NUM_RANKS[number % len(_NUM_RANKS)])
        leaves = np.flatnonzero(np.isin(leaf_rank, ranks))
        hint = np.searchsorted(ranks, leaf_rank[leaves])
        costs = leaf_set_costs(tree, leaves)
        limit = min(left, _WORK_PER_NEIGHBOURHOOD)
        result = place_items(costs, len(ranks), hint, goal_s, limit, seed + number)
        left -= result.work
        if result.item_rank is None:
            continue
        new_s, old_s = costs.of_ranks(result.item_rank, len(ranks)), load_s[ranks]
        if (new_s.max(), new_s.sum()) < (old_s.max() * (1.0 - 1e-9), old_s.sum()):
            leaf_rank[leaves] = ranks[result.item_rank]
            load_s[ranks] = new_s
    return leaf_rank


def _some_ranks(
    rng: np.random.Generator, load_s: FloatArray, leaf_rank: IntArray, count: int
) -> IntArray:
    """The heaviest rank and some others, light ones preferred, ascending."""
    order = np.argsort(load_s, kind="stable")
    others = order[:-1]
    weight = np.exp(-np.arange(len(others)) / max(2.0, len(others) / 4))
    count = min(count - 1, len(others))
    drawn = rng.choice(others, count, replace=False, p=weight / weight.sum())
    ranks, leaves = [int(order[-1])], int((leaf_rank == order[-1]).sum())
    for rank in drawn.tolist():
        more = int((leaf_rank == rank).sum())
        if leaves + more <= _MAX_LEAVES:
            ranks.append(rank)
            leaves += more
    return np.sort(np.array(ranks, np.int64))
