"""Directories and files appear whole or not at all, and nothing foreign is ever deleted."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from psrl.core import files
from psrl.core.errors import ConfigError
from psrl.core.files import NewDirectory, is_ours, new_directory, remove_leftovers, write_file
from psrl.core.run.run_directory import RunDir


def write_ours(path: Path, content: str) -> None:
    with new_directory(path, "overwrite") as new:
        (new / "manifest.json").write_text(json.dumps({"schema_version": 1, "content": content}))
        (new / "deep").mkdir()
        (new / "deep" / "data").write_text(content)


def content_of(path: Path) -> str:
    """What `write_ours` wrote; both of its files must agree."""
    content = (path / "deep" / "data").read_text()
    assert json.loads((path / "manifest.json").read_text())["content"] == content
    return content


def test_a_directory_appears_when_its_block_succeeds(tmp_path: Path) -> None:
    place = tmp_path / "new" / "deeper" / "run"
    with new_directory(place) as new:
        (new / "file").touch()
        assert not place.exists()
    assert [p.name for p in place.iterdir()] == ["file"]
    assert [p.name for p in place.parent.iterdir()] == ["run"]


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "new" / "deeper" / "run"

    def interrupted() -> None:
        with new_directory(place) as new:
            (new / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("swaps", [True, False])
def test_overwriting_replaces_ours(
    tmp_path: Path, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(files.sys, "platform", "other")
    place = tmp_path / "run"
    write_ours(place, "old")
    with pytest.raises(ConfigError, match="exists already"), new_directory(place):
        pass
    with pytest.raises(ValueError, match="no"), new_directory(place, "overwrite"):
        raise ValueError("no")
    assert content_of(place) == "old"
    write_ours(place, "new")
    assert content_of(place) == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "manifest", [None, "not JSON", "[1]", "{}", '{"schema_version": "1"}', "[" * 100_000]
)
def test_a_foreign_directory_is_never_replaced(tmp_path: Path, manifest: str | None) -> None:
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter1.tex").write_text("years of work")
    if manifest is not None:
        (place / "manifest.json").write_text(manifest)
    assert not is_ours(place)
    with pytest.raises(ConfigError, match="no manifest of psRL"), new_directory(place, "overwrite"):
        pass
    assert (place / "chapter1.tex").read_text() == "years of work"


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "run.partial"
    foreign.mkdir()
    (foreign / "data").touch()
    write_ours(tmp_path / "run", "new")
    assert (foreign / "data").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_files_and_links_are_not_replaced(tmp_path: Path, kind: str) -> None:
    write_ours(tmp_path / "real", "old")
    place = tmp_path / "run"
    place.write_text("mine") if kind == "file" else place.symlink_to("real")
    with (
        pytest.raises(ConfigError, match="no directory of psRL's"),
        new_directory(place, "overwrite"),
    ):
        pass
    assert content_of(tmp_path / "real") == "old"
    assert place.is_symlink() or place.read_text() == "mine"


@pytest.mark.parametrize("given", [".", "deep", "deep/data", "link"])
def test_inputs_are_not_replaced(tmp_path: Path, given: str) -> None:
    place = tmp_path / "run"
    write_ours(place, "old")
    (tmp_path / "link").symlink_to(place / "deep")
    path = tmp_path / "link" if given == "link" else place / given
    with (
        pytest.raises(ConfigError, match="which this command reads"),
        new_directory(place, "overwrite", [path]),
    ):
        pass
    assert content_of(place) == "old"


@pytest.mark.parametrize("path", [".", "..", "/", "x/.."])
def test_the_working_directory_is_not_written(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for if_exists in ("error", "overwrite"):
        with (
            pytest.raises(ConfigError, match="working directory"),
            new_directory(
                Path(path),
                if_exists,  # type: ignore[arg-type]
            ),
        ):
            pass


def test_two_writers_of_one_place(tmp_path: Path) -> None:
    first = NewDirectory(tmp_path / "run")
    (first.path / "first").touch()
    with pytest.raises(ConfigError, match=rf"written by another psrl \(pid {os.getpid()} on "):
        NewDirectory(tmp_path / "run")
    assert NewDirectory(tmp_path / "other").path.exists()
    first.publish()
    first.discard()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["first"]
    with pytest.raises(ConfigError, match="exists already"):
        NewDirectory(tmp_path / "run")


def test_a_place_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    new = NewDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "foreign").touch()
    with pytest.raises(ConfigError, match="exists already"):
        new.publish()
    new.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from psrl.core.files import *\n"
        "new = NewDirectory(Path(sys.argv[1])); (new.path / 'file').touch()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=False)
        assert done.returncode == -signal.SIGKILL
        assert list(tmp_path.glob(".psrl-*.partial"))
        living = NewDirectory(tmp_path / "living")
        remove_leftovers(tmp_path)
        assert living.path.exists()
        living.discard()
        assert not list(tmp_path.iterdir())
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=False)
        write_ours(tmp_path / "run", "new")
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
        subprocess.run(["rm", "-r", str(tmp_path / "run")], check=True)
    remove_leftovers(tmp_path / "missing")


def test_a_long_name_is_written(tmp_path: Path) -> None:
    write_ours(tmp_path / ("n" * 255), "new")
    with pytest.raises(OSError, match="too long"):
        write_ours(tmp_path / ("n" * 256), "new")
    assert [len(p.name) for p in tmp_path.iterdir()] == [255]


def test_a_file_is_replaced_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "deep" / "file", "old")
    write_file(tmp_path / "deep" / "file", b"newer")
    assert (tmp_path / "deep" / "file").read_text() == "newer"

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "replace", fail)
    for name in ("deep/file", "another/file"):
        with pytest.raises(OSError, match="full"):
            write_file(tmp_path / name, "lost")
    assert [p.name for p in tmp_path.rglob("*")] == ["deep", "file"]
    assert (tmp_path / "deep" / "file").read_text() == "newer"


_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
_faults: list[int] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Let the next but n-th operation on a file fail, where `_faults` holds [n, 0]."""
    if not _faults or event not in _EVENTS:
        return
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    _faults[1] += 1
    if _faults[1] == _faults[0] + 1:
        raise OSError(errno.EIO, "injected", str(arguments[0]))


sys.addaudithook(_audit)  # cannot be removed; idle while `_faults` is empty


@contextmanager
def fault(number: int) -> Iterator[list[int]]:
    """Let one operation on a file fail; yields the number of those that were tried."""
    _faults[:] = [number, 0]
    try:
        yield _faults
    finally:
        _faults.clear()


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("exists", [True, False])
def test_after_an_error_anywhere_there_is_the_old_or_the_new(
    tmp_path: Path, exists: bool, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(files.sys, "platform", "other")
    number, failed = 0, 0
    while True:
        place = tmp_path / f"run{number}"
        if exists:
            write_ours(place, "old")
        reached = 0
        try:
            with fault(number) as state:
                try:
                    write_ours(place, "new")
                finally:
                    reached = state[1]
        except OSError:
            failed += 1
            assert content_of(place) == "old" if exists else not place.exists()
        else:
            assert content_of(place) == "new"
        if reached <= number:
            break
        number += 1
    assert failed >= 5


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """Files may not grow beyond a limit in a child, for limits from nothing to enough."""
    place = tmp_path / "run"
    with RunDir(place, "old") as run:
        run.write_json("metrics.json", {"x": "old"})
    script = (
        "import sys, signal; from pathlib import Path; import numpy as np\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from psrl.core.run.run_directory import RunDir\n"
        "with RunDir(Path(sys.argv[1]), 'new', 'overwrite') as run:\n"
        "    run.write_json('metrics.json', {'x': 'new' * 1000})\n"
    )
    outcomes = []
    for limit in (0, 100, 2000, 2900, 3500, 10_000):
        done = subprocess.run(
            [sys.executable, "-c", script, str(place)],
            preexec_fn=lambda n=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)),
            capture_output=True,
            text=True,
            check=False,
        )
        new = json.loads((place / "metrics.json").read_text())["x"] != "old"
        assert new == (done.returncode == 0), done.stderr
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
        outcomes.append(new)
    assert outcomes[0] is False
    assert outcomes[-1] is True
