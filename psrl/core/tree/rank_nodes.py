"""Which nodes of a prefix tree each rank's samples need, for all ranks at once."""

import numpy as np

from psrl.core.samples.sample import IntArray

from .prefix_tree import PrefixTree


def nodes_of_ranks(tree: PrefixTree, rank: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of a rank and a node on the path of one of its samples, without the root.

    Args:
        rank: [S] rank of each sample of the tree.

    Returns: ranks and nodes, ascending by (rank, node), each pair once.
    """
    rank_in_order = rank[tree.sample_order]
    position = np.argsort(rank_in_order, kind="stable")
    rank = rank_in_order[position]
    node = tree.sample_node[tree.sample_order[position]]
    # Samples through a node are neighbours in sorted order. So a sample is the first of its rank
    # through a node iff the rank's sample before it is not among them.
    before = np.full(len(position), -1)
    before[1:] = np.where(rank[1:] == rank[:-1], position[:-1], -1)
    ranks, nodes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    while len(node):
        first = np.flatnonzero((node > 0) & (tree.first_sample[node] > before))
        rank, node, before = rank[first], node[first], before[first]
        ranks.append(rank)
        nodes.append(node)
        node = tree.parent[node]
    all_ranks, all_nodes = np.concatenate(ranks), np.concatenate(nodes)
    order = np.argsort(all_ranks * tree.num_nodes + all_nodes)
    return all_ranks[order], all_nodes[order]
