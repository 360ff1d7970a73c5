"""Micro-batches of all ranks: token-wise cuts chosen by predicted time, or given sample sets.

Ranks that share experts run in step, whatever made their micro-batches.
"""

from typing import TypeVar

import numpy as np

from psrl.core.samples.sample import IntArray
from psrl.planner.placement.placement import Layout, Pieces, rank_work_s

from .assemble import BuiltProgram, Caching, RankProgram, join_ranks, rank_program
from .best_cuts import MEMORY_WEIGHT, best_group_program, cut_group
from .cut_rules import CutRule, all_rules
from .expert_groups import GroupProgram, run_in_step
from .rank_tree import rank_view
from .token_cuts import SNAP

# Groups for which all rules may be tried; the others use the best few of the group before.
_NUM_THOROUGH_GROUPS = 8
_MAX_OTHERS = 6
# A group may be slower than the slowest so far by this share before more rules are tried.
_TOLERANCE = 5e-4


def work_s(layout: Layout) -> float:
    """Work of the most loaded rank, all phases, without fixed costs: no plan of it is faster."""
    return float(rank_work_s(layout).max())


def token_cuts(
    layout: Layout,
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
    by_work = sorted(
        _in_groups(layout, [rank_view(layout, r) for r in range(layout.problem.num_ranks)]),
        key=lambda views: -max(float(view.cost_before_s[-1]) for view in views),
    )
    programs: dict[int, RankProgram] = {}
    rules: list[CutRule] = []
    slowest_s, num_thorough = 0.0, 0

    def is_good(group: GroupProgram) -> bool:
        return group.fits and group.time_s <= slowest_s * (1.0 + _TOLERANCE)

    for views in by_work:
        group = cut_group(views, rules[0]) if rules else None
        if group is not None and not is_good(group):
            group = best_group_program(views, rules[:_MAX_OTHERS], memory_weight).program
        if group is None or (num_thorough < _NUM_THOROUGH_GROUPS and not is_good(group)):
            group, rules = best_group_program(
                views, all_rules(views, single_unit, snap), memory_weight
            )
            num_thorough += 1
        programs |= {view.rank: made for view, made in zip(views, group.ranks, strict=True)}
        slowest_s = max(slowest_s, group.time_s)
    return join_ranks(layout, [programs[rank] for rank in sorted(programs)])


T = TypeVar("T")


def _in_groups(layout: Layout, ranks: list[T]) -> list[list[T]]:
    """One entry per rank in runs of ranks that share experts."""
    size = layout.problem.setup.parallel.coupled_ranks
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def sample_sets(layout: Layout, sets: list[list[IntArray]], caching: Caching) -> BuiltProgram:
    """Micro-batches that compute whole samples, without tokens of earlier micro-batches.

    Args:
        sets: samples of each micro-batch, in order, per rank; ranks in step with fewer get empty
            micro-batches.
    """
    alone = [
        rank_program(layout, rank, _pieces_of_sets(layout, mine), caching)
        for rank, mine in enumerate(sets)
    ]
    ranks: list[RankProgram] = []
    for programs in _in_groups(layout, alone):
        ranks += run_in_step(programs, len(ranks)).ranks
    return join_ranks(layout, ranks)


def _pieces_of_sets(layout: Layout, sets: list[IntArray]) -> Pieces:
    tree = layout.tree
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
    return Pieces(
        micro_batch=np.repeat(np.arange(len(counts)), counts),
        node=nodes,
        start_depth=tree.start_depth[nodes],
        num_tokens=tree.num_tokens[nodes],
    )
