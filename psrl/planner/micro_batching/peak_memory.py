"""Peak bytes of a rank's program, as `MemoryLedger` counts them, over whole arrays.

The planner asks for the peak of many candidates; the plan's check replays the ledger.
"""

import numpy as np

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.memory_ledger import HEAD_CHUNK_TOKENS
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import Op, stage_ops
from psrl.core.plan.tables import Blocks
from psrl.core.samples.sample import IntArray
from psrl.core.tree.prefix_tree import PrefixTree
from psrl.planner.placement.placement import RankSegments, segment_tree


def peak_bytes(program: Program, tree: PrefixTree, memory: MemoryModel) -> int:
    """Most bytes on a device of one rank; the first stage holds most, the last has logits.

    Args:
        program: one rank's program.
        tree: the tree of the program of all ranks.
    """
    ops = program.ops()
    if not ops:
        return memory.static_bytes
    num_stages = memory.parallel.pipeline_model_parallel_size
    peaks = []
    for stage in {0, num_stages - 1}:
        is_last = stage == num_stages - 1
        on_stage = stage_ops(ops, num_stages, stage)
        activations = _activation_bytes(program, on_stage, memory, is_last)
        peaks.append(int((activations + cache_bytes(program, tree, on_stage, memory)).max()))
    return memory.static_bytes + max(peaks)


def _activation_bytes(
    program: Program, ops: list[Op], memory: MemoryModel, is_last_stage: bool
) -> IntArray:
    """[number of ops] held activations, one layer's working set and logits during each op."""
    table = program.micro_batches
    tokens, head_tokens = table.num_tokens.tolist(), table.head_tokens.tolist()
    activation = table.activation.tolist()
    layer = [t * memory.activation_bytes_per_token // memory.layers_per_stage for t in tokens]

    def held(kind: str, m: int) -> int:
        return memory.held_bytes(kind, tokens[m], head_tokens[m], is_last_stage)

    during, now = [], 0
    for kind, m in ops:
        freed, working = 0, 0
        if kind == "forward":
            now += held(activation[m], m) if program.is_update else 0
            working = layer[m] if not program.is_update or activation[m] != "keep" else 0
        elif kind == "recompute":
            now += held("keep", m) - held("drop", m)
        else:
            freed = held("keep" if activation[m] == "drop" else activation[m], m)
            working = layer[m] if activation[m] == "recompute" else 0
        logits = min(head_tokens[m], HEAD_CHUNK_TOKENS) * memory.logits_bytes_per_token
        during.append(now + working + (logits if is_last_stage else 0))
        now -= freed
    return np.array(during, np.int64)


def cache_bytes(program: Program, tree: PrefixTree, ops: list[Op], memory: MemoryModel) -> IntArray:
    """[number of ops] cached keys and values, and their gradients, during each op."""
    blocks, count = program.blocks, len(program.micro_batches)
    if not len(blocks):
        return np.zeros(len(ops), np.int64)
    at = {kind: np.full(count, len(ops), np.int64) for kind in ("forward", "recompute", "backward")}
    for i, (kind, m) in enumerate(ops):
        at[kind][m] = i
    released = np.full(len(blocks), len(ops))
    for kind in ("forward", "backward"):
        dies = blocks.release_op == kind
        released[dies] = at[kind][blocks.release_micro_batch[dies]] + 1
    live = _live(at["forward"][blocks.micro_batch], released, blocks.allocated_tokens, len(ops))
    total = live * memory.kv_bytes_per_token
    if program.is_update:
        first = _first_reader(program, tree, at["backward"], blocks)
        read = first < at["backward"][blocks.micro_batch]
        gradient = _live(first[read], released[read], blocks.allocated_tokens[read], len(ops))
        total += gradient * memory.kv_gradient_bytes_per_token
    return total


def _live(start: IntArray, end: IntArray, num_tokens: IntArray, num_ops: int) -> IntArray:
    """[number of ops] tokens of the blocks that are live in ops `[start, end)`."""
    change = np.zeros(num_ops + 1, np.int64)
    np.add.at(change, start, num_tokens)
    np.subtract.at(change, end, num_tokens)
    return np.cumsum(change)[:-1]


def _first_reader(
    program: Program, tree: PrefixTree, backward_at: IntArray, blocks: Blocks
) -> IntArray:
    """[number of blocks] first backward of a micro-batch that reads the block.

    The owner's own backward, which comes last, where nobody does.
    """
    table = program.segments
    segments = RankSegments(table.micro_batch, table.node, table.start_depth, table.num_tokens)
    order, parent = segment_tree(tree, segments)
    first = backward_at[segments.micro_batch[order]].tolist()
    parents = parent.tolist()
    for place in range(len(first) - 1, -1, -1):
        above = parents[place]
        if above >= 0 and first[place] < first[above]:
            first[above] = first[place]
    of_segment = np.empty(len(order), np.int64)
    of_segment[order] = first
    tokens_before = np.concatenate([[0], np.cumsum(segments.num_tokens)]).astype(np.int64)
    first_segment = np.searchsorted(segments.micro_batch, blocks.micro_batch)
    row = tokens_before[first_segment] + blocks.start_row
    low = np.searchsorted(tokens_before, row, side="right") - 1
    high = np.searchsorted(tokens_before, row + blocks.num_tokens, side="left")
    # Ranges of segments of different blocks do not overlap, but there may be gaps between them.
    by_start = np.argsort(low, kind="stable")
    edges = np.stack([low[by_start], high[by_start]], axis=1).ravel()
    found = np.empty(len(blocks), np.int64)
    found[by_start] = np.minimum.reduceat(np.append(of_segment, 0), edges)[::2]
    return found
