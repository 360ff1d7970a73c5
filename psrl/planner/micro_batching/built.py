"""Complete tables of ranks, of ranks in step and of a program, with predicted time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from psrl.core.cost.cost_model import CostModel
from psrl.core.plan.bytes_over_ops import peak_bytes
from psrl.core.plan.clock import ProgramOps, ProgramTimes, Reduction, phase_times
from psrl.core.plan.op_table import OpTable, op_codes
from psrl.core.plan.plan import Program
from psrl.core.plan.plan_times import program_ops
from psrl.core.plan.tables import Assignments, Blocks, MicroBatches, Schedule, Segments
from psrl.planner.placement.placement import Placement


@dataclass(frozen=True, eq=False)
class BuiltRank:
    """One rank's tables."""

    placement: Placement
    program: Program

    @property
    def work_s(self) -> float:
        """Work of the rank in all phases of the program, without fixed costs."""
        table, unit = self.program.micro_batches, self.placement.subproblem.unit_costs
        return float(
            unit.token_s * table.num_tokens.sum()
            + unit.pair_s * table.pairs.sum()
            + unit.head_s * table.head_tokens.sum()
        )

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes on a device of the rank."""
        return peak_bytes(self.program, self.placement.tree, self.placement.problem.memory_model)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.placement.problem.memory_limit_bytes


def timed_ops(cost: CostModel, programs: Sequence[Program], num_stages: int) -> ProgramOps:
    """Ops of ranks that run in step, with durations.

    Args:
        programs: of one rank each.
    """
    tables, schedules = [p.micro_batches for p in programs], [p.schedule for p in programs]
    first_row = np.cumsum([0, *map(len, tables)])
    rows = [schedule.micro_batch + first_row[i] for i, schedule in enumerate(schedules)]
    ops = OpTable(
        op_codes(np.concatenate([schedule.op for schedule in schedules])),
        np.concatenate(rows),
        np.cumsum([0, *map(len, schedules)]),
    )
    is_update = programs[0].is_update
    return program_ops(cost, ops, MicroBatches.concatenate(tables), is_update, num_stages)


def op_times(ops: ProgramOps) -> ProgramTimes:
    """When one program of ranks in step runs its ops, from 0."""
    (times,) = phase_times([ops], Reduction(0.0, 0.0), len(ops.first_op) - 1)
    return times


@dataclass(frozen=True, eq=False)
class GroupProgram:
    """Programs of ranks that run in step; a rank that shares no experts is a group of its own."""

    ranks: tuple[BuiltRank, ...]

    @cached_property
    def time_s(self) -> float:
        """Predicted time of one phase on these ranks, from the first forward to the last op."""
        problem = self.ranks[0].placement.problem
        ops = timed_ops(problem.cost_model, [r.program for r in self.ranks], problem.num_stages)
        return op_times(ops).last_s

    @cached_property
    def peak_bytes(self) -> int:
        return max(r.peak_bytes for r in self.ranks)

    @property
    def fits(self) -> bool:
        return all(r.fits for r in self.ranks)

    @property
    def num_micro_batches(self) -> int:
        return max(len(r.program.micro_batches) for r in self.ranks)


@dataclass(frozen=True, eq=False)
class BuiltProgram:
    """A program of all ranks, with what was predicted for each."""

    program: Program
    groups: tuple[GroupProgram, ...]

    @property
    def ranks(self) -> tuple[BuiltRank, ...]:
        return tuple(rank for group in self.groups for rank in group.ranks)

    @property
    def time_s(self) -> float:
        """Predicted time of all phases of the program, without the optimizer step."""
        return len(self.program.phases) * max(group.time_s for group in self.groups)

    @property
    def work_s(self) -> float:
        """Work of the most loaded rank, without fixed costs."""
        return max(r.work_s for r in self.ranks)

    @property
    def fits(self) -> bool:
        return all(group.fits for group in self.groups)


def join_groups(placement: Placement, groups: Sequence[GroupProgram]) -> BuiltProgram:
    """The program of all ranks; its assignments are in the order of the samples.

    Args:
        groups: in the order of their ranks.
    """
    subproblem = placement.subproblem
    parts = [rank.program for group in groups for rank in group.ranks]
    program = Program(
        phases=subproblem.phases,
        is_update=subproblem.is_update,
        mini_batch=subproblem.mini_batch,
        granularity_tokens=placement.granularity_tokens,
        assignments=Assignments(placement.rank, subproblem.members, placement.share_key),
        segments=Segments.concatenate([p.segments for p in parts]),
        micro_batches=MicroBatches.concatenate([p.micro_batches for p in parts]),
        schedule=Schedule.concatenate([p.schedule for p in parts]),
        blocks=Blocks.concatenate([p.blocks for p in parts]),
        block_tokens=parts[0].block_tokens,
    )
    return BuiltProgram(program, tuple(groups))
