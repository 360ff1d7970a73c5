"""What the trace commands say about a trace: identity and sharing statistics."""

from contextlib import suppress
from typing import Any

from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import TraceError
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace

LEVEL_NAMES = {
    "within_trajectory": "within trajectory",
    "within_group": "within group",
    "within_mini_batch": "within mini-batch",
    "overall": "overall",
}


def trace_identity(trace: Trace) -> dict[str, Any]:
    """Which trace it is, for `--json`."""
    return {
        "path": str(trace.path),
        "content_hash": trace.content_hash,
        "num_iterations": trace.num_iterations,
        "num_samples": trace.header.num_samples,
        "logical_tokens": trace.header.logical_tokens,
        "sampling_mode": trace.header.sampling_mode,
        "symbol_kind": trace.header.symbol_kind,
        "source": trace.header.source,
        "licence": trace.header.licence,
    }


def mode_stats(
    trace: Trace, batch: SampleBatch, model: ModelSpec | None = None
) -> dict[str, dict[str, Any]]:
    """Sharing statistics of every sampling mode that the trace's samples allow.

    Tree modes are left out where no two episodes have a model call in common: they are then the
    same as step and traj.
    """
    from psrl.traces.modes import MODES, derive
    from psrl.traces.stats import sharing_stats

    recorded = trace.header.sampling_mode
    stats = {recorded: sharing_stats(batch, model)}
    if recorded not in MODES:
        return stats
    # Some block-hash traces do not show which samples continue which: no other mode then.
    with suppress(TraceError):
        step = derive(batch, "step", recorded)
        if recorded in ("traj", "tree"):
            stats["step"] = sharing_stats(step, model)
        tree_step = derive(step, "tree_step")
        branching = recorded.startswith("tree") or tree_step.num_samples < step.num_samples
        others = {"traj": step, "tree": step} if branching else {"traj": step}
        for mode, calls in others.items():
            if mode not in stats:
                stats[mode] = sharing_stats(derive(calls, mode), model)
        if branching and "tree_step" not in stats:
            stats["tree_step"] = sharing_stats(tree_step, model)
    return stats


def format_stats(stats: dict[str, dict[str, Any]]) -> str:
    """One line per sampling mode."""
    with_flops = any("speedup_bound_flops" in row["overall"] for row in stats.values())
    head = (
        f"{'mode':<10}{'samples':>9}{'logical tokens':>16}{'unique tokens':>15}"
        f"{'match rate':>12}{'in group':>10}{'in traj.':>10}{'token bound':>13}{'pair bound':>12}"
    )
    lines = [head + f"{'FLOP bound':>12}" * with_flops]
    for mode, row in stats.items():
        lines.append(
            f"{mode:<10}{row['num_samples']:>9,}{row['logical_tokens']:>16,}"
            f"{row['unique_tokens']:>15,}{row['prefix_match_rate']:>12.2%}"
            f"{row['within_group']['prefix_match_rate']:>10.2%}"
            f"{row['within_trajectory']['prefix_match_rate']:>10.2%}"
            f"{row['overall']['speedup_bound_tokens']:>12.2f}x"
            f"{row['overall']['speedup_bound_pairs']:>11.2f}x"
        )
        if with_flops:
            lines[-1] += f"{row['overall']['speedup_bound_flops']:>11.2f}x"
    return "\n".join(lines)


def format_levels(row: dict[str, Any]) -> str:
    """The tree of one mode, level by level: who shares with whom."""
    lines = [
        f"{'level':<19}{'unique tokens':>15}{'match rate':>12}{'token bound':>13}{'nodes':>11}"
        f"{'forks':>9}{'max. branches':>15}{'read once':>11}"
    ]
    for level, name in LEVEL_NAMES.items():
        entry = row[level]
        once = sum(entry["unique_tokens_by_readers"][:1]) / max(1, entry["unique_tokens"])
        lines.append(
            f"{name:<19}{entry['unique_tokens']:>15,}{entry['prefix_match_rate']:>12.2%}"
            f"{entry['speedup_bound_tokens']:>12.2f}x{entry['num_nodes']:>11,}"
            f"{entry['num_forks']:>9,}{entry['max_branches']:>15,}{once:>11.1%}"
        )
    return "\n".join(lines)
