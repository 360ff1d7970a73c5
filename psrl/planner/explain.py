"""Why a plan is what it is: balance, duplicated tokens, idle pipeline, memory, bound."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from psrl.core.cost_model import MemoryModel, RooflineCostModel
from psrl.core.plan import Plan, Program
from psrl.core.prefix_tree import PrefixTree
from psrl.core.sample import FloatArray, SampleBatch
from psrl.core.schedule import stage_ops

from .assemble import message_durations, stage_durations
from .critical_path import CriticalPath, critical_path
from .peak_memory import peak_bytes

_GIB = 2**30
# Ranks listed one by one; of more, only the slowest and the fastest.
_MAX_LISTED = 8


@dataclass(frozen=True)
class RankReport:
    """One rank in one program.

    Attributes:
        duplicated_tokens: its share of the tokens that several ranks compute; the ranks' sum is
            what the program computes beyond one copy.
        idle_share: share of its last pipeline stage's time without an op.
    """

    rank: int
    time_s: float
    num_samples: int
    num_tokens: int
    duplicated_tokens: float
    num_micro_batches: int
    num_dropped: int
    idle_share: float
    peak_bytes: int


@dataclass(frozen=True)
class ProgramReport:
    """One program of a plan: all ranks, and what decides the slowest one's time."""

    phases: tuple[str, ...]
    mini_batch: int
    unique_tokens: int
    bound_source: str
    ranks: tuple[RankReport, ...]
    critical: CriticalPath

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
    tokens = _tokens_by_rank(program, tree, plan.num_ranks)
    copies = np.maximum((tokens > 0).sum(axis=0), 1)
    duplicated = (tokens * (1.0 - 1.0 / copies)).sum(axis=1)
    ranks, paths = [], []
    for rank in range(plan.num_ranks):
        mine = program.on_rank(rank)
        path, busy_s = _timing(plan, mine)
        paths.append(path)
        ranks.append(
            RankReport(
                rank=rank,
                time_s=path.time_s,
                num_samples=len(mine.assignments),
                num_tokens=mine.unique_tokens,
                duplicated_tokens=float(duplicated[rank]),
                num_micro_batches=len(mine.micro_batches),
                num_dropped=int((mine.micro_batches.activation == "drop").sum()),
                idle_share=1.0 - busy_s / path.time_s if path.time_s else 0.0,
                peak_bytes=peak_bytes(mine, tree, memory),
            )
        )
    sources = plan.options.get("bound", [])
    return ProgramReport(
        phases=program.phases,
        mini_batch=program.mini_batch,
        unique_tokens=int(tree.num_tokens[tokens.any(axis=0)].sum()),
        bound_source=sources[index] if index < len(sources) else "not stated",
        ranks=tuple(ranks),
        critical=max(paths, key=lambda path: path.time_s),
    )


def _tokens_by_rank(program: Program, tree: PrefixTree, num_ranks: int) -> FloatArray:
    """[D, V] tokens of each node that each rank computes."""
    segments = program.segments
    tokens = np.zeros((num_ranks, tree.num_nodes))
    np.add.at(tokens, (segments.rank, segments.node), segments.num_tokens)
    return tokens


def _timing(plan: Plan, mine: Program) -> tuple[CriticalPath, float]:
    """The longest path through a rank's ops, and how long its last stage works."""
    cost = RooflineCostModel(plan.model, plan.cluster, plan.parallel)
    num_stages = plan.parallel.pipeline_model_parallel_size
    durations = stage_durations(cost, mine.micro_batches, num_stages)
    message_s = message_durations(cost, mine.micro_batches)
    ops = mine.ops()
    path = critical_path(
        [stage_ops(ops, num_stages, stage) for stage in range(num_stages)],
        lambda stage, op: durations[stage][op.kind][op.micro_batch],
        message_s.__getitem__,
    )
    return path, sum(durations[-1][op.kind][op.micro_batch] for op in ops)


def format_explanation(plan: Plan, reports: list[ProgramReport]) -> str:
    """Text for people."""
    predicted = plan.predicted
    lines = [
        f"policy {plan.policy}: predicted {predicted['makespan_s']:.3f} s, no plan is below "
        f"{predicted['lower_bound_s']:.3f} s (gap {predicted['gap']:.2%}, of which a better "
        f"placement could gain at most {predicted['placement_gap']:.2%})"
    ]
    for report in reports:
        lines += ["", *_format_program(plan, report)]
    return "\n".join(lines)


def _format_program(plan: Plan, report: ProgramReport) -> list[str]:
    ranks = sorted(report.ranks, key=lambda r: (-r.time_s, r.rank))
    slowest, fastest = ranks[0], ranks[-1]
    what = f"mini-batch {report.mini_batch}" if report.mini_batch >= 0 else "whole batch"
    mean_s = sum(r.time_s for r in ranks) / len(ranks)
    duplicated = sum(r.duplicated_tokens for r in ranks)
    limit = plan.cluster.device.memory_bytes * plan.options.get("memory_fraction", 1.0)
    fullest = max(ranks, key=lambda r: r.peak_bytes)
    critical = report.critical
    shares = {**critical.op_s, "message": critical.message_s}
    where = ", ".join(
        f"{kind} {seconds / critical.time_s:.0%}" for kind, seconds in shares.items() if seconds
    )
    lines = [
        f"{' + '.join(report.phases)} ({what})",
        f"  bound       {report.bound_source}",
        f"  balance     slowest rank {slowest.time_s:.3f} s, {_ratio(slowest.time_s, mean_s)} x "
        f"the mean, {_ratio(slowest.time_s, fastest.time_s)} x the fastest",
        f"  duplicated  {duplicated:,.0f} tokens beyond one copy, "
        f"{duplicated / max(report.unique_tokens, 1):.2%} of the {report.unique_tokens:,} unique",
        f"  bubbles     {slowest.idle_share:.1%} of the slowest rank's last stage is idle",
        f"  time        {where or 'none'} of the slowest rank's critical path, "
        f"{len(critical.steps)} ops",
        f"  memory      {fullest.peak_bytes / _GIB:.2f} GiB of {limit / _GIB:.2f} GiB on rank "
        f"{fullest.rank}, {sum(r.num_dropped for r in ranks)} micro-batches drop activations",
        f"  {'rank':>6}{'time':>11}{'samples':>9}{'tokens':>12}{'duplicated':>12}"
        f"{'micro-batches':>15}{'idle':>7}{'peak':>12}",
    ]
    listed = ranks if len(ranks) <= _MAX_LISTED else [*ranks[:4], *ranks[-4:]]
    for r in listed:
        lines.append(
            f"  {r.rank:>6}{r.time_s:>9.3f} s{r.num_samples:>9,}{r.num_tokens:>12,}"
            f"{r.duplicated_tokens:>12,.0f}{r.num_micro_batches:>15,}{r.idle_share:>7.1%}"
            f"{r.peak_bytes / _GIB:>8.2f} GiB"
        )
    if len(ranks) > len(listed):
        lines.append(f"  ({len(ranks) - len(listed)} ranks between the fourth and the last four)")
    return lines


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "inf"
