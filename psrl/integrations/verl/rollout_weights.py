"""Weights of a divided model as one stream of Hugging Face tensors, for veRL's rollout."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.backend.model.hf_layout import hf_source, separate
from psrl.backend.model.parameters import (
    ParallelGroups,
    group_rank,
    group_size,
    is_expert,
    sharded_dim,
    stage_parameters,
    unshard,
)
from psrl.core.cost.cluster import ModelSpec


def rollout_weights(module: torch.nn.Module, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the whole model, one parameter at a time on the device.

    Every rank gets all of them, and every rank must take all of them.
    """
    groups = ParallelGroups.current()
    device = next(module.parameters()).device
    for stage in range(group_size(groups.pipeline)):
        is_mine = group_rank(groups.pipeline) == stage
        held = _StageWeights(module, groups) if is_mine else None
        described = None if held is None else held.described()
        for name, shape, dtype in _broadcast_object(described, groups.pipeline, stage):
            full = torch.empty(shape, dtype=dtype, device=device) if held is None else held(name)
            full = _broadcast(full, groups.pipeline, stage)
            source = hf_source(name)
            yield from zip(source.names, separate(full, source, spec), strict=True)


class _StageWeights:
    """Full parameters of this stage, by canonical name.

    All ranks of the stage must ask for the same parameters in the same order.
    """

    def __init__(self, module: torch.nn.Module, groups: ParallelGroups) -> None:
        self._groups = groups
        named = stage_parameters(module)
        self._mine = {n: p.detach() for n, p in named if not getattr(p, "shared", False)}
        self._experts = [n for n in self._mine if is_expert(n)]
        self._by_expert_rank: list[list[str]] = [self._experts]
        if group_size(groups.expert) > 1:
            self._by_expert_rank = [[] for _ in range(group_size(groups.expert))]
            dist.all_gather_object(self._by_expert_rank, self._experts, group=groups.expert)

    def described(self) -> list[tuple[str, list[int], torch.dtype]]:
        """Names, full shapes and dtypes of all parameters of the stage."""
        found = []
        for name, tensor in self._mine.items():
            if not is_expert(name):
                shape, cut = list(tensor.shape), sharded_dim(name)
                if cut is not None:
                    shape[cut.dim] *= group_size(self._groups.tensor)
                found.append((name, shape, tensor.dtype))
        for names in self._by_expert_rank:
            for mine, name in zip(self._experts, names, strict=True):
                like = self._mine[mine]
                found.append((name, list(like.shape), like.dtype))
        return found

    def __call__(self, name: str) -> Tensor:
        if is_expert(name):
            return self._expert(name)
        tensor, group = self._mine[name], self._groups.tensor
        if group is None or group.size() == 1 or sharded_dim(name) is None:
            return tensor
        shards = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(shards, tensor.contiguous(), group=group)
        return unshard(shards, name)

    def _expert(self, name: str) -> Tensor:
        owner = next(r for r, names in enumerate(self._by_expert_rank) if name in names)
        if name in self._mine:
            return _broadcast(self._mine[name], self._groups.expert, owner)
        like = self._mine[self._experts[self._by_expert_rank[owner].index(name)]]
        return _broadcast(torch.empty_like(like), self._groups.expert, owner)


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None, source: int) -> Tensor:
    if group is None or group.size() == 1:
        return tensor
    sent = tensor.contiguous()
    dist.broadcast(sent, dist.get_global_rank(group, source), group=group)
    return sent


def _broadcast_object(value: Any, group: dist.ProcessGroup | None, source: int) -> Any:
    if group is None or group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, dist.get_global_rank(group, source), group=group)
    return box[0]
