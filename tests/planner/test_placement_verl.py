"""Karmarkar-Karp by hand, and veRL's sets of samples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psrl.planner.placement.verl import karmarkar_karp, verl_micro_batches, verl_ranks, workload


def sums_of(weights: list[int], sets: np.ndarray, count: int) -> list[int]:
    return sorted(np.bincount(sets, weights, minlength=count).astype(int).tolist())


def test_the_textbook_example() -> None:
    # Largest differencing of 4 5 6 7 8 into two sets leaves a difference of 2; the best is 0.
    weights = [4, 5, 6, 7, 8]
    assert sums_of(weights, karmarkar_karp(np.array(weights), 2), 2) == [14, 16]


def test_equal_sizes_pair_large_with_small() -> None:
    # Pairs (8, 7), (6, 5), (4, 3), merged with opposite signs.
    weights = [3, 4, 5, 6, 7, 8]
    sets = karmarkar_karp(np.array(weights), 2, equal_size=True)
    assert np.bincount(sets).tolist() == [3, 3]
    assert sums_of(weights, sets, 2) == [16, 17]


@given(
    weights=st.lists(st.integers(0, 1000), max_size=40),
    num_sets=st.integers(1, 7),
    equal_size=st.booleans(),
)
def test_every_item_is_in_one_set(weights: list[int], num_sets: int, equal_size: bool) -> None:
    sets = karmarkar_karp(np.array(weights, np.int64), num_sets, equal_size)
    assert len(sets) == len(weights)
    assert not len(sets) or (sets.min() >= 0 and sets.max() < num_sets)
    sizes = np.bincount(sets, minlength=num_sets)
    if equal_size:
        assert sizes.max() - sizes.min() <= 1


def test_one_big_sample_is_left_alone() -> None:
    sets = karmarkar_karp(np.array([100, 1, 2, 3]), 2)
    assert np.bincount(sets).tolist() in ([1, 3], [3, 1])


def test_workload_is_linear_plus_square() -> None:
    assert workload(np.array([0, 1, 10])).tolist() == [0, 24577, 245860]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
)
def test_micro_batches_keep_the_budget_and_long_samples_stand_alone(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    num_tokens = np.array(lengths)
    rank = verl_ranks(num_tokens, num_ranks)
    sets = verl_micro_batches(num_tokens, rank, num_ranks, max_tokens)
    for r, mine in enumerate(sets):
        members = np.sort(np.concatenate([*mine, np.empty(0, np.int64)]))
        assert np.array_equal(members, np.flatnonzero(rank == r))
        for samples in mine:
            assert num_tokens[samples].sum() <= max_tokens or len(samples) == 1


def test_all_ranks_get_as_many_micro_batches_as_the_largest() -> None:
    num_tokens = np.array([9, 1, 9, 1, 1, 1])
    rank = np.array([0, 1, 0, 1, 1, 1])
    sets = verl_micro_batches(num_tokens, rank, 2, 10)
    assert [len(mine) for mine in sets] == [2, 2]


def test_small_micro_batches_run_first_and_last() -> None:
    num_tokens = np.array([5, 6, 7, 8, 9])
    sets = verl_micro_batches(num_tokens, np.zeros(5, np.int64), 1, 9)
    assert [int(num_tokens[s].sum()) for s in sets[0]] == [5, 7, 9, 8, 6]
