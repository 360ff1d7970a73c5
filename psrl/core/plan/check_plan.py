"""An independent check of a plan: it trusts no policy.

Each rule has a number; docs/plan-format.md lists them. A plan that passes computes every needed
token once per rank, reads nothing before it is written or after it is released, runs every
backward before its ancestors' and cannot deadlock, neither between the stages of a rank nor between
ranks that share experts.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import PlanError
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.loss_rows import LossRows, loss_rows
from psrl.core.tree.prefix_tree import PrefixTree
from psrl.core.tree.rank_nodes import nodes_of_ranks

from .check_ops import check_lifetimes, check_memory, check_op_patterns, check_schedule
from .check_reads import ProgramByRank, block_reads
from .packing import visible_pairs
from .plan import Plan

ACTIVATIONS = ("keep", "recompute", "drop")


def check_plan(
    plan: Plan,
    batch: SampleBatch,
    memory_fraction: float | None = 1.0,
    trees: Sequence[PrefixTree] | None = None,
) -> None:
    """Check every rule on every rank.

    Args:
        plan: the plan.
        batch: the iteration of the trace that it was made for.
        memory_fraction: share of the device memory that may be used; None leaves the limit out,
            to simulate a plan that does not fit.
        trees: `program.tree(batch)` of every program, from a caller that has built them.

    Raises:
        PlanError: naming rule, program, rank and numbers of the first violation.
        InfeasibleError: if memory exceeds the device (rule 9).
    """
    _check_samples(plan, batch)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    for index, program in enumerate(plan.programs):
        samples = batch.select(program.assignments.sample)
        tree = program.tree(batch) if trees is None else trees[index]
        tree.validate()
        rows = loss_rows(tree, samples)
        ranked = ProgramByRank.of(index, program, tree, plan.num_ranks)
        _check_coverage(ranked)
        _check_order(ranked)
        _check_block_table(ranked)
        _check_sizes(ranked)
        reads = block_reads(ranked)
        ops_by_stage = check_schedule(ranked, plan.parallel.pipeline_model_parallel_size)
        check_op_patterns(index, program, plan.parallel)
        for stage, ops in enumerate(ops_by_stage):
            check_lifetimes(ranked, reads, ops, stage)
        _check_head_tokens(ranked, rows, samples)
        check_memory(ranked, memory, memory_fraction)


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


def _check_coverage(ranked: ProgramByRank) -> None:
    """Rule 2: each rank computes each token of its samples' paths once, and nothing else."""
    tree, table = ranked.tree, ranked.segments
    bad = (table.node < 1) | (table.node >= tree.num_nodes) | (table.num_tokens < 1)
    if bad.any():
        where = ranked.where(int(table.rank[bad].min()))
        raise PlanError(f"rule 2: {where}: a segment names no tokens of the tree")
    ranks, nodes = nodes_of_ranks(tree, ranked.program.assignments.rank)
    rank, node = table.rank[ranked.by_token], table.node[ranked.by_token]
    start = table.start_depth[ranked.by_token]
    end = start + table.num_tokens[ranked.by_token]
    opens = np.full(len(rank), True)
    opens[1:] = (rank[1:] != rank[:-1]) | (node[1:] != node[:-1])
    closes = np.append(opens[1:], True)[: len(opens)]
    wrong = opens & (start != tree.start_depth[node])
    wrong |= closes & (end != tree.end_depth[node])
    wrong[1:] |= ~opens[1:] & (start[1:] != end[:-1])
    computed = rank[opens] * tree.num_nodes + node[opens]
    different = np.setxor1d(computed, ranks * tree.num_nodes + nodes) // tree.num_nodes
    refuted = np.concatenate([rank[wrong], different])
    if len(refuted):
        worst = int(refuted.min())
        mine, needed = rank == worst, nodes[ranks == worst]
        raise PlanError(
            f"rule 2: {ranked.where(worst)}: segments cover {int((end - start)[mine].sum())} "
            f"tokens of {len(np.unique(node[mine]))} nodes; its samples need "
            f"{int(tree.num_tokens[needed].sum())} tokens of {len(needed)} nodes, each once"
        )


def _check_order(ranked: ProgramByRank) -> None:
    """Rule 3: micro-batches are numbered and hold their segments in depth-first pre-order."""
    segments, table = ranked.segments, ranked.micro_batches
    later = np.full(len(segments), True)
    for column in (segments.start_depth, segments.node, segments.micro_batch, segments.rank):
        later[1:] = (column[1:] > column[:-1]) | ((column[1:] == column[:-1]) & later[1:])
    _refuse(ranked, 3, segments.rank[~later], "segments are not in depth-first pre-order")
    numbers = np.arange(len(table)) - ranked.first_micro_batch[table.rank]
    unnumbered = table.rank[table.micro_batch != numbers]
    _refuse(ranked, 3, unnumbered, "micro-batches are not numbered 0, 1, ... in order")
    unknown = ~ranked.is_known(segments.rank, segments.micro_batch)
    _refuse(ranked, 3, segments.rank[unknown], "a segment's micro-batch is not in the table")
    strange = table.rank[~np.isin(table.activation, ACTIVATIONS)]
    _refuse(ranked, 3, strange, f"activation must be one of {', '.join(ACTIVATIONS)}")


def _refuse(ranked: ProgramByRank, rule: int, ranks: IntArray, what: str) -> None:
    if len(ranks):
        raise PlanError(f"rule {rule}: {ranked.where(int(ranks.min()))}: {what}")


def _check_block_table(ranked: ProgramByRank) -> None:
    """Rule 6, what it takes for granted: numbers occur once, rows exist and are cached once."""
    blocks = ranked.blocks
    by_number = np.lexsort((blocks.block, blocks.rank))
    rank, number = blocks.rank[by_number], blocks.block[by_number]
    twice = (rank[1:] == rank[:-1]) & (number[1:] == number[:-1])
    _refuse(ranked, 6, rank[1:][twice], "a block number occurs twice")
    unknown = ~ranked.is_known(blocks.rank, blocks.micro_batch)
    _refuse(ranked, 6, blocks.rank[unknown], "a block's micro-batch is not in the table")
    owner = ranked.first_micro_batch[blocks.rank] + blocks.micro_batch
    size = ranked.micro_batches.num_tokens[owner]
    start, end = blocks.start_row, blocks.start_row + blocks.num_tokens
    bad = (start < 0) | (blocks.num_tokens < 1) | (end > size)
    bad |= blocks.allocated_tokens < blocks.num_tokens
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise PlanError(
            f"rule 6: {ranked.where(int(blocks.rank[row]))}: block {int(blocks.block[row])} holds "
            f"rows [{int(start[row])}, {int(end[row])}) of the {int(size[row])} of its "
            f"micro-batch in {int(blocks.allocated_tokens[row])} allocated tokens"
        )
    order = np.lexsort((start, owner))
    same = np.diff(owner[order]) == 0
    overlaps = same & (start[order][1:] < end[order][:-1])
    _refuse(ranked, 6, blocks.rank[order][1:][overlaps], "two blocks hold the same row")


def _check_sizes(ranked: ProgramByRank) -> None:
    """Rule 3: micro-batches have the stated tokens and visible pairs."""
    segments, table = ranked.segments, ranked.micro_batches
    tokens, pairs = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    np.add.at(tokens, ranked.segment_micro_batch, segments.num_tokens)
    seen = visible_pairs(segments.start_depth, segments.num_tokens)
    np.add.at(pairs, ranked.segment_micro_batch, seen)
    bad = np.flatnonzero((tokens != table.num_tokens) | (pairs != table.pairs))
    if len(bad):
        at = int(bad[0])
        raise PlanError(
            f"rule 3: {ranked.where(int(table.rank[at]))}: micro-batch "
            f"{int(table.micro_batch[at])} has {int(tokens[at])} tokens and {int(pairs[at])} "
            f"pairs, the table says {int(table.num_tokens[at])} and {int(table.pairs[at])}"
        )


def _check_head_tokens(ranked: ProgramByRank, rows: LossRows, samples: SampleBatch) -> None:
    """Rule 8: the table states the distinct positions whose logits are computed."""
    tree, segments, table = ranked.tree, ranked.segments, ranked.micro_batches
    predicting = rows.by_rank(ranked.program.assignments.rank, tree)
    start = tree.token_start[segments.node] + segments.start_depth - tree.start_depth[segments.node]
    count = predicting.count(segments.rank, start, start + segments.num_tokens)
    found = np.zeros(len(table), np.int64)
    np.add.at(found, ranked.segment_micro_batch, count)
    bad = np.flatnonzero(found != table.head_tokens)
    if len(bad):
        at = int(bad[0])
        raise PlanError(
            f"rule 8: {ranked.where(int(table.rank[at]))}: micro-batch "
            f"{int(table.micro_batch[at])} predicts from {int(found[at])} positions, the table "
            f"says {int(table.head_tokens[at])} head_tokens"
        )
    num_edges = rows.num_edges(np.full(samples.num_samples, True))
    if num_edges != samples.loss_tokens:
        raise PlanError(
            f"rule 8: program {ranked.index} owns {num_edges} loss edges for "
            f"{samples.loss_tokens} trained tokens"
        )
