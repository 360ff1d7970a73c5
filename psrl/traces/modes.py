"""Sampling modes: how episodes recorded as step samples become training samples.

step: one sample per model call, history plus that response. traj: calls of one trajectory are
one sample as long as each starts with the one before, with all their responses trained.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from psrl.core.errors import TraceError, suggest
from psrl.core.sample import IntArray, SampleBatch, ragged_take

from .grouping import trajectory_codes


def derive(batch: SampleBatch, mode: str) -> SampleBatch:
    """Samples of another mode from a batch of recorded step samples.

    Args:
        batch: step samples.
        mode: a key of `MODES`.

    Raises:
        TraceError: if the mode is unknown, or "traj" is asked of block hashes that cannot show
            which response the next prompt continues.
    """
    if mode not in MODES:
        raise TraceError(
            f"unknown sampling mode '{mode}'.{suggest(mode, list(MODES))}",
            f"known modes are {', '.join(MODES)}",
        )
    return MODES[mode](batch)


def _step(batch: SampleBatch) -> SampleBatch:
    return batch


def _traj(batch: SampleBatch) -> SampleBatch:
    """Merge what can be merged without changing any trained token, its context or its weight.

    A new sample starts where the history was rewritten, where advantage or mini-batch changes,
    and where a span of the next call was trained before. A merged sample has the symbols of its
    last call, the agent step and arrival of its first, and the summed times of all.
    """
    chains = _chains(batch)
    if batch.symbol_num_tokens is not None and len(chains) == batch.num_samples:
        num_trajectories = len(np.unique(trajectory_codes(batch)))
        if num_trajectories < batch.num_samples:
            raise TraceError(
                f"mode traj: none of {batch.num_samples} samples in {num_trajectories} "
                "trajectories continues the one before; the block hashes of a prompt do not show "
                "the response before it",
                "use mode step",
            )
    members = np.concatenate([*chains, np.empty(0, np.int64)]).astype(np.int64)
    first = np.array([c[0] for c in chains], np.int64)
    merged = batch.select([c[-1] for c in chains])
    span_rows, _ = ragged_take(batch.loss_span_offsets, members)
    num_spans = [int(np.diff(batch.loss_span_offsets)[c].sum()) for c in chains]
    return replace(
        merged,
        loss_spans=batch.loss_spans[span_rows],
        loss_span_offsets=np.cumsum([0, *num_spans]).astype(np.int64),
        agent_step=batch.agent_step[first],
        arrival_s=batch.arrival_s[first],
        generate_s=np.array([batch.generate_s[c].sum() for c in chains], np.float64),
        environment_s=np.array([batch.environment_s[c].sum() for c in chains], np.float64),
    )


MODES: dict[str, Callable[[SampleBatch], SampleBatch]] = {"step": _step, "traj": _traj}


def _chains(batch: SampleBatch) -> list[list[int]]:
    """Samples that become one each, by the position of their first call in the batch."""
    calls: defaultdict[int, list[int]] = defaultdict(list)
    for sample, code in enumerate(trajectory_codes(batch).tolist()):
        calls[code].append(sample)
    chains: list[list[int]] = []
    for samples in calls.values():
        samples.sort(key=lambda s: int(batch.agent_step[s]))
        chain = samples[:1]
        for before, after in pairwise(samples):
            if _continues(batch, before, after):
                chain.append(after)
            else:
                chains.append(chain)
                chain = [after]
        chains.append(chain)
    return sorted(chains)


def _continues(batch: SampleBatch, before: int, after: int) -> bool:
    history, symbols = batch.sample_symbols(before), batch.sample_symbols(after)
    if not np.array_equal(history, symbols[: len(history)]):
        return False
    if batch.advantage[before] != batch.advantage[after]:
        return False
    if batch.mini_batch[before] != batch.mini_batch[after]:
        return False
    trained = _first_start(batch.sample_loss_spans(after))
    return trained >= int(batch.sample_loss_spans(before)[:, 1].max(initial=0))


def _first_start(spans: IntArray) -> int:
    return int(spans[:, 0].min(initial=np.iinfo(np.int64).max))
