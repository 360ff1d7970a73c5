"""The placement problem: a prefix tree with the seconds that each node costs a rank.

Only leaves are placed. A sample that ends inside another one costs nothing on the rank that
holds the longer one, so it rides with the first leaf below its end. Unary chains are merged.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.core.tree.loss_rows import LossRows, union_of
from psrl.core.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class UnitCosts:
    """Seconds per computed token, per visible (query, key) pair and per predicted row."""

    token_s: float
    pair_s: float
    head_s: float


@dataclass(frozen=True)
class CostTree:
    """V nodes in pre-order, L leaves, S samples.

    Attributes:
        parent: [V] parent node; -1 for the root.
        subtree_end: [V] the subtree of v is `v .. subtree_end[v] - 1`.
        shared_s: [V] cost of the node's tokens, paid by every rank that holds the node.
        head_s: [V] cost of the node's distinct predicted rows, paid by at least one rank.
        leaf_of_sample: [S] leaf (index into `leaves`) that each sample rides with.
        longest_sample_s: cost of the most expensive sample alone.
    """

    parent: IntArray
    subtree_end: IntArray
    shared_s: FloatArray
    head_s: FloatArray
    leaf_of_sample: IntArray
    longest_sample_s: float

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @cached_property
    def cost_s(self) -> FloatArray:
        """[V] cost of holding a node, its predicted rows included.

        Exact unless a rank holds a node but none of the samples that are trained in it.
        """
        return self.shared_s + self.head_s

    @cached_property
    def total_s(self) -> float:
        return float(self.cost_s.sum())

    @cached_property
    def leaves(self) -> IntArray:
        """[L] leaf nodes in pre-order; the root of an empty tree is its leaf."""
        return np.flatnonzero(self.subtree_end == np.arange(self.num_nodes) + 1)

    @cached_property
    def levels(self) -> list[IntArray]:
        """Nodes by number of ancestors."""
        level = [0] * self.num_nodes
        for node, parent in enumerate(self.parent.tolist()):
            level[node] = level[parent] + 1 if parent >= 0 else 0
        of_node = np.array(level)
        order = np.argsort(of_node, kind="stable")
        bounds = np.cumsum(np.bincount(of_node))[:-1]
        return np.split(order, bounds)

    @cached_property
    def path_s(self) -> FloatArray:
        """[V] cost of all nodes from the root to each node."""
        total = self.cost_s.copy()
        for level in self.levels[1:]:
            total[level] += total[self.parent[level]]
        return total

    @cached_property
    def subtree_s(self) -> FloatArray:
        """[V] cost of each whole subtree."""
        before = np.concatenate([[0.0], np.cumsum(self.cost_s)])
        sums: FloatArray = before[self.subtree_end] - before[:-1]
        return sums

    @cached_property
    def group(self) -> IntArray:
        """[V] the child of the root above each node; the root is its own."""
        group = np.arange(self.num_nodes)
        for level in self.levels[2:]:
            group[level] = group[self.parent[level]]
        return group

    @cached_property
    def shared_before_s(self) -> FloatArray:
        """[L] cost of the path that each leaf shares with the leaf before it; 0 for the first."""
        successor = self.leaves[:-1] + 1
        return np.concatenate([[0.0], self.path_s[self.parent[successor]]])

    @cached_property
    def run_s(self) -> FloatArray:
        """[L + 1] leaves `[i, j)` on one rank cost `run_s[j] - run_s[i] + shared_before_s[i]`."""
        added = self.path_s[self.leaves] - self.shared_before_s
        return np.concatenate([[0.0], np.cumsum(added)])


def build_cost_tree(tree: PrefixTree, rows: LossRows, unit: UnitCosts) -> CostTree:
    """Reduce a prefix tree to its placement problem."""
    pairs = visible_pairs(tree.start_depth, tree.num_tokens)
    distinct = union_of(rows.start, rows.end)
    head_tokens = distinct.count(tree.token_start[:-1], tree.token_start[1:])
    shared_s = unit.token_s * tree.num_tokens + unit.pair_s * pairs
    num_children = np.bincount(tree.parent[1:], minlength=tree.num_nodes)
    keep = np.append(True, num_children[tree.parent[1:]] != 1)
    # An only child follows its parent in pre-order, so it merges into the last kept node.
    merged = np.cumsum(keep) - 1
    count = int(merged[-1]) + 1
    kept = np.flatnonzero(keep)
    parent = np.where(tree.parent[kept] >= 0, merged[tree.parent[kept]], -1)
    subtree_end = merged[tree.subtree_end[kept] - 1] + 1
    leaves = np.flatnonzero(subtree_end == np.arange(count) + 1)
    own_rows = np.bincount(rows.sample, rows.end - rows.start, minlength=len(tree.sample_node))
    tokens = tree.end_depth[tree.sample_node]
    alone = unit.token_s * tokens + unit.pair_s * (tokens * (tokens + 1) // 2)
    alone = alone + unit.head_s * own_rows
    return CostTree(
        parent=parent,
        subtree_end=subtree_end,
        shared_s=_sums(merged, shared_s, count),
        head_s=_sums(merged, head_tokens * np.float64(unit.head_s), count),
        leaf_of_sample=np.searchsorted(leaves, merged[tree.sample_node]),
        longest_sample_s=float(alone.max(initial=0.0)),
    )


def rank_costs(tree: CostTree, leaf_rank: IntArray, num_ranks: int) -> FloatArray:
    """[D] cost of each rank: all nodes on the paths of its leaves, once.

    Neighbouring leaves of a rank share the path up to the cheapest fork between them.
    """
    order = np.argsort(leaf_rank, kind="stable")
    rank = leaf_rank[order]
    added = tree.path_s[tree.leaves[order]].copy()
    follows = np.flatnonzero(rank[1:] == rank[:-1]) + 1
    added[follows] -= RangeMinimum(tree.shared_before_s)(order[follows - 1] + 1, order[follows] + 1)
    return _sums(rank, added, num_ranks)


def _sums(which: IntArray, value: FloatArray, count: int) -> FloatArray:
    """[count] sum of the values that belong to each index."""
    return np.bincount(which, value, minlength=count).astype(np.float64)


class RangeMinimum:
    """Minimum of `values[low:high]` for many ranges at once (sparse table)."""

    def __init__(self, values: FloatArray) -> None:
        self._tables = [values]
        width = 1
        while 2 * width <= len(values):
            last = self._tables[-1]
            self._tables.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def __call__(self, low: IntArray, high: IntArray) -> FloatArray:
        """Minimum of each non-empty range."""
        result = np.empty(len(low))
        exponent = np.frexp((high - low).astype(np.float64))[1] - 1
        for e in np.unique(exponent).tolist():
            at = np.flatnonzero(exponent == e)
            table = self._tables[e]
            result[at] = np.minimum(table[low[at]], table[high[at] - (1 << e)])
        return result
