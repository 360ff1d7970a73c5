"""Calibration from executed psRL runs, here written with known coefficients."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl.analysis.calibration.executed_fit import calibrate_executed
from psrl.analysis.calibration.executed_ops import ExecutedOps, cost_model_of
from psrl.analysis.calibration.executed_runs import expand_runs, read_run, timed_ops
from psrl.cli.calibrate_command import Calibrate
from psrl.cli.output import OutputOptions
from psrl.core.cost.calibration import Coefficients, load_calibration
from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ModelSpec, ParallelConfig
from psrl.core.errors import ConfigError, ExitCode, ToleranceError
from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.plan.plan import PHASES, Plan, Program
from psrl.core.plan.tables import Assignments, Blocks, MicroBatches, Schedule, Segments
from psrl.core.run.config import PlanningConfig
from psrl.core.run.events import EventLog, Events

MODEL = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    ffn_hidden_size=512,
    vocab_size=8192,
)
DEVICE = DeviceSpec(
    name="cpu-core",
    peak_flops_per_s=1e11,
    memory_bytes=2**33,
    memory_bandwidth_bytes_per_s=1e10,
    gemm_efficiency=0.9,
    attention_efficiency=0.4,
    host_layer_s=1e-3,
    dtype_bytes=4,
)
# Beside these, what runs of one shape cannot tell: the data sheet's assumptions.
TRUTH = Coefficients.of_device(DEVICE).model_copy(
    update={
        "gemm_efficiency": 0.6,
        "attention_efficiency": 0.2,
        "attention_backward_factor": 3.5,
        "linear_backward_factor": 1.2,
        "head_passes": 8.0,
        "host_layer_s": 4e-3,
        "host_backward_factor": 1.5,
        "join_exponent": 1.0,
        "optimizer_bytes_per_parameter": 60.0,
        "step_s": 0.0,
    }
)
QUIET = OutputOptions(json=False, quiet=True)


def program(index: int, is_update: bool, sizes: dict[str, np.ndarray], activation: str) -> Program:
    count = len(sizes["num_tokens"])
    nothing = np.zeros(count)
    return Program(
        phases=("update",) if is_update else ("log_old_prob", "reference"),
        is_update=is_update,
        mini_batch=index if is_update else -1,
        granularity_tokens=1,
        assignments=Assignments.empty(),
        segments=Segments.empty(),
        micro_batches=MicroBatches(
            rank=np.zeros(count, np.int64),
            micro_batch=np.arange(count),
            activation=np.full(count, activation),
            forward_s=nothing,
            backward_s=nothing,
            **sizes,
        ),
        schedule=Schedule.empty(),
        blocks=Blocks.empty(),
    )


def make_plan(
    seed: int,
    num_steps: int = 1,
    num_layers: int = 4,
    proportional: bool = False,
    activation: str = "keep",
    count: int = 16,
) -> Plan:
    """Micro-batches of random sizes, or of one shape that only its length scales."""
    rng = np.random.default_rng(seed)

    def sizes() -> dict[str, np.ndarray]:
        tokens = rng.integers(50, 3000, count)
        keys = np.full(count, 500) if proportional else rng.integers(50, 6000, count)
        head = tokens // 2 if proportional else rng.integers(0, tokens + 1)
        return {"num_tokens": tokens, "pairs": tokens * keys, "head_tokens": head}

    programs = [program(0, False, sizes(), activation)]
    programs += [program(i, True, sizes(), activation) for i in range(num_steps)]
    cluster = ClusterSpec(
        device=DEVICE,
        num_hosts=1,
        devices_per_host=1,
        intra_host_bytes_per_s=1e9,
        inter_host_bytes_per_s=1e9,
        intra_host_latency_s=0.0,
        inter_host_latency_s=0.0,
    )
    return Plan(
        trace_hash="0" * 64,
        iteration=0,
        policy="psrl",
        options=PlanningConfig(),
        phases=PHASES,
        model=MODEL.model_copy(update={"num_layers": num_layers}),
        cluster=cluster,
        parallel=ParallelConfig(),
        programs=tuple(programs),
    )


def run_plan(plan: Plan, truth: Coefficients = TRUTH, noise: float = 0.01) -> Events:
    """Events of one rank that takes the time of known coefficients, with noise."""
    costs, rng, log = cost_model_of(plan, truth), np.random.default_rng(1), EventLog()
    memory = MemoryState(0, 0, 0, 0, 0)
    for phase in ("log_old_prob", "reference", "update"):
        now = 0.0
        for index, prog in enumerate(plan.programs):
            if phase not in prog.phases:
                continue
            table = prog.micro_batches
            for m in range(len(table)):
                size = (float(table.num_tokens[m]), float(table.pairs[m]))
                head = float(table.head_tokens[m])
                for op in ("forward", "backward") if prog.is_update else ("forward",):
                    time_s = costs.forward_s(*size, head)
                    if op == "backward":
                        time_s = costs.backward_s(*size, head)
                        if table.activation[m] == "recompute":
                            time_s += costs.layers_s(*size)
                    end = now + float(time_s) * float(np.exp(rng.normal(0.0, noise)))
                    tokens = 0 if op == "backward" else int(size[0])
                    log.add(phase, index, 0, 0, op, m, tokens, now, end, memory)
                    now = end
            if prog.is_update:
                for kind, time_s in (
                    ("gradient_reduction", 1e-4),
                    ("optimizer_step", costs.optimizer_step_s()),
                ):
                    log.add(phase, index, 0, 0, kind, -1, 0, now, now + time_s, memory)
                    now += time_s
    return log.finish()


def write_run(folder: Path, plan: Plan, **how: Any) -> Path:
    folder.mkdir(parents=True)
    run_plan(plan, **how).save(folder / "events.parquet")
    plan.save(folder / "plan")
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "kind": "executed"}))
    (folder / "metrics.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


@pytest.mark.slow
def test_known_coefficients_are_recovered(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"run{i}", make_plan(i, num_steps=3, num_layers=layers))
        for i, layers in enumerate((4, 8))
    ]
    calibration = calibrate_executed(runs)
    found = calibration.coefficients
    assert found.join_exponent == 1.0, "host and device took turns"
    for name in ("gemm_efficiency", "attention_efficiency", "host_layer_s", "head_passes"):
        assert calibration.identification[name].status == "fitted", name
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.1), name
    for name in ("attention_backward_factor", "linear_backward_factor", "host_backward_factor"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.15), name
    assert found.optimizer_bytes_per_parameter == pytest.approx(60.0 + 0.0, rel=0.01)
    headline = [row for row in calibration.errors if row.headline]
    assert [row.group for row in headline] == [
        "log_old_prob, whole",
        "reference, whole",
        "update, whole",
    ]
    assert all(row.held_out and row.mean_percent < 3.0 for row in headline)
    assert all(row.mean_percent < 3.0 for row in calibration.errors)


@pytest.mark.slow
def test_overlapping_host_is_recognised(tmp_path: Path) -> None:
    overlapping = TRUTH.model_copy(update={"join_exponent": 8.0, "host_layer_s": 60e-3})
    run = write_run(tmp_path / "run", make_plan(3, num_steps=2, count=30), truth=overlapping)
    calibration = calibrate_executed([run])
    assert calibration.coefficients.join_exponent == 8.0
    assert calibration.coefficients.host_layer_s == pytest.approx(60e-3, rel=0.1)


@pytest.mark.slow
def test_a_host_that_computes_overlaps_with_nothing(tmp_path: Path) -> None:
    overlapping = TRUTH.model_copy(update={"join_exponent": 8.0})
    plan = make_plan(3, num_steps=2, count=30)
    device = DEVICE.model_copy(update={"host_overlaps": False})
    cluster = plan.cluster.model_copy(update={"device": device})
    run = write_run(tmp_path / "run", replace(plan, cluster=cluster), truth=overlapping)
    assert calibrate_executed([run]).coefficients.join_exponent == 1.0


@pytest.mark.slow
def test_sizes_that_only_scale_separate_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_plan(0, proportional=True, count=8))
    calibration = calibrate_executed([run])
    status = {name: found.status for name, found in calibration.identification.items()}
    assert status["gemm_efficiency"] != "pinned"
    assert status["attention_efficiency"] == status["head_passes"] == "pinned"
    assert calibration.coefficients.attention_efficiency == DEVICE.attention_efficiency
    assert status["optimizer_bytes_per_parameter"] == "pinned", "one step is too few"
    assert status["gradient_bytes_per_parameter"] == "pinned", "one rank reduces nothing"


def test_layer_recompute_and_dropped_forwards_are_separate_features() -> None:
    plan = make_plan(0, activation="recompute")
    ops = timed_ops("run", plan, run_plan(plan)).ops
    update = ops.phase == "update"
    assert (ops.recomputes == (ops.op == "backward")).all()
    assert (ops.head_tokens[update] > 0).any()
    dropped = make_plan(0, activation="drop")
    ops = timed_ops("run", dropped, run_plan(dropped)).ops
    filling = (ops.op == "forward") & (ops.phase == "update")
    assert not ops.head_tokens[filling].any()
    assert not ops.recomputes.any()
    assert (ops.head_tokens[~filling] > 0).any()


def test_recomputing_backwards_are_predicted_by_the_same_coefficients(tmp_path: Path) -> None:
    plan = make_plan(0, activation="recompute")
    run = timed_ops("run", plan, run_plan(plan, noise=0.0))
    assert ExecutedOps((run,)).predict_s(TRUTH) == pytest.approx(run.ops.measured_s)


def test_rows_keep_their_runs() -> None:
    plans = make_plan(0, count=6), make_plan(1, count=6)
    runs = tuple(timed_ops(f"run{i}", p, run_plan(p)) for i, p in enumerate(plans))
    ops = ExecutedOps(runs)
    chosen = np.array([0, 5, len(runs[0].ops), len(ops) - 1])
    part = ops.rows(chosen)
    assert part.measured_s.tolist() == ops.measured_s[chosen].tolist()
    assert part.run_name.tolist() == ["run0", "run0", "run1", "run1"]
    assert part.predict_s(TRUTH) == pytest.approx(ops.predict_s(TRUTH)[chosen])


def test_comparisons_are_searched_for_executed_runs(tmp_path: Path) -> None:
    comparison = tmp_path / "demo"
    plan = make_plan(0)
    run = write_run(comparison / "executed" / "psrl", plan)
    (comparison / "policies" / "psrl").mkdir(parents=True)
    (run / "plan").rename(comparison / "policies" / "psrl" / "plan")
    (path,) = expand_runs([comparison])
    found = read_run(path)
    assert found.name == "demo/psrl"
    assert len(found.ops) == 16 * 2 + 16 * 2


def test_the_precision_that_ran_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_plan(0))
    (run / "metrics.json").write_text(json.dumps({"dtype": "float64"}))
    assert read_run(run).plan.cluster.device.dtype_bytes == 8
    other = write_run(tmp_path / "other", make_plan(0))
    with pytest.raises(ConfigError, match="2 different devices"):
        calibrate_executed([run, other])


def test_wrong_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no events"):
        expand_runs([tmp_path])
    run = write_run(tmp_path / "run", make_plan(0))
    (run / "manifest.json").write_text(json.dumps({"schema_version": 1, "kind": "simulated"}))
    with pytest.raises(ConfigError, match="'simulated'"):
        read_run(run)
    (run / "manifest.json").write_text(
        json.dumps({"schema_version": 1, "kind": "executed", "plan": "gone"})
    )
    (run / "plan").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="at none of"):
        read_run(run)
    with pytest.raises(ConfigError, match="another plan"):
        timed_ops("run", make_plan(0, count=2), run_plan(make_plan(0)))


def test_few_micro_batches_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_plan(0, count=2))
    with pytest.raises(ConfigError, match="4 executed micro-batch"):
        calibrate_executed([run])


@pytest.mark.slow
def test_command_writes_a_model_and_checks_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", make_plan(0, num_steps=2, count=8))
    out = tmp_path / "cost_model.json"
    command = Calibrate(out=out, output=QUIET, measured=(run,), max_error=0.1)
    assert command.run() == ExitCode.OK
    text = capsys.readouterr().out
    for word in ("attention_efficiency", "update, whole", "num_tokens", "pinned"):
        assert word in text
    calibration = load_calibration(out)
    assert calibration.sources == ("executed run run (psrl)",)
    assert calibration.domain.device == "cpu-core"
    with pytest.raises(ConfigError, match="exists already"):
        command.run()
    strict = replace(command, if_exists="overwrite", max_error=1e-6)
    with pytest.raises(ToleranceError) as error:
        strict.run()
    assert error.value.exit_code == ExitCode.OUTSIDE_TOLERANCE
    assert load_calibration(out) == calibration, "the model is written, whatever its error"


@pytest.mark.slow
def test_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", make_plan(0, count=6))
    output = OutputOptions(json=True, quiet=False)
    Calibrate(out=tmp_path / "c.json", output=output, measured=(run,)).run()
    result = json.loads(capsys.readouterr().out)
    assert result["coefficients"]["gemm_efficiency"] > 0
    assert result["errors"][0]["held_out"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either"),
        ({"measured": (Path("run"),), "table": "h200"}, "either"),
        ({"table": "h200", "max_error": -0.1}, "positive"),
        ({"table": "vtrain", "data": Path("nowhere")}, "--data"),
    ],
)
def test_command_refuses_bad_arguments(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Calibrate(out=tmp_path / "c.json", output=QUIET, **arguments).run()
    assert not list(tmp_path.iterdir())
