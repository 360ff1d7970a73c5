"""Sharing changes no result: logprobs, loss and every gradient equal those of samples alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.train.kv_store import BlockStore
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.samples.sample import make_batch
from tests.backend.cases import (
    ACTIVATIONS,
    TINY,
    Case,
    Outcome,
    compare_alone,
    make_case,
    relative_error,
    run_alone,
    run_case,
    run_cases,
    single_process,
)

SEEDS = range(24)


def largest(errors: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(e[name] for e in errors) for name in errors[0]}


@pytest.mark.slow
def test_random_plans_equal_samples_alone_in_fp64() -> None:
    errors = largest(run_ranks(compare_alone, 1, SEEDS, torch.float64)[0])
    assert max(errors.values()) <= 1e-10, errors


def test_the_cases_are_hard() -> None:
    """They fork, share trained tokens, read caches, cut nodes and clip ratios."""
    seen = dict.fromkeys((*ACTIVATIONS, "cached", "duplicate", "one_row", "inside"), 0)
    for seed in SEEDS:
        planned = make_case(seed).planned
        program, tree, edges = planned.program, planned.tree, planned.edges(0)
        for activation in ACTIVATIONS:
            seen[activation] += activation in program.micro_batches.activation
        seen["cached"] += len(program.blocks) > 0
        seen["duplicate"] += len(np.unique(tree.sample_node)) < planned.batch.num_samples
        rows = np.stack([edges.micro_batch, edges.row])
        seen["one_row"] += np.unique(rows, axis=1).shape[1] < rows.shape[1]
        is_parent = np.isin(tree.sample_node, tree.parent)
        seen["inside"] += bool(is_parent.any())
    assert min(seen.values()) >= 5, seen


class LossyStore(BlockStore):
    """Loses what readers add."""

    def add_gradient(
        self, block: int, layer: int, start: int, end: int, dk: Tensor, dv: Tensor
    ) -> None:
        super().add_gradient(block, layer, start, end, 0 * dk, 0 * dv)


def lossy(seeds: range) -> list[dict[str, float]]:
    return compare_alone(seeds, torch.float64, store_class=LossyStore)


def test_losing_readers_gradients_is_noticed() -> None:
    errors = run_ranks(lossy, 1, range(8))[0]
    assert sum(e["gradient"] > 1e-4 for e in errors) >= 4, errors
    assert max(e["logprob"] for e in errors) <= 1e-10


def check_parallel(parallel: ParallelConfig, seeds: range) -> None:
    dp = parallel.data_parallel_size
    wanted = run_ranks(run_alone, 1, seeds, torch.float32, dp)[0]
    found = run_ranks(run_cases, parallel.world_size, seeds, torch.float32, parallel)
    for outcomes in found:
        pairs = zip(outcomes, wanted, strict=True)
        errors = largest([relative_error(f, w) for f, w in pairs])
        assert errors["gradient"] <= 5e-6, errors
        assert errors["loss"] <= 5e-6, errors
        assert errors["logprob"] <= 2e-5, errors


@pytest.mark.slow
def test_tensor_parallel_equals_samples_alone() -> None:
    check_parallel(ParallelConfig(tensor_model_parallel_size=2), range(8))


def test_data_parallel_equals_samples_alone() -> None:
    check_parallel(ParallelConfig(data_parallel_size=2), range(8))


def branching_case(branch: int) -> Case:
    """Three samples: a fork after four tokens, and again; `branch` are the tokens of one side."""
    tokens = [[1, 2, 3, 4, branch, branch + 1, 9], [1, 2, 3, 4, 30, 31], [1, 2, 3, 4, 30, 32, 5]]
    batch = make_batch(list(map(np.array, tokens)), [[(1, len(t))] for t in tokens])
    planned = single_process(batch, seed=5, activations=ACTIVATIONS)
    case = make_case(0)
    count = batch.loss_tokens
    inputs = replace(
        case.inputs, old_logprob=np.full(count, -4.0), reference_logprob=np.zeros(count)
    )
    return Case(planned, TINY, inputs, case.loss)


def run_branches(branches: list[int]) -> list[Outcome]:
    with model_parallel(ParallelConfig()):
        return [run_case(branching_case(branch), torch.float32) for branch in branches]


def test_tokens_of_one_branch_do_not_touch_the_others() -> None:
    first, second = run_ranks(run_branches, 1, [7, 20])[0]
    # Six trained tokens of the changed sample; of these, three are before the fork.
    changed = first.logprobs != second.logprobs
    assert changed[3:6].all()
    assert not changed[:3].any()
    assert not changed[6:].any()


def cut_outcomes(num_cuts: int) -> list[tuple[float, float]]:
    case = make_case(11)
    results = []
    with model_parallel(ParallelConfig()):
        for seed in range(num_cuts):
            planned = single_process(case.planned.batch, seed=seed, activations=ACTIVATIONS)
            outcome = run_case(replace(case, planned=planned), torch.float64)
            norm = sum(float(g.double().square().sum()) for g in outcome.gradients.values()) ** 0.5
            results.append((outcome.loss, norm))
    return results


@pytest.mark.slow
def test_the_cut_into_micro_batches_does_not_matter() -> None:
    results = np.array(run_ranks(cut_outcomes, 1, 10)[0])
    spread = np.ptp(results, axis=0) / np.abs(results[0])
    assert len(np.unique(results[:, 1])) > 1, "the cuts are all the same"
    assert (spread <= 1e-12).all(), results
