"""Times of simulated phases against closed forms and hand-computed examples."""

import numpy as np
import pytest

from psrl.core.errors import PlanError
from psrl.core.plan import plan_times
from psrl.core.plan.op_table import OpTable
from psrl.core.run.events import Events
from psrl.core.run.metrics import run_metrics
from psrl.core.samples.sample import IntArray
from psrl.sim import Progress, SimOptions, simulate
from psrl.sim.options import Engine
from psrl.sim.replay import work
from tests.sim.cases import PlainCostModel, chains_batch, chains_program, make_plan, random_plan


def times(events: Events, stage: int, op: str) -> list[tuple[float, float]]:
    mine = events.where((events.stage == stage) & (events.op == op))
    return list(zip(mine.start_s.tolist(), mine.end_s.tolist(), strict=True))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_equal_micro_batches_under_1f1b_take_the_closed_form(
    num_micro_batches: int, num_stages: int
) -> None:
    batch = chains_batch([4] * num_micro_batches)
    program = chains_program(batch, [range(num_micro_batches)])
    plan = make_plan([program], num_stages=num_stages)
    events = simulate(plan, batch, PlainCostModel(forward_op_s=1.0, backward_op_s=2.0))
    phase = run_metrics(plan, batch, events)["phases"]["update"]
    slots = num_micro_batches + num_stages - 1
    assert phase["makespan_s"] == slots * (1.0 + 2.0)
    assert phase["bubble_fraction"] == pytest.approx((num_stages - 1) / slots)


def test_two_stages_with_messages_by_hand() -> None:
    batch = chains_batch([4, 4])
    plan = make_plan([chains_program(batch, [[0, 1]])], num_stages=2)
    costs = PlainCostModel(forward_op_s=2.0, backward_op_s=3.0, message_op_s=1.0)
    events = simulate(plan, batch, costs)
    assert times(events, 0, "forward") == [(0, 2), (2, 4)]
    assert times(events, 1, "forward") == [(3, 5), (8, 10)]
    assert times(events, 1, "backward") == [(5, 8), (10, 13)]
    assert times(events, 0, "backward") == [(9, 12), (14, 17)]


def test_messages_of_a_link_go_one_at_a_time() -> None:
    batch = chains_batch([4, 4])
    plan = make_plan([chains_program(batch, [[0, 1]], is_update=False)], num_stages=2)
    costs = PlainCostModel(forward_op_s=1.0, message_op_s=5.0)
    events = simulate(plan, batch, costs, phases=("reference",))
    # Sent at 1 and 2, but the link is busy with the first until 6.
    assert times(events, 1, "forward") == [(6, 7), (11, 12)]


@pytest.mark.parametrize("engine", ["simpy", "vectorised"])
def test_a_sender_waits_until_two_messages_before_have_arrived(engine: Engine) -> None:
    batch = chains_batch([4] * 5)
    plan = make_plan([chains_program(batch, [range(5)], is_update=False)], num_stages=2)
    costs = PlainCostModel(forward_op_s=1.0, message_op_s=5.0)
    options = SimOptions(engine=engine)
    events = simulate(plan, batch, costs, phases=("reference",), options=options)
    # The link carries one message each from 1, 6, 11, ... on. With the messages of 0, 1 and 2 on
    # their way stage 0 waits until 6, when that of 0 has arrived, and from then on for each.
    assert times(events, 0, "forward") == [(0, 1), (1, 2), (2, 3), (6, 7), (11, 12)]
    assert times(events, 1, "forward") == [(6, 7), (11, 12), (16, 17), (21, 22), (26, 27)]


@pytest.mark.parametrize("engine", ["simpy", "vectorised"])
def test_a_message_starts_when_its_receive_is_posted(engine: Engine) -> None:
    batch = chains_batch([4] * 3)
    plan = make_plan([chains_program(batch, [range(3)], is_update=False)], num_stages=2)
    costs = PlainCostModel(forward_op_s=1.0, per_stage_s=9.0, message_op_s=12.0)
    options = SimOptions(engine=engine)
    events = simulate(plan, batch, costs, phases=("reference",), options=options)
    # Sent at 1, 2 and 3. Stage 1 takes the first at 13 and posts the second, which is there at
    # 25; it is taken at once, and the third comes at 37.
    assert times(events, 1, "forward") == [(13, 23), (25, 35), (37, 47)]
    short = PlainCostModel(forward_op_s=1.0, per_stage_s=9.0, message_op_s=2.0)
    events = simulate(plan, batch, short, phases=("reference",), options=options)
    # The second one comes during the first op, the third is posted when that one ends.
    assert times(events, 1, "forward") == [(3, 13), (13, 23), (23, 33)]


def test_the_two_directions_of_a_pair_do_not_share_a_link() -> None:
    batch = chains_batch([4, 4, 4])
    plan = make_plan([chains_program(batch, [[0, 1, 2]])], num_stages=2)
    costs = PlainCostModel(forward_op_s=1.0, backward_op_s=1.0, message_op_s=1.0)
    events = simulate(plan, batch, costs)
    # Stage 0 sends micro-batch 2's activations from 6 to 7 while a gradient comes from 6 to 7.
    assert times(events, 0, "forward") == [(0, 1), (1, 2), (6, 7)]
    assert times(events, 0, "backward")[:2] == [(5, 6), (7, 8)]


def test_recompute_and_drop_cost_another_forward() -> None:
    batch = chains_batch([5, 5, 5])
    modes = ["keep", "recompute", "drop"]
    plan = make_plan([chains_program(batch, [[0, 1, 2]], activation=modes)])
    costs = PlainCostModel(forward_token_s=1.0, backward_token_s=2.0, head_token_s=10.0)
    events = simulate(plan, batch, costs)
    spent = {
        (op, m): end - start
        for op, m, start, end in zip(
            events.op.tolist(),
            events.micro_batch.tolist(),
            events.start_s,
            events.end_s,
            strict=True,
        )
    }
    head = 10.0 * 4
    # A dropped micro-batch needs its head only when it runs again.
    assert [spent["forward", m] for m in range(3)] == [5 + head, 5 + head, 5]
    assert spent["recompute", 2] == 5 + head
    # The backward of the head counts its own second forward already.
    assert [spent["backward", m] for m in range(3)] == [
        10 + 3 * head,
        10 + 3 * head + 5,
        10 + 3 * head,
    ]
    assert not (events.op[events.micro_batch < 2] == "recompute").any()


def test_optimizer_steps_meet_at_the_gradient_reduction() -> None:
    batch = chains_batch([1] * 6)
    steps = [
        chains_program(batch, [[0, 1], [2]], mini_batch=0),
        chains_program(batch, [[3], [4, 5]], mini_batch=1),
    ]
    plan = make_plan(steps, num_ranks=2)
    costs = PlainCostModel(forward_op_s=1.0, backward_op_s=2.0, reduction_s=0.5, step_s=0.25)
    events = simulate(plan, batch, costs)
    for program, begin in ((0, 0.0), (1, 6.75)):
        mine = events.where(events.program == program)
        assert mine.start_s.min() == begin
        for op, start, end in (
            ("gradient_reduction", begin + 6.0, begin + 6.5),
            ("optimizer_step", begin + 6.5, begin + 6.75),
        ):
            chosen = mine.where(mine.op == op)
            assert chosen.rank.tolist() == [0, 1]
            assert set(chosen.start_s) == {start}
            assert set(chosen.end_s) == {end}
            assert set(chosen.micro_batch) == {-1}


def test_a_rank_without_micro_batches_takes_part_in_the_reduction() -> None:
    batch = chains_batch([2, 2])
    plan = make_plan([chains_program(batch, [[0, 1], []])], num_ranks=2, num_stages=2)
    costs = PlainCostModel(forward_op_s=1.0, backward_op_s=1.0, reduction_s=1.0)
    events = simulate(plan, batch, costs)
    idle = events.where(events.rank == 1)
    assert idle.op.tolist() == ["gradient_reduction", "optimizer_step"] * 2
    assert idle.start_s.tolist() == [6.0, 7.0] * 2
    phase = run_metrics(plan, batch, events)["phases"]["update"]
    assert (phase["worker_time_min_s"], phase["worker_time_max_s"]) == (0.0, 6.0)
    # Of 4 workers * 7 s, the two of rank 0 compute 4 s each and all four reduce for 1 s.
    assert phase["bubble_fraction"] == pytest.approx(1 - (2 * 4 + 4 * 1) / (4 * 7))


def test_forward_only_programs_follow_each_other_without_a_meeting() -> None:
    batch = chains_batch([1] * 4)
    programs = [
        chains_program(batch, [[0, 1], [2]], is_update=False),
        chains_program(batch, [[0], [2, 3]], is_update=False),
    ]
    plan = make_plan(programs, num_ranks=2)
    costs = PlainCostModel(forward_op_s=1.0, reduction_s=9.0, step_s=9.0)
    events = simulate(plan, batch, costs, phases=("log_old_prob",))
    assert events.op.tolist() == ["forward"] * 6
    assert events.where(events.program == 1).start_s.tolist() == [2.0, 1.0, 2.0]


def test_a_fast_stage_may_be_a_program_ahead_of_the_next_stage() -> None:
    batch = chains_batch([1] * 4)
    programs = [chains_program(batch, [samples], is_update=False) for samples in ([0, 1], [2, 3])]
    plan = make_plan(programs, num_stages=2)
    costs = PlainCostModel(forward_op_s=1.0, per_stage_s=9.0)
    events = simulate(plan, batch, costs, phases=("reference",))
    assert times(events, 0, "forward") == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert times(events, 1, "forward") == [(1, 11), (11, 21), (21, 31), (31, 41)]
    assert events.where(events.stage == 1).program.tolist() == [0, 0, 1, 1]


def test_phases_run_in_order_each_from_zero() -> None:
    plan, batch = random_plan(1, num_ranks=2, num_stages=2)
    events = simulate(plan, batch)
    assert list(dict.fromkeys(events.phase)) == ["log_old_prob", "reference", "update"]
    for phase in ("log_old_prob", "reference", "update"):
        assert events.where(events.phase == phase).start_s.min() == 0.0
    one = simulate(plan, batch, phases=("reference",))
    assert set(one.phase) == {"reference"}
    both = [events.where(events.phase == p) for p in ("log_old_prob", "reference")]
    assert both[0].end_s.tolist() == both[1].end_s.tolist() == one.end_s.tolist()


@pytest.mark.parametrize("phases", [("rollout",), ("reference", "update"), ()])
def test_a_phase_without_program_is_refused(phases: tuple[str, ...]) -> None:
    batch = chains_batch([4])
    plan = make_plan([chains_program(batch, [[0]])])
    with pytest.raises(PlanError, match="update"):
        simulate(plan, batch, phases=phases)


@pytest.mark.parametrize("engine", ["simpy", "vectorised"])
def test_an_op_list_that_waits_forever_is_reported(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    def backward_first(ops: OpTable, is_update: bool, num_stages: int, stage: int) -> IntArray:
        return np.arange(len(ops.kind)) if stage else np.arange(len(ops.kind))[::-1]

    monkeypatch.setattr(plan_times, "stage_order", backward_first)
    monkeypatch.setattr(work, "stage_order", backward_first)
    batch = chains_batch([4])
    plan = make_plan([chains_program(batch, [[0], []])], num_ranks=2, num_stages=2)
    with pytest.raises(PlanError, match=r"of 4 pipeline stages wait forever.*stage 0 of rank 0"):
        simulate(plan, batch, options=SimOptions(engine=engine))


@pytest.mark.parametrize("engine", ["simpy", "vectorised"])
def test_progress_counts_every_op_of_a_phase(engine: Engine) -> None:
    plan, batch = random_plan(2, num_ranks=2, num_stages=2)
    calls: list[Progress] = []
    simulate(plan, batch, options=SimOptions(engine=engine), progress=calls.append)
    # log_old_prob and reference run the same program and are simulated once.
    assert list(dict.fromkeys(call.phase for call in calls)) == ["log_old_prob", "update"]
    for phase in ("log_old_prob", "update"):
        mine = [call for call in calls if call.phase == phase]
        finished = [call.finished_ops for call in mine]
        assert finished == sorted(finished)
        assert (
            finished[-1]
            == mine[-1].total_ops
            == 2 * sum(len(p.schedule) for p in plan.phase_programs(phase))
        )
        assert max(call.simulated_s for call in mine) > 0
