"""The `psrl` command: composes all parts and holds no logic of its own."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `psrl`; returns the exit code (`psrl.core.errors.ExitCode`)."""
    try:
        # Imported here, because Ctrl-C may come while the libraries are loaded.
        from .commands import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        return 130


__all__ = ["main"]
