"""Speed-up as a product, the bounds of sharing, and the documentation of every metric."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.cost.arithmetic import Work, dense_work, model_flops, phase_work
from psrl.core.errors import PlanError
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.metrics import run_metrics
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.sim import OutOfMemory, SimOptions, least_work, simulate, speedup_factors
from psrl.sim.blocks.block_effects import apply_block_policy
from psrl.sim.blocks.block_policies import BlockPolicy
from psrl.sim.iteration import iteration_metrics, modelled_rollout
from tests.sim.cases import PlainCostModel, chains_batch, chains_program, make_plan, random_plan

COSTS = PlainCostModel(forward_token_s=1.0, backward_token_s=2.0)


def factors(baseline: Plan, improved: Plan, batch: SampleBatch, phase: str) -> dict[str, float]:
    before, after = (simulate(p, batch, COSTS, phases=(phase,)) for p in (baseline, improved))
    return speedup_factors(baseline, before, improved, after)[phase]


def forward_plan(batch: SampleBatch, samples: list[list[int]], num_stages: int = 1) -> Plan:
    program = chains_program(batch, samples, is_update=False)
    return make_plan([program], len(samples), num_stages)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(PHASES),
)
def test_the_factors_multiply_to_the_makespan_ratio(
    first: int, second: int, num_ranks: int, num_stages: int, phase: str
) -> None:
    (baseline, other), (plan, batch) = (
        random_plan(seed, num_ranks, num_stages) for seed in (first, second)
    )
    before, after = simulate(baseline, other), simulate(plan, batch)
    found = speedup_factors(baseline, before, plan, after)[phase]
    ratio = before.end_s[before.phase == phase].max() / after.end_s[after.phase == phase].max()
    product = found["sharing"] * found["placement"] * found["cuts"]
    assert found["speedup"] == ratio
    assert product == pytest.approx(ratio, rel=1e-12)


def test_less_work_is_sharing() -> None:
    batch = chains_batch([4, 2, 2, 1])
    found = factors(
        forward_plan(batch, [[0], [1]]), forward_plan(batch, [[2], [3]]), batch, "reference"
    )
    assert found == {
        "speedup": 2.0,
        "sharing": 2.0,
        "placement": 1.0,
        "cuts": 1.0,
    }


def test_balance_is_placement() -> None:
    batch = chains_batch([1] * 6)
    uneven, even = (
        forward_plan(batch, [[0, 1, 2, 3], [4, 5]]),
        forward_plan(batch, [[0, 1, 2], [3, 4, 5]]),
    )
    found = factors(uneven, even, batch, "log_old_prob")
    assert found["speedup"] == found["placement"] == pytest.approx(4 / 3)
    assert found["sharing"] == found["cuts"] == 1.0


def test_fewer_bubbles_are_cuts() -> None:
    batch = chains_batch([4, 1, 1, 1, 1])
    coarse, fine = forward_plan(batch, [[0]], 2), forward_plan(batch, [[1, 2, 3, 4]], 2)
    found = factors(coarse, fine, batch, "reference")
    assert found["speedup"] == found["cuts"] == pytest.approx(8 / 5)
    assert found["sharing"] == found["placement"] == 1.0


@pytest.mark.parametrize("is_update", [True, False])
def test_placement_is_taken_between_meetings(is_update: bool) -> None:
    batch = chains_batch([1] * 6)
    steps = [[[0, 1], [2]], [[3], [4, 5]]], [[[0], [1]], [[2], [3]]]
    uneven, even = (
        make_plan(
            [
                chains_program(batch, samples, mini_batch=i, is_update=is_update)
                for i, samples in enumerate(programs)
            ],
            num_ranks=2,
        )
        for programs in steps
    )
    found = factors(uneven, even, batch, "update" if is_update else "reference")
    assert found["sharing"] == pytest.approx(6 / 4)
    # Both ranks compute the same over the phase, but in each update step one waits for the other.
    assert found["placement"] == pytest.approx(4 / 3 if is_update else 1.0)
    assert found["cuts"] == pytest.approx(1.0)


def test_plans_of_other_layouts_or_phases_are_not_compared() -> None:
    batch = chains_batch([1, 1])
    plan, other = forward_plan(batch, [[0], [1]]), forward_plan(batch, [[0, 1]])
    events = simulate(plan, batch, COSTS)
    with pytest.raises(PlanError, match=r"\(1, 1, 1\) of test differ from \(1, 1, 2\)"):
        speedup_factors(plan, events, other, simulate(other, batch, COSTS))
    update = make_plan([chains_program(batch, [[0], [1]])], num_ranks=2)
    with pytest.raises(PlanError, match="no phase in common"):
        speedup_factors(plan, events, update, simulate(update, batch, COSTS))
    idle = simulate(plan, batch, PlainCostModel())
    with pytest.raises(PlanError, match="log_old_prob took no time"):
        speedup_factors(plan, events, plan, idle)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_no_phase_is_faster_than_its_arithmetic(seed: int, num_ranks: int, num_stages: int) -> None:
    plan, batch = random_plan(seed, num_ranks, num_stages)
    events = simulate(plan, batch)
    for phase, work in least_work(plan, batch).items():
        assert 0 < work["least_s"] <= events.end_s[events.phase == phase].max() * (1 + 1e-12)


def test_a_plan_that_shares_needs_the_work_of_the_tree() -> None:
    batch = make_batch([[1, 2, 3], [1, 2, 4]], [[(1, 3)], [(1, 3)]], mini_batch=[0, 1])
    alone = chains_batch([3, 3])
    dense = least_work(forward_plan(alone, [[0], [1]]), alone)["reference"]
    # Each sample alone: 3 tokens, 1 + 2 + 3 pairs, 2 predicted; the prefix has 2, 3 and 2.
    model = forward_plan(alone, [[0], [1]]).model
    shared, separate = (phase_work(batch, p, shares=True) for p in ("reference", "update"))
    assert shared == Work(4, 9, 2)
    assert separate == phase_work(batch, "reference", shares=False) == Work(6, 12, 4)
    ratio = model_flops(model, separate, "reference") / model_flops(model, shared, "reference")
    assert 12 / 9 < ratio < 4 / 2
    assert dense["flops"] == model_flops(model, dense_work(alone), "reference")


def test_nothing_is_the_work_of_an_empty_batch() -> None:
    assert phase_work(make_batch([], []), "update", shares=True) == Work(0, 0, 0)


def names(value: dict[str, Any]) -> set[str]:
    found = set(value)
    for key, inner in value.items():
        if isinstance(inner, dict):
            found |= names(inner)
            found -= {key}
    return found - set(PHASES)


def test_every_metric_is_documented() -> None:
    plan, batch = random_plan(5, num_ranks=2, num_stages=2)
    events = simulate(plan, batch)
    emitted = names(run_metrics(plan, batch, events))
    emitted |= names(speedup_factors(plan, events, plan, events))
    emitted |= names(least_work(plan, batch))
    emitted |= names(apply_block_policy(plan, batch, BlockPolicy()).metrics)
    rollout = modelled_rollout(batch, tokens_per_s=10.0)
    emitted |= names(iteration_metrics(rollout, run_metrics(plan, batch, events)))
    emitted |= {f.name for f in (*fields(OutOfMemory), *fields(SimOptions))}
    assert {"makespan_s", "cuts", "least_s"} <= emitted
    text = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text("utf-8")
    rows = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")}
    assert {f"`{name}`" for name in emitted} <= rows


def test_idle_ranks_and_overlapping_programs_are_counted_once() -> None:
    batch = chains_batch([1] * 4)
    programs = [
        chains_program(batch, [[0, 1], []], is_update=False),
        chains_program(batch, [[2, 3], []], is_update=False),
    ]
    plan = make_plan(programs, num_ranks=2, num_stages=2)
    events = simulate(plan, batch, COSTS, phases=("reference",))
    metrics = run_metrics(plan, batch, events)
    # Stage 0 starts the second program at 2 while stage 1 is still busy with the first until 3.
    assert metrics["makespan_s"] == metrics["worker_time_max_s"] == 5.0
    assert metrics["worker_time_min_s"] == 0.0
    assert math.isinf(metrics["worker_time_max_over_min"])
    assert metrics["bubble_fraction"] == pytest.approx(1 - 8 / 20)
    assert metrics["executed_tokens"] == 4
    assert np.isclose(metrics["logical_tokens_per_s"], 4 / 5)
