"""Batches and devices that are too small: a valid plan, or an error that says what would help."""

import numpy as np
import pytest

from psrl.core.errors import ExitCode, InfeasibleError
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.planner import POLICIES, make_plan
from psrl.planner.feasibility import least_bytes
from tests.planner.cases import make_setup, problem_of, tree_batch

TINY = {
    "one token": make_batch([[5]], [[]]),
    "one sample": make_batch([[5, 6, 7]], [[(1, 3)]]),
    "fewer samples than ranks": make_batch([[5, 6, 7], [5, 8]], [[(1, 3)], [(1, 2)]]),
}


@pytest.mark.parametrize("batch", TINY.values(), ids=TINY)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_tiny_batches_have_plans(name: str, batch: SampleBatch) -> None:
    # make_plan checks the plan before it returns it.
    plan = make_plan(problem_of(batch, make_setup(4, 2)), name)
    assert np.isfinite(plan.predicted["makespan_s"])
    assert plan.predicted["gap"] >= 0.0
    assert plan.predicted["executed_tokens"] >= batch.symbol_offsets[1]


def long_sample_setup(extra_bytes: int):
    """A set-up with so many bytes beside the weights, and a batch with a sample of 3000 tokens."""
    batch = tree_batch([(2000, [(1000, []), (500, [])]), (50, [])])
    memory = problem_of(batch, make_setup(2)).memory_model
    limit_bytes = memory.static_bytes + extra_bytes
    setup = make_setup(2, max_tokens=512, memory_bytes=int(limit_bytes / 0.9) + 1)
    return batch, setup, memory


@pytest.mark.slow
def test_a_sample_larger_than_any_rank_says_so_without_trying_budgets() -> None:
    batch, setup, memory = long_sample_setup(2**20)
    assert least_bytes(memory, 3000) > memory.static_bytes + 2**20
    with pytest.raises(InfeasibleError, match=r"program 0, rank \d needs .* more than") as caught:
        make_plan(problem_of(batch, setup, ("update",)), "psrl")
    assert caught.value.exit_code == ExitCode.INFEASIBLE
    assert "the longest sample has 3000 tokens" in caught.value.hint
    assert "use devices with more than" in caught.value.hint


def test_no_plan_needs_less_than_the_least_bytes() -> None:
    batch, setup, memory = long_sample_setup(2**30)
    for name in ("psrl", "verl", "dfs_cut"):
        plan = make_plan(problem_of(batch, setup, ("update",)), name)
        assert plan.predicted["peak_memory_bytes"] >= least_bytes(memory, 3000)
