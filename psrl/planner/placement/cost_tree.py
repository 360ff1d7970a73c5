"""The placement problem: a prefix tree with the seconds that each node costs a rank.

The search places leaves. A sample that ends inside another one computes no token on the rank that
holds the longer one, so it *rides* with the first leaf below its end. Unary chains are merged.
Bounds hold for all placements of samples, where riders may leave their leaf; so rows that a rider
predicts are charged to one thing in the search and to another in a bound.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrl.core.cost.unit_costs import UnitCosts
from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.core.tree.loss_rows import LossRows
from psrl.core.tree.prefix_tree import PrefixTree

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class CostTree:
    """V nodes in pre-order, L leaves, S samples; a rank *holds* a node whose end it computes.

    Attributes:
        parent: [V] parent node; -1 for the root.
        subtree_end: [V] the subtree of v is `v .. subtree_end[v] - 1`.
        cost_s: [V] cost of holding the node where samples ride: its tokens, and the rows of one
            leaf's samples at the leaf. Exact but for rows that several of the leaves below predict
            and others do not: they are charged to all.
        shared_s: [V] what every rank that holds the node pays for it wherever samples are
            trained: tokens, and rows that all samples through it predict.
        head_s: [V] the other rows, each once: trained by samples that end at the node or inside
            its chain, or by some of those through it.
        last_node: [V] the last node of the prefix tree that is merged into each.
        leaf_of_sample: [S] leaf (index into `leaves`) that each sample rides with.
        longest_sample_s: cost of the most expensive sample alone.
    """

    parent: IntArray
    subtree_end: IntArray
    cost_s: FloatArray
    shared_s: FloatArray
    head_s: FloatArray
    last_node: IntArray
    leaf_of_sample: IntArray
    longest_sample_s: float

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @cached_property
    def total_s(self) -> float:
        """Everything once."""
        return float(self.shared_s.sum() + self.head_s.sum())

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
        return self.on_path(self.cost_s)

    def on_path(self, node_s: FloatArray) -> FloatArray:
        """[V] sum of a quantity over all nodes from the root to each node."""
        total = node_s.copy()
        for level in self.levels[1:]:
            total[level] += total[self.parent[level]]
        return total

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
    num_children = np.bincount(tree.parent[1:], minlength=tree.num_nodes)
    keep = np.append(True, num_children[tree.parent[1:]] != 1)
    # An only child follows its parent in pre-order, so it merges into the last kept node.
    merged = np.cumsum(keep) - 1
    count = int(merged[-1]) + 1
    kept = np.flatnonzero(keep)
    parent = np.where(tree.parent[kept] >= 0, merged[tree.parent[kept]], -1)
    subtree_end = merged[tree.subtree_end[kept] - 1] + 1
    leaves = np.flatnonzero(subtree_end == np.arange(count) + 1)
    leaf_of_sample = np.searchsorted(leaves, merged[tree.sample_node])
    own_rows = np.bincount(rows.sample, rows.end - rows.start, minlength=len(tree.sample_node))
    tokens = tree.end_depth[tree.sample_node]
    alone = unit.token_s * tokens + unit.pair_s * (tokens * (tokens + 1) // 2)
    alone = alone + unit.head_s * own_rows
    token_s = _sums(
        merged, tree.num_tokens * np.float64(unit.token_s) + pairs * np.float64(unit.pair_s), count
    )

    owners = _row_owners(tree, rows)
    row_s, here = owners.num_rows * np.float64(unit.head_s), merged[owners.node]
    end = tree.sample_node[owners.sample]
    # The only sample that ends at a leaf is on every rank that holds the leaf.
    is_certain = owners.by_all | (owners.by_one & (owners.through[end] == 1))
    at_end = np.where(owners.by_one, merged[end], here)
    at_leaf = np.where(owners.by_one, leaves[leaf_of_sample[owners.sample]], here)
    certain_s = _sums(np.where(owners.by_all, here, at_end), row_s * is_certain, count)
    return CostTree(
        parent=parent,
        subtree_end=subtree_end,
        cost_s=token_s + _sums(np.where(owners.by_all, here, at_leaf), row_s, count),
        shared_s=token_s + certain_s,
        head_s=_sums(at_end, row_s * ~is_certain, count),
        last_node=np.append(kept[1:], tree.num_nodes) - 1,
        leaf_of_sample=leaf_of_sample,
        longest_sample_s=float(alone.max(initial=0.0)),
    )


class _RowOwners(NamedTuple):
    """I runs of rows that the same samples predict, of those samples that count.

    Attributes:
        node, num_rows: [I] node of the prefix tree and number of each run.
        by_all, by_one: [I] whether all samples through the node predict it; else only one does.
        sample: [I] that one; 0 elsewhere.
        through: [V] samples through each node that count.
    """

    node: IntArray
    num_rows: IntArray
    by_all: npt.NDArray[np.bool_]
    by_one: npt.NDArray[np.bool_]
    sample: IntArray
    through: IntArray


def _row_owners(tree: PrefixTree, rows: LossRows) -> _RowOwners:
    counts = _samples_that_count(tree, rows)
    before = np.concatenate([[0], np.cumsum(counts[tree.sample_order])])
    through = before[tree.first_sample + tree.samples_through] - before[tree.first_sample]
    mine = counts[rows.sample]
    start, end, sample = rows.start[mine], rows.end[mine], rows.sample[mine]
    edge = np.unique(np.concatenate([start, end]))
    opens, closes = np.searchsorted(edge, start), np.searchsorted(edge, end)

    def covering(value: IntArray) -> IntArray:
        """Sum of a value over the samples that predict each run."""
        change = np.zeros(len(edge), np.int64)
        np.add.at(change, opens, value)
        np.add.at(change, closes, -value)
        return np.cumsum(change)[:-1]

    num_samples, which = covering(np.ones_like(sample)), covering(sample)
    used = np.flatnonzero(num_samples)
    node = np.searchsorted(tree.token_start, edge[used], side="right") - 1
    by_all = num_samples[used] == through[node]
    by_one = (num_samples[used] == 1) & ~by_all
    return _RowOwners(
        node, np.diff(edge)[used], by_all, by_one, np.where(by_one, which[used], 0), through
    )


def _samples_that_count(tree: PrefixTree, rows: LossRows) -> npt.NDArray[np.bool_]:
    """[S] all but duplicates and inner samples without rows, which cost nothing beside another.

    Bounds may leave out any sample that ends inside another or where another ends.
    """
    num_samples = len(tree.sample_node)
    num_rows, mark = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.uint64)
    np.add.at(num_rows, rows.sample, rows.end - rows.start)
    # Equal rows have equal marks; others nearly never, and then only precision is lost.
    low, high = rows.start.astype(np.uint64), rows.end.astype(np.uint64)
    np.add.at(mark, rows.sample, (low * _ODD + high) ** np.uint64(3) * _ODD)
    order = np.lexsort((mark, tree.sample_node))
    is_first = np.full(num_samples, True)
    node, mark = tree.sample_node[order], mark[order]
    is_first[order[1:]] = (node[1:] != node[:-1]) | (mark[1:] != mark[:-1])
    at_leaf = tree.subtree_end[tree.sample_node] == tree.sample_node + 1
    counts: npt.NDArray[np.bool_] = is_first & (at_leaf | (num_rows > 0))
    return counts


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
