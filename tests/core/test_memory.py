"""Bytes op by op on a hand-written program, and conservation on random ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import PlanError
from psrl.core.plan.bytes_over_ops import (
    HEAD_CHUNK_TOKENS,
    MemoryState,
    block_table,
    fullest_stages,
    peak_bytes,
    stage_bytes,
)
from psrl.core.plan.op_table import OpTable, op_table, stage_order
from psrl.core.plan.plan import Plan, Program
from psrl.core.tree.prefix_tree import PrefixTree
from tests.core.cases import hand_batch, hand_program, random_case, with_values, wrap
from tests.memory_ledger import op_by_op

# Of the tiny model on one of two stages (2 layers), worked out in test_cost_model.py's way.
ACTIVATION = 2 * (2 * (3 * 8 * 2 + 4) + (3 * 8 + 3 * 4 + 3 * 16) * 2 + 4 * 4 + 4 * 2 * 2)
RECOMPUTE = 2 * 8 * 2 + 2 * 4
STAGE_INPUT = 8 * 2
# The last stage also keeps its norm per token, and the hidden state per predicted position.
NORM = 2 * 8 * 2 + 4
HEAD = 8 * 2 + 56
KV = 2 * 2 * 4 * 2
KV_GRADIENT = 2 * 2 * 4 * 4
LOGITS = 8 * 32


def states(plan: Plan, tree: PrefixTree, rank: int, stage: int) -> list[MemoryState]:
    """The account of one rank alone, which is that of all ranks at once and that of the oracle."""
    program, num_stages = plan.programs[0], plan.parallel.pipeline_model_parallel_size
    mine, memory = program.on_rank(rank), memory_of(plan)
    alone = account(mine, op_table(mine), tree, memory, stage)
    ops = op_table(program, plan.num_ranks)
    order = stage_order(ops, program.is_update, num_stages, stage)
    together = account(program, ops, tree, memory, stage)
    assert [s for s, at in zip(together, ops.rank[order], strict=True) if at == rank] == alone
    assert op_by_op(mine, tree, memory, stage) == alone
    return alone


def account(
    program: Program, ops: OpTable, tree: PrefixTree, memory: MemoryModel, stage: int
) -> list[MemoryState]:
    num_stages = memory.parallel.pipeline_model_parallel_size
    order = stage_order(ops, program.is_update, num_stages, stage)
    blocks = block_table(program, ops, tree if program.is_update else None)
    found = stage_bytes(program, memory, ops, blocks, order, stage)
    return [MemoryState(*row) for row in found.tolist()]


def test_last_stage_by_hand() -> None:
    """Ops F0 F1 F2 B2 R1 B1 B0; 0 is kept (2 tokens), 1 dropped (1), 2 recomputed (2)."""
    program = hand_program()
    found = states(wrap(program, num_ranks=2), program.tree(hand_batch()), rank=0, stage=1)
    layer = ACTIVATION // 2
    kept = 2 * (ACTIVATION + NORM) + 2 * HEAD
    recomputed = 2 * (RECOMPUTE + NORM)
    again = ACTIVATION + NORM + HEAD
    assert [s.activation_bytes for s in found] == [
        kept,
        kept + STAGE_INPUT + layer,
        kept + STAGE_INPUT + recomputed + 2 * layer,
        kept + STAGE_INPUT + recomputed + 2 * layer,
        kept + again,
        kept + again,
        kept,
    ]
    # Block 0 takes 4 allocated tokens from F0 to B0, block 1 four from F1 to B1.
    assert [s.kv_bytes for s in found] == [4 * KV, *[8 * KV] * 5, 4 * KV]
    assert [s.kv_gradient_bytes for s in found] == [
        0,
        0,
        0,
        *[8 * KV_GRADIENT] * 3,
        4 * KV_GRADIENT,
    ]
    assert [s.logits_bytes for s in found] == [n * LOGITS for n in (2, 1, 0, 0, 1, 1, 2)]
    assert len({s.static_bytes for s in found}) == 1
    first = found[0]
    assert first.total_bytes == first.static_bytes + kept + 4 * KV + 2 * LOGITS


def test_first_stage_has_no_logits_and_runs_ahead() -> None:
    program = hand_program()
    plan, tree = wrap(program, num_ranks=2), program.tree(hand_batch())
    assert [s.logits_bytes for s in states(plan, tree, rank=0, stage=0)] == [0] * 7
    assert [s.activation_bytes for s in states(plan, tree, rank=1, stage=0)] == [2 * ACTIVATION] * 2


def test_logits_exist_one_chunk_at_a_time() -> None:
    program = hand_program().on_rank(1)
    many = with_values(program.micro_batches, 0, head_tokens=HEAD_CHUNK_TOKENS + 500)
    plan = wrap(hand_program(), num_ranks=2)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    changed = type(program)(**{**vars(program), "micro_batches": many})
    tree = changed.tree(hand_batch())
    state = account(changed, op_table(changed), tree, memory, stage=1)[0]
    assert state.logits_bytes == HEAD_CHUNK_TOKENS * LOGITS


def test_the_peak_of_any_stage_is_found_and_forward_only_holds_nothing() -> None:
    """Behind the first stage a dropped micro-batch keeps its input, so stage 1 counts too."""
    assert [fullest_stages(n) for n in (1, 2, 4)] == [[0], [0, 1], [0, 1, 3]]
    program, tree = hand_program(), hand_program().tree(hand_batch())
    count = len(program.micro_batches)
    dropped = replace(program.micro_batches, activation=np.full(count, "drop"))
    plan = wrap(program, num_ranks=2, num_stages=4)
    memory = MemoryModel(
        plan.model.model_copy(update={"vocab_size": 2}), plan.cluster, plan.parallel
    )
    mine = replace(program, micro_batches=dropped).on_rank(0)
    bare = mine.schedule.op != "recompute"
    for is_update in (True, False):
        keeps = mine.schedule.rows(bare if is_update else mine.schedule.op == "forward")
        blocks = mine.blocks.rows(slice(0, 0))
        case = replace(mine, schedule=keeps, blocks=blocks, is_update=is_update)
        peaks = [
            max(sum(s) for s in account(case, op_table(case), tree, memory, stage))
            for stage in range(4)
        ]
        assert peak_bytes(case, tree, memory) == max(peaks)
    held = [s.activation_bytes for s in account(case, op_table(case), tree, memory, stage=1)]
    layer = mine.micro_batches.num_tokens * memory.activation_bytes_per_token
    assert held == (layer // memory.layers_per_stage)[keeps.micro_batch].tolist()


@pytest.mark.slow
@given(st.integers(0, 100_000))
def test_all_is_free_at_the_end_and_forward_only_holds_nothing(seed: int) -> None:
    case = random_case(seed)
    plan = wrap(case.program, num_ranks=case.num_ranks)
    for rank in range(case.num_ranks):
        sizes = case.program.on_rank(rank).micro_batches.num_tokens
        found = states(plan, case.tree, rank, stage=0)
        if len(found) and case.program.is_update:
            assert found[-1].kv_gradient_bytes <= found[-1].kv_bytes * KV_GRADIENT // KV
            assert found[-1].activation_bytes <= ACTIVATION * int(sizes.max())
        elif len(found):
            layer = ACTIVATION // 2
            order = case.program.on_rank(rank).schedule.micro_batch
            assert [s.activation_bytes for s in found] == (sizes[order] * layer).tolist()
            assert not any(s.kv_gradient_bytes for s in found)


def test_block_that_outlives_the_program() -> None:
    program = hand_program()
    plan, tree = wrap(program, num_ranks=2), program.tree(hand_batch())
    mine, last = program.on_rank(0), len(program.on_rank(0).schedule) - 1
    cut = replace(mine, schedule=mine.schedule.rows(slice(0, last)))
    with pytest.raises(PlanError, match=r"1 blocks \(4 tokens\) are never released"):
        account(cut, op_table(cut), tree, memory_of(plan), stage=1)


def memory_of(plan: Plan) -> MemoryModel:
    return MemoryModel(plan.model, plan.cluster, plan.parallel)


def test_peak_depends_on_when_backwards_run() -> None:
    """A stage that runs ahead holds more; only the first keeps no input of a dropped one."""
    program = hand_program()
    plan, tree = wrap(program, num_ranks=2, num_stages=4), program.tree(hand_batch())
    peaks = [max(s.activation_bytes for s in states(plan, tree, 0, stage)) for stage in range(3)]
    assert peaks[0] + STAGE_INPUT >= peaks[1] >= peaks[2]
