"""The scheduling policies: each decides one program, as a pure function of its samples.

docs/policies.md has the table. To add one: write the function, add it to `POLICIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from psrl.core.sample import IntArray

from .assemble import BuiltProgram
from .layout import Layout
from .placement_greedy import (
    first_fit_tries,
    group_ranks,
    longest_prefix_ranks,
    unique_cost_ranks,
)
from .placement_tree import dfs_cut_leaves, two_level_leaves
from .placement_verl import verl_micro_batches, verl_ranks
from .problem import ProgramProblem
from .rank_micro_batches import sample_sets, token_cuts, work_s


@dataclass(frozen=True, eq=False)
class Draft:
    """Samples on ranks, and how to make the rest when it is wanted."""

    layout: Layout
    build: Callable[[], BuiltProgram]


Policy = Callable[[ProgramProblem], Draft]


def verl(target: ProgramProblem) -> Draft:
    """No sharing: veRL's balancing of samples over ranks and micro-batches."""
    rank = verl_ranks(target.samples.num_tokens, target.problem.num_ranks)
    layout = Layout(target, rank, np.arange(target.samples.num_samples))
    return Draft(layout, lambda: sample_sets(layout, _verl_sets(layout), "dynamic"))


def sglang_ps(target: ProgramProblem) -> Draft:
    """veRL's micro-batches; tokens that the rank has computed are read from a cache kept whole."""
    return _verl_with_cache(target, 1)


def vllm_ps(target: ProgramProblem) -> Draft:
    """As `sglang_ps`, but prefixes are shared and cached in blocks of 16 tokens."""
    return _verl_with_cache(target, 16)


def sharing_agnostic(target: ProgramProblem) -> Draft:
    """veRL's ranks, our micro-batches and caching."""
    rank = verl_ranks(target.samples.num_tokens, target.problem.num_ranks)
    return _with_our_cuts(target, rank)


def prefix_match_first(target: ProgramProblem) -> Draft:
    """Each group to the rank that holds its longest prefix, our micro-batches and caching."""
    groups, num_ranks = target.samples.group_id, target.problem.num_ranks
    rank = longest_prefix_ranks(target.tree, target.cost_tree, groups, num_ranks)
    return _with_our_cuts(target, rank)


def balance_first(target: ProgramProblem) -> Draft:
    """Each sample to the least loaded rank, our micro-batches and caching."""
    return _with_our_cuts(target, unique_cost_ranks(target.cost_tree, target.problem.num_ranks))


def first_fit(target: ProgramProblem) -> Draft:
    """AReaL's tries: whole groups to ranks, first-fit packing, sharing inside a micro-batch."""
    samples, num_ranks = target.samples, target.problem.num_ranks
    rank = group_ranks(samples.group_id, samples.num_tokens, num_ranks)
    sets = first_fit_tries(target.tree, rank, num_ranks, _max_tokens(target))
    share_key = np.empty(samples.num_samples, np.int64)
    for number, members in enumerate(trie for tries in sets for trie in tries):
        share_key[members] = number
    layout = Layout(target, rank, share_key)
    return Draft(layout, lambda: sample_sets(layout, sets, "dynamic"))


def dfs_cut(target: ProgramProblem) -> Draft:
    """AReaL-DTA's contiguous depth-first cut over ranks, plain even cuts inside a rank."""
    leaf_rank = dfs_cut_leaves(target.cost_tree, target.problem.num_ranks)
    layout = _shared(target, leaf_rank[target.cost_tree.leaf_of_sample])
    return Draft(layout, lambda: token_cuts(layout, single_unit=True))


def psrl(target: ProgramProblem) -> Draft:
    """Two-level placement, cuts in units, dropped activations where memory demands it."""
    planning, tree = target.problem.setup.planning, target.cost_tree
    leaf_rank = two_level_leaves(
        tree,
        target.problem.num_ranks,
        target.rank_cost_bound_s,
        planning.search_iterations,
        planning.seed,
    )
    layout = _shared(target, leaf_rank[tree.leaf_of_sample])
    return Draft(layout, lambda: _fastest(layout))


def _fastest(layout: Layout) -> BuiltProgram:
    """Our plan of a layout, or the plan of another policy where that is faster."""
    target, ours = layout.target, token_cuts(layout)
    nothing_to_share = target.tree.unique_tokens == target.samples.logical_tokens
    if ours.fits and nothing_to_share and ours.time_s <= 1.01 * target.rank_cost_bound_s:
        return ours
    rivals = []
    for policy in POLICIES.values():
        draft = policy(target) if policy is not psrl else None
        # Work on the slowest rank is a lower bound on the time: most rivals are ruled out by it.
        if draft is not None and (not ours.fits or work_s(draft.layout) < ours.time_s):
            rivals.append(draft.build())
    better = [r for r in rivals if r.fits and (not ours.fits or r.time_s < ours.time_s)]
    if better and ours.fits:
        # The fastest cuts may win where saving memory has cost a little time.
        better.append(token_cuts(layout, memory_weight=0.0))
    return min(better, key=lambda built: built.time_s, default=ours)


def _with_our_cuts(target: ProgramProblem, rank: IntArray) -> Draft:
    layout = _shared(target, rank)
    return Draft(layout, lambda: token_cuts(layout))


def _verl_with_cache(target: ProgramProblem, granularity_tokens: int) -> Draft:
    rank = verl_ranks(target.samples.num_tokens, target.problem.num_ranks)
    layout = Layout(target, rank, np.zeros(len(rank), np.int64), granularity_tokens)
    return Draft(layout, lambda: sample_sets(layout, _verl_sets(layout), "everything"))


def _verl_sets(layout: Layout) -> list[list[IntArray]]:
    target = layout.target
    return verl_micro_batches(
        target.samples.num_tokens, layout.rank, target.problem.num_ranks, _max_tokens(target)
    )


def _shared(target: ProgramProblem, rank: IntArray) -> Layout:
    return Layout(target, rank, np.zeros(len(rank), np.int64))


def _max_tokens(target: ProgramProblem) -> int:
    return target.problem.setup.planning.max_tokens_per_micro_batch


POLICIES: dict[str, Policy] = {
    "verl": verl,
    "sglang_ps": sglang_ps,
    "vllm_ps": vllm_ps,
    "sharing_agnostic": sharing_agnostic,
    "prefix_match_first": prefix_match_first,
    "balance_first": balance_first,
    "first_fit": first_fit,
    "dfs_cut": dfs_cut,
    "psrl": psrl,
}
