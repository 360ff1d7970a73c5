"""Files and directories that appear whole or not at all, and never in place of what is not psRL's.

A directory is written under a name of its own beside its place and published by one rename. While
it is written a lock file names the writer; the kernel drops the lock when the last process that
holds it ends, ranks that were forked meanwhile included, so a lock is never stale.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Literal

from .errors import ConfigError

IfExists = Literal["error", "overwrite"]

_MANIFESTS = ("manifest.json", "trace.json", "plan.json", "checkpoint.json")
_PREFIX, _PARTIAL = ".psrl-", ".partial"
# Linux' renameat2: paths relative to the working directory, and the flag that swaps two names.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def new_directory(
    path: Path, if_exists: IfExists = "error", inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Yield a directory to write into, which gets its name when the block succeeds.

    Args:
        if_exists: refuse or replace an existing directory.
        inputs: what the same command reads; none of it may lie in what is replaced.

    Raises:
        ConfigError: see `NewDirectory`.
    """
    new = NewDirectory(path, if_exists, inputs)
    try:
        yield new.path
        new.publish()
    finally:
        new.discard()


class NewDirectory:
    """A directory under construction, for writers that cannot use `new_directory`'s block.

    Attributes:
        path: where to write until `publish`.
        final_path: the name it will get.

    Raises:
        ConfigError: if the place is taken and may not be replaced: it exists and `if_exists` is
            "error", it is no directory that psRL wrote, it holds an input of the same command, or
            another process is writing it.
        OSError: if the place cannot be written.
    """

    def __init__(
        self, path: Path, if_exists: IfExists = "error", inputs: Iterable[Path] = ()
    ) -> None:
        self.final_path = _checked_place(path)
        self._if_exists = if_exists
        self._inputs = [Path(os.path.realpath(given)) for given in inputs]
        self._check_replaceable()
        self._made_parents = _make_parents(self.final_path.parent)
        self._lock: _Lock | None = None
        self.path = _beside(self.final_path)
        try:
            stem = _stem(self.final_path)
            self._lock = _Lock(stem, str(self.final_path))
            _remove_partials(stem)
            remove_leftovers(self.final_path.parent)
            self.path.mkdir()
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Give the directory its name, in place of an older one if that was allowed."""
        self._check_replaceable()
        if self.final_path.is_dir() and any(self.final_path.iterdir()):
            _replace_directory(self.path, self.final_path)
        else:
            os.replace(self.path, self.final_path)
            self._made_parents = []

    def discard(self) -> None:
        """Remove what is not published, and let others write the place; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        for parent in reversed(self._made_parents):
            with suppress(OSError):
                parent.rmdir()
        self._made_parents = []

    def _check_replaceable(self) -> None:
        place = self.final_path
        if not os.path.lexists(place):
            return
        if self._if_exists == "error":
            raise ConfigError(
                f"{place} exists already",
                "choose another path, remove it, or pass --if-exists overwrite where the command "
                "has it",
            )
        if place.is_symlink() or not place.is_dir():
            raise ConfigError(
                f"{place} is no directory of psRL's, so it is not replaced", "choose another path"
            )
        for given in self._inputs:
            if Path(os.path.realpath(place)) in (given, *given.parents):
                raise ConfigError(
                    f"replacing {place} would delete {given}, which this command reads",
                    "choose another path",
                )
        if any(place.iterdir()) and not is_ours(place):
            raise ConfigError(
                f"{place} holds no manifest of psRL, so it is somebody else's and not replaced",
                "choose another path, or move that directory away",
            )


def check_new_directory(
    path: Path, if_exists: IfExists = "error", inputs: Iterable[Path] = ()
) -> None:
    """Raise now what `new_directory` would raise after a long computation."""
    NewDirectory(path, if_exists, inputs).discard()


def check_new_file(path: Path, if_exists: IfExists = "error") -> None:
    """Refuse a place for `write_file` that is taken, unless psRL's own file may be replaced.

    Raises:
        ConfigError: if something is there that must stay.
    """
    place = _checked_place(path)
    if not os.path.lexists(place):
        return
    if if_exists == "error":
        raise ConfigError(
            f"{path} exists already", "choose another path, or pass --if-exists overwrite"
        )
    if not _has_schema(place):
        raise ConfigError(
            f"{path} is no file that psRL wrote, so it is not replaced", "choose another path"
        )


def is_ours(directory: Path) -> bool:
    """Whether psRL wrote a directory: one of its manifests is there, with a schema version."""
    return any(_has_schema(directory / name) for name in _MANIFESTS)


def _has_schema(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and isinstance(content.get("schema_version"), int)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all; an existing one is replaced.

    Raises:
        OSError: if the place cannot be written; an existing file is as before.
    """
    place = _checked_place(path)
    made = _make_parents(place.parent)
    partial = _beside(place)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, place)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()
        raise


def free_bytes(path: Path) -> int | None:
    """Free space where a path lies or would lie; None if that cannot be told."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def _checked_place(path: Path) -> Path:
    """The absolute path, links in it not followed."""
    try:
        place = Path(os.path.abspath(path))
        place.name.encode()
    except (ValueError, UnicodeEncodeError):
        raise ConfigError(f"{str(path)!r} is no path", "choose another path") from None
    if not place.name or place in (Path.cwd(), *Path.cwd().parents):
        raise ConfigError(
            f"{path} is the working directory or a parent of it, which cannot be written as a "
            "whole",
            "name a directory or file below it",
        )
    return place


def _make_parents(parent: Path) -> list[Path]:
    """Create a directory; those that were missing, outermost first."""
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _stem(place: Path) -> Path:
    """Start of the names of everything that belongs to a place; short, however long its name."""
    digest = blake2b(os.fsencode(place.name), digest_size=8).hexdigest()
    return place.with_name(f"{_PREFIX}{digest}")


def _beside(place: Path) -> Path:
    stem = _stem(place)
    return stem.with_name(f"{stem.name}-{token_hex(8)}{_PARTIAL}")


def remove_leftovers(parent: Path) -> None:
    """Remove what killed writers left in a directory; what is being written stays.

    So does what another host wrote, whose locks a network file system may not show.
    """
    if not parent.is_dir():
        return
    for stem in {left.name.rpartition("-")[0] for left in parent.glob(f"{_PREFIX}*{_PARTIAL}")}:
        with suppress(OSError):
            if f" on {socket.gethostname()} " not in (parent / f"{stem}.lock").read_text():
                continue
        try:
            lock = _Lock(parent / stem, str(parent))
        except ConfigError:
            continue
        _remove_partials(parent / stem)
        lock.release()


def _remove_partials(stem: Path) -> None:
    """Remove what killed writers of a place left; the caller holds its lock."""
    for left in stem.parent.glob(f"{stem.name}-*{_PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            left.unlink()  # of `write_file`


class _Lock:
    """A lock on a place; names its holder for others to read."""

    def __init__(self, stem: Path, place: str) -> None:
        self._path = stem.with_name(stem.name + ".lock")
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(self._file, 1000).decode(errors="replace").strip()
                os.close(self._file)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise ConfigError(
                    f"{place} is being written by another psrl ({holder or 'just started'})",
                    "wait for it, end it, or choose another path",
                ) from None
            if self._is_current():
                break
            os.close(self._file)  # its last holder has removed the name meanwhile
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        holder = f"pid {os.getpid()} on {socket.gethostname()} since {started}\n"
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, holder.encode())
        except OSError:
            self.release()
            raise

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the name, then let go."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._file)


def _replace_directory(new: Path, old: Path) -> None:
    """Rename in one step where the system can swap names, else so that an error undoes it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "renameat2"):
            names = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old))
            if libc.renameat2(*names, _RENAME_EXCHANGE) == 0:
                shutil.rmtree(new, ignore_errors=True)
                return
            if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(old))
    aside = _beside(old)
    os.replace(old, aside)
    try:
        os.replace(new, old)
    except BaseException:
        os.replace(aside, old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
