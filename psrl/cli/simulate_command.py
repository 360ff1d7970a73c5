"""`psrl simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from psrl.core.errors import ConfigError, ExitCode
from psrl.core.files import IfExists
from psrl.core.plan.plan import Plan
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import open_trace

from .output import OutputOptions, describe_metrics, format_warnings

_MOST_FINDINGS = 8


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
        from psrl.api.runs import run_details, simulate
        from psrl.sim import SimOptions

        plan = Plan.load(self.plan)
        options = SimOptions(
            engine=self.engine,
            slow_ranks=parse_slow_ranks(self.slow),
            nics_per_host=self.nics_per_host,
            overlap_gradient_reduction=self.overlap_gradient_reduction,
        )
        trace, details = open_trace(self.trace), run_details(plan) | {"plan": str(self.plan)}
        inputs = (self.plan, self.trace)
        with RunDir(self.run_dir, "simulate", self.if_exists, details, inputs) as run:
            with self.output.step(f"simulating {plan.policy}"):
                simulated = simulate(
                    plan,
                    trace,
                    options,
                    blocks=self.blocks,
                    cache=self.cache,
                    calibration=self.calibration,
                    generation_tokens_per_s=self.generation_tokens_per_s,
                    rollout_concurrency=self.rollout_concurrency,
                    progress=self.output.progress(),
                )
            simulated.write(run, True if self.timeline else False if self.no_timeline else None)
        metrics = simulated.metrics
        warnings = format_warnings(metrics["warnings"])
        text = [describe_metrics(metrics), describe_simulation(metrics), *warnings]
        self.output.emit(metrics, "\n".join(text))
        return ExitCode.OK


def parse_slow_ranks(texts: tuple[str, ...]) -> dict[int, float]:
    """From `RANK=FACTOR` to a factor per rank.

    Raises:
        ConfigError: if a text has another form.
    """
    slow = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"cannot read slow rank {text!r}", "write 3=1.2") from None
    return slow


def describe_simulation(sections: dict[str, Any]) -> str:
    """Lines about the engine, the options in force, blocks, the iteration and memory."""
    return "\n".join(
        [
            *_options_lines(sections["simulation"]),
            *_blocks_lines(sections.get("blocks")),
            *_iteration_lines(sections.get("iteration")),
            *_memory_lines(sections["out_of_memory"]),
        ]
    )


def _options_lines(simulation: dict[str, Any]) -> list[str]:
    parts = [f"engine {simulation['engine']}"]
    parts += [f"rank {r} takes {f:g} times as long" for r, f in simulation["slow_ranks"].items()]
    if simulation["nics_per_host"] is not None:
        parts.append(f"{simulation['nics_per_host']} network ports per host")
    if simulation["overlap_gradient_reduction"]:
        parts.append("gradient reduction overlapped")
    return [", ".join(parts)]


def _blocks_lines(blocks: dict[str, Any] | None) -> list[str]:
    if blocks is None:
        return []
    size = "adaptive" if blocks["block_tokens"] is None else f"{blocks['block_tokens']}-token"
    line = (
        f"{size} blocks, {blocks['retention']}: peak {blocks['peak_cached_bytes'] / 2**20:.1f} "
        f"MiB, {blocks['num_blocks']:,} blocks read {blocks['num_block_reads']:,} times, "
        f"{blocks['internal_fragmentation']:.2%} padding, {blocks['hit_rate_lost']:.2%} of the "
        "tokens not matched in whole blocks"
    )
    lines = [line]
    if blocks["capacity_tokens"] is not None:
        lines.append(
            f"  capacity {blocks['capacity_tokens']:,} tokens: {blocks['cache_hit_rate']:.2%} "
            f"found, {blocks['recomputed_tokens']:,} tokens recomputed, "
            f"{blocks['offloaded_tokens']:,} copied to the host, {blocks['fetched_tokens']:,} back"
        )
    parts = (
        ("recomputation of misses", "recompute_s"),
        ("host copies", "transfer_s"),
        ("block look-ups", "access_s"),
    )
    costs = ", ".join(f"{1e3 * blocks[name]:.2f} ms {what}" for what, name in parts)
    lines.append(
        f"  in the times above, on the busiest device: {costs} (tables of up to "
        f"{blocks['metadata_bytes'] / 2**10:.1f} KiB)"
    )
    return lines


def _iteration_lines(iteration: dict[str, Any] | None) -> list[str]:
    if iteration is None:
        return ["no rollout: the trace has no times; --generation-tokens-per-s models one"]
    source = "as recorded" if iteration["rollout_source"] == "trace" else "modelled"
    return [
        f"rollout {iteration['rollout_s']:.1f} s ({source}) + training "
        f"{iteration['training_s']:.1f} s: {iteration['synchronous_s']:.1f} s per iteration, "
        f"{iteration['update_share']:.1%} of it update; {iteration['one_step_off_s']:.1f} s one "
        "step off"
    ]


def _memory_lines(findings: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"out of memory: {o['phase']}, rank {o['rank']}, stage {o['stage']}: {o['op']} of "
        f"micro-batch {o['micro_batch']} needs {o['needed_bytes'] / 2**30:.2f} GiB of "
        f"{o['limit_bytes'] / 2**30:.2f}"
        for o in findings[:_MOST_FINDINGS]
    ]
    if len(findings) > _MOST_FINDINGS:
        lines.append(f"out of memory: {len(findings) - _MOST_FINDINGS} more, see metrics.json")
    return lines
