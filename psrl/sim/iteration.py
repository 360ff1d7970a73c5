"""A whole RL iteration: rollout and training, one after the other or one step apart."""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.core.errors import ConfigError
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch


@dataclass(frozen=True)
class Rollout:
    """How long it takes to collect the samples of an iteration; `source` is trace or rate."""

    source: str
    duration_s: float
    num_turns: int
    generated_tokens: int


def recorded_rollout(batch: SampleBatch) -> Rollout | None:
    """The recording's own time: from the first call of the model to the end of the last.

    None unless every turn has its arrival and generation time.
    """
    turns = _turns(batch)
    arrival_s, generate_s = batch.arrival_s[turns], batch.generate_s[turns]
    if not len(turns) or not np.isfinite(arrival_s + generate_s).all():
        return None
    duration_s = float((arrival_s + generate_s).max() - arrival_s.min())
    return Rollout("trace", duration_s, len(turns), int(_generated_tokens(batch)[turns].sum()))


def modelled_rollout(
    batch: SampleBatch, tokens_per_s: float, concurrency: int | None = None
) -> Rollout:
    """Every turn generates its trained tokens at one rate, and waits for its environment first.

    Args:
        tokens_per_s: generation rate of one trajectory.
        concurrency: trajectories generated at a time, started in the order of the batch as slots
            become free; None for all.

    Raises:
        ConfigError: if rate or concurrency is not positive.
    """
    if not tokens_per_s > 0 or (concurrency is not None and concurrency < 1):
        raise ConfigError(
            f"generation at {tokens_per_s} tokens/s with {concurrency} trajectories at a time",
            "both must be positive",
        )
    turns = _turns(batch)
    generated = _generated_tokens(batch)[turns]
    waits_s = np.nan_to_num(batch.environment_s[turns])
    trajectories, position = np.unique(batch.trajectory_id[turns], return_index=True)
    _, trajectory = np.unique(batch.trajectory_id[turns], return_inverse=True)
    lasts_s = np.zeros(len(trajectories))
    np.add.at(lasts_s, trajectory, generated / tokens_per_s + waits_s)
    in_order = lasts_s[np.argsort(position, kind="stable")]
    duration_s = _list_schedule_s(in_order, concurrency or max(1, len(in_order)))
    return Rollout("rate", duration_s, len(turns), int(generated.sum()))


def _list_schedule_s(lasts_s: FloatArray, num_slots: int) -> float:
    """End of the last job when each takes the slot that becomes free first."""
    free_s = [0.0] * num_slots
    for job_s in lasts_s.tolist():
        heapq.heapreplace(free_s, free_s[0] + job_s)
    return max(free_s)


def _turns(batch: SampleBatch) -> IntArray:
    """One sample per (trajectory, agent step): samples derived from one turn repeat its times."""
    keys = list(zip(batch.trajectory_id.tolist(), batch.agent_step.tolist(), strict=True))
    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    return np.array(sorted(first.values()), np.int64)


def _generated_tokens(batch: SampleBatch) -> IntArray:
    """[S] trained tokens: what the model generated."""
    lengths = batch.loss_spans[:, 1] - batch.loss_spans[:, 0]
    before = np.concatenate([[0], np.cumsum(lengths)])
    return np.diff(before[batch.loss_span_offsets])


def iteration_metrics(rollout: Rollout, metrics: dict[str, Any]) -> dict[str, Any]:
    """The section `iteration`, from the metrics of the training phases.

    One step off, the next rollout runs beside the training on devices of its own, so the slower
    of the two sets the pace.
    """
    training_s = float(metrics["makespan_s"])
    update_s = float(metrics["phases"].get("update", {}).get("makespan_s", 0.0))
    together_s, pace_s = rollout.duration_s + training_s, max(rollout.duration_s, training_s)
    return {
        "rollout_source": rollout.source,
        "rollout_s": rollout.duration_s,
        "rollout_turns": rollout.num_turns,
        "generated_tokens": rollout.generated_tokens,
        "training_s": training_s,
        "synchronous_s": together_s,
        "update_share": update_s / together_s if together_s else 0.0,
        "one_step_off_s": pace_s,
        "rollout_idle_fraction": 1.0 - rollout.duration_s / pace_s if pace_s else 0.0,
        "training_idle_fraction": 1.0 - training_s / pace_s if pace_s else 0.0,
    }
