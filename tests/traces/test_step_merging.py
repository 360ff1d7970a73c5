"""Merging steps leaves every loss edge as it was: context, target, advantage, optimizer step."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.traces.modes import derive
from psrl.traces.step_merging import MergedSteps, merge_steps

Edge = tuple[str, tuple[int, ...], float, int]


@st.composite
def step_batches(draw: st.DrawFn) -> SampleBatch:
    """Episodes whose steps continue, rewrite, repeat or train again what came before."""
    symbols: list[list[int]] = []
    spans: list[list[tuple[int, int]]] = []
    labels: list[tuple[str, str, int, int, float]] = []
    for episode in range(draw(st.integers(1, 4))):
        group = f"g{draw(st.integers(0, 1))}"
        history = [draw(st.integers(0, 1))]
        for step in range(draw(st.integers(1, 5))):
            match draw(st.sampled_from(("go on", "go on", "go on", "rewrite", "go back", "again"))):
                case "rewrite":
                    history = [9, *history[1:]]
                case "go back" if symbols:
                    history = list(draw(st.sampled_from(symbols)))
            prompt = [*history, *draw(st.lists(st.integers(0, 1), max_size=2))]
            response = draw(st.lists(st.integers(2, 3), max_size=3))
            history = prompt + response
            start = draw(st.integers(1, len(prompt))) if draw(st.booleans()) else len(prompt)
            own = [(start, len(history))] if len(history) > start else []
            symbols.append(history)
            spans.append(own if draw(st.integers(0, 5)) else [])
            advantage = draw(st.sampled_from((1.0, 1.0, -0.5)))
            labels.append((group, f"t{episode}", step, draw(st.integers(0, 1)), advantage))
    order = draw(st.permutations(range(len(symbols))))
    group_id, trajectory_id, agent_step, mini_batch, advantages = zip(*labels, strict=True)
    return make_batch(
        list(symbols),
        spans,
        group_id=list(group_id),
        trajectory_id=list(trajectory_id),
        agent_step=agent_step,
        mini_batch=mini_batch,
        advantage=advantages,
    ).select(order)


def edges(batch: SampleBatch, span_advantage: list[float]) -> Counter[Edge]:
    """Every trained token with its group, context and target, advantage and optimizer step."""
    found: Counter[Edge] = Counter()
    for s in range(batch.num_samples):
        text = batch.sample_symbols(s).tolist()
        first = int(batch.loss_span_offsets[s])
        for row, (start, end) in enumerate(batch.sample_loss_spans(s).tolist(), first):
            for t in range(start, end):
                context = tuple(text[: t + 1])
                where = str(batch.group_id[s]), context, span_advantage[row]
                found[(*where, int(batch.mini_batch[s]))] += 1
    return found


def own_advantages(batch: SampleBatch) -> list[float]:
    return [
        float(batch.advantage[s])
        for s in range(batch.num_samples)
        for _ in batch.sample_loss_spans(s)
    ]


@settings(max_examples=60)
@given(step_batches(), st.sampled_from(("step", "tree_step")))
def test_every_loss_edge_stays(batch: SampleBatch, mode: str) -> None:
    merged = merge_steps(batch, mode)
    merged.batch.validate()
    before, after = (
        edges(batch, own_advantages(batch)),
        edges(merged.batch, merged.span_advantage.tolist()),
    )
    assert before == after
    assert merged.appended == batch.num_samples - merged.batch.num_samples >= 0


@given(step_batches())
def test_token_advantages_name_every_trained_token_once(batch: SampleBatch) -> None:
    merged = merge_steps(batch, "step")
    sample, token, advantage = merged.token_advantages()
    wanted = [
        (s, t)
        for s in range(merged.batch.num_samples)
        for start, end in merged.batch.sample_loss_spans(s).tolist()
        for t in range(start, end)
    ]
    assert list(zip(sample.tolist(), token.tolist(), strict=True)) == wanted
    assert len(advantage) == batch.loss_tokens


@settings(max_examples=60)
@given(step_batches(), st.sampled_from(("traj", "tree")))
def test_derived_modes_keep_every_edge_too(batch: SampleBatch, mode: str) -> None:
    steps = derive(batch, "tree_step") if mode == "tree" else batch
    derived = derive(steps, mode)
    assert edges(derived, own_advantages(derived)) == edges(steps, own_advantages(steps))


def chain(num_steps: int = 4) -> SampleBatch:
    texts = [list(range(3 * (i + 1))) for i in range(num_steps)]
    return make_batch(
        list(texts),
        [[(len(t) - 2, len(t))] for t in texts],
        group_id=["g"] * num_steps,
        trajectory_id=["t"] * num_steps,
        agent_step=range(num_steps),
    )


def counts(merged: MergedSteps) -> tuple[int, ...]:
    reasons = (merged.rewritten, merged.trained_again, merged.other_mini_batch, merged.branched)
    return (merged.num_steps, merged.appended, *reasons)


def test_a_continued_episode_becomes_one_sample() -> None:
    merged = merge_steps(chain(), "step")
    assert counts(merged) == (3, 3, 0, 0, 0, 0)
    assert merged.batch.sample_symbols(0).tolist() == list(range(12))
    assert merged.batch.loss_spans.tolist() == [[1, 3], [4, 6], [7, 9], [10, 12]]


def test_steps_of_different_advantages_keep_them_per_span() -> None:
    merged = merge_steps(replace(chain(), advantage=np.array([1.0, 2.0, 2.0, -1.0])), "step")
    assert merged.batch.num_samples == 1
    assert merged.span_advantage.tolist() == [1.0, 2.0, 2.0, -1.0]
    assert derive(replace(chain(), advantage=np.array([1.0, 2, 2, -1])), "traj").num_samples == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mini_batch": np.array([0, 1, 0, 1])}, (3, 2, 0, 0, 1, 0)),
        ({"trajectory_id": np.array(list("abcd"))}, (0, 0, 0, 0, 0, 0)),
        ({"symbols": np.arange(30)}, (3, 0, 3, 0, 0, 0)),
    ],
)
def test_what_keeps_steps_apart_is_counted(
    change: dict[str, np.ndarray], expected: tuple[int, ...]
) -> None:
    assert counts(merge_steps(replace(chain(), **change), "step")) == expected


def test_a_token_that_two_steps_train_stays_in_two_samples() -> None:
    batch = replace(chain(3), loss_spans=np.array([[1, 3], [2, 6], [7, 9]]))
    merged = merge_steps(batch, "step")
    assert counts(merged) == (2, 1, 0, 1, 0, 0)


def test_a_step_without_trained_tokens_hides_no_repetition() -> None:
    batch = replace(
        chain(3),
        loss_spans=np.array([[1, 3], [2, 9]]),
        loss_span_offsets=np.array([0, 1, 1, 2]),
    )
    merged = merge_steps(batch, "step")
    assert edges(merged.batch, merged.span_advantage.tolist()) == edges(batch, [1.0, 1.0])
    assert merged.batch.num_samples == 2


def test_branches_of_shared_calls_continue_one_of_them() -> None:
    batch = make_batch(
        [[0, 1], [0, 1, 2], [0, 1, 3]],
        [[(1, 2)], [(2, 3)], [(2, 3)]],
        group_id=["g"] * 3,
        trajectory_id=["a", "a", "b"],
        agent_step=[0, 1, 1],
    )
    assert counts(merge_steps(batch, "tree_step")) == (1, 1, 0, 0, 0, 0)
    alone = replace(batch, trajectory_id=np.array(["a", "b", "a"]))
    assert merge_steps(alone, "tree_step").batch.num_samples == 2
