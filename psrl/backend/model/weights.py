"""Weights from and to Hugging Face safetensors directories, under any parallel layout.

Every rank reads what it holds. Writing spreads over the ranks: of each parameter one rank that
holds it writes it, so no rank ever has the whole model, and a directory appears complete or not at
all.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from psrl.backend.io.new_directory import new_directory
from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import BackendError

from .hf_layout import check_hf_config, hf_config, hf_source, join, separate
from .parameters import (
    ParallelGroups,
    gather_slices,
    group_rank,
    group_size,
    is_expert,
    shard,
    sharded_dim,
    stage_parameters,
)

_INDEX = "model.safetensors.index.json"
_GIB = 2**30


def load_hf(module: torch.nn.Module, spec: ModelSpec, directory: Path) -> None:
    """Copy the weights of a Hugging Face directory into this rank's part of a model.

    Raises:
        BackendError: if the directory is of another model, or a tensor is missing or has another
            shape.
    """
    tensors = _HfDirectory(directory)
    config = directory / "config.json"
    if config.exists():
        check_hf_config(_read_json(config), spec, str(config))
    groups = ParallelGroups.current()
    rank, size = group_rank(groups.tensor), group_size(groups.tensor)
    with torch.no_grad():
        for name, parameter in stage_parameters(module):
            full_shape = list(parameter.shape)
            cut = sharded_dim(name)
            if cut is not None:
                full_shape[cut.dim] *= size
            source = hf_source(name)
            expected = separate(torch.empty(full_shape, device="meta"), source, spec)
            parts = [
                tensors.get(part, list(like.shape))
                for part, like in zip(source.names, expected, strict=True)
            ]
            parameter.copy_(shard(join(parts, source, spec), name, rank, size))


class _HfDirectory:
    """Tensors of one or several safetensors files by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Any] = {}
        if not directory.is_dir():
            raise BackendError(f"{directory} is no directory of weights")
        index = directory / _INDEX
        if index.exists():
            self._file_of: dict[str, str] = _read_json(index).get("weight_map", {})
        else:
            files = sorted(path.name for path in directory.glob("*.safetensors"))
            # An open file lists its tensors but is no mapping.
            self._file_of = {key: name for name in files for key in self._file(name).keys()}  # noqa: SIM118
        if not self._file_of:
            raise BackendError(
                f"{directory} holds no safetensors weights",
                "convert them with transformers: model.save_pretrained(directory)",
            )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise BackendError(f"cannot read {self._directory / name} ({error})") from None
        return self._open[name]

    def get(self, name: str, shape: list[int]) -> Tensor:
        if name not in self._file_of:
            raise BackendError(
                f"{self._directory} has no tensor {name}",
                "are these the weights of the plan's model?",
            )
        file = self._file(self._file_of[name])
        try:
            found = list(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise BackendError(
                f"{self._directory / self._file_of[name]} lacks {name}, which the index places "
                f"there ({error})"
            ) from None
        if found != shape:
            raise BackendError(
                f"{self._directory}: tensor {name} has shape {found}, the plan's model needs "
                f"{shape}",
                "are these the weights of the plan's model?",
            )
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot read {path} ({error})") from None
    if not isinstance(content, dict):
        raise BackendError(f"{path} holds no JSON object")
    return content


def save_hf(
    module: torch.nn.Module, spec: ModelSpec, directory: Path, max_shard_bytes: int = 4 * _GIB
) -> None:
    """Write a Hugging Face directory; every rank must call it.

    Args:
        max_shard_bytes: start another file when one would exceed this size.

    Raises:
        BackendError: if the directory exists, or Hugging Face has no such model.
    """
    dtype = next(module.parameters()).dtype
    config = hf_config(spec, dtype)
    with new_directory(directory) as partial:
        mine = _write_files(module, spec, partial, max_shard_bytes)
        if dist.get_rank() == 0:
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        files: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(files, mine)
        if dist.get_rank() == 0:
            _number_files(partial, [entry for entries in files for entry in entries])


def _write_files(
    module: torch.nn.Module, spec: ModelSpec, partial: Path, max_shard_bytes: int
) -> list[tuple[str, list[str], int]]:
    """Write this rank's tensors; (file, tensor names, bytes) of each file."""
    written: list[tuple[str, list[str], int]] = []
    shard_of: dict[str, Tensor] = {}

    def flush() -> None:
        if shard_of:
            file = f"rank{dist.get_rank()}-{len(written)}.safetensors"
            save_file(shard_of, partial / file, metadata={"format": "pt"})
            nbytes = sum(t.nbytes for t in shard_of.values())
            written.append((file, list(shard_of), nbytes))
            shard_of.clear()

    for name, full in written_parameters(module, stage_parameters(module)):
        source = hf_source(name)
        parts = separate(full, source, spec)
        size = sum(t.nbytes for t in shard_of.values())
        if size + full.nbytes > max_shard_bytes:
            flush()
        shard_of |= {
            n: part.contiguous().clone() for n, part in zip(source.names, parts, strict=True)
        }
    flush()
    return written


def written_parameters(
    module: torch.nn.Module, tensors: list[tuple[str, Any]]
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors on the CPU that this rank writes; each is one rank's.

    Every rank must take all of them.

    Args:
        tensors: the rank's slices by canonical name, in the order of `stage_parameters`.
    """
    groups = ParallelGroups.current()
    copies = {n for n, p in stage_parameters(module) if getattr(p, "shared", False)}
    writes_shared = group_rank(groups.tensor) == 0 and group_rank(groups.data) == 0
    writes_experts = group_rank(groups.expert_data) == 0
    for name, full in gather_slices(tensors, groups):
        if (writes_experts if is_expert(name) else writes_shared) and name not in copies:
            yield name, full


def _number_files(partial: Path, files: list[tuple[str, list[str], int]]) -> None:
    """Give the files Hugging Face's names and write the index, unless there is only one."""
    if len(files) == 1:
        os.replace(partial / files[0][0], partial / "model.safetensors")
        return
    weight_map = {}
    for number, (file, names, _) in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        os.replace(partial / file, partial / final)
        weight_map |= dict.fromkeys(names, final)
    total = sum(nbytes for _, _, nbytes in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
