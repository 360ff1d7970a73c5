"""The scheduling policies: each decides one program, as a pure function of its samples.

docs/policies.md has the table, and says how to add one, in psRL or outside.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from psrl.core.plan.bound import Bound
from psrl.core.samples.sample import IntArray
from psrl.planner.micro_batching.all_ranks import least_even_cuts_s, sample_sets, token_cuts, work_s
from psrl.planner.micro_batching.built import BuiltProgram
from psrl.planner.placement.greedy import (
    first_fit_tries,
    group_ranks,
    longest_prefix_ranks,
    unique_cost_ranks,
)
from psrl.planner.placement.placement import Placement, shared_placement
from psrl.planner.placement.search import optimal_ranks, psrl_ranks
from psrl.planner.placement.two_level import dfs_cut_leaves
from psrl.planner.placement.verl import verl_micro_batches, verl_ranks
from psrl.planner.problem import ProgramProblem

# Times that differ by less are equal: they add up the same ops in another order.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Draft:
    """Samples on ranks, and how to make the rest when it is wanted.

    Attributes:
        proven: a bound above the program's own, if the policy found one.
    """

    placement: Placement
    build: Callable[[], BuiltProgram]
    proven: Bound | None = None

    @property
    def bound(self) -> Bound:
        """The best proven lower bound on the work of the most loaded rank."""
        known = self.placement.subproblem.bound
        return known if self.proven is None else self.proven


Policy = Callable[[ProgramProblem], Draft]


def verl(subproblem: ProgramProblem) -> Draft:
    """No sharing: veRL's balancing of samples over ranks and micro-batches."""
    rank = _verl_place(subproblem)
    placement = Placement(subproblem, rank, np.arange(subproblem.samples.num_samples))
    return Draft(placement, lambda: sample_sets(placement, _verl_sets(placement), "dynamic"))


def sglang_ps(subproblem: ProgramProblem) -> Draft:
    """veRL's micro-batches; tokens that the rank has computed are read from a cache kept whole."""
    return _verl_with_cache(subproblem, 1)


def vllm_ps(subproblem: ProgramProblem) -> Draft:
    """As `sglang_ps`, but prefixes are shared and cached in blocks of 16 tokens."""
    return _verl_with_cache(subproblem, 16)


def sharing_agnostic(subproblem: ProgramProblem) -> Draft:
    """veRL's ranks, our micro-batches and caching."""
    return with_our_cuts(subproblem, _verl_place(subproblem))


def prefix_match_first(subproblem: ProgramProblem) -> Draft:
    """Each group to the rank that holds its longest prefix, our micro-batches and caching."""
    return with_our_cuts(subproblem, _prefix_place(subproblem))


def balance_first(subproblem: ProgramProblem) -> Draft:
    """Each sample to the least loaded rank, our micro-batches and caching."""
    return with_our_cuts(subproblem, _balanced_place(subproblem))


def first_fit(subproblem: ProgramProblem) -> Draft:
    """AReaL's tries: whole groups to ranks, first-fit packing, sharing inside a micro-batch."""
    samples, num_ranks = subproblem.samples, subproblem.problem.num_ranks
    rank = _group_place(subproblem)
    sets = first_fit_tries(subproblem.tree, rank, num_ranks, _max_tokens(subproblem))
    share_key = np.empty(samples.num_samples, np.int64)
    for number, members in enumerate(trie for tries in sets for trie in tries):
        share_key[members] = number
    placement = Placement(subproblem, rank, share_key)
    return Draft(placement, lambda: sample_sets(placement, sets, "dynamic"))


def dfs_cut(subproblem: ProgramProblem) -> Draft:
    """AReaL-DTA's contiguous depth-first cut over ranks, plain even cuts inside a rank."""
    placement = shared_placement(subproblem, _contiguous_place(subproblem))
    return Draft(placement, lambda: token_cuts(placement, single_unit=True))


def quick(subproblem: ProgramProblem) -> Draft:
    """psRL's placement without search or the contiguous cut, plain even cuts inside a rank.

    The faster of both, so never slower than `dfs_cut`; for use inside a training step.
    """
    placement = shared_placement(subproblem, _quick_place(subproblem))
    contiguous = shared_placement(subproblem, _contiguous_place(subproblem))

    def build() -> BuiltProgram:
        found = [token_cuts(placement, single_unit=True)]
        if not np.array_equal(placement.rank, contiguous.rank):
            best_s = found[0].time_s if found[0].fits else np.inf
            if least_even_cuts_s(contiguous) < best_s:
                found.append(token_cuts(contiguous, single_unit=True))
        fits = any(built.fits for built in found)
        return _fastest_of(found) if fits else token_cuts(placement)

    return Draft(placement, build)


def psrl(subproblem: ProgramProblem) -> Draft:
    """Two-level placement, cuts in units, dropped activations where memory demands it."""
    num_iterations = subproblem.problem.setup.planning.search_iterations
    placement = shared_placement(subproblem, psrl_ranks(subproblem, num_iterations))
    return Draft(placement, lambda: _fastest(placement))


def optimal(subproblem: ProgramProblem) -> Draft:
    """As `psrl`, with OR-Tools: proven best where there are few samples, else never worse."""
    ours = psrl(subproblem)
    rank, proven = optimal_ranks(subproblem, ours.placement.rank)
    if np.array_equal(rank, ours.placement.rank):
        return Draft(ours.placement, ours.build, proven)
    placement = shared_placement(subproblem, rank)

    def build() -> BuiltProgram:
        return _fastest_of([token_cuts(placement), ours.build()])

    return Draft(placement, build, proven)


def _fastest_of(built: list[BuiltProgram]) -> BuiltProgram:
    """The fastest that fits, the first of equals; if none fits, the last."""
    return min((b for b in built if b.fits), key=lambda b: b.time_s, default=built[-1])


def _fastest(placement: Placement) -> BuiltProgram:
    """Our plan of a placement, or the plan of another policy where that is faster."""
    subproblem, ours = placement.subproblem, token_cuts(placement)
    nothing_to_share = subproblem.tree.unique_tokens == subproblem.samples.logical_tokens
    if ours.fits and nothing_to_share and ours.time_s <= 1.01 * subproblem.rank_cost_bound_s:
        return ours
    limit_s = ours.time_s * (1.0 - _ROUNDING) if ours.fits else np.inf
    rivals = []
    for place, policies in _RIVALS:
        # Work on the slowest rank, with all possible sharing, is a lower bound on the time of
        # all policies that place samples so: most are ruled out by it.
        if work_s(shared_placement(subproblem, place(subproblem))) < limit_s:
            drafts = (policy(subproblem) for policy in policies)
            rivals += [d.build() for d in drafts if work_s(d.placement) < limit_s]
    better = [r for r in rivals if r.fits and r.time_s < limit_s]
    if better and ours.fits:
        # The fastest cuts may win where saving memory has cost a little time.
        better.append(token_cuts(placement, memory_weight=0.0))
    return min(better, key=lambda built: built.time_s, default=ours)


def with_our_cuts(subproblem: ProgramProblem, rank: IntArray) -> Draft:
    """Given ranks of the samples, our micro-batches and caching."""
    placement = shared_placement(subproblem, rank)
    return Draft(placement, lambda: token_cuts(placement))


def _verl_with_cache(subproblem: ProgramProblem, granularity_tokens: int) -> Draft:
    rank = _verl_place(subproblem)
    placement = Placement(subproblem, rank, np.zeros(len(rank), np.int64), granularity_tokens)
    return Draft(placement, lambda: sample_sets(placement, _verl_sets(placement), "everything"))


def _verl_sets(placement: Placement) -> list[list[IntArray]]:
    subproblem = placement.subproblem
    return verl_micro_batches(
        subproblem.samples.num_tokens,
        placement.rank,
        subproblem.problem.num_ranks,
        _max_tokens(subproblem),
    )


def _verl_place(subproblem: ProgramProblem) -> IntArray:
    return verl_ranks(subproblem.samples.num_tokens, subproblem.problem.num_ranks)


def _prefix_place(subproblem: ProgramProblem) -> IntArray:
    groups, num_ranks = subproblem.samples.group_id, subproblem.problem.num_ranks
    return longest_prefix_ranks(subproblem.tree, subproblem.cost_tree, groups, num_ranks)


def _balanced_place(subproblem: ProgramProblem) -> IntArray:
    return unique_cost_ranks(subproblem.cost_tree, subproblem.problem.num_ranks)


def _group_place(subproblem: ProgramProblem) -> IntArray:
    samples = subproblem.samples
    return group_ranks(samples.group_id, samples.num_tokens, subproblem.problem.num_ranks)


def _contiguous_place(subproblem: ProgramProblem) -> IntArray:
    leaf_rank = dfs_cut_leaves(subproblem.cost_tree, subproblem.problem.num_ranks)
    return leaf_rank[subproblem.cost_tree.leaf_of_sample]


def _quick_place(subproblem: ProgramProblem) -> IntArray:
    """The contiguous cut, or psRL's placement without search if its slowest rank has less work."""
    ranks = (_contiguous_place(subproblem), psrl_ranks(subproblem, num_iterations=0))
    return min(ranks, key=lambda rank: work_s(shared_placement(subproblem, rank)))


def _max_tokens(subproblem: ProgramProblem) -> int:
    return subproblem.problem.setup.planning.max_tokens_per_micro_batch


POLICIES: dict[str, Policy] = {
    "verl": verl,
    "sglang_ps": sglang_ps,
    "vllm_ps": vllm_ps,
    "sharing_agnostic": sharing_agnostic,
    "prefix_match_first": prefix_match_first,
    "balance_first": balance_first,
    "first_fit": first_fit,
    "dfs_cut": dfs_cut,
    "quick": quick,
    "psrl": psrl,
    "optimal": optimal,
}

# Samples to ranks, and the policies that place them so.
_RIVALS: tuple[tuple[Callable[[ProgramProblem], IntArray], tuple[Policy, ...]], ...] = (
    (_verl_place, (verl, sglang_ps, vllm_ps, sharing_agnostic)),
    (_prefix_place, (prefix_match_first,)),
    (_balanced_place, (balance_first,)),
    (_group_place, (first_fit,)),
    (_quick_place, (quick,)),  # never slower than dfs_cut
)
