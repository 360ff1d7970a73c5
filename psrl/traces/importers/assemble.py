"""Put recorded samples into RL iterations and optimizer steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from psrl.core.errors import ConfigError, TraceError
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch, make_batch
from psrl.traces.advantages import grpo_advantages
from psrl.traces.grouping import codes_by_appearance
from psrl.traces.recording import Recording

from .options import ImportOptions
from .reading import BadRecords, check_text
from .samples import RecordedSample


def assemble(
    samples: Sequence[RecordedSample],
    symbol_num_tokens: IntArray | None,
    paths: list[Path],
    options: ImportOptions,
    bad: BadRecords,
    notes: list[str],
    sampling_mode: str | None = "step",
) -> Recording:
    """The recording of samples, cut into iterations.

    Args:
        sampling_mode: how the samples were cut; None takes "traj" where every trajectory has
            one sample, else "step".

    Raises:
        TraceError: if no sample is left, or there are fewer groups than optimizer steps.
        ConfigError: if iterations are recorded and asked for as well.
    """
    trained = _with_trajectories([s for s in samples if s.loss_spans])
    if not trained:
        first = f"; the first: {bad.messages[0]}" if bad.messages else ""
        untrained = f", {len(samples)} samples without a trained token" if samples else ""
        raise TraceError(
            f"{paths[0]}: no sample in {len(paths)} files{untrained}, "
            f"{len(bad.messages)} records left out{first}",
            "check the files and the format",
        )
    notes = [*notes]
    if len(trained) < len(samples):
        notes.append(f"{len(samples) - len(trained)} samples without a trained token left out")
    if bad.messages:
        notes.append(f"{len(bad.messages)} malformed records were left out")
    if sampling_mode is None:
        episodes = {(s.iteration, s.group_id, s.trajectory_id) for s in trained}
        sampling_mode = "traj" if len(episodes) == len(trained) else "step"
    batch = make_batch(
        [s.symbols for s in trained],
        [list(s.loss_spans) for s in trained],
        symbol_num_tokens=symbol_num_tokens,
        group_id=[s.group_id for s in trained],
        trajectory_id=[s.trajectory_id for s in trained],
        agent_step=[s.agent_step for s in trained],
        advantage=_advantages(trained, notes),
        reward=[s.reward for s in trained],
        arrival_s=[s.arrival_s for s in trained],
        generate_s=[s.generate_s for s in trained],
        environment_s=[s.environment_s for s in trained],
    )
    return Recording(
        batches=split_iterations(batch, [s.iteration for s in trained], options),
        source=options.source or _file_names(paths),
        licence=options.licence,
        sampling_mode=sampling_mode,
        notes="; ".join(notes),
        skipped=tuple(bad.messages),
    )


def _with_trajectories(samples: Sequence[RecordedSample]) -> list[RecordedSample]:
    """Name the trajectories that have no name by their number in the group."""
    count: Counter[tuple[int | None, str]] = Counter()
    for name in {name for s in samples for name in (s.group_id, s.trajectory_id)}:
        check_text(name, f"group or trajectory {name!a}")
    named: list[RecordedSample] = []
    for sample in samples:
        if not sample.trajectory_id:
            key = (sample.iteration, sample.group_id)
            sample = replace(sample, trajectory_id=f"{sample.group_id}/{count[key]}")
            count[key] += 1
        named.append(sample)
    return named


def _advantages(samples: Sequence[RecordedSample], notes: list[str]) -> FloatArray:
    """[S] recorded advantages; GRPO's from the rewards where there are none."""
    advantage = np.array([s.advantage for s in samples], np.float64)
    episode_of: dict[tuple[str, str], int] = {}
    rewards: list[float] = []
    groups: list[str] = []
    owner: list[int] = []
    for sample in samples:
        group = f"{sample.iteration}/{sample.group_id}"
        key = (group, sample.trajectory_id)
        if key not in episode_of:
            episode_of[key] = len(rewards)
            rewards.append(sample.reward)
            groups.append(group)
        owner.append(episode_of[key])
    missing = np.isnan(advantage)
    if missing.any():
        reward = np.array(rewards, np.float64)
        derived = grpo_advantages(np.array(groups, np.str_), reward)
        advantage = np.where(missing, derived[owner], advantage)
        num_unknown = int(np.isnan(reward).sum())
        if num_unknown:
            notes.append(
                f"{num_unknown} of {len(rewards)} trajectories have no reward: "
                "advantage is 1 in their groups"
            )
    return advantage


def split_iterations(
    batch: SampleBatch, recorded: Sequence[int | None], options: ImportOptions
) -> tuple[SampleBatch, ...]:
    """Cut a batch into iterations of whole groups, and deal groups to optimizer steps.

    Recorded iterations are kept, in ascending order; samples that have none come first.
    """
    numbers = sorted({-1 if number is None else number for number in recorded})
    if len(numbers) == 1:
        return _cut(batch, options.groups_per_iteration, options.num_mini_batches)
    if options.groups_per_iteration is not None:
        raise ConfigError(
            f"the recording has {len(numbers)} iterations of its own",
            "leave --groups-per-iteration out",
        )
    member = np.array([-1 if number is None else number for number in recorded])
    return tuple(
        _cut(batch.select(np.flatnonzero(member == number)), None, options.num_mini_batches)[0]
        for number in numbers
    )


def _cut(
    batch: SampleBatch, groups_per_iteration: int | None, num_mini_batches: int
) -> tuple[SampleBatch, ...]:
    group = codes_by_appearance(batch.group_id)
    num_groups = int(group.max()) + 1
    per_iteration = min(groups_per_iteration or num_groups, num_groups)
    if per_iteration < num_mini_batches:
        raise TraceError(
            f"{per_iteration} semantic groups per iteration cannot fill "
            f"{num_mini_batches} mini-batches of whole groups",
            "lower num_mini_batches or raise groups_per_iteration",
        )
    dealt = replace(batch, mini_batch=group % per_iteration % num_mini_batches)
    return tuple(
        dealt.select(np.flatnonzero(group // per_iteration == iteration))
        for iteration in range(-(-num_groups // per_iteration))
    )


def _file_names(paths: list[Path]) -> str:
    names = ", ".join(path.name for path in paths[:3])
    return names + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")
