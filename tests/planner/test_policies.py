"""Every policy's plan passes the independent check, on small nasty and on agentic batches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.samples.sample import make_batch
from psrl.core.samples.trace import open_trace
from psrl.planner import POLICIES, make_plan
from psrl.planner.problem import ProgramProblem
from tests.planner.cases import make_setup, nasty_batch, problem_of, update_of, workloads

BUNDLED = Path(__file__).resolve().parents[2] / "examples" / "traces"


@given(
    seed=st.integers(0, 10_000),
    num_samples=st.integers(1, 10),
    num_mini_batches=st.integers(1, 3),
    num_ranks=st.integers(1, 5),
    num_stages=st.sampled_from([1, 2, 4]),
    max_tokens=st.sampled_from([3, 16, 1000]),
    recompute=st.sampled_from(["none", "full"]),
    name=st.sampled_from(sorted(POLICIES)),
)
@settings(max_examples=25)
def test_plans_of_random_batches_are_valid_and_not_below_the_bound(
    seed: int,
    num_samples: int,
    num_mini_batches: int,
    num_ranks: int,
    num_stages: int,
    max_tokens: int,
    recompute: str,
    name: str,
) -> None:
    batch = nasty_batch(seed, num_samples, num_mini_batches)
    setup = make_setup(
        num_ranks, num_stages, max_tokens=max_tokens, recompute=recompute, search_iterations=5
    )
    # make_plan checks the plan before it returns it.
    plan = make_plan(problem_of(batch, setup), name)
    predicted = plan.predicted
    assert predicted["makespan_s"] >= predicted["lower_bound_s"] > 0.0
    assert predicted["placement_gap"] >= 0.0
    assert predicted["worker_time_max_s"] >= predicted["worker_time_min_s"] >= 0.0
    assert predicted["duplicated_tokens"] >= 0.0
    # Memory is plentiful: nothing is dropped, except where dropping is as fast as recomputing.
    allowed = {"recompute", "drop"} if recompute == "full" else {"keep"}
    for program in plan.programs:
        assert set(program.micro_batches.activation) <= allowed


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_batch_without_tokens_has_an_empty_plan(name: str) -> None:
    batch = make_batch([[], []], [[], []])
    plan = make_plan(problem_of(batch, make_setup(2)), name)
    assert all(len(program.segments) == 0 for program in plan.programs)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("shape", sorted(workloads()))
def test_psrl_is_never_slower_than_another_policy(shape: str, num_stages: int) -> None:
    batch = workloads()[shape]
    problem = problem_of(batch, make_setup(4, num_stages, max_tokens=1024))
    others = [name for name in POLICIES if name != "optimal"]
    makespan_s = {name: make_plan(problem, name).predicted["makespan_s"] for name in others}
    # Without any sharing the search stops within one percent of the bound.
    allowed = 1.01 if shape == "singletons" else 1.0
    assert makespan_s["psrl"] <= min(makespan_s.values()) * allowed * (1.0 + 1e-12)


@given(
    seed=st.integers(0, 10_000),
    num_samples=st.integers(1, 24),
    num_ranks=st.integers(1, 6),
    num_stages=st.sampled_from([1, 2, 4]),
    max_tokens=st.sampled_from([3, 16, 1000]),
    recompute=st.sampled_from(["none", "full"]),
)
@settings(max_examples=10)
def test_quick_is_never_slower_than_the_contiguous_cut_of_random_batches(
    seed: int,
    num_samples: int,
    num_ranks: int,
    num_stages: int,
    max_tokens: int,
    recompute: str,
) -> None:
    setup = make_setup(num_ranks, num_stages, max_tokens=max_tokens, recompute=recompute)
    assert_quick_is_not_slower(update_of(nasty_batch(seed, num_samples), setup))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(4, 1), (32, 1), (256, 1), (4, 4)])
@pytest.mark.parametrize("trace", ["claude_code", "tau_bench_airline"])
def test_quick_is_never_slower_than_the_contiguous_cut_of_bundled_traces(
    trace: str, num_ranks: int, num_stages: int
) -> None:
    batch = open_trace(BUNDLED / trace).iteration(0)
    batch = replace(batch, mini_batch=np.zeros(batch.num_samples, np.int64))
    assert_quick_is_not_slower(
        update_of(batch, make_setup(num_ranks, num_stages, max_tokens=16384))
    )


def assert_quick_is_not_slower(subproblem: ProgramProblem) -> None:
    contiguous, quick = (POLICIES[name](subproblem).build() for name in ("dfs_cut", "quick"))
    assert contiguous.fits
    assert quick.fits
    assert quick.time_s <= contiguous.time_s * (1.0 + 1e-12)


def test_sharing_saves_what_it_should() -> None:
    batch = workloads()["stars"]
    problem = problem_of(batch, make_setup(1, max_tokens=2000), ("update",))
    executed = {n: make_plan(problem, n).predicted["executed_tokens"] for n in POLICIES}
    (subproblem,) = problem.programs()
    assert executed["verl"] == batch.logical_tokens
    shared = {"sglang_ps", "sharing_agnostic", "prefix_match_first", "balance_first", "psrl"}
    for name in shared | {"dfs_cut", "quick"}:
        assert executed[name] == subproblem.tree.unique_tokens
    assert subproblem.tree.unique_tokens < executed["first_fit"] < batch.logical_tokens
    assert subproblem.tree.unique_tokens <= executed["vllm_ps"] < batch.logical_tokens


def test_fixed_blocks_are_whole_and_stay_and_adaptive_ones_are_exact() -> None:
    batch = nasty_batch(3, 12)
    problem = problem_of(batch, make_setup(1, max_tokens=8), ("update",))
    blocks = make_plan(problem, "vllm_ps").programs[0].blocks
    assert (blocks.allocated_tokens % 16 == 0).all()
    assert set(blocks.release_op) == {"end"}
    program = make_plan(problem, "vllm_ps").programs[0]
    assert blocks.num_tokens.sum() == program.unique_tokens
    program = make_plan(problem, "psrl").programs[0]
    assert np.array_equal(program.blocks.allocated_tokens, program.blocks.num_tokens)
    assert np.array_equal(program.blocks.release_micro_batch, program.blocks.micro_batch)
    assert 0 < program.blocks.num_tokens.sum() < program.unique_tokens


def test_prefix_match_first_follows_the_prefix_and_balance_first_the_load() -> None:
    tokens = [[1, 2, 3], [7, 8], [1, 2, 9], [7, 8, 5]]
    batch = make_batch(tokens, [[(1, len(t))] for t in tokens])
    subproblem = update_of(batch, make_setup(2))
    matched = POLICIES["prefix_match_first"](subproblem).placement.rank
    assert matched.tolist() == [0, 1, 0, 1]
    balanced = POLICIES["balance_first"](subproblem).placement.rank
    assert balanced.tolist()[:2] == [0, 1]


def test_a_prefix_of_all_samples_attracts_no_group() -> None:
    tokens = [[6, 6, 6, 1, 2], [6, 6, 6, 3, 4], [6, 6, 6, 1, 5], [6, 6, 6, 3, 7]]
    batch = make_batch(tokens, [[(1, len(t))] for t in tokens])
    matched = POLICIES["prefix_match_first"](update_of(batch, make_setup(2))).placement.rank
    assert matched.tolist() == [0, 1, 0, 1]


def test_first_fit_opens_a_new_trie_when_the_budget_is_full() -> None:
    tokens = [[1, 1, 1, 1], [2, 2, 2, 2], [1, 1, 1, 3], [2, 2, 2, 2, 2]]
    batch = make_batch(tokens, [[(1, len(t))] for t in tokens])
    subproblem = update_of(batch, make_setup(1, max_tokens=5))
    # Sample 2 adds one token to the first trie; sample 3 adds one to the second.
    assert POLICIES["first_fit"](subproblem).placement.share_key.tolist() == [0, 1, 0, 1]
