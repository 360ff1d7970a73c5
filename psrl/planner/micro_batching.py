"""The micro-batches of one rank, chosen among cuts by predicted pipeline time and memory."""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from psrl.core.sample import IntArray, StrArray
from psrl.core.schedule import Op

from .assemble import RankProgram, rank_program
from .layout import Pieces
from .token_cuts import RankView, cut_units, pieces_of, unit_starts

# Micro-batches per rank, as multiples of the fewest that the token budget allows; beyond some
# number per pipeline stage the idle share of a pipeline is small anyway.
_COUNT_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
_MAX_COUNT_PER_STAGE = 32
_MAX_FACTOR_WITHOUT_PIPELINE = 8.0
# Held tokens, as multiples of what the backward order forces.
_HELD_FACTORS = (1.0, 1.5, 2.0)
# Units per rank; one unit is a plain even cut.
_UNIT_DIVISORS = (1, 2, 4, 8, 16)
# Candidates of each kind whose activations may be dropped, and the share of the time that they
# must be ahead of those that fit without.
_NUM_DROPPED_CANDIDATES = 4
_WORTH_DROPPING = 0.01
# Share of the predicted time that all of the device memory is worth.
MEMORY_WEIGHT = 0.02


@dataclass(frozen=True)
class CutRule:
    """How a rank is cut and run.

    Attributes:
        count_factor: micro-batches as a multiple of the fewest that the token budget allows.
        num_units: a unit costs at most this share of the rank.
        held_factor: see `rank_program`.
    """

    count_factor: float
    num_units: int
    held_factor: float


def all_rules(view: RankView, single_unit: bool = False) -> list[CutRule]:
    """Candidates for a rank, plainest first."""
    num_stages, fewest = view.layout.problem.num_stages, _fewest(view)
    factors = [
        factor
        for factor in _COUNT_FACTORS
        if factor == 1.0 or fewest * factor <= _MAX_COUNT_PER_STAGE * num_stages
    ]
    if num_stages == 1:
        factors = [f for f in _COUNT_FACTORS if f <= _MAX_FACTOR_WITHOUT_PIPELINE]
    units = _UNIT_DIVISORS[:1] if single_unit else _UNIT_DIVISORS
    # Holding more keeps a pipeline full; a single unit holds everything anyway.
    fills = num_stages > 1 and view.layout.target.is_update
    return [
        CutRule(factor, unit, held)
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
    return pieces_of(view, cut_units(view, starts, micro_batch_s, max_tokens))


@dataclass(frozen=True)
class Choice:
    """The chosen program of a rank, its rule, and the rules that came next."""

    program: RankProgram
    rules: list[CutRule]


def cut_program(view: RankView, rule: CutRule, activation: StrArray | None = None) -> RankProgram:
    """A rank's program by one rule."""
    pieces = cut_rank(view, rule)
    return rank_program(
        view.layout, view.rank, pieces, activation=activation, held_factor=rule.held_factor
    )


def best_rank_program(view: RankView, rules: list[CutRule], memory_weight: float) -> Choice:
    """The best candidate that fits the memory, by time and a little by memory.

    In an update, candidates that are clearly faster than those that fit drop the activations of
    long-held micro-batches until they fit. Where layers are recomputed anyway, dropping
    everything costs no extra forward, so the fastest candidates are tried that way too. If
    nothing fits, the candidate with the smallest peak is returned, and the plan's check reports
    its numbers.

    Args:
        memory_weight: share of the time that all of the device memory is worth.
    """
    limit_bytes = view.layout.problem.memory_limit_bytes

    def score_s(c: _Candidate) -> float:
        return c.program.time_s * (1.0 + memory_weight * c.program.peak_bytes / limit_bytes)

    made = [_Candidate(rule, cut_program(view, rule)) for rule in rules]
    made.sort(key=lambda c: c.program.time_s)
    if view.layout.target.is_update:
        dropped = [_Candidate(c.rule, _drop_until_it_fits(view, c)) for c in _worth_dropping(made)]
        if view.layout.problem.base_activation == "recompute":
            dropped += [_Candidate(c.rule, _drop_all(view, c)) for c in _fast(made, memory_weight)]
        made = sorted([*made, *dropped], key=lambda c: c.program.time_s)
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
    program: RankProgram


def _worth_dropping(by_time: list[_Candidate]) -> list[_Candidate]:
    """Candidates that do not fit but might be the best with dropped activations.

    The fastest; if nothing fits, also the leanest, and those with the smallest micro-batches: a
    dropped micro-batch has all its activations when it runs again.
    """
    fitting_s = next((c.program.time_s for c in by_time if c.program.fits), None)
    few = slice(_NUM_DROPPED_CANDIDATES)
    if fitting_s is not None:
        limit_s = fitting_s * (1.0 - _WORTH_DROPPING)
        return [c for c in by_time if c.program.time_s < limit_s][few]
    leanest = sorted(by_time, key=lambda c: c.program.peak_bytes)
    finest = sorted(by_time, key=lambda c: _largest_tokens(c.program))
    chosen = {c.rule for c in [*by_time[few], *leanest[few], *finest[few]]}
    return [c for c in by_time if c.rule in chosen]


def _largest_tokens(program: RankProgram) -> int:
    return int(program.program.micro_batches.num_tokens.max(initial=0))


def _fast(by_time: list[_Candidate], memory_weight: float) -> list[_Candidate]:
    """Candidates whose time less memory could make up for."""
    limit_s = by_time[0].program.time_s * (1.0 + memory_weight)
    return [c for c in by_time if c.program.time_s <= limit_s]


def _drop_all(view: RankView, candidate: _Candidate) -> RankProgram:
    count = len(candidate.program.program.micro_batches)
    return cut_program(view, candidate.rule, np.full(count, "drop", "<U9"))


def _drop_until_it_fits(view: RankView, candidate: _Candidate) -> RankProgram:
    """Drop the activations of the fewest micro-batches, those held longest first."""
    held = _held_token_ops(candidate.program)
    longest = np.argsort(-held, kind="stable")

    def with_dropped(count: int) -> RankProgram:
        activation = np.full(len(held), view.layout.problem.base_activation, "<U9")
        activation[longest[:count]] = "drop"
        return cut_program(view, candidate.rule, activation)

    enough, too_few = len(held), 0
    best = with_dropped(enough)
    while best.fits and enough - too_few > 1:
        middle = (too_few + enough) // 2
        program = with_dropped(middle)
        if program.fits:
            enough, best = middle, program
        else:
            too_few = middle
    return best


def _held_token_ops(kept: RankProgram) -> IntArray:
    """Tokens of each micro-batch times the ops between its forward and its backward."""
    table = kept.program.micro_batches
    at = {op: i for i, op in enumerate(kept.program.ops())}
    waits = [at[Op("backward", m)] - at[Op("forward", m)] for m in range(len(table))]
    return np.array(waits, np.int64) * table.num_tokens
