"""An independent check of a plan: it trusts no policy.

Each rule has a number; docs/plan-format.md lists them. A plan that passes computes every needed
token once per rank, reads nothing before it is written or after it is released, runs every
backward before its ancestors' and cannot deadlock, neither between the stages of a rank nor between
ranks that share experts; and what it states of itself is true.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from psrl.core.cost.cluster import check_layout
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import ConfigError, PlanError
from psrl.core.samples.sample import SampleBatch
from psrl.core.tree.loss_rows import loss_rows
from psrl.core.tree.prefix_tree import PrefixTree

from .check_bound import check_bounds, tree_of_all
from .check_claims import check_predicted, check_times
from .check_ops import check_lifetimes, check_memory, check_op_patterns, check_schedule
from .check_reads import ProgramByRank, block_reads
from .check_tables import (
    check_activations,
    check_block_table,
    check_coverage,
    check_head_tokens,
    check_order,
    check_sizes,
)
from .plan import PHASES, Plan, Program

_MOST_TOKENS = 2**31
"""No granularity is larger: offsets in a batch are 32-bit numbers on disk."""


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
    try:
        check_layout(plan.model, plan.cluster, plan.parallel)
    except ConfigError as error:
        raise PlanError(f"rule 11: {error.message}", error.hint) from None
    check_phases(plan, batch)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    shared, peak_bytes = [], 0
    for index, program in enumerate(plan.programs):
        _check_sharing(index, program)
        samples = batch.select(program.assignments.sample)
        tree = program.tree(batch) if trees is None else trees[index]
        tree.validate()
        rows = loss_rows(tree, samples)
        ranked = ProgramByRank.of(index, program, tree, plan.num_ranks)
        check_coverage(ranked)
        check_order(ranked)
        check_activations(ranked, plan.parallel.recompute)
        check_sizes(ranked)
        check_head_tokens(ranked, rows, samples)
        check_times(ranked, plan)
        check_block_table(ranked)
        reads = block_reads(ranked)
        ops_by_stage = check_schedule(ranked, plan.parallel.pipeline_model_parallel_size)
        check_op_patterns(index, program, plan.parallel)
        for stage, ops in enumerate(ops_by_stage):
            check_lifetimes(ranked, reads, ops, stage)
        shared.append(tree_of_all(program, samples, tree))
        peak_bytes = max(peak_bytes, check_memory(ranked, memory, memory_fraction))
    check_predicted(plan, shared, peak_bytes)
    check_bounds(plan, batch, shared)


def check_phases(plan: Plan, batch: SampleBatch) -> None:
    """Rule 1: every phase trains every sample on one rank, an update only its mini-batch."""
    if batch.num_samples and not plan.programs:
        raise PlanError(f"rule 1: no program for the {batch.num_samples} samples")
    if plan.phases != tuple(p for p in PHASES if p in plan.phases):
        raise PlanError(
            f"rule 1: the plan states the phases {_named(plan.phases)}, which are not some of "
            f"{_named(PHASES)} in this order, each once"
        )
    for index, program in enumerate(plan.programs):
        _check_program(plan, index, program, batch)
    for phase in plan.phases:
        running = [i for i, p in enumerate(plan.programs) if phase in p.phases]
        if not running:
            raise PlanError(f"rule 1: the plan states the phase {phase}, but no program runs it")
        if phase != "update" and len(running) > 1:
            raise PlanError(
                f"rule 1: phase {phase} is run by the programs {_named(map(str, running))}; a "
                "phase without backwards is one program"
            )
        steps = [plan.programs[i].mini_batch for i in running]
        if any(a >= b for a, b in pairwise(steps)):
            raise PlanError(
                f"rule 1: phase {phase} runs the mini-batches {_named(map(str, steps))}; optimizer "
                "steps follow one another in ascending order, each once"
            )
        chosen = np.concatenate([plan.programs[i].assignments.sample for i in running])
        times = np.bincount(chosen, minlength=batch.num_samples)
        if (times != 1).any():
            raise PlanError(
                f"rule 1: phase {phase} covers {int((times > 0).sum())} of {batch.num_samples} "
                f"samples, {int((times > 1).sum())} of them more than once"
            )


def _check_program(plan: Plan, index: int, program: Program, batch: SampleBatch) -> None:
    known = tuple(p for p in PHASES if p in program.phases and p in plan.phases)
    if not program.phases or program.phases != known:
        raise PlanError(
            f"rule 1: program {index} runs in {_named(program.phases)}, which are not some of the "
            f"plan's phases {_named(plan.phases)} in this order, each once"
        )
    if program.is_update != (program.phases == ("update",)):
        raise PlanError(
            f"rule 1: program {index} {'has' if program.is_update else 'has no'} backwards but "
            f"runs in {_named(program.phases)}"
        )
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
    if not program.is_update:
        if program.mini_batch != -1:
            raise PlanError(
                f"rule 1: program {index} has no backwards but mini-batch {program.mini_batch}; "
                "forward-only programs have -1"
            )
        return
    if batch.num_samples and not len(chosen):
        raise PlanError(
            f"rule 1: program {index} trains mini-batch {program.mini_batch} but has no samples"
        )
    foreign = batch.mini_batch[chosen] != program.mini_batch
    if foreign.any():
        raise PlanError(
            f"rule 1: program {index} trains mini-batch {program.mini_batch} but holds "
            f"{int(foreign.sum())} samples of other mini-batches"
        )


def _check_sharing(index: int, program: Program) -> None:
    """Rule 2, what it takes for granted: prefixes are shared and cached in whole blocks."""
    for name in ("granularity_tokens", "block_tokens"):
        value = getattr(program, name)
        if not 1 <= value <= _MOST_TOKENS:
            raise PlanError(f"rule 2: program {index}: {name} is {value}, not in 1..{_MOST_TOKENS}")


def _named(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"
