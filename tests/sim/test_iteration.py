"""Rollout times, recorded and modelled, and what an iteration makes of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import ConfigError
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.sim.iteration import Rollout, iteration_metrics, modelled_rollout, recorded_rollout


def turns_batch(with_times: bool = True) -> SampleBatch:
    """Two trajectories of two turns; the last turn of the first occurs in two samples."""
    times = {
        "arrival_s": [10.0, 20.0, 20.0, 12.0, 30.0],
        "generate_s": [4.0, 5.0, 5.0, 6.0, 9.0],
        "environment_s": [0.0, 6.0, 6.0, np.nan, 12.0],
    }
    return make_batch(
        [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7], [5, 6, 7, 8, 9, 9]],
        [[(1, 2)], [(2, 4)], [(2, 4)], [(1, 3)], [(3, 4), (5, 6)]],
        trajectory_id=["a", "a", "a", "b", "b"],
        agent_step=[0, 1, 1, 0, 1],
        **(times if with_times else {}),
    )


def test_a_recorded_rollout_lasts_from_the_first_call_to_the_last_answer() -> None:
    assert recorded_rollout(turns_batch()) == Rollout("trace", 29.0, 4, 1 + 2 + 2 + 2)
    assert recorded_rollout(turns_batch(with_times=False)) is None


def test_a_modelled_rollout_generates_turns_at_one_rate() -> None:
    # a: 3 tokens and 6 s of environment; b: 4 tokens and 12 s.
    assert modelled_rollout(turns_batch(), 2.0) == Rollout("rate", 2.0 + 12.0, 4, 7)
    assert modelled_rollout(turns_batch(), 2.0, 1).duration_s == (1.5 + 6.0) + (2.0 + 12.0)
    assert modelled_rollout(turns_batch(with_times=False), 2.0).duration_s == 2.0


def test_trajectories_take_the_slot_that_is_free_first() -> None:
    batch = make_batch([range(n + 1) for n in (5, 1, 1, 4)], [[(1, n + 1)] for n in (5, 1, 1, 4)])
    # Two slots: 5 | 1, 1, 4.
    assert modelled_rollout(batch, 1.0, 2).duration_s == 6.0


@pytest.mark.parametrize(("rate", "concurrency"), [(0.0, None), (-1.0, None), (5.0, 0)])
def test_a_rollout_needs_a_rate_and_a_slot(rate: float, concurrency: int | None) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        modelled_rollout(turns_batch(), rate, concurrency)


@given(st.floats(0.1, 1e3), st.floats(0.1, 1e3), st.floats(0.0, 1.0))
def test_one_step_off_takes_the_slower_of_rollout_and_training(
    rollout_s: float, training_s: float, share: float
) -> None:
    metrics = {
        "makespan_s": training_s,
        "phases": {"update": {"makespan_s": share * training_s}},
    }
    found = iteration_metrics(Rollout("rate", rollout_s, 1, 1), metrics)
    assert found["synchronous_s"] == rollout_s + training_s
    assert found["one_step_off_s"] == max(rollout_s, training_s)
    assert found["update_share"] == pytest.approx(share * training_s / (rollout_s + training_s))
    assert min(found["rollout_idle_fraction"], found["training_idle_fraction"]) == 0.0
    idle_s = (found["rollout_idle_fraction"] + found["training_idle_fraction"]) * max(
        rollout_s, training_s
    )
    assert idle_s == pytest.approx(abs(rollout_s - training_s), abs=1e-9)
