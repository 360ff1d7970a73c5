"""A directory that all ranks write together, and that appears complete or not at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from psrl.core.errors import PsrlError
from psrl.core.files import NewDirectory


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory to write into, which gets its name when all ranks are done.

    Every rank must enter. After an error on some rank what was written stays, without the name,
    for `psrl.core.files.remove_leftovers`: other ranks may still be writing.

    Raises:
        ConfigError: on every rank; see `psrl.core.files.NewDirectory`.
        OSError: on every rank, if the place cannot be written.
    """
    opened: list[NewDirectory] = []

    def begin() -> Path:
        opened.append(NewDirectory(directory))
        return opened[0].path

    def end() -> None:
        opened[0].publish()
        opened[0].discard()

    yield _on_first_rank(begin)
    dist.barrier()
    _on_first_rank(end)


def _on_first_rank(function: Callable[[], Path | None]) -> Any:
    """What rank 0 gets from the function, which it alone calls, or its error, on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (PsrlError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    result, error = outcome
    if error is not None:
        raise error
    return result
