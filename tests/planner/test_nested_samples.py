"""Samples inside others leave the heaviest rank where that helps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.samples.sample import make_batch
from psrl.planner.placement.nested_samples import move_nested_samples
from tests.planner.cases import make_setup, nasty_batch, update_of
from tests.planner.placement_oracle import PlacementOracle


def test_an_idle_rank_trains_the_inner_sample_of_a_chain() -> None:
    # A short path with many predicted rows inside a long one: with 2 ranks nobody else is there.
    batch = make_batch([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]], [[(1, 3)], [(7, 8)]])
    subproblem = update_of(batch, make_setup(2))
    together = np.zeros(2, np.int64)
    moved = move_nested_samples(subproblem, together, 0.0)
    assert moved.tolist() == [1, 0]
    assert together.tolist() == [0, 0]
    assert move_nested_samples(subproblem, together, 1.0).tolist() == [0, 0]


@given(seed=st.integers(0, 10_000), num_samples=st.integers(1, 9), num_ranks=st.integers(1, 4))
@settings(max_examples=40)
def test_moves_never_raise_the_heaviest_rank(seed: int, num_samples: int, num_ranks: int) -> None:
    subproblem = update_of(nasty_batch(seed, num_samples), make_setup(num_ranks))
    rank = np.random.default_rng(seed).integers(num_ranks, size=num_samples + 1)
    before = PlacementOracle(subproblem).worst_s(rank.tolist())
    moved = move_nested_samples(subproblem, rank, 0.0)
    after = PlacementOracle(subproblem).worst_s(moved.tolist())
    assert after <= before * (1.0 + 1e-9)
