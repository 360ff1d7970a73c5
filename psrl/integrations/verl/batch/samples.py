"""Whole samples of a veRL batch as a psRL batch, and where values of their tokens lie.

veRL keeps per-token values of a sample either along all its tokens (model outputs: the value at
position t belongs to token t + 1) or along its response (masks, advantages, old logprobs).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psrl.backend.train.inputs import LossTokens
from psrl.core.errors import BackendError
from psrl.core.samples.sample import IntArray, SampleBatch

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class WholeSamples:
    """Rows of a veRL batch with S samples of N tokens, R of them in responses.

    Attributes:
        batch: the samples that have a trained token, in order; the others need no computation.
        kept: [samples of `batch`] their rows.
        loss_tokens: trained tokens of `batch`: the order of values of n trained tokens.
        offsets: [S + 1] tokens before each row.
        num_prompt_tokens: [S]
        response_offsets: [S + 1] response tokens before each row.
    """

    batch: SampleBatch
    kept: IntArray
    loss_tokens: LossTokens
    offsets: IntArray
    num_prompt_tokens: IntArray
    response_offsets: IntArray

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def row(self) -> IntArray:
        """[n] row of each trained token."""
        return self.kept[self.loss_tokens.sample]

    @cached_property
    def position(self) -> IntArray:
        """[n] index in [N] model outputs of what belongs to each trained token."""
        return self.offsets[self.row] + self.loss_tokens.token - 1

    @cached_property
    def response_position(self) -> IntArray:
        """[n] index in [R] response values of each trained token."""
        inside = self.loss_tokens.token - self.num_prompt_tokens[self.row]
        return self.response_offsets[self.row] + inside

    def of_response(self, data: Mapping[str, Any], name: str) -> Tensor:
        """[n] values of the trained tokens, from a field along responses."""
        values = response_values(data, name)
        return values[torch.from_numpy(self.response_position).to(values.device)]

    def to_output(self, values: Tensor) -> Tensor:
        """[S, jagged] model output with the values [n] of trained tokens, else 0."""
        flat = values.new_zeros(int(self.offsets[-1]))
        flat[torch.from_numpy(self.position).to(values.device)] = values
        return jagged(flat, self.offsets)


def whole_samples(data: Mapping[str, Any], group_id: Sequence[str] | None = None) -> WholeSamples:
    """Read the samples of a batch.

    Args:
        data: fields `input_ids` (jagged), `prompts`, `responses` and `response_mask`, these
            jagged or padded with an `attention_mask`; optionally `position_ids`.
        group_id: semantic group of each row.

    Raises:
        BackendError: if fields do not fit together, a prompt is empty, or positions do not count
            the tokens of a sample.
    """
    for name in ("input_ids", "prompts", "responses", "response_mask"):
        if name not in data:
            raise BackendError(f"the batch has no field '{name}'")
    if not data["input_ids"].is_nested:
        raise BackendError(
            "input_ids are padded: psRL reads veRL's layout without padding",
            "set actor_rollout_ref.model.use_remove_padding=True",
        )
    symbols = data["input_ids"].values().cpu().numpy().astype(np.int64)
    offsets = data["input_ids"].offsets().cpu().numpy().astype(np.int64)
    num_prompt, num_response = _lengths(data)
    _check_lengths(offsets, num_prompt, num_response)
    _check_positions(data.get("position_ids"), offsets)
    mask = response_values(data, "response_mask").cpu().numpy() != 0
    response_offsets = np.concatenate([[0], np.cumsum(num_response)]).astype(np.int64)
    if len(mask) != response_offsets[-1]:
        raise BackendError(
            f"response_mask has {len(mask)} entries for {int(response_offsets[-1])} response tokens"
        )
    trained = np.zeros(len(symbols), np.bool_)
    inside = np.arange(len(mask)) - np.repeat(response_offsets[:-1], num_response)
    trained[np.repeat(offsets[:-1] + num_prompt, num_response) + inside] = mask
    every = _sample_batch(symbols, offsets, trained, group_id)
    kept = np.flatnonzero(np.diff(every.loss_span_offsets)).astype(np.int64)
    batch = every.select(kept)
    batch.validate()
    return WholeSamples(batch, kept, LossTokens(batch), offsets, num_prompt, response_offsets)


def response_values(data: Mapping[str, Any], name: str) -> Tensor:
    """[R] values of a field along responses, one sample after the other."""
    field = data[name]
    if field.is_nested:
        return field.values()
    width = data["responses"].shape[1]
    return field[data["attention_mask"][:, -width:].bool()]


def jagged(values: Tensor, offsets: IntArray) -> Tensor:
    """A jagged tensor of values one row after the other."""
    ends, lengths = torch.from_numpy(offsets).to(values.device), np.diff(offsets)
    # Without the longest length, torch would pad to the sum of all.
    longest = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
    return torch.nested.nested_tensor_from_jagged(values, ends, **longest)


def _lengths(data: Mapping[str, Any]) -> tuple[IntArray, IntArray]:
    if data["responses"].is_nested:
        parts = [data[name].offsets().diff() for name in ("prompts", "responses")]
    elif "attention_mask" in data:
        width = data["responses"].shape[1]
        attended = data["attention_mask"].bool()
        parts = [attended[:, :-width].sum(dim=1), attended[:, -width:].sum(dim=1)]
    else:
        raise BackendError("padded responses without an attention_mask")
    prompt, response = (part.cpu().numpy().astype(np.int64) for part in parts)
    return prompt, response


def _check_lengths(offsets: IntArray, num_prompt: IntArray, num_response: IntArray) -> None:
    total = np.diff(offsets)
    if not len(total):
        raise BackendError("the batch has no sample")
    if len(num_prompt) != len(total) or len(num_response) != len(total):
        raise BackendError(f"{len(total)} input_ids, but {len(num_response)} responses")
    for wrong, what in (
        (num_prompt == 0, "has an empty prompt: nothing predicts its first token"),
        (num_prompt + num_response != total, "has another length than prompt and response"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise BackendError(
                f"sample {row} {what} ({total[row]} input_ids, prompt {num_prompt[row]}, response "
                f"{num_response[row]})"
            )


def _check_positions(position_ids: Tensor | None, offsets: IntArray) -> None:
    if position_ids is None:
        return
    values = position_ids.values() if position_ids.is_nested else position_ids
    wanted = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    same_shape = position_ids.is_nested and position_ids.dim() == 2 and len(values) == len(wanted)
    if not same_shape or (values.cpu().numpy() != wanted).any():
        raise BackendError(
            "position_ids do not count the tokens of each sample from 0: multi-modal positions "
            "are refused, since prefixes are shared by token ids and depth",
            "train a text-only model, or run without psRL",
        )


def _sample_batch(
    symbols: IntArray, offsets: IntArray, trained: BoolArray, group_id: Sequence[str] | None
) -> SampleBatch:
    count = len(offsets) - 1
    first = np.zeros(len(symbols) + 1, np.bool_)
    first[offsets] = True
    before = np.concatenate([[False], trained[:-1]]) & ~first[:-1]
    after = np.concatenate([trained[1:], [False]]) & ~first[1:]
    start, last = np.flatnonzero(trained & ~before), np.flatnonzero(trained & ~after)
    owner = np.searchsorted(offsets, start, side="right") - 1
    spans = np.stack([start, last + 1], axis=1) - offsets[owner][:, None]
    names = np.array([str(row) for row in range(count)], np.str_)
    unknown = np.full(count, np.nan)
    return SampleBatch(
        symbols=symbols,
        symbol_offsets=offsets,
        symbol_num_tokens=None,
        loss_spans=spans.astype(np.int64),
        loss_span_offsets=np.searchsorted(owner, np.arange(count + 1)).astype(np.int64),
        group_id=names if group_id is None else np.array([str(g) for g in group_id], np.str_),
        trajectory_id=names,
        agent_step=np.zeros(count, np.int64),
        mini_batch=np.zeros(count, np.int64),
        advantage=np.ones(count),
        reward=unknown,
        arrival_s=unknown,
        generate_s=unknown,
        environment_s=unknown,
    )
