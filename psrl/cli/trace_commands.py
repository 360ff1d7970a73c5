"""`psrl trace import | stats | validate | slice`."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from psrl.core.errors import ExitCode, TraceError
from psrl.core.sample import SampleBatch
from psrl.core.trace import Trace, open_trace, write_trace

from .output import OutputOptions


@dataclass(frozen=True)
class TraceImport:
    """Convert recorded rollouts to a psRL trace."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """files of one format, or a directory of them"""
    out: Path
    """trace directory to write"""
    output: OutputOptions
    format: str | None = None
    """claude_code, messages, mooncake or tau_bench; detected when not given"""
    tokenizer: str = "qwen"
    """for text: "qwen" (the vocabulary that the dashscope package ships) or a tokenizer.json"""
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

    def run(self) -> ExitCode:
        from psrl.traces.blocks import to_blocks
        from psrl.traces.importers import ImportOptions, detect_format, import_recording

        paths = list(self.paths)
        if not paths:
            raise TraceError("no input file", "name at least one file or folder")
        found, reason = (self.format, "--format") if self.format else detect_format(paths[0])
        options = ImportOptions(
            tokenizer=self.tokenizer,
            limit=self.limit,
            skip_bad=self.skip_bad,
            groups_per_iteration=self.groups_per_iteration,
            num_mini_batches=self.mini_batches,
        )
        with self.output.step(f"importing {len(paths)} file(s) as {found} ({reason})"):
            recording = import_recording(paths, found, options)
        batches = recording.batches
        if self.hashes_only and batches and batches[0].symbol_num_tokens is None:
            if len(batches) > 1:
                raise TraceError(
                    "--hashes-only needs one iteration: blocks of several would not be comparable",
                    "leave out --groups-per-iteration",
                )
            batches = tuple(to_blocks(b) for b in batches)
        trace = write_trace(
            self.out,
            batches,
            source=recording.source,
            licence=recording.licence,
            sampling_mode=recording.sampling_mode,
            notes=recording.notes,
        )
        result = {**_identity(trace), "format": found, "skipped": list(recording.skipped)}
        lines = [
            f"{self.out}: {trace.header.num_samples:,} samples, "
            f"{trace.header.logical_tokens:,} tokens, {trace.num_iterations} iteration(s)"
        ]
        if recording.skipped:
            lines.append(f"skipped {len(recording.skipped)} malformed record(s):")
            lines += [f"  {line}" for line in recording.skipped]
        self.output.emit(result, "\n".join(lines))
        return ExitCode.OK


@dataclass(frozen=True)
class TraceStats:
    """How much is shared: per sampling mode, within trajectory, within group and globally."""

    trace: tyro.conf.Positional[Path]
    output: OutputOptions
    iteration: int = 0

    def run(self) -> ExitCode:
        trace = open_trace(self.trace)
        batch = trace.iteration(self.iteration)
        stats = mode_stats(trace, batch)
        self.output.emit({**_identity(trace), "modes": stats}, format_stats(stats))
        return ExitCode.OK


@dataclass(frozen=True)
class TraceValidate:
    """Read every iteration, check its structure and its hash."""

    trace: tyro.conf.Positional[Path]
    output: OutputOptions

    def run(self) -> ExitCode:
        trace = open_trace(self.trace)
        tokens = sum(batch.logical_tokens for batch in trace)
        if tokens != trace.header.logical_tokens:
            raise TraceError(
                f"{self.trace}: {tokens} tokens found, trace.json says "
                f"{trace.header.logical_tokens}"
            )
        self.output.emit(
            _identity(trace), f"{self.trace}: valid, {tokens:,} tokens, hash {trace.content_hash}"
        )
        return ExitCode.OK


@dataclass(frozen=True)
class TraceSlice:
    """Cut a smaller trace out of one iteration, keeping its sharing."""

    trace: tyro.conf.Positional[Path]
    out: Path
    """trace directory to write"""
    output: OutputOptions
    iteration: int = 0
    groups: int | None = None
    """semantic groups to keep, in order"""
    trajectories: int | None = None
    """trajectories to keep per group"""
    steps: int | None = None
    """agent steps to keep per trajectory"""
    max_sample_tokens: int | None = None
    """drop samples longer than this"""

    def run(self) -> ExitCode:
        from psrl.traces.slicing import slice_batch

        trace = open_trace(self.trace)
        batch = slice_batch(
            trace.iteration(self.iteration),
            num_groups=self.groups,
            trajectories_per_group=self.trajectories,
            steps_per_trajectory=self.steps,
            max_sample_tokens=self.max_sample_tokens,
        )
        header = trace.header
        sliced = write_trace(
            self.out,
            [batch],
            source=header.source,
            licence=header.licence,
            sampling_mode=header.sampling_mode,
            notes=f"slice of iteration {self.iteration} of {trace.content_hash}; {header.notes}",
        )
        self.output.emit(
            _identity(sliced),
            f"{self.out}: {batch.num_samples:,} samples, {batch.logical_tokens:,} tokens",
        )
        return ExitCode.OK


def mode_stats(trace: Trace, batch: SampleBatch) -> dict[str, dict[str, Any]]:
    """Sharing statistics of every sampling mode that the trace's samples allow."""
    from psrl.traces.modes import derive
    from psrl.traces.stats import sharing_stats

    recorded = trace.header.sampling_mode
    stats = {recorded: sharing_stats(batch)}
    if recorded == "step":
        # Some block-hash traces do not show which samples continue which: no other mode then.
        with suppress(TraceError):
            stats["traj"] = sharing_stats(derive(batch, "traj"))
    return stats


def format_stats(stats: dict[str, dict[str, Any]]) -> str:
    """One line per sampling mode."""
    head = (
        f"{'mode':<6}{'samples':>9}{'logical tokens':>16}{'unique tokens':>15}"
        f"{'match rate':>12}{'in group':>10}{'in traj.':>10}{'token bound':>13}{'pair bound':>12}"
    )
    lines = [head]
    for mode, row in stats.items():
        lines.append(
            f"{mode:<6}{row['num_samples']:>9,}{row['logical_tokens']:>16,}"
            f"{row['unique_tokens']:>15,}{row['prefix_match_rate']:>12.2%}"
            f"{row['within_group']['prefix_match_rate']:>10.2%}"
            f"{row['within_trajectory']['prefix_match_rate']:>10.2%}"
            f"{row['overall']['speedup_bound_tokens']:>12.2f}x"
            f"{row['overall']['speedup_bound_pairs']:>11.2f}x"
        )
    return "\n".join(lines)


def _identity(trace: Trace) -> dict[str, Any]:
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
