"""From a problem and a policy's name to a checked plan with its predicted metrics."""

import numpy as np

from psrl.core.check_plan import check_plan
from psrl.core.errors import ConfigError, suggest
from psrl.core.plan import Plan

from .assemble import BuiltProgram
from .policies import POLICIES
from .problem import PlanningProblem, ProgramProblem


def make_plan(problem: PlanningProblem, policy: str) -> Plan:
    """Decide one iteration by a named policy; the same input gives the same bytes.

    Raises:
        ConfigError: if there is no such policy.
        InfeasibleError: if the plan does not fit the device memory, with the numbers.
    """
    if policy not in POLICIES:
        raise ConfigError(
            f"unknown policy {policy!r}.{suggest(policy, list(POLICIES))}",
            f"known policies: {', '.join(POLICIES)}",
        )
    targets = list(problem.programs())
    built = [POLICIES[policy](target).build() for target in targets]
    setup = problem.setup
    plan = Plan(
        trace_hash=problem.trace_hash,
        iteration=problem.iteration,
        policy=policy,
        options=setup.planning.model_dump(),
        model=setup.model,
        cluster=setup.cluster,
        parallel=setup.parallel,
        programs=tuple(b.program for b in built),
        predicted=_predicted(problem, targets, built),
    )
    check_plan(plan, problem.batch, setup.planning.memory_fraction)
    return plan


def _predicted(
    problem: PlanningProblem, targets: list[ProgramProblem], built: list[BuiltProgram]
) -> dict[str, float]:
    """Metrics of docs/metrics.md that the planner knows; times include all planned phases."""
    pairs = list(zip(targets, built, strict=True))
    makespan_s = sum(b.time_s + t.step_s for t, b in pairs)
    lower_bound_s = sum(t.rank_cost_bound_s + t.step_s for t, b in pairs)
    worker_time_max_s = worker_time_min_s = 0.0
    by_phase: dict[str, float] = {}
    for phase in problem.phases:
        running = [(t, b) for t, b in pairs if phase in t.phases]
        worker_s = np.sum([[r.time_s for r in b.ranks] for _, b in running], axis=0)
        worker_time_max_s += float(worker_s.max())
        worker_time_min_s += float(worker_s.min())
        by_phase[f"{phase}_s"] = sum(max(r.time_s for r in b.ranks) + t.step_s for t, b in running)
    unique_tokens = sum(t.tree.unique_tokens for t in targets)
    executed_tokens = sum(b.program.unique_tokens for b in built)
    return {
        "makespan_s": makespan_s,
        **by_phase,
        "worker_time_max_s": worker_time_max_s,
        "worker_time_min_s": worker_time_min_s,
        "lower_bound_s": lower_bound_s,
        "gap": makespan_s / lower_bound_s - 1.0 if lower_bound_s else 0.0,
        "placement_gap": _placement_gap(pairs),
        "executed_tokens": float(executed_tokens),
        "duplicated_tokens": float(executed_tokens - unique_tokens),
        "num_micro_batches": float(sum(len(b.program.micro_batches) for b in built)),
        "peak_memory_bytes": float(max(r.peak_bytes for b in built for r in b.ranks)),
    }


def _placement_gap(pairs: list[tuple[ProgramProblem, BuiltProgram]]) -> float:
    """Work of the slowest ranks over its lower bound, without pipeline and fixed costs."""
    bound = sum(t.rank_cost_bound_s for t, _ in pairs)
    return sum(b.work_s for _, b in pairs) / bound - 1.0 if bound else 0.0
