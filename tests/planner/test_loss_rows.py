"""Loss rows as intervals of the tree agree with the edges that the backend computes one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.plan.packing import loss_edges
from psrl.core.tree.loss_rows import loss_rows
from psrl.planner import make_plan
from tests.planner.cases import make_setup, nasty_batch, problem_of


@given(seed=st.integers(0, 10_000), num_samples=st.integers(1, 10))
@settings(max_examples=30)
def test_rows_and_edges_agree(seed: int, num_samples: int) -> None:
    batch = nasty_batch(seed, num_samples)
    plan = make_plan(problem_of(batch, make_setup(2, max_tokens=4), ("update",)), "dfs_cut")
    (program,) = plan.programs
    tree, samples = program.tree(batch), batch.select(program.assignments.sample)
    rows = loss_rows(tree, samples)
    for rank in range(2):
        chosen = program.assignments.rank == rank
        edges = loss_edges(program, rank, tree, samples)
        assert rows.num_edges(chosen) == len(edges.token)
        positions = set(zip(edges.micro_batch.tolist(), edges.row.tolist(), strict=True))
        distinct = rows.of(chosen)
        assert int((distinct.end - distinct.start).sum()) == len(positions)
        stated = program.on_rank(rank).micro_batches.head_tokens
        found = [sum(m == i for m, _ in positions) for i in range(len(stated))]
        assert np.array_equal(stated, found)
