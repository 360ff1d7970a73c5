"""Run directories: every command writes one, whole or not at all.

`manifest.json` holds what differs between two equal runs (times, host, versions, command line);
everything else is byte-identical for equal inputs and seed.
"""

import json
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from psrl.core.errors import ConfigError
from psrl.core.files import IfExists, NewDirectory

RUN_SCHEMA_VERSION = 1

_REPORTED_PACKAGES = ("numpy", "pyarrow", "simpy", "ortools", "torch", "megatron-core", "triton")


class RunDir:
    """A run directory under construction; it appears under its name when the block succeeds.

    Example:
        with RunDir(Path("runs/demo"), command="simulate") as run:
            run.write_json("metrics.json", metrics)

    Args:
        path: final directory.
        command: name of the psRL command.
        if_exists: refuse or replace an existing directory.
        details: further entries of the manifest, e.g. the trace hash and the seed.
        inputs: what the command reads, which must not be replaced.

    Raises:
        ConfigError: see `NewDirectory`; nothing has been computed yet.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        if_exists: IfExists = "error",
        details: Mapping[str, Any] | None = None,
        inputs: Iterable[Path] = (),
    ) -> None:
        self._new = NewDirectory(path, if_exists, inputs)
        self.final_path, self.path = path, self._new.path
        self._command = command
        self._details = dict(details or {})
        self._started_s = 0.0

    def __enter__(self) -> "RunDir":
        self._started_s = time.time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._write_manifest()
                self._new.publish()
        finally:
            self._new.discard()

    def _write_manifest(self) -> None:
        self.write_json(
            "manifest.json",
            {
                "schema_version": RUN_SCHEMA_VERSION,
                "command": self._command,
                "command_line": sys.argv,
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_s)),
                "wall_time_s": round(time.time() - self._started_s, 3),
                "git_commit": _git_commit(),
                "versions": environment_versions(),
                "platform": platform.platform(),
                **self._details,
            },
        )

    def note(self, **details: Any) -> None:
        """Add entries to the manifest."""
        self._details |= details

    def write_json(self, name: str, value: Any) -> Path:
        """Write a strict JSON file with sorted keys; returns its path."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(value), indent=1, sort_keys=True, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
        return path


def finite(value: Any) -> Any:
    """The value with infinities and NaN replaced by None: JSON has neither."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file of a run directory.

    Raises:
        ConfigError: if it is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{path} is missing", "is this a psRL run directory?") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest of a run directory.

    Raises:
        ConfigError: if it is missing, no manifest or of another schema, with the command to repeat.
    """
    path = run / "manifest.json"
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path}: holds no JSON object", "is this a psRL run directory?")
    version = manifest.get("schema_version")
    if version != RUN_SCHEMA_VERSION or isinstance(version, bool):
        words = manifest.get("command_line")
        command = "the command that wrote it"
        if isinstance(words, list) and len(words) > 1:
            command = f"psrl {shlex.join(map(str, words[1:]))}"
        raise ConfigError(
            f"{path}: schema version {version!r}, this psRL reads {RUN_SCHEMA_VERSION}",
            f"run it again: {command}",
        )
    return manifest


def environment_versions() -> dict[str, str]:
    """Versions of Python, psRL and the packages that can change a result."""
    versions = {"python": platform.python_version()}
    for name in ("psrl", *_REPORTED_PACKAGES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_commit() -> str | None:
    """Commit of the source tree psRL runs from, "+dirty" if it differs; None outside git."""
    root = Path(__file__).resolve().parents[3]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return commit + ("+dirty" if git("status", "--porcelain") else "")
