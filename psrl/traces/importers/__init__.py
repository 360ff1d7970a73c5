"""Import recorded rollouts: choose the format, read the files, return a `Recording`."""

from pathlib import Path

from psrl.core.errors import ConfigError, TraceError, suggest
from psrl.traces.recording import Recording

from .detect import choose_format, detect_format, list_files
from .formats import FileHead, Importer
from .options import ImportOptions
from .registry import IMPORTERS, all_importers

__all__ = [
    "IMPORTERS",
    "FileHead",
    "ImportOptions",
    "Importer",
    "all_importers",
    "choose_format",
    "detect_format",
    "import_recording",
]


def import_recording(paths: list[Path], format: str | None, options: ImportOptions) -> Recording:
    """Read recorded files; a folder stands for the recordings in it and below, in name order.

    Args:
        paths: files or folders of one format.
        format: name of an importer; None detects it from each file.
        options: what to read and how.

    Raises:
        TraceError: if a file or record is malformed or the format is unknown or mixed.
        ConfigError: if an option does not fit the format.
    """
    files = list_files(paths)
    if format is None:
        format, _ = choose_format(files, options.skip_bad)
    importers = all_importers()
    if format not in importers:
        raise TraceError(
            f"unknown format '{format}'.{suggest(format, list(importers))}",
            f"known formats are {', '.join(importers)}",
        )
    importer = importers[format]
    _check_options(format, importer, options)
    return importer.read(files, options)


def _check_options(format: str, importer: Importer, options: ImportOptions) -> None:
    if options.mode is not None and options.mode not in importer.modes:
        raise ConfigError(
            f"mode '{options.mode}' cannot be taken from {format} files",
            f"modes of this format are {', '.join(importer.modes)}; others are derived from traces",
        )
    given = {"block_tokens": options.block_tokens, "prompt_file": options.prompt_file}
    for name, value in given.items():
        if value is not None and name not in importer.takes:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name} {value} has no meaning for {format}", f"leave {flag} out")
