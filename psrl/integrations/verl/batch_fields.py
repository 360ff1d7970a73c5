"""Fields of veRL's batches: values of the batch, of its samples, and what losses read."""

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from psrl.core.errors import BackendError


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
