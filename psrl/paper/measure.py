"""Plan and simulate one policy on one scenario; everything that a row of the table may need."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from psrl.api.policy_runs import DENSE, merged_steps, run_factors, run_merged, run_policy
from psrl.api.runs import Run
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import InfeasibleError
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.plan.policy_names import MERGED_DENSE
from psrl.core.run.events import Events
from psrl.core.samples.sample import SampleBatch
from psrl.planner import PlanningProblem
from psrl.sim import SimOptions, simulate
from psrl.sim.blocks.block_effects import apply_block_policy
from psrl.sim.blocks.block_policies import BlockPolicy
from psrl.sim.iteration import iteration_metrics, modelled_rollout
from psrl.traces.step_merging import WHOLE_EPISODES

from .scenarios import Assumptions, Scenario

_VECTORISED = SimOptions(engine="vectorised")


@dataclass(frozen=True)
class Task:
    """One (scenario, mode, policy); tasks are independent of each other."""

    scenario: Scenario
    mode: str
    policy: str

    @property
    def name(self) -> str:
        return f"{self.scenario.name} {self.mode} {self.policy}"

    @property
    def effort(self) -> float:
        """Rough ordering by planning time, so that the longest start first."""
        content = self.scenario.content
        searches = self.policy not in (DENSE, MERGED_DENSE, "vllm_ps", "sglang_ps")
        stages = 12 if content.workload == "dtn" else 1
        return searches * stages * content.batch_scale * (len(content.blocks) + len(content.phases))


def tasks_of(scenarios: list[Scenario]) -> Iterator[Task]:
    """All tasks of some scenarios."""
    for scenario in scenarios:
        for mode in scenario.content.modes:
            policies = list(scenario.content.policies)
            # What a user does today without sharing, where the samples are steps.
            if mode not in WHOLE_EPISODES and policies[0] == DENSE:
                policies.insert(1, MERGED_DENSE)
            for policy in policies:
                yield Task(scenario, mode, policy)


def measure(task: Task, assumptions: Assumptions) -> dict[str, Any]:
    """Metrics of the run, its factors against the scenario's baseline, its memory and iteration.

    The baseline always runs all phases: it is quick, and iterations need them. A plan that does
    not fit the device is a result: then `out_of_memory` says what it needs and little else is
    known.
    """
    scenario, mode = task.scenario, task.mode
    baseline = scenario.content.policies[0]
    phases = PHASES if task.policy == baseline else scenario.content.phases
    problem = _problem(scenario, mode, assumptions, phases)
    batch, setup = problem.batch, problem.setup
    result: dict[str, Any] = {
        "scenario": scenario.name,
        "mode": mode,
        "policy": task.policy,
        "max_tokens_per_micro_batch": setup.planning.max_tokens_per_micro_batch,
        "device_bytes": setup.cluster.device.memory_bytes,
    }
    try:
        run = _run(problem, task)
    except InfeasibleError as error:
        return result | {"infeasible": error.message}
    if run is None:
        return result | {"infeasible": "no step continues the one before exactly"}
    plan, metrics = run.plan, run.metrics
    result |= {"plan_time_s": run.plan_time_s, "metrics": metrics}
    result["micro_batches"] = _micro_batches_per_rank(plan)
    result["tasks_on_ranks"] = tasks_on_ranks(plan, batch)
    result["memory"] = memory_section(plan, run.events)
    if "log_old_prob" in phases:
        result["iteration"] = _iteration(batch, metrics, assumptions)
    if task.policy == scenario.content.policies[-1]:
        result["blocks"] = {
            text: _with_blocks(plan, batch, text) for text in scenario.content.blocks
        }
    if task.policy != baseline:
        before = _baseline_run(scenario, mode, assumptions)
        if before is not None:
            result["factors"] = run_factors(before, run)
    return result


def measure_named(task: Task, assumptions: Assumptions) -> tuple[str, dict[str, Any]]:
    """`measure`, with the task's name."""
    return task.name, measure(task, assumptions)


def _problem(
    scenario: Scenario, mode: str, assumptions: Assumptions, phases: tuple[str, ...]
) -> PlanningProblem:
    batch = scenario.batch(mode, assumptions)
    setup = scenario.setup(int(batch.num_tokens.max()), assumptions)
    return PlanningProblem(batch, f"{scenario.name}-{mode}", 0, setup, phases)


def _run(problem: PlanningProblem, task: Task) -> Run | None:
    """The simulated run of a task; None for merged steps where none merges."""
    if task.policy != MERGED_DENSE:
        return run_policy(problem, task.policy, _VECTORISED, advise=False)
    merging = merged_steps(problem, task.mode)
    if merging is None or not merging.merges:
        return None
    return run_merged(problem, merging, _VECTORISED, advise=False)


@lru_cache(maxsize=64)
def _baseline_run(scenario: Scenario, mode: str, assumptions: Assumptions) -> Run | None:
    """What speed-ups refer to, planned once per process; None if it does not fit the device."""
    problem = _problem(scenario, mode, assumptions, scenario.content.phases)
    try:
        return run_policy(problem, scenario.content.policies[0], _VECTORISED, advise=False)
    except InfeasibleError:
        return None


def memory_section(plan: Plan, events: Events) -> dict[str, Any]:
    """Peaks with the logits of psRL's chunked head, and with those of all positions at once."""
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    last = events.stage == plan.parallel.pipeline_model_parallel_size - 1
    compute = events.micro_batch >= 0
    whole_logits = np.where(last & compute, events.num_tokens * memory.logits_bytes_per_token, 0)
    whole = events.total_bytes - events.logits_bytes + whole_logits
    return {
        "static_bytes": memory.static_bytes,
        "chunked_logits_peak_bytes": int(events.total_bytes.max()),
        "whole_logits_peak_bytes": int(whole.max()),
        "peak_kv_bytes": int((events.kv_bytes + events.kv_gradient_bytes).max()),
        "peak_activation_bytes": int(events.activation_bytes.max()),
    }


def _micro_batches_per_rank(plan: Plan) -> dict[str, float]:
    """Mean number of micro-batches of a rank and their mean tokens, in the last program."""
    table = plan.programs[-1].micro_batches
    return {
        "per_rank": len(table) / plan.num_ranks,
        "mean_tokens": float(table.num_tokens.mean()) if len(table) else 0.0,
    }


def tasks_on_ranks(plan: Plan, batch: SampleBatch) -> list[dict[str, int]]:
    """Of each optimizer step: tasks, those whose samples are all on one rank, and empty ranks."""
    found = []
    for program in plan.phase_programs("update"):
        sample, rank = program.assignments.sample, program.assignments.rank
        _, task = np.unique(batch.group_id[sample], return_inverse=True)
        pairs = np.unique(np.stack([task, rank]), axis=1)
        ranks_of_task = np.bincount(pairs[0])
        found.append(
            {
                "tasks": len(ranks_of_task),
                "whole_tasks": int((ranks_of_task == 1).sum()),
                "ranks": plan.num_ranks,
                "empty_ranks": plan.num_ranks - len(np.unique(rank)),
            }
        )
    return found


def _iteration(
    batch: SampleBatch, metrics: dict[str, Any], assumptions: Assumptions
) -> dict[str, Any]:
    rollout = modelled_rollout(batch, assumptions.generation_tokens_per_s)
    return iteration_metrics(rollout, metrics)


def _with_blocks(plan: Plan, batch: SampleBatch, text: str) -> dict[str, Any]:
    """The plan with other blocks: update time, peak memory and what the blocks cost."""
    policy = BlockPolicy.parse(*text.split())
    replaced = apply_block_policy(plan, batch, policy)
    events = simulate(
        replaced.plan,
        batch,
        phases=("update",),
        options=_VECTORISED,
        effects=replaced.effects,
    )
    return {
        "policy": asdict(policy),
        "update_s": float(events.end_s.max()),
        "blocks": replaced.metrics,
        "memory": memory_section(replaced.plan, events),
    }
