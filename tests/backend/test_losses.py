"""Every loss and reduction equals the same loss written down for samples alone."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.options import LossKind, LossOptions, PhaseOptions
from psrl.backend.train.loss import (
    EdgeValues,
    edge_terms,
    loss_weights,
    sequence_log_ratios,
)
from psrl.backend.train.predictions import vocab_parallel_entropy
from psrl.backend.train.stage import PhaseInputs
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import ConfigError
from psrl.core.plan.plan import PHASES
from tests.backend.alone import SampleAlone, samples_alone, train_alone
from tests.backend.cases import TINY, Case, Outcome, case_model, make_case, relative_error, run_case

FIXED = 7

PPO = LossOptions(reduction="token-mean", kl_coefficient=0.0, temperature=0.7)
OPTIONS = {
    "token-mean": replace(PPO, entropy_coefficient=0.2),
    "token-sum": replace(PPO, reduction="seq-mean-token-sum", dual_clip=1.5),
    "seq-mean": replace(PPO, reduction="seq-mean-token-mean", clip_ratio_high=0.4),
    "fixed": replace(PPO, reduction="seq-mean-token-sum-norm", fixed_length_tokens=FIXED),
    "gspo": replace(PPO, kind="gspo", reduction="seq-mean-token-mean", entropy_coefficient=0.1),
    "cispo": replace(PPO, kind="cispo", kl_coefficient=0.3, kl_estimator="k1"),
    "sft": LossOptions(kind="sft", reduction="seq-mean-token-mean", kl_coefficient=0.3),
    "k2": replace(PPO, reduction="seq-mean-token-sum", kl_coefficient=0.3, kl_estimator="k2"),
}


def sample_terms(sample: SampleAlone, options: LossOptions) -> Tensor:
    """[n] terms of one sample's trained tokens."""
    logp, advantage = sample.logprob, sample.advantage
    low = 1 - options.clip_ratio
    high = 1 + (options.clip_ratio_high or options.clip_ratio)
    ratio = torch.exp(logp - sample.old)
    if options.kind == "sft":
        terms = -logp
    elif options.kind == "cispo":
        terms = -ratio.detach().clamp(low, high) * advantage * logp
    else:
        if options.kind == "gspo":
            ratio = torch.exp((logp - sample.old).mean()).expand_as(logp)
        worst = torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)
        if options.dual_clip and advantage < 0:
            worst = torch.minimum(worst, torch.full_like(worst, -options.dual_clip * advantage))
        terms = worst
    difference = logp - sample.reference
    kl = {"k1": difference, "k2": difference**2 / 2}.get(
        options.kl_estimator, torch.expm1(-difference) + difference
    )
    return terms + options.kl_coefficient * kl - options.entropy_coefficient * sample.entropy


def loss_alone(options: LossOptions) -> Callable[[list[SampleAlone]], Tensor]:
    def loss(samples: list[SampleAlone]) -> Tensor:
        terms = [sample_terms(s, options) for s in samples if len(s.logprob)]
        if options.reduction == "token-mean":
            return torch.cat(terms).mean()
        if options.reduction == "seq-mean-token-mean":
            return torch.stack([t.mean() for t in terms]).mean()
        divisor = FIXED if options.reduction == "seq-mean-token-sum-norm" else 1
        return torch.stack([t.sum() / divisor for t in terms]).mean()

    return loss


def near_case(seed: int, num_ranks: int = 1) -> Case:
    """A case whose old and reference policies are near: about half of the ratios are clipped.

    Needs a process group of one process.
    """
    case = make_case(seed, num_ranks=num_ranks)
    with torch.no_grad():
        alone = samples_alone(case_model(case, torch.float64), case, torch.float64)
    logprob = torch.cat([s.logprob for s in alone]).numpy()
    rng = np.random.default_rng(seed)
    old, reference = (logprob + rng.uniform(-0.4, 0.4, len(logprob)) for _ in range(2))
    # The mean over a sample's tokens has to leave the limits too.
    old += np.repeat(rng.uniform(-0.3, 0.3, len(alone)), [len(s.logprob) for s in alone])
    return replace(case, inputs=PhaseInputs(old, reference))


def train_both(
    seeds: Sequence[int], dtype: torch.dtype, num_ranks: int = 1, with_shared: bool = True
) -> tuple[list[Case], list[Outcome], list[Outcome]]:
    """Cases with all options; outcomes of samples alone, and of shared execution on one process."""
    with model_parallel(ParallelConfig()):
        near = [near_case(seed, num_ranks) for seed in seeds]
        cases = [replace(case, loss=options) for case in near for options in OPTIONS.values()]
        alone = [train_alone(c, dtype, loss_alone(c.loss)) for c in cases]
        shared = [run_case(c, dtype) for c in cases] if with_shared else []
    return cases, alone, shared


@pytest.mark.slow
def test_losses_equal_those_of_samples_alone() -> None:
    outcomes = run_ranks(train_both, 1, range(1, 4), torch.float64)[0]
    for case, alone, shared in zip(*outcomes, strict=True):
        error = relative_error(shared, alone)
        assert max(error.values()) <= 1e-10, (case.loss, error)


def run_parallel(cases: list[Case], parallel: ParallelConfig) -> list[Outcome]:
    with model_parallel(parallel) as pipeline:
        return [replace(run_case(c, torch.float32, pipeline=pipeline), events=None) for c in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor_model_parallel_size=2),
        ParallelConfig(data_parallel_size=2),
        pytest.param(ParallelConfig(pipeline_model_parallel_size=3), marks=pytest.mark.slow),
    ],
    ids=["tensor", "data", "pipeline"],
)
def test_losses_do_not_depend_on_the_parallel_sizes(parallel: ParallelConfig) -> None:
    ranks = parallel.data_parallel_size
    cases, wanted, _ = run_ranks(train_both, 1, [3], torch.float32, ranks, False)[0]
    found = run_ranks(run_parallel, parallel.world_size, cases, parallel)[-1]
    for f, w in zip(found, wanted, strict=True):
        error = relative_error(f, w)
        assert error["gradient"] <= 5e-6, error
        assert error["loss"] <= 5e-6, error


@pytest.mark.slow
def test_the_cases_clip_and_differ() -> None:
    """Ratios lie on both sides of the limits, and no two options give the same loss."""
    cases, alone, _ = run_ranks(train_both, 1, [3], torch.float64, 1, False)[0]
    losses = [outcome.loss for outcome in alone]
    assert len(np.unique(np.round(losses, 8))) == len(losses), losses
    case, shift = cases[0], alone[0].logprobs - cases[0].inputs.old_logprob
    batch = case.planned.batch
    trained = [np.diff(batch.sample_loss_spans(s)).sum() for s in range(batch.num_samples)]
    sample = np.repeat(np.arange(batch.num_samples), trained)
    for ratio in (shift, sequence_log_ratios(sample, shift, np.zeros(len(shift)))):
        outside = (ratio < np.log(0.8)) | (ratio > np.log(1.2))
        assert 0.1 < outside.mean() < 0.9


def entropies() -> tuple[float, float]:
    with model_parallel(ParallelConfig(tensor_model_parallel_size=2)):
        group = torch.distributed.group.WORLD
        full = 3 * torch.randn((5, 16), generator=torch.Generator().manual_seed(3)).double()
        weight = torch.arange(1.0, 6.0).double()
        dense = full.clone().requires_grad_()
        log_p = dense.log_softmax(dim=-1)
        wanted = -(log_p.exp() * log_p).sum(dim=-1)
        (wanted * weight).sum().backward()
        mine = full.chunk(2, dim=1)[group.rank()].clone().requires_grad_()
        found = vocab_parallel_entropy(mine, group)
        (found * weight).sum().backward()
        slice_of = dense.grad.chunk(2, dim=1)[group.rank()]
        return float((found - wanted).abs().max()), float((mine.grad - slice_of).abs().max())


def test_sliced_entropies_equal_dense_ones() -> None:
    for errors in run_ranks(entropies, 2):
        assert max(errors) <= 1e-12


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_weights_follow_logical_counts(sample: list[int]) -> None:
    numbers = np.array(sorted(sample))
    for reduction, total in (("token-mean", 1.0), ("seq-mean-token-mean", 1.0)):
        weights = loss_weights(numbers, LossOptions(reduction=reduction))
        assert weights.sum() == pytest.approx(total)
    by_token = loss_weights(numbers, LossOptions(reduction="seq-mean-token-sum"))
    assert by_token.tolist() == pytest.approx([1 / len(set(sample))] * len(sample))
    fixed = LossOptions(reduction="seq-mean-token-sum-norm", fixed_length_tokens=4)
    assert loss_weights(numbers, fixed).tolist() == pytest.approx((by_token / 4).tolist())


def test_sequence_ratio_of_another_ranks_sample_is_unknown() -> None:
    ratio = sequence_log_ratios(
        np.array([0, 0, 2]), np.array([-1.0, -2.0, np.nan]), np.array([-2.0, -2.0, -1.0])
    )
    assert ratio[:2].tolist() == [0.5, 0.5]
    assert np.isnan(ratio[2])


def test_gspo_has_the_gradient_of_the_geometric_mean() -> None:
    logp = torch.tensor([-1.0, -2.5, -0.3], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -2.4, -0.35], dtype=torch.float64)
    options = LossOptions(kind="gspo", kl_coefficient=0.0)
    nan = torch.full_like(old, torch.nan)
    values = EdgeValues(
        weight=torch.full_like(old, 1 / 3),
        advantage=torch.full_like(old, -0.7),
        old_logprob=old,
        reference_logprob=nan,
        sequence_log_ratio=(logp.detach() - old).mean().expand(3),
    )
    found = (values.weight * edge_terms(logp, None, values, options)).sum()
    wanted = 0.7 * torch.exp((logp - old).mean())
    assert found.item() == pytest.approx(wanted.item())
    (gradient,) = torch.autograd.grad(found, logp)
    (expected,) = torch.autograd.grad(wanted, logp)
    assert gradient.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LossOptions(kind="dpo"), "--loss dpo is refused.*one of ppo_clip"),  # type: ignore[arg-type]
        (LossOptions(kind="gspo", reduction="token-mean"), "token-mean with --loss gspo is not"),
        (LossOptions(reduction="mean"), "--reduction mean is"),  # type: ignore[arg-type]
        (LossOptions(reduction="seq-mean-token-sum-norm"), "pass --fixed-length-tokens"),
        (LossOptions(fixed_length_tokens=3), "--fixed-length-tokens would have no effect"),
        (LossOptions(kl_estimator="k4"), "--kl-estimator k4 is refused"),  # type: ignore[arg-type]
        (LossOptions(dual_clip=1.0), "--dual-clip 1.0"),
        (LossOptions(temperature=0.0), "--temperature 0.0"),
    ],
)
def test_wrong_options_are_refused(options: LossOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PhaseOptions(loss=options).check(TINY, PHASES)


@pytest.mark.parametrize(
    ("phases", "kind", "message"),
    [
        ({"update", "reference"}, "ppo_clip", "--loss ppo_clip needs phase log_old_prob"),
        ({"update", "log_old_prob"}, "ppo_clip", "a KL penalty needs phase reference"),
        ({"update"}, "sft", ""),
        ({"log_old_prob"}, "gspo", ""),
    ],
)
def test_losses_need_phases(phases: set[str], kind: LossKind, message: str) -> None:
    options = PhaseOptions(loss=LossOptions(kind=kind))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        options.check(TINY, phases)
