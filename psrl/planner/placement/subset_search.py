"""The best placement of a few items, by dynamic programming over all their subsets."""

from functools import lru_cache

import numpy as np

from psrl.core.samples.sample import FloatArray, IntArray

from .set_costs import SetCosts

# 3^12 pairs of a set and one of its subsets.
MAX_ITEMS = 12


def lowest_maximum(costs: SetCosts, num_ranks: int) -> float:
    """Cost of the most loaded rank in the best of all placements."""
    cost = _cost_of_sets(costs)
    sets, subsets, first = _pairs(costs.num_items)
    lowest = cost.copy()
    for _ in range(min(num_ranks, costs.num_items) - 1):
        candidates = np.maximum(lowest[sets ^ subsets], cost[subsets])
        lowest = np.minimum.reduceat(candidates, first)
    return float(lowest[-1])


def best_items(costs: SetCosts, num_ranks: int) -> IntArray:
    """[N] rank of each item: the lowest maximum, and among those the least work in total."""
    limit_s = lowest_maximum(costs, num_ranks) * (1.0 + 1e-12)
    cost = _cost_of_sets(costs)
    cost = np.where(cost <= limit_s, cost, np.inf)
    sets, subsets, first = _pairs(costs.num_items)
    num_used = max(1, min(num_ranks, costs.num_items))
    totals = [cost]
    for _ in range(num_used - 1):
        candidates = totals[-1][sets ^ subsets] + cost[subsets]
        totals.append(np.minimum.reduceat(candidates, first))
    rank = np.zeros(costs.num_items, np.int64)
    left = (1 << costs.num_items) - 1
    bounds = np.append(first, len(sets))
    for r in range(num_used - 1, 0, -1):
        mine = subsets[bounds[left] : bounds[left + 1]]
        chosen = int(mine[(totals[r - 1][left ^ mine] + cost[mine]).argmin()])
        rank[[i for i in range(costs.num_items) if chosen >> i & 1]] = r
        left ^= chosen
    return rank


def _cost_of_sets(costs: SetCosts) -> FloatArray:
    """[2^N] cost of every set."""
    every = np.arange(1 << costs.num_items)
    total = np.zeros(len(every))
    for members, cost in zip(costs.members, costs.cost_s, strict=True):
        total[(every & members) != 0] += cost
    return total


@lru_cache(maxsize=MAX_ITEMS + 1)
def _pairs(num_items: int) -> tuple[IntArray, IntArray, IntArray]:
    """All (set, subset) pairs by set, and the first pair of each set."""
    sets = subsets = np.zeros(1, np.int64)
    for item in range(num_items):
        bit = 1 << item
        sets = np.concatenate([sets, sets | bit, sets | bit])
        subsets = np.concatenate([subsets, subsets, subsets | bit])
    order = np.argsort(sets, kind="stable")
    sets, subsets = sets[order], subsets[order]
    return sets, subsets, np.flatnonzero(np.append(True, sets[1:] != sets[:-1]))
