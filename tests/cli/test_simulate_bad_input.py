"""Impossible layouts, links without bandwidth, contradictions, interruptions: what a user sees."""

from pathlib import Path

import pytest

from psrl.cli import main, output
from psrl.core.errors import ExitCode
from psrl.sim import Progress

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "examples" / "traces" / "tau_bench_airline"
GPUS = ROOT / "examples" / "clusters" / "8xh100.toml"

Capture = pytest.CaptureFixture[str]
MOE = ('model={preset = "qwen3-30b-a3b"}', "parallel.sequence_parallel=true")


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ("model.num_layers=27",),
            ["num_layers (27) is not divisible by pipeline_model_parallel_size (2)"],
        ),
        (
            ("model.num_layers=1",),
            ["has 1 layers, fewer than its 2 pipeline stages"],
        ),
        (
            (*MOE, "model.num_moe_experts=127", "parallel.expert_model_parallel_size=4"),
            ["num_moe_experts (127) is not divisible by expert_model_parallel_size (4)"],
        ),
        (
            (*MOE, "model.num_moe_experts=0"),
            ["num_moe_experts 0, but moe_topk 8 and moe_ffn_hidden_size 768"],
        ),
        (
            ("cluster.inter_host_bytes_per_s=0",),
            ["cluster.inter_host_bytes_per_s = 0", "greater than 0"],
        ),
        (
            ("cluster.intra_host_bytes_per_s=0.0",),
            ["cluster.intra_host_bytes_per_s = 0.0", "greater than 0"],
        ),
        (
            ('cluster.device={preset = "h100-80", name = "a100-80"}',),
            ["preset 'h100-80' under the name 'a100-80', which is another preset"],
        ),
    ],
)
def test_impossible_setups_say_the_arithmetic(
    tmp_path: Path, capsys: Capture, overrides: tuple[str, ...], messages: list[str]
) -> None:
    out = tmp_path / "plan"
    command = ["plan", "--trace", str(TRACE), "--cluster", str(GPUS), "--out", str(out), "--quiet"]
    assert main([*command, "--set", *overrides]) == ExitCode.BAD_INPUT
    text = capsys.readouterr().err
    assert "Traceback" not in text
    for message in messages:
        assert message in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_told_with_its_bytes(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "plan"
    command = ["plan", "--trace", str(TRACE), "--cluster", str(GPUS), "--out", str(out), "--quiet"]
    large = ('model={preset = "qwen2.5-32b"}', "cluster.device.memory_bytes=20000000000")
    assert main([*command, "--set", *large]) == ExitCode.INFEASIBLE
    assert "GiB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Path, Path]:
    trace, plan = tmp_path / "trace", tmp_path / "plan"
    small = ("--groups", "1", "--trajectories", "2", "--steps", "2", "--quiet")
    assert main(["trace", "slice", str(TRACE), "--out", str(trace), *small]) == ExitCode.OK
    command = ["plan", "--trace", str(trace), "--cluster", str(GPUS), "--out", str(plan)]
    assert main([*command, "--quiet"]) == ExitCode.OK
    return trace, plan


def interrupt(*_arguments: object, **_options: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_simulation_leaves_nothing_behind(
    planned: tuple[Path, Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, plan = planned
    runs = trace.parent / "runs"
    monkeypatch.setattr("psrl.api.runs.replay_events", interrupt)
    command = ["simulate", str(plan), "--trace", str(trace), "--run-dir", str(runs / "one")]
    assert main([*command, "--quiet"]) == 130
    assert "nothing half-written was kept" in capsys.readouterr().err
    assert not runs.exists()


def test_an_interrupted_comparison_leaves_nothing_behind(
    planned: tuple[Path, Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, _ = planned
    runs = trace.parent / "runs"
    monkeypatch.setattr("psrl.analysis.report.report.write_report", interrupt)
    command = ["compare", "--trace", str(trace), "--cluster", str(GPUS)]
    command += ["--run-dir", str(runs / "one"), "--policies", "verl", "psrl", "--quiet"]
    assert main(command) == 130
    assert "nothing half-written was kept" in capsys.readouterr().err
    assert not runs.exists()


def test_progress_comes_after_two_seconds_with_time_simulated_and_left(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.9, 4.0, 4.5, 8.0])
    monkeypatch.setattr(output.time, "perf_counter", lambda: next(clock))
    report = output.show_progress()
    report(Progress("update", 100, 1000, 1.0))
    assert capsys.readouterr().err == ""
    report(Progress("update", 250, 1000, 12.5))
    # 2.1 s for a quarter of the phase, so three times as much is left.
    assert "update: 250 of 1,000 ops, 12.5 s simulated, about 6 s left" in capsys.readouterr().err
    report(Progress("update", 300, 1000, 15.0))
    assert capsys.readouterr().err == ""
    report(Progress("update", 500, 1000, 25.0))
    assert "about 6 s left" in capsys.readouterr().err
