"""What a command says: text for people on stdout, or one JSON object with `--json`."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, TextIO

import tyro

from psrl.core.run.run_directory import finite

_results: TextIO | None = None


class OutputClosedError(Exception):
    """Whoever reads stdout has closed it, `head` for instance: nothing more to say to them."""


@contextmanager
def results_only_on_stdout() -> Iterator[None]:
    """Keep stdout for `print_result`; whatever libraries print meanwhile goes to stderr.

    Raises:
        OutputClosedError: if the reader of the results has closed stdout.
        OSError: if the results could not be written.
    """
    global _results
    shown, results_fd = sys.stdout, None
    with suppress(OSError, ValueError):
        if shown.fileno() == 1:
            # Compiled code prints on the file descriptor, so that must lead to stderr too.
            results_fd = os.dup(1)
            shown = os.fdopen(results_fd, "w", encoding=shown.encoding, errors=shown.errors)
            sys.stdout.flush()
            os.dup2(2, 1)
    before, sys.stdout, _results = sys.stdout, sys.stderr, shown
    try:
        yield
    finally:
        _results, sys.stdout = None, before
        if results_fd is not None:
            os.dup2(results_fd, 1)
            with suppress(OSError):
                shown.close()


def print_result(text: str) -> None:
    """Print a part of the result of a command on stdout."""
    with writing_stdout() as stream:
        print(text, file=stream)


@contextmanager
def writing_stdout() -> Iterator[TextIO]:
    """The stream for results; it has taken everything when the block ends.

    Raises:
        OutputClosedError: if its reader has closed it.
        OSError: if output is lost.
    """
    stream = _results or sys.stdout
    try:
        try:
            yield stream
        finally:
            stream.flush()
    except OSError as error:
        # The interpreter would try again at its end.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise OutputClosedError from None
        raise OSError(error.errno, error.strerror, "standard output") from None


@dataclass(frozen=True)
class OutputOptions:
    """Options that every command has."""

    json: Annotated[bool, tyro.conf.arg(help="print one JSON object on stdout, nothing else")] = (
        False
    )
    quiet: Annotated[bool, tyro.conf.arg(help="no progress on stderr")] = False

    def emit(self, result: dict[str, Any], text: str) -> None:
        """Print the result of a command."""
        if self.json:
            print_result(json.dumps(finite(result), sort_keys=True, allow_nan=False))
        else:
            print_result(text)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Say on stderr what goes on, and how long it took."""
        if self.quiet or self.json:
            yield
            return
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
        started_s = time.perf_counter()
        try:
            yield
        except BaseException:
            print(" failed", file=sys.stderr, flush=True)
            raise
        print(f" {time.perf_counter() - started_s:.1f} s", file=sys.stderr, flush=True)
