"""Ranks that share experts meet in every layer: they run one op pattern, step by step.

A step lasts as long as its slowest member, so no group is faster than the work of its most loaded
rank. Ranks that are cut into equally many micro-batches of equal cost reach that.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from psrl.core.plan.plan import Program
from psrl.core.plan.tables import MicroBatches, Schedule
from psrl.core.samples.sample import IntArray
from psrl.core.tree.prefix_tree import PrefixTree
from psrl.core.tree.segment_tree import segment_tree
from psrl.planner.placement.placement import RankSegments

from .assemble import cached_reads, order_ops
from .built import BuiltRank, GroupProgram


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
    reads = np.concatenate([_reads(p.program, placement.tree) for p in programs], axis=1)
    num_tokens = np.max([t.num_tokens for t in tables], axis=0)
    ops = order_ops(
        placement.subproblem.is_update, num_tokens, longest.activation, reads, held_factor
    )
    ranks = []
    for rank, (made, table) in enumerate(zip(programs, tables, strict=True), first_rank):
        schedule = Schedule(
            np.full(len(ops), rank),
            np.array([op.kind for op in ops], np.str_),
            np.array([op.micro_batch for op in ops], np.int64),
        )
        program = replace(made.program, micro_batches=table, schedule=schedule)
        ranks.append(replace(made, program=program))
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
