"""Greedy placements: one sample or one semantic group at a time."""

import numpy as np

from psrl.core.prefix_tree import PrefixTree
from psrl.core.sample import IntArray, StrArray

from .cost_tree import CostTree, RangeMinimum


def unique_cost_ranks(costs: CostTree, num_ranks: int) -> IntArray:
    """[S] each sample to the rank with the least work so far, counting shared nodes once."""
    load = np.zeros(num_ranks)
    held = np.zeros((num_ranks, costs.num_nodes), bool)
    rank = np.empty(len(costs.leaf_of_sample), np.int64)
    for sample, leaf in enumerate(costs.leaf_of_sample.tolist()):
        chosen = int(load.argmin())
        rank[sample] = chosen
        new = _unheld_path(costs, int(costs.leaves[leaf]), held[chosen])
        held[chosen, new] = True
        load[chosen] += costs.cost_s[new].sum()
    return rank


def longest_prefix_ranks(
    tree: PrefixTree, costs: CostTree, group_id: StrArray, num_ranks: int
) -> IntArray:
    """[S] each group, in order, to the rank that holds its longest prefix; ties to least loaded."""
    load = np.zeros(num_ranks)
    held = np.zeros((num_ranks, tree.num_nodes), bool)
    held[:, 0] = True
    held_cost = np.zeros((num_ranks, costs.num_nodes), bool)
    rank = np.empty(len(group_id), np.int64)
    for samples in _groups(group_id):
        ends = tree.sample_node[samples]
        nodes = np.unique(
            np.concatenate([[0], *(tree.path(int(v)) for v in ends)]).astype(np.int64)
        )
        matched = np.where(held[:, nodes], tree.end_depth[nodes], 0).max(axis=1)
        best = np.flatnonzero(matched == matched.max())
        chosen = int(best[load[best].argmin()])
        rank[samples] = chosen
        held[chosen, nodes] = True
        for leaf in np.unique(costs.leaf_of_sample[samples]).tolist():
            new = _unheld_path(costs, int(costs.leaves[leaf]), held_cost[chosen])
            held_cost[chosen, new] = True
            load[chosen] += costs.cost_s[new].sum()
    return rank


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


def _unheld_path(
    costs: CostTree, node: int, held: "np.ndarray[tuple[int], np.dtype[np.bool_]]"
) -> list[int]:
    """Nodes from `node` upward that are not held yet."""
    new: list[int] = []
    while node >= 0 and not held[node]:
        new.append(node)
        node = int(costs.parent[node])
    return new
