"""The `verl` policy balances as the veRL package does; runs where that is installed."""

import numpy as np
import pytest

from psrl.planner.placement.verl import karmarkar_karp, verl_micro_batches, verl_ranks, workload

verl = pytest.importorskip(
    "verl.utils.seqlen_balancing", reason="the veRL package", exc_type=ImportError
)
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.verl


def lengths(seed: int, count: int) -> np.ndarray:
    """Distinct long-tailed lengths: with ties, equally good partitions differ."""
    rng = np.random.default_rng(seed)
    drawn = np.unique((rng.lognormal(7.0, 0.9, 3 * count)).astype(np.int64) + 1)
    return rng.choice(drawn, count, replace=False)


def sums(weights: np.ndarray, sets: list[list[int]]) -> list[int]:
    return sorted(int(weights[np.array(s, np.int64)].sum()) for s in sets)


def as_sets(set_of: np.ndarray, count: int) -> list[list[int]]:
    return [np.flatnonzero(set_of == i).tolist() for i in range(count)]


def test_the_workload_is_the_same() -> None:
    num_tokens = lengths(0, 50)
    theirs = verl.calculate_workload(torch.from_numpy(num_tokens))
    assert workload(num_tokens).tolist() == theirs.long().tolist()


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("num_sets", [2, 8, 32])
@pytest.mark.parametrize("seed", range(5))
def test_partitions_have_the_same_sums(seed: int, num_sets: int, equal_size: bool) -> None:
    weights = workload(lengths(seed, 256))
    theirs = verl.get_seqlen_balanced_partitions(weights.tolist(), num_sets, equal_size)
    ours = as_sets(karmarkar_karp(weights, num_sets, equal_size), num_sets)
    assert sums(weights, ours) == sums(weights, theirs)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_hold_the_same_samples(seed: int) -> None:
    num_tokens = lengths(seed, 128)
    theirs = verl.get_seqlen_balanced_partitions(workload(num_tokens).tolist(), 8, True)
    ours = as_sets(verl_ranks(num_tokens, 8), 8)
    assert sorted(sorted(s) for s in ours) == sorted(sorted(s) for s in theirs)


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_are_as_many_and_as_heavy(seed: int) -> None:
    from tensordict import TensorDict

    num_tokens = lengths(seed, 64)
    width, budget = int(num_tokens.max()), int(4 * num_tokens.max())
    mask = torch.arange(width)[None, :] < torch.from_numpy(num_tokens)[:, None]
    batch = TensorDict({"input_ids": mask.long(), "attention_mask": mask.long()}, batch_size=[64])
    _, theirs = verl.rearrange_micro_batches(batch, max_token_len=budget)
    (ours,) = verl_micro_batches(num_tokens, np.zeros(64, np.int64), 1, budget)
    # Ours are split once more where theirs exceed the token budget.
    if max(int(num_tokens[np.array(s)].sum()) for s in theirs) <= budget:
        weights = workload(num_tokens)
        assert sums(weights, [s.tolist() for s in ours]) == sums(weights, theirs)
    else:
        assert len(ours) > len(theirs)
