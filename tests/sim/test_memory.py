"""Running out of memory is a result, with the numbers of the worst op."""

import numpy as np

from psrl.sim import out_of_memory, simulate
from tests.sim.cases import chains_batch, chains_program, make_plan, random_plan


def test_a_plan_that_fits_has_no_finding() -> None:
    plan, batch = random_plan(3, num_ranks=2, num_stages=2)
    assert out_of_memory(simulate(plan, batch), plan) == []


def test_each_stage_that_does_not_fit_is_found_at_its_worst_op() -> None:
    batch = chains_batch([10, 40, 20])
    program = chains_program(batch, [[0, 1], [2]])
    roomy = make_plan([program], num_ranks=2, num_stages=2)
    events = simulate(roomy, batch)
    total = events.total_bytes
    need = {
        (rank, stage): int(total[(events.rank == rank) & (events.stage == stage)].max())
        for rank in (0, 1)
        for stage in (0, 1)
    }
    limit = max(need[1, 0], need[1, 1])
    assert limit < min(need[0, 0], need[0, 1])
    tight = make_plan([program], num_ranks=2, num_stages=2, memory_bytes=limit)
    tight_events = simulate(tight, batch)
    assert np.array_equal(tight_events.end_s, events.end_s)
    found = out_of_memory(tight_events, tight)
    assert [(f.phase, f.rank, f.stage) for f in found] == [("update", 0, 0), ("update", 0, 1)]
    assert [f.needed_bytes for f in found] == [need[0, 0], need[0, 1]]
    assert {f.limit_bytes for f in found} == {limit}
    # Stage 0 holds both micro-batches when the second one is forwarded.
    assert (found[0].op, found[0].micro_batch) == ("forward", 1)


def test_only_the_last_stage_holds_logits() -> None:
    plan, batch = random_plan(4, num_ranks=1, num_stages=4)
    events = simulate(plan, batch)
    assert set(events.stage[events.logits_bytes > 0]) == {3}
