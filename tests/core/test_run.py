"""Run directories appear whole or not at all."""

import json
from pathlib import Path

import pytest

from psrl.core.errors import ConfigError
from psrl.core.run.run_directory import RunDir, environment_versions, read_json


def test_run_appears_when_the_block_succeeds(tmp_path: Path) -> None:
    with RunDir(tmp_path / "runs" / "demo", "simulate", details={"seed": 3}) as run:
        assert run.write_json("metrics.json", {"b": 1, "a": [2]}) == run.path / "metrics.json"
        run.write_json("plots/data.json", {})
        run.note(status="ok")
        assert not run.final_path.exists()
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["demo"]
    manifest = read_json(tmp_path / "runs" / "demo" / "manifest.json")
    assert manifest["command"] == "simulate"
    assert (manifest["seed"], manifest["status"], manifest["schema_version"]) == (3, "ok", 1)
    assert manifest["wall_time_s"] >= 0
    assert set(manifest["versions"]) >= {"python", "numpy", "pyarrow"}
    assert read_json(tmp_path / "runs" / "demo" / "metrics.json") == {"a": [2], "b": 1}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_when_the_block_fails(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with RunDir(tmp_path / "demo", "plan") as run:
            run.write_json("metrics.json", {})
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_the_manifest_fails(tmp_path: Path) -> None:
    with pytest.raises(TypeError), RunDir(tmp_path / "demo", "plan") as run:
        run.note(bad=object())
    assert list(tmp_path.iterdir()) == []


def test_existing_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    with pytest.raises(ConfigError, match="exists already") as caught:
        RunDir(tmp_path / "demo", "plan")
    assert "--if-exists overwrite" in caught.value.hint


def test_overwriting_replaces_only_on_success(tmp_path: Path) -> None:
    with RunDir(tmp_path / "demo", "plan") as run:
        run.write_json("old.json", {})
    with pytest.raises(ValueError, match="no"), RunDir(tmp_path / "demo", "plan", "overwrite"):
        raise ValueError("no")
    assert (tmp_path / "demo" / "old.json").exists()
    with RunDir(tmp_path / "demo", "plan", "overwrite") as run:
        run.write_json("new.json", {})
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == ["manifest.json", "new.json"]


def test_json_is_byte_identical(tmp_path: Path) -> None:
    for name, keys in (("a", "xyz"), ("b", "zyx")):
        with RunDir(tmp_path / name, "plan") as run:
            run.write_json("metrics.json", dict.fromkeys(keys, 0.1))
    first, second = (tmp_path / name / "metrics.json" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(first.read_text()) == {"x": 0.1, "y": 0.1, "z": 0.1}


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is missing"), (b"{", "not valid JSON"), (b"\xff", "not valid")]
)
def test_read_json(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_json(tmp_path / "x.json")


def test_versions_name_only_installed_packages() -> None:
    assert all(isinstance(v, str) and v[0].isdigit() for v in environment_versions().values())
