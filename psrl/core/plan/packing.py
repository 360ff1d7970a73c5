"""From a rank's plan to packed micro-batches: what a query sees, what is cached, where losses sit.

One visibility rule serves everything: in depth-first order, key slot s is visible to query i iff
`query_start[s] <= i < query_end[s]`. The structure is kept as *chains*: runs of queries in which
every token's path predecessor is the token before it.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from psrl.core.errors import PlanError
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.prefix_tree import PrefixTree

from .plan import Program

LOCAL = -1
"""Source of keys that the micro-batch computes itself."""


class KeyRun(NamedTuple):
    """Keys `[start, end)` of a block (rows inside the block), or of the micro-batch (LOCAL)."""

    source: int
    start: int
    end: int


class Chain(NamedTuple):
    """Queries `[start, end)`: causal among themselves, and seeing all keys of `runs` before."""

    start: int
    end: int
    runs: tuple[KeyRun, ...]


class CachedRows(NamedTuple):
    """Rows `[start, start + num_tokens)` of the micro-batch that go into a block."""

    block: int
    start: int
    num_tokens: int


@dataclass(frozen=True)
class PackedMicroBatch:
    """T tokens of a rank's tree in depth-first order.

    Attributes:
        index: micro-batch number on the rank.
        node, start_depth, num_tokens: [number of segments] tokens of the tree, in packed order.
        chains: cover the T queries in order.
        cached: rows to store for later micro-batches.
    """

    index: int
    node: IntArray
    start_depth: IntArray
    num_tokens: IntArray
    chains: tuple[Chain, ...]
    cached: tuple[CachedRows, ...]

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())

    @cached_property
    def segment_start(self) -> IntArray:
        """[number of segments + 1] first row of each segment."""
        return np.concatenate([[0], np.cumsum(self.num_tokens)]).astype(np.int64)

    @cached_property
    def position_ids(self) -> IntArray:
        """[T] depth of each token on its path."""
        shift = self.start_depth - self.segment_start[:-1]
        return np.arange(self.total_tokens) + np.repeat(shift, self.num_tokens)

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs, a token seeing itself included."""
        return int(visible_pairs(self.start_depth, self.num_tokens).sum())

    @cached_property
    def read_blocks(self) -> frozenset[int]:
        """Blocks of earlier micro-batches that some query reads."""
        return frozenset(r.source for c in self.chains for r in c.runs if r.source != LOCAL)


def visible_pairs(start_depth: IntArray, num_tokens: IntArray) -> IntArray:
    """(query, key) pairs of runs of tokens that begin at the given depths: d n + n (n + 1) / 2."""
    return start_depth * num_tokens + num_tokens * (num_tokens + 1) // 2


class NodeRows(NamedTuple):
    """Where tokens `[start_depth, end_depth)` of a tree node are computed on a rank."""

    start_depth: int
    end_depth: int
    micro_batch: int
    row: int


def rows_of_nodes(program: Program) -> dict[int, list[NodeRows]]:
    """Pieces of every node of one rank's program, ascending in depth."""
    node_rows: dict[int, list[NodeRows]] = {}
    segments, row, previous = program.segments, 0, -1
    for micro_batch, node, start, count in zip(
        segments.micro_batch.tolist(),
        segments.node.tolist(),
        segments.start_depth.tolist(),
        segments.num_tokens.tolist(),
        strict=True,
    ):
        row = row if micro_batch == previous else 0
        node_rows.setdefault(node, []).append(NodeRows(start, start + count, micro_batch, row))
        row, previous = row + count, micro_batch
    for runs in node_rows.values():
        runs.sort()
    return node_rows


def pack_rank(program: Program, tree: PrefixTree) -> list[PackedMicroBatch]:
    """Packed micro-batches of one rank's program (`Program.on_rank`), in number order.

    Args:
        tree: the tree of the program of all ranks.

    Raises:
        PlanError: if a token is read across micro-batches but no block caches it.
    """
    node_rows = rows_of_nodes(program)
    blocks = _blocks_by_owner(program)
    packed = []
    micro_batch = program.segments.micro_batch
    for index in program.micro_batches.micro_batch.tolist():
        rows = program.segments.rows(np.flatnonzero(micro_batch == index))
        chains = _chains(
            index, rows.node, rows.start_depth, rows.num_tokens, tree, node_rows, blocks
        )
        packed.append(
            PackedMicroBatch(
                index,
                rows.node,
                rows.start_depth,
                rows.num_tokens,
                tuple(chains),
                tuple(blocks.get(index, ())),
            )
        )
    return packed


def _blocks_by_owner(program: Program) -> dict[int, list[CachedRows]]:
    table = program.blocks
    owned: dict[int, list[CachedRows]] = {}
    for owner, block, start, count in zip(
        table.micro_batch.tolist(),
        table.block.tolist(),
        table.start_row.tolist(),
        table.num_tokens.tolist(),
        strict=True,
    ):
        owned.setdefault(owner, []).append(CachedRows(block, start, count))
    for rows in owned.values():
        rows.sort(key=lambda cached: cached.start)
    return owned


def _chains(
    index: int,
    node: IntArray,
    start_depth: IntArray,
    num_tokens: IntArray,
    tree: PrefixTree,
    node_rows: dict[int, list[NodeRows]],
    blocks: dict[int, list[CachedRows]],
) -> list[Chain]:
    chains: list[Chain] = []
    row, last_node, last_depth = 0, -1, -1
    for v, depth, count in zip(
        node.tolist(), start_depth.tolist(), num_tokens.tolist(), strict=True
    ):
        continues = depth == last_depth and (
            v == last_node or (chains and int(tree.parent[v]) == last_node)
        )
        if continues and chains:
            chains[-1] = chains[-1]._replace(end=row + count)
        else:
            runs = _path_runs(index, v, depth, tree, node_rows, blocks)
            chains.append(Chain(row, row + count, tuple(runs)))
        row, last_node, last_depth = row + count, v, depth + count
    return chains


def _path_runs(
    index: int,
    node: int,
    depth: int,
    tree: PrefixTree,
    node_rows: dict[int, list[NodeRows]],
    blocks: dict[int, list[CachedRows]],
) -> list[KeyRun]:
    """Keys of the first `depth` tokens on the path of `node`, neighbours joined."""
    runs: list[KeyRun] = []
    for ancestor in [*tree.path(int(tree.parent[node])), node] if node else []:
        for rows in node_rows.get(ancestor, ()):
            count = min(rows.end_depth, depth) - rows.start_depth
            if count <= 0:
                continue
            found = (
                [KeyRun(LOCAL, rows.row, rows.row + count)]
                if rows.micro_batch == index
                else _block_runs(rows, count, blocks.get(rows.micro_batch, []))
            )
            for run in found:
                if runs and runs[-1].source == run.source and runs[-1].end == run.start:
                    runs[-1] = runs[-1]._replace(end=run.end)
                else:
                    runs.append(run)
    return runs


def _block_runs(rows: NodeRows, count: int, owned: list[CachedRows]) -> list[KeyRun]:
    runs, row, end = [], rows.row, rows.row + count
    at = max(0, bisect_right(owned, row, key=lambda cached: cached.start) - 1)
    for cached in islice(owned, at, None):
        stop = min(end, cached.start + cached.num_tokens)
        if not cached.start <= row < stop:
            break
        runs.append(KeyRun(cached.block, row - cached.start, stop - cached.start))
        row = stop
    if row < end:
        raise PlanError(
            f"rows {row}..{end - 1} of micro-batch {rows.micro_batch} are read by another "
            f"micro-batch but no block caches them"
        )
    return runs


@dataclass(frozen=True)
class LossEdges:
    """E predictions of one rank: hidden state at (micro_batch, row) predicts a sample's token.

    Attributes:
        sample: [E] index in the program's `assignments`.
        token: [E] predicted position in the sample; its hidden state is at token - 1.
        micro_batch, row: [E] where that hidden state is computed.
    """

    sample: IntArray
    token: IntArray
    micro_batch: IntArray
    row: IntArray

    @cached_property
    def _by_micro_batch(self) -> tuple[IntArray, IntArray]:
        order = np.argsort(self.micro_batch, kind="stable")
        return order, self.micro_batch[order]

    def of(self, micro_batch: int) -> "LossEdges":
        """The edges of one micro-batch."""
        order, ascending = self._by_micro_batch
        first, end = np.searchsorted(ascending, [micro_batch, micro_batch + 1])
        rows = order[first:end]
        return LossEdges(
            self.sample[rows], self.token[rows], self.micro_batch[rows], self.row[rows]
        )


def loss_edges(program: Program, rank: int, tree: PrefixTree, samples: SampleBatch) -> LossEdges:
    """Loss edges of one rank: one per trained token of each sample assigned to the rank.

    Args:
        program: the program of all ranks.
        tree: its tree.
        samples: its samples, in the order of its assignments.
    """
    node_rows = rows_of_nodes(program.on_rank(rank))
    columns: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for sample in np.flatnonzero(program.assignments.rank == rank).tolist():
        spans = samples.sample_loss_spans(sample) - 1
        if not len(spans):
            continue
        hidden = np.concatenate([np.arange(a, z) for a, z in spans])
        path = [p for v in tree.path(int(tree.sample_node[sample])) for p in node_rows[v]]
        starts = np.array([p.start_depth for p in path])
        at = np.searchsorted(starts, hidden, side="right") - 1
        owner = np.array([p.micro_batch for p in path])[at]
        row = np.array([p.row for p in path])[at] + hidden - starts[at]
        columns.append((np.full(len(hidden), sample), hidden + 1, owner, row))
    if not columns:
        return LossEdges(*(np.empty(0, np.int64) for _ in range(4)))
    return LossEdges(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))
