"""Which files to read, and which format they have."""

from collections.abc import Iterable
from pathlib import Path

from psrl.core.errors import TraceError

from .formats import read_head
from .registry import all_importers

# What is read from a folder; other files must be named one by one.
SUFFIXES = (".json", ".jsonl", ".traj", ".csv", ".log", ".pt", ".pkl", ".pickle")
COMPRESSED = (".gz", ".zst")
MAX_LISTED = 12


def list_files(paths: Iterable[Path]) -> list[Path]:
    """The files that paths stand for; folders in name order, with everything below them.

    Raises:
        TraceError: if there is none, or a path is missing or a psRL trace.
    """
    files: list[Path] = []
    for path in paths:
        if (path / "trace.json").is_file():
            raise TraceError(f"{path} is a psRL trace already", "use it without importing it")
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _is_recording(p))
            if not inside:
                raise TraceError(
                    f"{path}: no {', '.join('*' + s for s in SUFFIXES)} file in it",
                    "name the files",
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise TraceError(f"{path}: no such file or folder", "check the path")
    if not files:
        raise TraceError("no file to import", "name at least one file")
    return files


def detect_format(path: Path) -> tuple[str, str]:
    """Format name of a file (or of the first file of a folder) and the reason for it.

    Raises:
        TraceError: if no format or more than one fits; lists the formats.
    """
    head = read_head(list_files([path])[0])
    importers = all_importers()
    reasons = {name: importer.recognise(head) for name, importer in importers.items()}
    found = [(name, reason) for name, reason in reasons.items() if reason]
    if len(found) == 1:
        return found[0]
    if found:
        listed = "; ".join(f"{name} ({reason})" for name, reason in found)
        raise TraceError(f"{head.path}: fits several formats: {listed}", "choose one with --format")
    known = "; ".join(f"{name}: {importer.marks}" for name, importer in importers.items())
    start = f"it starts with a JSON {type(head.value).__name__}"
    if isinstance(head.value, dict):
        start += f" with the fields {[str(name)[:40] for name in list(head.value)[:8]]}"
    raise TraceError(
        f"{head.path}: unknown format, {head.problem or start}", f"known formats are {known}"
    )


def choose_format(paths: Iterable[Path], skip_bad: bool) -> tuple[str, str]:
    """The format that all files have, and the reason; with `skip_bad`, all that have one.

    Raises:
        TraceError: if there is none or several; lists what each file is.
    """
    formats: dict[Path, tuple[str, str]] = {}
    failures: dict[Path, TraceError] = {}
    for file in list_files(paths):
        try:
            formats[file] = detect_format(file)
        except TraceError as error:
            failures[file] = error
    found = {name: (name, reason) for name, reason in formats.values()}
    if len(found) == 1 and (skip_bad or not failures):
        return next(iter(found.values()))
    if len(found) <= 1:
        raise next(iter(failures.values()))
    listed = [f"{file.name} is {name}" for file, (name, _) in formats.items()]
    listed += [f"{file.name} is not recognised" for file in failures]
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    raise TraceError(
        f"files of several formats: {', '.join(listed[:MAX_LISTED])}{more}",
        "import each format on its own; or choose one with --format, and leave the other files "
        "out with --skip-bad",
    )


def _is_recording(path: Path) -> bool:
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(SUFFIXES)
