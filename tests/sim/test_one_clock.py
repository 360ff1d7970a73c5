"""The predicted, the vectorised and SimPy's times of a plan are the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.plan.plan import Plan
from psrl.core.plan.plan_times import predicted_times
from psrl.core.run.config import load_setup
from psrl.core.run.events import Events
from psrl.core.run.metrics import run_metrics
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import open_trace
from psrl.planner import PlanningProblem
from psrl.planner import make_plan as plan_by
from psrl.sim import SimOptions, simulate
from tests.random_plans import random_batch, random_program
from tests.sim.cases import PlainCostModel, chains_batch, chains_program, make_plan

ROOT = Path(__file__).resolve().parents[2]


def random_costs(rng: np.random.Generator) -> PlainCostModel:
    """Anything between free links and links that take most of the time."""
    return PlainCostModel(
        *rng.uniform(0.05, 1.0, 5),
        per_stage_s=rng.uniform(-0.005, 0.3),
        message_op_s=rng.choice([0.0, 0.3, 3.0, 30.0]) * rng.random(),
        message_token_s=rng.choice([0.0, 0.03, 0.3, 3.0]) * rng.random(),
        reduction_s=rng.random(),
        step_s=rng.random(),
    )


def clock_plan(
    rng: np.random.Generator, num_ranks: int, num_stages: int, coupled_ranks: int
) -> tuple[Plan, SampleBatch]:
    """Two forward-only programs and two updates; some ranks may have no work."""
    if coupled_ranks > 1:
        return coupled_plan(rng, num_ranks, num_stages, coupled_ranks)
    batch = random_batch(rng, num_samples=int(rng.integers(1, 9)), max_new_tokens=12)
    programs = [
        random_program(
            rng,
            batch,
            num_ranks=num_ranks,
            max_micro_batches=int(rng.choice([3, 40])),
            is_update=is_update,
            random_order=bool(rng.integers(2)),
            activations=("keep", "recompute", "drop") if is_update else ("keep",),
        ).program
        for is_update in (False, False, True, True)
    ]
    return make_plan(programs, num_ranks, num_stages), batch


def coupled_plan(
    rng: np.random.Generator, num_ranks: int, num_stages: int, coupled_ranks: int
) -> tuple[Plan, SampleBatch]:
    """Equally many samples on every rank, in groups of ranks that share experts."""
    num_ranks = coupled_ranks * -(-num_ranks // coupled_ranks)
    each = int(rng.integers(1, 9))
    batch = chains_batch(rng.integers(1, 12, num_ranks * each).tolist())
    samples = rng.permutation(num_ranks * each).reshape(num_ranks, each).tolist()
    modes = rng.choice(["keep", "recompute", "drop"], each).tolist()
    programs = [
        chains_program(batch, samples, is_update=is_update, activation=modes)
        for is_update in (False, True)
    ]
    plan = make_plan(programs, num_ranks, num_stages)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=num_stages,
        data_parallel_size=num_ranks,
        expert_model_parallel_size=coupled_ranks,
    )
    return replace(plan, parallel=parallel), batch


def events_of(plan: Plan, batch: SampleBatch, costs: PlainCostModel, engine: str) -> Events:
    return simulate(plan, batch, costs, options=SimOptions(engine=engine))  # type: ignore[arg-type]


def assert_predicted(times: dict[str, float], metrics: dict[str, Any]) -> None:
    """To 1e-9, in every phase, worker times included."""
    simulated = {f"{phase}_s": m["makespan_s"] for phase, m in metrics["phases"].items()}
    for name in ("makespan_s", "worker_time_max_s", "worker_time_min_s"):
        simulated[name] = metrics[name]
    assert {name: times[name] for name in simulated} == pytest.approx(simulated, rel=1e-9)


def check_case(seed: int, num_ranks: int, num_stages: int, coupled_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    plan, batch = clock_plan(rng, num_ranks, num_stages, coupled_ranks)
    plan = replace(plan, model=plan.model.model_copy(update={"num_layers": 24}))
    costs = random_costs(rng)
    events = events_of(plan, batch, costs, "simpy")
    vectorised = events_of(plan, batch, costs, "vectorised")
    assert np.array_equal(vectorised.start_s, events.start_s)
    assert np.array_equal(vectorised.end_s, events.end_s)
    assert_predicted(predicted_times(plan, costs), run_metrics(plan, batch, events))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("coupled_ranks", [1, 2])
def test_the_three_clocks_agree(num_stages: int, coupled_ranks: int) -> None:
    for seed in range(3):
        check_case(seed, 2, num_stages, coupled_ranks)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 1, 2, 3]),
)
def test_predicted_vectorised_and_simpy_times_are_equal(
    seed: int, num_ranks: int, num_stages: int, coupled_ranks: int
) -> None:
    check_case(seed, num_ranks, num_stages, coupled_ranks)


SLOW_LINKS = {
    "0.5b-10gbe": ('model.preset="qwen2.5-0.5b"', "cluster.inter_host_bytes_per_s=1.25e9"),
    "0.5b-1gbe": ('model.preset="qwen2.5-0.5b"', "cluster.inter_host_bytes_per_s=1.25e8"),
    "7b-10gbe": ("cluster.inter_host_bytes_per_s=1.25e9",),
    "7b-3e8": ("cluster.inter_host_bytes_per_s=3e8",),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["verl", "dfs_cut", "psrl"])
@pytest.mark.parametrize("links", SLOW_LINKS)
def test_predicted_times_hold_on_slow_links(links: str, policy: str) -> None:
    """Links this slow are busy most of the time: once, predictions were up to half too small."""
    layout = (
        "parallel.pipeline_model_parallel_size=4",
        "parallel.tensor_model_parallel_size=1",
        "cluster.num_hosts=8",
        "cluster.devices_per_host=1",
    )
    setup = load_setup(ROOT / "examples/clusters/8xh100.toml", (*layout, *SLOW_LINKS[links]))
    trace = open_trace(ROOT / "examples/traces/tau_bench_airline")
    batch = trace.iteration(0)
    groups = list(dict.fromkeys(batch.group_id.tolist()))[:6]
    batch = batch.select(np.flatnonzero(np.isin(batch.group_id, groups)))
    plan = plan_by(PlanningProblem(batch, trace.content_hash, 0, setup), policy)
    for engine in ("simpy", "vectorised"):
        events = simulate(plan, batch, options=SimOptions(engine=engine))  # type: ignore[arg-type]
        assert_predicted(plan.predicted, run_metrics(plan, batch, events))
