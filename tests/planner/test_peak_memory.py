"""The peak over arrays is the one that the memory ledger reaches op by op."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.bytes_over_ops import peak_bytes
from psrl.core.plan.plan import Program
from psrl.core.tree.prefix_tree import PrefixTree
from psrl.planner import POLICIES, make_plan
from tests.memory_ledger import op_by_op
from tests.planner.cases import make_setup, nasty_batch, problem_of, workloads


def ledger_peak_bytes(program: Program, tree: PrefixTree, memory: MemoryModel) -> int:
    num_stages = memory.parallel.pipeline_model_parallel_size
    states = (op_by_op(program, tree, memory, stage) for stage in range(num_stages))
    return max((s.total_bytes for of in states for s in of), default=memory.static_bytes)


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    num_stages=st.sampled_from([1, 2, 4]),
    max_tokens=st.sampled_from([3, 16]),
    recompute=st.sampled_from(["none", "full"]),
    name=st.sampled_from(sorted(POLICIES)),
)
@settings(max_examples=20)
def test_peak_equals_the_ledger(
    seed: int, num_stages: int, max_tokens: int, recompute: str, name: str
) -> None:
    batch = nasty_batch(seed, 8)
    setup = make_setup(
        2, num_stages, max_tokens=max_tokens, recompute=recompute, search_iterations=5
    )
    plan = make_plan(problem_of(batch, setup, ("update",)), name)
    memory = MemoryModel(setup.model, setup.cluster, setup.parallel)
    for program in plan.programs:
        for rank in range(2):
            mine, tree = program.on_rank(rank), program.tree(batch)
            assert peak_bytes(mine, tree, memory) == ledger_peak_bytes(mine, tree, memory)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chains", "long_path"])
def test_peak_equals_the_ledger_where_memory_is_tight(shape: str) -> None:
    batch = workloads()[shape]
    roomy = make_plan(problem_of(batch, make_setup(1, 2, max_tokens=512), ("update",)), "psrl")
    tight = int(0.98 * roomy.predicted["peak_memory_bytes"] / 0.9)
    setup = make_setup(1, 2, max_tokens=512, memory_bytes=tight)
    plan = make_plan(problem_of(batch, setup, ("update",)), "psrl")
    memory = MemoryModel(setup.model, setup.cluster, setup.parallel)
    (program,) = plan.programs
    tree = program.tree(batch)
    assert peak_bytes(program.on_rank(0), tree, memory) == ledger_peak_bytes(
        program.on_rank(0), tree, memory
    )
