"""What micro-batches keep: the memory side equals the ledger's, the choice equals brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.planner import make_plan
from psrl.planner.micro_batching.activations import (
    ActivationBytes,
    layer_forward_s,
    least_repeated,
    lowest_peak,
)
from psrl.planner.micro_batching.best_cuts import cut_group, group_bytes
from psrl.planner.micro_batching.cut_rules import CutRule
from psrl.planner.micro_batching.rank_tree import RankTree, tree_of_rank
from psrl.planner.placement.placement import Placement
from tests.planner.cases import make_moe_setup, nasty_batch, problem_of, update_of, workloads

MODES = np.array(["keep", "recompute", "drop"])


def views_of(seed: int, num_ranks: int, num_stages: int, max_tokens: int) -> list[RankTree]:
    """Ranks in step with a random tree each."""
    batch = nasty_batch(seed, 8, longest=8)
    setup = make_moe_setup(num_ranks, num_stages, num_ranks, max_tokens=max_tokens)
    subproblem = update_of(batch, setup)
    rank = np.arange(batch.num_samples) % num_ranks
    placement = Placement(subproblem, rank, np.zeros(batch.num_samples, np.int64))
    return [tree_of_rank(placement, r) for r in range(num_ranks)]


@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.sampled_from([1, 2]),
    num_stages=st.sampled_from([1, 2, 4]),
    choice=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_bytes_of_any_choice_are_those_of_the_ledger(
    seed: int, num_ranks: int, num_stages: int, choice: int
) -> None:
    rank_trees = views_of(seed, num_ranks, num_stages, 6)
    rule = CutRule(1.0, 4, 1.5)
    kept = cut_group(rank_trees, rule)
    activation = np.random.default_rng(choice).choice(MODES, kept.num_micro_batches)
    chosen = cut_group(rank_trees, rule, activation)
    assert group_bytes(kept.ranks).usage(activation).max() == chosen.peak_bytes
    assert group_bytes(chosen.ranks).usage(activation).max() == chosen.peak_bytes


def small_case(seed: int, num_stages: int) -> tuple[ActivationBytes, np.ndarray]:
    rank_trees = views_of(seed, 1, num_stages, 14)
    (made,) = cut_group(rank_trees, CutRule(1.0, 2, 1.0)).ranks
    cost = rank_trees[0].placement.problem.cost_model
    return group_bytes([made]), layer_forward_s([made.program], cost, num_stages)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_the_least_repeated_work_equals_brute_force(seed: int, num_stages: int) -> None:
    sizes, again_s = small_case(seed, num_stages)
    count = len(again_s)
    assert 2 <= count <= 7
    choices = [np.array(c) for c in product(MODES, repeat=count)]
    peaks = np.array([sizes.usage(c).max() for c in choices])
    repeated = np.array([again_s[c != "keep"].sum() for c in choices])
    for share in (0.05, 0.3, 0.6, 0.9):
        limit = peaks.min() + share * (peaks.max() - peaks.min())
        found = least_repeated(sizes, again_s, limit)
        best = repeated[peaks <= limit].min()
        assert found is not None
        assert sizes.usage(found.activation).max() <= limit * (1.0 + 1e-6)
        assert best <= found.repeated_s * (1.0 + 1e-9) + 1e-12
        assert found.repeated_s <= best * 1.002 + 1e-12
        assert found.bound_s <= best * (1.0 + 1e-6)
        assert found.bound_s >= found.repeated_s * 0.998 - 1e-12
    assert least_repeated(sizes, again_s, peaks.min() * 0.999) is None


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_the_lowest_peak_equals_brute_force(seed: int, num_stages: int) -> None:
    sizes, again_s = small_case(seed, num_stages)
    choices = product(["recompute", "drop"], repeat=len(again_s))
    best = min(sizes.usage(np.array(c)).max() for c in choices)
    assert sizes.usage(lowest_peak(sizes)).max() <= best * 1.001


@pytest.mark.slow
def test_a_tight_memory_is_met_with_little_repeated_work() -> None:
    batch = workloads()["one_group"]
    setup = make_moe_setup(1, 2, max_tokens=512)
    roomy = make_plan(problem_of(batch, setup, ("update",)), "psrl")
    static = setup.cluster.device
    tight = static.model_copy(
        update={"memory_bytes": int(0.99 * roomy.predicted["peak_memory_bytes"] / 0.9)}
    )
    cluster = setup.cluster.model_copy(update={"device": tight})
    plan = make_plan(
        problem_of(batch, setup.model_copy(update={"cluster": cluster}), ("update",)), "psrl"
    )
    assert plan.predicted["makespan_s"] <= 1.1 * roomy.predicted["makespan_s"]
