"""Block tables: which computed rows a rank caches, in what segments, until when."""

import numpy as np

from psrl.core.plan.tables import Blocks
from psrl.core.samples.sample import IntArray
from psrl.planner.placement.placement import Placement, RankSegments


def dynamic_blocks(
    is_update: bool, rank: int, segments: RankSegments, order: IntArray, parent_segment: IntArray
) -> Blocks:
    """One block per run of rows with one lifetime that a later micro-batch reads."""
    owner = segments.micro_batch[order]
    last_reader = owner.tolist()
    parents = parent_segment.tolist()
    for place in range(len(parents) - 1, -1, -1):
        above = parents[place]
        if above >= 0:
            last_reader[above] = max(last_reader[above], last_reader[place])
    release = np.full(len(order), -1)
    read = np.array(last_reader, np.int64) > owner
    release[order] = np.where(read, owner if is_update else last_reader, -1)
    row = _first_rows(segments)
    begins = np.append(True, np.diff(segments.micro_batch) != 0) if len(release) else release > 0
    begins[1:] |= release[1:] != release[:-1]
    first = np.flatnonzero(begins & (release >= 0))
    ends = np.append(np.flatnonzero(begins), len(release))
    tokens_before = np.concatenate([[0], np.cumsum(segments.num_tokens)])
    num_tokens = tokens_before[ends[np.searchsorted(ends, first, "right")]] - tokens_before[first]
    return Blocks(
        rank=np.full(len(first), rank),
        block=np.arange(len(first)),
        micro_batch=segments.micro_batch[first],
        start_row=row[first],
        num_tokens=num_tokens,
        allocated_tokens=num_tokens,
        release_op=np.full(len(first), "backward" if is_update else "forward"),
        release_micro_batch=release[first],
    )


def all_blocks(placement: Placement, rank: int, segments: RankSegments) -> Blocks:
    """One block per chain of rows, in whole granules, kept to the end of the program."""
    parent = placement.tree.parent
    node, end_depth = segments.node, segments.start_depth + segments.num_tokens
    begins = np.full(len(node), True)
    begins[1:] = (
        (np.diff(segments.micro_batch) != 0)
        | (segments.start_depth[1:] != end_depth[:-1])
        | ((node[1:] != node[:-1]) & (parent[node[1:]] != node[:-1]))
    )
    first = np.flatnonzero(begins)
    tokens_before = np.concatenate([[0], np.cumsum(segments.num_tokens)])
    num_tokens = np.diff(tokens_before[np.append(first, len(node))])
    granule = placement.granularity_tokens
    return Blocks(
        rank=np.full(len(first), rank),
        block=np.arange(len(first)),
        micro_batch=segments.micro_batch[first],
        start_row=_first_rows(segments)[first],
        num_tokens=num_tokens,
        allocated_tokens=-(-num_tokens // granule) * granule,
        release_op=np.full(len(first), "end"),
        release_micro_batch=np.full(len(first), -1),
    )


def _first_rows(segments: RankSegments) -> IntArray:
    """Row of each segment's first token inside its micro-batch."""
    before = np.cumsum(segments.num_tokens) - segments.num_tokens
    first = np.searchsorted(segments.micro_batch, segments.micro_batch)
    return before - before[first]
