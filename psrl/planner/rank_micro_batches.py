"""Micro-batches of all ranks: token-wise cuts chosen by predicted time, or given sample sets."""

import numpy as np

from psrl.core.sample import IntArray

from .assemble import BuiltProgram, Caching, RankProgram, join_ranks, rank_program
from .layout import Layout, Pieces
from .micro_batching import (
    MEMORY_WEIGHT,
    CutRule,
    all_rules,
    best_rank_program,
    cut_program,
)
from .token_cuts import rank_view

# Ranks for which all rules may be tried; the others use the best few of the rank before.
_NUM_THOROUGH_RANKS = 8
_NUM_RULES_OF_OTHERS = 6


def work_s(layout: Layout) -> float:
    """Work of the most loaded rank, all phases, without fixed costs: no plan of it is faster."""
    ranks = range(layout.problem.num_ranks)
    return max(float(rank_view(layout, rank).cost_before_s[-1]) for rank in ranks)


def token_cuts(
    layout: Layout,
    single_unit: bool = False,
    memory_weight: float = MEMORY_WEIGHT,
) -> BuiltProgram:
    """Our micro-batches on every rank.

    The most loaded rank is cut by the best rule of all. The others need not be faster than it,
    so the first of its best rules that keeps them below it will do.

    Args:
        single_unit: only plain even cuts.
        memory_weight: share of the time that all of the device memory is worth.
    """
    views = [rank_view(layout, rank) for rank in range(layout.problem.num_ranks)]
    by_work = sorted(views, key=lambda view: -float(view.cost_before_s[-1]))
    programs: dict[int, RankProgram] = {}
    rules: list[CutRule] = []
    slowest_s, num_thorough = 0.0, 0
    for view in by_work:
        program = cut_program(view, rules[0]) if rules else None
        if program is None or program.time_s > slowest_s or not program.fits:
            thorough = num_thorough < _NUM_THOROUGH_RANKS
            tried = all_rules(view, single_unit) if thorough else rules[:_NUM_RULES_OF_OTHERS]
            choice = best_rank_program(view, tried, memory_weight)
            program, rules = choice.program, choice.rules if thorough else rules
            num_thorough += 1
        programs[view.rank] = program
        slowest_s = max(slowest_s, program.time_s)
    return join_ranks(layout, [programs[rank] for rank in range(len(views))])


def sample_sets(layout: Layout, sets: list[list[IntArray]], caching: Caching) -> BuiltProgram:
    """Micro-batches that compute whole samples, without tokens of earlier micro-batches.

    Args:
        sets: samples of each micro-batch, in order, per rank.
    """
    ranks = [
        rank_program(layout, rank, _pieces_of_sets(layout, mine), caching)
        for rank, mine in enumerate(sets)
    ]
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
