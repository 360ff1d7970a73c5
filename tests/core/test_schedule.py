"""Op lists and their timing: textbook 1F1B, generalised counts, deadlocks under rendezvous."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.plan.schedule import (
    Op,
    can_finish,
    eager_backward_order,
    fill_counts,
    forward_needs,
    interleave,
    stage_ops,
)


def forward(micro_batch: int) -> Op:
    return Op("forward", micro_batch)


def backward(micro_batch: int) -> Op:
    return Op("backward", micro_batch)


def textbook_1f1b(num_micro_batches: int, num_stages: int, stage: int) -> list[Op]:
    """Warm-up forwards, one forward and one backward in turn, then the remaining backwards."""
    warm_up = min(num_micro_batches, num_stages - 1 - stage)
    ops = [forward(m) for m in range(warm_up)]
    for m in range(warm_up, num_micro_batches):
        ops += [forward(m), backward(m - warm_up)]
    return ops + [backward(m) for m in range(num_micro_batches - warm_up, num_micro_batches)]


def plain_ops(num_micro_batches: int) -> list[Op]:
    """Last stage of plain 1F1B."""
    order = list(range(num_micro_batches))
    return interleave(order, order, forward_needs(order, order))


def random_readers(rng: np.random.Generator, count: int) -> list[set[int]]:
    return [
        {r for r in range(m + 1, count) if rng.random() < rng.choice([0.05, 0.4])}
        for m in range(count)
    ]


def random_last_stage(rng: np.random.Generator, count: int) -> list[Op]:
    """Random readers and backward order, and any valid number of forwards before each."""
    readers = random_readers(rng, count)
    order: list[int] = []
    while len(order) < count:
        ready = [m for m in range(count) if m not in order and readers[m] <= set(order)]
        order.append(int(rng.choice(ready)))
    needs = forward_needs(range(count), order)
    counts = np.maximum.accumulate([rng.integers(n, count + 1) for n in needs]).tolist()
    dropped = frozenset(np.flatnonzero(rng.random(count) < 0.3).tolist())
    return interleave(range(count), order, counts, dropped)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 9])
def test_without_readers_it_is_textbook_1f1b(num_micro_batches: int, num_stages: int) -> None:
    ops = plain_ops(num_micro_batches)
    for stage in range(num_stages):
        expected = textbook_1f1b(num_micro_batches, num_stages, stage)
        assert stage_ops(ops, num_stages, stage) == expected


def test_needs_of_a_parent_with_two_children() -> None:
    assert forward_needs([0, 1, 2], [1, 2, 0]) == [2, 3, 3]
    assert forward_needs([0, 1, 2], [2, 1, 0]) == [3, 3, 3]


def test_eager_order_by_hand() -> None:
    """0 is read by all; 1 by 2; 3 and 4 are leaves: a backward follows at once where it can."""
    readers: list[set[int]] = [{1, 2, 3, 4}, {2}, set(), set(), set()]
    assert eager_backward_order(range(5), readers) == [2, 1, 3, 4, 0]


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_eager_order_waits_for_readers_and_for_nothing_else(seed: int, count: int) -> None:
    readers = random_readers(np.random.default_rng(seed), count)
    order = eager_backward_order(range(count), readers)
    assert sorted(order) == list(range(count))
    needs = [0, *forward_needs(range(count), order)]
    for k, m in enumerate(order):
        done = set(order[:k])
        ready = [r for r in range(needs[k + 1]) if r not in done and readers[r] <= done]
        assert m == max(ready)
        if needs[k + 1] > needs[k]:  # one more forward ran first: nothing was ready before it
            assert ready == [needs[k + 1] - 1]


@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0, 2))
def test_fill_covers_the_needs_within_the_budget(seed: int, count: int, extra: float) -> None:
    rng = np.random.default_rng(seed)
    order = eager_backward_order(range(count), random_readers(rng, count))
    size = rng.integers(1, 50, count).tolist()
    needs = forward_needs(range(count), order)

    def held(counts: list[int]) -> list[int]:
        return [sum(size[:n]) - sum(size[m] for m in order[:k]) for k, n in enumerate(counts)]

    forced = max(held(needs))
    for budget in (None, 0.0, extra * sum(size)):
        limit = max(forced, budget or 0.0)
        counts = fill_counts(range(count), order, size.__getitem__, budget)
        assert all(n >= need for n, need in zip(counts, needs, strict=True))
        assert counts == sorted(counts)
        assert max(held(counts)) <= limit
        one_more = [min(count, n + 1) for n in counts]
        more = zip(one_more, counts, held(one_more), strict=True)
        assert all(after > limit for n, before, after in more if n > before)


@given(st.integers(0, 10_000), st.integers(1, 10), st.integers(1, 8))
def test_every_stage_runs_its_share_of_forwards_ahead(seed: int, count: int, stages: int) -> None:
    last = random_last_stage(np.random.default_rng(seed), count)
    last_counts = forwards_before_each_backward(last)
    for stage in range(stages):
        ops = stage_ops(last, stages, stage)
        assert Counter(ops) == Counter(last)
        assert forwards_before_each_backward(ops) == [
            min(count, n + stages - 1 - stage) for n in last_counts
        ]
        for i, op in enumerate(ops):
            assert op.kind != "recompute" or ops[i + 1] == backward(op.micro_batch)
        assert [op for op in ops if op.kind != "forward"] == [
            op for op in last if op.kind != "forward"
        ]
    assert stage_ops(last, stages, stages - 1) == last


def forwards_before_each_backward(ops: list[Op]) -> list[int]:
    counts, seen = [], 0
    for op in ops:
        seen += op.kind == "forward"
        if op.kind == "backward":
            counts.append(seen)
    return counts


def test_forward_only_is_the_same_on_every_stage() -> None:
    ops = [forward(2), forward(0), forward(1)]
    assert [stage_ops(ops, 3, stage) for stage in range(3)] == [ops] * 3


def finishes(last: list[Op], num_stages: int, window: int) -> bool:
    return can_finish([stage_ops(last, num_stages, stage) for stage in range(num_stages)], window)


def test_stage_that_runs_too_few_forwards_hangs() -> None:
    """Stage 0 holds a forward back until the backward that needs it has returned."""
    first = [forward(0), backward(0), forward(1), backward(1)]
    last = [forward(0), forward(1), backward(0), backward(1)]
    assert not can_finish([first, last], send_window=len(first))


def test_blocking_sends_hang_where_a_window_of_one_does_not() -> None:
    """Stage 0 sends the activation of 2 while stage 1 sends the gradient of 1."""
    last = [forward(0), forward(1), backward(1), forward(2), backward(2), backward(0)]
    assert not finishes(last, 2, window=0)
    assert finishes(last, 2, window=1)


def test_some_random_plans_hang_with_blocking_sends() -> None:
    rng = np.random.default_rng(0)
    hung = sum(
        not finishes(random_last_stage(rng, int(rng.integers(2, 7))), 2, window=0)
        for _ in range(200)
    )
    assert 0 < hung < 200


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_no_random_plan_hangs_with_a_window_of_one(num_stages: int) -> None:
    rng = np.random.default_rng(num_stages)
    for _ in range(300):
        last = random_last_stage(rng, int(rng.integers(1, 11)))
        assert finishes(last, num_stages, window=1)
