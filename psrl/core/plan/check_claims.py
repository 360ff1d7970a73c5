"""The checks of `check_plan` on what a plan states of itself: times, sizes, peak memory, bound."""

import math
from collections.abc import Sequence

import numpy as np

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.unit_costs import unit_costs
from psrl.core.errors import PlanError
from psrl.core.tree.prefix_tree import PrefixTree

from .check_reads import ProgramByRank
from .micro_batch_time import micro_batch_times
from .plan import Plan
from .plan_times import predicted_times

RELATIVE_TOLERANCE = 1e-9
"""Stated and computed times agree up to rounding, which differs between processors."""

_OF_THE_BOUND = ("lower_bound_s", "gap", "placement_gap")


def check_times(ranked: ProgramByRank, plan: Plan) -> None:
    """Rule 12: micro-batches take the time that the plan's cost model says."""
    cost = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    table = ranked.micro_batches
    sizes = (table.num_tokens, table.pairs, table.head_tokens, table.activation)
    times = zip(("forward_s", "backward_s"), micro_batch_times(cost, *sizes), strict=True)
    for name, found in times:
        stated = getattr(table, name)
        # Written so that NaN is wrong too.
        wrong = np.flatnonzero(~(np.abs(stated - found) <= RELATIVE_TOLERANCE * np.abs(found)))
        if len(wrong):
            row = int(wrong[0])
            raise PlanError(
                f"rule 12: {ranked.where(int(table.rank[row]))}: micro-batch "
                f"{int(table.micro_batch[row])} states {name} {float(stated[row])!r}, the plan's "
                f"cost model says {float(found[row])!r}"
            )


def check_predicted(plan: Plan, trees: Sequence[PrefixTree], peak_bytes: int) -> None:
    """Rule 13: the predicted metrics are all there, and true; or there are none.

    Args:
        trees: of each program, where all samples share.
        peak_bytes: most bytes on a device.
    """
    if not plan.predicted:
        return
    expected = predicted_times(plan) | predicted_sizes(plan, trees, peak_bytes)
    known = {*expected, *_OF_THE_BOUND}
    for what, names in (
        ("lacks", known - plan.predicted.keys()),
        ("has the unknown", plan.predicted.keys() - known),
    ):
        if names:
            raise PlanError(f"rule 13: predicted {what} {', '.join(sorted(names))}")
    for name, value in plan.predicted.items():
        # A gap of nothing may be rounded below it.
        if not (math.isfinite(value) and value >= -RELATIVE_TOLERANCE):
            raise PlanError(f"rule 13: predicted.{name} is {value}, not a number from 0 on")
    bound_s = plan.predicted["lower_bound_s"]
    expected["gap"] = plan.predicted["makespan_s"] / bound_s - 1.0 if bound_s else 0.0
    expected["placement_gap"] = _placement_gap(plan)
    for name, found in expected.items():
        stated = plan.predicted[name]
        # A gap is a small difference of large numbers.
        scale = max(abs(found), 1.0) if name in _OF_THE_BOUND else abs(found)
        if not abs(stated - found) <= RELATIVE_TOLERANCE * scale:
            raise PlanError(f"rule 13: predicted.{name} is {stated!r}, the plan has {found!r}")


def _placement_gap(plan: Plan) -> float:
    """Work of the most loaded ranks over its lower bound, minus 1; without fixed costs."""
    cost = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    work_s = bound_s = 0.0
    for program in plan.programs:
        recompute = plan.parallel.recompute == "full"
        unit = unit_costs(cost, len(program.phases), program.is_update, recompute)
        table, of_rank = program.micro_batches, np.zeros(plan.num_ranks)
        of_row = unit.token_s * table.num_tokens + unit.pair_s * table.pairs
        np.add.at(of_rank, table.rank, of_row + unit.head_s * table.head_tokens)
        work_s += float(of_rank.max())
        bound_s += 0.0 if program.bound is None else program.bound.limit_s
    return work_s / bound_s - 1.0 if bound_s else 0.0


def predicted_sizes(plan: Plan, trees: Sequence[PrefixTree], peak_bytes: int) -> dict[str, float]:
    """What the planner predicts beside times, from the plan (docs/metrics.md).

    Args:
        trees, peak_bytes: see `check_predicted`.
    """
    executed_tokens = sum(p.unique_tokens for p in plan.programs)
    return {
        "executed_tokens": float(executed_tokens),
        "duplicated_tokens": float(executed_tokens - sum(t.unique_tokens for t in trees)),
        "num_micro_batches": float(sum(len(p.micro_batches) for p in plan.programs)),
        "peak_memory_bytes": float(peak_bytes),
    }
