"""Full parameters and their tensor-parallel shards: names, layouts, deterministic random weights.

A canonical name is Megatron's parameter name with the global numbers of layer and expert; its full
tensor is the same for every parallel size. Layouts: fused QKV keeps one (queries, key, value)
group after the other, so a slice is whole groups; fused gate and up projections are sliced each by
itself. Experts are not sliced: each is on one rank of its expert-parallel group.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.backend.compat import parallel_state
from psrl.core.errors import BackendError

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of this rank; None stands for a group of one.

    Attributes:
        tensor, pipeline: ranks that hold the other slices of this stage, and the other stages.
        data: ranks that hold the same parameters, but for experts.
        expert, expert_data: ranks that hold the other experts, and the same experts.
        embedding: first and last stage, if this is one of them.
    """

    tensor: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_data: dist.ProcessGroup | None = None
    embedding: dist.ProcessGroup | None = None

    @classmethod
    def current(cls) -> "ParallelGroups":
        """Those of Megatron's `parallel_state`."""
        return cls(
            tensor=parallel_state.get_tensor_model_parallel_group(),
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
            data=parallel_state.get_data_parallel_group(),
            expert=parallel_state.get_expert_model_parallel_group(),
            expert_data=parallel_state.get_expert_data_parallel_group(),
            embedding=parallel_state.get_embedding_group(check_initialized=False),
        )


def group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


class ShardedDim(NamedTuple):
    """How a full tensor is cut: `num_parts` equal parts along `dim`, each sliced by rank."""

    dim: int
    num_parts: int


_SHARDED_DIMS = {
    "word_embeddings.weight": ShardedDim(0, 1),
    "output_layer.weight": ShardedDim(0, 1),
    "linear_qkv.weight": ShardedDim(0, 1),
    "linear_qkv.bias": ShardedDim(0, 1),
    "linear_proj.weight": ShardedDim(1, 1),
    "linear_fc1.weight": ShardedDim(0, 2),
    "linear_fc2.weight": ShardedDim(1, 1),
}
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
# Replicated weights that see only the rank's own heads: their gradient is a sum over ranks.
_PARTIAL_GRADIENTS = ("q_layernorm.weight", "k_layernorm.weight")


def stage_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Canonical names and parameters of a pipeline stage.

    Megatron numbers the layers of a stage and the experts of a rank from zero, and calls a head
    that shares the embedding's weight across stages `output_layer.weight`; its canonical name is
    the embedding's.
    """
    layers = getattr(getattr(module, "decoder", None), "layers", ())
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    named = []
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            layer = int(parts[2])
            parts[2] = str(first_layer + layer)
            if is_expert(name):
                at = parts.index("local_experts") + 1
                parts[at] = str(layers[layer].mlp.local_expert_indices[int(parts[at])])
        elif name == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
            parts = ["embedding", "word_embeddings", "weight"]
        named.append((".".join(parts), parameter))
    return named


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert."""
    return ".local_experts." in name


def sharded_dim(name: str) -> ShardedDim | None:
    """How a parameter is cut; None if a rank that holds it holds all of it."""
    if is_expert(name):
        return None
    return _SHARDED_DIMS.get(".".join(name.rsplit(".", 2)[-2:]))


def has_partial_gradient(name: str, parameter: Tensor) -> bool:
    """Whether a replicated parameter's gradient must be summed over tensor-parallel ranks.

    Either the ranks see their own heads, or, under sequence parallelism, their own rows.
    """
    return name.endswith(_PARTIAL_GRADIENTS) or getattr(parameter, "sequence_parallel", False)


def shard(full: Tensor, name: str, rank: int, size: int) -> Tensor:
    """The slice of a full tensor that a tensor-parallel rank holds."""
    cut = sharded_dim(name)
    if cut is None or size == 1:
        return full
    parts = full.chunk(cut.num_parts * size, cut.dim)
    return torch.cat(parts[rank::size], cut.dim)


def unshard(shards: list[Tensor], name: str) -> Tensor:
    """The full tensor, from the slices of all tensor-parallel ranks in order."""
    cut = sharded_dim(name)
    if cut is None or len(shards) == 1:
        return shards[0]
    parts = [s.chunk(cut.num_parts, cut.dim) for s in shards]
    return torch.cat([p[i] for i in range(cut.num_parts) for p in parts], cut.dim)


def gather_full(tensors: Iterable[tuple[str, Tensor]], groups: ParallelGroups) -> dict[str, Tensor]:
    """All full tensors of the model on the CPU, by canonical name; every rank must call it.

    Of a tensor that several stages have, the first stage's is taken.
    """
    full = dict(gather_slices(tensors, groups))
    for group in (groups.expert, groups.pipeline):
        if group is not None and group.size() > 1:
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, full, group=group)
            full = {}
            for part in parts:
                full |= {name: tensor for name, tensor in part.items() if name not in full}
    return full


def gather_slices(
    tensors: Iterable[tuple[str, Tensor]], groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors on the CPU of this stage and this rank's experts, one by one.

    Every tensor-parallel rank must take all of them.
    """
    for name, tensor in tensors:
        shards = [tensor.detach().clone()]
        if groups.tensor is not None and groups.tensor.size() > 1 and sharded_dim(name) is not None:
            shards = [torch.empty_like(tensor) for _ in range(groups.tensor.size())]
            dist.all_gather(shards, tensor.detach().contiguous(), group=groups.tensor)
        yield name, unshard(shards, name).cpu()


def load_full(module: torch.nn.Module, full: Named, rank: int, size: int) -> None:
    """Copy a rank's slices of full tensors into a model.

    Raises:
        BackendError: if a parameter is missing or has another shape.
    """
    with torch.no_grad():
        for name, parameter in stage_parameters(module):
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
    for name, parameter in stage_parameters(module):
        cut = sharded_dim(name)
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
