"""`psrl plan`: figures, the user's own policy, search, and what a mistake says."""

import json
from pathlib import Path

import pytest

from psrl.cli import main
from psrl.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "examples" / "traces" / "tau_bench_airline"
CPUS = ROOT / "examples" / "clusters" / "2cpu.toml"

Capture = pytest.CaptureFixture[str]

POLICY = """
import numpy as np


def halves(target):
    count = target.samples.num_samples
    return np.arange(count) * target.problem.num_ranks // count


def breaks(target):
    return np.full(target.samples.num_samples, 99)
"""


@pytest.fixture
def small_trace(tmp_path: Path, capsys: Capture) -> Path:
    """One task, two episodes, three steps each."""
    out = tmp_path / "small"
    sizes = ("--groups", "1", "--trajectories", "2", "--steps", "3")
    assert main(["trace", "slice", str(TRACE), "--out", str(out), *sizes, "--quiet"]) == ExitCode.OK
    capsys.readouterr()
    return out


def plan(trace: Path, out: Path, *more: object) -> list[str]:
    """Arguments of a plan."""
    fixed = ("plan", "--trace", trace, "--cluster", CPUS, "--out", out)
    return [str(a) for a in (*fixed, *more)]


@pytest.mark.slow
def test_figures_are_written_beside_their_numbers(
    small_trace: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, plots = tmp_path / "plan", tmp_path / "plots"
    assert main(plan(small_trace, out, "--policy", "dfs_cut", "--plots", plots, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    names = ["worker_times", "duplicated_tokens", "tree_cut"]
    assert result["plots"] == [str(plots / f"{name}.png") for name in names]
    for name in names:
        assert {p.suffix for p in plots.glob(f"{name}.*")} == {".png", ".svg", ".csv"}
    assert "explanation" not in result


def test_an_own_policy_by_file_and_what_its_mistakes_say(
    small_trace: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    out = tmp_path / "plan"
    assert main(plan(small_trace, out, "--policy", f"{file}:halves", "--json")) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["policy"] == f"{file}:halves"
    for name, message in (
        (f"{file}:breaks", "returned ranks 99..99"),
        (f"{file}:nothing", "has no 'nothing'"),
        ("psrll", "Did you mean 'psrl'?"),
    ):
        arguments = plan(small_trace, tmp_path / "none", "--policy", name, "--quiet")
        assert main(arguments) == ExitCode.BAD_INPUT
        captured = capsys.readouterr().err
        assert captured.startswith("psrl: error: ")
        assert message in captured
        assert "Traceback" not in captured
        assert not (tmp_path / "none").exists()


def test_an_existing_plan_is_refused_before_anything_is_planned(
    small_trace: Path, capsys: Capture
) -> None:
    assert main(plan(small_trace, small_trace, "--policy", "no_such")) == ExitCode.BAD_INPUT
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_takes_own_policies_by_plain_names_only(
    small_trace: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "--trace", str(small_trace), "--cluster", str(CPUS)]
    arguments += ["--run-dir", str(tmp_path / "run"), "--quiet"]
    named = [*arguments, "--policies", "verl", f"{tmp_path}/mine.py:halves"]
    assert main(named) == ExitCode.BAD_INPUT
    assert "folder of its name" in capsys.readouterr().err
    assert main([*arguments, "--policies", "verl", "mine.py:halves"]) == ExitCode.OK
    metrics = tmp_path / "run" / "policies" / "mine.py:halves" / "metrics.json"
    assert json.loads(metrics.read_text())["policy"] == "mine.py:halves"
