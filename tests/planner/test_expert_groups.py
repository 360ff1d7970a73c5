"""Ranks that share experts run one op pattern, and steps of equal cost waste little."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import SampleBatch
from psrl.planner import POLICIES, PlanningProblem, make_plan
from psrl.planner.micro_batching.all_ranks import token_cuts
from psrl.planner.micro_batching.assemble import build_rank
from psrl.planner.micro_batching.best_cuts import cut_group
from psrl.planner.micro_batching.built import join_groups, timed_ops
from psrl.planner.micro_batching.cut_rules import CutRule, all_rules, cut_in_step, cut_rank
from psrl.planner.micro_batching.expert_groups import run_in_step
from psrl.planner.micro_batching.rank_tree import tree_of_rank
from psrl.planner.micro_batching.token_cuts import cut_exactly, segments_of
from psrl.planner.placement.placement import Placement
from psrl.sim import simulate
from tests.planner.cases import (
    chains,
    make_moe_setup,
    nasty_batch,
    problem_of,
    star,
    tree_batch,
    update_of,
    workloads,
)


def patterns(plan: Plan) -> list[list[list[tuple[str, str, int]]]]:
    """For each program and rank: kind, activation and number of the micro-batch of each op."""
    found = []
    for program in plan.programs:
        by_rank = []
        for rank in range(plan.num_ranks):
            mine = program.on_rank(rank)
            activation = mine.micro_batches.activation.tolist()
            by_rank.append(
                [(op.kind, activation[op.micro_batch], op.micro_batch) for op in mine.ops()]
            )
        found.append(by_rank)
    return found


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    num_samples=st.integers(1, 10),
    size=st.sampled_from([2, 4]),
    num_stages=st.sampled_from([1, 2]),
    max_tokens=st.sampled_from([3, 16, 1000]),
    recompute=st.sampled_from(["none", "full"]),
    name=st.sampled_from(sorted(set(POLICIES) - {"optimal"})),
)
@settings(max_examples=30)
def test_ranks_that_share_experts_run_equal_ops_whatever_the_policy(
    seed: int,
    num_samples: int,
    size: int,
    num_stages: int,
    max_tokens: int,
    recompute: str,
    name: str,
) -> None:
    batch = nasty_batch(seed, num_samples)
    setup = make_moe_setup(
        4, num_stages, size, max_tokens=max_tokens, recompute=recompute, search_iterations=5
    )
    # make_plan checks the plan before it returns it.
    plan = make_plan(problem_of(batch, setup), name)
    for by_rank in patterns(plan):
        for leader in range(0, 4, size):
            assert all(p == by_rank[leader] for p in by_rank[leader : leader + size])
    # The simulator refuses ranks in step that run different ops, and agrees on the time.
    events = simulate(plan, batch)
    predicted = plan.predicted["worker_time_max_s"]
    longest = sum(
        float(
            np.max(events.end_s[(events.phase == phase) & (events.micro_batch >= 0)], initial=0.0)
        )
        for phase in ("log_old_prob", "update")
    )
    assert longest == pytest.approx(predicted, rel=0.02)


@given(
    seed=st.integers(0, 10_000),
    num_samples=st.integers(1, 12),
    count=st.integers(1, 40),
    num_units=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=60)
def test_exact_cuts_have_the_wanted_count(
    seed: int, num_samples: int, count: int, num_units: int
) -> None:
    batch = nasty_batch(seed, num_samples)
    subproblem = update_of(batch, make_moe_setup(1))
    rank_tree = tree_of_rank(
        Placement(subproblem, np.zeros(num_samples + 1, np.int64), _zeros(batch)), 0
    )
    bounds = cut_exactly(rank_tree, num_units, count, 10_000)
    assert bounds is not None
    assert len(bounds) - 1 == min(count, rank_tree.total_tokens)
    assert bounds[0] == 0
    assert bounds[-1] == rank_tree.total_tokens
    assert (np.diff(bounds) >= 1).all()


def test_a_budget_that_the_count_breaks_is_refused() -> None:
    subproblem = update_of(tree_batch([(100, [])]), make_moe_setup(1))
    rank_tree = tree_of_rank(Placement(subproblem, np.zeros(1, np.int64), np.zeros(1, np.int64)), 0)
    assert cut_exactly(rank_tree, 1, 4, 20) is None
    assert cut_exactly(rank_tree, 1, 5, 30) is not None


def _zeros(batch: SampleBatch) -> np.ndarray:
    return np.zeros(batch.num_samples, np.int64)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("shape", ["stars", "chains"])
def test_equal_cuts_beat_padding_in_simulation_and_come_near_the_bound(
    shape: str, num_stages: int
) -> None:
    rng = np.random.default_rng(3)
    batch = tree_batch(star(rng, 8, 6) if shape == "stars" else chains(rng, 8, 4, 6))
    setup = make_moe_setup(4, num_stages, 4, max_tokens=512)
    problem = problem_of(batch, setup, ("update",))
    plan = make_plan(problem, "psrl")
    (subproblem,) = problem.programs()
    placement = POLICIES["psrl"](subproblem).placement
    padded = padded_plan(plan, placement)
    faster, slower = simulated_s(plan, batch), simulated_s(padded, batch)
    assert faster < 0.97 * slower
    # No group is faster than its most loaded rank's own work: steps of equal cost nearly get there.
    assert step_waste(plan, problem) < 0.03
    assert step_waste(plan, problem) < step_waste(padded, problem)


def padded_plan(plan: Plan, placement: Placement) -> Plan:
    """Each rank cut for itself by one rule; only empty micro-batches level the counts."""
    rule = CutRule(2.0, 4, 1.0)
    rank_trees = [tree_of_rank(placement, rank) for rank in range(plan.num_ranks)]
    alone = [build_rank(placement, v.rank, segments_of(v, cut_rank(v, rule))) for v in rank_trees]
    built = join_groups(placement, [run_in_step(alone, 0)])
    return replace(plan, programs=(built.program,))


def simulated_s(plan: Plan, batch: SampleBatch) -> float:
    events = simulate(plan, batch)
    return float(events.end_s[events.micro_batch >= 0].max())


def step_waste(plan: Plan, problem: PlanningProblem) -> float:
    """Time in which ranks of a group wait for a slower member, over the most loaded one's work."""
    programs = [plan.programs[0].on_rank(rank) for rank in range(plan.num_ranks)]
    alone_s = timed_ops(problem.cost_model, programs, problem.num_stages).duration_s[-1]
    steps_s = alone_s.reshape(len(programs), -1)
    return float(steps_s.max(axis=0).sum() / steps_s.sum(axis=1).max()) - 1.0


def test_steps_of_a_group_cost_nearly_the_same() -> None:
    subproblem = update_of(workloads()["chains"], make_moe_setup(2, 1, 2, max_tokens=128))
    samples = subproblem.samples.num_samples
    placement = Placement(subproblem, np.arange(samples) % 2, np.zeros(samples, np.int64))
    rank_trees = [tree_of_rank(placement, rank) for rank in range(2)]
    group = cut_group(rank_trees, all_rules(rank_trees)[0])
    tables = [r.program.micro_batches for r in group.ranks]
    for cost_s in (table.forward_s + table.backward_s for table in tables):
        assert len(cost_s) == len(tables[0])
        assert cost_s.max() <= 1.04 * cost_s.mean()


def test_a_rank_with_little_work_runs_empty_steps() -> None:
    batch = tree_batch([(3, []), (500, [])])
    subproblem = update_of(batch, make_moe_setup(2, 1, 2, max_tokens=64))
    placement = Placement(subproblem, np.array([0, 1]), np.zeros(2, np.int64))
    rank_trees = [tree_of_rank(placement, rank) for rank in range(2)]
    short, long = cut_in_step(rank_trees, CutRule(1.0, 1, 1.0))
    assert short.tolist() == [0, 1, 2, 3]
    assert len(long) - 1 >= 8
    built = token_cuts(placement)
    sizes = [built.program.on_rank(rank).micro_batches.num_tokens for rank in range(2)]
    assert len(sizes[0]) == len(sizes[1])
    assert sizes[0].sum() == 3
    assert (sizes[0] == 0).any()
