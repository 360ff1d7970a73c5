"""What veRL's rollout gets: weights as one stream of Hugging Face tensors, and device memory."""

from collections.abc import Callable, Iterable, Iterator
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


class DeviceMemory:
    """The storages of some tensors, which can leave the device and come back.

    Tensors and views of them stay valid objects; while their storages are away they must not be
    read.

    Args:
        tensors: gives the tensors; asked at every release.
        keep_values: copy the values to the host; else they come back as zeros.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], keep_values: bool = True) -> None:
        self._tensors = tensors
        self._keep_values = keep_values
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def release(self) -> None:
        """Free the storages; does nothing if they are away."""
        if self.is_away:
            return
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in self._tensors())}
        for storage in storages.values():
            values = _bytes_of(storage).to("cpu", copy=True) if self._keep_values else None
            self._away.append((storage, storage.nbytes(), values))
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the storages back; does nothing if they are there."""
        for storage, nbytes, values in self._away:
            storage.resize_(nbytes)
            if values is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(values)
        self._away.clear()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
