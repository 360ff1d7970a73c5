"""Proven lower bounds on the cost of the most loaded rank, over all placements of samples."""

import numpy as np

from psrl.core.plan.bound import Bound, BoundKind
from psrl.core.samples.sample import FloatArray
from psrl.planner.placement.cost_tree import CostTree

# Rounding of sums, and of the slopes that unit costs are read from: a bound must not exceed, and
# whoever verifies it adds up in another order.
SAFETY = 1.0 - 1e-9
_BISECTION_TOLERANCE = 1e-5


def rank_cost_bound(tree: CostTree, num_ranks: int) -> Bound:
    """The best of three bounds, in the tree's seconds.

    The average over the ranks, since each token and each predicted row is computed somewhere; the
    most expensive sample, which one rank computes whole; and the forced copies of `is_refuted`,
    by bisection (refuted limits form an interval).
    """
    average, longest = tree.total_s / num_ranks, tree.longest_sample_s
    kind: BoundKind = "average work" if average >= longest else "longest sample"
    low = max(average, longest)
    if low > 0.0 and is_refuted(tree, num_ranks, low):
        high, kind = tree.total_s, "forced copies"
        while high > low * (1.0 + _BISECTION_TOLERANCE):
            middle = (low * high) ** 0.5
            if is_refuted(tree, num_ranks, middle):
                low = middle
            else:
                high = middle
    return Bound(kind=kind, limit_s=low * SAFETY)


def is_refuted(tree: CostTree, num_ranks: int, limit_s: float) -> bool:
    """Whether provably no placement keeps every rank within the limit."""
    copies = copies_of(tree, num_ranks, limit_s)
    if copies is None:
        return True
    total = float((copies * tree.shared_s + tree.head_s).sum())
    return bool(copies[0] > num_ranks or total > num_ranks * limit_s * (1.0 + 1e-12))


def copies_of(tree: CostTree, num_ranks: int, limit_s: float) -> FloatArray | None:
    """[V] lower bound on the ranks that hold each node within the limit; None if no rank can.

    Proof, from the leaves up. A rank that holds a child holds the node. Each node below is paid
    on at least its number of ranks, and each other row below on one; all of them hold this node,
    so each has spent the path to it and has the rest of the limit left. A sample that ends inside
    a merged chain makes a rank hold less than the chain's node, but its rows are charged to that
    node, below the parent, which the rank does hold; so every count stays a lower bound.
    """
    path = tree.on_path(tree.shared_s)
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
