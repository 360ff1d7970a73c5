"""Why a plan is what it is: balance, duplicated tokens, idle pipeline, memory, bounds."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.cost_model import CostModel
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.bytes_over_ops import peak_bytes
from psrl.core.plan.plan import Plan, Program
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree
from psrl.planner.micro_batching.activations import (
    activation_bytes,
    layer_forward_s,
    least_repeated,
    lowest_peak,
)
from psrl.planner.micro_batching.built import op_times, timed_ops

from .critical_path import CriticalPath, critical_path


@dataclass(frozen=True)
class RankReport:
    """One rank in one program.

    Attributes:
        duplicated_tokens: its share of the tokens that are computed more than once, on several
            ranks or on one; the ranks' sum is what the program computes beyond one copy.
        idle_share: share of its last pipeline stage's time without an op.
    """

    rank: int
    time_s: float
    num_samples: int
    num_tokens: int
    duplicated_tokens: float
    num_micro_batches: int
    idle_share: float
    peak_bytes: int


@dataclass(frozen=True)
class ActivationReport:
    """What the slowest rank, and those in step with it, keep between forward and backward.

    Attributes:
        num_recompute, num_drop: micro-batches of all ranks that do not keep their activations.
        repeated_s: forward work that the slowest rank runs twice because of them.
        least_repeated_s: no choice that fits the memory repeats less, for this order of ops; None
            if none was found.
        peak_bytes, lowest_peak_bytes: with this choice, and with the leanest one.
    """

    num_recompute: int
    num_drop: int
    repeated_s: float
    least_repeated_s: float | None
    peak_bytes: int
    lowest_peak_bytes: int


@dataclass(frozen=True)
class ProgramReport:
    """One program of a plan: all ranks, and what decides the slowest one's time.

    Attributes:
        step_wait_s: how long steps last beyond the own work of the most loaded rank, in the group
            of the slowest rank; 0 where no ranks share experts.
    """

    phases: tuple[str, ...]
    mini_batch: int
    unique_tokens: int
    bound_source: str
    ranks: tuple[RankReport, ...]
    critical: CriticalPath
    step_wait_s: float
    activations: ActivationReport | None

    @property
    def slowest(self) -> RankReport:
        return max(self.ranks, key=lambda r: r.time_s)

    def as_json(self) -> dict[str, Any]:
        """Plain values, without the steps of the critical path."""
        return {
            "phases": list(self.phases),
            "mini_batch": self.mini_batch,
            "unique_tokens": self.unique_tokens,
            "bound_source": self.bound_source,
            "ranks": [asdict(r) for r in self.ranks],
            "critical_path": {**self.critical.op_s, "message": self.critical.message_s},
            "step_wait_s": self.step_wait_s,
            "activations": None if self.activations is None else asdict(self.activations),
        }


def explain(plan: Plan, batch: SampleBatch) -> list[ProgramReport]:
    """Reports of all programs of a plan.

    Args:
        batch: the iteration that the plan was made for.
    """
    return [_explain_program(plan, index, batch) for index in range(len(plan.programs))]


def _explain_program(plan: Plan, index: int, batch: SampleBatch) -> ProgramReport:
    program = plan.programs[index]
    tree = program.tree(batch)
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    shared = build_prefix_tree(batch.select(program.assignments.sample))
    tokens = _tokens_by_rank(program, tree, shared, plan.num_ranks)
    beyond_one = 1.0 - shared.num_tokens / np.maximum(tokens.sum(axis=0), 1.0)
    duplicated = (tokens * beyond_one).sum(axis=1)
    cost = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    size, ranks, groups = plan.parallel.coupled_ranks, [], []
    for first in range(0, plan.num_ranks, size):
        together = [program.on_rank(first + i) for i in range(min(size, plan.num_ranks - first))]
        group = _timed(cost, plan, together)
        groups.append(group)
        for rank, mine in enumerate(together, first):
            time_s = group.time_s
            ranks.append(
                RankReport(
                    rank=rank,
                    time_s=time_s,
                    num_samples=len(mine.assignments),
                    num_tokens=mine.unique_tokens,
                    duplicated_tokens=float(duplicated[rank]),
                    num_micro_batches=int((mine.micro_batches.num_tokens > 0).sum()),
                    idle_share=1.0 - group.busy_s / time_s if time_s else 0.0,
                    peak_bytes=peak_bytes(mine, tree, memory),
                )
            )
    slowest = max(groups, key=lambda group: group.time_s)
    return ProgramReport(
        phases=program.phases,
        mini_batch=program.mini_batch,
        unique_tokens=shared.unique_tokens,
        bound_source=program.bound.kind if program.bound is not None else "not stated",
        ranks=tuple(ranks),
        critical=slowest.path,
        step_wait_s=slowest.step_wait_s,
        activations=_activations(cost, plan, program, slowest.programs, tree),
    )


class _Group(NamedTuple):
    """Ranks in step, their time and critical path, and the work of their last stage."""

    programs: list[Program]
    time_s: float
    path: CriticalPath
    busy_s: float
    step_wait_s: float


def _activations(
    cost: CostModel, plan: Plan, program: Program, slowest: list[Program], tree: PrefixTree
) -> ActivationReport | None:
    """How good the choice of the slowest ranks is; None where all micro-batches keep all."""
    all_kinds, kinds = program.micro_batches.activation, slowest[0].micro_batches.activation
    if not program.is_update or (all_kinds == "keep").all() or not len(kinds):
        return None
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    sizes = activation_bytes(slowest, tree, memory)
    again_s = layer_forward_s(slowest, cost, plan.parallel.pipeline_model_parallel_size)
    limit = plan.cluster.device.memory_bytes * plan.options.memory_fraction
    # Full recompute of all layers is what the set-up demands, and the least that can be repeated.
    demanded = plan.parallel.recompute == "full"
    best = None if demanded else least_repeated(sizes, again_s, limit)
    least_s = None if best is None else best.bound_s
    return ActivationReport(
        num_recompute=int((all_kinds == "recompute").sum()),
        num_drop=int((all_kinds == "drop").sum()),
        repeated_s=float(again_s[kinds != "keep"].sum()),
        least_repeated_s=float(again_s.sum()) if demanded else least_s,
        peak_bytes=int(sizes.usage(kinds).max()),
        lowest_peak_bytes=int(sizes.usage(lowest_peak(sizes)).max()),
    )


def _tokens_by_rank(
    program: Program, tree: PrefixTree, shared: PrefixTree, num_ranks: int
) -> FloatArray:
    """[D, V] tokens of each node of `shared` that each rank computes, each as often as it does.

    Args:
        tree: of the program, which its segments refer to.
        shared: of the same samples, where all share.
    """
    segments = program.segments
    tokens = np.zeros((num_ranks, shared.num_nodes))
    rank, low = segments.rank, segments.start_depth
    high = low + segments.num_tokens
    # Any sample through a node has the node's tokens on its path, in both trees.
    node = shared.sample_node[tree.representative[segments.node]]
    while len(node):
        inside = np.minimum(high, shared.end_depth[node]) - np.maximum(
            low, shared.start_depth[node]
        )
        np.add.at(tokens, (rank, node), np.maximum(inside, 0))
        above = shared.start_depth[node] > low
        rank, low, high, node = rank[above], low[above], high[above], shared.parent[node[above]]
    return tokens


def _timed(cost: CostModel, plan: Plan, programs: list[Program]) -> _Group:
    """When ranks in step run, without the other ranks and programs."""
    ops = timed_ops(cost, programs, plan.parallel.pipeline_model_parallel_size)
    times, each = op_times(ops), len(programs[0].schedule)
    busy_s = float((times.end_s - times.start_s)[-1, :each].sum())
    own_s = ops.duration_s[-1].reshape(len(programs), each).sum(axis=1).max()
    path = critical_path(ops, times)
    return _Group(programs, times.last_s, path, busy_s, busy_s - float(own_s))
