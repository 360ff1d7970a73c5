"""`psrl simulate`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from psrl.core.cost.calibrated_cost_model import prediction_warnings
from psrl.core.cost.calibration import load_calibration
from psrl.core.errors import ExitCode
from psrl.core.files import IfExists
from psrl.core.plan.check_plan import check_plan
from psrl.core.plan.plan import Plan
from psrl.core.run.metrics import run_metrics
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import open_trace

from .output import OutputOptions
from .plan_commands import describe_metrics, format_warnings


@dataclass(frozen=True)
class Simulate:
    """Replay a plan on the simulated cluster: time, balance and memory, op by op."""

    plan: tyro.conf.Positional[Path]
    """plan directory"""
    trace: Path
    """the trace that the plan was made for"""
    run_dir: Path
    """run directory to write"""
    output: OutputOptions
    slow: tuple[str, ...] = ()
    """ranks that take longer, as RANK=FACTOR, e.g. 3=1.2"""
    nics_per_host: int | None = None
    """network ports that a host's devices share for messages to other hosts; default own ones"""
    overlap_gradient_reduction: bool = False
    """reduce finished buckets during the last backward, as Megatron's overlap_grad_reduce"""
    engine: Literal["auto", "simpy", "vectorised"] = "auto"
    """auto replays on SimPy unless the plan is large; the events are the same"""
    blocks: str | None = None
    """cache in other blocks than the plan: adaptive or fixed:TOKENS"""
    cache: str | None = None
    """keep blocks otherwise than the plan: dynamic, everything, lru:TOKENS, recompute:TOKENS or
    offload:TOKENS"""
    calibration: Path | None = None
    """predict with this file of `psrl calibrate` instead of what the plan was made with"""
    generation_tokens_per_s: float | None = None
    """model the rollout at this rate per trajectory; default the trace's own times, if any"""
    rollout_concurrency: int | None = None
    """trajectories that the modelled rollout generates at a time; default all"""
    timeline: bool = False
    """write timeline.json.gz, to open in ui.perfetto.dev, even of a million events and more"""
    no_timeline: bool = False
    """write no timeline.json.gz"""
    if_exists: IfExists = "error"

    def run(self) -> ExitCode:
        from psrl.analysis.perfetto import write_timeline
        from psrl.sim import SimOptions, chosen_engine, out_of_memory, simulate

        from .simulate_output import (
            MAX_TIMELINE_EVENTS,
            describe_simulation,
            iteration_section,
            other_blocks,
            parse_slow_ranks,
            show_progress,
        )

        plan = Plan.load(self.plan)
        other = None if self.calibration is None else load_calibration(self.calibration)
        batch = plan.batch_of(open_trace(self.trace))
        options = SimOptions(
            engine=self.engine,
            slow_ranks=parse_slow_ranks(self.slow),
            nics_per_host=self.nics_per_host,
            overlap_gradient_reduction=self.overlap_gradient_reduction,
        )
        sections: dict[str, Any] = {
            "simulation": {
                **asdict(options),
                "slow_ranks": {str(rank): factor for rank, factor in options.slow_ranks.items()},
                "engine": chosen_engine(plan, options),
            }
        }
        details = {"trace_hash": plan.trace_hash, "plan": str(self.plan), "kind": "simulated"}
        inputs = [self.plan, self.trace]
        with RunDir(self.run_dir, "simulate", self.if_exists, details, inputs) as run:
            with self.output.step(f"simulating {plan.policy}"):
                # A plan that does not fit is a result, not an error.
                check_plan(plan, batch, memory_fraction=None)
                if other is not None:
                    # Times and bound were stated for the cost model that the plan was made with.
                    plan = replace(plan, calibration=other, predicted={})
                effects = None
                if replaced := other_blocks(plan, batch, self.blocks, self.cache):
                    plan, effects = replaced.plan, replaced.effects
                    sections["blocks"] = replaced.metrics
                quiet = self.output.quiet or self.output.json
                progress = None if quiet else show_progress()
                events = simulate(plan, batch, options=options, effects=effects, progress=progress)
            metrics = run_metrics(plan, batch, events)
            rate, concurrency = self.generation_tokens_per_s, self.rollout_concurrency
            sections |= iteration_section(batch, metrics, rate, concurrency)
            sections["out_of_memory"] = [asdict(o) for o in out_of_memory(events, plan)]
            metrics |= sections | {"warnings": list(prediction_warnings(plan))}
            draws = len(events) < MAX_TIMELINE_EVENTS and not self.no_timeline
            if draws or self.timeline:
                write_timeline(run.path / "timeline.json.gz", events, plan, batch)
            events.save(run.path / "events.parquet")
            run.write_json("metrics.json", metrics)
        warnings = format_warnings(metrics["warnings"])
        text = [describe_metrics(metrics), describe_simulation(sections), *warnings]
        self.output.emit(metrics, "\n".join(text))
        return ExitCode.OK
