"""The checks of `check_plan` that follow the op lists: order, patterns, lifetimes, memory."""

import math
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import InfeasibleError, PlanError
from psrl.core.samples.sample import IntArray

from .bytes_over_ops import MemoryState, block_table, stage_bytes
from .check_reads import ProgramByRank, Reads
from .op_table import OP_NAMES, op_table, stage_order
from .plan import Program
from .schedule import Op, can_finish, stage_ops


class RankOps(NamedTuple):
    """Op list of a stage of one rank."""

    rank: int
    ops: list[Op]


def check_schedule(ranked: ProgramByRank, num_stages: int) -> list[list[RankOps]]:
    """Rules 5, 6, 7: op counts, recomputes in place, no deadlock.

    Returns: op lists of all ranks, by stage.
    """
    by_stage: list[list[RankOps]] = [[] for _ in range(num_stages)]
    is_update = ranked.program.is_update
    schedule, drops = ranked.schedule, (ranked.micro_batches.activation == "drop").tolist()
    bounds = np.searchsorted(schedule.rank, np.arange(ranked.num_ranks + 1)).tolist()
    kinds, numbers = schedule.op.tolist(), schedule.micro_batch.tolist()
    for rank, count in enumerate(ranked.num_micro_batches.tolist()):
        low, high = bounds[rank], bounds[rank + 1]
        ops = [Op(k, m) for k, m in zip(kinds[low:high], numbers[low:high], strict=True)]
        first = int(ranked.first_micro_batch[rank])
        dropped = {m for m in range(count) if is_update and drops[first + m]}
        _check_ops(ops, count, is_update, dropped, ranked.where(rank))
        lists = [stage_ops(ops, num_stages, stage) for stage in range(num_stages - 1)] + [ops]
        if num_stages > 1 and not can_finish(lists):
            raise PlanError(
                f"rule 7: {ranked.where(rank)}: the op lists of {num_stages} stages deadlock"
            )
        for stage, stage_list in enumerate(lists):
            by_stage[stage].append(RankOps(rank, stage_list))
    return by_stage


def _check_ops(ops: list[Op], count: int, is_update: bool, dropped: set[int], where: str) -> None:
    expected: set[tuple[str, int]] = {("forward", m) for m in range(count)}
    if is_update:
        expected |= {("backward", m) for m in range(count)}
        expected |= {("recompute", m) for m in dropped}
    if len(ops) != len(expected) or set(ops) != expected:
        raise PlanError(f"rule 5: {where}: the op list does not run every micro-batch once")
    if not is_update:
        return
    forwarded: set[int] = set()
    for op, following in pairwise([*ops, None]):
        assert op is not None
        if op.kind == "forward":
            forwarded.add(op.micro_batch)
        elif op.micro_batch not in forwarded:
            raise PlanError(
                f"rule 5: {where}: {op.kind} of micro-batch {op.micro_batch} precedes its forward"
            )
        if op.kind == "recompute" and following != Op("backward", op.micro_batch):
            raise PlanError(
                f"rule 6: {where}: recompute of micro-batch {op.micro_batch} does not directly "
                "precede its backward"
            )


class _PatternOp(NamedTuple):
    """What ranks that share experts must agree on about an op.

    Attributes:
        forward: place of the op's micro-batch in the rank's order of forwards; -1 if it has none.
        activation: of the micro-batch; empty if it is not in the table.
    """

    kind: str
    forward: int
    activation: str

    def __str__(self) -> str:
        number = f"forwarded as number {self.forward}"
        return f"the {self.kind} of the micro-batch {number} ({self.activation})"


def _op_patterns(program: Program, num_ranks: int) -> list[list[_PatternOp]]:
    table, schedule = program.micro_batches, program.schedule
    owners = zip(table.rank.tolist(), table.micro_batch.tolist(), strict=True)
    activation = dict(zip(owners, table.activation.tolist(), strict=True))
    by_rank = np.argsort(schedule.rank, kind="stable")
    bounds = np.searchsorted(schedule.rank[by_rank], np.arange(num_ranks + 1)).tolist()
    kinds, numbers = schedule.op[by_rank].tolist(), schedule.micro_batch[by_rank].tolist()
    patterns = []
    for rank, (low, high) in enumerate(pairwise(bounds)):
        ops = list(zip(kinds[low:high], numbers[low:high], strict=True))
        forwards = [m for kind, m in ops if kind == "forward"]
        place = {m: i for i, m in enumerate(forwards)}
        patterns.append(
            [_PatternOp(k, place.get(m, -1), activation.get((rank, m), "")) for k, m in ops]
        )
    return patterns


def check_op_patterns(index: int, program: Program, parallel: ParallelConfig) -> None:
    """Rule 10: ranks that share experts run one op pattern, so that their all-to-alls meet.

    The k-th ops of two such ranks are of one kind, and on micro-batches of one activation that
    were forwarded as equally many-th: a backward meets the backwards of what its forward met.

    Args:
        index: number of the program in its plan.

    Raises:
        PlanError: naming program, ranks and the first op that differs.
    """
    size = parallel.coupled_ranks
    if size == 1:
        return
    patterns = _op_patterns(program, parallel.data_parallel_size)
    for rank, mine in enumerate(patterns):
        first = rank - rank % size
        theirs = patterns[first]
        if mine == theirs:
            continue
        both = enumerate(zip_longest(theirs, mine))
        op, (other, own) = next((i, pair) for i, pair in both if pair[0] != pair[1])
        raise PlanError(
            f"rule 10: program {index}: data-parallel ranks {first} and {rank} share experts but "
            f"run {len(theirs)} and {len(mine)} ops that differ: op {op} is {other or 'missing'} "
            f"on rank {first}, {own or 'missing'} on rank {rank}",
            "give the ranks of an expert-parallel group one op pattern, with empty micro-batches "
            "where one has fewer, or lower expert_model_parallel_size to at most "
            "tensor_model_parallel_size",
        )


def check_lifetimes(
    ranked: ProgramByRank, reads: Reads, rank_ops: list[RankOps], stage: int
) -> None:
    """Rule 6: what an op reads is alive: written before, released after."""
    blocks, first_number = ranked.blocks, ranked.first_micro_batch.tolist()
    kinds = ("forward", "recompute", "backward")
    at: dict[str, IntArray] = {k: np.full(len(ranked.micro_batches), -1) for k in kinds}
    for rank, ops in rank_ops:
        base = first_number[rank]
        for place, op in enumerate(ops):
            at[op.kind][base + op.micro_batch] = place
    owner = ranked.first_micro_batch[blocks.rank] + blocks.micro_batch
    release = np.where(blocks.release_op == "end", len(ranked.schedule), -1)
    known = ranked.is_known(blocks.rank, blocks.release_micro_batch)
    for kind, places in at.items():
        dies = known & (blocks.release_op == kind)
        reader = ranked.first_micro_batch[blocks.rank[dies]] + blocks.release_micro_batch[dies]
        release[dies] = places[reader]
    written = at["forward"][owner]

    def refuse(block: int, what: str) -> PlanError:
        where = ranked.where(int(blocks.rank[block]))
        return PlanError(f"rule 6: {where}, stage {stage}: {what}")

    for block in np.flatnonzero(release < written)[:1].tolist():
        number = int(blocks.block[block])
        raise refuse(block, f"block {number} is released before it is written")
    writer = owner[reads.block]
    for places in at.values():
        when = places[reads.reader]
        dead = (when >= 0) & ~((written[reads.block] < when) & (when <= release[reads.block]))
        for i in np.flatnonzero(dead)[:1].tolist():
            block = int(reads.block[i])
            raise refuse(
                block,
                f"micro-batch {int(ranked.micro_batches.micro_batch[reads.reader[i]])} reads block "
                f"{int(blocks.block[block])} at op {int(when[i])}, alive from "
                f"{int(written[block])} to {int(release[block])}",
            )
    if not ranked.program.is_update:
        return
    ancestor = at["backward"][writer]
    for i in np.flatnonzero(at["backward"][reads.reader] > ancestor)[:1].tolist():
        block = int(reads.block[i])
        raise refuse(
            block,
            f"backward of micro-batch {int(blocks.micro_batch[block])} runs before its reader "
            f"{int(ranked.micro_batches.micro_batch[reads.reader[i]])}'s",
        )
    for i in np.flatnonzero(release[reads.block] < ancestor)[:1].tolist():
        block = int(reads.block[i])
        number = int(blocks.block[block])
        raise refuse(block, f"block {number} is released before its owner's backward")


def check_memory(ranked: ProgramByRank, memory: MemoryModel, memory_fraction: float | None) -> int:
    """Rule 9: bytes on every stage stay below the device's memory; blocks end with the program.

    Returns: the most bytes on a device.
    """
    device_bytes = memory.cluster.device.memory_bytes
    limit = math.inf if memory_fraction is None else device_bytes * memory_fraction
    num_stages, gib = memory.parallel.pipeline_model_parallel_size, 2**30
    peak_bytes = 0
    program, ops = ranked.program, op_table(ranked.program, ranked.num_ranks)
    blocks = block_table(program, ops, ranked.tree if program.is_update else None)
    for stage in range(num_stages):
        order = stage_order(ops, program.is_update, num_stages, stage)
        states = stage_bytes(program, memory, ops, blocks, order, stage)
        total = states.sum(axis=1)
        at_rest = memory.static_bytes_on(stage, program.is_update)
        peak_bytes = max(peak_bytes, int(total.max(initial=at_rest)))
        if not (total > limit).any():
            continue
        worst = int(total.argmax())
        at, state = order[worst], MemoryState(*(states[worst] / gib).tolist())
        raise InfeasibleError(
            f"rule 9: {ranked.where(int(ops.rank[at]))}, stage {stage}: {OP_NAMES[ops.kind[at]]} "
            f"of micro-batch {int(program.micro_batches.micro_batch[ops.row[at]])} needs "
            f"{total[worst] / gib:.2f} GiB (static {state.static_bytes:.2f}, activations "
            f"{state.activation_bytes:.2f}, logits {state.logits_bytes:.2f}, KV "
            f"{state.kv_bytes:.2f}, dKV {state.kv_gradient_bytes:.2f}) but may use "
            f"{limit / gib:.2f} GiB",
            "lower planning.max_tokens_per_micro_batch, set parallel.recompute to full, or raise a "
            "parallel size",
        )
    return peak_bytes
