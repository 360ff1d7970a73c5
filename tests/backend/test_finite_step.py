"""Numbers that are not finite never get into weights; large finite ones are not lost."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.options import LossOptions, OptimizerOptions
from psrl.backend.train.loss import EdgeValues, edge_terms, kl_terms
from psrl.backend.train.optimizer import MainGradients
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace, write_trace
from tests.backend.test_execute import OPTIONS, execute, make_plan, make_trace


def trace_with_advantage(folder: Path, value: float) -> Trace:
    """A trace in which one sample of the first mini-batch has an advantage of that size."""
    trace = make_trace(folder / "plain")
    batch: SampleBatch = trace.iteration(0)
    trained = np.diff(batch.loss_span_offsets) > 0
    chosen = int(np.flatnonzero(trained & (batch.mini_batch == batch.mini_batch.min()))[-1])
    advantage = batch.advantage.copy()
    advantage[chosen] = value
    return write_trace(
        folder / "changed",
        [replace(batch, advantage=advantage)],
        source="test",
        licence="none",
        sampling_mode="step",
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_infinite_gradient_stops_the_run(tmp_path: Path, ranks: int) -> None:
    trace = trace_with_advantage(tmp_path, 1e300)
    plan = make_plan(trace, ParallelConfig(data_parallel_size=ranks))
    with pytest.raises(BackendError) as caught:
        execute(plan, trace, replace(OPTIONS, checkpoint=tmp_path / "checkpoints"))
    message = str(caught.value)
    assert "update, mini-batch" in message
    assert "not finite" in message
    assert "largest |advantage| 1e+300" in message
    assert "the first parameter is " in message
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.slow
def test_such_a_step_can_be_left_out(tmp_path: Path) -> None:
    trace = trace_with_advantage(tmp_path, 1e300)
    plan = make_plan(trace, ParallelConfig())
    options = replace(OPTIONS, optimizer=OptimizerOptions(on_nonfinite="skip"))
    found = execute(plan, trace, options)
    first = min(p.mini_batch for p in plan.phase_programs("update"))
    assert found.skipped_mini_batches == [first]
    assert not math.isfinite(found.gradient_norm[0])
    calm = trace_with_advantage(tmp_path / "calm", 0.5)
    assert not execute(make_plan(calm, ParallelConfig()), calm, options).skipped_mini_batches


def norm_of(value: float) -> tuple[float, str | None]:
    module = torch.nn.Linear(3, 3, bias=False)
    with model_parallel(ParallelConfig()):
        gradients = MainGradients(module)
        for _, view in gradients:
            view.fill_(value)
        return gradients.norm(), gradients.first_nonfinite()


@pytest.mark.slow
def test_the_norm_of_large_gradients_is_finite() -> None:
    norm, name = run_ranks(norm_of, 1, 1e30, timeout_s=120)[0]
    assert norm == pytest.approx(3e30)
    assert name is None
    norm, name = run_ranks(norm_of, 1, math.nan, timeout_s=120)[0]
    assert math.isnan(norm)
    assert name == "weight"


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo", "sft"])
@pytest.mark.parametrize("distance", [-1e4, -100.0, 100.0, 1e4])
def test_far_policies_have_finite_losses(kind: str, distance: float) -> None:
    logprob = torch.full((2,), -2.0, requires_grad=True)
    far = torch.full((2,), -2.0 + distance)
    values = EdgeValues(
        weight=torch.ones(2),
        advantage=torch.tensor([1.0, -1.0]),
        old_logprob=far,
        reference_logprob=far,
        sequence_log_ratio=torch.full((2,), distance),
    )
    options = LossOptions(kind=kind, kl_coefficient=0.1)  # type: ignore[arg-type]
    terms = edge_terms(logprob, None, values, options)
    terms.sum().backward()
    assert bool(terms.isfinite().all())
    assert logprob.grad is not None
    assert bool(logprob.grad.isfinite().all())


def test_the_second_bound_is_for_negative_advantages() -> None:
    """Ratio e in all: clipped at 1.2 where it gains, bounded by 1.5 where it loses."""
    advantage = torch.tensor([0.5, 0.0, -0.5])
    zeros = torch.zeros(3)
    values = EdgeValues(zeros + 1, advantage, zeros, zeros, zeros)
    options = LossOptions(clip_ratio=0.2, dual_clip=1.5, kl_coefficient=0.0)
    terms = edge_terms(zeros + 1, None, values, options)
    assert terms.tolist() == pytest.approx([-0.6, 0.0, 0.75])
    less = edge_terms(zeros - 1, None, values, options)
    assert less.tolist() == pytest.approx([-0.5 / math.e, 0.0, 0.4])


def test_near_policies_are_not_bounded() -> None:
    logprob, reference = torch.tensor([-2.0, -1.0]), torch.tensor([-1.5, -20.5])
    log_ratio = reference - logprob
    assert torch.equal(kl_terms(logprob, reference), log_ratio.exp() - 1.0 - log_ratio)
