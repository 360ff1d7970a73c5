"""Full parameters and their tensor-parallel shards: names, layouts, deterministic random weights.

A canonical name is Megatron's parameter name with the global layer number; its full tensor is
the same for every parallel size. Layouts: fused QKV keeps one (queries, key, value) group after
the other, so a slice is whole groups; fused gate and up projections are sliced each by itself.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.core.errors import BackendError

Named = Mapping[str, Tensor]


class Layout(NamedTuple):
    """How a full tensor is cut: `num_parts` equal parts along `dim`, each sliced by rank."""

    dim: int
    num_parts: int


_LAYOUTS = {
    "word_embeddings.weight": Layout(0, 1),
    "output_layer.weight": Layout(0, 1),
    "linear_qkv.weight": Layout(0, 1),
    "linear_qkv.bias": Layout(0, 1),
    "linear_proj.weight": Layout(1, 1),
    "linear_fc1.weight": Layout(0, 2),
    "linear_fc2.weight": Layout(1, 1),
}
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
# Replicated weights that see only the rank's own heads: their gradient is a sum over ranks.
_PARTIAL_GRADIENTS = ("q_layernorm.weight", "k_layernorm.weight")


def layout(name: str) -> Layout | None:
    """Layout of a parameter; None if every tensor-parallel rank holds all of it."""
    return _LAYOUTS.get(".".join(name.rsplit(".", 2)[-2:]))


def has_partial_gradient(name: str) -> bool:
    """Whether a replicated parameter's gradient must be summed over tensor-parallel ranks."""
    return name.endswith(_PARTIAL_GRADIENTS)


def shard(full: Tensor, name: str, rank: int, size: int) -> Tensor:
    """The slice of a full tensor that a tensor-parallel rank holds."""
    cut = layout(name)
    if cut is None or size == 1:
        return full
    parts = full.chunk(cut.num_parts * size, cut.dim)
    return torch.cat(parts[rank::size], cut.dim)


def unshard(shards: list[Tensor], name: str) -> Tensor:
    """The full tensor, from the slices of all tensor-parallel ranks in order."""
    cut = layout(name)
    if cut is None or len(shards) == 1:
        return shards[0]
    parts = [s.chunk(cut.num_parts, cut.dim) for s in shards]
    return torch.cat([p[i] for i in range(cut.num_parts) for p in parts], cut.dim)


def gather_full(
    tensors: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Full tensors on the CPU by canonical name; every rank of the group must call it."""
    full = {}
    for name, tensor in tensors:
        shards = [torch.empty_like(tensor) for _ in range(group.size())]
        if layout(name) is None or len(shards) == 1:
            shards = [tensor.clone()]
        else:
            dist.all_gather(shards, tensor.contiguous(), group=group)
        full[name] = unshard(shards, name).cpu()
    return full


def load_full(module: torch.nn.Module, full: Named, rank: int, size: int) -> None:
    """Copy a rank's slices of full tensors into a model.

    Raises:
        BackendError: if a parameter is missing or has another shape.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name not in full:
                raise BackendError(f"no weight for parameter {name}")
            mine = shard(full[name], name, rank, size)
            if mine.shape != parameter.shape:
                raise BackendError(
                    f"weight {name} has shape {list(full[name].shape)}: rank {rank} of {size} "
                    f"gets {list(mine.shape)}, the model needs {list(parameter.shape)}"
                )
            parameter.copy_(mine)


def fill_random(
    module: torch.nn.Module,
    seed: int,
    init_std: float,
    num_layers: int,
    rank: int,
    size: int,
    perturb: float = 0.0,
) -> None:
    """Fill a model with random weights that depend on name and seed, not on the parallel size.

    Matrices and biases are normal with `init_std`, those that write to the residual stream with
    `init_std / sqrt(2 num_layers)`; norms are one.

    Args:
        perturb: add this many `init_std` of other noise to every weight, e.g. to get a reference
            policy that differs from the trained one.
    """
    for name, parameter in module.named_parameters():
        cut = layout(name)
        shape = list(parameter.shape)
        if cut is not None:
            shape[cut.dim] *= size
        std = init_std / (2 * num_layers) ** 0.5 if name.endswith(_RESIDUAL_OUTPUTS) else init_std
        if "norm" in name:
            full = torch.ones(shape)
        else:
            full = std * _normal(shape, f"{seed}:{name}")
        if perturb:
            full += perturb * init_std * _normal(shape, f"{seed}:perturb:{name}")
        with torch.no_grad():
            parameter.copy_(shard(full, name, rank, size))


def _normal(shape: list[int], key: str) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(shape, generator=generator)
