"""Explanations add up, the critical path is the predicted time, and searched layouts are valid."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from psrl.core.errors import InfeasibleError
from psrl.core.plan.clock import ProgramOps
from psrl.core.plan.op_table import OpTable, op_codes, stage_order
from psrl.core.plan.schedule import interleave
from psrl.planner import (
    explain,
    format_choices,
    format_explanation,
    make_plan,
    search_layouts,
    search_progress,
)
from psrl.planner.explanation.critical_path import critical_path
from psrl.planner.layout_search import layouts_of
from psrl.planner.micro_batching.built import op_times
from tests.planner.cases import make_setup, nasty_batch, problem_of, workloads


@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks_add_up_to_what_the_plan_predicts(num_stages: int) -> None:
    batch = workloads()["one_group"]
    plan = make_plan(problem_of(batch, make_setup(4, num_stages, max_tokens=512)), "psrl")
    reports = explain(plan, batch)
    ranks = [r for report in reports for r in report.ranks]
    assert sum(r.duplicated_tokens for r in ranks) == pytest.approx(
        plan.predicted["duplicated_tokens"]
    )
    assert max(r.peak_bytes for r in ranks) == plan.predicted["peak_memory_bytes"]
    assert sum(r.num_tokens for r in ranks) == plan.predicted["executed_tokens"]
    slowest_s = sum(report.slowest.time_s for report in reports)
    assert slowest_s == pytest.approx(plan.predicted["worker_time_max_s"], rel=1e-9)
    for report in reports:
        assert report.critical.time_s == pytest.approx(report.slowest.time_s, rel=1e-9)
    text = format_explanation(plan, reports)
    assert reports[0].bound_source in text
    assert f"{ranks[0].num_tokens:,}" in text
    assert reports[0].as_json()["ranks"][0]["num_tokens"] == ranks[0].num_tokens


@pytest.mark.parametrize("policy", ["verl", "vllm_ps", "sglang_ps", "first_fit", "psrl"])
def test_duplicated_tokens_are_those_of_the_plan(policy: str) -> None:
    """Each copy counts, whether samples may share or not, on one rank or on several."""
    batch = nasty_batch(5, 12, num_mini_batches=2)
    plan = make_plan(problem_of(batch, make_setup(3, max_tokens=40)), policy)
    reports = explain(plan, batch)
    for report, program in zip(reports, plan.programs, strict=True):
        paths = [tuple(batch.sample_symbols(s)) for s in program.assignments.sample.tolist()]
        prefixes = {path[: n + 1] for path in paths for n in range(len(path))}
        assert report.unique_tokens == len(prefixes)
        duplicated = sum(rank.duplicated_tokens for rank in report.ranks)
        assert duplicated == pytest.approx(program.unique_tokens - len(prefixes))
        assert all(0 <= r.duplicated_tokens <= r.num_tokens for r in report.ranks)
        assert f"{duplicated:,.0f} tokens beyond one copy" in format_explanation(plan, reports)
    stated = plan.predicted["duplicated_tokens"]
    assert stated == pytest.approx(sum(r.duplicated_tokens for x in reports for r in x.ranks))
    assert (policy == "verl") <= (stated > 0)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("message_s", [0.0, 0.25, 4.0])
def test_the_critical_path_of_a_pipeline_is_its_makespan(num_stages: int, message_s: float) -> None:
    count, num_ranks = 5, 2
    last = interleave(range(count), range(count), [k + 1 for k in range(count)])
    kind = op_codes(np.array([op.kind for op in last], np.str_))
    row = np.array([op.micro_batch for op in last])
    each = len(last)
    table = OpTable(
        np.tile(kind, num_ranks),
        np.concatenate([row + count * rank for rank in range(num_ranks)]),
        each * np.arange(num_ranks + 1),
    )
    orders = [stage_order(table, True, num_stages, stage) for stage in range(num_stages)]
    rng = np.random.default_rng(num_stages)
    program = ProgramOps(
        True,
        table.first_op,
        np.stack([table.kind[order] for order in orders]),
        np.stack([table.row[order] for order in orders]),
        rng.random((num_stages, each * num_ranks)),
        message_s * rng.random(count * num_ranks),
    )
    times = op_times(program)
    path = critical_path(program, times)
    assert path.time_s == pytest.approx(times.last_s, rel=1e-12)
    assert (path.steps[0].stage, path.steps[0].op, path.steps[0].row % count) == (0, "forward", 0)
    assert (path.steps[-1].stage, path.steps[-1].op) == (0, "backward")
    assert (path.message_s > 0.0) == (message_s > 0.0 and num_stages > 1)


def test_searched_layouts_use_all_devices_and_the_front_is_not_beaten() -> None:
    problem = problem_of(nasty_batch(3, 6), make_setup(2, 2, max_tokens=16), ("update",))
    choices = search_layouts(problem, "dfs_cut")
    sizes = set()
    for choice in choices:
        p = choice.setup.parallel
        assert p.world_size == 4
        sizes.add((p.tensor_model_parallel_size, p.pipeline_model_parallel_size))
    # The model has 2 groups of keys and 4 layers.
    assert sizes == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
    planned = [c for c in choices if not c.reason]
    front = [c for c in planned if c.on_front]
    assert planned[0] is choices[0] is front[0]
    for choice in planned:
        beaten = any(
            o.time_s <= choice.time_s
            and o.peak_bytes <= choice.peak_bytes
            and (o.time_s, o.peak_bytes) != (choice.time_s, choice.peak_bytes)
            for o in planned
        )
        assert not (choice.on_front and beaten)
        assert (
            choice.on_front
            or beaten
            or any((o.time_s, o.peak_bytes) == (choice.time_s, choice.peak_bytes) for o in front)
        )
    assert len(format_choices(choices).splitlines()) == len(choices) + 1


def test_the_search_finds_the_fastest_of_all_layouts_and_budgets() -> None:
    setup = make_setup(2, 2, max_tokens=16)
    problem = problem_of(nasty_batch(3, 6), setup, ("update",))
    times_s = []
    for parallel, budget in product(layouts_of(setup), (8, 16, 32)):
        planning = setup.planning.model_copy(update={"max_tokens_per_micro_batch": budget})
        changed = setup.model_copy(update={"parallel": parallel, "planning": planning})
        plan = make_plan(problem_of(problem.batch, changed, ("update",)), "dfs_cut")
        times_s.append(plan.predicted["makespan_s"])
    choices = search_layouts(problem, "dfs_cut")
    assert choices[0].time_s == pytest.approx(min(times_s))
    skipped = [c for c in choices if c.reason.startswith("cannot be below")]
    assert all(float(c.reason.split()[3]) >= choices[0].time_s for c in skipped)


def test_a_smaller_budget_is_tried_where_nothing_fits() -> None:
    problem = problem_of(nasty_batch(3, 6), make_setup(2, 2, max_tokens=16), ("update",))
    memory = problem.memory_model.static_bytes + 1
    device = problem.setup.cluster.device.model_copy(
        update={"memory_bytes": int(memory / problem.setup.planning.memory_fraction) + 1}
    )
    cluster = problem.setup.cluster.model_copy(update={"device": device})
    full = replace(problem, setup=problem.setup.model_copy(update={"cluster": cluster}))
    choices = search_layouts(full, "dfs_cut")
    too_large = [c.setup for c in choices if c.is_too_large]
    tried = [(s.parallel, s.planning.max_tokens_per_micro_batch) for s in too_large]
    assert sorted(budget for _, budget in tried) == len(tried) // 2 * [8] + len(tried) // 2 * [16]
    assert all((parallel, 24 - budget) in tried for parallel, budget in tried)
    assert too_large


def test_the_advice_of_an_infeasible_plan_is_true() -> None:
    batch = workloads()["long_path"]
    setup = make_setup(2, max_tokens=4096)
    roomy = make_plan(problem_of(batch, setup, ("update",)), "verl")
    tight = int(0.9 * roomy.predicted["peak_memory_bytes"] / 0.9)
    device = setup.cluster.device.model_copy(update={"memory_bytes": tight})
    cluster = setup.cluster.model_copy(update={"device": device})
    small = setup.model_copy(update={"cluster": cluster})
    with pytest.raises(InfeasibleError, match=r"rank \d needs .* GiB more than") as caught:
        make_plan(problem_of(batch, small, ("update",)), "verl")
    hint = caught.value.hint
    assert "set parallel.recompute to full" in hint
    parallel = small.parallel.model_copy(update={"recompute": "full"})
    make_plan(
        problem_of(batch, small.model_copy(update={"parallel": parallel}), ("update",)), "verl"
    )


def test_the_gap_falls_with_the_steps_to_that_of_the_plan() -> None:
    problem = problem_of(workloads()["stars"], make_setup(4, max_tokens=512), ("update",))
    points = search_progress(problem)
    gaps = [point.gap for point in points]
    assert points[0].steps == 0
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] >= 0.0
    assert make_plan(problem, "psrl").predicted["placement_gap"] <= gaps[-1] + 1e-9
