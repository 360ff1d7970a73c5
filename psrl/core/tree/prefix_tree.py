"""Compressed prefix tree of a batch, as flat arrays in depth-first pre-order.

Built by sorting the samples and comparing neighbours, not by inserting tokens: the nodes are
the intervals of sorted samples with a common prefix. Node 0 is a root without tokens, so a
forest needs no special case.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from psrl.core.errors import PlanError
from psrl.core.samples.sample import IntArray, SampleBatch

from .sample_order import sort_samples


@dataclass(frozen=True)
class PrefixTree:
    """V nodes in pre-order, S samples; a node is a run of tokens shared by the same samples.

    Attributes:
        parent: [V] parent node; -1 for the root.
        start_depth: [V] tokens before the node on its path.
        num_tokens: [V] tokens of the node; 0 for the root only.
        subtree_end: [V] the subtree of v is the nodes `v .. subtree_end[v] - 1`.
        first_sample: [V] position in `sample_order` of the first sample through the node.
        samples_through: [V] samples through the node; those positions are contiguous.
        sample_order: [S] samples sorted by share key, then symbols.
        sample_node: [S] node at whose end each sample ends.
        logical_tokens: tokens of all samples.
    """

    parent: IntArray
    start_depth: IntArray
    num_tokens: IntArray
    subtree_end: IntArray
    first_sample: IntArray
    samples_through: IntArray
    sample_order: IntArray
    sample_node: IntArray
    logical_tokens: int

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def unique_tokens(self) -> int:
        return int(self.num_tokens.sum())

    @property
    def prefix_match_rate(self) -> float:
        """`1 - unique_tokens / logical_tokens`; 0 for an empty batch."""
        return 1.0 - self.unique_tokens / self.logical_tokens if self.logical_tokens else 0.0

    @cached_property
    def end_depth(self) -> IntArray:
        """[V] tokens on the path up to and including the node."""
        return self.start_depth + self.num_tokens

    @cached_property
    def token_start(self) -> IntArray:
        """[V + 1] tokens of all nodes before each node in pre-order."""
        return np.concatenate([[0], np.cumsum(self.num_tokens)]).astype(np.int64)

    @cached_property
    def representative(self) -> IntArray:
        """[V] a sample through the node; its tokens [start_depth, end_depth) are the node's."""
        if not len(self.sample_order):
            return np.full(self.num_nodes, -1, np.int64)
        return self.sample_order[self.first_sample]

    def path(self, node: int) -> list[int]:
        """Nodes from the first below the root down to `node`; empty for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def validate(self) -> None:
        """Check true pre-order: the visibility rule is silently wrong without it.

        Raises:
            PlanError: naming the first node that breaks the order.
        """
        node = np.arange(self.num_nodes)
        if not self.num_nodes or self.parent[0] != -1 or self.end_depth[0] != 0:
            raise PlanError("prefix tree: node 0 must be a root without tokens")
        if self.subtree_end[0] != self.num_nodes:
            raise PlanError(
                f"prefix tree: the root's subtree ends at {int(self.subtree_end[0])}, the tree has "
                f"{self.num_nodes} nodes"
            )
        inside = (self.parent[1:] >= 0) & (self.parent[1:] < node[1:])
        parent = np.where(inside, self.parent[1:], 0)
        inside &= self.subtree_end[1:] <= self.subtree_end[parent]
        inside &= (self.subtree_end[1:] > node[1:]) & (self.num_tokens[1:] > 0)
        inside &= self.start_depth[1:] == self.end_depth[parent]
        # In pre-order the parent is the innermost subtree still open; any other parent means that
        # a sibling was placed too early or that a subtree ends too late.
        inside &= self.parent[1:] == _parents(self.subtree_end)[1:]
        if not inside.all():
            bad = int(np.flatnonzero(~inside)[0]) + 1
            raise PlanError(
                f"prefix tree: node {bad} (parent {int(self.parent[bad])}, subtree end "
                f"{int(self.subtree_end[bad])}) breaks depth-first pre-order"
            )


def build_prefix_tree(
    batch: SampleBatch,
    share_key: npt.ArrayLike | None = None,
    granularity_tokens: int = 1,
) -> PrefixTree:
    """The prefix tree of a batch.

    Args:
        batch: samples to share between.
        share_key: [S] samples share only with samples of the same key; None shares all.
            `arange(S)` gives unshared training, one chain per sample.
        granularity_tokens: prefixes are shared in whole blocks of this many tokens.
    """
    count = batch.num_samples
    keys = np.zeros(count, np.int64) if share_key is None else np.asarray(share_key, np.int64)
    order, common = sort_samples(batch, keys)
    length = _tokens_of(batch, order, np.diff(batch.symbol_offsets)[order])
    common = _tokens_of(batch, order, common)
    common -= common % granularity_tokens
    left, right, end_depth = _intervals(common, length)
    by_preorder = np.lexsort((end_depth, left))
    left, right, end_depth = left[by_preorder], right[by_preorder], end_depth[by_preorder]
    subtree_end = np.searchsorted(left, right, side="left")
    subtree_end[0] = len(left)
    parent = _parents(subtree_end)
    start_depth = np.where(parent < 0, 0, end_depth[parent])
    sample_node = np.empty(count, np.int64)
    sample_node[order] = _end_nodes(left, right, parent, count)
    return PrefixTree(
        parent=parent,
        start_depth=start_depth,
        num_tokens=end_depth - start_depth,
        subtree_end=subtree_end,
        first_sample=left,
        samples_through=right - left,
        sample_order=order,
        sample_node=sample_node,
        logical_tokens=int(length.sum()),
    )


def _tokens_of(batch: SampleBatch, samples: IntArray, num_symbols: IntArray) -> IntArray:
    """[S] tokens of the first `num_symbols[i]` symbols of sample `samples[i]`."""
    if batch.symbol_num_tokens is None:
        return num_symbols
    cumulative = np.concatenate([[0], np.cumsum(batch.occurrence_tokens)])
    start = batch.symbol_offsets[samples]
    tokens: IntArray = cumulative[start + num_symbols] - cumulative[start]
    return tokens


def _intervals(common: IntArray, length: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Nodes as (left, right, end depth): runs of sorted samples that share that many tokens."""
    # One flat list: a tuple per node would keep the garbage collector busy.
    nodes = [0, len(length), 0]
    open_left, open_depth = [0], [0]
    after = np.append(common[1:], 0).tolist() if len(length) else []
    before, lengths = common.tolist(), length.tolist()
    for i, (matched, total) in enumerate(zip(before, lengths, strict=True)):
        left = i
        while open_depth[-1] > matched:
            left = open_left.pop()
            nodes += (left, i, open_depth.pop())
        if open_depth[-1] < matched:
            open_left.append(left if left < i else i - 1)
            open_depth.append(matched)
        if total > max(matched, after[i]):
            nodes += (i, i + 1, total)
    while len(open_depth) > 1:
        nodes += (open_left.pop(), len(lengths), open_depth.pop())
    columns = np.array(nodes, np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _parents(subtree_end: IntArray) -> IntArray:
    parent = np.full(len(subtree_end), -1, np.int64)
    path: list[int] = []
    ends = subtree_end.tolist()
    for node, _ in enumerate(ends):
        while path and ends[path[-1]] <= node:
            path.pop()
        if path:
            parent[node] = path[-1]
        path.append(node)
    return parent


def _end_nodes(left: IntArray, right: IntArray, parent: IntArray, num_samples: int) -> IntArray:
    """[S] node at which each sorted sample ends: the deepest one through which it passes."""
    position = np.arange(num_samples)
    node = np.searchsorted(left, position, side="right") - 1
    while True:
        outside = right[node] <= position
        if not outside.any():
            return node
        node = np.where(outside, parent[node], node)
