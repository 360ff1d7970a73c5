"""The micro-batches of ranks in step, chosen among cuts by predicted pipeline time and memory."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from psrl.core.samples.sample import FloatArray, IntArray, StrArray
from psrl.planner.problem import PlanningProblem

from .activations import (
    ActivationBytes,
    activation_bytes,
    layer_forward_s,
    least_repeated,
    lowest_peak,
)
from .assemble import build_rank
from .built import BuiltRank, GroupProgram
from .cut_rules import CutRule, cut_all, num_micro_batches
from .expert_groups import run_in_step
from .rank_tree import RankTree
from .token_cuts import segments_of

# Candidates of each kind that may keep less, and the share of the time that they must be ahead
# of those that fit without.
_NUM_LIGHTER_CANDIDATES = 4
_WORTH_REPEATING = 0.01
# Share of the predicted time that all of the device memory is worth.
MEMORY_WEIGHT = 0.02


def cut_group(
    rank_trees: Sequence[RankTree], rule: CutRule, activation: StrArray | None = None
) -> GroupProgram:
    """Programs of ranks in step by one rule.

    Args:
        activation: per micro-batch, on all ranks; default what the set-up says.
    """
    return _programs(rank_trees, rule, cut_all(rank_trees, rule), activation)


def _programs(
    rank_trees: Sequence[RankTree],
    rule: CutRule,
    bounds: list[IntArray],
    activation: StrArray | None = None,
) -> GroupProgram:
    programs = []
    for rank_tree, mine in zip(rank_trees, bounds, strict=True):
        kept = None if activation is None else activation[: len(mine) - 1]
        programs.append(
            build_rank(
                rank_tree.placement,
                rank_tree.rank,
                segments_of(rank_tree, mine),
                activation=kept,
                held_factor=rule.held_factor,
            )
        )
    return run_in_step(programs, rank_trees[0].rank, rule.held_factor)


class _Cut(NamedTuple):
    """Bounds of ranks in step by a rule, and a time that they cannot beat."""

    rule: CutRule
    bounds: list[IntArray]
    least_s: float


def _distinct_cuts(rank_trees: Sequence[RankTree], rules: list[CutRule]) -> list[_Cut]:
    """The most promising first; of rules that cut the same, only the first."""
    by_aim: dict[tuple[float, ...], tuple[list[IntArray], float]] = {}
    distinct: dict[tuple[object, ...], _Cut] = {}
    for rule in rules:
        count = num_micro_batches(rank_trees, rule)
        # A unit is at least a micro-batch, so more units than those cut the same.
        aim = (count, min(rule.num_units, count), rule.snap)
        if aim not in by_aim:
            bounds = cut_all(rank_trees, rule)
            by_aim[aim] = bounds, least_time_s(rank_trees, bounds)
        bounds, least_s = by_aim[aim]
        key = (rule.held_factor, *(mine.tobytes() for mine in bounds))
        distinct.setdefault(key, _Cut(rule, bounds, least_s))
    return sorted(distinct.values(), key=lambda cut: cut.least_s)


def least_time_s(rank_trees: Sequence[RankTree], bounds: list[IntArray]) -> float:
    """No order of ops runs one phase of these micro-batches in less time; exact on one stage.

    The last stage runs all its ops, each as long as that of the slowest rank in step. Before, the
    first forward and its message come down from stage to stage; at the end some backward and its
    messages go back up to the first one. Nothing of the clock (`psrl.core.plan.clock`) shortens
    these ops and messages, and what else it says only makes them wait.
    """
    problem, is_update = (
        rank_trees[0].placement.problem,
        rank_trees[0].placement.subproblem.is_update,
    )
    cost, last = problem.cost_model, problem.num_stages - 1
    columns = [
        np.diff(rank_tree.sizes_before(mine))
        for rank_tree, mine in zip(rank_trees, bounds, strict=True)
    ]
    count = max(sizes.shape[1] for sizes in columns)
    if not count:
        return 0.0
    # [3, ranks, micro-batches]: tokens, pairs, predicted rows.
    sizes = np.stack([np.pad(s, ((0, 0), (0, count - s.shape[1]))) for s in columns], axis=1)
    repeats = problem.base_activation == "recompute"

    def forward_s(stage: int, chosen: slice) -> FloatArray:
        of_ranks = np.asarray(cost.stage_forward_s(stage, *sizes[..., chosen]), np.float64)
        slowest: FloatArray = of_ranks.max(axis=0)
        return slowest

    def backward_s(stage: int) -> FloatArray:
        of_ranks = np.asarray(cost.stage_backward_s(stage, *sizes), np.float64)
        if repeats:
            of_ranks = of_ranks + cost.stage_forward_s(stage, sizes[0], sizes[1], 0.0)
        slowest: FloatArray = of_ranks.max(axis=0)
        return slowest

    everything, only_first = slice(None), slice(1)
    least_s = float(forward_s(last, everything).sum())
    least_s += sum(float(forward_s(stage, only_first)[0]) for stage in range(last))
    if last:
        shape = sizes.shape[1:]
        message_s = np.broadcast_to(np.asarray(cost.message_s(sizes[0]), np.float64), shape)
        slowest_s = message_s.max(axis=0)
        least_s += last * float(slowest_s[0])
    if is_update:
        least_s += float(backward_s(last).sum())
        if last:
            back_s = np.sum([backward_s(stage) for stage in range(last)], axis=0)
            least_s += float((back_s + last * slowest_s).min())
    return least_s


class Choice(NamedTuple):
    """The chosen programs of ranks in step, their rule, and the rules that came next."""

    program: GroupProgram
    rules: list[CutRule]


def best_group_program(
    rank_trees: Sequence[RankTree], rules: list[CutRule], memory_weight: float
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
    problem, subproblem = rank_trees[0].placement.problem, rank_trees[0].placement.subproblem
    worth = memory_weight / problem.memory_limit_bytes
    least_factor = 1.0 + worth * problem.memory_model.static_bytes_on(
        problem.num_stages - 1, subproblem.is_update
    )
    best: _Candidate | None = None
    best_s = float("inf")

    def consider(c: _Candidate) -> None:
        nonlocal best, best_s
        if c.program.time_s * least_factor < best_s and c.program.fits:
            score_s = c.program.time_s * (1.0 + worth * c.program.peak_bytes)
            if score_s < best_s:
                best, best_s = c, score_s

    cuts = _distinct_cuts(rank_trees, rules)
    made: list[_Candidate] = []
    for cut in cuts:
        if cut.least_s * least_factor >= best_s:
            break
        made.append(_Candidate(cut.rule, cut.bounds, _programs(rank_trees, cut.rule, cut.bounds)))
        consider(made[-1])
    made.sort(key=lambda c: c.program.time_s)
    lighter: list[_Candidate] = []
    for c in _that_may_keep_less(made, problem, worth) if subproblem.is_update else ():
        if c.program.time_s * least_factor >= best_s or not c.program.num_micro_batches:
            break
        sizes = group_bytes(c.program.ranks)
        least_peak = worth * sizes.lowest_conceivable_bytes
        if c.program.time_s * (1.0 + least_peak) < best_s:
            lighter.append(c._replace(program=_keep_less(rank_trees, c, sizes)))
            consider(lighter[-1])
    if best is None:
        best = min([*made, *lighter], key=lambda c: c.program.peak_bytes)
    slower = [c.rule for c in made if c.program.time_s >= best.program.time_s]
    others = [*slower, *(cut.rule for cut in cuts[len(made) :])]
    return Choice(best.program, [best.rule, *(rule for rule in others if rule != best.rule)])


class _Candidate(NamedTuple):
    rule: CutRule
    bounds: list[IntArray]
    program: GroupProgram


def _that_may_keep_less(
    by_time: list[_Candidate], problem: PlanningProblem, worth: float
) -> list[_Candidate]:
    """Candidates, the fastest first, of which a variant that keeps less might be the best.

    Args:
        worth: share of the time that a byte is worth.
    """
    chosen = _worth_repeating(by_time)
    if problem.base_activation == "recompute":
        fast_s = by_time[0].program.time_s * (1.0 + worth * problem.memory_limit_bytes)
        fast = [c for c in by_time if c.program.time_s <= fast_s]
        fast.sort(key=lambda c: c.program.time_s * (1.0 + worth * c.program.peak_bytes))
        rules = {c.rule for c in [*chosen, *fast[:_NUM_LIGHTER_CANDIDATES]]}
        chosen = [c for c in by_time if c.rule in rules]
    return chosen


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


def _keep_less(
    rank_trees: Sequence[RankTree], candidate: _Candidate, sizes: ActivationBytes
) -> GroupProgram:
    """The same cut with the best choice of what its micro-batches keep."""
    problem = rank_trees[0].placement.problem
    if problem.base_activation == "recompute":
        activation = lowest_peak(sizes)
    else:
        programs = [r.program for r in candidate.program.ranks]
        again_s = layer_forward_s(programs, problem.cost_model, problem.num_stages)
        found = least_repeated(sizes, again_s, problem.memory_limit_bytes)
        # Where nothing fits, the numbers of the leanest choice are reported.
        activation = lowest_peak(sizes) if found is None else found.activation
    return _programs(rank_trees, candidate.rule, candidate.bounds, activation)


def group_bytes(ranks: Sequence[BuiltRank]) -> ActivationBytes:
    """What ranks in step hold, whatever their micro-batches keep."""
    placement = ranks[0].placement
    memory = placement.problem.memory_model
    return activation_bytes([r.program for r in ranks], placement.tree, memory)
