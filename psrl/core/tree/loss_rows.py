"""Rows of a prefix tree whose hidden state predicts a trained token, as intervals.

Every token of a tree has a coordinate: `token_start` of its node plus its offset in the node.
The head runs once per row, however many samples are trained there.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from psrl.core.samples.sample import IntArray, SampleBatch

from .prefix_tree import PrefixTree


@dataclass(frozen=True)
class LossRows:
    """Row `[start, end)` (tree coordinates) of `node` predicts trained tokens of `sample`."""

    sample: IntArray
    node: IntArray
    start: IntArray
    end: IntArray

    def of(self, chosen: npt.NDArray[np.bool_]) -> "RowUnion":
        """Distinct rows of the samples whose entry in `chosen` [S] is true."""
        mine = chosen[self.sample]
        return union_of(self.start[mine], self.end[mine])

    def by_rank(self, rank: IntArray, tree: PrefixTree) -> "RankRows":
        """Distinct rows of each rank.

        Args:
            rank: [S] rank of each sample.
        """
        shift = rank[self.sample] * tree.unique_tokens
        return RankRows(union_of(self.start + shift, self.end + shift), tree.unique_tokens)

    def num_edges(self, chosen: npt.NDArray[np.bool_]) -> int:
        """Trained tokens of the chosen samples: a row counts once for each."""
        return int((self.end - self.start)[chosen[self.sample]].sum())


@dataclass(frozen=True)
class RowUnion:
    """Disjoint ascending intervals, with the rows before each."""

    start: IntArray
    end: IntArray
    rows_before: IntArray

    def count(self, start: IntArray, end: IntArray) -> IntArray:
        """Rows inside each of the given intervals."""
        return self._below(end) - self._below(start)

    def _below(self, at: IntArray) -> IntArray:
        if not len(self.start):
            return np.zeros(len(at), np.int64)
        which = np.searchsorted(self.start, at, side="right") - 1
        inside = np.minimum(at, self.end[which]) - self.start[which]
        return np.where(which >= 0, self.rows_before[which] + inside, 0)


@dataclass(frozen=True)
class RankRows:
    """Distinct rows of all ranks in one union: row t of rank r is at `r * num_tokens + t`."""

    union: RowUnion
    num_tokens: int

    def count(self, rank: IntArray | int, start: IntArray, end: IntArray) -> IntArray:
        """Rows of each given rank inside each of the given intervals."""
        shift = rank * self.num_tokens
        return self.union.count(start + shift, end + shift)

    def of(self, rank: int) -> tuple[IntArray, IntArray]:
        """Disjoint ascending intervals `[start, end)` of a rank's rows, in tree coordinates."""
        first, last = rank * self.num_tokens, (rank + 1) * self.num_tokens
        mine = slice(
            np.searchsorted(self.union.end, first, side="right"),
            np.searchsorted(self.union.start, last),
        )
        start, end = self.union.start[mine], self.union.end[mine]
        return np.maximum(start, first) - first, np.minimum(end, last) - first


def union_of(start: IntArray, end: IntArray) -> RowUnion:
    """The union of intervals `[start, end)` in any order."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end) if len(end) else end
    opens = np.append(True, start[1:] > reach[:-1]) if len(start) else np.empty(0, bool)
    first = np.flatnonzero(opens)
    last = np.append(first[1:] - 1, len(start) - 1) if len(first) else first
    start, end = start[first], reach[last]
    before = np.concatenate([[0], np.cumsum(end - start)])[:-1].astype(np.int64)
    return RowUnion(start, end, before)


def loss_rows(tree: PrefixTree, samples: SampleBatch) -> LossRows:
    """Loss rows of all samples, one entry per (loss span, node).

    Args:
        samples: in the order that the tree's sample indices refer to.
    """
    sample = np.repeat(np.arange(samples.num_samples), np.diff(samples.loss_span_offsets))
    # The hidden state at t - 1 predicts token t.
    low, high = samples.loss_spans[:, 0] - 1, samples.loss_spans[:, 1] - 1
    node = tree.sample_node[sample]
    found: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    while len(sample):
        top = np.maximum(low, tree.start_depth[node])
        bottom = np.minimum(high, tree.end_depth[node])
        shift = tree.token_start[node] - tree.start_depth[node]
        hit = bottom > top
        found.append((sample[hit], node[hit], (top + shift)[hit], (bottom + shift)[hit]))
        above = tree.start_depth[node] > low
        sample, low, high, node = sample[above], low[above], high[above], tree.parent[node[above]]
    columns = zip(*found, strict=True) if found else ([np.empty(0, np.int64)] for _ in range(4))
    return LossRows(*(np.concatenate(parts) for parts in columns))
