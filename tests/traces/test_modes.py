"""Sampling modes of branching episodes: every generated token trains once, in its own context."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import TraceError
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.traces.modes import derive

# A call: group, trajectory, agent step, prompt, response.
Call = tuple[str, str, int, list[int], list[int]]


@st.composite
def branching(draw: st.DrawFn) -> tuple[list[Call], list[Call]]:
    """Calls of branching rollouts, each once; and as recorded per leaf, repeated by its branches.

    Responses are told apart by their first token, so that no two calls are equal by chance.
    """
    once: list[Call] = []
    per_leaf: list[Call] = []
    fresh = iter(range(10, 10_000))
    for group in range(draw(st.integers(1, 2))):
        paths: list[list[tuple[list[int], list[int]]]] = []
        for leaf in range(draw(st.integers(1, 4))):
            path: list[tuple[list[int], list[int]]] = []
            history = [group]
            if paths and draw(st.booleans()):
                left = draw(st.sampled_from(paths))
                path = left[: draw(st.integers(0, len(left)))]
                if path:
                    history = [*path[-1][0], *path[-1][1]]
            for _ in range(draw(st.integers(1, 3))):
                if draw(st.integers(0, 5)) == 0:
                    history = [group, next(fresh)]
                response = [next(fresh), *draw(st.lists(st.integers(0, 2), max_size=2))]
                once.append((f"g{group}", f"t{leaf}", len(path), history, response))
                path = [*path, (history, response)]
                history = [*history, *response, *draw(st.lists(st.integers(0, 2), max_size=2))]
            paths.append(path)
            per_leaf += [(f"g{group}", f"t{leaf}", i, *call) for i, call in enumerate(path)]
    return once, per_leaf


def step_batch(calls: list[Call]) -> SampleBatch:
    return make_batch(
        [prompt + response for *_, prompt, response in calls],
        [[(len(prompt), len(prompt) + len(response))] for *_, prompt, response in calls],
        group_id=[call[0] for call in calls],
        trajectory_id=[call[1] for call in calls],
        agent_step=[call[2] for call in calls],
    )


def trained(batch: SampleBatch) -> Counter[tuple[str, tuple[int, ...]]]:
    """Every trained token with its context and group."""
    return Counter(
        (str(batch.group_id[s]), tuple(batch.sample_symbols(s)[: t + 1].tolist()))
        for s in range(batch.num_samples)
        for start, end in batch.sample_loss_spans(s)
        for t in range(start, end)
    )


def generated(calls: list[Call]) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter(
        (group, (*prompt, *response[: i + 1]))
        for group, _, _, prompt, response in calls
        for i in range(len(response))
    )


@pytest.mark.slow
@given(branching())
def test_each_generated_token_is_trained_once(episodes: tuple[list[Call], list[Call]]) -> None:
    once, per_leaf = episodes
    truth = generated(once)
    assert set(truth.values()) <= {1}
    for recorded in (once, per_leaf):
        for mode in ("tree_step", "tree"):
            batch = derive(step_batch(recorded), mode)
            batch.validate()
            assert trained(batch) == truth
    for mode in ("step", "traj"):
        assert trained(derive(step_batch(once), mode)) == truth


@given(branching())
def test_trees_have_a_path_per_leaf_and_a_call_per_node(
    episodes: tuple[list[Call], list[Call]],
) -> None:
    once, per_leaf = episodes
    calls = derive(step_batch(per_leaf), "tree_step")
    assert calls.num_samples == len(once)
    paths = derive(step_batch(per_leaf), "tree")
    assert trained(derive(paths, "tree_step", "tree")) == trained(calls)
    texts = [(call[0], (*call[3], *call[4])) for call in once]
    ends = sorted(
        (group, text)
        for group, text in texts
        if not any(g == group and t[: len(text)] == text and t != text for g, t in texts)
    )
    samples = sorted(
        (str(paths.group_id[s]), tuple(paths.sample_symbols(s).tolist()))
        for s in range(paths.num_samples)
    )
    assert samples == ends


@given(branching())
def test_episodes_are_cut_back_into_their_calls(episodes: tuple[list[Call], list[Call]]) -> None:
    once, _ = episodes
    calls = step_batch(once)
    merged = derive(calls, "traj")
    again = derive(merged, "step", "traj")
    again.validate()
    assert again.num_samples == calls.num_samples
    assert trained(again) == trained(calls)
    order = np.lexsort((calls.agent_step, calls.trajectory_id, calls.group_id))
    back = np.lexsort((again.agent_step, again.trajectory_id, again.group_id))
    assert again.agent_step[back].tolist() == calls.agent_step[order].tolist()
    for s, t in zip(order, back, strict=True):
        assert calls.sample_symbols(s).tolist() == again.sample_symbols(t).tolist()


def test_a_repeated_call_trains_with_the_mean_advantage() -> None:
    batch = make_batch(
        [[1, 2], [1, 2, 3], [1, 2], [1, 2, 4]],
        [[(1, 2)], [(2, 3)], [(1, 2)], [(2, 3)]],
        group_id=["g"] * 4,
        trajectory_id=["a", "a", "b", "b"],
        agent_step=[0, 1, 0, 1],
        advantage=[1.0, 1.0, -2.0, -2.0],
        reward=[1.0, 1.0, 0.0, 0.0],
    )
    calls = derive(batch, "tree_step")
    assert calls.advantage.tolist() == [-0.5, 1.0, -2.0]
    assert calls.reward.tolist() == [0.5, 1.0, 0.0]
    # A path has one advantage for all its tokens, so a call with another one stays alone.
    assert derive(batch, "tree").num_samples == 3


def test_equal_calls_of_other_groups_or_optimizer_steps_are_not_one() -> None:
    batch = make_batch(
        [[1, 2]] * 3,
        [[(1, 2)]] * 3,
        group_id=["g", "g", "h"],
        trajectory_id=["a", "b", "a"],
        mini_batch=[0, 1, 0],
    )
    assert derive(batch, "tree_step").num_samples == 3


def test_a_fork_is_trained_by_its_own_trajectory() -> None:
    batch = make_batch(
        [[1, 2], [1, 2, 4], [1, 2, 3]],
        [[(1, 2)], [(2, 3)], [(2, 3)]],
        group_id=["g"] * 3,
        trajectory_id=["a", "b", "a"],
        agent_step=[0, 1, 1],
    )
    paths = derive(batch, "tree")
    assert [paths.sample_symbols(s).tolist() for s in range(2)] == [[1, 2, 3], [1, 2, 4]]
    assert [paths.sample_loss_spans(s).tolist() for s in range(2)] == [[[1, 2], [2, 3]], [[2, 3]]]


def test_modes_that_need_the_source_say_so() -> None:
    batch = make_batch([[1, 2]], [[(1, 2)]])
    with pytest.raises(TraceError, match="step_s cannot be derived from step samples"):
        derive(batch, "step_s")
    assert derive(batch, "step_rt", "step_rt") is batch


def test_episodes_of_blocks_are_cut_only_between_blocks() -> None:
    batch = make_batch([[0, 1]], [[(1, 3)]], symbol_num_tokens=np.array([2, 2]))
    with pytest.raises(TraceError, match="ending at token 3 ends inside a block"):
        derive(batch, "step", "traj")
    whole = make_batch([[0, 1]], [[(1, 2)]], symbol_num_tokens=np.array([2, 2]))
    assert derive(whole, "step", "traj").symbols.tolist() == [0]
