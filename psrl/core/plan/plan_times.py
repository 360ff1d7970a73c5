"""From a plan's tables and a cost model to durations of ops, and to the times it predicts."""

import numpy as np

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.cluster import Amount
from psrl.core.cost.cost_model import CostModel
from psrl.core.samples.sample import FloatArray

from .clock import ProgramOps, ProgramTimes, Reduction, check_finished, phase_times
from .op_table import OpTable, op_table, sorted_by_rank, stage_order
from .plan import PHASES, Plan, Program
from .tables import MicroBatches


def stage_durations_s(costs: CostModel, table: MicroBatches, stage: int) -> FloatArray:
    """[3, M] time on a stage of each kind of op on each micro-batch.

    Layer recompute runs the layers' forward again inside the backward, without the head: the
    head's own second forward belongs to `stage_backward_s`. A dropped micro-batch needs its head
    only when it runs again.
    """
    columns = table.num_tokens, table.pairs, table.head_tokens
    tokens, pairs, head_tokens = (column.astype(np.float64) for column in columns)
    forward = _per_row(costs.stage_forward_s(stage, tokens, pairs, head_tokens), table)
    backward = _per_row(costs.stage_backward_s(stage, tokens, pairs, head_tokens), table)
    first = forward
    if (table.activation != "keep").any():
        again = _per_row(costs.stage_forward_s(stage, tokens, pairs, 0.0 * tokens), table)
        first = np.where(table.activation == "drop", again, forward)
        backward = backward + again * (table.activation == "recompute")
    return np.stack([first, backward, forward])


def message_durations_s(costs: CostModel, table: MicroBatches) -> FloatArray:
    """[M] time of each micro-batch's message between neighbouring stages."""
    return _per_row(costs.message_s(table.num_tokens.astype(np.float64)), table)


def _per_row(amount: Amount, table: MicroBatches) -> FloatArray:
    """One value per micro-batch; a cost model may return a constant."""
    return np.broadcast_to(np.asarray(amount, np.float64), table.num_tokens.shape)


def program_ops(
    costs: CostModel, ops: OpTable, table: MicroBatches, is_update: bool, num_stages: int
) -> ProgramOps:
    """Ops and durations of a program.

    Args:
        table: micro-batches, to whose rows `ops.row` refers.
    """
    shape = num_stages, len(ops.kind)
    kind, row = np.empty(shape, np.int64), np.empty(shape, np.int64)
    duration_s = np.empty(shape)
    for stage in range(num_stages):
        order = stage_order(ops, is_update, num_stages, stage)
        kind[stage], row[stage] = ops.kind[order], ops.row[order]
        duration_s[stage] = stage_durations_s(costs, table, stage)[kind[stage], row[stage]]
    message_s = message_durations_s(costs, table)
    return ProgramOps(is_update, ops.first_op, kind, row, duration_s, message_s)


def predicted_times(plan: Plan, costs: CostModel | None = None) -> dict[str, float]:
    """What `plan.predicted` says about time (docs/metrics.md), from the tables alone.

    Keys: `makespan_s`, `<phase>_s` of each phase, `worker_time_max_s`, `worker_time_min_s`.

    Args:
        costs: None for the plan's own cost model.

    Raises:
        PlanError: if an op names no micro-batch, or stages wait forever.
    """
    if costs is None:
        costs = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    reduction = Reduction(costs.gradient_reduction_s(), costs.optimizer_step_s())
    runs: dict[tuple[int, ...], tuple[float, FloatArray]] = {}
    phases: dict[str, tuple[int, ...]] = {}
    for phase in PHASES:
        chosen = tuple(i for i, program in enumerate(plan.programs) if phase in program.phases)
        if not chosen:
            continue
        phases[phase] = chosen
        if chosen not in runs:
            programs = [plan_ops(costs, plan, plan.programs[i]) for i in chosen]
            times = phase_times(programs, reduction, plan.parallel.coupled_ranks)
            check_finished(times[-1].stuck, programs[0].kind.shape[0] * plan.num_ranks)
            spans = [_rank_spans(p, t) for p, t in zip(programs, times, strict=True)]
            runs[chosen] = times[-1].last_s, worker_times_s(*np.array(spans).swapaxes(0, 1))
    last_s = {phase: runs[chosen][0] for phase, chosen in phases.items()}
    worker_s = [runs[chosen][1] for chosen in phases.values()]
    return {
        "makespan_s": sum(last_s.values()),
        **{f"{phase}_s": time_s for phase, time_s in last_s.items()},
        "worker_time_max_s": sum(float(s.max()) for s in worker_s),
        "worker_time_min_s": sum(float(s.min()) for s in worker_s),
    }


def plan_ops(costs: CostModel, plan: Plan, program: Program) -> ProgramOps:
    """Ops and durations of a program on all ranks of its plan."""
    by_rank, _ = sorted_by_rank(program.micro_batches)
    table = program.micro_batches.rows(by_rank)
    ops, num_stages = op_table(program, plan.num_ranks), plan.parallel.pipeline_model_parallel_size
    return program_ops(costs, ops, table, program.is_update, num_stages)


def _rank_spans(program: ProgramOps, times: ProgramTimes) -> FloatArray:
    """[2, K] start of the first op and end of the last op of each rank, over all stages."""
    spans = np.full((2, len(program.first_op) - 1), np.inf)
    spans[1] = 0.0
    (busy,) = np.nonzero(np.diff(program.first_op))
    spans[0, busy] = times.start_s[:, program.first_op[busy]].min(axis=0)
    spans[1, busy] = times.end_s[:, program.first_op[busy + 1] - 1].max(axis=0)
    return spans


def worker_times_s(first_s: FloatArray, last_s: FloatArray) -> FloatArray:
    """[R] time that each rank works: the spans of its programs from first start to last end.

    Programs (optimizer steps) meet at the gradient reduction, so waiting for others between
    them is not work; where the programs of a rank overlap, the time counts once.

    Args:
        first_s, last_s: [programs, R]; infinite and 0 for a rank without ops.
    """
    worked_s, until_s = np.zeros(first_s.shape[1]), np.zeros(first_s.shape[1])
    for first, last in zip(first_s, last_s, strict=True):
        worked_s += np.maximum(last - np.maximum(first, until_s), 0.0)
        until_s = np.maximum(until_s, last)
    return worked_s
