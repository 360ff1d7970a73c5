"""Batches in veRL's layout: groups of rollouts that share a prompt and, in part, their turns."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = list[np.ndarray]


def ragged(rows: Rows, dtype: torch.dtype = torch.int64) -> Tensor:
    parts = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def fields(prompts: Rows, responses: Rows, masks: Rows) -> dict[str, Tensor]:
    """veRL's jagged fields of some samples."""
    ids = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    return {
        "prompts": ragged(prompts),
        "responses": ragged(responses),
        "input_ids": ragged(ids),
        "position_ids": ragged([np.arange(len(row)) for row in ids]),
        "response_mask": ragged(masks),
        "loss_mask": ragged(masks),
    }


def to_batch(prompts: Rows, responses: Rows, masks: Rows, uid: list[str] | None = None) -> Any:
    """The fields as veRL's TensorDict."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    batch = TensorDict(dict(fields(prompts, responses, masks)), batch_size=[len(prompts)])
    if uid is not None:
        tu.assign_non_tensor_stack(batch, "uid", uid)
    return batch


def group_batch(
    num_groups: int = 4, num_rollouts: int = 4, vocabulary: int = 208, seed: int = 0
) -> Any:
    """Groups with turns in common, spans that are not trained, and the special cases of trees.

    The last group has a sample twice, and one that is a prefix of another.
    """
    rng = np.random.default_rng(seed)
    prompts, responses, masks, uid = [], [], [], []
    for group in range(num_groups):
        prompt = rng.integers(0, vocabulary, rng.integers(15, 40))
        turn = rng.integers(0, vocabulary, rng.integers(8, 20))
        for _ in range(num_rollouts):
            own = rng.integers(0, vocabulary, rng.integers(5, 30))
            response = np.concatenate([turn[: rng.integers(0, len(turn) + 1)], own])
            mask = np.ones(len(response), np.int64)
            mask[4:8] = 0  # a tool's answer
            prompts.append(prompt)
            responses.append(response)
            masks.append(mask)
            uid.append(f"task-{group}")
    responses[-1], masks[-1] = responses[-2], masks[-2]
    responses[-3], masks[-3] = responses[-2][:6], masks[-2][:6]
    return to_batch(prompts, responses, masks, uid)
