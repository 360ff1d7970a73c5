"""Import recorded rollouts: choose the format, read the files, return a `Recording`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.core.errors import TraceError, suggest
from psrl.traces.recording import Recording

from . import claude_code, messages, mooncake
from .options import ImportOptions
from .reading import parse_json, read_bytes, read_lines

__all__ = ["IMPORTERS", "ImportOptions", "Importer", "detect_format", "import_recording"]


@dataclass(frozen=True)
class Importer:
    """A format: what its files look like, how to recognise and how to read them.

    `recognise` takes the first JSON value of a file and returns a reason, or None.
    """

    marks: str
    recognise: Callable[[Any], str | None]
    read: Callable[[list[Path], ImportOptions], Recording]


IMPORTERS: dict[str, Importer] = {
    "claude_code": Importer(claude_code.MARKS, claude_code.recognise, claude_code.read),
    "messages": Importer(messages.MARKS, messages.recognise, messages.read),
    "mooncake": Importer(mooncake.MARKS, mooncake.recognise, mooncake.read),
    "tau_bench": Importer(
        messages.TAU_BENCH_MARKS, messages.recognise_tau_bench, messages.read_tau_bench
    ),
}


def detect_format(path: Path) -> tuple[str, str]:
    """Format name of a file (or of the first file of a folder) and the reason for it.

    Raises:
        TraceError: if no format or more than one fits; lists the formats.
    """
    file = _files([path])[0]
    value = _first_json_value(file)
    reasons = {name: importer.recognise(value) for name, importer in IMPORTERS.items()}
    found = [(name, reason) for name, reason in reasons.items() if reason]
    if len(found) == 1:
        return found[0]
    if found:
        listed = "; ".join(f"{name} ({reason})" for name, reason in found)
        raise TraceError(f"{file}: fits several formats: {listed}", "choose one with --format")
    known = "; ".join(f"{name}: {importer.marks}" for name, importer in IMPORTERS.items())
    keys = f" with the fields {list(value)[:8]}" if isinstance(value, dict) else ""
    raise TraceError(
        f"{file}: unknown format, it starts with a JSON {type(value).__name__}{keys}",
        f"known formats are {known}",
    )


def import_recording(paths: list[Path], format: str | None, options: ImportOptions) -> Recording:
    """Read recorded files; a folder stands for its *.json and *.jsonl files in name order.

    Args:
        paths: files or folders of one format.
        format: name in `IMPORTERS`; None detects it from each file.
        options: what to read and how.

    Raises:
        TraceError: if a file or record is malformed or the format is unknown or mixed.
        ConfigError: if an option does not fit the format.
    """
    files = _files(paths)
    if format is None:
        format = _detect_one_format(files, options)
    if format not in IMPORTERS:
        raise TraceError(
            f"unknown format '{format}'.{suggest(format, list(IMPORTERS))}",
            f"known formats are {', '.join(IMPORTERS)}",
        )
    return IMPORTERS[format].read(files, options)


def _detect_one_format(files: list[Path], options: ImportOptions) -> str:
    formats: dict[str, Path] = {}
    failure: TraceError | None = None
    for file in files:
        try:
            formats.setdefault(detect_format(file)[0], file)
        except TraceError as error:
            if not options.skip_bad:
                raise
            failure = error
    if len(formats) > 1:
        listed = ", ".join(f"{file.name} is {name}" for name, file in formats.items())
        raise TraceError(f"files of several formats: {listed}", "import each format on its own")
    if formats:
        return next(iter(formats))
    raise failure or TraceError("no file to import", "name at least one file")


def _files(paths: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if (path / "trace.json").is_file():
            raise TraceError(f"{path} is a psRL trace already", "use it without importing it")
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
            if not inside:
                raise TraceError(f"{path}: no *.json or *.jsonl file in it", "name the files")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise TraceError(f"{path}: no such file or folder", "check the path")
    if not files:
        raise TraceError("no file to import", "name at least one file")
    return files


def _first_json_value(path: Path) -> Any:
    """The first line's value if it is JSON by itself, else that of the whole file."""
    where, line = next(read_lines(path))
    try:
        return parse_json(line, where)
    except TraceError as first_error:
        try:
            return parse_json(read_bytes(path), str(path))
        except TraceError as error:
            raise TraceError(
                f"{error.message}; as JSON lines: {first_error.message}",
                "is it a text file of recorded rollouts, whole and in UTF-8?",
            ) from None
