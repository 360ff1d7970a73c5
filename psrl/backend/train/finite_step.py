"""The guard before every optimizer step: what is not finite never gets into weights."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.samples.sample import FloatArray

from .optimizer import MainGradients

_HINT = (
    "the weights are as before this step; look at the values named here, lower the learning rate, "
    "or leave such steps out with on_nonfinite = skip"
)


def may_step(
    loss: float | None,
    norm: float,
    gradients: MainGradients,
    where: str,
    inputs: dict[str, FloatArray | Tensor],
    *,
    skip: bool,
) -> bool:
    """Whether loss and gradients are finite; every rank must call it and gets the same answer.

    Args:
        loss: of the mini-batch, over all ranks; None where the caller's engine keeps it.
        norm: of the full gradient.
        where: phase and mini-batch, for the message.
        inputs: this rank's values by name, whose largest magnitudes help to find the cause.
        skip: answer False instead of raising.

    Raises:
        BackendError: naming the first rank and parameter, and the largest inputs.
    """
    if math.isfinite(norm) and (loss is None or math.isfinite(loss)):
        return True
    if skip:
        return False
    mine = (gradients.first_nonfinite(), {k: _largest(v) for k, v in inputs.items()})
    found: list[Any] = [mine]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    rank, name = next(((r, n) for r, (n, _) in enumerate(found) if n is not None), (None, None))
    first = "every single gradient is finite"
    if name is not None:
        first = f"the first parameter is {name} on rank {rank}"
    largest = {key: max(values[key] for _, values in found) for key in inputs}
    raise BackendError(
        f"{where}: {'' if loss is None else f'loss {loss:g}, '}gradient norm {norm:g}: not finite; "
        f"{first}" + "".join(f"; largest |{key}| {value:g}" for key, value in largest.items()),
        _HINT,
    )


def _largest(values: FloatArray | Tensor) -> float:
    """Largest magnitude; infinite if a value is not finite, 0 without values."""
    as_tensor = torch.as_tensor(values, dtype=torch.float64)
    if not as_tensor.numel():
        return 0.0
    return float(as_tensor.abs().nan_to_num(nan=math.inf).max())
