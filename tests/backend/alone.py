"""Every sample by itself, densely: what any loss of shared execution is compared with."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psrl.backend.compat import GPTModel
from psrl.backend.model.model import hidden_states, logits, rotary_angles
from psrl.backend.model.tree_spec import TreeSeqParams
from psrl.backend.train.tokens import expand_tokens
from psrl.core.plan.packing import Chain, PackedMicroBatch
from tests.backend.cases import Case, Outcome, case_model


@dataclass(frozen=True)
class SampleAlone:
    """One sample with n trained tokens.

    Attributes:
        logprob, entropy: [n] of each trained token's distribution.
        old, reference: [n] logprobs that the loss reads.
        routing: per layer, [tokens, experts] router logits of all its tokens; empty if dense.
    """

    logprob: Tensor
    entropy: Tensor
    old: Tensor
    reference: Tensor
    advantage: float
    routing: list[Tensor]


Loss = Callable[[list[SampleAlone]], Tensor]


def train_alone(case: Case, dtype: torch.dtype, loss_of: Loss) -> Outcome:
    """The outcome of a loss that is written down for samples."""
    model = case_model(case, dtype)
    samples = samples_alone(model, case, dtype)
    loss = loss_of(samples)
    loss.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }
    logprob = torch.cat([s.logprob.detach() for s in samples]).double().numpy()
    return Outcome(float(loss.detach()), gradients, logprob)


def samples_alone(model: GPTModel, case: Case, dtype: torch.dtype) -> list[SampleAlone]:
    """All samples of a case, in order."""
    batch, samples, first = case.planned.batch, [], 0
    for sample in range(batch.num_samples):
        ids = expand_tokens(batch, sample, case.spec.vocab_size)
        spans = batch.sample_loss_spans(sample)
        target = np.concatenate([np.empty(0, np.int64), *(np.arange(a, z) for a, z in spans)])
        log_p, routing = _dense_forward(model, case, ids, dtype)
        log_p = log_p[torch.from_numpy(target - 1)]
        mine = slice(first, first + len(target))
        first += len(target)
        samples.append(
            SampleAlone(
                logprob=log_p[torch.arange(len(target)), torch.from_numpy(ids[target])],
                entropy=-(log_p.exp() * log_p).sum(dim=-1),
                old=torch.from_numpy(case.inputs.old_logprob[mine]).to(dtype),
                reference=torch.from_numpy(case.inputs.reference_logprob[mine]).to(dtype),
                advantage=float(batch.advantage[sample]),
                routing=routing,
            )
        )
    return samples


def _dense_forward(
    model: GPTModel, case: Case, ids: np.ndarray, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """[tokens, vocabulary] logprobs of one sample, causal, and its router logits by layer."""
    count = len(ids)
    if not count:
        return torch.zeros(0, case.spec.vocab_size, dtype=dtype), []
    packed = PackedMicroBatch(
        index=0,
        node=np.array([1]),
        start_depth=np.array([0]),
        num_tokens=np.array([count]),
        chains=(Chain(0, count, ()),),
        cached=(),
    )
    params = TreeSeqParams(packed=packed, store=None, implementation="reference")
    rotary = rotary_angles(torch.arange(count), case.spec, dtype)
    routing: list[Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(
            lambda module, inputs, _: routing.append(inputs[0].flatten(0, 1) @ module.weight.T)
        )
        for layer in model.decoder.layers
        if case.spec.num_moe_experts
    ]
    hidden = hidden_states(model, torch.from_numpy(ids), rotary, params)
    for hook in hooks:
        hook.remove()
    return torch.log_softmax(logits(model, hidden) / case.loss.temperature, dim=-1), routing
