"""Tensor-parallel ranks that each keep a slice of the rows train like samples alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.tree_spec import TreeNorm
from psrl.core.cost.cluster import ParallelConfig
from tests.backend.cases import (
    Outcome,
    case_model,
    make_case,
    relative_error,
    run_alone,
    run_case,
    single_process,
)

TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)


def run_cases(seeds: range, parallel: ParallelConfig) -> list[Outcome]:
    with model_parallel(parallel) as pipeline:
        return [
            replace(
                run_case(
                    make_case(seed, num_ranks=parallel.data_parallel_size),
                    torch.float32,
                    pipeline=pipeline,
                    sequence_parallel=True,
                ),
                events=None,
            )
            for seed in seeds
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        TP2,
        pytest.param(
            TP2.model_copy(update={"pipeline_model_parallel_size": 3}), marks=pytest.mark.slow
        ),
        pytest.param(TP2.model_copy(update={"data_parallel_size": 2}), marks=pytest.mark.slow),
    ],
    ids=["tensor2", "tensor2_pipeline3", "tensor2_data2"],
)
def test_sequence_parallel_equals_samples_alone(parallel: ParallelConfig) -> None:
    seeds = range(6)
    dp = parallel.data_parallel_size
    wanted = run_ranks(run_alone, 1, seeds, torch.float32, dp)[0]
    found = run_ranks(run_cases, parallel.world_size, seeds, parallel)
    for outcomes in found:
        for f, w in zip(outcomes, wanted, strict=True):
            error = relative_error(f, w)
            assert error["gradient"] <= 5e-6, error
            assert error["loss"] <= 5e-6, error
            assert error["logprob"] <= 2e-5, error


def test_the_cases_need_rows_to_fill_up() -> None:
    sizes = [make_case(seed).planned.program.micro_batches.num_tokens for seed in range(6)]
    odd = np.concatenate(sizes) % 2 == 1
    assert 5 < odd.sum() < len(odd)
    assert (np.concatenate(sizes) == 1).any(), "a micro-batch leaves the second rank no token"


def held_bytes() -> tuple[int, int]:
    """Activation bytes of a forward on a rank, with whole rows and with a slice of them."""
    held = []
    with model_parallel(TP2):
        case = make_case(3)
        planned = single_process(case.planned.batch, max_micro_batches=1)
        for sliced in (False, True):
            outcome = run_case(
                replace(case, planned=planned), torch.float32, sequence_parallel=sliced
            )
            events = outcome.events
            assert events is not None
            held.append(int(events.activation_bytes[events.op == "forward"][0]))
    return held[0], held[1]


@pytest.mark.slow
def test_a_slice_of_the_rows_keeps_less() -> None:
    whole, sliced = run_ranks(held_bytes, 2)[0]
    assert sliced < 0.9 * whole


def norm_error() -> float:
    with model_parallel(ParallelConfig()):
        model = case_model(make_case(1), torch.float64)
    norm = model.decoder.final_layernorm
    assert isinstance(norm, TreeNorm)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(32.0))
    wanted = torch.arange(32.0) * x / (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
    return float((norm(x) - wanted).abs().max())


def test_norm_is_rms_norm() -> None:
    assert run_ranks(norm_error, 1)[0] <= 1e-12
