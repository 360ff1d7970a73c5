"""`psrl trace import`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from psrl.core.errors import ExitCode, TraceError
from psrl.core.files import IfExists, check_new_directory
from psrl.core.samples.trace import write_trace

from .output import OutputOptions
from .trace_output import trace_identity


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
