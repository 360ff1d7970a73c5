"""What a plan's predicted time is made of, and how its cuts would change without each part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.cost_model import RooflineCostModel
from psrl.core.cost.layer_time import Term
from psrl.core.plan.clock import ProgramTimes, Reduction, phase_times
from psrl.core.plan.plan import Plan, Program
from psrl.core.plan.plan_times import plan_ops
from psrl.core.run.config import PlanningConfig, Setup
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.planner.micro_batching.all_ranks import best_cuts_of
from psrl.planner.placement.placement import Placement
from psrl.planner.problem import PlanningProblem

_OF_CUTS: tuple[Term, ...] = (
    *("linear", "weights", "accumulation", "attention", "elementwise", "head"),
    *("tensor_parallel", "expert_exchange", "host", "message"),
)
BUBBLES = "bubbles"
"""Time of the last stage without an op that is left when messages are free."""


@dataclass(frozen=True)
class ProgramTerms:
    """What one run of a program takes, by term, on the rank that ends last.

    Attributes:
        phases: each runs the program once.
        seconds: on its last stage, or where ranks share experts on the slowest of each step;
            they add up to the program's time.
        num_micro_batches: of that rank.
        without: the same if a term cost nothing and the rank were cut again, by term; empty where
            the policy does not cut by predicted time.
    """

    phases: tuple[str, ...]
    mini_batch: int
    rank: int
    seconds: dict[str, float]
    num_micro_batches: int
    without: dict[str, int]

    @property
    def time_s(self) -> float:
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "phases": list(self.phases),
            "mini_batch": self.mini_batch,
            "rank": self.rank,
            "seconds": self.seconds,
            "num_micro_batches": self.num_micro_batches,
            "num_micro_batches_without": self.without,
        }


def cost_terms(plan: Plan, batch: SampleBatch) -> list[ProgramTerms]:
    """Terms of all programs of a plan; times phases they add up to the predicted makespan.

    Only the slowest forward-only program and the slowest update are cut again without each term.

    Args:
        batch: the iteration that the plan was made for.
    """
    costs = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    found: dict[int, ProgramTerms] = {}
    for phase in plan.phases:
        chosen = [i for i, program in enumerate(plan.programs) if phase in program.phases]
        if chosen and chosen[0] not in found:
            found |= zip(chosen, _phase_terms(plan, costs, chosen), strict=True)
    for is_update in (False, True):
        same = [i for i in found if plan.programs[i].is_update == is_update]
        if same:
            slowest = max(same, key=lambda i: found[i].time_s)
            cuts = _cuts_without(plan, batch, slowest, found[slowest])
            found[slowest] = replace(found[slowest], without=cuts)
    return [found[i] for i in sorted(found)]


def _phase_terms(plan: Plan, costs: RooflineCostModel, chosen: list[int]) -> list[ProgramTerms]:
    """Terms of the programs of a phase, which run one after the other."""
    ops = [plan_ops(costs, plan, plan.programs[i]) for i in chosen]
    reduction = Reduction(costs.gradient_reduction_s(), costs.optimizer_step_s())
    coupled = plan.parallel.coupled_ranks
    real = phase_times(ops, reduction, coupled)
    free = [replace(program, message_s=0.0 * program.message_s) for program in ops]
    ideal = phase_times(free, reduction, coupled)
    spans_s, ideal_s = (np.diff([0.0, *(t.last_s for t in times)]) for times in (real, ideal))
    terms = []
    for number, index in enumerate(chosen):
        program = plan.programs[index]
        rank = _last_rank(ops[number].first_op, real[number])
        seconds = _work_terms(plan, costs, program, rank)
        if real[number].reduced_s is not None:
            seconds["gradient_reduction"] = reduction.reduction_s
            seconds["optimizer_step"] = reduction.step_s
        messages_s = float(spans_s[number] - ideal_s[number])
        seconds["message"] = messages_s
        seconds[BUBBLES] = float(spans_s[number]) - sum(seconds.values())
        count = int((program.on_rank(rank).micro_batches.num_tokens > 0).sum())
        phases, mini_batch = program.phases, program.mini_batch
        terms.append(ProgramTerms(phases, mini_batch, rank, seconds, count, {}))
    return terms


def _last_rank(first_op: np.ndarray, times: ProgramTimes) -> int:
    ends_s = [times.end_s[:, a:b].max(initial=0.0) for a, b in pairwise(first_op)]
    return int(np.argmax(ends_s))


def _work_terms(
    plan: Plan, costs: RooflineCostModel, program: Program, rank: int
) -> dict[str, float]:
    """Work of a rank's last stage; of ranks in step each op is that of the slowest."""
    size = plan.parallel.coupled_ranks
    first = rank - rank % size
    members = [_op_terms(costs, program.on_rank(r)) for r in range(first, first + size)]
    names = list(members[0])
    # [members, terms, ops]
    each_s = np.array([[terms[name] for name in names] for terms in members])
    slowest = each_s.sum(axis=1).argmax(axis=0)
    taken_s = np.take_along_axis(each_s, slowest[None, None, :], axis=0)[0].sum(axis=1)
    return {name: s for name, s in zip(names, taken_s.tolist(), strict=True) if s}


def _op_terms(costs: RooflineCostModel, mine: Program) -> dict[Term, FloatArray]:
    """[ops] seconds of each op of a rank's last stage, by term."""
    table, stage = mine.micro_batches, costs.parallel.pipeline_model_parallel_size - 1
    columns = table.num_tokens, table.pairs, table.head_tokens
    tokens, pairs, head_tokens = (column.astype(np.float64) for column in columns)
    again = costs.op_parts(stage, tokens, pairs, 0.0 * tokens, is_backward=False)
    forward = costs.op_parts(stage, tokens, pairs, head_tokens, is_backward=False)
    backward = costs.op_parts(stage, tokens, pairs, head_tokens, is_backward=True)
    row = {number: i for i, number in enumerate(table.micro_batch.tolist())}
    ops = mine.ops()
    rows = np.array([row[op.micro_batch] for op in ops], np.int64)
    kinds = np.array([op.kind for op in ops], np.str_)
    kept = table.activation[rows] if len(rows) else np.empty(0, np.str_)
    parts = (
        (forward, ((kinds == "forward") & (kept != "drop")) | (kinds == "recompute")),
        (again, (kinds == "forward") & (kept == "drop")),
        (backward, kinds == "backward"),
        (again, (kinds == "backward") & (kept == "recompute")),
    )
    found: dict[Term, FloatArray] = {}
    for term in dict.fromkeys([*forward, *backward]):
        found[term] = np.zeros(len(ops))
        for seconds, applies in parts:
            per_row = np.broadcast_to(np.asarray(seconds.get(term, 0.0)), tokens.shape)
            found[term] += per_row[rows] * applies
    return found


def _cuts_without(
    plan: Plan, batch: SampleBatch, index: int, terms: ProgramTerms
) -> dict[str, int]:
    """Micro-batches that the rank would have without each term, if it is cut by predicted time."""
    planning = {name: getattr(plan.options, name) for name in PlanningConfig.model_fields}
    setup = Setup(
        model=plan.model,
        cluster=plan.cluster,
        parallel=plan.parallel,
        planning=PlanningConfig(**planning),
        calibration=plan.calibration,
    )

    def count(without: Sequence[Term]) -> int:
        problem = PlanningProblem(
            batch, plan.trace_hash, plan.iteration, setup, plan.phases, frozenset(without)
        )
        subproblem, program = problem.programs()[index], plan.programs[index]
        by_sample = np.argsort(program.assignments.sample)
        placement = Placement(
            subproblem,
            program.assignments.rank[by_sample],
            program.assignments.share_key[by_sample],
            program.granularity_tokens,
        )
        made = best_cuts_of(placement, terms.rank)
        return int((made.program.micro_batches.num_tokens > 0).sum())

    if count(()) != terms.num_micro_batches:
        return {}
    return {term: count((term,)) for term in _OF_CUTS if terms.seconds.get(term, 0.0) > 0.0}
