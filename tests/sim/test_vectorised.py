"""The vectorised parts against what they replace: op order, bytes, and SimPy's times."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import ConfigError, PlanError
from psrl.core.plan.op_table import OP_NAMES, op_table, stage_order
from psrl.core.plan.plan import Plan
from psrl.core.plan.schedule import stage_ops
from psrl.core.run.events import Events
from psrl.core.samples.sample import SampleBatch
from psrl.sim import SimOptions, chosen_engine, options, simulate
from psrl.sim.replay.work import phase_work
from tests.memory_ledger import op_by_op
from tests.sim.cases import PlainCostModel, chains_batch, chains_program, make_plan, random_plan

COSTS = PlainCostModel(
    forward_token_s=0.31,
    forward_op_s=0.7,
    backward_token_s=0.57,
    backward_op_s=1.3,
    head_token_s=0.2,
    per_stage_s=0.1,
    message_op_s=2.9,  # longer than many ops, so that links queue
    reduction_s=2.0,
    step_s=1.0,
)

cases = st.tuples(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([1, 2, 4]))
few = settings(max_examples=40)


def events_of(plan: Plan, batch: SampleBatch, engine: str, **more: object) -> Events:
    return simulate(plan, batch, COSTS, options=SimOptions(engine=engine, **more))  # type: ignore[arg-type]


def assert_same(found: Events, expected: Events) -> None:
    for f in fields(Events):
        assert np.array_equal(getattr(found, f.name), getattr(expected, f.name)), f.name


@pytest.mark.slow
@few
@given(cases)
def test_each_stage_runs_the_op_list_of_the_schedule(case: tuple[int, int, int]) -> None:
    plan, _ = random_plan(*case)
    num_stages = plan.parallel.pipeline_model_parallel_size
    for program in plan.programs:
        ops = op_table(program, plan.num_ranks)
        table = program.micro_batches
        for stage in range(num_stages):
            order = stage_order(ops, program.is_update, num_stages, stage)
            found = [
                (int(ops.rank[i]), str(OP_NAMES[ops.kind[i]]), int(table.micro_batch[ops.row[i]]))
                for i in order
            ]
            assert found == [
                (rank, *op)
                for rank in range(plan.num_ranks)
                for op in stage_ops(program.on_rank(rank).ops(), num_stages, stage)
            ]


@pytest.mark.slow
@few
@given(cases)
def test_bytes_equal_the_ledger_of_all_parts(case: tuple[int, int, int]) -> None:
    plan, batch = random_plan(*case)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    num_stages = plan.parallel.pipeline_model_parallel_size
    for index, program in enumerate(plan.programs):
        works, twin = phase_work(plan, (index,), batch, COSTS, SimOptions())
        tree = program.tree(batch)
        for rank, position in enumerate(twin.tolist()):
            mine = program.on_rank(rank)
            first, end = works[0].first_op[position : position + 2]
            for stage in range(num_stages):
                states = op_by_op(mine, tree, memory, stage)
                assert works[0].memory[stage, first:end].tolist() == [list(s) for s in states]
                assert works[0].static_bytes[stage] == memory.static_bytes_on(
                    stage, program.is_update
                )


@pytest.mark.slow
@few
@given(cases, st.booleans(), st.booleans())
def test_both_engines_give_the_same_events(
    case: tuple[int, int, int], is_slow: bool, overlaps: bool
) -> None:
    plan, batch = random_plan(*case)
    more = {
        "slow_ranks": {0: 1.37} if is_slow else {},
        "overlap_gradient_reduction": overlaps,
    }
    assert_same(
        events_of(plan, batch, "vectorised", **more), events_of(plan, batch, "simpy", **more)
    )


def coupled_plan(num_ranks: int, lengths: list[int]) -> tuple[Plan, SampleBatch]:
    """Ranks in pairs that share experts; rank r has the samples r, r + num_ranks, ..."""
    batch = chains_batch(lengths)
    samples = [list(range(rank, len(lengths), num_ranks)) for rank in range(num_ranks)]
    programs = [chains_program(batch, samples, is_update=is_update) for is_update in (False, True)]
    plan = make_plan(programs, num_ranks, num_stages=2)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, data_parallel_size=num_ranks, expert_model_parallel_size=2
    )
    return replace(plan, parallel=parallel), batch


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=12, max_size=12))
def test_ranks_that_share_experts_run_in_step(lengths: list[int]) -> None:
    plan, batch = coupled_plan(4, lengths)
    events = events_of(plan, batch, "simpy")
    assert_same(events_of(plan, batch, "vectorised"), events)
    alone = events_of(replace(plan, parallel=make_plan((), 4, 2).parallel), batch, "simpy")
    for leader in (0, 2):
        pair = [
            events.where((events.rank == rank) & (events.micro_batch >= 0))
            for rank in (leader, leader + 1)
        ]
        assert pair[0].start_s.tolist() == pair[1].start_s.tolist()
        assert pair[0].end_s.tolist() == pair[1].end_s.tolist()
    assert (events.end_s >= alone.end_s - 1e-9).all()


def test_ranks_that_share_experts_but_run_other_ops_are_refused() -> None:
    plan, batch = coupled_plan(4, [3] * 11)
    with pytest.raises(PlanError, match=r"ranks 2 and 3 share experts .* 3 and 2 ops"):
        simulate(plan, batch, COSTS)


def test_equal_ranks_are_simulated_once_and_logged_each() -> None:
    batch = chains_batch([4, 4, 4, 7, 4, 4, 4, 7])
    plan = make_plan([chains_program(batch, [[0, 3], [1], [4, 7], [2]])], num_ranks=4)
    works, twin = phase_work(plan, (0,), batch, COSTS, SimOptions())
    assert works[0].ranks.tolist() == [0, 1]
    assert twin.tolist() == [0, 1, 0, 1]
    events = simulate(plan, batch, COSTS)
    for like, rank in ((0, 2), (1, 3)):
        first, second = (events.where(events.rank == r) for r in (like, rank))
        assert len(first) > 2
        assert_same(replace(second, rank=first.rank), first)
    _, apart = phase_work(plan, (0,), batch, COSTS, SimOptions(slow_ranks={2: 1.5}))
    assert apart.tolist() == [0, 1, 2, 1]
    slow = simulate(plan, batch, COSTS, options=SimOptions(slow_ranks={2: 1.5}))
    longer = slow.where(slow.rank == 2).end_s[0] / events.where(events.rank == 2).end_s[0]
    assert longer == pytest.approx(1.5)


def test_shared_ports_serve_one_message_at_a_time() -> None:
    batch = chains_batch([4, 4])
    plan = make_plan([chains_program(batch, [[0], [1]], is_update=False)], 2, num_stages=2)
    cluster = plan.cluster.model_copy(update={"num_hosts": 2, "devices_per_host": 2})
    plan = replace(plan, cluster=cluster)
    costs = PlainCostModel(forward_op_s=1.0, message_op_s=5.0)

    def begins(nics: int | None) -> list[float]:
        shared = SimOptions(nics_per_host=nics)
        events = simulate(plan, batch, costs, phases=("reference",), options=shared)
        return sorted(events.start_s[events.stage == 1].tolist())

    # Both ranks of the first host send at 1; with one port the second message waits until 6.
    assert begins(None) == begins(2) == [6.0, 6.0]
    assert begins(1) == [6.0, 11.0]


def test_messages_inside_a_host_use_no_port() -> None:
    plan, batch = random_plan(7, num_ranks=2, num_stages=2)
    shared = events_of(plan, batch, "simpy", nics_per_host=1)
    assert_same(shared, events_of(plan, batch, "simpy"))


def test_overlapped_buckets_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "gradient_buckets", lambda plan: 2)
    batch = chains_batch([2])
    plan = make_plan([chains_program(batch, [[0]])])
    costs = PlainCostModel(forward_op_s=1.0, backward_op_s=4.0, reduction_s=9.0)
    overlap = SimOptions(overlap_gradient_reduction=True)
    events = simulate(plan, batch, costs, options=overlap)
    reduction = events.where(events.op == "gradient_reduction")
    # 2/3 of 9 s can overlap, in two buckets of 3 s: ready at 3 and 5, reduced by 6 and 9. The
    # last backward ends at 5, so 4 s remain, and 3 s of gathering.
    assert (reduction.start_s[0], reduction.end_s[0]) == (5.0, 12.0)
    plain = simulate(plan, batch, costs)
    assert plain.end_s.max() == 14.0


@pytest.mark.slow
@few
@given(cases)
def test_overlap_never_takes_longer(case: tuple[int, int, int]) -> None:
    plan, batch = random_plan(*case)
    plain = events_of(plan, batch, "simpy")
    overlapped = events_of(plan, batch, "simpy", overlap_gradient_reduction=True)
    assert (overlapped.end_s <= plain.end_s + 1e-9).all()


def test_large_plans_are_vectorised_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = random_plan(1, num_ranks=2, num_stages=2)
    assert chosen_engine(plan, SimOptions()) == "simpy"
    monkeypatch.setattr(options, "LARGE_PLAN_OPS", 1)
    assert chosen_engine(plan, SimOptions()) == "vectorised"
    assert chosen_engine(plan, SimOptions(engine="simpy")) == "simpy"
    # Shared ports serve messages in the order of time: only SimPy knows it.
    assert chosen_engine(plan, SimOptions(nics_per_host=1)) == "simpy"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SimOptions(slow_ranks={2: 1.1}), "slow rank 2"),
        (SimOptions(slow_ranks={0: 0.0}), "factor 0.0"),
        (SimOptions(nics_per_host=3), "3 network ports"),
        (SimOptions(engine="vectorised", nics_per_host=1), "only SimPy"),
    ],
)
def test_impossible_options_are_refused(wrong: SimOptions, message: str) -> None:
    plan, batch = random_plan(1, num_ranks=2, num_stages=2)
    with pytest.raises(ConfigError, match=message):
        simulate(plan, batch, options=wrong)
