"""`psrl trace stats | validate | slice | merge | synth`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from psrl.core.cost.cluster import ModelSpec
from psrl.core.cost.presets import MODELS
from psrl.core.errors import ConfigError, ExitCode, TraceError, suggest
from psrl.core.files import IfExists, check_new_directory
from psrl.core.run.run_directory import finite
from psrl.core.samples.trace import Trace, open_trace, write_trace

from .output import OutputOptions
from .trace_commands import format_levels, format_stats, trace_identity


@dataclass(frozen=True)
class TraceStats:
    """How much is shared: per sampling mode, within trajectory, within group and globally."""

    trace: tyro.conf.Positional[Path]
    output: OutputOptions
    iteration: int | None = None
    """only this iteration; default all, read one at a time"""
    model: str | None = None
    """model preset: adds the bound by its FLOPs, attention included"""
    plots: Path | None = None
    """directory to write stats.json, figures and their numbers to"""

    def run(self) -> ExitCode:
        from psrl.traces.stats import mode_stats, total_stats

        trace, model = open_trace(self.trace), _model(self.model)
        chosen = range(trace.num_iterations) if self.iteration is None else [self.iteration]
        iterations: list[dict[str, Any]] = []
        with self.output.step(f"statistics of {len(chosen)} iteration(s)"):
            for index in chosen:
                modes = mode_stats(trace.iteration(index), trace.header.sampling_mode, model)
                iterations.append({"iteration": index, "modes": modes})
        # A mode may be missing where an iteration does not allow it; then there is no total.
        totals = {
            mode: total_stats([entry["modes"][mode] for entry in iterations], model)
            for mode in iterations[0]["modes"]
            if all(mode in entry["modes"] for entry in iterations)
        }
        result = {**trace_identity(trace), "modes": totals, "iterations": iterations}
        recorded = trace.header.sampling_mode
        text = f"{format_stats(totals)}\n\nmode {recorded}:\n{format_levels(totals[recorded])}"
        if self.plots is not None:
            text += f"\n\n{self._draw(self.plots, result)}"
        self.output.emit(result, text)
        return ExitCode.OK

    def _draw(self, directory: Path, result: dict[str, Any]) -> str:
        from psrl.analysis.figures.trace_plots import save_trace_plots

        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(result), indent=1, sort_keys=True, allow_nan=False)
        (directory / "stats.json").write_text(text + "\n", encoding="utf-8")
        with self.output.step("drawing"):
            figures = save_trace_plots(result, directory)
        return "\n".join(str(path) for path in figures)


@dataclass(frozen=True)
class TraceValidate:
    """Read every iteration, check its structure and its hash."""

    trace: tyro.conf.Positional[Path]
    output: OutputOptions

    def run(self) -> ExitCode:
        trace = open_trace(self.trace)
        num_samples = num_tokens = 0
        for batch in trace:
            num_samples += batch.num_samples
            num_tokens += batch.logical_tokens
        header = trace.header
        if (num_samples, num_tokens) != (header.num_samples, header.logical_tokens):
            raise TraceError(
                f"{self.trace}: {num_samples} samples with {num_tokens} tokens found, trace.json "
                f"says {header.num_samples} with {header.logical_tokens}",
                "import the trace again",
            )
        self.output.emit(
            trace_identity(trace),
            f"{self.trace}: valid, {num_samples:,} samples, {num_tokens:,} tokens, "
            f"hash {trace.content_hash}",
        )
        return ExitCode.OK


@dataclass(frozen=True)
class TraceSlice:
    """Cut a smaller trace out of one iteration, or derive another sampling mode from it."""

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
    mode: str | None = None
    """sampling mode of the result: step, traj, tree or tree_step; default as recorded"""
    if_exists: IfExists = "error"
    """or overwrite: replace an older directory of psRL"""

    def run(self) -> ExitCode:
        from psrl.traces.modes import derive
        from psrl.traces.slicing import slice_batch

        check_new_directory(self.out, self.if_exists, [self.trace])
        trace = open_trace(self.trace)
        header = trace.header
        batch = slice_batch(
            trace.iteration(self.iteration),
            num_groups=self.groups,
            trajectories_per_group=self.trajectories,
            steps_per_trajectory=self.steps,
            max_sample_tokens=self.max_sample_tokens,
        )
        mode = self.mode or header.sampling_mode
        batch = derive(batch, mode, header.sampling_mode)
        sliced = write_trace(
            self.out,
            [batch],
            source=header.source,
            licence=header.licence,
            sampling_mode=mode,
            notes=f"slice of iteration {self.iteration} of {trace.content_hash}; {header.notes}",
            if_exists=self.if_exists,
            inputs=[self.trace],
        )
        self.output.emit(trace_identity(sliced), _written(sliced))
        return ExitCode.OK


@dataclass(frozen=True)
class TraceMerge:
    """Put several traces of one symbol kind together."""

    traces: tyro.conf.Positional[tuple[Path, ...]]
    """trace directories, in order"""
    out: Path
    """trace directory to write"""
    output: OutputOptions
    how: Literal["append", "side_by_side"] = "append"
    """append: iterations one after the other; side_by_side: the i-th iterations become one"""
    if_exists: IfExists = "error"
    """or overwrite: replace an older directory of psRL"""

    def run(self) -> ExitCode:
        from psrl.traces.merging import merge_traces

        check_new_directory(self.out, self.if_exists, self.traces)
        opened = [open_trace(path) for path in self.traces]
        batches = merge_traces(opened, self.how)
        headers = [trace.header for trace in opened]
        modes = dict.fromkeys(header.sampling_mode for header in headers)
        with self.output.step(f"merging {len(opened)} traces"):
            merged = write_trace(
                self.out,
                batches,
                source="; ".join(dict.fromkeys(header.source for header in headers)),
                licence="; ".join(dict.fromkeys(header.licence for header in headers)),
                sampling_mode=next(iter(modes)) if len(modes) == 1 else "mixed",
                notes="merged from " + ", ".join(trace.content_hash for trace in opened),
                if_exists=self.if_exists,
                inputs=self.traces,
            )
        self.output.emit(trace_identity(merged), _written(merged))
        return ExitCode.OK


@dataclass(frozen=True)
class TraceSynth:
    """Make a synthetic trace; docs/generators.md describes presets and dials."""

    preset: str
    """alfworld, dtn, search, webshop, or a TOML file with all dials"""
    mode: str
    """step, step_s, step_rt, traj, tree or tree_step"""
    out: Path
    """trace directory to write"""
    output: OutputOptions
    seed: int = 0
    set: tuple[str, ...] = ()
    """dials to change, e.g. tasks=64 turns.scale=2"""
    if_exists: IfExists = "error"
    """or overwrite: replace an older directory of psRL"""

    def run(self) -> ExitCode:
        from psrl.traces.synth import load_spec, synthesise

        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}", "give a whole number of at least 0")
        check_new_directory(self.out, self.if_exists)
        spec = load_spec(self.preset, self.mode, self.set)
        with self.output.step(f"generating {spec.name} {self.mode}"):
            recording = synthesise(spec, self.mode, self.seed)
        trace = write_trace(
            self.out,
            recording.batches,
            source=recording.source,
            licence=recording.licence,
            sampling_mode=recording.sampling_mode,
            notes=recording.notes,
            if_exists=self.if_exists,
        )
        result = {**trace_identity(trace), "seed": self.seed, "dials": spec.model_dump()}
        self.output.emit(result, _written(trace))
        return ExitCode.OK


def _model(name: str | None) -> ModelSpec | None:
    if name is None:
        return None
    if name not in MODELS:
        raise ConfigError(
            f"unknown model '{name}'.{suggest(name, list(MODELS))}",
            f"known models are {', '.join(MODELS)}",
        )
    return MODELS[name]


def _written(trace: Trace) -> str:
    return (
        f"{trace.path}: {trace.header.num_samples:,} samples, "
        f"{trace.header.logical_tokens:,} tokens, {trace.num_iterations} iteration(s)"
    )
