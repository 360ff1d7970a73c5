"""Losses as pure functions of logprobs and entropies at loss edges.

An edge is one prediction of one sample: samples that share a trained token have an edge each, with
their own advantage, old logprob and weight. A loss maps edges to one term per edge; the loss of a
mini-batch is the sum of weight times term over all edges of all micro-batches and ranks. Weights
come from logical counts of the whole mini-batch, so they do not depend on how it is cut.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psrl.backend.options import KlEstimator, LossOptions
from psrl.core.samples.sample import FloatArray, IntArray

# exp of it, 4.9e8, is far beyond every clip and finite in every precision that losses run in.
_MAX_LOG_RATIO = 20.0


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
    return _clipped(_ratio(logprob_E - values.old_logprob), values.advantage, options)


def gspo(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] terms of the sample's ratio, the geometric mean of its tokens' (Zheng et al., 2025).

    Each token carries the whole ratio as value and its own share of the gradient (equation 14), so
    the mean over the sample's tokens has the value and the gradient of the sample's term.
    """
    log_ratio_E = values.sequence_log_ratio + logprob_E - logprob_E.detach()
    return _clipped(_ratio(log_ratio_E), values.advantage, options)


def cispo(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] REINFORCE terms weighted by the clipped ratio (MiniMax-M1, 2025, equation 4), negated."""
    ratio_E = _ratio(logprob_E.detach() - values.old_logprob).clamp(*options.ratio_limits)
    return -ratio_E * values.advantage * logprob_E


def sft(logprob_E: Tensor, values: EdgeValues, options: LossOptions) -> Tensor:
    """[E] negative log-likelihoods."""
    return -logprob_E


LOSSES: dict[str, EdgeLoss] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo, "sft": sft}


def _ratio(log_ratio_E: Tensor) -> Tensor:
    """[E] `exp(min(max(log r, -20), 20))`: as veRL's losses bound it, so that none overflows."""
    return log_ratio_E.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


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
    `r - 1 - log r`, unbiased and never negative, with r bounded as in `_ratio`.
    """
    log_ratio_E = reference_E - logprob_E
    if estimator == "k1":
        return -log_ratio_E
    if estimator == "k2":
        return log_ratio_E.square() / 2.0
    return _ratio(log_ratio_E) - 1.0 - log_ratio_E


def edge_terms(
    logprob_E: Tensor, entropy_E: Tensor | None, values: EdgeValues, options: LossOptions
) -> Tensor:
    """[E] loss terms, KL penalty and entropy bonus included, not yet weighted."""
    terms_E = LOSSES[options.kind](logprob_E, values, options)
    if options.needs_reference:
        penalty_E = kl_terms(logprob_E, values.reference_logprob, options.kl_estimator)
        terms_E = terms_E + options.kl_weight * penalty_E
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
    if options.term_reduction == "token-mean":
        return np.full(len(sample), 1.0 / len(sample))
    _, which, count = np.unique(sample, return_inverse=True, return_counts=True)
    weight = np.full(len(sample), 1.0 / len(count))
    if options.term_reduction == "seq-mean-token-mean":
        return weight / count[which]
    if options.term_reduction == "seq-mean-token-sum-norm":
        assert options.fixed_length_tokens is not None, "options.check was not called"
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
