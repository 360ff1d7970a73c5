"""The checks of `check_plan` on the tables themselves: tokens, sizes, order of rows, blocks."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from psrl.core.cost.cluster import RecomputeMode
from psrl.core.errors import PlanError
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.loss_rows import LossRows
from psrl.core.tree.rank_nodes import nodes_of_ranks

from .check_reads import ProgramByRank
from .packing import visible_pairs

ACTIVATIONS = ("keep", "recompute", "drop")


def check_coverage(ranked: ProgramByRank) -> None:
    """Rule 2: each rank computes each token of its samples' paths once, and nothing else."""
    tree, table = ranked.tree, ranked.segments
    bad = (table.node < 1) | (table.node >= tree.num_nodes) | (table.num_tokens < 1)
    _refuse(
        ranked,
        2,
        table.rank,
        bad,
        lambda row: (
            f"a segment has {int(table.num_tokens[row])} tokens of node {int(table.node[row])}; "
            f"the tree's nodes are 1..{tree.num_nodes - 1}"
        ),
    )
    ranks, nodes = nodes_of_ranks(tree, ranked.program.assignments.rank)
    rank, node = table.rank[ranked.by_token], table.node[ranked.by_token]
    start = table.start_depth[ranked.by_token]
    end = start + table.num_tokens[ranked.by_token]
    opens = np.full(len(rank), True)
    opens[1:] = (rank[1:] != rank[:-1]) | (node[1:] != node[:-1])
    closes = np.append(opens[1:], True)[: len(opens)]
    wrong = opens & (start != tree.start_depth[node])
    wrong |= closes & (end != tree.end_depth[node])
    wrong[1:] |= ~opens[1:] & (start[1:] != end[:-1])
    computed = rank[opens] * tree.num_nodes + node[opens]
    different = np.setxor1d(computed, ranks * tree.num_nodes + nodes) // tree.num_nodes
    refuted = np.concatenate([rank[wrong], different])
    if len(refuted):
        worst = int(refuted.min())
        mine, needed = rank == worst, nodes[ranks == worst]
        raise PlanError(
            f"rule 2: {ranked.where(worst)}: segments cover {int((end - start)[mine].sum())} "
            f"tokens of {len(np.unique(node[mine]))} nodes; its samples need "
            f"{int(tree.num_tokens[needed].sum())} tokens of {len(needed)} nodes, each once"
        )


def check_order(ranked: ProgramByRank) -> None:
    """Rule 3: micro-batches are numbered and hold their segments in depth-first pre-order."""
    segments, table = ranked.segments, ranked.micro_batches
    later = np.full(len(segments), True)
    for column in (segments.start_depth, segments.node, segments.micro_batch, segments.rank):
        later[1:] = (column[1:] > column[:-1]) | ((column[1:] == column[:-1]) & later[1:])
    _refuse(
        ranked,
        3,
        segments.rank,
        ~later,
        lambda row: (
            "segments are not in depth-first pre-order: micro-batch "
            f"{int(segments.micro_batch[row])}, node {int(segments.node[row])}, depth "
            f"{int(segments.start_depth[row])} follows micro-batch "
            f"{int(segments.micro_batch[row - 1])}, node {int(segments.node[row - 1])}, depth "
            f"{int(segments.start_depth[row - 1])}"
        ),
    )
    numbers = np.arange(len(table)) - ranked.first_micro_batch[table.rank]
    _refuse(
        ranked,
        3,
        table.rank,
        table.micro_batch != numbers,
        lambda row: (
            "micro-batches are not numbered 0, 1, ... in order: number "
            f"{int(table.micro_batch[row])} stands in place {int(numbers[row])}"
        ),
    )
    _refuse(
        ranked,
        3,
        segments.rank,
        ~ranked.is_known(segments.rank, segments.micro_batch),
        lambda row: (
            f"a segment of node {int(segments.node[row])} is in micro-batch "
            f"{int(segments.micro_batch[row])}, the rank has "
            f"{int(ranked.num_micro_batches[segments.rank[row]])}"
        ),
    )


def check_activations(ranked: ProgramByRank, recompute: RecomputeMode) -> None:
    """Rule 3: what micro-batches keep for their backward; only an update drops it."""
    table, allowed = ranked.micro_batches, list(ACTIVATIONS)
    if not ranked.program.is_update:
        allowed.remove("drop")
    if recompute == "full":
        allowed.remove("keep")
    _refuse(
        ranked,
        3,
        table.rank,
        ~np.isin(table.activation, allowed),
        lambda row: (
            f"micro-batch {int(table.micro_batch[row])} has activation "
            f"{str(table.activation[row])!r}, not one of {', '.join(allowed)}"
        ),
    )


def _refuse(
    ranked: ProgramByRank,
    rule: int,
    rank: IntArray,
    bad: npt.NDArray[np.bool_],
    what: Callable[[int], str],
) -> None:
    """Raise for the first bad row of a table; `rank` is the table's column."""
    rows = np.flatnonzero(bad)
    if len(rows):
        row = int(rows[0])
        raise PlanError(f"rule {rule}: {ranked.where(int(rank[row]))}: {what(row)}")


def check_block_table(ranked: ProgramByRank) -> None:
    """Rule 6, what it takes for granted: numbers are dense, rows exist and are cached once."""
    blocks = ranked.blocks
    places = np.arange(len(blocks)) - np.searchsorted(blocks.rank, blocks.rank)
    _refuse(
        ranked,
        6,
        blocks.rank,
        blocks.block != places,
        lambda row: (
            f"blocks are not numbered 0, 1, ... in order: number {int(blocks.block[row])} stands "
            f"in place {int(places[row])}"
        ),
    )
    _refuse(
        ranked,
        6,
        blocks.rank,
        ~ranked.is_known(blocks.rank, blocks.micro_batch),
        lambda row: (
            f"block {int(blocks.block[row])} belongs to micro-batch "
            f"{int(blocks.micro_batch[row])}, the rank has "
            f"{int(ranked.num_micro_batches[blocks.rank[row]])}"
        ),
    )
    owner = ranked.first_micro_batch[blocks.rank] + blocks.micro_batch
    size, unit = ranked.micro_batches.num_tokens[owner], ranked.program.block_tokens
    start, end = blocks.start_row, blocks.start_row + blocks.num_tokens
    bad = (start < 0) | (start >= size) | (blocks.num_tokens < 1) | (blocks.num_tokens > size)
    bad |= (end > size) | (blocks.allocated_tokens != -(-blocks.num_tokens // unit) * unit)
    _refuse(
        ranked,
        6,
        blocks.rank,
        bad,
        lambda row: (
            f"block {int(blocks.block[row])} holds rows [{int(start[row])}, {int(end[row])}) of "
            f"the {int(size[row])} of its micro-batch in {int(blocks.allocated_tokens[row])} "
            f"allocated tokens; blocks are allocated in units of {unit}"
        ),
    )
    order = np.lexsort((start, owner))
    overlaps = np.full(len(order), False)
    same = np.diff(owner[order]) == 0
    overlaps[order[1:]] = same & (start[order][1:] < end[order][:-1])
    _refuse(
        ranked,
        6,
        blocks.rank,
        overlaps,
        lambda row: (
            f"block {int(blocks.block[row])} and another one hold row {int(start[row])} of "
            f"micro-batch {int(blocks.micro_batch[row])}"
        ),
    )
    _check_release(ranked)


def _check_release(ranked: ProgramByRank) -> None:
    blocks = ranked.blocks
    at_end = blocks.release_op == "end"
    ops = ["forward", "backward"] if ranked.program.is_update else ["forward"]
    is_op = np.isin(blocks.release_op, ops)
    is_op &= ranked.is_known(blocks.rank, blocks.release_micro_batch)
    _refuse(
        ranked,
        6,
        blocks.rank,
        ~(is_op | (at_end & (blocks.release_micro_batch == -1))),
        lambda row: (
            f"block {int(blocks.block[row])} is released by {str(blocks.release_op[row])!r} of "
            f"micro-batch {int(blocks.release_micro_batch[row])}: not {' or '.join(ops)} of one "
            f"of the rank's {int(ranked.num_micro_batches[blocks.rank[row]])}, nor end of -1"
        ),
    )


def check_sizes(ranked: ProgramByRank) -> None:
    """Rule 3: micro-batches have the stated tokens and visible pairs."""
    segments, table = ranked.segments, ranked.micro_batches
    tokens, pairs = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    np.add.at(tokens, ranked.segment_micro_batch, segments.num_tokens)
    seen = visible_pairs(segments.start_depth, segments.num_tokens)
    np.add.at(pairs, ranked.segment_micro_batch, seen)
    _refuse(
        ranked,
        3,
        table.rank,
        (tokens != table.num_tokens) | (pairs != table.pairs),
        lambda row: (
            f"micro-batch {int(table.micro_batch[row])} has {int(tokens[row])} tokens and "
            f"{int(pairs[row])} pairs, the table says {int(table.num_tokens[row])} and "
            f"{int(table.pairs[row])}"
        ),
    )


def check_head_tokens(ranked: ProgramByRank, rows: LossRows, samples: SampleBatch) -> None:
    """Rule 8: the table states the distinct positions whose logits are computed."""
    tree, segments, table = ranked.tree, ranked.segments, ranked.micro_batches
    predicting = rows.by_rank(ranked.program.assignments.rank, tree)
    start = tree.token_start[segments.node] + segments.start_depth - tree.start_depth[segments.node]
    count = predicting.count(segments.rank, start, start + segments.num_tokens)
    found = np.zeros(len(table), np.int64)
    np.add.at(found, ranked.segment_micro_batch, count)
    _refuse(
        ranked,
        8,
        table.rank,
        found != table.head_tokens,
        lambda row: (
            f"micro-batch {int(table.micro_batch[row])} predicts from {int(found[row])} positions, "
            f"the table says {int(table.head_tokens[row])} head_tokens"
        ),
    )
    num_edges = rows.num_edges(np.full(samples.num_samples, True))
    if num_edges != samples.loss_tokens:
        raise PlanError(
            f"rule 8: program {ranked.index} owns {num_edges} loss edges for "
            f"{samples.loss_tokens} trained tokens"
        )
