"""Losses as pure functions of logprobs and entropies at loss edges.

An edge is one prediction of one sample: samples that share a trained token have an edge each, with
their own advantage, old logprob and weight. A loss maps edges to one term per edge; the loss of a
mini-batch is the sum of weight times term over all edges of all micro-batches and ranks. Weights
come from logical counts of the whole mini-batch, so they do not depend on how it is cut.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.samples.sample import FloatArray, IntArray

from .option_range import require

LossKind = Literal["ppo_clip", "gspo", "cispo", "sft"]
Reduction = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class LossOptions:
    """Which loss, and its coefficients.

    Attributes:
        reduction: how terms of S trained samples become one number; veRL's names. `token-mean`:
            mean over all trained tokens. The others are means over samples of each sample's sum,
            mean, or sum divided by `fixed_length_tokens`. Samples without a trained token do not
            count. GSPO is defined with `seq-mean-token-mean`.
        clip_ratio: the probability ratio is clipped to `[1 - clip_ratio, 1 + clip_ratio_high]`.
        clip_ratio_high: None for the value of `clip_ratio`.
        dual_clip: PPO's bound on the term of a negative advantage, in units of it; None for none.
        kl_coefficient: weight of the KL penalty to the reference policy; 0 for none.
        kl_estimator: k1, k2 or k3 of Schulman, "Approximating KL divergence", 2020.
        entropy_coefficient: weight of the entropy, which is rewarded; 0 for none.
        temperature: logits are divided by it, in all phases.
    """

    kind: LossKind = "ppo_clip"
    reduction: Reduction = "token-mean"
    fixed_length_tokens: int | None = None
    clip_ratio: float = 0.2
    clip_ratio_high: float | None = None
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0
    temperature: float = 1.0

    @property
    def needs_old_logprob(self) -> bool:
        return self.kind != "sft"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient != 0.0

    @property
    def needs_sequence_ratio(self) -> bool:
        """Whether an update must run a forward without gradients first."""
        return self.kind == "gspo"

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Smallest and largest ratio after clipping."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - self.clip_ratio, 1.0 + high


@dataclass(frozen=True)
class EdgeValues:
    """[E] known numbers of the edges; NaN where a loss does not need them.

    Attributes:
        weight: of the edge's term in the loss of the mini-batch, see `loss_weights`.
        sequence_log_ratio: see `sequence_log_ratios`.
    """

    weight: Tensor
    advantage: Tensor
    old_logprob: Tensor
    reference_logprob: Tensor
    sequence_log_ratio: Tensor


EdgeLoss = Callable[[Tensor, EdgeValues, LossOptions], Tensor]


def ppo_clip(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] clipped policy-gradient terms (Schulman et al., 2017, equation 7), negated.

    With the second bound of Ye et al., 2020 ("dual clip"), if there is one.
    """
    return _clipped((logprob_E - values.old_logprob).exp(), values.advantage, options)


def gspo(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] terms of the sample's ratio, the geometric mean of its tokens' (Zheng et al., 2025).

    Each token carries the whole ratio as value and its own share of the gradient (equation 14), so
    the mean over the sample's tokens has the value and the gradient of the sample's term.
    """
    log_ratio_E = values.sequence_log_ratio + logprob_E - logprob_E.detach()
    return _clipped(log_ratio_E.exp(), values.advantage, options)


def cispo(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] REINFORCE terms weighted by the clipped ratio (MiniMax-M1, 2025, equation 4), negated."""
    ratio_E = (logprob_E.detach() - values.old_logprob).exp().clamp(*options.ratio_limits)
    return -ratio_E * values.advantage * logprob_E


def sft(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] negative log-likelihoods."""
    return -logprob_E


LOSSES: dict[str, EdgeLoss] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo, "sft": sft}


def _clipped(ratio_E: Tensor, advantage_E: Tensor, options: LossOptions) -> Tensor:
    clipped_E = ratio_E.clamp(*options.ratio_limits)
    gain_E = torch.minimum(ratio_E * advantage_E, clipped_E * advantage_E)
    if options.dual_clip is not None:
        bounded_E = torch.maximum(gain_E, options.dual_clip * advantage_E)
        gain_E = torch.where(advantage_E < 0, bounded_E, gain_E)
    return -gain_E


def kl_terms(logprob_E: Tensor, reference_E: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """[E] estimates of KL(policy || reference) (Schulman, "Approximating KL divergence", 2020).

    With log r = reference - policy: k1 is `-log r`, k2 is `(log r)^2 / 2`, and k3 is
    `r - 1 - log r`, unbiased and never negative.
    """
    log_ratio_E = reference_E - logprob_E
    if estimator == "k1":
        return -log_ratio_E
    if estimator == "k2":
        return log_ratio_E.square() / 2.0
    return log_ratio_E.exp() - 1.0 - log_ratio_E


def edge_terms(
    logprob_E: Tensor, entropy_E: Tensor | None, values: EdgeValues, options: LossOptions
) -> Tensor:
    """[E] loss terms, KL penalty and entropy bonus included, not yet weighted."""
    terms_E = LOSSES[options.kind](logprob_E, values, options)
    if options.needs_reference:
        penalty_E = kl_terms(logprob_E, values.reference_logprob, options.kl_estimator)
        terms_E = terms_E + options.kl_coefficient * penalty_E
    if entropy_E is not None:
        terms_E = terms_E - options.entropy_coefficient * entropy_E
    return terms_E


def loss_weights(sample: IntArray, options: LossOptions) -> FloatArray:
    """[n] weights of the n trained tokens of a mini-batch on all ranks.

    Args:
        sample: [n] the sample of each token.
    """
    if not len(sample):
        return np.empty(0)
    if options.reduction == "token-mean":
        return np.full(len(sample), 1.0 / len(sample))
    _, which, count = np.unique(sample, return_inverse=True, return_counts=True)
    weight = np.full(len(sample), 1.0 / len(count))
    if options.reduction == "seq-mean-token-mean":
        return weight / count[which]
    if options.reduction == "seq-mean-token-sum-norm":
        assert options.fixed_length_tokens is not None, "check_loss was not called"
        return weight / options.fixed_length_tokens
    return weight


def sequence_log_ratios(
    sample: IntArray, logprob: FloatArray, old_logprob: FloatArray
) -> FloatArray:
    """[n] mean of `logprob - old_logprob` over the tokens of each token's sample.

    NaN for the samples whose logprobs are NaN: those of other ranks. A sample lies on one rank.

    Args:
        logprob: [n] under the weights that are about to be updated.
    """
    _, which, count = np.unique(sample, return_inverse=True, return_counts=True)
    total = np.bincount(which, weights=logprob - old_logprob, minlength=len(count))
    mean: FloatArray = (total / count)[which] if len(sample) else np.empty(0)
    return mean


def check_loss(options: LossOptions, phases: set[str]) -> None:
    """Check the options, and that the phases which a loss reads from are there.

    Raises:
        BackendError: naming the missing phase, or the wrong option.
    """
    if options.kind not in LOSSES:
        raise BackendError(f"unknown loss '{options.kind}'", f"use one of {sorted(LOSSES)}")
    for name, value, known in (
        ("reduction", options.reduction, Reduction),
        ("KL estimator", options.kl_estimator, KlEstimator),
    ):
        if value not in get_args(known):
            raise BackendError(f"unknown {name} '{value}'", f"use one of {list(get_args(known))}")
    if options.kind == "gspo" and options.reduction != "seq-mean-token-mean":
        raise BackendError(
            f"loss 'gspo' with reduction '{options.reduction}' is not GSPO: its ratio belongs to "
            "the sample",
            "use reduction seq-mean-token-mean",
        )
    length = options.fixed_length_tokens
    if (options.reduction == "seq-mean-token-sum-norm") != (length is not None and length > 0):
        raise BackendError(
            f"reduction '{options.reduction}' with fixed_length_tokens {length}",
            "seq-mean-token-sum-norm divides by fixed_length_tokens > 0, no other reduction does",
        )
    dual_clip = options.dual_clip
    require(options.temperature > 0, "temperature", options.temperature, "positive")
    require(options.clip_ratio > 0, "clip_ratio", options.clip_ratio, "positive")
    high = options.ratio_limits[1]
    require(high > 1, "clip_ratio_high", options.clip_ratio_high, "positive")
    require(dual_clip is None or dual_clip > 1, "dual_clip", dual_clip, "more than 1")
    require(options.kl_coefficient >= 0, "kl_coefficient", options.kl_coefficient, "0 or more")
    entropy = options.entropy_coefficient
    require(math.isfinite(entropy), "entropy_coefficient", entropy, "finite")
    for needed, phase, what, without in (
        (options.needs_old_logprob, "log_old_prob", f"loss '{options.kind}'", "--loss sft"),
        (options.needs_reference, "reference", "a KL penalty", "--kl-coefficient 0"),
    ):
        if needed and phase not in phases:
            raise BackendError(
                f"{what} needs phase {phase}, the plan has {sorted(phases)}",
                f"plan phase {phase} too, or pass {without}",
            )
