"""`psrl trace import`, and what the trace commands say about a trace."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from psrl.core.errors import ExitCode, TraceError
from psrl.core.files import IfExists, check_new_directory
from psrl.core.samples.trace import Trace, write_trace

from .output import OutputOptions

LEVEL_NAMES = {
    "within_trajectory": "within trajectory",
    "within_group": "within group",
    "within_mini_batch": "within mini-batch",
    "overall": "overall",
}


@dataclass(frozen=True)
class TraceImport:
    """Convert recorded rollouts to a psRL trace."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """files of one format, or a directory of them"""
    out: Path
    """trace directory to write"""
    output: OutputOptions
    format: str | None = None
    """one of docs/importers.md; detected from the file when not given"""
    mode: str | None = None
    """sampling mode, where the format offers several (step_rt, step_s, tree_step)"""
    tokenizer: str = "qwen"
    """for text: "qwen" (the vocabulary that the dashscope package ships) or a tokenizer.json"""
    prompt_file: Path | None = None
    """text before every episode that the recording leaves out, such as a few-shot prompt"""
    block_tokens: int | None = None
    """tokens per hashed block, where the recording does not say"""
    hashes_only: bool = False
    """keep lengths and opaque block ids only, no token ids; sharing stays exactly the same"""
    groups_per_iteration: int | None = None
    """semantic groups per RL iteration; default all in one"""
    mini_batches: int = 1
    """optimizer steps per iteration, whole groups dealt round-robin"""
    limit: int | None = None
    """read at most this many trajectories"""
    skip_bad: bool = False
    """skip malformed records and list them, instead of stopping at the first"""
    if_exists: IfExists = "error"
    """or overwrite: replace an older directory of psRL"""

    def run(self) -> ExitCode:
        from psrl.traces.blocks import to_blocks_all
        from psrl.traces.importers import ImportOptions, choose_format, import_recording

        paths = list(self.paths)
        if not paths:
            raise TraceError("no input file", "name at least one file or folder")
        check_new_directory(self.out, self.if_exists, paths)
        found, reason = self.format, "--format"
        if found is None:
            found, reason = choose_format(paths, self.skip_bad)
        options = ImportOptions(
            mode=self.mode,
            tokenizer=self.tokenizer,
            prompt_file=self.prompt_file,
            block_tokens=self.block_tokens,
            limit=self.limit,
            skip_bad=self.skip_bad,
            groups_per_iteration=self.groups_per_iteration,
            num_mini_batches=self.mini_batches,
        )
        with self.output.step(f"importing {len(paths)} file(s) as {found} ({reason})"):
            recording = import_recording(paths, found, options)
        batches = recording.batches
        if self.hashes_only and batches and batches[0].symbol_num_tokens is None:
            batches = to_blocks_all(batches)
        trace = write_trace(
            self.out,
            batches,
            source=recording.source,
            licence=recording.licence,
            sampling_mode=recording.sampling_mode,
            notes=recording.notes,
            if_exists=self.if_exists,
            inputs=paths,
        )
        result = {**trace_identity(trace), "format": found, "skipped": list(recording.skipped)}
        lines = [
            f"{self.out}: {trace.header.num_samples:,} samples, "
            f"{trace.header.logical_tokens:,} tokens, {trace.num_iterations} iteration(s)"
        ]
        if recording.skipped:
            lines.append(f"skipped {len(recording.skipped)} malformed record(s):")
            lines += [f"  {line}" for line in recording.skipped]
        self.output.emit(result, "\n".join(lines))
        return ExitCode.OK


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
