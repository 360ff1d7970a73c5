"""Every command on the shipped trace: results, exit codes, and what a mistake says."""

import json
from pathlib import Path

import pytest

from psrl.cli import main
from psrl.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "examples" / "traces" / "tau_bench_airline"
GPUS = ROOT / "examples" / "clusters" / "8xh100.toml"
CPUS = ROOT / "examples" / "clusters" / "2cpu.toml"

Capture = pytest.CaptureFixture[str]


def run_json(capsys: Capture, *arguments: object) -> dict[str, object]:
    """Run a command that must succeed with --json; its stdout is one JSON object."""
    assert main([*map(str, arguments), "--json"]) == ExitCode.OK
    captured = capsys.readouterr()
    assert captured.err == ""
    result: dict[str, object] = json.loads(captured.out)
    return result


def fails(capsys: Capture, code: ExitCode, *arguments: object) -> str:
    """Run a command that must fail with a code; returns the one message on stderr."""
    assert main([*map(str, arguments), "--quiet"]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("psrl: error: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.fixture
def small_trace(tmp_path: Path, capsys: Capture) -> Path:
    """One task, two episodes, three steps each."""
    out = tmp_path / "small"
    run_json(
        capsys,
        *("trace", "slice", TRACE, "--out", out),
        *("--groups", 1, "--trajectories", 2, "--steps", 3),
    )
    return out


def test_stats_of_the_demo_trace(capsys: Capture) -> None:
    modes = run_json(capsys, "trace", "stats", TRACE)["modes"]
    assert isinstance(modes, dict)
    step, traj = modes["step"], modes["traj"]
    assert (step["num_samples"], step["logical_tokens"]) == (565, 1_643_566)
    assert step["unique_tokens"] == traj["unique_tokens"] == 124_638
    assert traj["num_samples"] == 52
    assert step["prefix_match_rate"] == pytest.approx(1 - 124_638 / 1_643_566)


def test_validate(capsys: Capture) -> None:
    assert run_json(capsys, "trace", "validate", TRACE)["logical_tokens"] == 1_643_566


@pytest.mark.slow
def test_plan_and_simulate_twice_give_the_same_bytes(
    small_trace: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name
        run_json(
            capsys, "plan", "--trace", small_trace, "--cluster", CPUS, "--out", folder / "plan"
        )
        metrics = run_json(
            capsys,
            *("simulate", folder / "plan", "--trace", small_trace, "--run-dir", folder / "run"),
        )
        assert metrics["makespan_s"] == pytest.approx(
            json.loads((folder / "plan" / "plan.json").read_text())["predicted"]["makespan_s"]
        )
    same = [*(tmp_path / "a" / "plan").iterdir(), tmp_path / "a" / "run" / "metrics.json"]
    same.append(tmp_path / "a" / "run" / "events.parquet")
    assert len(same) == 8
    for path in same:
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert path.read_bytes() == other.read_bytes(), path.name


def test_compare_puts_psrl_ahead_in_time(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    result = run_json(capsys, "compare", "--trace", TRACE, "--cluster", GPUS, "--run-dir", run)
    rows = result["policies"]
    assert isinstance(rows, list)
    by_policy = {row["policy"]: row for row in rows}
    assert list(by_policy) == ["verl", "merged_dense", "sglang_ps", "dfs_cut", "quick", "psrl"]
    psrl = by_policy["psrl"]
    for rival in ("verl", "sglang_ps"):
        assert psrl["makespan_s"] < by_policy[rival]["makespan_s"]
    assert psrl["gap"] < 0.10
    for name in ("comparison.csv", "report.html", "manifest.json", "sharing.json", "setup.json"):
        assert (run / name).stat().st_size > 0
    for plot in ("gain", "factors", "memory_over_time", "worker_times", "timeline", "tokens"):
        for suffix in (".png", ".svg", ".csv"):
            assert (run / "plots" / (plot + suffix)).stat().st_size > 0
    assert not run.with_name("run.partial").exists()


@pytest.mark.slow
def test_executed_plans_agree_and_the_check_can_fail(
    small_trace: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    common = ("--trace", small_trace, "--cluster", CPUS)
    result = run_json(
        capsys,
        *("compare", *common, "--run-dir", run),
        *("--policies", "verl", "psrl", "--execute", "verl", "psrl"),
    )
    differences = result["differences"]
    assert isinstance(differences, list)
    assert {"loss", "gradients", "logprob"} <= {row["quantity"] for row in differences}
    assert all(row["largest_relative_difference"] <= 5e-6 for row in differences)
    executed = run / "executed"
    run_json(capsys, "verify", executed / "psrl", executed / "verl")
    other = tmp_path / "other"
    plan = run / "policies" / "psrl" / "plan"
    run_json(
        capsys,
        *("execute", plan, "--trace", small_trace, "--run-dir", other),
        *("--seed", 1, "--keep-gradients"),
    )
    message = fails(capsys, ExitCode.OUTSIDE_TOLERANCE, "verify", other, executed / "verl")
    assert "differs by" in message


def test_unknown_policy(small_trace: Path, tmp_path: Path, capsys: Capture) -> None:
    common = ("--trace", small_trace, "--cluster", CPUS)
    out = tmp_path / "plan"
    message = fails(capsys, ExitCode.BAD_INPUT, "plan", *common, "--policy", "psrrl", "--out", out)
    assert "Did you mean 'psrl'?" in message
    assert not out.exists()
    message = fails(
        capsys,
        ExitCode.BAD_INPUT,
        *("compare", *common, "--policies", "verl", "sglang", "--run-dir", tmp_path / "run"),
    )
    assert "Did you mean 'sglang_ps'?" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small"]


def test_parallel_sizes_that_do_not_multiply(tmp_path: Path, capsys: Capture) -> None:
    message = fails(
        capsys,
        ExitCode.BAD_INPUT,
        *("plan", "--trace", TRACE, "--cluster", GPUS, "--out", tmp_path / "plan"),
        *("--set", "parallel.data_parallel_size=3"),
    )
    assert "tensor(2) * pipeline(2)" in message
    assert "= 12" in message
    assert "8 devices" in message


def test_mistyped_key_of_a_cluster_file(tmp_path: Path, capsys: Capture) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(GPUS.read_text().replace("num_hosts", "num_host"), encoding="utf-8")
    message = fails(
        capsys,
        ExitCode.BAD_INPUT,
        *("plan", "--trace", TRACE, "--cluster", wrong, "--out", tmp_path / "plan"),
    )
    assert "Did you mean 'num_hosts'?" in message


@pytest.mark.slow
def test_infeasible_memory_budget(tmp_path: Path, capsys: Capture) -> None:
    message = fails(
        capsys,
        ExitCode.INFEASIBLE,
        *("plan", "--trace", TRACE, "--cluster", GPUS, "--out", tmp_path / "plan"),
        *("--set", "planning.memory_fraction=0.2"),
    )
    assert "16.00 GiB" in message
    assert "static 21.28" in message
    assert list(tmp_path.iterdir()) == []


def test_plan_of_another_trace(small_trace: Path, tmp_path: Path, capsys: Capture) -> None:
    plan = tmp_path / "plan"
    run_json(capsys, "plan", "--trace", small_trace, "--cluster", CPUS, "--out", plan)
    for command in ("simulate", "execute"):
        message = fails(
            capsys,
            ExitCode.BAD_INPUT,
            *(command, plan, "--trace", TRACE, "--run-dir", tmp_path / "run"),
        )
        assert "made for trace" in message
    assert not (tmp_path / "run").exists()


def test_existing_run_directory_is_kept(small_trace: Path, tmp_path: Path, capsys: Capture) -> None:
    plan, run = tmp_path / "plan", tmp_path / "run"
    run_json(capsys, "plan", "--trace", small_trace, "--cluster", CPUS, "--out", plan)
    simulate = ("simulate", plan, "--trace", small_trace, "--run-dir", run)
    run_json(capsys, *simulate)
    before = (run / "manifest.json").read_bytes()
    assert "exists already" in fails(capsys, ExitCode.BAD_INPUT, *simulate)
    assert (run / "manifest.json").read_bytes() == before
    run_json(capsys, *simulate, "--if-exists", "overwrite")


BAD_RECORDINGS = {
    "truncated": '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [0]}\n'
    '{"timestamp": 0, "input_le',
    "wrong_type": '{"timestamp": 0, "input_length": "5", "output_length": 2, "hash_ids": [0]}\n',
    "empty": "",
    "disagree": '{"timestamp": 0, "input_length": 5000, "output_length": 2, "hash_ids": [0]}\n',
}


@pytest.mark.parametrize("name", sorted(BAD_RECORDINGS))
def test_bad_recordings(name: str, tmp_path: Path, capsys: Capture) -> None:
    recording = tmp_path / f"{name}.jsonl"
    recording.write_text(BAD_RECORDINGS[name], encoding="utf-8")
    message = fails(
        capsys,
        ExitCode.BAD_INPUT,
        *("trace", "import", recording, "--format", "mooncake", "--out", tmp_path / "trace"),
    )
    assert recording.name in message
    assert [p.name for p in tmp_path.iterdir()] == [recording.name]


def test_usage_errors_exit_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trace", "stat"])
    assert caught.value.code == ExitCode.BAD_INPUT


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == ExitCode.OK
    assert capsys.readouterr().out.startswith("psrl 0.")


def test_doctor_names_versions(capsys: Capture) -> None:
    result = run_json(capsys, "doctor")
    versions = result["versions"]
    assert isinstance(versions, dict)
    assert {"psrl", "python", "numpy", "torch", "megatron-core"} <= versions.keys()
    assert result["missing"] == {}


def test_a_plan_that_does_not_fit_is_simulated_and_said(
    small_trace: Path, tmp_path: Path, capsys: Capture
) -> None:
    plan = tmp_path / "plan"
    run_json(capsys, "plan", "--trace", small_trace, "--cluster", CPUS, "--out", plan)
    header = json.loads((plan / "plan.json").read_text())
    header["cluster"]["device"]["memory_bytes"] = 2**20
    (plan / "plan.json").write_text(json.dumps(header))
    run = tmp_path / "run"
    result = run_json(
        capsys,
        *("simulate", plan, "--trace", small_trace, "--run-dir", run, "--timeline"),
    )
    found = result["out_of_memory"]
    assert isinstance(found, list)
    assert found[0]["needed_bytes"] > found[0]["limit_bytes"] == 2**20
    assert (run / "timeline.json.gz").stat().st_size > 0


@pytest.mark.slow
def test_a_calibration_reaches_planner_and_simulator(
    small_trace: Path, tmp_path: Path, capsys: Capture
) -> None:
    calibration = tmp_path / "h200.json"
    data = ROOT / "examples" / "calibration"
    run_json(capsys, "calibrate", "--table", "h200", "--data", data, "--out", calibration)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(f'calibration = "{calibration.name}"\n' + CPUS.read_text())
    predicted = {}
    for name, file in (("roofline", CPUS), ("calibrated", cluster)):
        plan, run = tmp_path / name, tmp_path / f"{name}-run"
        planned = run_json(capsys, "plan", "--trace", small_trace, "--cluster", file, "--out", plan)
        simulated = run_json(capsys, "simulate", plan, "--trace", small_trace, "--run-dir", run)
        assert simulated["makespan_s"] == pytest.approx(planned["makespan_s"])
        predicted[name] = planned["makespan_s"]
    assert predicted["calibrated"] != predicted["roofline"]
