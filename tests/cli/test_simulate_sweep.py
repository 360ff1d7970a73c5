"""`psrl sweep`: several traces and cluster sizes in one table."""

import json
from pathlib import Path

import pytest

from psrl.cli import main
from psrl.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "examples" / "traces" / "tau_bench_airline"
GPUS = ROOT / "examples" / "clusters" / "8xh100.toml"

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    out = tmp_path / "small"
    small = ("--groups", "1", "--trajectories", "2", "--steps", "2", "--quiet")
    assert main(["trace", "slice", str(TRACE), "--out", str(out), *small]) == ExitCode.OK
    return out


def sweep(trace: Path, run: Path, *more: str) -> int:
    policies = ("--policies", "psrl", "verl")
    base = ("sweep", "--trace", str(trace), "--cluster", str(GPUS), "--run-dir", str(run))
    return main([*base, *policies, *more])


@pytest.mark.slow
def test_rows_pictures_and_speed_ups(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    capsys.readouterr()
    assert sweep(trace, run, "--hosts", "1", "2", "--json") == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert [(r["num_devices"], r["data_parallel_size"], r["policy"]) for r in rows] == [
        (8, 2, "verl"),
        (8, 2, "merged_dense"),
        (8, 2, "psrl"),
        (16, 4, "verl"),
        (16, 4, "merged_dense"),
        (16, 4, "psrl"),
    ]
    for row, base in zip(rows, [rows[0]] * 3 + [rows[3]] * 3, strict=True):
        assert row["speedup"] == pytest.approx(base["makespan_s"] / row["makespan_s"])
        assert row["reason"] == ""
    assert json.loads((run / "metrics.json").read_text("utf-8"))["rows"] == rows
    assert len((run / "sweep.csv").read_text("utf-8").splitlines()) == 7
    assert (run / "plots" / "scaling.svg").exists()
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    for name in rows[0]:
        assert f"| `{name}`" in text


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_a_row_with_its_reason(
    trace: Path, tmp_path: Path, capsys: Capture
) -> None:
    tight = ("--set", "cluster.device.memory_bytes=1000000000", "--quiet")
    assert sweep(trace, tmp_path / "run", *tight) == ExitCode.OK
    text = capsys.readouterr().out
    assert text.count("GiB at its peak") == 3
    assert "nan" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hosts", "0"), "data_parallel_size 2 * 0 / 1"),
        (("--baseline", "dfs_cut"), "the baseline 'dfs_cut' is not among"),
    ],
)
def test_wrong_flags_leave_nothing(
    trace: Path, tmp_path: Path, capsys: Capture, flags: tuple[str, ...], message: str
) -> None:
    run = tmp_path / "run"
    assert sweep(trace, run, "--quiet", *flags) == ExitCode.BAD_INPUT
    assert message in capsys.readouterr().err
    assert not run.exists()
