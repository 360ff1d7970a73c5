"""Whole plans on a trace: three phases, several mini-batches, files, refusals."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from psrl.backend.executable import check_executable
from psrl.backend.execute import execute_plan
from psrl.backend.execution import Execution
from psrl.backend.io.output import execute_to_directory, execution_metrics
from psrl.backend.launch import run_ranks
from psrl.backend.options import ExecuteOptions, LossOptions, OptimizerOptions
from psrl.backend.train.stage import StageRun
from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ModelSpec, ParallelConfig
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import BackendError, ConfigError, PlanError, PsrlError
from psrl.core.plan.plan import PHASES, Plan, Program
from psrl.core.plan.schedule import Op, stage_ops
from psrl.core.run.config import PlanningConfig, Setup
from psrl.core.run.events import Events
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace, write_trace
from psrl.planner import PlanningProblem
from psrl.planner import make_plan as make_policy_plan
from tests import gradient_errors
from tests.backend.cases import ACTIVATIONS, TINY
from tests.memory_ledger import op_by_op
from tests.random_plans import random_batch, random_program, with_times

OPTIONS = ExecuteOptions(
    init_std=0.1,
    loss=LossOptions(kl_coefficient=0.1),
    optimizer=OptimizerOptions(learning_rate=1e-2),
    keep_gradients=True,
)


def make_trace(path: Path) -> Trace:
    batch = random_batch(np.random.default_rng(4), num_samples=12, max_new_tokens=20)
    batch = replace(batch, mini_batch=np.arange(12) % 2)
    return write_trace(path, [batch], source="test", licence="CC0-1.0", sampling_mode="step")


def mini_batch_program(batch: SampleBatch, index: int, num_ranks: int) -> Program:
    mine = np.flatnonzero(batch.mini_batch == index)
    rng = np.random.default_rng(index)
    planned = random_program(
        rng, batch.select(mine), num_ranks=num_ranks, activations=ACTIVATIONS
    ).program
    assignments = replace(planned.assignments, sample=mine[planned.assignments.sample])
    return replace(planned, assignments=assignments, mini_batch=index)


def make_plan(
    trace: Trace, parallel: ParallelConfig | None = None, model: ModelSpec = TINY
) -> Plan:
    """Forward phases over the whole batch, and two optimizer steps, all with their own cuts."""
    parallel = parallel or ParallelConfig()
    batch, num_ranks = trace.iteration(0), parallel.data_parallel_size
    forward = random_program(
        np.random.default_rng(9), batch, num_ranks=num_ranks, is_update=False
    ).program
    device = DeviceSpec(
        name="test",
        peak_flops_per_s=1e12,
        memory_bytes=2**34,
        memory_bandwidth_bytes_per_s=1e11,
        gemm_efficiency=0.5,
        attention_efficiency=0.5,
        host_layer_s=1e-5,
        dtype_bytes=4,
    )
    cluster = ClusterSpec(
        device=device,
        num_hosts=1,
        devices_per_host=parallel.world_size,
        intra_host_bytes_per_s=1e10,
        inter_host_bytes_per_s=1e10,
        intra_host_latency_s=1e-6,
        inter_host_latency_s=1e-6,
    )
    plan = Plan(
        trace_hash=trace.content_hash,
        iteration=0,
        policy="random",
        options=PlanningConfig(),
        phases=PHASES,
        model=model,
        cluster=cluster,
        parallel=parallel,
        programs=(forward, *(mini_batch_program(batch, i, num_ranks) for i in range(2))),
    )
    return with_times(plan)


def policy_plan(
    trace: Trace, parallel: ParallelConfig, model: ModelSpec, policy: str, planning: PlanningConfig
) -> Plan:
    """A policy's plan on the cluster of `make_plan`."""
    cluster = make_plan(trace, parallel, model).cluster
    setup = Setup(model=model, cluster=cluster, parallel=parallel, planning=planning)
    problem = PlanningProblem(trace.iteration(0), trace.content_hash, 0, setup)
    return make_policy_plan(problem, policy)


def execute(plan: Plan, trace: Trace, options: ExecuteOptions = OPTIONS) -> Execution:
    return run_ranks(execute_plan, plan.parallel.world_size, plan, trace, options)[0]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_trace(tmp_path_factory.mktemp("execute") / "trace")


@pytest.fixture(scope="module")
def execution(trace: Trace) -> Execution:
    return execute(make_plan(trace), trace)


def test_phases_agree_before_the_first_step(trace: Trace, execution: Execution) -> None:
    first = trace.iteration(0).mini_batch[execution.loss_tokens.sample] == 0
    ratio = np.exp(execution.logprob - execution.old_logprob)
    assert np.abs(ratio[first] - 1).max() <= 1e-6
    assert np.abs(ratio[~first] - 1).max() > 1e-3, "the first step changed nothing"
    assert np.abs(execution.reference_logprob - execution.old_logprob).max() > 1e-3


@pytest.mark.slow
def test_phases_agree_within_the_rounding_that_large_weights_amplify(trace: Trace) -> None:
    execution = execute(make_plan(trace), trace, replace(OPTIONS, init_std=0.2))
    first = trace.iteration(0).mini_batch[execution.loss_tokens.sample] == 0
    ratio = np.exp(execution.logprob - execution.old_logprob)
    assert np.abs(ratio[first] - 1).max() <= 2e-6


def test_every_loss_token_has_three_logprobs(trace: Trace, execution: Execution) -> None:
    assert len(execution.loss_tokens) == trace.iteration(0).loss_tokens
    for values in (execution.old_logprob, execution.reference_logprob, execution.logprob):
        assert (values < 0).all()


def test_bytes_equal_the_account_in_every_phase(trace: Trace, execution: Execution) -> None:
    plan, batch = make_plan(trace), trace.iteration(0)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    for index, program in enumerate(plan.programs):
        mine = program.on_rank(0)
        states = op_by_op(mine, program.tree(batch), memory, stage=0)
        for phase in program.phases:
            events = execution.events
            rows = events.where(
                (events.program == index) & (events.phase == phase) & (events.micro_batch >= 0)
            )
            assert rows.kv_bytes.tolist() == [s.kv_bytes for s in states]
            assert rows.kv_gradient_bytes.tolist() == [s.kv_gradient_bytes for s in states]
            assert rows.logits_bytes.tolist() == [s.logits_bytes for s in states]
            assert rows.static_bytes.tolist() == [s.static_bytes for s in states]
        assert program.is_update <= (max(s.kv_gradient_bytes for s in states) > 0)


def test_events_are_the_plans_ops_in_order(trace: Trace, execution: Execution) -> None:
    plan, events = make_plan(trace), execution.events
    update = events.where(events.phase == "update")
    wanted = []
    for program in plan.phase_programs("update"):
        wanted += [op.kind for op in program.on_rank(0).ops()]
        wanted += ["gradient_reduction", "optimizer_step"]
    assert update.op.tolist() == wanted
    assert (update.end_s >= update.start_s).all()
    assert (np.diff(update.start_s) >= 0).all()
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    assert (update.static_bytes == memory.static_bytes).all()
    held = update.activation_bytes[update.op == "forward"]
    assert held.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data_parallel_size=2),
        ParallelConfig(tensor_model_parallel_size=2),
        ParallelConfig(pipeline_model_parallel_size=3),
    ],
    ids=["data", "tensor", "pipeline"],
)
def test_several_processes_train_like_one(
    trace: Trace, execution: Execution, parallel: ParallelConfig
) -> None:
    """The second mini-batch sees the weights after the first step, so the step agrees too."""
    other = execute(make_plan(trace, parallel), trace)
    np.testing.assert_allclose(other.loss, execution.loss, rtol=0, atol=2e-5)
    np.testing.assert_allclose(other.gradient_norm, execution.gradient_norm, rtol=1e-4)
    np.testing.assert_allclose(other.logprob, execution.logprob, rtol=0, atol=2e-4)
    first = [
        {n: g for n, g in run.gradients.items() if n.startswith("mini_batch0.")}
        for run in (other, execution)
    ]
    errors = gradient_errors.by_parameter(*first)
    assert max(errors.values()) <= 5e-6, errors


@pytest.mark.slow
def test_tied_embeddings_stay_equal_on_first_and_last_stage(trace: Trace) -> None:
    """The second mini-batch runs with weights after a step, so a copy left behind would show."""
    tied = TINY.model_copy(update={"tied_embeddings": True, "num_layers": 2})
    one = execute(make_plan(trace, model=tied), trace)
    two = execute(make_plan(trace, ParallelConfig(pipeline_model_parallel_size=2), tied), trace)
    assert list(two.gradients) == list(one.gradients)
    assert not any("output_layer" in name for name in two.gradients)
    np.testing.assert_allclose(two.loss, one.loss, rtol=0, atol=2e-5)
    np.testing.assert_allclose(two.gradient_norm, one.gradient_norm, rtol=1e-4)
    np.testing.assert_allclose(two.logprob, one.logprob, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_events_of_all_ranks_and_stages_are_sane(trace: Trace) -> None:
    parallel = ParallelConfig(data_parallel_size=2, pipeline_model_parallel_size=3)
    plan, batch = make_plan(trace, parallel), trace.iteration(0)
    execution = execute(plan, trace)
    for phase in ("log_old_prob", "reference", "update"):
        events = execution.events.where(execution.events.phase == phase)
        assert (np.diff(events.rank) >= 0).all()
        for rank, stage in product(range(2), range(3)):
            mine = events.where((events.rank == rank) & (events.stage == stage))
            wanted = []
            for program in plan.phase_programs(phase):
                wanted += [op.kind for op in stage_ops(program.on_rank(rank).ops(), 3, stage)]
                if program.is_update:
                    wanted += ["gradient_reduction", "optimizer_step"]
            assert mine.op.tolist() == wanted
            assert (mine.end_s >= mine.start_s).all()
            assert (mine.start_s[1:] >= mine.end_s[:-1]).all()
    metrics = execution_metrics(plan, batch, execution)
    for values in metrics["phases"].values():
        assert 0.0 <= values["bubble_fraction"] < 1.0
        assert 0.0 < values["worker_time_max_s"] <= values["makespan_s"]
    forward, *updates = plan.programs
    assert metrics["phases"]["reference"]["executed_tokens"] == forward.unique_tokens
    assert metrics["phases"]["update"]["executed_tokens"] == sum(p.unique_tokens for p in updates)


@pytest.mark.slow
def test_a_rank_that_dies_leaves_nothing_half_written(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StageRun.run

    def die_in_the_update(self: StageRun, op: Op, message: Any) -> Any:
        if op.kind == "backward" and self.model.post_process:
            raise SystemExit(9)
        return run(self, op, message)

    monkeypatch.setattr(StageRun, "run", die_in_the_update)
    plan = make_plan(trace, ParallelConfig(pipeline_model_parallel_size=3))
    with (
        pytest.raises(BackendError, match="rank 2 died"),
        RunDir(tmp_path / "run", "execute") as directory,
    ):
        execute_to_directory(plan, trace, OPTIONS, directory.path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_repeats_change_no_result(trace: Trace, execution: Execution) -> None:
    again = execute(make_plan(trace), trace, replace(OPTIONS, warmup=1, repeat=2))
    assert again.loss == execution.loss
    assert np.array_equal(again.logprob, execution.logprob)
    assert again.events.op.tolist() == execution.events.op.tolist()
    plan = make_plan(trace)
    copy = MemoryModel(plan.model, plan.cluster, plan.parallel).weight_bytes_on(0)
    wanted = execution.events.static_bytes + copy * (execution.events.phase == "update")
    assert again.events.static_bytes.tolist() == wanted.tolist()


def test_a_copy_of_the_weights_must_fit_beside_the_plan(trace: Trace) -> None:
    plan = make_plan(trace)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    needed = memory.static_bytes + memory.weight_bytes_on(0)
    for memory_bytes, fits in ((needed, True), (needed - 1, False)):
        device = plan.cluster.device.model_copy(update={"memory_bytes": memory_bytes})
        cluster = plan.cluster.model_copy(update={"device": device})
        tight = replace(plan, cluster=cluster)
        check_executable(tight, trace, OPTIONS)
        if fits:
            check_executable(tight, trace, replace(OPTIONS, repeat=2))
        else:
            with pytest.raises(ConfigError, match="a copy of the weights"):
                check_executable(tight, trace, replace(OPTIONS, repeat=2))


@pytest.mark.slow
def test_bfloat16_follows_float32(trace: Trace, execution: Execution) -> None:
    low = execute(make_plan(trace), trace, replace(OPTIONS, dtype="bfloat16"))
    assert low.dtype == "bfloat16"
    first = trace.iteration(0).mini_batch[execution.loss_tokens.sample] == 0
    error = np.abs(low.logprob - execution.logprob)[first]
    assert 1e-4 < error.max() < 0.1
    assert low.gradient_norm[0] == pytest.approx(execution.gradient_norm[0], rel=0.05)


def test_run_directory(trace: Trace, execution: Execution, tmp_path: Path) -> None:
    metrics = execute_to_directory(make_plan(trace), trace, OPTIONS, tmp_path)
    assert metrics["loss"] == execution.loss
    assert metrics["max_ratio_deviation"] <= 1e-6
    assert set(metrics["phases"]) == {"log_old_prob", "reference", "update"}
    table = pq.read_table(tmp_path / "logprobs.parquet")
    assert table.column_names == ["sample", "token", "old_logprob", "ref_logprob", "logprob"]
    assert table.num_rows == trace.iteration(0).loss_tokens
    assert len(Events.load(tmp_path / "events.parquet")) == len(execution.events)
    gradients = load_file(tmp_path / "gradients.safetensors")
    weight = gradients["mini_batch1.decoder.layers.0.self_attention.linear_qkv.weight"]
    norm = sum(float((g.double() ** 2).sum()) for n, g in gradients.items() if "batch1" in n)
    assert weight.shape == (TINY.attention_width + 2 * TINY.kv_width, TINY.hidden_size)
    assert norm**0.5 == pytest.approx(metrics["gradient_norm"][1], rel=1e-5)


def test_old_logprobs_are_required(trace: Trace) -> None:
    plan = make_plan(trace)
    plan = replace(plan, programs=plan.programs[1:])
    with pytest.raises(ConfigError, match="--loss ppo_clip needs phase log_old_prob"):
        check_executable(plan, trace, OPTIONS)
    sft = replace(OPTIONS, loss=LossOptions(kind="sft"), keep_gradients=False)
    execution = execute(plan, trace, sft)
    assert np.isnan(execution.old_logprob).all()
    assert execution.loss[0] > 0


def test_another_trace_is_refused(trace: Trace) -> None:
    plan = replace(make_plan(trace), trace_hash="0" * 64)
    with pytest.raises(PlanError, match="000000000000"):
        check_executable(plan, trace, OPTIONS)


@pytest.mark.parametrize(
    ("parallel", "model", "key"),
    [
        (ParallelConfig(pipeline_model_parallel_size=2), {}, "num_layers"),
        (ParallelConfig(), {"num_moe_experts": 4, "moe_topk": 2}, "moe_ffn_hidden_size 0"),
        (ParallelConfig(tensor_model_parallel_size=3), {}, "num_query_groups"),
    ],
)
def test_refused_layouts(
    trace: Trace, parallel: ParallelConfig, model: dict[str, int], key: str
) -> None:
    plan = make_plan(trace, parallel, TINY.model_copy(update=model))
    with pytest.raises(ConfigError, match=key):
        check_executable(plan, trace, OPTIONS)


def test_wrong_number_of_processes(trace: Trace) -> None:
    plan = make_plan(trace, ParallelConfig(data_parallel_size=2))
    with pytest.raises(BackendError, match=r"tensor\(1\) \* pipeline\(1\) \* data\(2\) = 2 .* 1 "):
        run_ranks(execute_plan, 1, plan, trace, OPTIONS)


def test_a_plan_that_misses_a_sample_is_noticed(trace: Trace) -> None:
    plan = make_plan(trace)
    program = plan.programs[1]
    last = int(program.segments.micro_batch.max())
    keep = np.flatnonzero(program.schedule.micro_batch != last)
    broken = replace(program, schedule=program.schedule.rows(keep))
    plan = replace(plan, programs=(plan.programs[0], broken))
    with pytest.raises(PsrlError):
        execute(plan, trace)
