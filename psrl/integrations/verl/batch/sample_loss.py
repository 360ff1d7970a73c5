"""veRL's loss on whole samples, and its gradient at the loss edges of a micro-batch.

psRL cuts micro-batches at any token, but a veRL loss takes whole samples. So it gets them whole,
with the logprobs as leaves of autograd, and its gradient at a leaf is what the edge passes on.
With a token-wise loss a leaf's gradient depends on that leaf alone: a micro-batch calls the loss
on the samples that it touches, and what it does not know yet cannot matter. Any other loss needs
all logprobs of the mini-batch first: one more forward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.samples.sample import IntArray, ragged_take

from .samples import WholeSamples, jagged

SampleLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""veRL's: `(model_output=, data=, dp_group=)` to a scalar and metrics."""


@dataclass(eq=False)
class WholeSampleLoss:
    """One loss of one mini-batch with n trained tokens.

    Attributes:
        function: veRL's loss; None in phases that only want logprobs.
        data: the mini-batch on the device, with what veRL's losses read from it.
        token_wise: see the module's text.
        with_entropy: the loss, or veRL, reads entropies.
        logprob, entropy: [n] as far as known: old logprobs and 0 before.
    """

    function: SampleLoss | None
    data: TensorDict
    samples: WholeSamples
    token_wise: bool
    with_entropy: bool
    dtype: torch.dtype
    logprob: Tensor = field(init=False)
    entropy: Tensor = field(init=False)
    _gradient: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        count, device = len(self.samples.loss_tokens), self.data.device
        self.logprob = torch.zeros(count, dtype=self.dtype, device=device)
        if "old_log_probs" in self.data:
            self.logprob = self.samples.of_response(self.data, "old_log_probs").to(self.dtype)
        self.entropy = torch.zeros(count, dtype=self.dtype, device=device)
        sample = self.samples.loss_tokens.sample
        rows = np.arange(self.samples.batch.num_samples + 1)
        self._number_offsets = np.searchsorted(sample, rows).astype(np.int64)

    def gradients(
        self, number: IntArray, logprob_E: Tensor, entropy_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[E] derivatives of the loss by logprob and entropy at E edges.

        Args:
            number: index of each edge's trained token.
        """
        index = torch.from_numpy(number).to(self.logprob.device)
        self.logprob[index] = logprob_E.detach().to(self.dtype)
        if entropy_E is not None:
            self.entropy[index] = entropy_E.detach().to(self.dtype)
        if self._gradient is None:
            if not self.token_wise:
                raise BackendError("differentiate() was not called before the first backward")
            return self._of_touched_samples(number)
        by_logprob, by_entropy = self._gradient
        return by_logprob[index], by_entropy[index]

    def differentiate(self) -> None:
        """Take the gradient of the whole mini-batch from the logprobs known now."""
        numbers = np.arange(len(self.logprob))
        self._gradient = self._differentiate(
            self.data, numbers, self.samples.position, self.samples.offsets
        )

    def evaluate(self) -> tuple[float, dict[str, Any]]:
        """Loss and metrics of the whole mini-batch from the logprobs known now."""
        if self.function is None:
            return 1.0, {}  # what veRL's engines report
        with torch.no_grad():
            loss, metrics = self.function(
                model_output=self.model_output(), data=self.data.copy(), dp_group=None
            )
        return float(loss), metrics

    def model_output(self) -> dict[str, Tensor]:
        """Logprobs, and entropies if they are wanted, as veRL's engines return them."""
        output = {"log_probs": self.samples.to_output(self.logprob)}
        if self.with_entropy:
            output["entropy"] = self.samples.to_output(self.entropy)
        return output

    def _of_touched_samples(self, number: IntArray) -> tuple[Tensor, Tensor]:
        touched = np.unique(self.samples.loss_tokens.sample[number])
        rows = self.samples.kept[touched]
        numbers, _ = ragged_take(self._number_offsets, touched)
        _, offsets = ragged_take(self.samples.offsets, rows)
        place = np.searchsorted(rows, self.samples.row[numbers])
        position = offsets[place] + self.samples.loss_tokens.token[numbers] - 1
        by_logprob, by_entropy = self._differentiate(
            take_rows(self.data, rows), numbers, position, offsets
        )
        mine = torch.from_numpy(np.searchsorted(numbers, number)).to(by_logprob.device)
        return by_logprob[mine], by_entropy[mine]

    def _differentiate(
        self, data: TensorDict, numbers: IntArray, position: IntArray, offsets: IntArray
    ) -> tuple[Tensor, Tensor]:
        """Derivatives at trained tokens `numbers`, which lie at `position` in whole samples."""
        assert self.function is not None, "a forward-only phase has no gradient"
        index = torch.from_numpy(position).to(self.logprob.device)
        chosen = torch.from_numpy(numbers).to(self.logprob.device)
        leaves = []
        for values in (self.logprob, self.entropy):
            flat = values.new_zeros(int(offsets[-1]))
            flat[index] = values[chosen]
            leaves.append(flat.requires_grad_())
        with torch.enable_grad():
            output = {"log_probs": jagged(leaves[0], offsets)}
            if self.with_entropy:
                output["entropy"] = jagged(leaves[1], offsets)
            loss, _ = self.function(model_output=output, data=data.copy(), dp_group=None)
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        by_logprob, by_entropy = (
            leaf.new_zeros(len(leaf)) if g is None else g
            for leaf, g in zip(leaves, found, strict=True)
        )
        return by_logprob[index], by_entropy[index]


def take_rows(data: TensorDict, rows: IntArray) -> TensorDict:
    """Some rows of a batch, in ascending order; values that belong to no row are kept."""
    taken = TensorDict({}, batch_size=[len(rows)], device=data.device)
    for name, value in data.items():
        if not isinstance(value, Tensor):
            taken.set_non_tensor(name, data.get_non_tensor(name))
            continue
        if not value.is_nested:
            taken[name] = value[torch.from_numpy(rows).to(value.device)]
            continue
        offsets = value.offsets().cpu().numpy().astype(np.int64)
        index, new_offsets = ragged_take(offsets, rows)
        values = value.values()
        taken[name] = jagged(values[torch.from_numpy(index).to(values.device)], new_offsets)
    return taken


def plain_fields(data: TensorDict) -> dict[str, Any]:
    """Values that are no tensors: of the batch, and the list of each sample's."""
    return {
        name: data.get_non_tensor(name) if isinstance(value, NonTensorData) else value.tolist()
        for name, value in data.items()
        if not isinstance(value, Tensor)
    }


def loss_fields(data: TensorDict, device: torch.device) -> TensorDict:
    """What losses read, on the device: tensors and values of the batch."""
    fields = TensorDict({}, batch_size=data.batch_size, device=device)
    for name, value in data.items():
        if isinstance(value, Tensor):
            if name not in ("routed_experts", "position_ids"):
                fields[name] = value.to(device)
        elif isinstance(value, NonTensorData):
            fields.set_non_tensor(name, value.data)
    return fields


def temperature(data: TensorDict, fields: dict[str, Any]) -> float:
    """What logits are divided by.

    Raises:
        BackendError: if samples have different ones.
    """
    if "temperature" in fields:
        return float(fields["temperature"])
    if "temperature" not in data:
        return 1.0
    values = data["temperature"].unique()
    if len(values) != 1:
        raise BackendError(
            f"the batch has {len(values)} temperatures: samples that share a token need the same",
            "sample with one actor_rollout_ref.rollout.temperature",
        )
    return float(values)
