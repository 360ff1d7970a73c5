"""Ranks that share experts meet in every layer: they run one op pattern, step by step.

A step lasts as long as its slowest member, so no group is faster than the work of its most loaded
rank. Ranks that are cut into equally many micro-batches of equal cost reach that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from psrl.core.cost.cost_model import CostModel
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import OpKind
from psrl.core.plan.tables import MicroBatches, Schedule
from psrl.core.samples.sample import IntArray
from psrl.core.tree.prefix_tree import PrefixTree
from psrl.core.tree.segment_tree import segment_tree
from psrl.planner.placement.placement import RankSegments

from .assemble import (
    BuiltRank,
    cached_reads,
    message_durations,
    order_ops,
    phase_time_s,
    stage_durations,
)


@dataclass(frozen=True, eq=False)
class GroupProgram:
    """Programs of ranks that run in step; a rank that shares no experts is a group of its own."""

    ranks: tuple[BuiltRank, ...]

    @property
    def time_s(self) -> float:
        """Predicted time of one phase: the same on all ranks."""
        return max(r.time_s for r in self.ranks)

    @cached_property
    def peak_bytes(self) -> int:
        return max(r.peak_bytes for r in self.ranks)

    @property
    def fits(self) -> bool:
        return all(r.fits for r in self.ranks)

    @property
    def num_micro_batches(self) -> int:
        return max(len(r.program.micro_batches) for r in self.ranks)


def run_in_step(
    programs: Sequence[BuiltRank], first_rank: int, held_factor: float = 1.0
) -> GroupProgram:
    """Give neighbouring ranks one op pattern: the k-th op of each is on the same micro-batch.

    Ranks with fewer micro-batches get empty ones at the end. The common backward order respects
    the prefixes of all ranks.

    Args:
        programs: of the ranks `first_rank, first_rank + 1, ...`; what their micro-batches keep
            for the backward must agree.
        held_factor: see `build_rank`.
    """
    if len(programs) == 1:
        return GroupProgram(tuple(programs))
    placement = programs[0].placement
    longest = max((p.program.micro_batches for p in programs), key=len)
    tables = [
        _padded(p.program.micro_batches, longest, first_rank + i) for i, p in enumerate(programs)
    ]
    problem = placement.problem
    reads = np.concatenate([_reads(p.program, placement.tree) for p in programs], axis=1)
    num_tokens = np.max([t.num_tokens for t in tables], axis=0)
    ops = order_ops(
        placement.subproblem.is_update, num_tokens, longest.activation, reads, held_factor
    )
    durations = slowest_durations(problem.cost_model, problem.num_stages, tables)
    time_s = phase_time_s(ops, durations, slowest_messages(problem.cost_model, tables))
    ranks = []
    for rank, (made, table) in enumerate(zip(programs, tables, strict=True), first_rank):
        schedule = Schedule(
            np.full(len(ops), rank),
            np.array([op.kind for op in ops], np.str_),
            np.array([op.micro_batch for op in ops], np.int64),
        )
        program = replace(made.program, micro_batches=table, schedule=schedule)
        ranks.append(replace(made, program=program, time_s=time_s))
    return GroupProgram(tuple(ranks))


def _padded(table: MicroBatches, longest: MicroBatches, rank: int) -> MicroBatches:
    """A table with empty micro-batches behind its own."""
    count, missing = len(longest), len(longest) - len(table)
    columns = {
        name: np.concatenate([getattr(table, name), np.zeros(missing, getattr(table, name).dtype)])
        for name in ("num_tokens", "pairs", "head_tokens", "forward_s", "backward_s")
    }
    if not np.array_equal(table.activation, longest.activation[: len(table)]):
        raise AssertionError("ranks in step must keep the same for their backwards")
    return MicroBatches(
        rank=np.full(count, rank),
        micro_batch=np.arange(count),
        activation=longest.activation,
        **columns,
    )


def _reads(program: Program, tree: PrefixTree) -> IntArray:
    s = program.segments
    segments = RankSegments(s.micro_batch, s.node, s.start_depth, s.num_tokens)
    return cached_reads(segments, *segment_tree(tree, segments.node, segments.start_depth))


def slowest_durations(
    cost: CostModel, num_stages: int, tables: Sequence[MicroBatches]
) -> list[dict[OpKind, list[float]]]:
    """Seconds of each step, by stage and kind of op: those of its slowest member."""
    each = [stage_durations(cost, table, num_stages) for table in tables]
    return [
        {kind: np.max([d[stage][kind] for d in each], axis=0).tolist() for kind in each[0][stage]}
        for stage in range(num_stages)
    ]


def slowest_messages(cost: CostModel, tables: Sequence[MicroBatches]) -> list[float]:
    """Seconds of each step's message between neighbouring stages."""
    seconds: list[float] = np.max([message_durations(cost, t) for t in tables], axis=0).tolist()
    return seconds
