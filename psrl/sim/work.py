"""What every (rank, stage) does in a program: its ops with durations and bytes, as arrays."""

from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from psrl.core.cost_model import Amount, CostModel, MemoryModel
from psrl.core.errors import PlanError
from psrl.core.plan import Plan, Program
from psrl.core.sample import FloatArray, IntArray, SampleBatch

from .bytes_over_ops import BlockTable, block_table, stage_bytes
from .op_order import OpTable, op_table, sorted_by_rank, stage_order
from .options import SimOptions


@dataclass(frozen=True)
class ProgramWork:
    """One program on P stages of K ranks: n ops per stage, M micro-batches.

    Attributes:
        program: index in the plan.
        is_update: whether a gradient reduction and an optimizer step follow the ops.
        ranks: [K] the ranks that are simulated; others do exactly what one of them does.
        first_op: [K + 1] rank k owns the ops `[first_op[k], first_op[k + 1])` of each stage.
        kind, row: [P, n] what each stage runs, in order, and on which micro-batch.
        micro_batch, num_tokens, message_s: [M]
        duration_s: [P, n]
        memory: [P, n, 5] `MemoryState` of each op.
        static_bytes: what stays after the last op.
    """

    program: int
    is_update: bool
    ranks: IntArray
    first_op: IntArray
    kind: IntArray
    row: IntArray
    micro_batch: IntArray
    num_tokens: IntArray
    message_s: FloatArray
    duration_s: FloatArray
    memory: IntArray
    static_bytes: int

    @property
    def num_ops(self) -> int:
        return int(self.kind.size)


def phase_work(
    plan: Plan,
    indices: tuple[int, ...],
    batch: SampleBatch,
    costs: CostModel,
    options: SimOptions,
) -> tuple[list[ProgramWork], IntArray]:
    """Work of the programs that a phase runs, and for each rank the position of the one like it.

    Ranks that run equal ops of equal size in all these programs are simulated once.

    Raises:
        PlanError: if a cached block is used while it is not alive, or ranks that share experts
            run different ops.
    """
    tables = [_Tables.of(plan.programs[index], plan, batch) for index in indices]
    alone = options.nics_per_host is not None or plan.parallel.coupled_ranks > 1
    twin = np.arange(plan.num_ranks) if alone else _twins(tables, plan.num_ranks, options)
    ranks, position = np.unique(twin, return_inverse=True)
    slow = np.ones(plan.num_ranks)
    for rank, factor in options.slow_ranks.items():
        slow[rank] = factor
    works = [
        _work(plan, index, table.of_ranks(ranks), ranks, costs, slow[ranks])
        for index, table in zip(indices, tables, strict=True)
    ]
    return works, position


@dataclass(frozen=True)
class _Tables:
    """A program with its ops and blocks; its ranks are numbered from 0."""

    program: Program
    ops: OpTable
    blocks: BlockTable

    @classmethod
    def of(cls, program: Program, plan: Plan, batch: SampleBatch) -> "_Tables":
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

    def of_ranks(self, ranks: IntArray) -> "_Tables":
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
        return _Tables(replace(self.program, micro_batches=table), ops, blocks)


def _twins(tables: list[_Tables], num_ranks: int, options: SimOptions) -> IntArray:
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


def _work(
    plan: Plan,
    index: int,
    tables: _Tables,
    ranks: IntArray,
    costs: CostModel,
    slow: FloatArray,
) -> ProgramWork:
    program, ops = tables.program, tables.ops
    num_stages = plan.parallel.pipeline_model_parallel_size
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    rows, _ = sorted_by_rank(program.micro_batches)
    program = replace(program, micro_batches=program.micro_batches.rows(rows))
    shape = num_stages, len(ops.kind)
    kind, row = np.empty(shape, np.int64), np.empty(shape, np.int64)
    duration_s, states = np.empty(shape), np.empty((*shape, 5), np.int64)
    for stage in range(num_stages):
        order = stage_order(ops, program.is_update, num_stages, stage)
        kind[stage], row[stage] = ops.kind[order], ops.row[order]
        by_kind = _durations_s(costs, program, stage)
        duration_s[stage] = by_kind[kind[stage], row[stage]] * slow[ops.rank]
        is_last = stage == num_stages - 1
        states[stage] = stage_bytes(program, memory, ops, tables.blocks, order, is_last)
    table = program.micro_batches
    coupled = plan.parallel.coupled_ranks
    if coupled > 1:
        duration_s = _slowest_of_group(index, ops, kind, duration_s, coupled)
    return ProgramWork(
        program=index,
        is_update=program.is_update,
        ranks=ranks,
        first_op=ops.first_op,
        kind=kind,
        row=row,
        micro_batch=table.micro_batch,
        num_tokens=table.num_tokens,
        message_s=_per_row(costs.message_s(table.num_tokens.astype(np.float64)), program),
        duration_s=duration_s,
        memory=states,
        static_bytes=memory.static_bytes,
    )


def _durations_s(costs: CostModel, program: Program, stage: int) -> FloatArray:
    """[3, M] time on a stage of each kind of op on each micro-batch.

    Layer recompute runs the layers' forward again inside the backward, without the head: the
    head's own second forward belongs to `stage_backward_s`. A dropped micro-batch needs its head
    only when it runs again.
    """
    table = program.micro_batches
    columns = table.num_tokens, table.pairs, table.head_tokens
    tokens, pairs, head_tokens = (column.astype(np.float64) for column in columns)
    forward = costs.stage_forward_s(stage, tokens, pairs, head_tokens)
    again = costs.stage_forward_s(stage, tokens, pairs, np.zeros_like(head_tokens))
    backward = costs.stage_backward_s(stage, tokens, pairs, head_tokens)
    return np.stack(
        [
            _per_row(np.where(table.activation == "drop", again, forward), program),
            _per_row(backward + again * (table.activation == "recompute"), program),
            _per_row(forward, program),
        ]
    )


def _per_row(amount: Amount, program: Program) -> FloatArray:
    """One value per micro-batch; a cost model may return a constant."""
    shape = program.micro_batches.num_tokens.shape
    return np.array(np.broadcast_to(np.asarray(amount, np.float64), shape))


def _slowest_of_group(
    index: int, ops: OpTable, kind: IntArray, duration_s: FloatArray, size: int
) -> FloatArray:
    """Ranks that share experts meet in every layer, so an op lasts as long as its slowest.

    Raises:
        PlanError: if ranks of a group run different ops.
    """
    slowest = duration_s.copy()
    for leader in range(0, len(ops.first_op) - 1, size):
        starts, ends = (
            ops.first_op[leader : leader + size],
            ops.first_op[1:][leader : leader + size],
        )
        group = [slice(a, z) for a, z in zip(starts.tolist(), ends.tolist(), strict=True)]
        for rank, mine in enumerate(group, leader):
            if not np.array_equal(kind[:, mine], kind[:, group[0]]):
                raise PlanError(
                    f"program {index}: data-parallel ranks {leader} and {rank} share experts but "
                    f"run different lists of {group[0].stop - group[0].start} and "
                    f"{mine.stop - mine.start} ops",
                    "with expert parallelism the ranks of a group run one op pattern",
                )
        most = np.max([duration_s[:, mine] for mine in group], axis=0)
        for mine in group:
            slowest[:, mine] = most
    return slowest
