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
from psrl.core.cost.hf_config import differing_fields, read_hf_config
from psrl.core.errors import BackendError

from .hf_layout import hf_config, hf_source, hf_tensor_names, join, separate
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
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Buffers that some releases store; they follow from the configuration.
_COMPUTED = (".rotary_emb.inv_freq",)
_NAMED = 6


def load_hf(
    module: torch.nn.Module, spec: ModelSpec, directory: Path, check_config: bool = True
) -> None:
    """Copy the weights of a Hugging Face directory into this rank's part of a model.

    Args:
        check_config: whether `config.json` must describe the model; False for a caller that has
            read it with changes of its own.

    Raises:
        ConfigError: if `config.json` says what the backend does not compute.
        BackendError: if the directory is of another model, or a tensor is missing, superfluous, of
            another shape, or quantised.
    """
    if not directory.is_dir():
        raise BackendError(f"{directory} is no directory of weights")
    if check_config:
        _check_same_model(directory, spec)
    tensors = _HfDirectory(directory)
    tensors.check_names(spec)
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


def _check_same_model(directory: Path, spec: ModelSpec) -> None:
    found = read_hf_config(directory)
    differing = differing_fields(found, spec)
    if differing:
        raise BackendError(
            f"{directory} is of another model than the plan's {spec.name}: "
            + "; ".join(
                f"{name} is {getattr(found, name)}, the plan has {getattr(spec, name)}"
                for name in differing
            ),
            "plan with the model that these weights are of",
        )


class _HfDirectory:
    """Tensors of one or several safetensors files by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Any] = {}
        self._has_index = (directory / _INDEX).exists()
        if self._has_index:
            self._file_of = self._read_index()
        else:
            files = sorted(path.name for path in directory.glob("*.safetensors"))
            self._file_of = {}
            for name in files:
                for key in self._file(name).keys():  # noqa: SIM118 - it is no mapping
                    if key in self._file_of:
                        raise BackendError(
                            f"{directory}: tensor {key} is both in {self._file_of[key]} and {name}",
                            f"several files need {_INDEX}",
                        )
                    self._file_of[key] = name
        if not self._file_of:
            raise BackendError(
                f"{directory} holds no safetensors weights",
                "convert them with transformers: model.save_pretrained(directory)",
            )

    def _read_index(self) -> dict[str, str]:
        path = self._directory / _INDEX
        weight_map = _read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise BackendError(f"{path}: weight_map must give each tensor a file beside it")
        return weight_map

    def check_names(self, spec: ModelSpec) -> None:
        """Check that the tensors are those of the model: none missing, none superfluous.

        Raises:
            BackendError: with the names.
        """
        wanted = hf_tensor_names(spec)
        found = {name for name in self._file_of if not name.endswith(_COMPUTED)}
        missing, superfluous = sorted(wanted - found), sorted(found - wanted)
        if superfluous == ["lm_head.weight"] and not missing and self._repeats_the_embedding():
            return
        if missing or superfluous:
            parts = [
                f"{len(names)} tensor(s) {what}: {', '.join(names[:_NAMED])}"
                + (", ..." if len(names) > _NAMED else "")
                for what, names in (("missing", missing), ("that nothing would use", superfluous))
                if names
            ]
            raise BackendError(
                f"{self._directory} does not hold the weights of {spec.name}: {'; '.join(parts)}",
                "are these the weights of the plan's model?",
            )

    def _repeats_the_embedding(self) -> bool:
        """Whether a head that is tied to the embedding is stored with its values."""
        names = ("lm_head.weight", "model.embed_tokens.weight")
        head, embedding = (self._file(self._file_of[name]).get_tensor(name) for name in names)
        return torch.equal(head, embedding)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise BackendError(f"cannot read {self._directory / name} ({error})") from None
            if self._has_index:
                self._check_listed(name)
        return self._open[name]

    def _check_listed(self, file: str) -> None:
        unlisted = [k for k in self._open[file].keys() if self._file_of.get(k) != file]  # noqa: SIM118
        if unlisted:
            raise BackendError(
                f"{self._directory / file} holds {unlisted[0]}"
                f"{f' and {len(unlisted) - 1} more' if len(unlisted) > 1 else ''}, which {_INDEX} "
                "does not place there",
                "the files are of different checkpoints, or one was changed",
            )

    def get(self, name: str, shape: list[int]) -> Tensor:
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
        if tensor.dtype not in _DTYPES:
            raise BackendError(
                f"{self._directory}: tensor {name} is of {tensor.dtype}",
                "quantised weights are not read; convert them to bfloat16 first",
            )
        return tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
