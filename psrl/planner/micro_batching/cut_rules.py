"""Rules by which ranks in step are cut into micro-batches, and the cuts that they give."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from psrl.core.samples.sample import IntArray

from .rank_tree import RankTree
from .token_cuts import SNAP, cut_exactly, cut_units, unit_starts

# Micro-batches per rank, as multiples of the fewest that the token budget allows; beyond some
# number per pipeline stage the idle share of a pipeline is small anyway.
_COUNT_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
_MAX_COUNT_PER_STAGE = 32
_MAX_FACTOR_WITHOUT_PIPELINE = 8.0
# Held tokens, as multiples of what the backward order forces.
_HELD_FACTORS = (1.0, 1.5, 2.0)
# Units per rank; one unit is a plain even cut.
_UNIT_DIVISORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class CutRule:
    """How ranks in step are cut and run.

    Attributes:
        count_factor: micro-batches as a multiple of the fewest that the token budget allows.
        num_units: a unit costs at most this share of the rank.
        held_factor: see `build_rank`.
        snap: a cut moves to the end of a node within this share of a micro-batch's cost; if it is
            infinite, nodes are cut only where the token budget demands it.
    """

    count_factor: float
    num_units: int
    held_factor: float
    snap: float = SNAP


def all_rules(
    rank_trees: Sequence[RankTree], single_unit: bool = False, snap: float = SNAP
) -> list[CutRule]:
    """Candidates for ranks in step, plainest first."""
    placement = rank_trees[0].placement
    num_stages, fewest = (
        placement.problem.num_stages,
        max(_fewest(rank_tree) for rank_tree in rank_trees),
    )
    factors = [
        factor
        for factor in _COUNT_FACTORS
        if factor == 1.0 or fewest * factor <= _MAX_COUNT_PER_STAGE * num_stages
    ]
    if num_stages == 1:
        factors = [f for f in _COUNT_FACTORS if f <= _MAX_FACTOR_WITHOUT_PIPELINE]
    units = _UNIT_DIVISORS[:1] if single_unit else _UNIT_DIVISORS
    # Holding more keeps a pipeline full; a single unit holds everything anyway.
    fills = num_stages > 1 and placement.subproblem.is_update
    # Bubbles depend on more than even costs: in a pipeline whole nodes may be the better cut.
    snaps = (snap, np.inf) if num_stages > 1 and snap != np.inf else (snap,)
    return [
        CutRule(factor, unit, held, snapped)
        for snapped, factor, unit in product(snaps, factors, units)
        for held in (_HELD_FACTORS if fills and unit > 1 else _HELD_FACTORS[:1])
    ]


def _fewest(rank_tree: RankTree) -> int:
    """Micro-batches that the token budget demands."""
    return -(
        -rank_tree.total_tokens
        // rank_tree.placement.problem.setup.planning.max_tokens_per_micro_batch
    )


def cut_rank(rank_tree: RankTree, rule: CutRule) -> IntArray:
    """Token bounds of a rank's micro-batches by one rule."""
    if not rank_tree.total_tokens:
        return np.zeros(1, np.int64)
    max_tokens = rank_tree.placement.problem.setup.planning.max_tokens_per_micro_batch
    micro_batch_s = rank_tree.total_s / min(
        num_micro_batches([rank_tree], rule), rank_tree.total_tokens
    )
    unit_s = max(rank_tree.total_s / rule.num_units, micro_batch_s) * (1.0 + 1e-9)
    starts = unit_starts(rank_tree, unit_s, micro_batch_s)
    return cut_units(rank_tree, starts, micro_batch_s, max_tokens, rule.snap)


def cut_in_step(rank_trees: Sequence[RankTree], rule: CutRule) -> list[IntArray]:
    """Bounds of equally many micro-batches on every rank, the cost of each rank in equal parts.

    A rank with fewer tokens than that has one token in each of its micro-batches, and fewer.
    """
    max_tokens = rank_trees[0].placement.problem.setup.planning.max_tokens_per_micro_batch
    count = num_micro_batches(rank_trees, rule)
    while True:
        cuts = [
            cut_exactly(rank_tree, rule.num_units, count, max_tokens, rule.snap)
            for rank_tree in rank_trees
        ]
        found = [cut for cut in cuts if cut is not None]
        if len(found) == len(rank_trees):
            return found
        count += 1 + count // 16


def num_micro_batches(rank_trees: Sequence[RankTree], rule: CutRule) -> int:
    """Micro-batches of each rank that a rule aims at."""
    return max(
        1, int(np.ceil(max(_fewest(rank_tree) for rank_tree in rank_trees) * rule.count_factor))
    )


def cut_all(rank_trees: Sequence[RankTree], rule: CutRule) -> list[IntArray]:
    """Bounds of ranks in step, or of one rank, by one rule."""
    return cut_in_step(rank_trees, rule) if len(rank_trees) > 1 else [cut_rank(rank_trees[0], rule)]
