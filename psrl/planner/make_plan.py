"""From a problem and a policy's name to a checked plan with its predicted metrics."""

from dataclasses import replace
from typing import NamedTuple

from psrl.core.errors import InfeasibleError, PlanError
from psrl.core.plan.bound import Bound
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.plan.plan_times import predicted_times
from psrl.planner.micro_batching.built import BuiltProgram
from psrl.planner.policies.find_policy import find_policy
from psrl.planner.policies.policies import Policy

from .feasibility import smallest_changes
from .problem import PlanningProblem, ProgramProblem


def make_plan(problem: PlanningProblem, policy: str, advise: bool = True) -> Plan:
    """Decide one iteration by a named policy; the same input gives the same bytes.

    Args:
        policy: see `find_policy`.
        advise: where nothing fits, find the smallest changes that would (takes several plans).

    Raises:
        ConfigError: if there is no such policy.
        PlanError: if the policy's plan breaks a rule of `check_plan`.
        InfeasibleError: if the plan does not fit the device memory, with the numbers and the
            smallest changes that would help.
    """
    decide = find_policy(policy)
    decided = _decide(problem, decide)
    setup = problem.setup
    plan = Plan(
        trace_hash=problem.trace_hash,
        iteration=problem.iteration,
        policy=policy,
        options=setup.planning,
        phases=tuple(p for p in PHASES if p in problem.phases),
        model=setup.model,
        cluster=setup.cluster,
        parallel=setup.parallel,
        programs=tuple(replace(d.built.program, bound=d.bound) for d in decided),
        calibration=setup.calibration,
    )
    try:
        plan = replace(plan, predicted=_predicted(problem, plan, decided))
        check_plan(
            plan,
            problem.batch,
            setup.planning.memory_fraction,
            [d.built.ranks[0].placement.tree for d in decided],
        )
    except PlanError as error:
        raise PlanError(f"policy {policy!r} made a plan that breaks {error}") from None
    except InfeasibleError as error:
        if not advise:
            raise
        raise InfeasibleError(
            f"{_largest_need(problem, decided)}; first: {error.message}",
            smallest_changes(
                setup,
                _peak_bytes(decided),
                int(problem.batch.num_tokens.max()) if "update" in problem.phases else 0,
                lambda changed: _peak_bytes(_decide(replace(problem, setup=changed), decide)),
            ),
        ) from None
    return plan


class _Decided(NamedTuple):
    """A program, what was built for it and what no plan can beat."""

    subproblem: ProgramProblem
    built: BuiltProgram
    bound: Bound


def _decide(problem: PlanningProblem, policy: Policy) -> list[_Decided]:
    drafts = [policy(subproblem) for subproblem in problem.programs()]
    return [_Decided(d.placement.subproblem, d.build(), d.bound) for d in drafts]


def _peak_bytes(decided: list[_Decided]) -> int:
    return max(r.peak_bytes for d in decided for r in d.built.ranks)


def _largest_need(problem: PlanningProblem, decided: list[_Decided]) -> str:
    """Which rank needs most memory, and how much more than there is."""
    peaks = [[r.peak_bytes for r in d.built.ranks] for d in decided]
    program = max(range(len(peaks)), key=lambda i: max(peaks[i]))
    most, gib = max(peaks[program]), 2**30
    limit = problem.memory_limit_bytes
    return (
        f"program {program}, rank {peaks[program].index(most)} needs {most / gib:.2f} GiB at its "
        f"peak, {(most - limit) / gib:.2f} GiB more than the {limit / gib:.2f} GiB it may use"
    )


def _predicted(problem: PlanningProblem, plan: Plan, decided: list[_Decided]) -> dict[str, float]:
    """Metrics of docs/metrics.md that the planner knows; times include all planned phases."""
    times = predicted_times(plan, problem.cost_model)
    makespan_s = times["makespan_s"]
    lower_bound_s = sum(d.bound.limit_s + d.subproblem.step_s for d in decided)
    built = [d.built for d in decided]
    unique_tokens = sum(d.subproblem.tree.unique_tokens for d in decided)
    executed_tokens = sum(b.program.unique_tokens for b in built)
    bound_s = sum(d.bound.limit_s for d in decided)
    return {
        **times,
        "lower_bound_s": lower_bound_s,
        "gap": makespan_s / lower_bound_s - 1.0 if lower_bound_s else 0.0,
        # Work of the slowest ranks over its lower bound, without pipeline and fixed costs.
        "placement_gap": sum(b.work_s for b in built) / bound_s - 1.0 if bound_s else 0.0,
        "executed_tokens": float(executed_tokens),
        "duplicated_tokens": float(executed_tokens - unique_tokens),
        "num_micro_batches": float(sum(len(b.program.micro_batches) for b in built)),
        "peak_memory_bytes": float(_peak_bytes(decided)),
    }
