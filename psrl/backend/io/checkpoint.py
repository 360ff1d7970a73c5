"""Checkpoints of a training run, independent of the parallel layout that wrote them.

A checkpoint is a directory with main weights, momentum and variance of every parameter as full
tensors by canonical name, spread over safetensors files of the ranks that wrote them, and
`checkpoint.json`. It appears complete or not at all. The weights of the model are rounded main
weights, so a resumed run on the same layout repeats every bit.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from psrl.backend.model.parameters import (
    ParallelGroups,
    group_rank,
    group_size,
    shard,
    stage_parameters,
)
from psrl.backend.model.weights import written_parameters
from psrl.backend.train.optimizer import STATES, MainAdamW
from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import BackendError, ConfigError

from .new_directory import new_directory

CHECKPOINT_SCHEMA_VERSION = 1
_HEADER = "checkpoint.json"


def save_checkpoint(
    directory: Path,
    module: torch.nn.Module,
    optimizer: MainAdamW,
    spec: ModelSpec,
    progress: dict[str, Any],
) -> None:
    """Write a checkpoint; every rank must call it.

    Args:
        progress: what the caller wants back on resume, as JSON; e.g. the next iteration.

    Raises:
        BackendError: if the directory exists.
    """
    with new_directory(directory) as partial:
        file_of: dict[str, str] = {}
        for kind in STATES:
            slices = list(optimizer.state(kind).items())
            mine = {name: full.contiguous() for name, full in written_parameters(module, slices)}
            file = f"{kind}-rank{dist.get_rank():05d}.safetensors"
            if mine:
                save_file(mine, partial / file)
            file_of |= {f"{kind}.{name}": file for name in mine}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, file_of)
        if dist.get_rank() == 0:
            header = {
                "schema_version": CHECKPOINT_SCHEMA_VERSION,
                "model": spec.model_dump(),
                "num_steps": optimizer.num_steps,
                "progress": progress,
                "file_of": {key: file for part in gathered for key, file in part.items()},
            }
            text = json.dumps(header, indent=1, sort_keys=True)
            (partial / _HEADER).write_text(text + "\n", encoding="utf-8")


def load_checkpoint(
    directory: Path, module: torch.nn.Module, optimizer: MainAdamW, spec: ModelSpec
) -> dict[str, Any]:
    """Give a model and its optimizer the state of a checkpoint; returns its progress.

    Raises:
        BackendError: if it is no complete checkpoint of this schema and model.
    """
    header = _read_header(directory, spec)
    groups = ParallelGroups.current()
    rank, size = group_rank(groups.tensor), group_size(groups.tensor)
    files: dict[str, Any] = {}

    def read(kind: str, name: str) -> Tensor:
        try:
            file = header["file_of"][f"{kind}.{name}"]
            if file not in files:
                files[file] = safe_open(directory / file, framework="pt")
            full: Tensor = files[file].get_tensor(name)
        except (KeyError, OSError, SafetensorError) as error:
            raise BackendError(
                f"{directory}: {kind} of {name} cannot be read ({error})",
                "the checkpoint is damaged: resume from an earlier one",
            ) from None
        return shard(full, name, rank, size)

    names = [name for name, _ in stage_parameters(module)]
    states = {kind: {name: read(kind, name) for name in names} for kind in STATES}
    optimizer.restore(states, header["num_steps"])
    progress: dict[str, Any] = header["progress"]
    return progress


def latest_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint with the last name in sorted order; None if there is none."""
    complete = [path.parent for path in sorted(root.glob(f"*/{_HEADER}"))]
    complete = [path for path in complete if not path.name.startswith(".")]  # not published
    return complete[-1] if complete else None


def checkpoint_to_resume(root: Path, resume: bool) -> Path | None:
    """What a run that saves under `root` starts from; every rank must call it.

    Rank 0 looks, so that ranks whose file systems lag behind start from the same one.

    Returns:
        The latest checkpoint if the run resumes, None if it starts anew.

    Raises:
        ConfigError: see `check_resumable`.
    """
    found = [latest_checkpoint(root)]
    dist.broadcast_object_list(found)
    check_resumable(root, found[0], resume)
    return found[0]


def check_resumable(root: Path, latest: Path | None, resume: bool) -> None:
    """Check that a run under `root` may start, given the latest checkpoint there.

    Raises:
        ConfigError: if there is none to resume from, or if a new run would continue the names of
            another.
    """
    if resume and latest is None:
        raise ConfigError(
            f"{root} has no complete checkpoint to resume from", "start without --resume"
        )
    if latest is not None and not resume:
        raise ConfigError(
            f"{root} has checkpoint {latest.name} of an earlier run",
            "pass --resume to continue it, or choose another directory",
        )


def checkpoint_name(num_steps: int) -> str:
    """Name of the checkpoint after so many optimizer steps; names sort by steps."""
    return f"step_{num_steps:09d}"


def _read_header(directory: Path, spec: ModelSpec) -> dict[str, Any]:
    path = directory / _HEADER
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        version, model = header["schema_version"], header["model"]
    except OSError:
        raise BackendError(f"{directory} is no checkpoint: it has no {_HEADER}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    if version != CHECKPOINT_SCHEMA_VERSION:
        raise BackendError(
            f"{path}: schema version {version}, this psRL reads {CHECKPOINT_SCHEMA_VERSION}"
        )
    wanted = spec.model_dump()
    for key in wanted:
        if key != "name" and model.get(key) != wanted[key]:
            raise BackendError(
                f"{path}: the checkpoint's model has {key} {model.get(key)}, the plan's "
                f"{spec.name} has {wanted[key]}",
                "plan with the model that was trained",
            )
    complete: dict[str, Any] = header
    return complete
