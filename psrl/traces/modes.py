"""Sampling modes: how recorded episodes become training samples.

docs/trace-format.md defines the modes. One rule holds for all of them: a generated token trains
exactly once, in the context in which it was generated, however many samples repeat it.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from psrl.core.errors import TraceError, suggest
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.prefix_tree import build_prefix_tree

from .grouping import codes_by_appearance, rank_within, trajectory_codes
from .step_merging import continuations, join

# What importers and generators must make, because finished samples do not show what to leave out.
MADE_AT_THE_SOURCE = ("step_s", "step_rt")


def derive(batch: SampleBatch, mode: str, recorded: str = "step") -> SampleBatch:
    """Samples of another mode.

    Args:
        batch: samples as recorded.
        mode: a key of `MODES`.
        recorded: what the batch holds: "traj" for whole episodes with a loss span per response,
            anything else for one sample per model call.

    Raises:
        TraceError: if the mode is unknown or cannot be derived, e.g. because block hashes do not
            show which response the next prompt continues.
    """
    if mode in MADE_AT_THE_SOURCE and mode != recorded:
        raise TraceError(
            f"mode {mode} cannot be derived from {recorded} samples: they do not say what the "
            "agent kept of its history",
            "import the recording in that mode, or `psrl trace synth --mode` it",
        )
    if mode not in MODES and mode != recorded:
        raise TraceError(
            f"unknown sampling mode '{mode}'.{suggest(mode, list(MODES))}",
            f"known modes are {', '.join(MODES)}",
        )
    if mode == recorded:
        return batch
    return MODES[mode](_calls(batch) if recorded in ("traj", "tree") else batch)


def _step(batch: SampleBatch) -> SampleBatch:
    return batch


def _tree_step(batch: SampleBatch) -> SampleBatch:
    """Model calls of each group, those that several episodes repeat once.

    Branching episodes share the calls before their fork. Calls are the same one when group,
    mini-batch, symbols and loss spans agree; the first keeps its place, with the mean advantage
    and reward of all: each episode counts once, as in the samples that repeat the call.
    """
    group = codes_by_appearance(batch.group_id)
    node = build_prefix_tree(batch, group).sample_node
    copies: defaultdict[tuple[int, int, int, bytes], list[int]] = defaultdict(list)
    keys = zip(group.tolist(), node.tolist(), batch.mini_batch.tolist(), strict=True)
    for s, (owner, end, mini_batch) in enumerate(keys):
        copies[owner, end, mini_batch, batch.sample_loss_spans(s).tobytes()].append(s)
    first = [same[0] for same in copies.values()]
    if len(first) == batch.num_samples:
        return batch
    return replace(
        batch.select(first),
        advantage=np.array([batch.advantage[same].mean() for same in copies.values()]),
        reward=np.array([batch.reward[same].mean() for same in copies.values()]),
    )


def _traj(batch: SampleBatch) -> SampleBatch:
    """Merge the calls of an episode as far as no trained token, context or weight changes."""
    return _merge(batch, "traj", trajectory_codes(batch))


def _tree(batch: SampleBatch) -> SampleBatch:
    """Root-to-leaf paths: the calls of a group, merged along the branches of its tree.

    A call before a fork is trained by one path; the others repeat it as context.
    """
    calls = _tree_step(batch)
    return _merge(calls, "tree", codes_by_appearance(calls.group_id))


MODES: dict[str, Callable[[SampleBatch], SampleBatch]] = {
    "step": _step,
    "traj": _traj,
    "tree": _tree,
    "tree_step": _tree_step,
}


def _calls(batch: SampleBatch) -> SampleBatch:
    """One sample per loss span of recorded episodes: the tokens up to its end, that span trained.

    Agent steps count on from the episode's own. Times are those of the whole episode and so
    unknown for a call, unless it is the only one.
    """
    num_calls = np.diff(batch.loss_span_offsets)
    episode = np.repeat(np.arange(batch.num_samples), num_calls)
    tokens = np.concatenate([[0], np.cumsum(batch.occurrence_tokens)])
    ends = tokens[batch.symbol_offsets[episode]] + batch.loss_spans[:, 1]
    last = np.searchsorted(tokens, ends)
    inside = np.flatnonzero(tokens[last] != ends)
    if len(inside):
        call = int(inside[0])
        raise TraceError(
            f"sample {int(episode[call])}: loss span ending at token "
            f"{int(batch.loss_spans[call, 1])} ends inside a block",
            "episodes can be cut into calls only where blocks end",
        )
    lengths = last - batch.symbol_offsets[episode]
    symbol_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    start = batch.symbol_offsets[episode] - symbol_offsets[:-1]
    rows = np.arange(symbol_offsets[-1]) + np.repeat(start, lengths)
    columns: dict[str, Any] = {
        name: getattr(batch, name)[episode]
        for name in ("group_id", "trajectory_id", "mini_batch", "advantage", "reward")
    }
    alone = num_calls[episode] == 1
    columns |= {
        name: np.where(alone, getattr(batch, name)[episode], np.nan)
        for name in ("arrival_s", "generate_s", "environment_s")
    }
    return replace(
        batch,
        symbols=batch.symbols[rows],
        symbol_offsets=symbol_offsets,
        loss_span_offsets=np.arange(len(episode) + 1),
        agent_step=batch.agent_step[episode] + rank_within(episode),
        **columns,
    )


def _merge(batch: SampleBatch, mode: str, owner: IntArray) -> SampleBatch:
    """Merge each call with the one that continues it, for one owner and advantage."""
    next_call = continuations(batch, owner, equal_advantage=True)
    num_trajectories = len(np.unique(trajectory_codes(batch)))
    could_continue = num_trajectories < batch.num_samples
    if batch.symbol_num_tokens is not None and could_continue and not next_call:
        raise TraceError(
            f"mode {mode}: none of {batch.num_samples} samples in {num_trajectories} trajectories "
            "continues the one before; the block hashes of a prompt do not show the response "
            "before it",
            "use mode step",
        )
    return join(batch, next_call)[0]
