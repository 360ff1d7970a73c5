"""Which queries see each key row of a packed tree: the visibility rule, on whole arrays.

A key row is visible to queries `[query_start, query_end)`. `visibility_rule` states the same row
by row; here the rows come in runs with the same readers, and no Python loop runs over tokens.

Dimension letters: T queries, N runs or rows of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from psrl.core.errors import PlanError
from psrl.core.plan.packing import LOCAL, PackedMicroBatch
from psrl.core.samples.sample import IntArray


@dataclass(frozen=True)
class KeyRuns:
    """Runs of key rows that the same queries see.

    Attributes:
        source: [N] block of each run, ascending; LOCAL, the first, for the micro-batch itself.
        start, end: [N] rows inside the source, ascending and disjoint.
        query_start, query_end: [N] queries that see the run; of its own chain a local row is
            seen only from itself on.
    """

    source: IntArray
    start: IntArray
    end: IntArray
    query_start: IntArray
    query_end: IntArray


@dataclass(frozen=True)
class KeyRows:
    """N single key rows, ascending in their buffer, and the queries that see each."""

    row: IntArray
    query_start: IntArray
    query_end: IntArray


def key_runs(packed: PackedMicroBatch) -> KeyRuns:
    """Readers of the key rows of a micro-batch; cached rows that no query sees are left out.

    Raises:
        PlanError: if the queries that see a row are not one run: no depth-first order.
    """
    views = [(LOCAL, c.start, c.end, c.start, c.end) for c in packed.chains]
    views += [(r.source, r.start, r.end, c.start, c.end) for c in packed.chains for r in c.runs]
    table = np.array(views, np.int64).reshape(-1, 5)
    # By first query: so the first and the last view of a row name its first and last query.
    source, start, end, first, last = table[np.argsort(table[:, 3], kind="stable")].T
    names, index = np.unique(source, return_inverse=True)
    span = int(end.max(initial=0)) + 1
    edges = np.unique(np.concatenate([index * span + start, index * span + end]))
    lo = np.searchsorted(edges, index * span + start)
    hi = np.searchsorted(edges, index * span + end)
    changes = np.zeros(len(edges), np.int64)
    np.add.at(changes, lo, last - first)
    np.add.at(changes, hi, first - last)
    num_readers = np.cumsum(changes)
    covered = np.flatnonzero(num_readers)
    query_end = last[_last_cover(lo, hi, len(edges))[covered]]
    query_start = first[::-1][_last_cover(lo[::-1], hi[::-1], len(edges))[covered]]
    source_index, row = np.divmod(edges[covered], span)
    broken = np.flatnonzero(query_end - query_start != num_readers[covered])
    if len(broken):
        at = broken[0]
        raise PlanError(
            f"micro-batch {packed.index}: row {row[at]} of source {names[source_index[at]]} is "
            f"seen by {num_readers[covered][at]} queries between {query_start[at]} and "
            f"{query_end[at]}, not by one run of them",
            "pack tokens in depth-first pre-order",
        )
    length = edges[covered + 1] - edges[covered]
    return KeyRuns(names[source_index], row, row + length, query_start, query_end)


def _last_cover(lo: IntArray, hi: IntArray, size: int) -> IntArray:
    """[size] index of the last interval `[lo, hi)` over each position; 0 where there is none."""
    last = np.zeros(size, np.int64)
    for index, (a, z) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        last[a:z] = index
    return last


def local_rows(runs: KeyRuns) -> KeyRows:
    """The micro-batch's own rows: token t is seen from itself to the end of its subtree."""
    own = runs.source == LOCAL
    query_end = np.repeat(runs.query_end[own], (runs.end - runs.start)[own])
    return KeyRows(np.arange(len(query_end)), np.arange(len(query_end)), query_end)


def cached_rows(runs: KeyRuns, block_start: Callable[[int], int] | None) -> KeyRows:
    """The rows of earlier micro-batches.

    Args:
        block_start: row of the buffer where a block begins; None for a buffer that holds
            exactly the rows of `runs`, in order.
    """
    read = runs.source != LOCAL
    length = (runs.end - runs.start)[read]
    if block_start is None:
        first = np.cumsum(length) - length
    else:
        source = runs.source[read]
        first = runs.start[read] + np.array([block_start(b) for b in source.tolist()], np.int64)
    order = np.argsort(first)
    first, length = first[order], length[order]
    offset = np.repeat(first - (np.cumsum(length) - length), length)
    return KeyRows(
        np.arange(len(offset)) + offset,
        np.repeat(runs.query_start[read][order], length),
        np.repeat(runs.query_end[read][order], length),
    )


def rows_of_parents(parent: IntArray) -> KeyRows:
    """Rows of a forest of single tokens, for use without a plan.

    Args:
        parent: [T] token before each token on its path, -1 for the first; depth-first order.

    Raises:
        PlanError: if the order is not depth-first.
    """
    num_tokens = len(parent)
    row = np.arange(num_tokens)
    # A token that does not follow its parent ends the subtrees of all tokens in between; painted
    # from the last such token to the first, the nearest end stays.
    breaks = np.flatnonzero(parent != row - 1)[::-1]
    begin, value = np.append(0, parent[breaks] + 1), np.append(num_tokens, breaks)
    edges = np.unique(np.append(begin, value))
    cover = _last_cover(np.searchsorted(edges, begin), np.searchsorted(edges, value), len(edges))
    query_end = np.repeat(value[cover[:-1]], np.diff(edges))
    children = breaks[parent[breaks] >= 0]
    broken = children[query_end[parent[children]] <= children]
    if len(broken) or (parent >= row).any():
        at = broken[-1] if len(broken) else np.flatnonzero(parent >= row)[0]
        raise PlanError(
            f"token {at} has parent {parent[at]}, which is not on the path of the token before it",
            "order the tokens depth-first",
        )
    return KeyRows(row, row, query_end)
