"""Plans of an iteration of a trace: made by a policy, checked, explained."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psrl import planner
from psrl.core.plan import check_plan as plan_rules
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.config import Setup
from psrl.core.samples.trace import Trace
from psrl.planner import PlanningProblem

if TYPE_CHECKING:
    from psrl.planner.explanation.explain import ProgramReport


def planning_problem(
    trace: Trace, setup: Setup, iteration: int = 0, phases: Sequence[str] = PHASES
) -> PlanningProblem:
    """What a policy decides on: one iteration of a trace on a set-up.

    Args:
        phases: some of log_old_prob, reference, update.
    """
    batch = trace.iteration(iteration)
    return PlanningProblem(batch, trace.content_hash, iteration, setup, tuple(phases))


def make_plan(
    trace: Trace,
    setup: Setup,
    policy: str = "psrl",
    iteration: int = 0,
    phases: Sequence[str] = PHASES,
) -> Plan:
    """Decide placement, micro-batches, order and caching; the same input gives the same bytes.

    Args:
        policy: of docs/policies.md, or your own as module:function or file.py:function.

    Returns:
        A checked plan; `plan.predicted` has its times, lower bound and gap.

    Raises:
        ConfigError: if there is no such policy or phase.
        InfeasibleError: if the plan does not fit the device memory, with what would help.
    """
    return planner.make_plan(planning_problem(trace, setup, iteration, phases), policy)


def check_plan(plan: Plan, trace: Trace, memory_fraction: float | None = 1.0) -> None:
    """Check a plan by every rule of docs/plan-format.md, trusting no policy.

    Args:
        memory_fraction: share of the device memory that may be used; None leaves the limit out.

    Raises:
        PlanError: naming rule, program, rank and numbers of the first violation.
        InfeasibleError: if it does not fit the memory.
    """
    plan_rules.check_plan(plan, plan.batch_of(trace), memory_fraction)


def explain(plan: Plan, trace: Trace) -> list["ProgramReport"]:
    """Why a plan takes the time it does: balance, duplicated tokens, idle time, memory, bound."""
    return planner.explain(plan, plan.batch_of(trace))
