"""What an importer is: how it recognises a file and how it reads it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from psrl.core.errors import TraceError
from psrl.traces.recording import Recording

from .files import read_bytes, read_lines, read_start
from .options import ImportOptions
from .pickles import is_pickled, load_pickled
from .reading import parse_json

HEAD_BYTES = 64 << 10

SpecialOption = Literal["block_tokens", "prompt_file"]


@dataclass(frozen=True)
class FileHead:
    """What a file shows at first sight.

    Attributes:
        path: the file.
        start: its first bytes, decompressed, as text; broken characters are replaced.
        value: its first JSON value, or the object it pickles; None if it is neither.
        problem: why `value` is None.
    """

    path: Path
    start: str
    value: Any
    problem: str = ""

    def has(self, *names: str) -> bool:
        """Whether the first value is an object with all these fields."""
        return isinstance(self.value, dict) and all(name in self.value for name in names)

    def reason(self, what: str, *names: str) -> str | None:
        """`what` with the fields if `has(*names)`, else None."""
        return f"{what} with {' and '.join(map(repr, names))}" if self.has(*names) else None


@dataclass(frozen=True)
class Importer:
    """A format.

    Attributes:
        marks: what its files look like.
        recognise: the reason why a file has this format, or None.
        read: the recording of files of this format. The options' mode is one of `modes`.
        modes: sampling modes on offer, the usual one first.
        takes: options that only some formats understand.
    """

    marks: str
    recognise: Callable[[FileHead], str | None]
    read: Callable[[list[Path], ImportOptions], Recording]
    modes: tuple[str, ...] = ("step",)
    takes: frozenset[SpecialOption] = frozenset()


def read_head(path: Path) -> FileHead:
    """The first sight of a file.

    Raises:
        TraceError: if it cannot be read, is empty, or is a pickle that is refused.
    """
    raw = read_start(path, HEAD_BYTES)
    if is_pickled(raw):
        return FileHead(path, "", load_pickled(path))
    start = raw.decode("utf-8", "replace")
    where, line = next(read_lines(path))
    try:
        return FileHead(path, start, parse_json(line, where))
    except TraceError as first_error:
        problem = first_error.message
    if start.lstrip()[:1] in ("{", "["):
        try:
            return FileHead(path, start, parse_json(read_bytes(path), str(path)))
        except TraceError as error:
            problem = f"{error.message}; as JSON lines: {problem}"
    return FileHead(path, start, None, problem)
