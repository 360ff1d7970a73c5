"""`psrl plan` and `psrl simulate`."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from psrl.core.check_plan import check_plan
from psrl.core.config import load_setup
from psrl.core.errors import ExitCode, InfeasibleError, PlanError
from psrl.core.metrics import run_metrics
from psrl.core.plan import Plan
from psrl.core.run import IfExists, RunDir
from psrl.core.sample import SampleBatch
from psrl.core.trace import Trace, open_trace

from .output import OutputOptions

if TYPE_CHECKING:
    from psrl.planner import PlanningProblem


@dataclass(frozen=True)
class PlanCommand:
    """Choose placement, micro-batches, order and caching for one iteration of a trace."""

    trace: Path
    """trace directory"""
    cluster: Path
    """cluster file (TOML): model, cluster, parallel layout, planning budgets"""
    out: Path
    """plan directory to write"""
    output: OutputOptions
    policy: str = "psrl"
    """scheduling policy; docs/policies.md lists them"""
    iteration: int = 0
    explain: bool = False
    """say why: balance, duplicated tokens, idle pipeline, memory, bound, for every program"""
    search: bool = False
    """first choose tensor, pipeline and data parallel sizes, recompute and micro-batch budget for
    the cluster's devices; the table shows time against memory"""
    set: tuple[str, ...] = ()
    """change a value of the cluster file, e.g. planning.max_tokens_per_micro_batch=8192"""

    def run(self) -> ExitCode:
        from psrl.planner import PlanningProblem, explain, format_explanation, make_plan

        setup = load_setup(self.cluster, self.set)
        trace = open_trace(self.trace)
        batch = trace.iteration(self.iteration)
        problem = PlanningProblem(batch, trace.content_hash, self.iteration, setup)
        result: dict[str, Any] = {"plan": str(self.out)}
        texts: list[str] = []
        if self.search:
            problem = self._search(problem, result, texts)
        started_s = time.perf_counter()
        with self.output.step(f"planning with {self.policy}"):
            plan = make_plan(problem, self.policy)
        plan_time_s = time.perf_counter() - started_s
        plan.save(self.out)
        texts.append(describe_plan(plan, self.out))
        if self.explain:
            reports = explain(plan, batch)
            result["explanation"] = [report.as_json() for report in reports]
            texts.append(format_explanation(plan, reports))
        result |= {"policy": plan.policy, **plan.predicted, "plan_time_s": plan_time_s}
        self.output.emit(result, "\n\n".join(texts))
        return ExitCode.OK

    def _search(
        self, problem: "PlanningProblem", result: dict[str, Any], texts: list[str]
    ) -> "PlanningProblem":
        """The problem with the fastest layout and budget.

        Raises:
            InfeasibleError: if none fits.
        """
        from psrl.planner import format_choices, search_layouts

        with self.output.step("searching layouts"):
            choices = search_layouts(problem, self.policy)
        table = format_choices(choices)
        if choices[0].reason:
            devices = problem.setup.cluster.num_devices
            raise InfeasibleError(
                f"no layout of {devices} devices fits the memory\n{table}",
                "use more or larger devices, or a smaller model",
            )
        texts.append(table)
        result["layouts"] = [
            {
                **choice.setup.parallel.model_dump(),
                "max_tokens_per_micro_batch": choice.setup.planning.max_tokens_per_micro_batch,
                "makespan_s": choice.time_s,
                "peak_memory_bytes": choice.peak_bytes,
                "reason": choice.reason,
                "on_front": choice.on_front,
            }
            for choice in choices
        ]
        best = choices[0].setup
        planning = best.planning.model_copy(
            update={"search_iterations": problem.setup.planning.search_iterations}
        )
        return replace(problem, setup=best.model_copy(update={"planning": planning}))


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
        batch = plan_batch(plan, open_trace(self.trace))
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
        with RunDir(self.run_dir, "simulate", self.if_exists, details) as run:
            with self.output.step(f"simulating {plan.policy}"):
                # A plan that does not fit is a result, not an error.
                check_plan(plan, batch, memory_fraction=None)
                if self.blocks or self.cache:
                    plan, sections["blocks"] = other_blocks(plan, batch, self.blocks, self.cache)
                quiet = self.output.quiet or self.output.json
                progress = None if quiet else show_progress()
                events = simulate(plan, batch, options=options, progress=progress)
            metrics = run_metrics(plan, batch, events)
            rate, concurrency = self.generation_tokens_per_s, self.rollout_concurrency
            sections |= iteration_section(batch, metrics, rate, concurrency)
            sections["out_of_memory"] = [asdict(o) for o in out_of_memory(events, plan)]
            metrics |= sections
            draws = len(events) < MAX_TIMELINE_EVENTS and not self.no_timeline
            if draws or self.timeline:
                write_timeline(run.path / "timeline.json.gz", events, plan, batch)
            events.save(run.path / "events.parquet")
            run.write_json("metrics.json", metrics)
        text = describe_metrics(metrics) + "\n" + describe_simulation(sections)
        self.output.emit(metrics, text)
        return ExitCode.OK


def plan_batch(plan: Plan, trace: Trace) -> SampleBatch:
    """The iteration that a plan was made for.

    Raises:
        PlanError: if the plan belongs to another trace.
    """
    if plan.trace_hash != trace.content_hash:
        raise PlanError(
            f"the plan was made for trace {plan.trace_hash[:12]}, {trace.path} is "
            f"{trace.content_hash[:12]}",
            "plan again for this trace, or pass the trace of the plan",
        )
    return trace.iteration(plan.iteration)


def describe_plan(plan: Plan, path: Path) -> str:
    """A few lines about a plan."""
    predicted = plan.predicted
    lines = [f"{path}: policy {plan.policy} on {plan.num_ranks} data-parallel rank(s)"]
    for program in plan.programs:
        what = f"mini-batch {program.mini_batch}" if program.is_update else "whole batch"
        lines.append(
            f"  {' + '.join(program.phases)} ({what}): {len(program.assignments):,} samples, "
            f"{program.unique_tokens:,} tokens to compute, {len(program.micro_batches):,} "
            f"micro-batches, {len(program.blocks):,} cached blocks"
        )
    lines.append(
        f"  predicted {predicted['makespan_s']:.3f} s, proven lower bound "
        f"{predicted['lower_bound_s']:.3f} s, gap {predicted['gap']:.2%}"
    )
    return "\n".join(lines)


def describe_metrics(metrics: dict[str, Any]) -> str:
    """One line per phase and a total."""
    lines = [
        f"{'phase':<14}{'time':>12}{'executed tokens':>17}{'max/min':>9}{'bubbles':>9}"
        f"{'peak memory':>14}{'peak KV':>12}"
    ]
    rows = [*metrics["phases"].items(), ("total", metrics)]
    for name, row in rows:
        lines.append(
            f"{name:<14}{row['makespan_s']:>10.3f} s{row['executed_tokens']:>17,}"
            f"{row['worker_time_max_over_min']:>9.3f}{row['bubble_fraction']:>9.1%}"
            f"{row['peak_memory_bytes'] / 2**30:>10.2f} GiB{row['peak_kv_bytes'] / 2**20:>8.1f} MiB"
        )
    return "\n".join(lines)
