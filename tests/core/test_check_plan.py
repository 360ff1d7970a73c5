"""Valid plans pass; each rule refuses a plan that breaks it, and says so."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import InfeasibleError, PlanError, PsrlError
from psrl.core.plan import check_ops
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import Op
from psrl.core.plan.tables import Blocks
from psrl.core.samples.sample import make_batch
from tests.core.cases import (
    hand_batch,
    hand_program,
    random_case,
    with_values,
    without_row,
    wrap,
)

Change = Callable[[Program], Program]

# Single cells whose every change must be refused; others may stay valid (a block that lives
# longer, a predicted time, another share key).
STRICT_COLUMNS = {
    "segments": ["rank", "micro_batch", "node", "start_depth", "num_tokens"],
    "micro_batches": ["rank", "micro_batch", "num_tokens", "pairs", "head_tokens"],
    "schedule": ["rank", "op", "micro_batch"],
    "assignments": ["sample"],
}


def test_the_hand_written_plan_passes() -> None:
    for num_stages in (1, 2, 4):
        check_plan(wrap(hand_program(), num_ranks=2, num_stages=num_stages), hand_batch())


@given(st.integers(0, 100_000), st.sampled_from([1, 2, 4]))
def test_random_programs_pass(seed: int, num_stages: int) -> None:
    case = random_case(seed)
    plan = wrap(case.program, num_ranks=case.num_ranks, num_stages=num_stages)
    check_plan(plan, case.batch)


def test_an_update_per_mini_batch_passes_and_no_other() -> None:
    batch = replace(hand_batch(), mini_batch=np.array([0, 0, 1]))
    program = hand_program()
    with pytest.raises(PlanError, match=r"^rule 1: program 0 trains mini-batch 0 but holds 1 "):
        check_plan(wrap(program, num_ranks=2), batch)
    first, second = program.on_rank(0), program.on_rank(1)
    # The tree of the second program holds only the third sample: its node 4 is now node 1.
    second = replace(second, mini_batch=1, segments=with_values(second.segments, 0, node=1))
    check_plan(wrap(first, second, num_ranks=2), batch)
    with pytest.raises(PlanError, match=r"^rule 1: phase update covers 2 of 3 samples"):
        check_plan(wrap(first, num_ranks=2), batch)
    with pytest.raises(PlanError, match=r"^rule 1: phase update runs the mini-batches 0, 0, 1"):
        check_plan(wrap(first, first, second, num_ranks=2), batch)


def cell(name: str, row: int, **values: object) -> Change:
    """Change one row of a table."""
    return lambda p: replace(p, **{name: with_values(getattr(p, name), row, **values)})


def lost(name: str, row: int) -> Change:
    """Leave one row of a table out."""
    return lambda p: replace(p, **{name: without_row(getattr(p, name), row)})


def ordered(name: str, rows: Sequence[int]) -> Change:
    """Put the first rows of a table into another order."""

    def change(program: Program) -> Program:
        table = getattr(program, name)
        order = [*rows, *range(len(rows), len(table))]
        return replace(program, **{name: table.rows(np.array(order))})

    return change


VIOLATIONS = [
    (1, "sample below 0", cell("assignments", 0, sample=-1)),
    (1, "sample beyond the iteration", cell("assignments", 0, sample=3)),
    (1, "sample twice, another never", cell("assignments", 0, sample=1)),
    (1, "sample left out", lost("assignments", 0)),
    (1, "assignment to an unknown rank", cell("assignments", 0, rank=2)),
    (1, "segment of an unknown rank", cell("segments", 0, rank=-1)),
    (1, "micro-batch of an unknown rank", cell("micro_batches", 0, rank=2)),
    (1, "op of an unknown rank", cell("schedule", 0, rank=2)),
    (1, "block of an unknown rank", cell("blocks", 0, rank=2)),
    (1, "other mini-batch", lambda p: replace(p, mini_batch=1)),
    (1, "backwards in a forward-only phase", lambda p: replace(p, phases=("reference",))),
    (1, "update without backwards", lambda p: replace(p, is_update=False)),
    (1, "no phase", lambda p: replace(p, phases=())),
    (2, "segment missing", lost("segments", 1)),
    (2, "first token missing", cell("segments", 0, start_depth=1, num_tokens=1)),
    (2, "last token missing", cell("segments", 0, num_tokens=1)),
    (2, "token twice", cell("segments", 2, start_depth=2, num_tokens=2)),
    (2, "no tokens", cell("segments", 0, num_tokens=0)),
    (2, "the root", cell("segments", 0, node=0)),
    (2, "node outside the tree", cell("segments", 0, node=5)),
    (2, "computed on the wrong rank", cell("segments", 4, rank=0)),
    (2, "sample on another rank", cell("assignments", 0, rank=1)),
    (3, "micro-batch out of pre-order", ordered("segments", [0, 1, 3, 2])),
    (3, "micro-batches out of order", ordered("segments", [1, 0])),
    (3, "micro-batch not in the table", cell("segments", 3, micro_batch=3)),
    (3, "micro-batches not numbered densely", cell("micro_batches", 2, micro_batch=3)),
    (3, "micro-batch twice", cell("micro_batches", 2, micro_batch=1)),
    (3, "unknown activation", cell("micro_batches", 0, activation="offload")),
    (3, "wrong tokens", cell("micro_batches", 0, num_tokens=3)),
    (3, "wrong pairs", cell("micro_batches", 2, pairs=6)),
    (4, "read block missing", lost("blocks", 1)),
    (4, "read block starts too late", cell("blocks", 0, start_row=1, num_tokens=1)),
    (4, "read block ends too early", cell("blocks", 0, num_tokens=1)),
    (5, "forward missing", lost("schedule", 0)),
    (5, "forward twice", cell("schedule", 1, micro_batch=0)),
    (5, "unknown op", cell("schedule", 0, op="release")),
    (5, "dropped without recompute", lost("schedule", 4)),
    (5, "recomputed without drop", cell("micro_batches", 1, activation="keep")),
    (5, "backward before its forward", ordered("schedule", [0, 1, 3, 2])),
    (6, "block number twice", cell("blocks", 1, block=0)),
    (6, "block of no micro-batch", cell("blocks", 0, micro_batch=3)),
    (6, "block with negative rows", cell("blocks", 0, start_row=-1)),
    (6, "block without rows", cell("blocks", 0, num_tokens=0)),
    (6, "block of rows that do not exist", cell("blocks", 0, num_tokens=3)),
    (6, "row in two blocks", cell("blocks", 1, micro_batch=0)),
    (6, "allocation too small", cell("blocks", 0, allocated_tokens=1)),
    (6, "read before written", ordered("schedule", [1, 0])),
    (6, "released before read", cell("blocks", 0, release_op="forward", release_micro_batch=1)),
    (6, "released before written", cell("blocks", 1, release_op="forward", release_micro_batch=0)),
    (6, "released by no op", cell("blocks", 0, release_op="forward", release_micro_batch=9)),
    (6, "released before its owner's backward", cell("blocks", 0, release_micro_batch=1)),
    (6, "backward before a reader's", ordered("schedule", [0, 1, 2, 6, 3, 4, 5])),
    (6, "recompute too early", ordered("schedule", [0, 1, 2, 4, 3])),
    (8, "wrong head tokens", cell("micro_batches", 0, head_tokens=3)),
]


@pytest.mark.parametrize(
    ("rule", "change"), [pytest.param(rule, change, id=name) for rule, name, change in VIOLATIONS]
)
def test_violations_name_their_rule(rule: int, change: Change) -> None:
    with pytest.raises(PlanError, match=rf"^rule {rule}: "):
        check_plan(wrap(change(hand_program()), num_ranks=2), hand_batch())


def test_a_block_may_live_longer_but_backwards_keep_their_order() -> None:
    program = cell("blocks", 0, release_op="end", release_micro_batch=-1)(hand_program())
    check_plan(wrap(program, num_ranks=2), hand_batch())
    early = ordered("schedule", [0, 1, 2, 6, 3, 4, 5])(program)
    with pytest.raises(
        PlanError, match=r"rule 6: .*backward of micro-batch 0 runs before its read"
    ):
        check_plan(wrap(early, num_ranks=2), hand_batch())


def test_a_block_may_be_unused_but_not_die_before_it_is_written() -> None:
    program = hand_program()
    unused = with_values(program.blocks.rows(np.array([0])), 0, rank=1)
    program = replace(program, blocks=Blocks.concatenate([program.blocks, unused]))
    check_plan(wrap(program, num_ranks=2), hand_batch())
    first, last = program.blocks.rows(slice(0, 2)), program.blocks.rows(slice(2, None))
    other = with_values(last, 0, rank=0, block=2, micro_batch=2, release_op="forward")
    program = replace(program, blocks=Blocks.concatenate([first, other]))
    with pytest.raises(PlanError, match=r"rule 6: .*block 2 is released before it is written"):
        check_plan(wrap(program, num_ranks=2), hand_batch())


def test_forward_only_blocks_die_after_their_last_reader() -> None:
    program = hand_program()
    program = replace(
        program,
        phases=("log_old_prob", "reference"),
        is_update=False,
        mini_batch=-1,
        micro_batches=with_values(program.micro_batches, 1, activation="keep"),
        schedule=program.schedule.rows(np.array([0, 1, 2, 7])),
    )
    for last_reader in (2, 1):
        blocks = replace(
            program.blocks,
            release_op=np.array(["forward", "forward"]),
            release_micro_batch=np.array([last_reader, 2]),
        )
        plan = wrap(replace(program, blocks=blocks), num_ranks=2)
        if last_reader == 2:
            check_plan(plan, hand_batch())
        else:
            with pytest.raises(PlanError, match=r"rule 6: .*2 reads block 0 at op 2, alive from 0"):
                check_plan(plan, hand_batch())


@given(st.integers(0, 100_000))
def test_micro_batch_numbers_need_not_follow_the_forward_order(seed: int) -> None:
    case = random_case(seed)
    parts = [renumbered(case.program.on_rank(rank)) for rank in range(case.num_ranks)]
    tables = {
        f.name: type(getattr(parts[0], f.name)).concatenate([getattr(p, f.name) for p in parts])
        for f in fields(Program)
        if f.name in TABLES
    }
    tables["assignments"] = case.program.assignments
    check_plan(wrap(replace(case.program, **tables), num_ranks=case.num_ranks), case.batch)


def renumbered(program: Program) -> Program:
    """Micro-batches of one rank numbered backwards."""
    last = len(program.micro_batches) - 1
    segments = replace(program.segments, micro_batch=last - program.segments.micro_batch)
    by_number = np.lexsort((segments.start_depth, segments.node, segments.micro_batch))
    table = program.micro_batches.rows(slice(None, None, -1))
    return replace(
        program,
        segments=segments.rows(by_number),
        micro_batches=replace(table, micro_batch=last - table.micro_batch),
        schedule=replace(program.schedule, micro_batch=last - program.schedule.micro_batch),
        blocks=replace(
            program.blocks,
            micro_batch=last - program.blocks.micro_batch,
            release_micro_batch=last - program.blocks.release_micro_batch,
        ),
    )


def test_plan_without_programs() -> None:
    with pytest.raises(PlanError, match="rule 1: no program for the 3 samples"):
        check_plan(wrap(num_ranks=2), hand_batch())
    check_plan(wrap(num_ranks=2), make_batch([], []))


def test_recompute_must_directly_precede_its_backward() -> None:
    """The stages' own lists place it there anyway, so the plan's list is what is checked."""
    early = ordered("schedule", [0, 1, 4, 2, 3, 5, 6])
    with pytest.raises(PlanError, match=r"rule 6: .*recompute of micro-batch 1 does not directly"):
        check_plan(wrap(early(hand_program()), num_ranks=2), hand_batch())


def test_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid plan cannot deadlock, so here stage 0 runs too few forwards ahead."""
    original = check_ops.stage_ops

    def lagging(ops: list[Op], num_stages: int, stage: int) -> list[Op]:
        own = original(ops, num_stages, stage)
        return [own[0], *own[3:], *own[1:3]] if len(own) > 2 and stage == 0 else own

    monkeypatch.setattr(check_ops, "stage_ops", lagging)
    with pytest.raises(PlanError, match=r"^rule 7: program 0, rank 0: the op lists of 2 stages"):
        check_plan(wrap(hand_program(), num_ranks=2), hand_batch())


def test_memory() -> None:
    plan = wrap(hand_program(), num_ranks=2, memory_bytes=2**20)
    check_plan(plan, hand_batch())
    with pytest.raises(InfeasibleError, match=r"^rule 9: .* stage 0: .* GiB") as caught:
        check_plan(plan, hand_batch(), memory_fraction=1e-3)
    assert "max_tokens_per_micro_batch" in caught.value.hint


@pytest.mark.slow
@given(st.integers(0, 100_000), st.data())
def test_one_changed_cell_is_refused_without_a_traceback(seed: int, data: st.DataObject) -> None:
    case = random_case(seed)
    name = data.draw(st.sampled_from([n for n in TABLES if len(getattr(case.program, n))]))
    table = getattr(case.program, name)
    column = data.draw(
        st.sampled_from([f.name for f in fields(table) if not f.name.endswith("_s")])
    )
    row = data.draw(st.integers(0, len(table) - 1))
    old = getattr(table, column)[row]
    if getattr(table, column).dtype.kind == "U":
        new = data.draw(st.sampled_from(WORDS).filter(lambda word: word != old))
    else:
        new = old + data.draw(st.integers(-4, 4).filter(bool))
    changed = replace(case.program, **{name: with_values(table, row, **{column: new})})
    refusal = "passes"
    try:
        check_plan(wrap(changed, num_ranks=case.num_ranks), case.batch)
    except PsrlError as error:
        refusal = str(error)
    may_pass = column not in STRICT_COLUMNS.get(name, [])
    assert refusal.startswith("rule ") or (may_pass and refusal == "passes")


TABLES = ["assignments", "segments", "micro_batches", "schedule", "blocks"]
WORDS = ["forward", "backward", "recompute", "end", "keep", "drop", "release", ""]
