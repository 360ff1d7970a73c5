"""psRL's engine against veRL's FSDP2 engine, through veRL's TrainingWorker and ppo_loss."""

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs veRL: make test-verl")
pytestmark = pytest.mark.verl

from tests.integrations.verl.batches import group_batch
from tests.integrations.verl.workers import (
    Loss,
    largest_difference,
    make_worker,
    metric,
    relative_error,
    run_phases,
)

GRADIENT_TOLERANCE = 5e-6
LOGPROB_TOLERANCE = 2e-6

LOSSES = (
    Loss(reduction="token-mean"),
    Loss(reduction="token-sum"),
    Loss(reduction="seq-mean-token-sum"),
    Loss(reduction="seq-mean-token-mean"),
    Loss(reduction="seq-mean-token-sum-norm", scale=64),
    Loss("gspo", "seq-mean-token-mean", clip=0.02),
    Loss("gspo", "token-mean", clip=0.02),
    Loss("cispo"),
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.mode}-{loss.reduction}")
def test_update_equals_fsdp(tiny_qwen2: Path, loss: Loss) -> None:
    batch = group_batch()
    wanted = run_phases(make_worker("fsdp2", tiny_qwen2), batch, loss)
    found = run_phases(make_worker("psrl", tiny_qwen2, max_tokens=150), batch, loss, wanted.logprob)
    assert (found.logprob - wanted.logprob).abs().max() <= LOGPROB_TOLERANCE
    assert (found.entropy - wanted.entropy).abs().max() <= 1e-5
    assert metric(found, "actor/pg_clipfrac") > 0.02, "no ratio was clipped"
    assert metric(found, "psrl/num_micro_batches") > 2
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
    assert relative_error(found.gradients, wanted.gradients) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    "loss",
    [
        Loss("geo_mean", "seq-mean-token-mean", entropy=0.0, kl=False, clip=0.02),
        Loss("kl_cov", entropy=0.0, kl=False),
        Loss(reduction="seq-mean-token-sum-norm"),
    ],
    ids=lambda loss: f"{loss.mode}-{loss.reduction}",
)
def test_losses_of_a_micro_batch_are_taken_over_the_mini_batch(
    tiny_qwen2: Path, loss: Loss
) -> None:
    batch = group_batch()
    whole = run_phases(make_worker("fsdp2", tiny_qwen2, max_tokens=10_000), batch, loss)
    found = run_phases(make_worker("psrl", tiny_qwen2, max_tokens=150), batch, loss, whole.logprob)
    assert metric(found, "psrl/num_micro_batches") > 2
    assert found.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-6)
    assert relative_error(found.gradients, whole.gradients) <= GRADIENT_TOLERANCE


def test_three_optimizer_steps_stay_close(tiny_qwen2: Path) -> None:
    batch, loss = group_batch(num_groups=6), Loss()
    settings = {"mini": 8}
    wanted = run_phases(make_worker("fsdp2", tiny_qwen2), batch, loss, **settings)
    worker = make_worker("psrl", tiny_qwen2, max_tokens=150)
    found = run_phases(worker, batch, loss, wanted.logprob, **settings)
    assert len(found.metrics["loss"]) == len(wanted.metrics["loss"]) == 3
    assert largest_difference(found.weights, wanted.weights) <= 2e-4
    assert found.metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=1e-3)
    assert found.metrics["grad_norm"] == pytest.approx(wanted.metrics["grad_norm"], rel=1e-3)


def test_gradients_are_clipped_as_in_fsdp(tiny_qwen2: Path) -> None:
    batch, loss = group_batch(), Loss(reduction="token-sum")
    wanted = run_phases(make_worker("fsdp2", tiny_qwen2, clip_grad=0.5), batch, loss)
    worker = make_worker("psrl", tiny_qwen2, clip_grad=0.5)
    found = run_phases(worker, batch, loss, wanted.logprob)
    assert found.metrics["grad_norm"][-1] > 0.5
    assert largest_difference(found.weights, wanted.weights) <= 2e-4
