"""The tree that segments of prefix-tree nodes form on each rank."""

import numpy as np

from psrl.core.samples.sample import IntArray

from .prefix_tree import PrefixTree


def segment_tree(
    tree: PrefixTree, node: IntArray, start_depth: IntArray, rank: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """Depth-first order of segments, rank by rank, and the place of each parent in it (-1: none).

    Args:
        node, start_depth: [S] where the segments begin; ranks compute whole paths.
        rank: [S] of each; None if all are of one.
    """
    key = node if rank is None else rank * tree.num_nodes + node
    order = np.lexsort((start_depth, key))
    node, key = node[order], key[order]
    opens = np.append(True, key[1:] != key[:-1])[: len(key)]
    above = tree.parent[node]
    last_of_parent = np.searchsorted(key, key - node + above, side="right") - 1
    before = np.arange(len(key)) - 1
    return order, np.where(opens, np.where(above > 0, last_of_parent, -1), before)
