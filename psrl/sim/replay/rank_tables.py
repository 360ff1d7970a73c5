"""The tables of a program by rank, and which ranks do exactly the same."""

from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from psrl.core.plan.bytes_over_ops import BlockTable, block_table
from psrl.core.plan.op_table import OpTable, op_table, sorted_by_rank
from psrl.core.plan.plan import Plan, Program
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.sim.options import SimOptions


@dataclass(frozen=True)
class RankTables:
    """A program with its ops and blocks; its ranks are numbered from 0."""

    program: Program
    ops: OpTable
    blocks: BlockTable

    @classmethod
    def of(cls, program: Program, plan: Plan, batch: SampleBatch) -> "RankTables":
        ops = op_table(program, plan.num_ranks)
        # Only a backward needs to know which cached blocks it reads.
        needs_tree = program.is_update and len(program.blocks) > 0
        blocks = block_table(program, ops, program.tree(batch) if needs_tree else None)
        return cls(program, ops, blocks)

    def columns(self) -> list[tuple[IntArray, IntArray]]:
        """(values, first row per rank) of all that decides a rank's times and bytes."""
        program, ops, blocks = self.program, self.ops, self.blocks
        order, owner = sorted_by_rank(program.micro_batches)
        table = program.micro_batches.rows(order)
        num_ranks = len(ops.first_op) - 1
        first_row = np.searchsorted(owner, np.arange(num_ranks + 1))
        first_block = np.searchsorted(blocks.rank, np.arange(num_ranks + 1))
        _, mode = np.unique(table.activation, return_inverse=True)
        shift = first_row[blocks.rank]
        sizes = (table.num_tokens, table.pairs, table.head_tokens, mode)
        return [
            *((column, first_row) for column in sizes),
            (ops.kind, ops.first_op),
            (ops.row - first_row[ops.rank], ops.first_op),
            (blocks.owner - shift, first_block),
            (blocks.release_kind, first_block),
            (blocks.release_row - shift, first_block),
            (np.where(blocks.first_reader < 0, -1, blocks.first_reader - shift), first_block),
            (blocks.allocated_tokens, first_block),
        ]

    def of_ranks(self, ranks: IntArray) -> "RankTables":
        """The rows of some ranks, ascending, which are numbered anew."""
        num_ranks = len(self.ops.first_op) - 1
        if len(ranks) == num_ranks:
            return self
        number = np.full(num_ranks, -1, np.int64)
        number[ranks] = np.arange(len(ranks))
        order, owner = sorted_by_rank(self.program.micro_batches)
        kept = number[owner] >= 0
        new_row = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
        chosen = self.program.micro_batches.rows(order[kept])
        table = replace(chosen, rank=number[chosen.rank])
        on_op, on_block = number[self.ops.rank] >= 0, number[self.blocks.rank] >= 0
        count = np.diff(self.ops.first_op)[ranks]
        ops = OpTable(
            self.ops.kind[on_op],
            new_row[self.ops.row[on_op]],
            np.concatenate([[0], np.cumsum(count)]),
        )
        b = self.blocks
        blocks = BlockTable(
            rank=number[b.rank[on_block]],
            owner=new_row[b.owner[on_block]],
            release_kind=b.release_kind[on_block],
            release_row=new_row[b.release_row[on_block]],
            first_reader=new_row[b.first_reader[on_block]],
            allocated_tokens=b.allocated_tokens[on_block],
        )
        return RankTables(replace(self.program, micro_batches=table), ops, blocks)


def twins(tables: list[RankTables], num_ranks: int, options: SimOptions) -> IntArray:
    """For each rank the first one that does exactly the same."""
    columns = [column for table in tables for column in table.columns()]
    seen: dict[bytes, int] = {}
    twin = np.empty(num_ranks, np.int64)
    for rank in range(num_ranks):
        digest = blake2b(repr(options.slow_ranks.get(rank, 1.0)).encode(), digest_size=16)
        for values, first in columns:
            mine = np.ascontiguousarray(values[first[rank] : first[rank + 1]], np.int64)
            digest.update(len(mine).to_bytes(8, "little"))
            digest.update(mine.tobytes())
        twin[rank] = seen.setdefault(digest.digest(), rank)
    return twin
