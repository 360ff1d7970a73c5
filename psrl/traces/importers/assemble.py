"""Put recorded samples into RL iterations and optimizer steps."""

from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import numpy as np

from psrl.core.errors import TraceError
from psrl.core.sample import IntArray, SampleBatch, make_batch
from psrl.traces.grouping import codes_by_appearance
from psrl.traces.recording import Recording

from .options import ImportOptions
from .reading import BadRecords


@dataclass(frozen=True)
class StepSample:
    """One recorded model call: its symbols, and the token range of the response."""

    symbols: IntArray
    response: tuple[int, int]
    group_id: str
    trajectory_id: str
    agent_step: int
    advantage: float = 1.0
    reward: float = nan
    arrival_s: float = nan
    generate_s: float = nan
    environment_s: float = nan


def assemble(
    samples: list[StepSample],
    symbol_num_tokens: IntArray | None,
    paths: list[Path],
    options: ImportOptions,
    bad: BadRecords,
    notes: list[str],
) -> Recording:
    """The recording of step samples, cut into iterations.

    Raises:
        TraceError: if no sample is left, or there are fewer groups than optimizer steps.
    """
    if not samples:
        first = f"; the first: {bad.messages[0]}" if bad.messages else ""
        raise TraceError(
            f"no sample in {len(paths)} files, {len(bad.messages)} records left out{first}",
            "check the files and the format",
        )
    batch = make_batch(
        [s.symbols for s in samples],
        [[s.response] for s in samples],
        symbol_num_tokens=symbol_num_tokens,
        group_id=[s.group_id for s in samples],
        trajectory_id=[s.trajectory_id for s in samples],
        agent_step=[s.agent_step for s in samples],
        advantage=[s.advantage for s in samples],
        reward=[s.reward for s in samples],
        arrival_s=[s.arrival_s for s in samples],
        generate_s=[s.generate_s for s in samples],
        environment_s=[s.environment_s for s in samples],
    )
    if bad.messages:
        notes = [*notes, f"{len(bad.messages)} malformed records were left out"]
    return Recording(
        batches=split_iterations(batch, options),
        source=options.source or _file_names(paths),
        licence=options.licence,
        sampling_mode="step",
        notes="; ".join(notes),
        skipped=tuple(bad.messages),
    )


def split_iterations(batch: SampleBatch, options: ImportOptions) -> tuple[SampleBatch, ...]:
    """Cut a batch into iterations by semantic group, and deal groups to optimizer steps."""
    group = codes_by_appearance(batch.group_id)
    num_groups = int(group.max()) + 1
    per_iteration = min(options.groups_per_iteration or num_groups, num_groups)
    if per_iteration < options.num_mini_batches:
        raise TraceError(
            f"{per_iteration} semantic groups per iteration cannot fill "
            f"{options.num_mini_batches} mini-batches of whole groups",
            "lower num_mini_batches or raise groups_per_iteration",
        )
    dealt = replace(batch, mini_batch=group % per_iteration % options.num_mini_batches)
    return tuple(
        dealt.select(np.flatnonzero(group // per_iteration == iteration))
        for iteration in range(-(-num_groups // per_iteration))
    )


def _file_names(paths: list[Path]) -> str:
    names = ", ".join(path.name for path in paths[:3])
    return names + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")
