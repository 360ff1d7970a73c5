"""The micro-batches of ranks in step, chosen among cuts by predicted pipeline time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from psrl.core.sample import StrArray

from .activations import (
    ActivationBytes,
    activation_bytes,
    layer_forward_s,
    least_repeated,
    lowest_peak,
)
from .assemble import RankProgram, rank_program
from .expert_groups import GroupProgram, run_in_step
from .layout import Pieces
from .token_cuts import (
    SNAP,
    RankView,
    cut_exactly,
    cut_units,
    pieces_of,
    unit_starts,
)

# Micro-batches per rank, as multiples of the fewest that the token budget allows; beyond some
# number per pipeline stage the idle share of a pipeline is small anyway.
_COUNT_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
_MAX_COUNT_PER_STAGE = 32
_MAX_FACTOR_WITHOUT_PIPELINE = 8.0
# Held tokens, as multiples of what the backward order forces.
_HELD_FACTORS = (1.0, 1.5, 2.0)
# Units per rank; one unit is a plain even cut.
_UNIT_DIVISORS = (1, 2, 4, 8, 16)
# Candidates of each kind that may keep less, and the share of the time that they must be ahead
# of those that fit without.
_NUM_LIGHTER_CANDIDATES = 4
_WORTH_REPEATING = 0.01
# Share of the predicted time that all of the device memory is worth.
MEMORY_WEIGHT = 0.02


@dataclass(frozen=True)
class CutRule:
    """How ranks in step are cut and run.

    Attributes:
        count_factor: micro-batches as a multiple of the fewest that the token budget allows.
        num_units: a unit costs at most this share of the rank.
        held_factor: see `rank_program`.
        snap: a cut moves to the end of a node within this share of a micro-batch's cost.
    """

    count_factor: float
    num_units: int
    held_factor: float
    snap: float = SNAP


def all_rules(
    views: Sequence[RankView], single_unit: bool = False, snap: float = SNAP
) -> list[CutRule]:
    """Candidates for ranks in step, plainest first."""
    layout = views[0].layout
    num_stages, fewest = layout.problem.num_stages, max(_fewest(view) for view in views)
    factors = [
        factor
        for factor in _COUNT_FACTORS
        if factor == 1.0 or fewest * factor <= _MAX_COUNT_PER_STAGE * num_stages
    ]
    if num_stages == 1:
        factors = [f for f in _COUNT_FACTORS if f <= _MAX_FACTOR_WITHOUT_PIPELINE]
    units = _UNIT_DIVISORS[:1] if single_unit else _UNIT_DIVISORS
    # Holding more keeps a pipeline full; a single unit holds everything anyway.
    fills = num_stages > 1 and layout.target.is_update
    return [
        CutRule(factor, unit, held, snap)
        for factor, unit in product(factors, units)
        for held in (_HELD_FACTORS if fills and unit > 1 else _HELD_FACTORS[:1])
    ]


def _fewest(view: RankView) -> int:
    """Micro-batches that the token budget demands."""
    return -(-view.total_tokens // view.layout.problem.setup.planning.max_tokens_per_micro_batch)


def cut_rank(view: RankView, rule: CutRule) -> Pieces:
    """Micro-batches of a rank by one rule."""
    empty = np.empty(0, np.int64)
    if not view.total_tokens:
        return Pieces(empty, empty, empty, empty)
    max_tokens = view.layout.problem.setup.planning.max_tokens_per_micro_batch
    count = min(int(np.ceil(_fewest(view) * rule.count_factor)), view.total_tokens)
    total_s = float(view.cost_before_s[-1])
    micro_batch_s = total_s / count
    unit_s = max(total_s / rule.num_units, micro_batch_s) * (1.0 + 1e-9)
    starts = unit_starts(view, unit_s, micro_batch_s)
    return pieces_of(view, cut_units(view, starts, micro_batch_s, max_tokens, rule.snap))


def cut_in_step(views: Sequence[RankView], rule: CutRule) -> list[Pieces]:
    """Equally many micro-batches on every rank, the cost of each rank in equal parts.

    A rank with fewer tokens than that has one token in each of its micro-batches, and fewer.
    """
    max_tokens = views[0].layout.problem.setup.planning.max_tokens_per_micro_batch
    count = max(1, int(np.ceil(max(_fewest(view) for view in views) * rule.count_factor)))
    while True:
        cuts = [cut_exactly(view, rule.num_units, count, max_tokens, rule.snap) for view in views]
        found = [cut for cut in cuts if cut is not None]
        if len(found) == len(views):
            return [pieces_of(view, cut) for view, cut in zip(views, found, strict=True)]
        count += 1 + count // 16


def cut_all(views: Sequence[RankView], rule: CutRule) -> list[Pieces]:
    """Micro-batches of ranks in step, or of one rank, by one rule."""
    return cut_in_step(views, rule) if len(views) > 1 else [cut_rank(views[0], rule)]


def cut_group(
    views: Sequence[RankView], rule: CutRule, activation: StrArray | None = None
) -> GroupProgram:
    """Programs of ranks in step by one rule.

    Args:
        activation: per micro-batch, on all ranks; default what the set-up says.
    """
    return _programs(views, rule, cut_all(views, rule), activation)


def _programs(
    views: Sequence[RankView],
    rule: CutRule,
    pieces: list[Pieces],
    activation: StrArray | None = None,
) -> GroupProgram:
    programs = []
    for view, mine in zip(views, pieces, strict=True):
        count = int(mine.micro_batch.max(initial=-1)) + 1
        kept = None if activation is None else activation[:count]
        programs.append(
            rank_program(
                view.layout, view.rank, mine, activation=kept, held_factor=rule.held_factor
            )
        )
    return run_in_step(programs, views[0].rank, rule.held_factor)


def _candidates(views: Sequence[RankView], rules: list[CutRule]) -> "list[_Candidate]":
    """Programs of all rules, the fastest first; of rules that cut the same, only the first."""
    made: dict[tuple[object, ...], _Candidate] = {}
    for rule in rules:
        pieces = cut_all(views, rule)
        key = (rule.held_factor, *(column.tobytes() for mine in pieces for column in mine))
        if key not in made:
            made[key] = _Candidate(rule, _programs(views, rule, pieces))
    return sorted(made.values(), key=lambda c: c.program.time_s)


@dataclass(frozen=True)
class Choice:
    """The chosen programs of ranks in step, their rule, and the rules that came next."""

    program: GroupProgram
    rules: list[CutRule]


def best_group_program(
    views: Sequence[RankView], rules: list[CutRule], memory_weight: float
) -> Choice:
    """The best candidate that fits the memory, by time and a little by memory.

    In an update, candidates that are clearly faster than those that fit keep less between forward
    and backward, such that they fit and repeat as little work as possible. Where layers are
    recomputed anyway, dropping costs no extra forward, so the fastest candidates also get the
    choice with the smallest peak. If nothing fits, the candidate with the smallest peak is
    returned, and the plan's check reports its numbers.

    Args:
        memory_weight: share of the time that all of the device memory is worth.
    """
    problem, target = views[0].layout.problem, views[0].layout.target
    limit_bytes = problem.memory_limit_bytes

    def score_s(c: _Candidate) -> float:
        return c.program.time_s * (1.0 + memory_weight * c.program.peak_bytes / limit_bytes)

    made = _candidates(views, rules)
    if target.is_update:
        lighter = _worth_repeating(made)
        if problem.base_activation == "recompute":
            chosen = {c.rule for c in [*lighter, *_fast(made, memory_weight)]}
            lighter = [c for c in made if c.rule in chosen]
        lighter = [_Candidate(c.rule, _keep_less(views, c)) for c in lighter]
        made = sorted([*made, *lighter], key=lambda c: c.program.time_s)
    fastest = next((c for c in made if c.program.fits), None)
    if fastest is None:
        best = min(made, key=lambda c: c.program.peak_bytes)
    else:
        # No saved memory makes up for more time than this, so the others need no replay.
        limit_s = fastest.program.time_s * (1.0 + memory_weight)
        close = [c for c in made if c.program.time_s <= limit_s and c.program.fits]
        best = min(close, key=score_s)
    others = [c.rule for c in made if c.program.time_s >= best.program.time_s and c is not best]
    return Choice(best.program, [best.rule, *others])


class _Candidate(NamedTuple):
    rule: CutRule
    program: GroupProgram


def _worth_repeating(by_time: list[_Candidate]) -> list[_Candidate]:
    """Candidates that do not fit but might be the best if they keep less.

    The fastest; if nothing fits, also the leanest, and those with the smallest micro-batches: a
    dropped micro-batch has all its activations when it runs again.
    """
    fitting_s = next((c.program.time_s for c in by_time if c.program.fits), None)
    few = slice(_NUM_LIGHTER_CANDIDATES)
    if fitting_s is not None:
        limit_s = fitting_s * (1.0 - _WORTH_REPEATING)
        return [c for c in by_time if c.program.time_s < limit_s][few]
    leanest = sorted(by_time, key=lambda c: c.program.peak_bytes)
    finest = sorted(by_time, key=lambda c: _largest_tokens(c.program))
    chosen = {c.rule for c in [*by_time[few], *leanest[few], *finest[few]]}
    return [c for c in by_time if c.rule in chosen]


def _largest_tokens(group: GroupProgram) -> int:
    return max(int(r.program.micro_batches.num_tokens.max(initial=0)) for r in group.ranks)


def _fast(by_time: list[_Candidate], memory_weight: float) -> list[_Candidate]:
    """Candidates whose time less memory could make up for."""
    limit_s = by_time[0].program.time_s * (1.0 + memory_weight)
    return [c for c in by_time if c.program.time_s <= limit_s]


def _keep_less(views: Sequence[RankView], candidate: _Candidate) -> GroupProgram:
    """The same cut with the best choice of what its micro-batches keep."""
    problem = views[0].layout.problem
    if not candidate.program.num_micro_batches:
        return candidate.program
    sizes = group_bytes(candidate.program.ranks)
    if problem.base_activation == "recompute":
        activation = lowest_peak(sizes)
    else:
        programs = [r.program for r in candidate.program.ranks]
        again_s = layer_forward_s(programs, problem.cost_model, problem.num_stages)
        found = least_repeated(sizes, again_s, problem.memory_limit_bytes)
        # Where nothing fits, the numbers of the leanest choice are reported.
        activation = lowest_peak(sizes) if found is None else found.activation
    return cut_group(views, candidate.rule, activation)


def group_bytes(ranks: Sequence[RankProgram]) -> ActivationBytes:
    """What ranks in step hold, whatever their micro-batches keep."""
    layout = ranks[0].layout
    memory = layout.problem.memory_model
    return activation_bytes([r.program for r in ranks], layout.tree, memory)
