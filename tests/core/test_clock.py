"""The clock of a pipeline against closed forms and times worked out by hand."""

import numpy as np
import pytest

from psrl.core.errors import PlanError
from psrl.core.plan import clock
from psrl.core.plan.clock import ProgramOps, Reduction, check_finished, phase_times
from psrl.core.plan.op_table import OpTable, op_codes, stage_order
from psrl.core.plan.plan_times import worker_times_s
from psrl.core.plan.schedule import Op, interleave

FREE = Reduction(0.0, 0.0)


def pipeline(
    last: list[Op],
    num_stages: int,
    duration_s: dict[str, float],
    message_s: float = 0.0,
    num_ranks: int = 1,
) -> ProgramOps:
    """The same op list of the last stage on every rank."""
    count, each = max(op.micro_batch for op in last) + 1, len(last)
    kind = op_codes(np.array([op.kind for op in last], np.str_))
    row = np.array([op.micro_batch for op in last])
    table = OpTable(
        np.tile(kind, num_ranks),
        np.concatenate([row + count * rank for rank in range(num_ranks)]),
        each * np.arange(num_ranks + 1),
    )
    is_update = any(op.kind == "backward" for op in last)
    orders = [stage_order(table, is_update, num_stages, stage) for stage in range(num_stages)]
    kinds = np.stack([table.kind[order] for order in orders])
    of_kind = np.array([duration_s[name] for name in ("forward", "backward", "recompute")])
    return ProgramOps(
        is_update,
        table.first_op,
        kinds,
        np.stack([table.row[order] for order in orders]),
        of_kind[kinds],
        np.full(count * num_ranks, message_s),
    )


def plain_1f1b(count: int) -> list[Op]:
    return interleave(range(count), range(count), [k + 1 for k in range(count)])


SECONDS = {"forward": 1.0, "recompute": 1.0, "backward": 2.0}


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8, 20])
def test_equal_micro_batches_take_the_closed_form(num_micro_batches: int, num_stages: int) -> None:
    (times,) = phase_times([pipeline(plain_1f1b(num_micro_batches), num_stages, SECONDS)], FREE)
    assert times.last_s == (num_micro_batches + num_stages - 1) * (1.0 + 2.0)


def test_recompute_takes_time_but_exchanges_nothing() -> None:
    last = interleave([0], [0], [1], frozenset({0}))
    (times,) = phase_times([pipeline(last, 2, SECONDS)], FREE)
    assert times.end_s.tolist() == [[1.0, 2.0, 7.0], [2.0, 3.0, 5.0]]


@pytest.mark.parametrize("num_messages", [1, 3, 10])
def test_a_slow_link_sets_the_pace(num_messages: int) -> None:
    """Messages of 5 s follow one another; the last one's forward takes another second."""
    last = [Op("forward", m) for m in range(num_messages)]
    (times,) = phase_times([pipeline(last, 2, SECONDS, message_s=5.0)], FREE)
    assert times.last_s == 1.0 + 5.0 * num_messages + 1.0


def test_a_worker_leaves_a_program_when_its_messages_have_arrived() -> None:
    program = pipeline([Op("forward", 0), Op("forward", 1)], 2, SECONDS, message_s=5.0)
    first, second = phase_times([program, program], FREE)
    assert first.end_s.tolist() == [[1.0, 2.0], [7.0, 12.0]]
    # Stage 0 goes on at 11; stage 1 posts its next receive when it begins at 12.
    assert second.end_s.tolist() == [[12.0, 13.0], [18.0, 23.0]]


def test_updates_follow_each_other_after_reduction_and_step() -> None:
    program = pipeline(plain_1f1b(2), 2, SECONDS)
    first, second = phase_times([program, program], Reduction(0.5, 0.25))
    assert first.reduced_s == (9.0, 9.5, 9.75)
    assert second.start_s[0, 0] == 9.75
    assert second.reduced_s == (18.75, 19.25, 19.5)


def test_one_stage_is_the_recurrence_without_messages() -> None:
    rng = np.random.default_rng(0)
    program = pipeline(plain_1f1b(9), 1, SECONDS, num_ranks=3)
    duration_s = rng.random(program.duration_s.shape)
    begin_s = rng.random((1, 3))
    alone = clock._run_alone(program, duration_s, begin_s, lambda *_: None)
    general, _ = clock._run(program, duration_s, begin_s, 1, lambda *_: None)
    assert np.array_equal(alone.end_s, general.end_s)
    assert np.array_equal(alone.start_s, general.start_s)


def test_workers_that_wait_forever_are_named() -> None:
    program = pipeline(plain_1f1b(1), 2, SECONDS)
    program.kind[0] = program.kind[0, ::-1]
    (times,) = phase_times([program], FREE)
    assert times.stuck == ((0, 0), (0, 1))
    with pytest.raises(PlanError, match=r"2 of 2 pipeline stages wait forever.*stage 0 of rank 0"):
        check_finished(times.stuck, 2)


def test_ranks_in_step_must_run_equally_many_ops() -> None:
    program = pipeline([Op("forward", 0), Op("forward", 1)], 2, SECONDS, num_ranks=2)
    program.first_op[1] = 1
    with pytest.raises(PlanError, match=r"ranks 0\.\.1 share experts"):
        phase_times([program], FREE, coupled_ranks=2)


def test_worker_times_count_overlapping_programs_once() -> None:
    first_s = np.array([[0.0, 1.0, np.inf], [3.0, 2.0, np.inf]])
    last_s = np.array([[2.0, 4.0, 0.0], [5.0, 6.0, 0.0]])
    assert worker_times_s(first_s, last_s).tolist() == [4.0, 5.0, 0.0]
