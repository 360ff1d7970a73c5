"""What micro-batches read from each other's blocks, for all ranks of a program at once."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from psrl.core.errors import PlanError
from psrl.core.samples.sample import IntArray
from psrl.core.tree.loss_rows import RowUnion
from psrl.core.tree.prefix_tree import PrefixTree

from .plan import Program
from .tables import Blocks, MicroBatches, Schedule, Segments, Table

T = TypeVar("T", bound=Table)


@dataclass(frozen=True, eq=False)
class ProgramByRank:
    """A program whose rows are sorted by rank, with its micro-batches numbered over all ranks.

    M micro-batches; micro-batch m of rank r has number `first_micro_batch[r] + m`.
    """

    index: int
    program: Program
    tree: PrefixTree
    num_ranks: int

    @classmethod
    def of(cls, index: int, program: Program, tree: PrefixTree, num_ranks: int) -> "ProgramByRank":
        """Sort the tables; rows of one rank keep their order."""

        def by_rank(table: T) -> T:
            if (table.rank[1:] >= table.rank[:-1]).all():
                return table
            return table.rows(np.argsort(table.rank, kind="stable"))

        ranked = replace(
            program,
            segments=by_rank(program.segments),
            micro_batches=by_rank(program.micro_batches),
            schedule=by_rank(program.schedule),
            blocks=by_rank(program.blocks),
        )
        return cls(index, ranked, tree, num_ranks)

    @property
    def segments(self) -> Segments:
        return self.program.segments

    @property
    def micro_batches(self) -> MicroBatches:
        return self.program.micro_batches

    @property
    def schedule(self) -> Schedule:
        return self.program.schedule

    @property
    def blocks(self) -> Blocks:
        return self.program.blocks

    @cached_property
    def num_micro_batches(self) -> IntArray:
        """[D] micro-batches of each rank."""
        return np.bincount(self.micro_batches.rank, minlength=self.num_ranks).astype(np.int64)

    @cached_property
    def first_micro_batch(self) -> IntArray:
        """[D] number of each rank's first micro-batch."""
        return np.cumsum(self.num_micro_batches) - self.num_micro_batches

    def is_known(self, rank: IntArray, micro_batch: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each micro-batch of a rank is in the table."""
        return np.asarray((micro_batch >= 0) & (micro_batch < self.num_micro_batches[rank]))

    @cached_property
    def segment_micro_batch(self) -> IntArray:
        """[number of segments] number of each segment's micro-batch."""
        return self.first_micro_batch[self.segments.rank] + self.segments.micro_batch

    @cached_property
    def by_token(self) -> IntArray:
        """Segments ordered by rank, node and depth."""
        table = self.segments
        return np.lexsort((table.start_depth, table.node, table.rank))

    @cached_property
    def first_row(self) -> IntArray:
        """[M + 1] rows of all micro-batches before each."""
        return np.concatenate([[0], np.cumsum(self.micro_batches.num_tokens)]).astype(np.int64)

    def on_rank(self, rank: int) -> Program:
        """The program with one rank's rows of the sorted tables."""

        def mine(table: T) -> T:
            return table.rows(slice(*np.searchsorted(table.rank, (rank, rank + 1)).tolist()))

        return replace(
            self.program,
            segments=mine(self.segments),
            micro_batches=mine(self.micro_batches),
            schedule=mine(self.schedule),
            blocks=mine(self.blocks),
        )

    def where(self, rank: int) -> str:
        return f"program {self.index}, rank {rank}"


class Reads(NamedTuple):
    """Micro-batch number `reader` reads rows of block (place in the table) `block`; each once."""

    reader: IntArray
    block: IntArray


def block_reads(ranked: ProgramByRank) -> Reads:
    """Rule 4: what micro-batches read of each other, all of which must be cached.

    Raises:
        PlanError: naming rows that are read across micro-batches but not cached.
    """
    reader, segment = _segment_reads(ranked)
    table = ranked.segments
    row = np.cumsum(table.num_tokens) - table.num_tokens
    start, end = row[segment], (row + table.num_tokens)[segment]
    blocks = ranked.blocks
    block_start = ranked.first_row[_owner(ranked)] + blocks.start_row
    order = np.argsort(block_start, kind="stable")
    block_start = block_start[order]
    block_end = block_start + blocks.num_tokens[order]
    before = np.cumsum(blocks.num_tokens[order]) - blocks.num_tokens[order]
    cached = RowUnion(block_start, block_end, before).count(start, end)
    lacking = np.flatnonzero(cached < end - start)
    if len(lacking):
        at = int(segment[lacking[0]])
        owner = int(ranked.segment_micro_batch[at])
        first = int(row[at] - ranked.first_row[owner])
        raise PlanError(
            f"rule 4: {ranked.where(int(table.rank[at]))}: rows {first}.."
            f"{first + int(table.num_tokens[at]) - 1} of micro-batch {int(table.micro_batch[at])} "
            "are read by another micro-batch but no block caches all of them"
        )
    low = np.searchsorted(block_end, start, side="right")
    count = np.searchsorted(block_start, end, side="left") - low
    place = np.repeat(low - np.cumsum(count) + count, count) + np.arange(int(count.sum()))
    num_blocks = max(len(blocks), 1)
    pairs = np.unique(np.repeat(reader, count) * num_blocks + order[place])
    return Reads(pairs // num_blocks, pairs % num_blocks)


def _owner(ranked: ProgramByRank) -> IntArray:
    return ranked.first_micro_batch[ranked.blocks.rank] + ranked.blocks.micro_batch


def _segment_reads(ranked: ProgramByRank) -> tuple[IntArray, IntArray]:
    """All pairs of a micro-batch and a segment of another one on the path of its tokens."""
    order, table, tree = ranked.by_token, ranked.segments, ranked.tree
    owner = ranked.segment_micro_batch[order]
    key = table.rank[order] * tree.num_nodes + table.node[order]
    above = tree.parent[table.node[order]]
    opens = np.append(True, key[1:] != key[:-1])[: len(key)]
    last_above = np.searchsorted(key, key - table.node[order] + above, side="right") - 1
    place = np.where(opens, np.where(above > 0, last_above, -1), np.arange(len(key)) - 1)
    child = np.flatnonzero(place >= 0)
    child = child[owner[place[child]] != owner[child]]
    starts = np.unique(np.stack([owner[child], place[child]]), axis=1)
    parents, owners = place.tolist(), owner.tolist()
    found: set[tuple[int, int]] = set()
    for reader, at in starts.T.tolist():
        # A segment of the reader itself reads what is above it on its own account.
        while at >= 0 and owners[at] != reader and (reader, at) not in found:
            found.add((reader, at))
            at = parents[at]
    pairs = np.array(sorted(found), np.int64).reshape(-1, 2)
    return pairs[:, 0], order[pairs[:, 1]]
