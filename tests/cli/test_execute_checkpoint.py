"""`psrl execute --checkpoint --resume`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from psrl.cli import main
from psrl.core.errors import ExitCode
from psrl.core.samples.trace import Trace
from tests.backend.test_execute import make_plan, make_trace

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    trace = make_trace(tmp_path / "trace")
    make_plan(trace).save(tmp_path / "plan")
    return trace


def execute(tmp_path: Path, run: str, *flags: str) -> int:
    command = ["execute", str(tmp_path / "plan"), "--trace", str(tmp_path / "trace"), "--quiet"]
    checkpoint = ["--checkpoint", str(tmp_path / "checkpoints")]
    return main([*command, "--run-dir", str(tmp_path / run), *checkpoint, *flags])


@pytest.mark.slow
@pytest.mark.usefixtures("trace")
def test_two_runs_continue_one_training(tmp_path: Path, capsys: Capture) -> None:
    rate = ("--learning-rate", "0.01")
    assert execute(tmp_path, "one", *rate) == ExitCode.OK
    assert f"saved checkpoint {tmp_path}/checkpoints/step_000000002" in capsys.readouterr().out
    assert execute(tmp_path, "two", *rate) != ExitCode.OK
    assert "pass --resume to continue it" in capsys.readouterr().err
    assert execute(tmp_path, "two", *rate, "--resume") == ExitCode.OK
    printed = capsys.readouterr().out
    assert f"resumed from {tmp_path}/checkpoints/step_000000002" in printed
    assert f"saved checkpoint {tmp_path}/checkpoints/step_000000004" in printed
    first, second = (
        json.loads((tmp_path / run / "metrics.json").read_text()) for run in ("one", "two")
    )
    assert "resumed_from" not in first
    assert second["resumed_from"].endswith("step_000000002")
    assert second["loss"] != first["loss"]


@pytest.mark.usefixtures("trace")
def test_nothing_to_resume_from_leaves_no_run_directory(tmp_path: Path, capsys: Capture) -> None:
    assert execute(tmp_path, "one", "--resume") != ExitCode.OK
    assert "no complete checkpoint to resume from" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan", "trace"]


@pytest.mark.usefixtures("trace")
def test_a_launch_script_resumes_too(tmp_path: Path) -> None:
    assert execute(tmp_path, "one", "--resume", "--emit", "torchrun") == ExitCode.OK
    script = (tmp_path / "one.sh").read_text()
    assert f"--checkpoint {tmp_path}/checkpoints --resume\n" in script
