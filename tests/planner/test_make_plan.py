"""Determinism, errors, and what a plan predicts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psrl.core.errors import ConfigError, ExitCode, InfeasibleError
from psrl.core.plan.plan import Plan
from psrl.planner import POLICIES, make_plan
from tests.planner.cases import make_setup, nasty_batch, problem_of, workloads


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_same_input_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    setup = make_setup(3, max_tokens=512)
    for run in ("first", "second"):
        make_plan(problem_of(workloads()["chains"], setup), name).save(tmp_path / run)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert "plan.json" in files
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert Plan.load(tmp_path / "first").policy == name


def test_an_unknown_policy_is_named_with_the_closest_known() -> None:
    with pytest.raises(ConfigError, match=r"'dfscut'.* Did you mean 'dfs_cut'") as caught:
        make_plan(problem_of(nasty_batch(0, 3), make_setup()), "dfscut")
    assert "sharing_agnostic" in caught.value.hint


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'updat'.* Did you mean 'update'"):
        problem_of(nasty_batch(0, 3), make_setup(), ("updat",))
    with pytest.raises(ConfigError, match="no phase"):
        problem_of(nasty_batch(0, 3), make_setup(), ())


@pytest.mark.parametrize("name", ["verl", "psrl"])
def test_a_plan_that_cannot_fit_says_by_how_much(name: str) -> None:
    problem = problem_of(nasty_batch(0, 6), make_setup(memory_bytes=2**20))
    with pytest.raises(InfeasibleError, match=r"GiB.*may use") as caught:
        make_plan(problem, name)
    assert caught.value.exit_code == ExitCode.INFEASIBLE
    assert "max_tokens_per_micro_batch" in caught.value.hint


@pytest.mark.slow
def test_held_micro_batches_keep_less_only_where_memory_demands_it() -> None:
    # One long path: every micro-batch is read by all later ones, so all are held.
    batch = workloads()["long_path"]
    roomy = make_setup(1, max_tokens=1024)
    plan = make_plan(problem_of(batch, roomy, ("update",)), "sharing_agnostic")
    assert set(plan.programs[0].micro_batches.activation) == {"keep"}
    peak = plan.predicted["peak_memory_bytes"]
    tight = make_setup(1, max_tokens=1024, memory_bytes=int(0.9 * peak / 0.9))
    lighter = make_plan(problem_of(batch, tight, ("update",)), "sharing_agnostic")
    assert {"recompute", "drop"} & set(lighter.programs[0].micro_batches.activation)
    assert lighter.predicted["peak_memory_bytes"] <= 0.9 * peak
    assert lighter.predicted["makespan_s"] > plan.predicted["makespan_s"]


def test_one_forward_only_program_and_one_update_per_mini_batch() -> None:
    batch = nasty_batch(5, 9)
    batch = replace(batch, mini_batch=np.arange(10) % 3)
    plan = make_plan(problem_of(batch, make_setup(), ("update", "reference")), "psrl")
    assert [p.phases for p in plan.programs] == [("reference",), *[("update",)] * 3]
    assert [p.mini_batch for p in plan.programs] == [-1, 0, 1, 2]
    assert len(plan.programs[0].assignments) == 10


def test_times_add_up_over_phases() -> None:
    batch = workloads()["stars"]
    one = make_plan(problem_of(batch, make_setup(max_tokens=512), ("reference",)), "psrl").predicted
    two = make_plan(
        problem_of(batch, make_setup(max_tokens=512), ("log_old_prob", "reference")), "psrl"
    ).predicted
    assert two["makespan_s"] == pytest.approx(2 * one["makespan_s"])
    assert two["lower_bound_s"] == pytest.approx(2 * one["lower_bound_s"])
    assert two["executed_tokens"] == one["executed_tokens"]


def test_predicted_peak_is_the_limit_that_the_check_accepts() -> None:
    batch = workloads()["stars"]
    peak = make_plan(problem_of(batch, make_setup(2, 2, max_tokens=512)), "verl").predicted[
        "peak_memory_bytes"
    ]
    exact = make_setup(2, 2, max_tokens=512, memory_bytes=int(np.ceil(peak / 0.9)) + 1)
    make_plan(problem_of(batch, exact), "verl")
    with pytest.raises(InfeasibleError):
        make_plan(
            problem_of(
                batch, make_setup(2, 2, max_tokens=512, memory_bytes=int(0.99 * peak / 0.9))
            ),
            "verl",
        )
