"""The order of samples and their common symbols, against sorting lists in Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.samples.sample import make_batch
from psrl.core.tree.sample_order import sort_samples

# Few symbols, so that samples repeat, extend and end inside each other; and ids of every width.
SYMBOLS = st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1]) | st.integers(0, 1)


@given(st.lists(st.tuples(st.integers(-1, 1), st.lists(SYMBOLS, max_size=6)), max_size=12))
def test_order_and_common_symbols(rows: list[tuple[int, list[int]]]) -> None:
    batch = make_batch([symbols for _, symbols in rows], [[]] * len(rows))
    order, common = sort_samples(batch, np.array([key for key, _ in rows], np.int64))
    assert order.tolist() == sorted(range(len(rows)), key=rows.__getitem__)
    ordered = [rows[s] for s in order]
    expected = [0] * len(rows)
    for i in range(1, len(rows)):
        (key_a, a), (key_b, b) = ordered[i - 1], ordered[i]
        if key_a == key_b:
            same = [x == y for x, y in zip(a, b, strict=False)]
            expected[i] = [*same, False].index(False)
    assert common.tolist() == expected


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=4))
def test_growing_episodes_side_by_side(turns: list[list[int]]) -> None:
    """The recorded shape: two episodes of one prompt, call by call, in turn and one by one."""
    histories = [[7], [7]]
    calls: list[list[list[int]]] = [[], []]
    for turn in turns:
        for episode, history in enumerate(histories):
            history += [x + 2 * episode for x in turn]
            calls[episode].append(list(history))
    one_by_one = calls[0] + calls[1]
    in_turn = [call for pair in zip(*calls, strict=True) for call in pair]
    for rows in (one_by_one, in_turn):
        order, common = sort_samples(make_batch(list(rows), [[]] * len(rows)), np.zeros(len(rows)))
        assert [rows[s] for s in order] == sorted(rows)
        lengths = [len(call) for call in sorted(rows)]
        assert common.tolist() == [0, *lengths[: len(turns) - 1], 1, *lengths[len(turns) : -1]]


def test_pieces_that_are_converted_apart() -> None:
    rows = [np.arange(n) % 5 for n in (100_000, 200_000, 0, 100_000, 3)]
    order, common = sort_samples(make_batch(list(rows), [[]] * 5), np.zeros(5))
    assert order.tolist() == [2, 4, 0, 3, 1]
    assert common.tolist() == [0, 0, 3, 100_000, 100_000]


def test_many_identical_samples_and_a_very_long_one() -> None:
    same = make_batch([[2**63 - 1, 5]] * 100_000, [[]] * 100_000)
    order, common = sort_samples(same, np.zeros(100_000, np.int64))
    assert (order == np.arange(100_000)).all()
    assert common.tolist() == [0, *[2] * 99_999]
    long = np.arange(1_000_000) % 977
    order, common = sort_samples(make_batch([long, long[:-1]], [[]] * 2), np.zeros(2, np.int64))
    assert (order.tolist(), common.tolist()) == ([1, 0], [0, 999_999])
