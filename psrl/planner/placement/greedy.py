"""Greedy placements: one sample or one semantic group at a time."""

import heapq

import numpy as np

from psrl.core.samples.sample import FloatArray, IntArray, StrArray
from psrl.core.tree.prefix_tree import PrefixTree

from .cost_tree import CostTree, RangeMinimum


class _Holders:
    """Ranks that hold each node of a tree, as bits; a rank that holds a node holds its path."""

    def __init__(self, parent: IntArray, cost_s: FloatArray) -> None:
        self._parent = parent.tolist()
        self._cost_s = cost_s.tolist()
        self._holders = [0] * len(self._parent)

    def add(self, node: int, rank: int) -> float:
        """Give a rank the path to a node; returns the cost of what it did not hold."""
        bit, added_s = 1 << rank, 0.0
        while node >= 0 and not self._holders[node] & bit:
            self._holders[node] |= bit
            added_s += self._cost_s[node]
            node = self._parent[node]
        return added_s


def unique_cost_ranks(costs: CostTree, num_ranks: int) -> IntArray:
    """[S] each sample to the rank with the least work so far, counting shared nodes once."""
    held = _Holders(costs.parent, costs.cost_s)
    load = [(0.0, r) for r in range(num_ranks)]
    rank = []
    for node in costs.leaves[costs.leaf_of_sample].tolist():
        so_far_s, chosen = load[0]
        rank.append(chosen)
        heapq.heapreplace(load, (so_far_s + held.add(node, chosen), chosen))
    return np.array(rank, np.int64)


def longest_prefix_ranks(
    tree: PrefixTree, costs: CostTree, group_id: StrArray, num_ranks: int
) -> IntArray:
    """[S] each group, in order, to the rank that holds its longest prefix; ties to least loaded.

    A prefix of all samples attracts no group, or the first rank would get them all.
    """
    load, everybody = np.zeros(num_ranks), (1 << num_ranks) - 1
    parent, end_depth = tree.parent.tolist(), tree.end_depth.tolist()
    holders = [0] * tree.num_nodes
    of_all = (tree.samples_through == len(group_id)).tolist()
    held = _Holders(costs.parent, costs.cost_s)
    rank = np.empty(len(group_id), np.int64)
    for samples in _groups(group_id):
        longest, matching = 0, everybody
        nodes: set[int] = set()
        for end in tree.sample_node[samples].tolist():
            node = end
            while node > 0 and node not in nodes and not of_all[node]:
                nodes.add(node)
                if holders[node] and end_depth[node] >= longest:
                    same = matching if end_depth[node] == longest else 0
                    longest, matching = end_depth[node], same | holders[node]
                node = parent[node]
        chosen = _least_loaded(load, matching, everybody)
        rank[samples] = chosen
        for node in nodes:
            holders[node] |= 1 << chosen
        for leaf in costs.leaf_of_sample[samples].tolist():
            load[chosen] += held.add(int(costs.leaves[leaf]), chosen)
    return rank


def _least_loaded(load: FloatArray, ranks: int, everybody: int) -> int:
    """The first least loaded of some ranks, given as bits."""
    if ranks == everybody:
        return int(load.argmin())
    some = [r for r in range(len(load)) if ranks >> r & 1]
    return some[int(load[some].argmin())]


def group_ranks(group_id: StrArray, num_tokens: IntArray, num_ranks: int) -> IntArray:
    """[S] whole groups, those with most tokens first, to the rank with the fewest tokens."""
    groups = _groups(group_id)
    tokens = [int(num_tokens[samples].sum()) for samples in groups]
    load = [0] * num_ranks
    rank = np.empty(len(group_id), np.int64)
    for g in sorted(range(len(groups)), key=lambda g: -tokens[g]):
        chosen = load.index(min(load))
        rank[groups[g]] = chosen
        load[chosen] += tokens[g]
    return rank


def first_fit_tries(
    tree: PrefixTree, rank: IntArray, num_ranks: int, max_tokens: int
) -> list[list[IntArray]]:
    """Sample sets of each rank's micro-batches: each sample to the first trie with room for it.

    AReaL's packing: a trie holds at most `max_tokens` distinct tokens; a sample that fits in no
    trie opens one, even if it is longer.
    """
    place = np.empty(len(rank), np.int64)
    place[tree.sample_order] = np.arange(len(rank))
    length = tree.end_depth[tree.sample_node]
    common = _NeighbourPrefix(tree)
    packed: list[list[IntArray]] = []
    for r in range(num_ranks):
        tries: list[list[int]] = []
        members: list[IntArray] = []
        room: list[int] = []
        for sample in np.flatnonzero(rank == r).tolist():
            at, tokens = int(place[sample]), int(length[sample])
            fewest_new = tokens - common.closest(at)
            for t, space in enumerate(room):
                if fewest_new <= space:
                    new = tokens - common.longest(members[t], at)
                    if new <= space:
                        break
            else:
                t, new = len(room), tokens
                tries.append([])
                members.append(np.empty(0, np.int64))
                room.append(max(max_tokens, tokens))
            tries[t].append(sample)
            members[t] = np.insert(members[t], np.searchsorted(members[t], at), at)
            room[t] -= new
        packed.append([np.array(t, np.int64) for t in tries])
    return packed


class _NeighbourPrefix:
    """Common prefix lengths of samples by their place in sorted order."""

    def __init__(self, tree: PrefixTree) -> None:
        # Neighbours i - 1, i share the deepest node that covers both.
        common = np.zeros(len(tree.sample_order))
        for node in range(tree.num_nodes):
            first = int(tree.first_sample[node])
            common[first + 1 : first + int(tree.samples_through[node])] = tree.end_depth[node]
        self._common = np.append(common, 0.0)
        self._minimum = RangeMinimum(common)

    def closest(self, place: int) -> int:
        """Most tokens that the sample at `place` shares with any other."""
        return int(self._common[place : place + 2].max())

    def longest(self, members: IntArray, place: int) -> int:
        """Tokens that the sample at `place` shares with the closest of the sorted members."""
        at = int(np.searchsorted(members, place))
        near = members[max(at - 1, 0) : at + 1]
        low, high = np.minimum(near, place) + 1, np.maximum(near, place) + 1
        return int(self._minimum(low, high).max(initial=0.0))


def _groups(group_id: StrArray) -> list[IntArray]:
    """Samples of each group, groups in order of first appearance."""
    _, first, inverse = np.unique(group_id, return_index=True, return_inverse=True)
    by_group = (
        np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
        if len(group_id)
        else []
    )
    return [by_group[g] for g in np.argsort(first, kind="stable").tolist()]
