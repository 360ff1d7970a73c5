"""The numbered invariants of docs/invariants.md on random plans with shared prefixes."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import PlanError
from psrl.core.plan.packing import PackedMicroBatch, pack_rank
from psrl.core.plan.plan import Plan, Program
from psrl.core.run.events import Events
from psrl.core.samples.sample import SampleBatch
from psrl.sim import simulate
from tests.sim.cases import PlainCostModel, chains_batch, chains_program, make_plan, random_plan

# Every op takes longer than a message, so that no link is ever busy.
COSTS = PlainCostModel(
    forward_token_s=0.3,
    forward_op_s=1.0,
    backward_token_s=0.7,
    backward_op_s=1.0,
    head_token_s=0.2,
    per_stage_s=0.1,
    message_op_s=0.4,
    reduction_s=2.0,
    step_s=1.0,
)

cases = st.tuples(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([1, 2, 4]))
few = settings(max_examples=25)

Times = dict[tuple[str, int], tuple[float, float]]


def workers(
    plan: Plan, batch: SampleBatch, events: Events
) -> list[tuple[Program, list[PackedMicroBatch], int, Events]]:
    """(one rank's program, its micro-batches, stage, events) of every program's first phase."""
    found = []
    for index, program in enumerate(plan.programs):
        tree = program.tree(batch)
        for rank in range(plan.num_ranks):
            mine = program.on_rank(rank)
            packed = pack_rank(mine, tree)
            for stage in range(plan.parallel.pipeline_model_parallel_size):
                mask = (events.program == index) & (events.rank == rank) & (events.stage == stage)
                mask &= events.phase == program.phases[0]
                found.append((mine, packed, stage, events.where(mask)))
    return found


def op_times(events: Events) -> Times:
    keys = zip(events.op.tolist(), events.micro_batch.tolist(), strict=True)
    spans = zip(events.start_s.tolist(), events.end_s.tolist(), strict=True)
    return dict(zip(keys, spans, strict=True))


@few
@given(cases)
def test_every_micro_batch_runs_once_and_tokens_are_conserved(case: tuple[int, int, int]) -> None:
    plan, batch = random_plan(*case)
    events = simulate(plan, batch, COSTS)
    for mine, packed, _, rows in workers(plan, batch, events):
        expected = Counter({("forward", p.index): 1 for p in packed})
        if mine.is_update:
            expected.update({("backward", p.index): 1 for p in packed})
            modes = mine.micro_batches.activation.tolist()
            expected.update({("recompute", p.index): 1 for p in packed if modes[p.index] == "drop"})
            expected.update({("gradient_reduction", -1): 1, ("optimizer_step", -1): 1})
        ran = zip(rows.op.tolist(), rows.micro_batch.tolist(), strict=True)
        assert Counter(ran) == expected
        for op in ("forward", "backward") if mine.is_update else ("forward",):
            assert rows.num_tokens[rows.op == op].sum() == mine.unique_tokens
    assert len(events) == sum(
        len(rows) * len(mine.phases) for mine, _, _, rows in workers(plan, batch, events)
    )


@few
@given(cases)
def test_nothing_is_read_before_it_is_written_or_after_it_is_released(
    case: tuple[int, int, int],
) -> None:
    plan, batch = random_plan(*case)
    events = simulate(plan, batch, COSTS)
    for mine, packed, _, rows in workers(plan, batch, events):
        times, blocks = op_times(rows), mine.blocks
        owner = dict(zip(blocks.block.tolist(), blocks.micro_batch.tolist(), strict=True))
        release = zip(blocks.release_op.tolist(), blocks.release_micro_batch.tolist(), strict=True)
        released = dict(zip(blocks.block.tolist(), release, strict=True))
        for micro_batch in packed:
            for op in ("forward", "recompute", "backward"):
                if (op, micro_batch.index) not in times:
                    continue
                start, end = times[op, micro_batch.index]
                for block in micro_batch.read_blocks:
                    assert times["forward", owner[block]][1] <= start
                    assert times[released[block]][1] >= end


@few
@given(cases)
def test_the_clock_of_a_stage_is_monotone_and_ops_never_overlap(case: tuple[int, int, int]) -> None:
    plan, batch = random_plan(*case)
    events = simulate(plan, batch, COSTS)
    for phase in set(events.phase):
        for rank in range(plan.num_ranks):
            for stage in range(plan.parallel.pipeline_model_parallel_size):
                rows = events.where(
                    (events.phase == phase) & (events.rank == rank) & (events.stage == stage)
                )
                assert (rows.start_s >= 0).all()
                assert (rows.end_s >= rows.start_s).all()
                assert (rows.start_s[1:] >= rows.end_s[:-1]).all()


@few
@given(cases)
def test_blocks_are_conserved(case: tuple[int, int, int]) -> None:
    plan, batch = random_plan(*case)
    events = simulate(plan, batch, COSTS)
    bytes_per_token = MemoryModel(plan.model, plan.cluster, plan.parallel).kv_bytes_per_token
    for mine, _, _, rows in workers(plan, batch, events):
        at = {key: i for i, key in enumerate(op_times(rows))}
        expected = np.zeros(len(rows), np.int64)
        blocks = mine.blocks
        for owner, op, reader, tokens in zip(
            blocks.micro_batch.tolist(),
            blocks.release_op.tolist(),
            blocks.release_micro_batch.tolist(),
            blocks.allocated_tokens.tolist(),
            strict=True,
        ):
            expected[at["forward", owner] : at[op, reader] + 1] += tokens * bytes_per_token
        assert rows.kv_bytes.tolist() == expected.tolist()
        assert (rows.kv_gradient_bytes <= rows.kv_bytes * 2).all()  # fp32 beside bf16
        at_rest = rows.where(rows.micro_batch < 0)
        assert not (at_rest.total_bytes - at_rest.static_bytes).any()


def test_a_block_that_is_never_released_is_refused() -> None:
    plan, batch = random_plan(0, num_ranks=1, num_stages=2)
    program = plan.programs[1]
    assert len(program.blocks)
    program.blocks.release_micro_batch[:] = 10**6
    with pytest.raises(PlanError, match="never released"):
        simulate(plan, batch, COSTS, phases=("update",))
    program.blocks.release_op[:] = "forever"
    with pytest.raises(PlanError, match="released by 'forever', no op"):
        simulate(plan, batch, COSTS, phases=("update",))


@pytest.mark.slow
@few
@given(cases)
def test_same_input_gives_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[int, int, int]
) -> None:
    folder = tmp_path_factory.mktemp("events")
    for name in ("first", "second"):
        plan, batch = random_plan(*case)
        simulate(plan, batch).save(folder / name)
    assert (folder / "first").read_bytes() == (folder / "second").read_bytes()
    assert_equal(Events.load(folder / "first"), simulate(plan, batch))


def assert_equal(loaded: Events, made: Events) -> None:
    for name, column in vars(made).items():
        assert getattr(loaded, name).tolist() == column.tolist()


@few
@given(cases)
def test_a_backward_follows_the_backwards_of_all_readers(case: tuple[int, int, int]) -> None:
    plan, batch = random_plan(*case)
    events = simulate(plan, batch, COSTS)
    for mine, packed, _, rows in workers(plan, batch, events):
        if not mine.is_update:
            continue
        times, blocks = op_times(rows), mine.blocks
        owner = dict(zip(blocks.block.tolist(), blocks.micro_batch.tolist(), strict=True))
        for reader in packed:
            assert times["backward", reader.index][0] >= times["forward", reader.index][1]
            for block in reader.read_blocks:
                done = times["backward", reader.index][1]
                assert done <= times["backward", owner[block]][0]


@few
@given(cases)
def test_an_op_waits_for_its_neighbours_message(case: tuple[int, int, int]) -> None:
    plan, batch = random_plan(*case)
    events = simulate(plan, batch, COSTS)
    last = plan.parallel.pipeline_model_parallel_size - 1
    found = workers(plan, batch, events)
    for (_, _, stage, before), (_, _, _, after) in pairwise(found):
        if stage == last:
            continue
        upstream, downstream = op_times(before), op_times(after)
        for key, (start, end) in downstream.items():
            if key[0] == "forward":
                assert start >= upstream[key][1] + COSTS.message_op_s - 1e-9
            elif key[0] == "backward":
                assert upstream[key][0] >= end + COSTS.message_op_s - 1e-9


@few
@given(cases)
def test_all_workers_start_the_reduction_when_the_last_one_arrives(
    case: tuple[int, int, int],
) -> None:
    plan, batch = random_plan(*case)
    events = simulate(plan, batch, COSTS, phases=("update",))
    num_workers = plan.num_ranks * plan.parallel.pipeline_model_parallel_size
    for program in np.unique(events.program):
        mine = events.where(events.program == program)
        reductions = mine.where(mine.op == "gradient_reduction")
        assert len(reductions) == num_workers
        assert set(reductions.start_s) == {mine.end_s[mine.micro_batch >= 0].max()}


@given(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 5))
def test_1f1b_of_equal_micro_batches_takes_the_closed_form(
    num_micro_batches: int, num_stages: int, forward_s: int, backward_s: int
) -> None:
    batch = chains_batch([3] * num_micro_batches)
    plan = make_plan(
        [chains_program(batch, [range(num_micro_batches)])],
        num_stages=num_stages,
    )
    costs = PlainCostModel(forward_op_s=forward_s, backward_op_s=backward_s)
    slots = num_micro_batches + plan.parallel.pipeline_model_parallel_size - 1
    assert simulate(plan, batch, costs).end_s.max() == slots * (forward_s + backward_s)


DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_listed_test_exists() -> None:
    listed = [
        word.strip("`")
        for word in (DOCS / "invariants.md").read_text(encoding="utf-8").split()
        if word.strip("`").startswith("test_")
    ]
    folder = Path(__file__).parent
    known = "".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("test_*.py")))
    assert listed
    assert [name for name in listed if f"def {name}(" not in known] == []
