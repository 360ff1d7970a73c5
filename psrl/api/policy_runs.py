"""One policy on one problem: its plan, replayed, and its speed-up over another."""

import time
from dataclasses import replace

from psrl.core.plan.policy_names import MERGED_DENSE
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import TraceHeader, batch_hash
from psrl.planner import PlanningProblem
from psrl.planner import make_plan as decide
from psrl.sim import OnProgress, SimOptions, speedup_factors
from psrl.traces.step_merging import WHOLE_EPISODES, MergedSteps, merge_steps

from .runs import Run, replay

DENSE = "verl"
"""The policy that trains every sample alone."""


def run_policy(
    problem: PlanningProblem,
    policy: str,
    options: SimOptions | None = None,
    *,
    logical: SampleBatch | None = None,
    advise: bool = True,
    progress: OnProgress | None = None,
) -> Run:
    """Plan by a policy and replay the plan.

    Args:
        logical: samples that logical tokens, rates and the rollout count; default the problem's.
        advise: where nothing fits, find the smallest changes that would (takes several plans).

    Raises:
        ConfigError: if there is no such policy.
        InfeasibleError: if the plan does not fit the device memory.
    """
    started_s = time.perf_counter()
    plan = decide(problem, policy, advise)
    return replay(
        plan,
        problem.batch,
        options,
        logical=logical,
        progress=progress,
        plan_time_s=time.perf_counter() - started_s,
    )


def merged_steps(problem: PlanningProblem, sampling_mode: str) -> MergedSteps | None:
    """The steps of a problem merged; None for samples that are whole episodes already."""
    if sampling_mode in WHOLE_EPISODES:
        return None
    return merge_steps(problem.batch, sampling_mode)


def run_merged(
    problem: PlanningProblem,
    merging: MergedSteps,
    options: SimOptions | None = None,
    *,
    advise: bool = True,
    progress: OnProgress | None = None,
) -> Run:
    """Plan dense training of the merged steps as veRL does, and replay the plan.

    The plan belongs to the merged samples. Its metrics count the logical tokens of the steps, so
    that rates compare with those of other policies.
    """
    header = TraceHeader(
        source="",
        licence="",
        sampling_mode="",
        symbol_kind="token" if merging.batch.symbol_num_tokens is None else "block",
        iteration_hashes=(batch_hash(merging.batch),),
        num_samples=merging.batch.num_samples,
        logical_tokens=merging.batch.logical_tokens,
    )
    merged = replace(problem, batch=merging.batch, trace_hash=header.content_hash, iteration=0)
    run = run_policy(
        merged, DENSE, options, logical=problem.batch, advise=advise, progress=progress
    )
    return replace(run, metrics=run.metrics | {"policy": MERGED_DENSE})


def run_factors(baseline: Run, run: Run) -> dict[str, dict[str, float]]:
    """Speed-up of each phase over the baseline as cuts x placement x sharing.

    Raises:
        PlanError: if the two have different layouts, or no phase in common.
    """
    return speedup_factors(baseline.plan, baseline.events, run.plan, run.events)
