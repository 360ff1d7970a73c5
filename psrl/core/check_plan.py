"""An independent check of a plan: it trusts no policy.

Each rule has a number; docs/plan-format.md lists them. A plan that passes computes every needed
token once per rank, reads nothing before it is written or after it is released, runs every
backward before its ancestors' and cannot deadlock.
"""

import math
from collections import Counter
from itertools import pairwise

import numpy as np

from .cost_model import MemoryModel
from .errors import InfeasibleError, PlanError
from .loss_rows import RowUnion, loss_rows
from .memory import MemoryLedger
from .packing import PackedMicroBatch, pack_rank
from .plan import Plan, Program
from .prefix_tree import PrefixTree
from .sample import SampleBatch
from .schedule import Op, pipeline_timing, stage_ops

ACTIVATIONS = ("keep", "recompute", "drop")


def check_plan(plan: Plan, batch: SampleBatch, memory_fraction: float | None = 1.0) -> None:
    """Check every rule on every rank.

    Args:
        plan: the plan.
        batch: the iteration of the trace that it was made for.
        memory_fraction: share of the device memory that may be used; None leaves the limit out,
            to simulate a plan that does not fit.

    Raises:
        PlanError: naming rule, program, rank and numbers of the first violation.
        InfeasibleError: if memory exceeds the device (rule 9).
    """
    _check_samples(plan, batch)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    for index, program in enumerate(plan.programs):
        samples = batch.select(program.assignments.sample)
        tree = program.tree(batch)
        tree.validate()
        rows = loss_rows(tree, samples)
        num_edges = 0
        for rank in range(plan.num_ranks):
            where = f"program {index}, rank {rank}"
            mine = program.on_rank(rank)
            _check_coverage(program, mine, rank, tree, where)
            packed = _check_order(mine, tree, where)
            _check_schedule(mine, packed, plan.parallel.pipeline_model_parallel_size, where)
            on_rank = program.assignments.rank == rank
            _check_head_tokens(mine, rows.of(on_rank), tree, where)
            num_edges += rows.num_edges(on_rank)
            _check_memory(mine, packed, memory, memory_fraction, where)
        if num_edges != samples.loss_tokens:
            raise PlanError(
                f"rule 8: program {index} owns {num_edges} loss edges for {samples.loss_tokens} "
                "trained tokens"
            )


def _check_samples(plan: Plan, batch: SampleBatch) -> None:
    """Rule 1: every phase trains every sample on one rank, an update only its mini-batch."""
    if batch.num_samples and not plan.programs:
        raise PlanError(f"rule 1: no program for the {batch.num_samples} samples")
    for index, program in enumerate(plan.programs):
        chosen = program.assignments.sample
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= batch.num_samples):
            raise PlanError(
                f"rule 1: program {index} assigns samples {int(chosen.min())}..{int(chosen.max())},"
                f" but the iteration has {batch.num_samples}",
                "the plan was made for another trace or iteration",
            )
        for table in program.tables:
            if len(table) and not 0 <= table.rank.min() <= table.rank.max() < plan.num_ranks:
                raise PlanError(
                    f"rule 1: program {index}, {type(table).__name__}: ranks "
                    f"{int(table.rank.min())}..{int(table.rank.max())}, but the plan has "
                    f"{plan.num_ranks}"
                )
        if program.is_update != (program.phases == ("update",)):
            raise PlanError(
                f"rule 1: program {index} {'has' if program.is_update else 'has no'} backwards but "
                f"runs in {', '.join(program.phases) or 'no phase'}"
            )
        foreign = batch.mini_batch[chosen] != program.mini_batch
        if program.is_update and foreign.any():
            raise PlanError(
                f"rule 1: program {index} trains mini-batch {program.mini_batch} but holds "
                f"{int(foreign.sum())} samples of other mini-batches"
            )
    for phase in sorted({p for program in plan.programs for p in program.phases}):
        covered = Counter(
            s for p in plan.phase_programs(phase) for s in p.assignments.sample.tolist()
        )
        if len(covered) != batch.num_samples or max(covered.values(), default=1) > 1:
            raise PlanError(
                f"rule 1: phase {phase} covers {len(covered)} of {batch.num_samples} samples, "
                f"{sum(c > 1 for c in covered.values())} of them more than once"
            )


def _check_coverage(
    program: Program, mine: Program, rank: int, tree: PrefixTree, where: str
) -> None:
    """Rule 2: the rank computes each token of its samples' paths once, and nothing else."""
    on_rank = program.assignments.rank[tree.sample_order] == rank
    before = np.concatenate([[0], np.cumsum(on_rank)])
    needed = before[tree.first_sample + tree.samples_through] > before[tree.first_sample]
    needed[0] = False
    node, start, count = mine.segments.node, mine.segments.start_depth, mine.segments.num_tokens
    if len(node) and (node.min() < 1 or node.max() >= tree.num_nodes or count.min() < 1):
        raise PlanError(f"rule 2: {where}: a segment names no tokens of the tree")
    by_token = np.lexsort((start, node))
    node, start, end = node[by_token], start[by_token], (start + count)[by_token]
    opens = np.append(True, node[1:] != node[:-1]) if len(node) else np.empty(0, bool)
    closes = np.append(opens[1:], True) if len(node) else opens
    exact = (start[opens] == tree.start_depth[node[opens]]).all()
    exact &= (end[closes] == tree.end_depth[node[closes]]).all()
    exact &= (start[~opens] == end[np.flatnonzero(~opens) - 1]).all()
    if not exact or not np.array_equal(np.unique(node), np.flatnonzero(needed)):
        raise PlanError(
            f"rule 2: {where}: segments cover {int(count.sum())} tokens of "
            f"{len(np.unique(node))} nodes; its samples need {int(tree.num_tokens[needed].sum())} "
            f"tokens of {int(needed.sum())} nodes, each once"
        )


def _check_order(mine: Program, tree: PrefixTree, where: str) -> list[PackedMicroBatch]:
    """Rules 3 and 4: micro-batches in pre-order with true sizes; every reader has a block."""
    segments, table = mine.segments, mine.micro_batches
    key = np.stack([segments.micro_batch, segments.node, segments.start_depth])
    if (np.lexsort(key[::-1]) != np.arange(key.shape[1])).any():
        raise PlanError(f"rule 3: {where}: segments are not in depth-first pre-order")
    known = table.micro_batch
    if not np.array_equal(known, np.arange(len(known))):
        raise PlanError(f"rule 3: {where}: micro-batches are not numbered 0..{len(known) - 1}")
    if not np.isin(segments.micro_batch, known).all():
        raise PlanError(f"rule 3: {where}: a segment's micro-batch is not in the table")
    if not np.isin(table.activation, ACTIVATIONS).all():
        raise PlanError(f"rule 3: {where}: activation must be one of {', '.join(ACTIVATIONS)}")
    _check_block_table(mine, where)
    try:
        packed = pack_rank(mine, tree)
    except PlanError as error:
        raise PlanError(f"rule 4: {where}: {error.message}") from None
    for micro_batch, tokens, pairs in zip(
        packed, table.num_tokens.tolist(), table.pairs.tolist(), strict=True
    ):
        if (micro_batch.total_tokens, micro_batch.pairs) != (tokens, pairs):
            raise PlanError(
                f"rule 3: {where}: micro-batch {micro_batch.index} has "
                f"{micro_batch.total_tokens} tokens and {micro_batch.pairs} pairs, the table says "
                f"{tokens} and {pairs}"
            )
    return packed


def _check_block_table(mine: Program, where: str) -> None:
    """Rule 6, what it takes for granted: numbers occur once, rows exist and are cached once."""
    blocks, size = mine.blocks, mine.micro_batches.num_tokens
    if len(np.unique(blocks.block)) != len(blocks):
        raise PlanError(f"rule 6: {where}: a block number occurs twice")
    if not np.isin(blocks.micro_batch, mine.micro_batches.micro_batch).all():
        raise PlanError(f"rule 6: {where}: a block's micro-batch is not in the table")
    start, end = blocks.start_row, blocks.start_row + blocks.num_tokens
    bad = (start < 0) | (blocks.num_tokens < 1) | (end > size[blocks.micro_batch])
    bad |= blocks.allocated_tokens < blocks.num_tokens
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise PlanError(
            f"rule 6: {where}: block {int(blocks.block[row])} holds rows "
            f"[{int(start[row])}, {int(end[row])}) of the {int(size[blocks.micro_batch[row]])} of "
            f"its micro-batch in {int(blocks.allocated_tokens[row])} allocated tokens"
        )
    order = np.lexsort((start, blocks.micro_batch))
    same = np.diff(blocks.micro_batch[order]) == 0
    if (same & (start[order][1:] < end[order][:-1])).any():
        raise PlanError(f"rule 6: {where}: two blocks hold the same row")


def _check_schedule(
    mine: Program, packed: list[PackedMicroBatch], num_stages: int, where: str
) -> None:
    """Rules 5, 6, 7: op counts, readers after writers, children before parents, no deadlock."""
    ops = mine.ops()
    activation = mine.micro_batches.activation.tolist()
    expected = Counter({("forward", p.index): 1 for p in packed})
    if mine.is_update:
        expected |= Counter({("backward", p.index): 1 for p in packed})
        expected |= Counter(
            {("recompute", p.index): 1 for p in packed if activation[p.index] == "drop"}
        )
    if Counter(ops) != expected:
        raise PlanError(f"rule 5: {where}: the op list does not run every micro-batch once")
    forwarded: set[int] = set()
    for op in ops:
        if op.kind == "forward":
            forwarded.add(op.micro_batch)
        elif op.micro_batch not in forwarded:
            raise PlanError(
                f"rule 5: {where}: {op.kind} of micro-batch {op.micro_batch} precedes its forward"
            )
    for op, following in pairwise([*ops, Op("forward", -1)]):
        if op.kind == "recompute" and following != Op("backward", op.micro_batch):
            raise PlanError(
                f"rule 6: {where}: recompute of micro-batch {op.micro_batch} does not directly "
                "precede its backward"
            )
    lists = [stage_ops(ops, num_stages, stage) for stage in range(num_stages)]
    for stage, stage_list in enumerate(lists):
        _check_reads(mine, packed, stage_list, f"{where}, stage {stage}")
    if pipeline_timing(lists, lambda *_: 1.0, lambda _: 0.0, send_window=1) is None:
        raise PlanError(f"rule 7: {where}: the op lists of {num_stages} stages deadlock")


def _check_reads(mine: Program, packed: list[PackedMicroBatch], ops: list[Op], where: str) -> None:
    """Rule 6: what an op reads is alive: written before, released after."""
    at: dict[tuple[str, int], int] = {(op.kind, op.micro_batch): i for i, op in enumerate(ops)}
    blocks = mine.blocks
    owner = dict(zip(blocks.block.tolist(), blocks.micro_batch.tolist(), strict=True))
    release = {
        block: len(ops) if kind == "end" else at.get((kind, reader), -1)
        for block, kind, reader in zip(
            blocks.block.tolist(),
            blocks.release_op.tolist(),
            blocks.release_micro_batch.tolist(),
            strict=True,
        )
    }
    for block, writer in owner.items():
        if release[block] < at["forward", writer]:
            raise PlanError(f"rule 6: {where}: block {block} is released before it is written")
    for micro_batch in packed:
        for block in micro_batch.read_blocks:
            first, last = at["forward", owner[block]], release[block]
            for kind in ("forward", "recompute", "backward"):
                when = at.get((kind, micro_batch.index))
                if when is not None and not first < when <= last:
                    raise PlanError(
                        f"rule 6: {where}: micro-batch {micro_batch.index} reads block {block} at "
                        f"op {when}, alive from {first} to {last}"
                    )
            if mine.is_update:
                ancestor = at["backward", owner[block]]
                if at["backward", micro_batch.index] > ancestor:
                    raise PlanError(
                        f"rule 6: {where}: backward of micro-batch {owner[block]} runs before its "
                        f"reader {micro_batch.index}'s"
                    )
                if last < ancestor:
                    raise PlanError(
                        f"rule 6: {where}: block {block} is released before its owner's backward"
                    )


def _check_head_tokens(mine: Program, predicting: RowUnion, tree: PrefixTree, where: str) -> None:
    """Rule 8: the table states the distinct positions whose logits are computed."""
    segments, stated = mine.segments, mine.micro_batches.head_tokens
    shift = tree.token_start[segments.node] - tree.start_depth[segments.node]
    start = segments.start_depth + shift
    count = predicting.count(start, start + segments.num_tokens)
    found = np.zeros(len(stated), np.int64)
    np.add.at(found, segments.micro_batch, count)
    if not np.array_equal(found, stated):
        bad = int(np.flatnonzero(found != stated)[0])
        raise PlanError(
            f"rule 8: {where}: micro-batch {bad} predicts from {found[bad]} positions, the table "
            f"says {int(stated[bad])} head_tokens"
        )


def _check_memory(
    mine: Program,
    packed: list[PackedMicroBatch],
    memory: MemoryModel,
    memory_fraction: float | None,
    where: str,
) -> None:
    """Rule 9: bytes on every stage stay below the device's memory; blocks end with the program."""
    device_bytes = memory.cluster.device.memory_bytes
    limit = math.inf if memory_fraction is None else device_bytes * memory_fraction
    num_stages = memory.parallel.pipeline_model_parallel_size
    for stage in range(num_stages):
        ledger = MemoryLedger(mine, packed, memory, stage == num_stages - 1)
        for op in stage_ops(mine.ops(), num_stages, stage):
            state = ledger.run(op)
            if state.total_bytes > limit:
                gib = 2**30
                raise InfeasibleError(
                    f"rule 9: {where}, stage {stage}: {op.kind} of micro-batch {op.micro_batch} "
                    f"needs {state.total_bytes / gib:.2f} GiB (static "
                    f"{state.static_bytes / gib:.2f}, activations "
                    f"{state.activation_bytes / gib:.2f}, logits {state.logits_bytes / gib:.2f}, "
                    f"KV {state.kv_bytes / gib:.2f}, dKV "
                    f"{state.kv_gradient_bytes / gib:.2f}) but may use {limit / gib:.2f} GiB",
                    "lower planning.max_tokens_per_micro_batch, set parallel.recompute to full, "
                    "or raise a parallel size",
                )
        ledger.finish()
