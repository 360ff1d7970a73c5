"""Why a plan is faster than a baseline: its speed-up as a product, and the bounds of sharing.

docs/metrics.md has the formulas.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.core.errors import PlanError
from psrl.core.plan.packing import visible_pairs
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.events import Events
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree


def speedup_factors(
    baseline_plan: Plan,
    baseline_events: Events,
    plan: Plan,
    events: Events,
    batch: SampleBatch,
) -> dict[str, dict[str, Any]]:
    """Split the makespan ratio of each phase into cuts, placement and sharing; exact as a product.

    Sharing is the ratio of total compute time, placement of the slowest rank's over the mean,
    cuts of the makespan over the slowest rank's compute time: bubbles, waits and reductions.

    Returns:
        phase -> speedup, cuts, placement, sharing for the phases that both ran, and
        "bounds" -> phase -> token_bound, pair_bound.

    Raises:
        PlanError: if the plans run on different layouts, or have no phase in common.
    """
    if _sizes(plan) != _sizes(baseline_plan):
        raise PlanError(
            f"tensor, pipeline and data parallel sizes {_sizes(plan)} of {plan.policy} differ "
            f"from {_sizes(baseline_plan)} of {baseline_plan.policy}",
            "compare plans of one layout",
        )
    common = set(events.phase.tolist()) & set(baseline_events.phase.tolist())
    if not common:
        raise PlanError(f"{plan.policy} and {baseline_plan.policy} ran no phase in common")
    phases = [phase for phase in PHASES if phase in common]
    factors: dict[str, dict[str, Any]] = {}
    for phase in phases:
        before = _times_s(baseline_events, phase, plan.num_ranks)
        after = _times_s(events, phase, plan.num_ranks)
        factors[phase] = {
            "speedup": before.makespan_s / after.makespan_s,
            "cuts": before.wait_ratio / after.wait_ratio,
            "placement": before.imbalance / after.imbalance,
            "sharing": before.total_s / after.total_s,
        }
    return {**factors, "bounds": {phase: sharing_bounds(batch, phase) for phase in phases}}


def _sizes(plan: Plan) -> tuple[int, int, int]:
    parallel = plan.parallel
    return (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
    )


@dataclass(frozen=True)
class _PhaseTimes:
    makespan_s: float
    slowest_s: float
    total_s: float
    num_ranks: int

    @property
    def wait_ratio(self) -> float:
        return self.makespan_s / self.slowest_s

    @property
    def imbalance(self) -> float:
        return self.slowest_s / (self.total_s / self.num_ranks)


def _times_s(events: Events, phase: str, num_ranks: int) -> _PhaseTimes:
    """Makespan, and compute time of all ranks and of the slowest rank.

    An update's ranks meet after every program, so the slowest rank is taken program by program.
    """
    mine = events.where(events.phase == phase)
    compute = mine.where(mine.micro_batch >= 0)
    if not (compute.end_s > compute.start_s).any():
        raise PlanError(f"phase {phase} took no time")
    step = compute.program if phase == "update" else np.zeros_like(compute.program)
    steps, step = np.unique(step, return_inverse=True)
    busy_s = np.zeros((len(steps), num_ranks))
    np.add.at(busy_s, (step, compute.rank), compute.end_s - compute.start_s)
    return _PhaseTimes(
        makespan_s=float(mine.end_s.max()),
        slowest_s=float(busy_s.max(axis=1).sum()),
        total_s=float(busy_s.sum()),
        num_ranks=num_ranks,
    )


def sharing_bounds(batch: SampleBatch, phase: str) -> dict[str, float]:
    """How much faster a phase can get by sharing alone, counting tokens or visible pairs.

    An update shares inside a mini-batch only: the weights change between two of them.
    """
    share_key = batch.mini_batch if phase == "update" else np.zeros_like(batch.mini_batch)
    shared = build_prefix_tree(batch, share_key)
    dense = build_prefix_tree(batch, np.arange(batch.num_samples))
    return {
        "token_bound": _ratio(dense.num_tokens, shared.num_tokens),
        "pair_bound": _ratio(_pairs(dense), _pairs(shared)),
    }


def _pairs(tree: PrefixTree) -> IntArray:
    return visible_pairs(tree.start_depth, tree.num_tokens)


def _ratio(dense: IntArray, shared: IntArray) -> float:
    total = int(shared.sum())
    return int(dense.sum()) / total if total else 1.0
