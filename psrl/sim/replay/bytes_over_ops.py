"""Bytes live on every stage at every op: `core.memory.MemoryLedger` for all ranks at once."""

from dataclasses import dataclass

import numpy as np

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import PlanError
from psrl.core.plan.memory_ledger import HEAD_CHUNK_TOKENS
from psrl.core.plan.op_table import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    OpTable,
    find_rows,
    op_codes,
    sorted_by_rank,
)
from psrl.core.plan.plan import Program
from psrl.core.samples.sample import IntArray
from psrl.core.tree.prefix_tree import PrefixTree


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
        tree: its tree; None for a program without backwards.

    Raises:
        PlanError: if a block is released by an unknown op.
    """
    order, rank = sorted_by_rank(program.blocks)
    blocks = program.blocks.rows(order)
    release_kind = op_codes(blocks.release_op)
    unknown = blocks.release_op[(release_kind < 0) & (blocks.release_op != "end")]
    if len(unknown):
        raise PlanError(f"{len(unknown)} blocks are released by {str(unknown[0])!r}, no op")
    first_reader = np.full(len(order), -1, np.int64)
    if tree is not None and len(order):
        first_reader = _first_readers(program, order, ops, tree)
    return BlockTable(
        rank=rank,
        owner=find_rows(program, rank, blocks.micro_batch),
        release_kind=release_kind,
        release_row=np.where(
            release_kind < 0, -1, find_rows(program, rank, blocks.release_micro_batch)
        ),
        first_reader=first_reader,
        allocated_tokens=blocks.allocated_tokens,
    )


def _first_readers(
    program: Program, block_order: IntArray, ops: OpTable, tree: PrefixTree
) -> IntArray:
    """Per block the micro-batch row that reads it and runs its backward first; -1 for none.

    A segment is read by the micro-batches of all segments below it in the rank's tree. Their
    backwards precede its own, so the first backward below is a reader's unless it is its own.
    """
    order, rank = sorted_by_rank(program.segments)
    segments = program.segments.rows(order)
    row = find_rows(program, rank, segments.micro_batch)
    is_backward = ops.kind == BACKWARD
    backward_at = np.full(len(program.micro_batches), len(ops.kind), np.int64)
    backward_at[ops.row[is_backward]] = np.flatnonzero(is_backward)
    own = backward_at[row]
    below = _smallest_below(segments.node, segments.start_depth, rank, tree, own)
    below = np.where(below < own, below, len(ops.kind))
    # Pieces in row order of the rank-sorted micro-batch table: a block is a range of them.
    by_row = np.argsort(row, kind="stable")
    ends = np.cumsum(segments.num_tokens[by_row])
    tokens_before = np.concatenate([[0], ends])
    first_piece = np.searchsorted(row[by_row], np.arange(len(program.micro_batches)))
    blocks = program.blocks.rows(block_order)
    owner = find_rows(program, blocks.rank, blocks.micro_batch)
    start = tokens_before[first_piece[owner]] + blocks.start_row
    low = np.searchsorted(ends, start, side="right")
    high = np.searchsorted(tokens_before[:-1], start + blocks.num_tokens, side="left")
    padded = np.append(below[by_row], len(ops.kind))
    first = np.minimum.reduceat(padded, np.stack([low, high], axis=1).ravel())[::2]
    row_of_op = np.append(ops.row, -1)
    found: IntArray = row_of_op[first]
    return found


def _smallest_below(
    node: IntArray, start_depth: IntArray, rank: IntArray, tree: PrefixTree, value: IntArray
) -> IntArray:
    """Smallest value of the segments strictly below each one in the tree of its rank."""
    by_preorder = np.lexsort((start_depth, node, rank))
    v, r = node[by_preorder], rank[by_preorder]
    key = r * tree.num_nodes + v
    opens = np.append(True, key[1:] != key[:-1])
    above = tree.parent[v]
    last_of_parent = np.searchsorted(key, r * tree.num_nodes + above, side="right") - 1
    parent = np.where(opens, np.where(above > 0, last_of_parent, -1), np.arange(len(v)) - 1)
    most = int(value.max(initial=0)) + 1
    own, smallest = value[by_preorder].tolist(), [most] * len(v)
    for place, up in zip(range(len(v) - 1, -1, -1), reversed(parent.tolist()), strict=True):
        if up >= 0:
            smallest[up] = min(smallest[up], smallest[place], own[place])
    below = np.empty(len(v), np.int64)
    below[by_preorder] = smallest
    return below


def stage_bytes(
    program: Program,
    memory: MemoryModel,
    ops: OpTable,
    blocks: BlockTable,
    order: IntArray,
    is_last_stage: bool,
) -> IntArray:
    """[n, 5] `MemoryState` of every op of a stage, in the stage's order.

    Raises:
        PlanError: if a block is never released, or used while it is not alive.
    """
    rows, _ = sorted_by_rank(program.micro_batches)
    table = program.micro_batches.rows(rows)
    kind, row = ops.kind[order], ops.row[order]
    mode = table.activation[row]
    tokens, head_tokens = table.num_tokens[row], table.head_tokens[row]
    held = {
        name: tokens * memory.held_bytes(name, 1, 0, is_last_stage)
        + head_tokens * memory.held_bytes(name, 0, 1, is_last_stage)
        for name in ("keep", "recompute", "drop")
    }
    first = np.select([mode == name for name in held], list(held.values()), 0)
    last = np.where(mode == "drop", held["keep"], first)
    begins = np.where(kind == FORWARD, first if program.is_update else 0, 0)
    begins += np.where(kind == RECOMPUTE, last - first, 0)
    ends = np.where(kind == BACKWARD, last, 0)
    one_layer = tokens * memory.activation_bytes_per_token // memory.layers_per_stage
    runs_through = (kind == FORWARD) & ((mode != "keep") | (not program.is_update))
    runs_through |= (kind == BACKWARD) & (mode == "recompute")
    logits = np.minimum(head_tokens, HEAD_CHUNK_TOKENS) * memory.logits_bytes_per_token
    live, gradient = _live_tokens(ops, blocks, order, len(table))
    return np.stack(
        [
            np.full(len(order), memory.static_bytes),
            _running(begins, ends, ops) + one_layer * runs_through,
            logits * is_last_stage,
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
