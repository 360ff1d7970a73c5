"""Bytes on a device while a stage runs its ops: the one account that all parts share.

For all ranks of a program at once, or for one, over whole arrays: planners ask for many candidates.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import PlanError
from psrl.core.samples.sample import IntArray
from psrl.core.tree.prefix_tree import PrefixTree
from psrl.core.tree.segment_tree import segment_tree

from .op_table import (
    BACKWARD,
    FORWARD,
    OpTable,
    find_rows,
    op_codes,
    op_table,
    sorted_by_rank,
    stage_order,
)
from .plan import Program
from .tables import Blocks, MicroBatches

HEAD_CHUNK_TOKENS = 1024
"""Predicted positions whose logits exist at a time; the backend computes the head in chunks."""


class MemoryState(NamedTuple):
    """Bytes live on a device while an op runs."""

    static_bytes: int
    activation_bytes: int
    logits_bytes: int
    kv_bytes: int
    kv_gradient_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self)


class MicroBatchBytes(NamedTuple):
    """[M] bytes of each micro-batch on a stage.

    Attributes:
        keep, recompute, drop: what it holds between its forward and its backward, by activation.
        layer: working set of one layer, while layers run that keep nothing or run again.
        logits: of its largest chunk of predicted positions, and their gradient.
    """

    keep: IntArray
    recompute: IntArray
    drop: IntArray
    layer: IntArray
    logits: IntArray


def micro_batch_bytes(table: MicroBatches, memory: MemoryModel, stage: int) -> MicroBatchBytes:
    """What each micro-batch of a table adds to a stage, in whichever activation it runs."""
    tokens, head_tokens = table.num_tokens, table.head_tokens
    is_last = stage == memory.parallel.pipeline_model_parallel_size - 1
    in_chunk = np.minimum(head_tokens, HEAD_CHUNK_TOKENS) * is_last
    keep, recompute, drop = (
        memory.held_bytes(activation, tokens, head_tokens, stage)
        for activation in ("keep", "recompute", "drop")
    )
    return MicroBatchBytes(
        keep=keep,
        recompute=recompute,
        drop=drop,
        layer=tokens * memory.activation_bytes_per_token // memory.layers_per_stage,
        logits=in_chunk * memory.logits_bytes_per_token,
    )


@dataclass(frozen=True)
class BlockTable:
    """Cached blocks of all ranks, by rows of the rank-sorted micro-batch table.

    Attributes:
        rank: [B] owner's rank.
        owner: [B] row of the micro-batch whose forward fills the block.
        release_kind, release_row: [B] op that releases it; kind -1 keeps it to the end.
        first_reader: [B] row of the reader whose backward runs first; -1 if no backward reads it.
        allocated_tokens: [B]
    """

    rank: IntArray
    owner: IntArray
    release_kind: IntArray
    release_row: IntArray
    first_reader: IntArray
    allocated_tokens: IntArray


def block_table(program: Program, ops: OpTable, tree: PrefixTree | None) -> BlockTable:
    """The block table of a program.

    Args:
        ops: its op table.
        tree: its tree; None for a program without backwards, in which nobody reads gradients.

    Raises:
        PlanError: if a block is released by an unknown op.
    """
    order, rank = sorted_by_rank(program.blocks)
    blocks = program.blocks.rows(order)
    release_kind = op_codes(blocks.release_op)
    unknown = blocks.release_op[(release_kind < 0) & (blocks.release_op != "end")]
    if len(unknown):
        raise PlanError(f"{len(unknown)} blocks are released by {str(unknown[0])!r}, no op")
    owner = find_rows(program, rank, blocks.micro_batch)
    first_reader = np.full(len(order), -1, np.int64)
    if tree is not None and len(order):
        first_reader = _first_readers(program, blocks, owner, ops, tree)
    return BlockTable(
        rank=rank,
        owner=owner,
        release_kind=release_kind,
        release_row=np.where(
            release_kind < 0, -1, find_rows(program, rank, blocks.release_micro_batch)
        ),
        first_reader=first_reader,
        allocated_tokens=blocks.allocated_tokens,
    )


def _first_readers(
    program: Program, blocks: Blocks, owner: IntArray, ops: OpTable, tree: PrefixTree
) -> IntArray:
    """Per block the micro-batch row that reads it and runs its backward first; -1 for none.

    A segment is read by the micro-batches of all segments below it in the rank's tree. Their
    backwards precede its own, so the first backward below is a reader's unless it is its own.
    """
    order, rank = sorted_by_rank(program.segments)
    segments = program.segments.rows(order)
    row = find_rows(program, rank, segments.micro_batch)
    never = len(ops.kind)
    backward_at = np.full(len(program.micro_batches), never, np.int64)
    is_backward = ops.kind == BACKWARD
    backward_at[ops.row[is_backward]] = np.flatnonzero(is_backward)
    own = backward_at[row]
    below = _smallest_below(tree, rank, segments.node, segments.start_depth, own)
    below = np.where(below < own, below, never)
    # Segments in row order of the rank-sorted micro-batch table: a block is a range of them.
    by_row = np.argsort(row, kind="stable")
    ends = np.cumsum(segments.num_tokens[by_row])
    tokens_before = np.concatenate([[0], ends])
    first_segment = np.searchsorted(row[by_row], owner)
    start = tokens_before[first_segment] + blocks.start_row
    low = np.searchsorted(ends, start, side="right")
    high = np.searchsorted(tokens_before[:-1], start + blocks.num_tokens, side="left")
    padded = np.append(below[by_row], never)
    first = np.minimum.reduceat(padded, np.stack([low, high], axis=1).ravel())[::2]
    found: IntArray = np.append(ops.row, -1)[first]
    return found


def _smallest_below(
    tree: PrefixTree, rank: IntArray, node: IntArray, start_depth: IntArray, value: IntArray
) -> IntArray:
    """Smallest value of the segments strictly below each one in the tree of its rank."""
    order, parent = segment_tree(tree, node, start_depth, rank)
    most = int(value.max(initial=0)) + 1
    own, smallest = value[order].tolist(), [most] * len(order)
    for place, above in zip(range(len(order) - 1, -1, -1), reversed(parent.tolist()), strict=True):
        if above >= 0:
            smallest[above] = min(smallest[above], smallest[place], own[place])
    below = np.empty(len(order), np.int64)
    below[order] = smallest
    return below


def stage_bytes(
    program: Program,
    memory: MemoryModel,
    ops: OpTable,
    blocks: BlockTable,
    order: IntArray,
    stage: int,
) -> IntArray:
    """[n, 5] `MemoryState` of every op of a stage, in the stage's order.

    Args:
        order: see `stage_order`.

    Raises:
        PlanError: if a block is never released, or used while it is not alive.
    """
    table = program.micro_batches.rows(sorted_by_rank(program.micro_batches)[0])
    sizes = micro_batch_bytes(table, memory, stage)
    repeats, drops = (table.activation == kind for kind in ("recompute", "drop"))
    first = np.where(drops, sizes.drop, np.where(repeats, sizes.recompute, sizes.keep))
    last = np.where(drops, sizes.keep, first)
    nothing = np.zeros_like(first)
    # By kind of op: what a micro-batch holds from then on, what it frees, what comes and goes.
    begins = np.stack([first, nothing, last - first])
    works = np.stack([sizes.layer * (drops | repeats), sizes.layer * repeats, nothing])
    if not program.is_update:
        begins[FORWARD], works[FORWARD] = 0, sizes.layer
    ends = np.stack([nothing, last, nothing])
    which = ops.kind[order], ops.row[order]
    live, gradient = _live_tokens(ops, blocks, order, len(table))
    return np.stack(
        [
            np.full(len(order), memory.static_bytes_on(stage, program.is_update)),
            _running(begins[which], ends[which], ops) + works[which],
            sizes.logits[which[1]],
            live * memory.kv_bytes_per_token,
            gradient * memory.kv_gradient_bytes_per_token,
        ],
        axis=1,
    )


def _live_tokens(
    ops: OpTable, blocks: BlockTable, order: IntArray, num_rows: int
) -> tuple[IntArray, IntArray]:
    """[n] cached tokens, and tokens with gradient accumulators, while each op runs."""
    count = len(order)
    place = np.full((3, num_rows), -1, np.int64)
    place[ops.kind[order], ops.row[order]] = np.arange(count)
    begin, stays = place[FORWARD, blocks.owner], blocks.release_kind < 0
    release = np.where(stays, count, place[blocks.release_kind, blocks.release_row])
    read = np.where(blocks.first_reader < 0, release, place[BACKWARD, blocks.first_reader])
    never = (release < 0) | (begin < 0) | (blocks.owner < 0) | (~stays & (blocks.release_row < 0))
    if never.any():
        raise PlanError(
            f"{int(never.sum())} blocks ({int(blocks.allocated_tokens[never].sum())} tokens) are "
            "never released"
        )
    dead = (release < begin) | (read < begin) | (read > release)
    if dead.any():
        raise PlanError(
            f"rank {int(blocks.rank[dead][0])}: a block is read or released while it is not alive",
            "check_plan says which rule the plan breaks",
        )
    size, with_gradient = blocks.allocated_tokens, blocks.first_reader >= 0
    begins, touches, ends, drops = (np.zeros(count + 1, np.int64) for _ in range(4))
    np.add.at(begins, begin, size)
    np.add.at(ends, release, size)
    np.add.at(touches, read[with_gradient], size[with_gradient])
    np.add.at(drops, release[with_gradient], size[with_gradient])
    return (
        _running(begins[:-1], ends[:-1], ops),
        _running(touches[:-1], drops[:-1], ops),
    )


def _running(begins: IntArray, ends: IntArray, ops: OpTable) -> IntArray:
    """What is live while each op runs: begun by it or before, not ended before it, on its rank."""
    level = np.cumsum(begins) - np.cumsum(ends) + ends
    at_start = np.concatenate([[0], np.cumsum(begins - ends)])[ops.first_op]
    running: IntArray = level - at_start[ops.rank]
    return running


def fullest_stages(num_stages: int) -> list[int]:
    """Stages of which one has the peak: most forwards ahead, behind the first too, and the head."""
    return sorted({0, min(1, num_stages - 1), num_stages - 1})


def peak_bytes(program: Program, tree: PrefixTree, memory: MemoryModel) -> int:
    """Most bytes on a device of a rank.

    Args:
        program: one rank's program.
        tree: the tree of the program of all ranks.
    """
    num_stages = memory.parallel.pipeline_model_parallel_size
    ops = op_table(program)
    blocks = block_table(program, ops, tree if program.is_update else None)
    peak = 0
    for stage in fullest_stages(num_stages):
        order = stage_order(ops, program.is_update, num_stages, stage)
        states = stage_bytes(program, memory, ops, blocks, order, stage)
        at_rest = memory.static_bytes_on(stage, program.is_update)
        peak = max(peak, int(states.sum(axis=1).max(initial=at_rest)))
    return peak
