"""Gradients of veRL's losses, taken micro-batch by micro-batch and from the whole mini-batch."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs veRL: make test-verl")
pytestmark = pytest.mark.verl

from psrl.integrations.verl.batch.sample_loss import WholeSampleLoss
from psrl.integrations.verl.batch.samples import whole_samples
from psrl.integrations.verl.settings.refusals import TOKEN_WISE_MODES
from tests.integrations.verl.batches import group_batch
from tests.integrations.verl.workers import Loss, with_phase_results


def gradients(loss: Loss, token_wise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """By logprob and entropy, asked for in 12 random pieces."""
    batch = group_batch(seed=2)
    mask = batch["response_mask"].to_padded_tensor(0)
    rng = torch.Generator().manual_seed(0)
    data = with_phase_results(batch, -3.0 + torch.rand(mask.shape, generator=rng))
    for name, value in (("dp_size", 1), ("batch_num_tokens", int(mask.sum()))):
        data.set_non_tensor(name, value)
    data.set_non_tensor("global_batch_size", len(batch))
    samples = whole_samples(data)
    whole: Any = WholeSampleLoss(
        loss.function(), data, samples, token_wise, with_entropy=True, dtype=torch.float64
    )
    count = len(samples.loss_tokens)
    logprob = -3.0 + torch.rand(count, generator=rng, dtype=torch.float64)
    entropy = torch.rand(count, generator=rng, dtype=torch.float64)
    if not token_wise:
        whole.logprob, whole.entropy = logprob.clone(), entropy.clone()
        whole.differentiate()
    found = torch.full((2, count), torch.nan, dtype=torch.float64)
    for piece in np.array_split(np.random.default_rng(0).permutation(count), 12):
        number = np.sort(piece)
        pair = whole.gradients(number, logprob[number], entropy[number])
        found[:, number] = torch.stack(pair)
    return found[0], found[1]


@pytest.mark.parametrize("mode", sorted(TOKEN_WISE_MODES))
@pytest.mark.parametrize(
    "reduction",
    [
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ],
)
def test_token_wise_losses_need_no_other_token(mode: str, reduction: str) -> None:
    loss = Loss(mode, reduction, scale=50)
    for piecewise, whole in zip(gradients(loss, True), gradients(loss, False), strict=True):
        assert torch.allclose(piecewise, whole, rtol=1e-9, atol=1e-12)
        assert (whole != 0).any()


def test_sequence_losses_do(tmp_path: object) -> None:
    loss = Loss("gspo", "seq-mean-token-mean", clip=0.5, kl=False)
    piecewise, whole = gradients(loss, True)[0], gradients(loss, False)[0]
    assert not torch.allclose(piecewise, whole, rtol=1e-2)
