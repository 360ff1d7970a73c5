"""Every metric, computed once, from a plan and its events; docs/metrics.md has the formulas."""

from typing import Any

import numpy as np

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.plan.plan_times import worker_times_s
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.core.tree.prefix_tree import build_prefix_tree

from .events import Events


def sharing_metrics(batch: SampleBatch) -> dict[str, Any]:
    """Tokens of a batch, distinct tokens, and the share of tokens matched to an earlier sample."""
    tree = build_prefix_tree(batch)
    return {
        "num_samples": batch.num_samples,
        "logical_tokens": tree.logical_tokens,
        "unique_tokens": tree.unique_tokens,
        "prefix_match_rate": tree.prefix_match_rate,
    }


def phase_metrics(
    events: Events, phase: str, parallel: ParallelConfig, logical_tokens: int, unique_tokens: int
) -> dict[str, Any]:
    """Time, balance and idle share of one phase; empty if the phase did not run.

    A bubble is the share of (rank, stage) time up to the makespan in which no op runs. A rank
    without any micro-batch is a worker too, idle all the time.
    """
    mine = events.where(events.phase == phase)
    compute = mine.where(mine.micro_batch >= 0)
    if not len(compute):
        return {}
    worker_s = _worker_times_s(compute, parallel.data_parallel_size)
    fastest, slowest = float(worker_s.min()), float(worker_s.max())
    makespan = float(mine.end_s.max())
    workers = parallel.data_parallel_size * parallel.pipeline_model_parallel_size
    busy = float((mine.end_s - mine.start_s).sum())
    forward = compute.where(compute.op == "forward")
    last_stage = forward.where(forward.stage == forward.stage.max())
    executed = int(last_stage.num_tokens.sum())
    return {
        "makespan_s": makespan,
        "worker_time_min_s": fastest,
        "worker_time_max_s": slowest,
        "worker_time_max_over_min": slowest / fastest if fastest else float("inf"),
        "bubble_fraction": 1.0 - busy / (workers * makespan) if makespan else 0.0,
        "executed_tokens": executed,
        "logical_tokens_per_s": logical_tokens / makespan if makespan else 0.0,
        "unique_tokens_per_s": unique_tokens / makespan if makespan else 0.0,
        "peak_memory_bytes": int(mine.total_bytes.max()),
        "peak_kv_bytes": int((mine.kv_bytes + mine.kv_gradient_bytes).max()),
    }


def _worker_times_s(compute: Events, num_ranks: int) -> FloatArray:
    """[num_ranks] `worker_times_s` of the ops that ran."""
    programs, program = np.unique(compute.program, return_inverse=True)
    first = np.full((len(programs), num_ranks), np.inf)
    last = np.zeros((len(programs), num_ranks))
    np.minimum.at(first, (program, compute.rank), compute.start_s)
    np.maximum.at(last, (program, compute.rank), compute.end_s)
    return worker_times_s(first, last)


def run_metrics(plan: Plan, batch: SampleBatch, events: Events) -> dict[str, Any]:
    """Summary of a run, per phase and over all phases; a pure function of its arguments."""
    sharing = sharing_metrics(batch)
    logical, unique = sharing["logical_tokens"], sharing["unique_tokens"]
    phases = {p: phase_metrics(events, p, plan.parallel, logical, unique) for p in PHASES}
    phases = {phase: metrics for phase, metrics in phases.items() if metrics}
    makespan = sum(m["makespan_s"] for m in phases.values())
    slowest = sum(m["worker_time_max_s"] for m in phases.values())
    fastest = sum(m["worker_time_min_s"] for m in phases.values())
    return {
        "policy": plan.policy,
        **sharing,
        "executed_tokens": sum(m["executed_tokens"] for m in phases.values()),
        "makespan_s": makespan,
        "worker_time_min_s": fastest,
        "worker_time_max_s": slowest,
        "worker_time_max_over_min": slowest / fastest if fastest else float("inf"),
        "bubble_fraction": _weighted(phases, "bubble_fraction"),
        "logical_tokens_per_s": logical * len(phases) / makespan if makespan else 0.0,
        "unique_tokens_per_s": unique * len(phases) / makespan if makespan else 0.0,
        "peak_memory_bytes": max((m["peak_memory_bytes"] for m in phases.values()), default=0),
        "peak_kv_bytes": max((m["peak_kv_bytes"] for m in phases.values()), default=0),
        "lower_bound_s": plan.predicted.get("lower_bound_s"),
        "gap": plan.predicted.get("gap"),
        "phases": phases,
    }


def _weighted(phases: dict[str, dict[str, Any]], name: str) -> float:
    """Mean of a per-phase share, weighted by the phases' makespans."""
    total = sum(m["makespan_s"] for m in phases.values())
    return sum(m[name] * m["makespan_s"] for m in phases.values()) / total if total else 0.0
