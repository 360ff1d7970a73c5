"""From micro-batches of tree segments to a rank's complete tables, with predicted time and memory.

All policies meet here: sizes, op order, cached blocks and times follow from the segments by the
same rules.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from psrl.core.cost.cost_model import CostModel
from psrl.core.plan.bytes_over_ops import peak_bytes
from psrl.core.plan.micro_batch_time import micro_batch_times
from psrl.core.plan.packing import visible_pairs
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import (
    Op,
    OpKind,
    eager_backward_order,
    fill_counts,
    interleave,
    pipeline_timing,
    stage_ops,
)
from psrl.core.plan.tables import Assignments, Blocks, MicroBatches, Schedule, Segments
from psrl.core.samples.sample import FloatArray, IntArray, StrArray
from psrl.core.tree.segment_tree import segment_tree
from psrl.planner.placement.placement import Placement, RankSegments

from .blocks import all_blocks, dynamic_blocks

Caching = Literal["dynamic", "everything"]


@dataclass(frozen=True, eq=False)
class BuiltRank:
    """One rank's tables.

    Attributes:
        time_s: predicted time of one phase, from the first forward to the last op.
    """

    placement: Placement
    program: Program
    time_s: float

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


def build_rank(
    placement: Placement,
    rank: int,
    segments: RankSegments,
    caching: Caching = "dynamic",
    activation: StrArray | None = None,
    held_factor: float = 1.0,
) -> BuiltRank:
    """Complete one rank's tables.

    Args:
        segments: in order of (micro_batch, node, start_depth), micro-batches numbered from 0.
        caching: "dynamic" caches what a later micro-batch reads, in runs of one lifetime, until
            the last use; "everything" caches all rows in whole blocks to the program's end.
        activation: per micro-batch; default what the set-up says.
        held_factor: tokens between forward and backward that the last stage may hold, as a
            multiple of what the backward order forces; more keeps a pipeline fuller.
    """
    subproblem, tree = placement.subproblem, placement.tree
    count = int(segments.micro_batch.max()) + 1 if len(segments.micro_batch) else 0
    if activation is None:
        activation = np.full(count, placement.problem.base_activation)
    order, parent_segment = segment_tree(tree, segments.node, segments.start_depth)
    table = _micro_batches(placement, rank, segments, activation)
    reads = cached_reads(segments, order, parent_segment)
    ops = order_ops(subproblem.is_update, table.num_tokens, table.activation, reads, held_factor)
    if caching == "dynamic":
        blocks = dynamic_blocks(subproblem.is_update, rank, segments, order, parent_segment)
    else:
        blocks = all_blocks(placement, rank, segments)
    chosen = placement.samples_of(rank)
    program = Program(
        phases=subproblem.phases,
        is_update=subproblem.is_update,
        mini_batch=subproblem.mini_batch,
        granularity_tokens=placement.granularity_tokens,
        assignments=Assignments(
            np.full(len(chosen), rank), subproblem.members[chosen], placement.share_key[chosen]
        ),
        segments=Segments(np.full(len(segments.node), rank), *segments),
        micro_batches=table,
        schedule=Schedule(
            np.full(len(ops), rank),
            np.array([op.kind for op in ops], np.str_),
            np.array([op.micro_batch for op in ops], np.int64),
        ),
        blocks=blocks,
        block_tokens=placement.granularity_tokens if caching == "everything" else 1,
    )
    cost = placement.problem.cost_model
    durations = stage_durations(cost, table, placement.problem.num_stages)
    time_s = phase_time_s(ops, durations, message_durations(cost, table))
    return BuiltRank(placement, program, time_s)


def _micro_batches(
    placement: Placement, rank: int, segments: RankSegments, activation: StrArray
) -> MicroBatches:
    tree, cost, count = placement.tree, placement.problem.cost_model, len(activation)
    start = tree.token_start[segments.node] + segments.start_depth - tree.start_depth[segments.node]
    num_tokens, pairs, head_tokens = (np.zeros(count, np.int64) for _ in range(3))
    np.add.at(num_tokens, segments.micro_batch, segments.num_tokens)
    np.add.at(pairs, segments.micro_batch, visible_pairs(segments.start_depth, segments.num_tokens))
    rows = placement.rank_rows.count(rank, start, start + segments.num_tokens)
    np.add.at(head_tokens, segments.micro_batch, rows)
    forward_s, backward_s = micro_batch_times(cost, num_tokens, pairs, head_tokens, activation)
    return MicroBatches(
        rank=np.full(count, rank),
        micro_batch=np.arange(count),
        activation=activation,
        num_tokens=num_tokens,
        pairs=pairs,
        head_tokens=head_tokens,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def cached_reads(segments: RankSegments, order: IntArray, parent_segment: IntArray) -> IntArray:
    """[2, E] pairs of a micro-batch and one that reads what it caches.

    Direct readers suffice: a backward that waits for its children waits for all below.
    """
    owner = segments.micro_batch[order]
    child = np.flatnonzero(parent_segment >= 0)
    pairs = np.unique(np.stack([owner[parent_segment[child]], owner[child]]), axis=1)
    return pairs[:, pairs[0] != pairs[1]]


def order_ops(
    is_update: bool, num_tokens: IntArray, activation: StrArray, reads: IntArray, held_factor: float
) -> list[Op]:
    """Ops of the last stage: forwards by number, backwards as early as their readers allow.

    Args:
        num_tokens, activation: [M] of each micro-batch.
        reads: see `cached_reads`; of all ranks that run in step.
    """
    forward_order = list(range(len(num_tokens)))
    if not is_update:
        return [Op("forward", m) for m in forward_order]
    readers: list[set[int]] = [set() for _ in forward_order]
    for read, reader in reads.T.tolist():
        readers[read].add(reader)
    backward_order = eager_backward_order(forward_order, readers)
    sizes = num_tokens.tolist()
    counts = fill_counts(forward_order, backward_order, sizes.__getitem__)
    if held_factor > 1.0:
        budget = held_factor * _peak_held(backward_order, counts, sizes)
        counts = fill_counts(forward_order, backward_order, sizes.__getitem__, budget)
    dropped = frozenset(np.flatnonzero(activation == "drop").tolist())
    return interleave(forward_order, backward_order, counts, dropped)


def _peak_held(backward_order: list[int], counts: list[int], sizes: list[int]) -> int:
    """Most tokens between forward and backward, for forwards in number order."""
    forwarded = np.concatenate([[0], np.cumsum(sizes)])[counts]
    freed = np.cumsum([0, *(sizes[m] for m in backward_order)])[:-1]
    return int((forwarded - freed).max(initial=0))


def phase_time_s(
    ops: list[Op], durations: list[dict[OpKind, list[float]]], message_s: list[float]
) -> float:
    """Predicted time of one phase.

    Args:
        ops: of the last stage.
        durations: see `stage_durations`.
        message_s: see `message_durations`.
    """
    num_stages = len(durations)
    if num_stages == 1:
        return float(sum(durations[0][op.kind][op.micro_batch] for op in ops))
    timing = pipeline_timing(
        [stage_ops(ops, num_stages, stage) for stage in range(num_stages)],
        lambda stage, op: durations[stage][op.kind][op.micro_batch],
        message_s.__getitem__,
        send_window=1,
    )
    if timing is None:
        raise AssertionError("a schedule with non-decreasing counts cannot deadlock")
    return timing.makespan_s


def stage_durations(
    cost: CostModel, table: MicroBatches, num_stages: int
) -> list[dict[OpKind, list[float]]]:
    """Seconds of each micro-batch's ops, by stage and kind of op."""
    sizes = [a.astype(np.float64) for a in (table.num_tokens, table.pairs, table.head_tokens)]
    again = table.backward_s - cost.backward_s(*sizes)
    durations: list[dict[OpKind, list[float]]] = []
    for stage in range(num_stages):
        if 1 < stage < num_stages - 1:
            durations.append(durations[1])  # only the first and the last stage differ
            continue
        forward: FloatArray = np.asarray(cost.stage_forward_s(stage, *sizes), np.float64)
        # A dropped micro-batch needs its head only when it runs again.
        first = np.where(
            table.activation == "drop",
            cost.stage_forward_s(stage, sizes[0], sizes[1], 0.0),
            forward,
        )
        backward: FloatArray = np.asarray(cost.stage_backward_s(stage, *sizes) + again)
        durations.append(
            {
                "forward": first.tolist(),
                "recompute": forward.tolist(),
                "backward": backward.tolist(),
            }
        )
    return durations


def message_durations(cost: CostModel, table: MicroBatches) -> list[float]:
    """Seconds of each micro-batch's message between neighbouring stages."""
    seconds: list[float] = np.asarray(
        cost.message_s(table.num_tokens.astype(np.float64)), np.float64
    ).tolist()
    return seconds


@dataclass(frozen=True, eq=False)
class BuiltProgram:
    """A program of all ranks, with what was predicted for each."""

    program: Program
    ranks: tuple[BuiltRank, ...]

    @property
    def time_s(self) -> float:
        """Predicted time of all phases of the program, without the optimizer step."""
        return len(self.program.phases) * max(r.time_s for r in self.ranks)

    @property
    def work_s(self) -> float:
        """Work of the most loaded rank, without fixed costs."""
        return max(r.work_s for r in self.ranks)

    @property
    def fits(self) -> bool:
        return all(r.fits for r in self.ranks)


def join_ranks(placement: Placement, ranks: list[BuiltRank]) -> BuiltProgram:
    """The program of all ranks; its assignments are in the order of the samples."""
    subproblem = placement.subproblem
    parts = [r.program for r in ranks]
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
    return BuiltProgram(program, tuple(ranks))
