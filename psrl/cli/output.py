"""What a command says: text for people on stdout, or one JSON object with `--json`."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from psrl.core.run.run_directory import finite

if TYPE_CHECKING:
    from psrl.sim import Progress

_SILENT_S = 2.0
_BETWEEN_LINES_S = 1.0

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

    def progress(self) -> "Callable[[Progress], None] | None":
        """`show_progress`, or None where no progress is wanted."""
        return None if self.quiet or self.json else show_progress()


def show_progress() -> "Callable[[Progress], None]":
    """Lines on stderr once a simulation takes over two seconds."""
    began_s = time.perf_counter()
    next_s = began_s + _SILENT_S
    phase, phase_began_s = "", began_s

    def on_progress(progress: "Progress") -> None:
        nonlocal next_s, phase, phase_began_s
        now_s = time.perf_counter()
        if progress.phase != phase:
            phase, phase_began_s = progress.phase, now_s
        if now_s < next_s:
            return
        next_s = now_s + _BETWEEN_LINES_S
        share = progress.finished_ops / progress.total_ops
        left_s = (now_s - phase_began_s) * (1.0 - share) / share
        print(
            f"\n  {phase}: {progress.finished_ops:,} of {progress.total_ops:,} ops, "
            f"{progress.simulated_s:.1f} s simulated, about {left_s:.0f} s left",
            end="",
            file=sys.stderr,
            flush=True,
        )

    return on_progress


def format_warnings(warnings: Iterable[str]) -> list[str]:
    """A line per way in which predictions leave the domain of their calibration."""
    return [f"warning: outside the calibration's domain: {text}" for text in warnings]


def describe_metrics(metrics: dict[str, Any]) -> str:
    """One line per phase and a total."""
    lines = [
        f"{'phase':<14}{'time':>12}{'executed tokens':>17}{'max/min':>9}{'bubbles':>9}"
        f"{'peak memory':>14}{'peak KV':>12}"
    ]
    rows = [*metrics["phases"].items(), ("total", metrics)]
    for name, row in rows:
        lines.append(
            f"{name:<14}{row['makespan_s']:>10.3f} s{row['executed_tokens']:>17,}"
            f"{row['worker_time_max_over_min']:>9.3f}{row['bubble_fraction']:>9.1%}"
            f"{row['peak_memory_bytes'] / 2**30:>10.2f} GiB{row['peak_kv_bytes'] / 2**20:>8.1f} MiB"
        )
    return "\n".join(lines)
