"""A plan replayed on the simulated cluster, with its metrics and its run directory."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from psrl.analysis.perfetto import write_timeline
from psrl.core.cost.calibrated_cost_model import prediction_warnings
from psrl.core.cost.calibration import load_calibration
from psrl.core.errors import ConfigError
from psrl.core.files import IfExists
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.plan import Plan
from psrl.core.run.events import Events
from psrl.core.run.metrics import run_metrics
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace
from psrl.sim import OnProgress, SimOptions, chosen_engine, least_work, out_of_memory
from psrl.sim import simulate as replay_events
from psrl.sim.blocks.block_effects import apply_block_policy
from psrl.sim.blocks.block_policies import BlockPolicy
from psrl.sim.iteration import iteration_metrics, modelled_rollout, recorded_rollout

MAX_TIMELINE_EVENTS = 1_000_000
"""Of more events no timeline is written unless asked for."""


@dataclass(frozen=True, eq=False)
class Run:
    """A simulated run of a plan.

    Attributes:
        plan: as replayed, with other blocks or another calibration if those were asked for.
        batch: the samples of the plan.
        events: every op of every rank and stage, with its times and bytes.
        metrics: docs/metrics.md has every name.
        plan_time_s: wall time that the policy took; NaN if the plan was not made here.
    """

    plan: Plan
    batch: SampleBatch
    events: Events
    metrics: dict[str, Any]
    plan_time_s: float = math.nan

    @property
    def makespan_s(self) -> float:
        """Time of all phases."""
        return float(self.metrics["makespan_s"])

    def write(self, run: RunDir, timeline: bool | None = None) -> None:
        """Write metrics.json, events.parquet and timeline.json.gz.

        Args:
            timeline: None leaves it out where it would be huge.
        """
        if timeline or (timeline is None and len(self.events) < MAX_TIMELINE_EVENTS):
            write_timeline(run.path / "timeline.json.gz", self.events, self.plan, self.batch)
        self.events.save(run.path / "events.parquet")
        run.write_json("metrics.json", self.metrics)

    def save(
        self, run_dir: str | Path, if_exists: IfExists = "error", timeline: bool | None = None
    ) -> Path:
        """Write a run directory; returns its path.

        Raises:
            ConfigError: if it exists already.
        """
        path = Path(run_dir)
        with RunDir(path, "simulate", if_exists, run_details(self.plan)) as run:
            self.write(run, timeline)
        return path


def run_details(plan: Plan) -> dict[str, Any]:
    """Entries of the manifest of a simulated run."""
    return {"trace_hash": plan.trace_hash, "kind": "simulated"}


def simulate(
    plan: Plan,
    trace: Trace,
    options: SimOptions | None = None,
    *,
    blocks: str | None = None,
    cache: str | None = None,
    calibration: str | Path | None = None,
    generation_tokens_per_s: float | None = None,
    rollout_concurrency: int | None = None,
    progress: OnProgress | None = None,
) -> Run:
    """Check a plan and replay it op by op; a plan that does not fit is a result, not an error.

    Args:
        options: departures from an ideal cluster, and the engine.
        blocks: cache in other blocks than the plan: "adaptive" or "fixed:TOKENS".
        cache: keep blocks otherwise: "dynamic", "everything", "lru:TOKENS", "recompute:TOKENS" or
            "offload:TOKENS".
        calibration: predict with this file of `psrl calibrate`, not with what the plan was made
            with; then the run has no lower bound, which holds for the plan's own costs.
        generation_tokens_per_s: model the rollout at this rate per trajectory; default the
            trace's own times, if any.
        rollout_concurrency: trajectories that the modelled rollout generates at a time.

    Raises:
        PlanError: if the plan belongs to another trace or breaks a rule.
        ConfigError: if options contradict each other or the plan.
    """
    other = None if calibration is None else load_calibration(Path(calibration))
    batch = plan.batch_of(trace)
    check_plan(plan, batch, memory_fraction=None)
    if other is not None:
        # Times and bound were stated for the cost model that the plan was made with.
        plan = replace(plan, calibration=other, predicted={})
    return replay(
        plan,
        batch,
        options,
        block_policy=_block_policy(blocks, cache),
        rollout=(generation_tokens_per_s, rollout_concurrency),
        progress=progress,
    )


def replay(
    plan: Plan,
    batch: SampleBatch,
    options: SimOptions | None = None,
    *,
    block_policy: BlockPolicy | None = None,
    rollout: tuple[float | None, int | None] = (None, None),
    logical: SampleBatch | None = None,
    progress: OnProgress | None = None,
    plan_time_s: float = math.nan,
) -> Run:
    """`simulate` for a plan that is checked already.

    Args:
        rollout: generation_tokens_per_s and rollout_concurrency.
        logical: samples that logical tokens, rates and the rollout count; default the plan's.
    """
    options = options or SimOptions()
    sections: dict[str, Any] = {
        "simulation": {
            **asdict(options),
            "slow_ranks": {str(rank): factor for rank, factor in options.slow_ranks.items()},
            "engine": chosen_engine(plan, options),
        }
    }
    effects = None
    if block_policy is not None:
        replaced = apply_block_policy(plan, batch, block_policy)
        plan, effects, sections["blocks"] = replaced.plan, replaced.effects, replaced.metrics
    events = replay_events(plan, batch, options=options, effects=effects, progress=progress)
    logical = batch if logical is None else logical
    metrics = run_metrics(plan, logical, events)
    sections |= _iteration_section(logical, metrics, *rollout)
    sections["arithmetic"] = least_work(plan, batch)
    sections["out_of_memory"] = [asdict(found) for found in out_of_memory(events, plan)]
    metrics |= sections | {"warnings": list(prediction_warnings(plan))}
    return Run(plan, batch, events, metrics, plan_time_s)


def _block_policy(blocks: str | None, cache: str | None) -> BlockPolicy | None:
    if blocks is None and cache is None:
        return None
    return BlockPolicy.parse(blocks or "adaptive", cache or "dynamic")


def _iteration_section(
    batch: SampleBatch, metrics: Mapping[str, Any], tokens_per_s: float | None, slots: int | None
) -> dict[str, Any]:
    """The section `iteration`; nothing without a rate in a trace without times."""
    if tokens_per_s is not None:
        rollout = modelled_rollout(batch, tokens_per_s, slots)
    elif slots is not None:
        raise ConfigError(
            f"{slots} trajectories at a time, at no rate", "give generation_tokens_per_s too"
        )
    else:
        recorded = recorded_rollout(batch)
        if recorded is None:
            return {}
        rollout = recorded
    return {"iteration": iteration_metrics(rollout, dict(metrics))}
