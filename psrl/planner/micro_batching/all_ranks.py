"""Micro-batches of all ranks: token-wise cuts chosen by predicted time, or given sample sets.

Ranks that share experts run in step, whatever made their micro-batches.
"""

from typing import TypeVar

import numpy as np

from psrl.core.samples.sample import IntArray
from psrl.planner.placement.placement import Placement, RankSegments, rank_work_s

from .assemble import Caching, build_rank
from .best_cuts import MEMORY_WEIGHT, best_group_program, cut_group, least_time_s
from .built import BuiltProgram, BuiltRank, GroupProgram, join_groups
from .cut_rules import CutRule, all_rules, cut_all
from .expert_groups import run_in_step
from .rank_tree import RankTree, tree_of_rank
from .token_cuts import SNAP

# Groups for which all rules may be tried; the others use the best few of the group before.
_NUM_THOROUGH_GROUPS = 8
_MAX_OTHERS = 6
# A group may be slower than the slowest so far by this share before more rules are tried.
_TOLERANCE = 5e-4


def work_s(placement: Placement) -> float:
    """Work of the most loaded rank, all phases, without fixed costs: no plan of it is faster."""
    return float(rank_work_s(placement).max())


def token_cuts(
    placement: Placement,
    single_unit: bool = False,
    memory_weight: float = MEMORY_WEIGHT,
    snap: float = SNAP,
) -> BuiltProgram:
    """Our micro-batches on every rank.

    Ranks that share experts run in step and are one group, any other rank is one by itself. The
    most loaded group is cut by the best rule of all. The others need not be faster than it, so
    the first of its best rules that keeps them below it will do.

    Args:
        single_unit: only plain even cuts.
        memory_weight: share of the time that all of the device memory is worth.
        snap: see `CutRule`; infinite cuts between nodes only, where the token budget allows.
    """
    groups: dict[int, GroupProgram] = {}
    rules: list[CutRule] = []
    slowest_s, num_thorough = 0.0, 0

    def is_good(group: GroupProgram) -> bool:
        return group.fits and group.time_s <= slowest_s * (1.0 + _TOLERANCE)

    for rank_trees in _by_work(placement):
        group = cut_group(rank_trees, rules[0]) if rules else None
        if group is not None and not is_good(group):
            group = best_group_program(rank_trees, rules[:_MAX_OTHERS], memory_weight).program
        if group is None or (num_thorough < _NUM_THOROUGH_GROUPS and not is_good(group)):
            group, rules = best_group_program(
                rank_trees, all_rules(rank_trees, single_unit, snap), memory_weight
            )
            num_thorough += 1
        groups[rank_trees[0].rank] = group
        slowest_s = max(slowest_s, group.time_s)
    return join_groups(placement, [groups[rank] for rank in sorted(groups)])


def best_cuts_of(placement: Placement, rank: int) -> BuiltRank:
    """One rank's micro-batches by the best rule, as the most loaded rank gets them.

    With those that share experts with it.
    """
    size = placement.problem.setup.parallel.coupled_ranks
    first = rank - rank % size
    rank_trees = [tree_of_rank(placement, r) for r in range(first, first + size)]
    rules = all_rules(rank_trees, False, SNAP)
    return best_group_program(rank_trees, rules, MEMORY_WEIGHT).program.ranks[rank - first]


def least_even_cuts_s(placement: Placement) -> float:
    """No plain even cuts of a placement take less time, all phases; from its most loaded group."""
    rank_trees = _by_work(placement)[0]
    rules = all_rules(rank_trees, single_unit=True)
    least_s = min(least_time_s(rank_trees, cut_all(rank_trees, rule)) for rule in rules)
    return len(placement.subproblem.phases) * least_s


def _by_work(placement: Placement) -> list[list[RankTree]]:
    """Groups of ranks in step, the most loaded first."""
    rank_trees = [tree_of_rank(placement, r) for r in range(placement.problem.num_ranks)]
    return sorted(
        _in_groups(placement, rank_trees),
        key=lambda group: -max(float(rank_tree.cost_before_s[-1]) for rank_tree in group),
    )


T = TypeVar("T")


def _in_groups(placement: Placement, ranks: list[T]) -> list[list[T]]:
    """One entry per rank in runs of ranks that share experts."""
    size = placement.problem.setup.parallel.coupled_ranks
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def sample_sets(placement: Placement, sets: list[list[IntArray]], caching: Caching) -> BuiltProgram:
    """Micro-batches that compute whole samples, without tokens of earlier micro-batches.

    Args:
        sets: samples of each micro-batch, in order, per rank; ranks in step with fewer get empty
            micro-batches.
    """
    alone = [
        build_rank(placement, rank, _segments_of_sets(placement, mine), caching)
        for rank, mine in enumerate(sets)
    ]
    size = placement.problem.setup.parallel.coupled_ranks
    groups = _in_groups(placement, alone)
    return join_groups(placement, [run_in_step(g, i * size) for i, g in enumerate(groups)])


def _segments_of_sets(placement: Placement, sets: list[IntArray]) -> RankSegments:
    tree = placement.tree
    parent, sample_node = tree.parent.tolist(), tree.sample_node.tolist()
    computed = {0}
    node_lists: list[IntArray] = []
    for samples in sets:
        new: list[int] = []
        for sample in samples.tolist():
            node = sample_node[sample]
            while node not in computed:
                computed.add(node)
                new.append(node)
                node = parent[node]
        if new:
            node_lists.append(np.sort(np.array(new, np.int64)))
    nodes = np.concatenate([*node_lists, np.empty(0, np.int64)])
    counts = [len(nodes_of_set) for nodes_of_set in node_lists]
    return RankSegments(
        micro_batch=np.repeat(np.arange(len(counts)), counts),
        node=nodes,
        start_depth=tree.start_depth[nodes],
        num_tokens=tree.num_tokens[nodes],
    )
