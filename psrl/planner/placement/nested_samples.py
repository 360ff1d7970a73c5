"""Samples that end inside others, moved away from the heaviest rank.

The search places leaves of the tree, and a sample that ends inside a leaf's path rides along:
its tokens cost nothing there. Its predicted rows do, and where ranks hold few leaves another
rank may train it for less.
"""

import numpy as np

from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.core.tree.rank_nodes import nodes_of_ranks
from psrl.planner.problem import ProgramProblem

from .placement import rank_work_s, shared_placement

# With more leaves per rank the nested' rows are small beside what leaves can balance.
_MAX_LEAVES_PER_RANK = 16
_MAX_MOVES = 2000


def move_nested_samples(subproblem: ProgramProblem, rank: IntArray, goal_s: float) -> IntArray:
    """[S] ranks after moves that each lower the heaviest rank.

    Args:
        rank: [S] rank of each sample.
        goal_s: stop when no rank has more work.
    """
    num_ranks, tree = subproblem.problem.num_ranks, subproblem.tree
    if num_ranks == 1 or len(subproblem.cost_tree.leaves) > _MAX_LEAVES_PER_RANK * num_ranks:
        return rank
    rank = rank.copy()
    rows = _predicted_rows(subproblem)
    nested = {s for s in _nested_samples(subproblem).tolist() if rows[s]}
    if not nested:
        return rank
    load_s = rank_work_s(shared_placement(subproblem, rank))
    node_s = _node_s(subproblem)
    held = np.zeros((num_ranks, tree.num_nodes), bool)
    held[nodes_of_ranks(tree, rank)] = True
    for _ in range(_MAX_MOVES):
        heaviest = int(load_s.argmax())
        mine = [s for s in nested if rank[s] == heaviest]
        if load_s[heaviest] <= goal_s or not mine:
            break
        sample = max(mine, key=lambda s: (rows[s], -s))
        path = tree.path(int(tree.sample_node[sample]))
        missing_s = (node_s[path] * ~held[:, path]).sum(axis=1)
        after = load_s + missing_s
        after[heaviest] = np.inf
        chosen = int(after.argmin())
        rank[sample] = chosen
        new_s = rank_work_s(shared_placement(subproblem, rank))
        if max(new_s[heaviest], new_s[chosen]) < load_s[heaviest]:
            load_s = new_s
            held[chosen, path] = True
        else:
            rank[sample] = heaviest
            nested.discard(sample)
    return rank


def _nested_samples(subproblem: ProgramProblem) -> IntArray:
    """Samples that other samples of their leaf contain."""
    tree = subproblem.tree
    ends_inside = tree.subtree_end[tree.sample_node] > tree.sample_node + 1
    return np.flatnonzero(ends_inside)


def _predicted_rows(subproblem: ProgramProblem) -> IntArray:
    """[S] rows that each sample predicts from."""
    rows = subproblem.loss_rows
    count = np.bincount(
        rows.sample, rows.end - rows.start, minlength=subproblem.samples.num_samples
    )
    return count.astype(np.int64)


def _node_s(subproblem: ProgramProblem) -> FloatArray:
    tree, unit = subproblem.tree, subproblem.unit_costs
    pairs = visible_pairs(tree.start_depth, tree.num_tokens)
    cost_s: FloatArray = unit.token_s * tree.num_tokens + unit.pair_s * pairs
    return cost_s
