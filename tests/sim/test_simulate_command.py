"""`psrl simulate` with its options, on the demo trace cut down."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from psrl.cli import main
from psrl.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "examples" / "traces" / "tau_bench_airline"
GPUS = ROOT / "examples" / "clusters" / "8xh100.toml"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of `simulate` for a plan of two tasks on eight GPUs."""
    folder = tmp_path_factory.mktemp("planned")
    trace, plan = str(folder / "trace"), str(folder / "plan")
    small = ("--groups", "2", "--trajectories", "2", "--steps", "4", "--quiet")
    assert main(["trace", "slice", str(TRACE), "--out", trace, *small]) == ExitCode.OK
    made = main(["plan", "--trace", trace, "--cluster", str(GPUS), "--out", plan, "--quiet"])
    assert made == ExitCode.OK
    return "simulate", plan, "--trace", trace


def simulated(capsys: Capture, planned: tuple[str, ...], run: Path, *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*planned, "--run-dir", str(run), "--json", *more]) == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found == json.loads((run / "metrics.json").read_text("utf-8"))
    return found


@pytest.mark.slow
def test_options_are_in_force_and_in_the_result(
    planned: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    plain = simulated(capsys, planned, tmp_path / "plain")
    assert plain["simulation"]["engine"] == "simpy"
    assert plain["out_of_memory"] == []
    assert "iteration" not in plain
    assert "blocks" not in plain
    other = simulated(
        capsys,
        planned,
        tmp_path / "other",
        *("--slow", "0=1.5", "1=1.5", "--engine", "vectorised"),
        *("--blocks", "fixed:16", "--cache", "offload:2000"),
        *("--generation-tokens-per-s", "50"),
    )
    assert other["simulation"]["engine"] == "vectorised"
    assert other["simulation"]["slow_ranks"] == {"0": 1.5, "1": 1.5}
    assert 1.4 * plain["makespan_s"] < other["makespan_s"] < 1.5 * plain["makespan_s"]
    assert other["blocks"]["block_tokens"] == 16
    assert other["blocks"]["hit_rate_lost"] > 0
    assert other["iteration"]["training_s"] == other["makespan_s"]


def names(value: object) -> set[str]:
    """Keys at any depth; those of phases and of `slow_ranks` are values, not names."""
    if isinstance(value, list):
        return set().union(*map(names, value))
    if not isinstance(value, dict):
        return set()
    found: set[str] = set()
    for key, inner in value.items():
        found.add(key)
        if key in ("phases", "arithmetic"):
            found |= names(list(inner.values()))
        elif key != "slow_ranks":
            found |= names(inner)
    return found


def test_every_name_in_the_result_is_documented(
    planned: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    flags = ("--slow", "0=1.5", "--cache", "lru:2000", "--generation-tokens-per-s", "50")
    found = names(simulated(capsys, planned, tmp_path / "run", *flags))
    assert {"warnings", "extra_s", "one_step_off_s", "slow_ranks", "makespan_s"} <= found
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", " ".join(rows)))
    sections = {"warnings", "simulation", "blocks", "iteration", "out_of_memory", "arithmetic"}
    assert sections <= set(re.findall(r"`(\w+)`", text))
    assert found - sections <= listed


def test_the_text_says_engine_blocks_rollout_and_progress(
    planned: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    run = ("--run-dir", str(tmp_path / "run"), "--quiet")
    assert main([*planned, *run, "--cache", "lru:500", "--slow", "1=2"]) == ExitCode.OK
    text = capsys.readouterr().out
    for part in (
        "engine simpy, rank 1 takes 2 times as long",
        "adaptive blocks, lru: peak",
        "capacity 500 tokens:",
        "no rollout: the trace has no times",
    ):
        assert part in text


def test_a_timeline_is_written_unless_it_is_large_or_unwanted(
    planned: tuple[str, ...], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(capsys, planned, tmp_path / "default")
    records = json.loads(gzip.decompress((tmp_path / "default" / "timeline.json.gz").read_bytes()))
    assert {r["ph"] for r in records["traceEvents"]} == {"M", "X", "C", "s", "f"}
    simulated(capsys, planned, tmp_path / "unwanted", "--no-timeline")
    monkeypatch.setattr("psrl.api.runs.MAX_TIMELINE_EVENTS", 1)
    simulated(capsys, planned, tmp_path / "large")
    simulated(capsys, planned, tmp_path / "forced", "--timeline")
    written = [
        (tmp_path / n / "timeline.json.gz").exists() for n in ("unwanted", "large", "forced")
    ]
    assert written == [False, False, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--slow", "fast"), "cannot read slow rank 'fast'"),
        (("--slow", "9=1.2"), "slow rank 9"),
        (("--blocks", "fixed:x"), "blocks 'fixed:x'"),
        (("--rollout-concurrency", "4"), "at no rate"),
        (("--nics-per-host", "3"), "3 network ports"),
    ],
)
def test_wrong_flags_leave_no_run_directory(
    planned: tuple[str, ...], tmp_path: Path, capsys: Capture, flags: tuple[str, ...], message: str
) -> None:
    run = tmp_path / "run"
    assert main([*planned, "--run-dir", str(run), "--quiet", *flags]) == ExitCode.BAD_INPUT
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
