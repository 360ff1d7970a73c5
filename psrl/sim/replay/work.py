"""What every (rank, stage) does in a program: its ops with durations and bytes, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from psrl.core.cost.cost_model import CostModel
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.bytes_over_ops import MemoryState, stage_bytes
from psrl.core.plan.check_ops import check_op_patterns
from psrl.core.plan.clock import ProgramOps
from psrl.core.plan.op_table import sorted_by_rank, stage_order
from psrl.core.plan.plan import Plan
from psrl.core.plan.plan_times import program_ops
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch
from psrl.sim.blocks.block_effects import BlockEffects
from psrl.sim.options import SimOptions

from .rank_tables import RankTables, twins

_ACTIVATIONS, _KV = (MemoryState._fields.index(n) for n in ("activation_bytes", "kv_bytes"))


@dataclass(frozen=True)
class ProgramWork(ProgramOps):
    """Ops of the simulated ranks of one program, with what the events say of them.

    Attributes:
        program: index in the plan.
        ranks: [K] the ranks that are simulated; others do exactly what one of them does.
        micro_batch, num_tokens: [M]
        memory: [P, n, 5] `MemoryState` of each op.
        static_bytes: [P] what stays after the last op.
    """

    program: int
    ranks: IntArray
    micro_batch: IntArray
    num_tokens: IntArray
    memory: IntArray
    static_bytes: IntArray


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
    table, is_update = program.micro_batches, program.is_update
    timed = program_ops(costs, ops, table, is_update, num_stages)
    duration_s = timed.duration_s
    if effect is not None:
        duration_s = duration_s + effect.extra_s
    states = np.empty((*duration_s.shape, 5), np.int64)
    for stage in range(num_stages):
        order = stage_order(ops, is_update, num_stages, stage)
        states[stage] = stage_bytes(program, memory, ops, tables.blocks, order, stage)
    if effect is not None:
        states[..., _KV] = effect.live_tokens * memory.kv_bytes_per_token
        kept = effect.kept_input_tokens * memory.stage_input_bytes_per_token
        states[..., _ACTIVATIONS] += kept
    return ProgramWork(
        **{**vars(timed), "duration_s": duration_s * slow[ops.rank]},
        program=index,
        ranks=ranks,
        micro_batch=table.micro_batch,
        num_tokens=table.num_tokens,
        memory=states,
        static_bytes=np.array([memory.static_bytes_on(s, is_update) for s in range(num_stages)]),
    )
