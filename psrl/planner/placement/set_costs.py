"""Small placement problems: what a rank pays for any set of items, in exact terms.

An item is a sample, or a leaf of the cost tree with all samples that ride with it. A rank pays
each *part* (tokens of a node, or rows that the head predicts) once if it holds any of its items.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.core.tree.loss_rows import LossRows
from psrl.core.tree.prefix_tree import PrefixTree

from .cost_tree import CostTree, UnitCosts


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
