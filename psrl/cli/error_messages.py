"""What a command says instead of a traceback when the user, the system or a limit stops it."""

import errno
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from psrl.core.errors import ExitCode, PsrlError
from psrl.core.files import free_bytes

from .output import OutputClosedError

INTERRUPTED, CLOSED_PIPE, TERMINATED = 130, 141, 143
"""Exit codes 128 + signal, as a shell would report SIGINT, SIGPIPE and SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds like Ctrl-C so that nothing half-written stays."""


# Errors of a path that the user chose: another one helps.
_PLACE = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EISDIR: "it is a directory",
    errno.ENOENT: "there is no such file or directory",
    errno.EEXIST: "it exists already",
    errno.ELOOP: "its links go round in a circle",
    errno.ENOTEMPTY: "the directory is not empty",
}
_FULL = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "the disk quota is used up"}


def explain_os_error(error: OSError) -> PsrlError:
    """The error with path, cause and what to do next; BAD_INPUT where another path helps."""
    names = [os.fsdecode(n) for n in (error.filename, error.filename2) if n is not None]
    where = " -> ".join(names) or "a file"
    code = error.errno or 0
    if code in _FULL:
        free = free_bytes(Path(names[0])) if names and os.path.isabs(names[0]) else None
        left = "" if free is None else f" ({free / 2**20:,.0f} MiB free)"
        return PsrlError(
            f"cannot write {where}: {_FULL[code]}{left}",
            "free some space or choose a path on another disk; earlier results are untouched",
        )
    if code in _PLACE:
        found = PsrlError(f"{where}: {_PLACE[code]}", "choose another path")
        found.exit_code = ExitCode.BAD_INPUT
        return found
    reason = error.strerror or str(error) or type(error).__name__
    return PsrlError(f"{where}: {reason}", "earlier results are untouched")


def report(error: BaseException) -> int:
    """Print what stopped a command on stderr; returns the exit code.

    Raises:
        BaseException: the error itself, if it is a fault of psRL.
    """
    if isinstance(error, OutputClosedError):
        return CLOSED_PIPE
    if isinstance(error, OSError) and not isinstance(error, PsrlError):
        error = explain_os_error(error)
    if isinstance(error, PsrlError):
        say(f"psrl: error: {error}")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        terminated = isinstance(error, Terminated)
        what = "terminated" if terminated else "interrupted"
        say(f"psrl: {what}; nothing half-written was kept")
        return TERMINATED if terminated else INTERRUPTED
    if isinstance(error, MemoryError):
        detail = f" ({error})" if str(error) else ""
        say(
            f"psrl: error: the memory of this host does not suffice{detail}\n"
            "  -> ask for less at a time, or use a larger host"
        )
        return ExitCode.FAILED
    raise error


def say(text: str) -> None:
    """Print on stderr, wherever that goes."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Replace closed streams, and let SIGTERM unwind like Ctrl-C.

    Not in a rank of torchrun, which must die at once.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a shell closes them by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and "RANK" not in os.environ and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one does not wait for us
    raise Terminated
