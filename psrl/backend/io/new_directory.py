"""A directory that all ranks write together, and that appears complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from psrl.core.errors import BackendError

_SUFFIX = ".partial"


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory beside it to write into, which gets its name when all ranks are done.

    Every rank must enter. After an error the partial directory stays, without the name, until the
    next attempt: other ranks may still be writing.

    Raises:
        BackendError: if the directory exists.
    """
    partial = directory.with_name(directory.name + _SUFFIX)
    if directory.exists():
        raise BackendError(f"{directory} exists already", "choose another path or remove it")
    dist.barrier()  # nobody creates it before everybody has looked
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    yield partial
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(partial, directory)
    dist.barrier()


def remove_partial(root: Path) -> None:
    """Remove the partial directories under `root`; no rank may still be writing."""
    for partial in root.glob(f"*{_SUFFIX}"):
        shutil.rmtree(partial)
