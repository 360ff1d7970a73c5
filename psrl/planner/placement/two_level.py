"""Placements that know the tree: the contiguous depth-first cut and the two-level search.

A placement is the rank of every leaf. The two levels: whole groups (subtrees of the root) are
packed by best fit and split only where they fit nowhere; then subtrees move between ranks.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from psrl.core.samples.sample import IntArray

from .cost_tree import CostTree, rank_costs
from .local_search import LocalSearch

# A proven gap below this is not worth more search.
GAP_TOLERANCE = 1e-3
_BISECTION_TOLERANCE = 1e-5
_PACK_TOLERANCE = 2e-4
# Starts this much worse than the best are not descended from.
_PROMISING = 1.5
# Nodes that a descent may look at, in steps of the whole tree.
_DESCENT_WORK = 1_000_000
_MAX_DESCENT_STEPS = 2000
# With more pairs of a node and a rank, only the best start is descended from.
_MAX_CELLS = 10_000_000


def dfs_cut_leaves(tree: CostTree, num_ranks: int) -> IntArray:
    """[L] contiguous runs of leaves in depth-first order, by binary search on the costliest run.

    The placement of AReaL-DTA, with our cost of a run.
    """
    low, high = tree.total_s / num_ranks, tree.total_s
    best = _greedy_runs(tree, high)
    while high > low * (1.0 + _BISECTION_TOLERANCE):
        middle = (low + high) / 2
        starts = _greedy_runs(tree, middle)
        if len(starts) <= num_ranks:
            high, best = middle, starts
        else:
            low = middle
    rank = np.zeros(len(tree.leaves), np.int64)
    rank[best[1:]] = 1
    return np.cumsum(rank)


def _greedy_runs(tree: CostTree, limit_s: float) -> list[int]:
    """First leaf of each run, every run as long as the limit allows (at least one leaf)."""
    starts, leaf, count = [], 0, len(tree.leaves)
    shared = tree.shared_before_s.tolist()
    while leaf < count:
        starts.append(leaf)
        reach = tree.run_s[leaf] + limit_s * (1.0 + 1e-12) - shared[leaf]
        leaf = max(int(np.searchsorted(tree.run_s, reach, side="right")) - 1, leaf + 1)
    return starts


def two_level_leaves(
    tree: CostTree, num_ranks: int, bound_s: float, num_iterations: int, seed: int
) -> IntArray:
    """[L] the best placement found: packing, pair descent, iterated local search.

    Args:
        bound_s: proven lower bound; the search stops within `GAP_TOLERANCE` of it.
        num_iterations: local-search steps, so that the result does not depend on the clock; none
            gives the heuristic alone, and more are never worse.
    """
    if num_ranks == 1 or len(tree.leaves) == 1:
        return np.zeros(len(tree.leaves), np.int64)
    goal = bound_s * (1.0 + GAP_TOLERANCE)
    starts: list[tuple[float, IntArray]] = []
    for leaf_rank in _starts(tree, num_ranks, goal):
        worst_s = float(rank_costs(tree, leaf_rank, num_ranks).max())
        if worst_s <= goal:
            return leaf_rank
        starts.append((worst_s, leaf_rank))
    starts.sort(key=lambda start: start[0])
    if tree.num_nodes * num_ranks > _MAX_CELLS:
        starts = starts[:1]
    num_steps = max(_DESCENT_WORK // tree.num_nodes, 1)
    best: LocalSearch | None = None
    for worst_s, leaf_rank in starts:
        if worst_s > _PROMISING * starts[0][0]:
            break
        search = LocalSearch(tree, leaf_rank, num_ranks, seed)
        search.descend(goal, num_steps)
        if best is None or search.objective < best.objective:
            best = search
        if best.worst_s <= goal:
            break
    assert best is not None
    if num_iterations:
        best.descend(goal, _MAX_DESCENT_STEPS)
    best.iterate(goal, num_iterations)
    return best.leaf_rank()


def _starts(tree: CostTree, num_ranks: int, goal_s: float) -> Iterator[IntArray]:
    """Placements to start from, the quickest first."""
    yield _longest_first(tree, num_ranks)
    yield _pack(tree, num_ranks, goal_s)
    yield dfs_cut_leaves(tree, num_ranks)


def _pack(tree: CostTree, num_ranks: int, goal_s: float) -> IntArray:
    """Packing with the lowest limit found; success is not monotone in the limit.

    Args:
        goal_s: a limit that needs no lowering.
    """
    low = max(tree.total_s / num_ranks, float(tree.path_s.max()))
    high, step = low, 0.002
    best = _pack_below(tree, num_ranks, high)
    while best is None:
        low, high, step = high, high * (1.0 + step), 2 * step
        best = _pack_below(tree, num_ranks, high)
    while high > max(low * (1.0 + _PACK_TOLERANCE), goal_s):
        middle = (low + high) / 2
        packed = _pack_below(tree, num_ranks, middle)
        if packed is None:
            low = middle
        else:
            high, best = middle, packed
    return best


def _pack_below(tree: CostTree, num_ranks: int, limit_s: float) -> IntArray | None:
    """Groups by decreasing cost to the fullest rank with room; None if some leaf fits nowhere.

    A group without room anywhere fills the emptiest rank with a run of its leaves, and the rest
    goes back to the queue.
    """
    root = float(tree.path_s[0])
    run, shared = tree.run_s, tree.shared_before_s

    def cost(first: int, last: int) -> float:
        return float(run[last] - run[first] + max(shared[first] - root, 0.0)) - (
            root if first == 0 else 0.0
        )

    rooms = [((limit_s - root) * (1.0 + 1e-12), r) for r in range(num_ranks)]
    queue = [(-cost(a, z), a, z) for a, z in _group_runs(tree)]
    heapq.heapify(queue)
    rank = np.empty(len(tree.leaves), np.int64)
    while queue:
        negative, first, last = heapq.heappop(queue)
        fits = bisect_left(rooms, (-negative, -1))
        if fits < len(rooms):
            room, r = rooms.pop(fits)
            rank[first:last] = r
            insort(rooms, (room + negative, r))
            continue
        if not rooms:
            return None
        room, r = rooms.pop()
        base = run[first] - max(shared[first] - root, 0.0) + (root if first == 0 else 0.0)
        cut = min(int(np.searchsorted(run, base + room, side="right")) - 1, last)
        if cut <= first:
            return None
        rank[first:cut] = r
        insort(rooms, (room - cost(first, cut), r))
        if cut < last:
            heapq.heappush(queue, (-cost(cut, last), cut, last))
    return rank


def _longest_first(tree: CostTree, num_ranks: int) -> IntArray:
    """Whole groups by decreasing cost, each to the least loaded rank."""
    groups = _group_runs(tree)
    cost = [float(tree.run_s[z] - tree.run_s[a]) for a, z in groups]
    loads = [(0.0, r) for r in range(num_ranks)]
    rank = np.empty(len(tree.leaves), np.int64)
    for g in sorted(range(len(groups)), key=lambda g: -cost[g]):
        load, r = heapq.heappop(loads)
        rank[groups[g][0] : groups[g][1]] = r
        heapq.heappush(loads, (load + cost[g], r))
    return rank


def _group_runs(tree: CostTree) -> list[tuple[int, int]]:
    """Leaves `[first, last)` of each subtree of the root."""
    if tree.num_nodes == 1:
        return [(0, 1)]
    groups = tree.levels[1]
    first = np.searchsorted(tree.leaves, groups)
    last = np.searchsorted(tree.leaves, tree.subtree_end[groups])
    return list(zip(first.tolist(), last.tolist(), strict=True))
