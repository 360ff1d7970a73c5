"""Models on any layout: the same weights, stages, and whole plans with experts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from psrl.backend.executable import check_executable
from psrl.backend.execute import execute_plan
from psrl.backend.execution import Execution
from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.model import build_model, stage_rows
from psrl.backend.model.parameters import ParallelGroups, gather_full, stage_parameters
from psrl.backend.options import ExecuteOptions, LossOptions, OptimizerOptions, RouterOptions
from psrl.backend.train.optimizer import MainGradients
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.errors import ConfigError, PlanError
from psrl.core.plan.plan import Plan, Program
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace
from tests import gradient_errors
from tests.backend.cases import TINY
from tests.backend.test_execute import make_plan, make_trace
from tests.backend.test_moe import MOE, one_pattern
from tests.backend.test_weights import write_hf
from tests.random_plans import random_program

TIED = TINY.model_copy(update={"tied_embeddings": True})
TP2_EP4 = ParallelConfig(
    tensor_model_parallel_size=2,
    data_parallel_size=2,
    expert_model_parallel_size=4,
    sequence_parallel=True,
)


def full_weights(
    spec: ModelSpec, parallel: ParallelConfig
) -> tuple[dict[str, torch.Tensor], float, list[str]]:
    """All full weights, the norm of gradients that equal the weights, and this rank's names."""
    with model_parallel(parallel):
        model = build_model(spec, parallel, seed=1, dtype=torch.float32)
        gradients = MainGradients(model, ParallelGroups.current())
        named = stage_parameters(model)
        for (_, parameter), (_, view) in zip(named, gradients, strict=True):
            view.copy_(parameter.detach())
        full = gather_full(named, ParallelGroups.current())
        return full, gradients.norm(), [name for name, _ in named]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "parallel"),
    [
        (TINY, ParallelConfig(pipeline_model_parallel_size=3)),
        (TIED, ParallelConfig(pipeline_model_parallel_size=3)),
        (MOE, ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2)),
        pytest.param(MOE, TP2_EP4, marks=pytest.mark.slow),
    ],
    ids=["pp3", "pp3_tied", "ep2", "tp2_ep4"],
)
def test_weights_and_norm_do_not_depend_on_the_layout(
    spec: ModelSpec, parallel: ParallelConfig
) -> None:
    wanted, norm, names = run_ranks(full_weights, 1, spec, ParallelConfig())[0]
    total = sum(float(w.double().square().sum()) for w in wanted.values())
    assert norm == pytest.approx(total**0.5)
    ranks = run_ranks(full_weights, parallel.world_size, spec, parallel)
    for full, found_norm, _ in ranks:
        assert set(full) == set(wanted)
        assert all(torch.equal(full[n], w) for n, w in wanted.items())
        assert found_norm == pytest.approx(norm, rel=1e-9)
    assert {n for _, _, mine in ranks for n in mine} == set(names)
    assert all(len(mine) < len(names) for _, _, mine in ranks)


def rows() -> list[int]:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    with model_parallel(parallel):
        model = build_model(TINY, parallel, seed=1, dtype=torch.float32)
        return [stage_rows(model, n) for n in (1, 2, 7)]


def test_rows_are_rounded_up() -> None:
    assert run_ranks(rows, 2) == [[1, 1, 4]] * 2


OPTIONS = ExecuteOptions(
    init_std=0.2,
    loss=LossOptions(kind="gspo", reduction="seq-mean-token-mean", kl_coefficient=0.1),
    router=RouterOptions(balance_coefficient=0.2, z_coefficient=0.01),
    optimizer=OptimizerOptions(learning_rate=1e-2),
    keep_gradients=True,
)
EP2 = ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2)


def coupled_program(batch: SampleBatch, program: Program, num_ranks: int) -> Program:
    """A random program for the same samples whose ranks run one op pattern."""
    chosen = program.assignments.sample
    for seed in range(100):
        found = random_program(
            np.random.default_rng(seed),
            batch.select(chosen),
            num_ranks=num_ranks,
            is_update=program.is_update,
            activations=("keep", "recompute", "drop") if program.is_update else ("keep",),
        ).program
        rank = found.micro_batches.rank
        if len({int((rank == r).sum()) for r in range(num_ranks)}) == 1:
            break
    assignments = replace(found.assignments, sample=chosen[found.assignments.sample])
    found = replace(found, assignments=assignments, mini_batch=program.mini_batch)
    return one_pattern(found, num_ranks) if program.is_update else found


def coupled_plan(trace: Trace, parallel: ParallelConfig, spec: ModelSpec = MOE) -> Plan:
    """Forward phases over the whole batch and two optimizer steps, of one op pattern each."""
    plan, batch = make_plan(trace, parallel, spec), trace.iteration(0)
    programs = [coupled_program(batch, p, plan.num_ranks) for p in plan.programs]
    return replace(plan, programs=tuple(programs))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_trace(tmp_path_factory.mktemp("model") / "trace")


def execute(plan: Plan, trace: Trace, options: ExecuteOptions) -> Execution:
    return run_ranks(execute_plan, plan.parallel.world_size, plan, trace, options)[0]


@pytest.mark.slow
def test_a_plan_with_experts_trains_the_same_on_two_layouts(trace: Trace) -> None:
    """Two optimizer steps of GSPO with both router losses; the second sees the first's weights."""
    one = execute(coupled_plan(trace, ParallelConfig()), trace, OPTIONS)
    two = execute(coupled_plan(trace, EP2), trace, OPTIONS)
    np.testing.assert_allclose(two.loss, one.loss, rtol=0, atol=2e-5)
    np.testing.assert_allclose(two.router_loss, one.router_loss, rtol=1e-5)
    np.testing.assert_allclose(two.gradient_norm, one.gradient_norm, rtol=1e-4)
    batch, spec = trace.iteration(0), MOE
    for step, (ours, theirs) in enumerate(zip(one.expert_load, two.expert_load, strict=True)):
        tokens = int(batch.num_tokens[batch.mini_batch == step].sum())
        assert ours.sum(axis=1).tolist() == [tokens * spec.moe_topk] * spec.num_layers
        if step == 0:
            assert np.array_equal(ours, theirs)
    first = [
        {n: g for n, g in run.gradients.items() if n.startswith("mini_batch0.")}
        for run in (two, one)
    ]
    errors = gradient_errors.by_parameter(*first)
    assert max(errors.values()) <= 5e-6, errors


def test_every_mini_batch_has_its_own_weights(trace: Trace) -> None:
    """Without learning, each step's loss follows from the logprobs of its own samples."""
    loss = LossOptions(kind="sft", reduction="seq-mean-token-mean")
    still = OptimizerOptions(learning_rate=0.0)
    found = execute(make_plan(trace), trace, ExecuteOptions(loss=loss, optimizer=still))
    batch, sample = trace.iteration(0), found.loss_tokens.sample
    assert np.abs(found.logprob - found.old_logprob).max() <= 1e-5
    for step in range(2):
        own = [s for s in np.unique(sample) if batch.mini_batch[s] == step]
        wanted = -np.mean([found.logprob[sample == s].mean() for s in own])
        assert found.loss[step] == pytest.approx(wanted, rel=1e-5)


def test_ranks_that_share_experts_are_checked_before_the_start(trace: Trace) -> None:
    plan = coupled_plan(trace, EP2)
    check_executable(plan, trace, OPTIONS)
    program = plan.programs[1]
    ops = np.flatnonzero((program.schedule.rank == 0) | (program.schedule.op != "recompute"))
    keep = np.where(program.micro_batches.rank == 1, "keep", program.micro_batches.activation)
    other = replace(
        program,
        schedule=program.schedule.rows(ops),
        micro_batches=replace(program.micro_batches, activation=keep),
    )
    broken = replace(plan, programs=(plan.programs[0], other, plan.programs[2]))
    with pytest.raises(PlanError, match="program 1: data-parallel ranks 0 and 1 share experts"):
        check_executable(broken, trace, OPTIONS)


@pytest.mark.slow
def test_weights_are_loaded_for_both_policies(trace: Trace, tmp_path: Path) -> None:
    spec = TINY
    write_hf(tmp_path / "policy", spec)
    options = ExecuteOptions(loss=LossOptions(), weights=tmp_path / "policy")
    same = execute(make_plan(trace, model=spec), trace, options)
    assert np.array_equal(same.reference_logprob, same.old_logprob)
    random = execute(make_plan(trace, model=spec), trace, replace(options, weights=None))
    assert np.abs(random.old_logprob - same.old_logprob).max() > 0.1
    wrong = replace(options, reference_weights=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"--reference-weights .*none is refused"):
        execute(make_plan(trace, model=spec), trace, wrong)
