"""Forests of segments in depth-first order as micro-batches, without a trace or a plan.

For tests, benchmarks, and for using the kernels as a library.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from psrl.core.plan.packing import LOCAL, CachedRows, Chain, KeyRun, PackedMicroBatch
from psrl.core.samples.sample import IntArray


class Segment(NamedTuple):
    """Tokens of one tree node; `parent` is the index of an earlier segment, -1 for a root."""

    parent: int
    num_tokens: int


def random_forest(
    rng: np.random.Generator, num_tokens: int, max_segment: int = 12, branching: float = 0.75
) -> list[Segment]:
    """Segments with `num_tokens` tokens in all."""
    segments: list[Segment] = []
    path: list[int] = []
    left = num_tokens
    while left:
        while path and rng.random() > branching:
            path.pop()
        count = int(min(left, rng.integers(1, max_segment + 1)))
        segments.append(Segment(path[-1] if path else -1, count))
        path.append(len(segments) - 1)
        left -= count
    return segments


def parents(segments: list[Segment]) -> IntArray:
    """[T] parent of each token, -1 at a root."""
    starts = np.cumsum([0] + [s.num_tokens for s in segments])
    parent = np.arange(starts[-1]) - 1
    for start, segment in zip(starts, segments, strict=False):
        parent[start] = starts[segment.parent + 1] - 1 if segment.parent >= 0 else -1
    return parent


def pack_forest(segments: list[Segment], cuts: list[int] | None = None) -> list[PackedMicroBatch]:
    """Micro-batches of the tokens between the cuts; block m caches all rows of micro-batch m.

    Args:
        cuts: first tokens of the micro-batches after the first.
    """
    starts = np.cumsum([0] + [s.num_tokens for s in segments]).tolist()
    bounds = [0, *(cuts or []), starts[-1]]
    depth: list[int] = []
    packed = []
    for segment in segments:
        parent = segment.parent
        depth.append(depth[parent] + segments[parent].num_tokens if parent >= 0 else 0)
    for index, (first, last) in enumerate(pairwise(bounds)):
        chains: list[Chain] = []
        columns: list[tuple[int, int, int]] = []
        for v, segment in enumerate(segments):
            start, end = max(first, starts[v]), min(last, starts[v + 1])
            if start >= end:
                continue
            columns.append((v, depth[v] + start - starts[v], end - start))
            path, node = [(starts[v], start)], segment.parent
            while node >= 0:
                path.append((starts[node], starts[node + 1]))
                node = segments[node].parent
            runs = [r for a, z in reversed(path) for r in _runs(a, z, bounds, index)]
            chains.append(Chain(start - first, end - first, tuple(runs)))
        node, start_depth, num_tokens = np.array(columns, np.int64).reshape(-1, 3).T
        cached = (CachedRows(index, 0, last - first),) if cuts and last > first else ()
        packed.append(PackedMicroBatch(index, node, start_depth, num_tokens, tuple(chains), cached))
    return packed


def _runs(start: int, end: int, bounds: list[int], index: int) -> list[KeyRun]:
    """Tokens `[start, end)` as rows of the micro-batches that compute them."""
    runs = []
    for owner, (first, last) in enumerate(pairwise(bounds)):
        a, z = max(start, first), min(end, last)
        if a < z:
            runs.append(KeyRun(LOCAL if owner == index else owner, a - first, z - first))
    return runs


def join_forests(forests: Iterable[list[Segment]]) -> list[Segment]:
    """One forest of several."""
    joined: list[Segment] = []
    for segments in forests:
        shift = len(joined)
        joined += [s._replace(parent=s.parent + shift if s.parent >= 0 else -1) for s in segments]
    return joined


def level_tree(
    rng: np.random.Generator, sizes: list[tuple[int, int]], fan_out: int
) -> list[Segment]:
    """A tree whose nodes at each level have a random number of tokens between two bounds."""
    segments: list[Segment] = []

    def grow(level: int, parent: int) -> None:
        segments.append(Segment(parent, int(rng.integers(sizes[level][0], sizes[level][1] + 1))))
        node = len(segments) - 1
        for _ in range(fan_out if level + 1 < len(sizes) else 0):
            grow(level + 1, node)

    grow(0, -1)
    return segments
