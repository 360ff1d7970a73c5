"""Rule 10: ranks that share experts run one op pattern, empty micro-batches included."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import PlanError
from psrl.core.plan.check_ops import check_op_patterns
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.plan import Plan, Program
from psrl.core.plan.tables import MicroBatches, Schedule
from tests.core.cases import MODEL, cluster, wrap
from tests.random_plans import RandomProgram, random_batch, random_program, with_times

NUM_RANKS = 4
MOE = MODEL.model_copy(update={"num_moe_experts": 4, "moe_topk": 2, "moe_ffn_hidden_size": 8})
OpList = list[tuple[str, int]]
NUM_EMPTY = 2
"""Kept micro-batches without tokens that end every rank's table."""


def in_step(seed: int) -> tuple[RandomProgram, list[OpList]]:
    """A random update whose ranks all forward everything, then run backwards from the last."""
    rng = np.random.default_rng(seed)
    planned = random_program(rng, random_batch(rng, num_samples=8), num_ranks=NUM_RANKS)
    count = int(planned.program.micro_batches.micro_batch.max()) + 1 + NUM_EMPTY
    activation = rng.choice(["keep", "recompute", "drop"], count)
    activation[-NUM_EMPTY:] = "keep"
    tables = [
        padded(planned.program.on_rank(rank).micro_batches, rank, activation)
        for rank in range(NUM_RANKS)
    ]
    ops: OpList = [("forward", m) for m in range(count)]
    for m in reversed(range(count)):
        ops += [("recompute", m)] * (activation[m] == "drop") + [("backward", m)]
    program = replace(planned.program, micro_batches=MicroBatches.concatenate(tables))
    return replace(planned, program=program), [ops] * NUM_RANKS


def padded(table: MicroBatches, rank: int, activation: np.ndarray) -> MicroBatches:
    """A rank's table with empty micro-batches at its end."""
    count, missing = len(activation), len(activation) - len(table)

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(table, name), np.zeros(missing)])

    return MicroBatches(
        rank=np.full(count, rank),
        micro_batch=np.arange(count),
        activation=activation,
        num_tokens=column("num_tokens").astype(np.int64),
        pairs=column("pairs").astype(np.int64),
        head_tokens=column("head_tokens").astype(np.int64),
        forward_s=column("forward_s"),
        backward_s=column("backward_s"),
    )


def plan_of(program: Program, ops: list[OpList], parallel: ParallelConfig) -> Plan:
    rows = [(rank, kind, m) for rank, mine in enumerate(ops) for kind, m in mine]
    rank, kind, micro_batch = map(np.array, zip(*rows, strict=True))
    program = replace(program, schedule=Schedule(rank=rank, op=kind, micro_batch=micro_batch))
    plan = replace(wrap(program, num_ranks=NUM_RANKS), model=MOE, parallel=parallel)
    return with_times(replace(plan, cluster=cluster(parallel.world_size)))


def expert_parallel(size: int, tensor: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=2,
        data_parallel_size=NUM_RANKS,
        expert_model_parallel_size=size,
        sequence_parallel=tensor > 1,
    )


def renumbered(ops: OpList, count: int) -> OpList:
    """The empty micro-batches in each other's place: another list of the same pattern."""
    last = {count - 1: count - 2, count - 2: count - 1}
    return [(kind, last.get(m, m)) for kind, m in ops]


Fault = Callable[[Program, list[OpList], int], tuple[Program, list[OpList]]]


def other_backward_order(
    program: Program, ops: list[OpList], rank: int
) -> tuple[Program, list[OpList]]:
    """The empty micro-batches are forwarded in order but run backward in the other."""
    count = len(program.on_rank(rank).micro_batches)
    mine = [op if op[0] == "forward" else renumbered([op], count)[0] for op in ops[rank]]
    return program, [*ops[:rank], mine, *ops[rank + 1 :]]


def other_activation(
    program: Program, ops: list[OpList], rank: int
) -> tuple[Program, list[OpList]]:
    """One micro-batch is kept where the other ranks recompute its layers, or the reverse."""
    table = program.micro_batches
    mine = (table.rank == rank) & (table.activation != "drop")
    activation = table.activation.copy()
    at = np.flatnonzero(mine)[-1]
    activation[at] = "keep" if activation[at] == "recompute" else "recompute"
    return replace(program, micro_batches=replace(table, activation=activation)), ops


def fewer_ops(program: Program, ops: list[OpList], rank: int) -> tuple[Program, list[OpList]]:
    """The last empty micro-batch is missing."""
    table = program.micro_batches
    last = int(table.micro_batch.max())
    left = table.rows(np.flatnonzero((table.rank != rank) | (table.micro_batch != last)))
    mine = [op for op in ops[rank] if op[1] != last]
    return replace(program, micro_batches=left), [*ops[:rank], mine, *ops[rank + 1 :]]


@pytest.mark.slow
@given(st.integers(0, 100_000), st.sampled_from([(2, 1), (4, 1), (4, 2)]))
def test_ranks_in_step_pass_however_they_number_their_micro_batches(
    seed: int, sizes: tuple[int, int]
) -> None:
    planned, ops = in_step(seed)
    ops[1] = renumbered(ops[1], len(planned.program.on_rank(1).micro_batches))
    check_plan(plan_of(planned.program, ops, expert_parallel(*sizes)), planned.batch)


@pytest.mark.slow
@given(
    st.integers(0, 100_000),
    st.sampled_from([other_backward_order, other_activation, fewer_ops]),
    st.integers(0, NUM_RANKS - 1),
    st.sampled_from([2, 4]),
)
def test_a_rank_that_differs_from_its_group_is_refused(
    seed: int, fault: Fault, rank: int, size: int
) -> None:
    planned, ops = in_step(seed)
    program, ops = fault(planned.program, ops, rank)
    for alone in (expert_parallel(1), expert_parallel(2, tensor=2)):
        check_plan(plan_of(program, ops, alone), planned.batch)
    first = rank - rank % size
    pair = f"{first} and {first + 1 if rank == first else rank}"
    with pytest.raises(PlanError, match=rf"^rule 10: program 0: .* ranks {pair} share experts"):
        check_plan(plan_of(program, ops, expert_parallel(size)), planned.batch)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("f0 f1 b1 b0", None),
        ("f1 f0 b0 b1", None),
        ("f0 f1 b0 b1", r"op 2 is the backward .* number 1 \(keep\) on rank 0, .* number 0 "),
        ("f0 b0 f1 b1", r"op 1 is the forward .* number 1 .* rank 0, the backward .* rank 1"),
        ("f0 b0", r"run 4 and 2 ops that differ: op 1 "),
        ("f0 f1 b1", r"run 4 and 3 ops that differ: op 3 is the backward .*, missing on rank 1"),
    ],
)
def test_the_first_op_that_differs_is_named(ops: str, message: str | None) -> None:
    program = random_program(np.random.default_rng(0), random_batch(np.random.default_rng(0)))
    kinds = {"f": "forward", "b": "backward"}
    lists = [[(kinds[o[0]], int(o[1])) for o in text.split()] for text in ("f0 f1 b1 b0", ops)]
    tables = [padded(MicroBatches.empty(), rank, np.array(["keep"] * 2)) for rank in range(2)]
    two = replace(program.program, micro_batches=MicroBatches.concatenate(tables))
    program_of_two = plan_of(two, lists, expert_parallel(1)).programs[0]
    parallel = ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2)
    if message is None:
        check_op_patterns(3, program_of_two, parallel)
        return
    with pytest.raises(PlanError, match=rf"rule 10: program 3: .*{message}") as caught:
        check_op_patterns(3, program_of_two, parallel)
    assert "empty micro-batches" in caught.value.hint
