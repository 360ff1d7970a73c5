"""What every (rank, stage) does in a program: its ops with durations and bytes, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from psrl.core.cost.cluster import Amount
from psrl.core.cost.cost_model import CostModel
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.bytes_over_ops import MemoryState, stage_bytes
from psrl.core.plan.check_ops import check_op_patterns
from psrl.core.plan.op_table import OpTable, sorted_by_rank, stage_order
from psrl.core.plan.plan import Plan, Program
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch
from psrl.sim.blocks.block_effects import BlockEffects
from psrl.sim.options import SimOptions

from .rank_tables import RankTables, twins

_ACTIVATIONS, _KV = (MemoryState._fields.index(n) for n in ("activation_bytes", "kv_bytes"))


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
    effects: Sequence[BlockEffects] | None = None,
) -> tuple[list[ProgramWork], IntArray]:
    """Work of the programs that a phase runs, and for each rank the position of the one like it.

    Ranks that run equal ops of equal size in all these programs are simulated once.

    Args:
        effects: of other blocks, one per program of the plan.

    Raises:
        PlanError: if a cached block is used while it is not alive, or ranks that share experts
            run different ops.
    """
    for index in indices:
        check_op_patterns(index, plan.programs[index], plan.parallel)
    tables = [RankTables.of(plan.programs[index], plan, batch) for index in indices]
    alone = options.nics_per_host is not None or plan.parallel.coupled_ranks > 1
    # Equal tables do not say which blocks an op reads, and so which ones it misses.
    alone = alone or effects is not None
    twin = np.arange(plan.num_ranks) if alone else twins(tables, plan.num_ranks, options)
    ranks, position = np.unique(twin, return_inverse=True)
    slow = np.ones(plan.num_ranks)
    for rank, factor in options.slow_ranks.items():
        slow[rank] = factor
    works = [
        _work(
            plan,
            index,
            table.of_ranks(ranks),
            ranks,
            costs,
            slow[ranks],
            None if effects is None else effects[index],
        )
        for index, table in zip(indices, tables, strict=True)
    ]
    return works, position


def _work(
    plan: Plan,
    index: int,
    tables: RankTables,
    ranks: IntArray,
    costs: CostModel,
    slow: FloatArray,
    effect: BlockEffects | None,
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
        duration_s[stage] = by_kind[kind[stage], row[stage]]
        if effect is not None:
            duration_s[stage] += effect.extra_s[stage]
        duration_s[stage] *= slow[ops.rank]
        is_last = stage == num_stages - 1
        states[stage] = stage_bytes(program, memory, ops, tables.blocks, order, is_last)
        if effect is not None:
            states[stage, :, _KV] = effect.live_tokens[stage] * memory.kv_bytes_per_token
            kept = effect.kept_input_tokens[stage]
            states[stage, :, _ACTIVATIONS] += kept * memory.stage_input_bytes_per_token
    table = program.micro_batches
    coupled = plan.parallel.coupled_ranks
    if coupled > 1:
        duration_s = _slowest_of_group(ops, duration_s, coupled)
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


def _slowest_of_group(ops: OpTable, duration_s: FloatArray, size: int) -> FloatArray:
    """Ranks that share experts meet in every layer, so an op lasts as long as its slowest."""
    slowest = duration_s.copy()
    for leader in range(0, len(ops.first_op) - 1, size):
        starts, ends = (
            ops.first_op[leader : leader + size],
            ops.first_op[1:][leader : leader + size],
        )
        group = [slice(a, z) for a, z in zip(starts.tolist(), ends.tolist(), strict=True)]
        most = np.max([duration_s[:, mine] for mine in group], axis=0)
        for mine in group:
            slowest[:, mine] = most
    return slowest
