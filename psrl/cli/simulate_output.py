"""What `psrl simulate` reads from its flags, and says beside the metrics."""

import sys
import time
from typing import TYPE_CHECKING, Any

from psrl.core.errors import ConfigError
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import SampleBatch
from psrl.sim import OnProgress, Progress

if TYPE_CHECKING:
    from psrl.sim.blocks.block_effects import ReplacedBlocks

MAX_TIMELINE_EVENTS = 1_000_000
_SILENT_S = 2.0
_BETWEEN_LINES_S = 1.0
_MOST_FINDINGS = 8


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


def show_progress() -> OnProgress:
    """Lines on stderr once a simulation takes over two seconds."""
    began_s = time.perf_counter()
    next_s = began_s + _SILENT_S
    phase, phase_began_s = "", began_s

    def on_progress(progress: Progress) -> None:
        nonlocal next_s, phase, phase_began_s
        now_s = time.perf_counter()
        if progress.phase != phase:
            phase, phase_began_s = progress.phase, now_s
        if now_s < next_s:
            return
        next_s = now_s + _BETWEEN_LINES_S
        share = progress.finished_ops / progress.total_ops
        left_s = (now_s - phase_began_s) * (1.0 - share) / share
        print(
            f"\n  {phase}: {progress.finished_ops:,} of {progress.total_ops:,} ops, "
            f"{progress.simulated_s:.1f} s simulated, about {left_s:.0f} s left",
            end="",
            file=sys.stderr,
            flush=True,
        )

    return on_progress


def other_blocks(
    plan: Plan, batch: SampleBatch, blocks: str | None, cache: str | None
) -> "ReplacedBlocks | None":
    """The plan with other blocks; None if neither flag was given."""
    from psrl.sim.blocks.block_effects import apply_block_policy
    from psrl.sim.blocks.block_policies import BlockPolicy

    if blocks is None and cache is None:
        return None
    policy = BlockPolicy.parse(blocks or "adaptive", cache or "dynamic")
    return apply_block_policy(plan, batch, policy)


def iteration_section(
    batch: SampleBatch, metrics: dict[str, Any], tokens_per_s: float | None, concurrency: int | None
) -> dict[str, Any]:
    """The section `iteration`; nothing without a rate in a trace without times."""
    from psrl.sim.iteration import iteration_metrics, modelled_rollout, recorded_rollout

    if tokens_per_s is not None:
        rollout = modelled_rollout(batch, tokens_per_s, concurrency)
    elif concurrency is not None:
        raise ConfigError(
            f"{concurrency} trajectories at a time, at no rate", "add --generation-tokens-per-s"
        )
    else:
        recorded = recorded_rollout(batch)
        if recorded is None:
            return {}
        rollout = recorded
    return {"iteration": iteration_metrics(rollout, metrics)}


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
