"""Cut a batch down to the size of a test or of a small machine."""

from dataclasses import replace

import numpy as np

from psrl.core.errors import ConfigError, TraceError
from psrl.core.samples.sample import SampleBatch

from .blocks import compact_symbols
from .grouping import codes_by_appearance, rank_within, trajectory_codes


def slice_batch(
    batch: SampleBatch,
    *,
    num_groups: int | None = None,
    trajectories_per_group: int | None = None,
    steps_per_trajectory: int | None = None,
    max_sample_tokens: int | None = None,
) -> SampleBatch:
    """Keep the first groups, trajectories and steps; None keeps all.

    Samples over `max_sample_tokens` go first, then the others are counted by appearance. The
    order of samples stays, and so do advantages, which came from the whole group. Optimizer steps
    that lose all samples are closed up, and unused blocks leave the symbol table.

    Raises:
        ConfigError: if a limit is below 1.
        TraceError: if no sample remains.
    """
    limits = {
        "num_groups": num_groups,
        "trajectories_per_group": trajectories_per_group,
        "steps_per_trajectory": steps_per_trajectory,
        "max_sample_tokens": max_sample_tokens,
    }
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigError(f"{name} is {limit}", "give a whole number of at least 1")
    kept = batch
    if max_sample_tokens is not None:
        kept = kept.select(np.flatnonzero(batch.num_tokens <= max_sample_tokens))
    if not kept.num_samples:
        shortest = int(batch.num_tokens.min()) if batch.num_samples else 0
        raise TraceError(
            f"no sample of {batch.num_samples} remains: the shortest has {shortest} tokens, "
            f"max_sample_tokens is {max_sample_tokens}",
            f"raise max_sample_tokens to at least {shortest}",
        )
    group, trajectory = codes_by_appearance(kept.group_id), trajectory_codes(kept)
    _, first_call = np.unique(trajectory, return_index=True)
    position_in_group = rank_within(group[first_call])[trajectory]
    keep = np.ones(kept.num_samples, bool)
    for rank, limit in (
        (group, num_groups),
        (position_in_group, trajectories_per_group),
        (rank_within(trajectory), steps_per_trajectory),
    ):
        if limit is not None:
            keep &= rank < limit
    chosen = kept.select(np.flatnonzero(keep))
    closed_up = np.unique(chosen.mini_batch, return_inverse=True)[1]
    return compact_symbols([replace(chosen, mini_batch=closed_up)])[0]
