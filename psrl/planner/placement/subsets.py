"""Small placement problems: what a rank pays for any set of items, and the best sets.

An item is a sample with all that cost nothing beside it, or a leaf of the cost tree with all
samples that ride with it. A rank pays each *part* (tokens of a node, or rows that the head
predicts) once if it holds any of its items.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrl.core.cost.unit_costs import UnitCosts
from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.core.tree.loss_rows import LossRows
from psrl.core.tree.prefix_tree import PrefixTree

from .cost_tree import CostTree

# 3^12 pairs of a set and one of its subsets.
MAX_ITEMS = 12
# Of more samples, it is not worth asking which cost nothing beside others.
_MAX_SAMPLES = 1000


@dataclass(frozen=True)
class SetCosts:
    """Costs of sets of N items.

    Attributes:
        members: items of each part, as the bits of an integer; no two parts have the same.
        cost_s: seconds of each part.
    """

    num_items: int
    members: tuple[int, ...]
    cost_s: tuple[float, ...]

    def of(self, items: int) -> float:
        """Cost of a set of items, given as bits."""
        return sum(c for m, c in zip(self.members, self.cost_s, strict=True) if m & items)

    def of_ranks(self, item_rank: IntArray, num_ranks: int) -> FloatArray:
        """[D] cost of each rank, for the rank of every item."""
        held = [0] * num_ranks
        for item, rank in enumerate(item_rank.tolist()):
            held[rank] |= 1 << item
        return np.array([self.of(items) for items in held])


class Items(NamedTuple):
    """N sets of samples that are placed together.

    Attributes:
        of_sample: [S] item of each sample.
        makers: [N] the sample of each item that the others of it are prefixes of.
        is_exact: whether some best placement of samples keeps each set together.
    """

    of_sample: IntArray
    makers: IntArray
    is_exact: bool


def items_of(tree: PrefixTree, rows: LossRows, leaf_of_sample: IntArray) -> Items:
    """The samples that cost something beside each other; the leaves, where those are too many."""
    num_rows = np.bincount(rows.sample, rows.end - rows.start, minlength=len(tree.sample_node))
    longest_first = np.lexsort((-num_rows, -tree.end_depth[tree.sample_node]))
    apart = _samples_apart(tree, rows, longest_first)
    if apart is not None:
        return apart
    _, first = np.unique(leaf_of_sample[longest_first], return_index=True)
    return Items(leaf_of_sample, longest_first[first], False)


def _samples_apart(tree: PrefixTree, rows: LossRows, longest_first: IntArray) -> Items | None:
    """Each sample joins a longer one that predicts all of its rows; None if too many are left."""
    if not 0 < len(longest_first) <= _MAX_SAMPLES:
        return None
    edges = np.unique(np.concatenate([rows.start, rows.end]))
    low, high = np.searchsorted(edges, rows.start), np.searchsorted(edges, rows.end)
    predicts: list[set[int]] = [set() for _ in longest_first]
    for sample, a, z in zip(rows.sample.tolist(), low.tolist(), high.tolist(), strict=True):
        predicts[sample].update(range(a, z))
    end, subtree_end = tree.sample_node.tolist(), tree.subtree_end.tolist()
    of_sample = np.empty(len(end), np.int64)
    makers: list[int] = []
    for sample in longest_first.tolist():
        hosts = (
            item
            for item, maker in enumerate(makers)
            if end[sample] <= end[maker] < subtree_end[end[sample]]
            and predicts[sample] <= predicts[maker]
        )
        of_sample[sample] = next(hosts, len(makers))
        if of_sample[sample] == len(makers):
            makers.append(sample)
        if len(makers) > MAX_ITEMS:
            return None
    return Items(of_sample, np.array(makers), True)


def sample_set_costs(
    tree: PrefixTree,
    rows: LossRows,
    unit: UnitCosts,
    item_of_sample: IntArray,
    counts_rows: npt.NDArray[np.bool_],
) -> SetCosts:
    """Costs of items that are sets of samples.

    Args:
        item_of_sample: [S] item of each sample.
        counts_rows: [S] samples whose predicted rows count. With all of them the cost is exact;
            with one sample per item it is a lower bound wherever the others are trained.
    """
    bits = [1 << item for item in item_of_sample.tolist()]
    parts: dict[int, float] = defaultdict(float)
    token_s = unit.token_s * tree.num_tokens
    cost_s = token_s + unit.pair_s * visible_pairs(tree.start_depth, tree.num_tokens)
    in_order = tree.sample_order.tolist()
    for node in range(1, tree.num_nodes):
        first = int(tree.first_sample[node])
        through = in_order[first : first + int(tree.samples_through[node])]
        parts[_union(bits, through)] += float(cost_s[node])
    used = np.flatnonzero(counts_rows[rows.sample])
    start, end, sample = rows.start[used], rows.end[used], rows.sample[used]
    edges = np.unique(np.concatenate([start, end]))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        covering = sample[(start <= low) & (end >= high)].tolist()
        if covering:
            parts[_union(bits, covering)] += unit.head_s * (high - low)
    return _collect(int(item_of_sample.max(initial=-1)) + 1, parts)


def leaf_set_costs(tree: CostTree, leaves: IntArray) -> SetCosts:
    """Costs of some leaves of a cost tree as items, in the given order."""
    parts: dict[int, float] = defaultdict(float)
    below: dict[int, int] = defaultdict(int)
    for item, leaf in enumerate(leaves.tolist()):
        node = int(tree.leaves[leaf])
        while node >= 0:
            below[node] |= 1 << item
            node = int(tree.parent[node])
    for node, items in below.items():
        parts[items] += float(tree.cost_s[node])
    return _collect(len(leaves), parts)


def _union(bits: list[int], which: list[int]) -> int:
    union = 0
    for i in which:
        union |= bits[i]
    return union


def _collect(num_items: int, parts: dict[int, float]) -> SetCosts:
    found = sorted((m, c) for m, c in parts.items() if m and c > 0.0)
    return SetCosts(num_items, tuple(m for m, _ in found), tuple(c for _, c in found))


def lowest_maximum(costs: SetCosts, num_ranks: int) -> float:
    """Cost of the most loaded rank in the best of all placements, by the best of all subsets."""
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
