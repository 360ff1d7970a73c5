"""Why a plan is faster than a baseline: its speed-up as a product, and what bounds it.

docs/metrics.md has the formulas.
"""

from dataclasses import dataclass

import numpy as np

from psrl.core.cost.arithmetic import least_time_s, model_flops, phase_work
from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.errors import PlanError
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.events import Events
from psrl.core.samples.sample import SampleBatch


def speedup_factors(
    baseline_plan: Plan,
    baseline_events: Events,
    plan: Plan,
    events: Events,
) -> dict[str, dict[str, float]]:
    """Split the makespan ratio of each phase into cuts, placement and sharing; exact as a product.

    Sharing is the ratio of total compute time, placement of the slowest rank's over the mean,
    cuts of the makespan over the slowest rank's compute time: bubbles, waits and reductions.

    Returns:
        phase -> speedup, cuts, placement, sharing for the phases that both ran.

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
    factors: dict[str, dict[str, float]] = {}
    for phase in phases:
        before = _times_s(baseline_events, phase, plan.num_ranks)
        after = _times_s(events, phase, plan.num_ranks)
        factors[phase] = {
            "speedup": before.makespan_s / after.makespan_s,
            "cuts": before.wait_ratio / after.wait_ratio,
            "placement": before.imbalance / after.imbalance,
            "sharing": before.total_s / after.total_s,
        }
    return factors


def least_work(plan: Plan, batch: SampleBatch) -> dict[str, dict[str, float]]:
    """What the phases of a plan must compute: everything shared, or nothing if the plan does not.

    The ratio of two `flops` is what less arithmetic allows a speed-up to be; a baseline's makespan
    over `least_s` is a bound that no plan of this work exceeds, for it includes the idle time of
    the baseline.

    Returns:
        phase -> flops of the model, and `least_time_s` as least_s.
    """
    costs = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    found = {}
    for phase in (p for p in PHASES if plan.phase_programs(p)):
        work = phase_work(batch, phase, _shares(plan, batch, phase))
        found[phase] = {
            "flops": model_flops(plan.model, work, phase),
            "least_s": least_time_s(costs, plan.parallel, work, phase),
        }
    return found


def _shares(plan: Plan, batch: SampleBatch, phase: str) -> bool:
    programs = plan.phase_programs(phase)
    logical = sum(int(batch.num_tokens[p.assignments.sample].sum()) for p in programs)
    return sum(p.unique_tokens for p in programs) < logical


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
