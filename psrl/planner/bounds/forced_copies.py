"""Proven lower bounds on the cost of the most loaded rank, over all placements."""

from typing import NamedTuple

import numpy as np

from psrl.core.samples.sample import FloatArray
from psrl.planner.placement.cost_tree import CostTree

# Rounding of sums, and of the slopes that unit costs are read from: a bound must not exceed.
_SAFETY = 1.0 - 1e-9
_BISECTION_TOLERANCE = 1e-5


class Bound(NamedTuple):
    """No placement gives every rank less work than this; `source` says why."""

    cost_s: float
    source: str


def rank_cost_bound(tree: CostTree, num_ranks: int) -> Bound:
    """The best of three bounds, in the tree's seconds.

    The average over the ranks; the most expensive sample, which one rank computes whole; and
    the forced duplication of `is_refuted`, by bisection (refuted limits form an interval).
    """
    average, longest = tree.total_s / num_ranks, tree.longest_sample_s
    low, source = max((average, "average work"), (longest, "longest sample"))
    if low > 0.0 and is_refuted(tree, num_ranks, low):
        high, source = tree.total_s, "forced duplication"
        while high > low * (1.0 + _BISECTION_TOLERANCE):
            middle = (low * high) ** 0.5
            if is_refuted(tree, num_ranks, middle):
                low = middle
            else:
                high = middle
    return Bound(low * _SAFETY, source)


def is_refuted(tree: CostTree, num_ranks: int, limit_s: float) -> bool:
    """Whether provably no placement keeps every rank within the limit."""
    copies = copies_of(tree, num_ranks, limit_s)
    if copies is None:
        return True
    total = float((copies * tree.shared_s + tree.head_s).sum())
    return bool(copies[0] > num_ranks or total > num_ranks * limit_s * (1.0 + 1e-12))


def copies_of(tree: CostTree, num_ranks: int, limit_s: float) -> FloatArray | None:
    """[V] lower bound on the ranks that hold each node within the limit; None if no rank can.

    Bottom-up: at least that of each child; and, since work strictly below the node runs only on
    ranks that hold it, each of which has spent the path to the node, at least that work divided
    by what the limit leaves.
    """
    path = _shared_path_s(tree)
    if (path > limit_s).any():
        return None
    copies = np.ones(tree.num_nodes)
    below_s = np.zeros(tree.num_nodes)
    for depth in range(len(tree.levels) - 1, -1, -1):
        nodes = tree.levels[depth]
        room = limit_s - path[nodes]
        with np.errstate(divide="ignore", invalid="ignore"):
            ranks = np.where(below_s[nodes] > 0.0, np.ceil(below_s[nodes] / room - 1e-9), 1.0)
        # One rank too many refutes already; a cap keeps the sums finite.
        copies[nodes] = np.clip(ranks, copies[nodes], num_ranks + 1)
        if depth:
            work = copies[nodes] * tree.shared_s[nodes] + tree.head_s[nodes] + below_s[nodes]
            np.add.at(below_s, tree.parent[nodes], work)
            np.maximum.at(copies, tree.parent[nodes], copies[nodes])
    return copies


def _shared_path_s(tree: CostTree) -> FloatArray:
    path = tree.shared_s.copy()
    for level in tree.levels[1:]:
        path[level] += path[tree.parent[level]]
    return path
