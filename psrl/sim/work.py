"""What each (rank, stage) does in a program: its ops with durations, computed once as arrays."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from psrl.core.cost_model import Amount, CostModel, MemoryModel
from psrl.core.memory import MemoryLedger
from psrl.core.packing import pack_rank
from psrl.core.plan import Plan, Program
from psrl.core.sample import IntArray, SampleBatch
from psrl.core.schedule import stage_ops


@dataclass(frozen=True)
class StageWork:
    """One program on one stage of one rank: n ops and all that is known before they run.

    Attributes:
        program: index of the plan's program.
        is_update: whether a gradient reduction and an optimizer step follow the ops.
        op, micro_batch: what the stage runs, in order.
        num_tokens, duration_s, message_s: of each op; the message carries the op's tokens.
        memory: [n + 1, 5] `MemoryState` of each op, and after the last one.
    """

    program: int
    is_update: bool
    op: list[str]
    micro_batch: list[int]
    num_tokens: list[int]
    duration_s: list[float]
    message_s: list[float]
    memory: IntArray


def program_work(
    plan: Plan, index: int, batch: SampleBatch, costs: CostModel
) -> Iterator[tuple[int, int, StageWork]]:
    """Yield (rank, stage, work) of one program, for every rank and stage of the layout.

    Args:
        index: of the program in the plan.
    """
    program = plan.programs[index]
    num_stages = plan.parallel.pipeline_model_parallel_size
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    tree = program.tree(batch)
    table = program.micro_batches
    num_tokens = table.num_tokens.tolist()
    messages = _per_row(costs.message_s(table.num_tokens.astype(np.float64)), program)
    durations = [_durations_s(costs, program, stage) for stage in range(num_stages)]
    for rank in range(plan.num_ranks):
        mine = program.on_rank(rank)
        # Only a backward needs to know which cached blocks it reads.
        packed = pack_rank(mine, tree) if program.is_update else []
        rows = np.flatnonzero(table.rank == rank).tolist()
        row_of = dict(zip(mine.micro_batches.micro_batch.tolist(), rows, strict=True))
        last_stage_ops = mine.ops()
        for stage in range(num_stages):
            ops = stage_ops(last_stage_ops, num_stages, stage)
            op_rows = [row_of[op.micro_batch] for op in ops]
            by_kind = durations[stage]
            ledger = MemoryLedger(mine, packed, memory, stage == num_stages - 1)
            states = [*(ledger.run(op) for op in ops), ledger.finish()]
            work = StageWork(
                program=index,
                is_update=program.is_update,
                op=[op.kind for op in ops],
                micro_batch=[op.micro_batch for op in ops],
                num_tokens=[num_tokens[row] for row in op_rows],
                duration_s=[by_kind[op.kind][row] for op, row in zip(ops, op_rows, strict=True)],
                message_s=[messages[row] for row in op_rows],
                memory=np.array(states, np.int64),
            )
            yield rank, stage, work


def _durations_s(costs: CostModel, program: Program, stage: int) -> dict[str, list[float]]:
    """Time on a stage of every row of the micro-batch table, per kind of op.

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
    return {
        "forward": _per_row(np.where(table.activation == "drop", again, forward), program),
        "recompute": _per_row(forward, program),
        "backward": _per_row(backward + again * (table.activation == "recompute"), program),
    }


def _per_row(amount: Amount, program: Program) -> list[float]:
    """One value per micro-batch; a cost model may return a constant."""
    shape = program.micro_batches.num_tokens.shape
    values: list[float] = np.broadcast_to(np.asarray(amount, np.float64), shape).tolist()
    return values
