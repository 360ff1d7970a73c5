"""From micro-batches of tree segments to a rank's complete tables.

All policies meet here: sizes, op order and cached blocks follow from the segments by the same
rules.
"""

from typing import Literal

import numpy as np

from psrl.core.plan.micro_batch_time import micro_batch_times
from psrl.core.plan.packing import visible_pairs
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import Op, eager_backward_order, fill_counts, interleave
from psrl.core.plan.tables import Assignments, MicroBatches, Schedule, Segments
from psrl.core.samples.sample import IntArray, StrArray
from psrl.core.tree.segment_tree import segment_tree
from psrl.planner.placement.placement import Placement, RankSegments

from .blocks import all_blocks, dynamic_blocks
from .built import BuiltRank

Caching = Literal["dynamic", "everything"]


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
    return BuiltRank(placement, program)


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
