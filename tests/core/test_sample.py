"""Batches: ragged selection, token counts of blocks, and what `validate` refuses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import TraceError
from psrl.core.samples.sample import SampleBatch, make_batch, ragged_take


def small_batch() -> SampleBatch:
    return make_batch(
        [[0, 1, 2], [], [2, 2]],
        [[(1, 2), (5, 6)], [], [(2, 4)]],
        symbol_num_tokens=np.array([1, 4, 3]),
        group_id=["a", "a", "b"],
        mini_batch=[0, 1, 0],
        advantage=[0.5, -1.0, 2.0],
    )


def test_tokens_are_counted_through_block_lengths() -> None:
    batch = small_batch()
    assert batch.num_samples == 3
    assert batch.occurrence_tokens.tolist() == [1, 4, 3, 3, 3]
    assert batch.num_tokens.tolist() == [8, 0, 6]
    assert batch.token_offsets.tolist() == [0, 8, 8, 14]
    assert (batch.logical_tokens, batch.loss_tokens) == (14, 4)
    assert batch.sample_symbols(2).tolist() == [2, 2]
    assert batch.sample_loss_spans(0).tolist() == [[1, 2], [5, 6]]
    assert batch.sample_loss_spans(1).shape == (0, 2)


def test_offsets_of_single_tokens_are_those_of_symbols() -> None:
    batch = make_batch([[5, 6], [], [7]], [[], [], []])
    assert batch.token_offsets.tolist() == [0, 2, 2, 3]
    assert batch.token_offsets is batch.symbol_offsets  # no array of all tokens was made


def test_missing_columns_are_neutral() -> None:
    batch = make_batch([[1], [2]], [[], []])
    assert batch.group_id.tolist() == batch.trajectory_id.tolist() == ["0", "1"]
    assert batch.agent_step.tolist() == batch.mini_batch.tolist() == [0, 0]
    assert batch.advantage.tolist() == [1.0, 1.0]
    assert np.isnan(batch.reward).all()
    assert np.isnan(batch.arrival_s).all()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.data())
def test_select_picks_samples_in_order(symbols: list[list[int]], data: st.DataObject) -> None:
    spans = [[(1, len(s))] if len(s) > 1 else [] for s in symbols]
    batch = make_batch(list(symbols), spans, advantage=np.arange(len(symbols)))
    chosen = data.draw(st.lists(st.integers(0, len(symbols) - 1), max_size=8))
    picked = batch.select(chosen)
    picked.validate()
    assert [picked.sample_symbols(i).tolist() for i in range(len(chosen))] == [
        symbols[c] for c in chosen
    ]
    assert [[tuple(s) for s in picked.sample_loss_spans(i)] for i in range(len(chosen))] == [
        spans[c] for c in chosen
    ]
    assert picked.advantage.tolist() == chosen
    assert picked.group_id.tolist() == [str(c) for c in chosen]


def test_ragged_take_example() -> None:
    rows, offsets = ragged_take(np.array([0, 2, 5]), np.array([1]))
    assert (rows.tolist(), offsets.tolist()) == ([2, 3, 4], [0, 3])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 1)], r"loss span \[0, 1\)"),
        ([(2, 2)], r"loss span \[2, 2\)"),
        ([(3, 2)], r"loss span \[3, 2\)"),
        ([(1, 5)], "4 tokens"),
        ([(1, 3), (2, 4)], "overlapping"),
        ([(3, 4), (1, 2)], "overlapping"),
    ],
)
def test_bad_loss_spans(spans: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        make_batch([[9], [1, 2, 3, 4]], [[], spans])
    assert "sample 1" in str(caught.value)


def test_touching_spans_and_spans_of_different_samples_are_fine() -> None:
    make_batch([[1, 2, 3], [1, 2, 3]], [[(1, 2), (2, 3)], [(1, 3)]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symbols": np.array([0, 1, 2, -1, 2])}, "symbol id -1"),
        ({"symbols": np.array([0, 1, 2, 3, 2])}, "symbol id 3 but only 3 block lengths"),
        ({"symbol_num_tokens": np.array([1, 4, 0])}, "fewer than one token"),
        ({"symbol_offsets": np.array([0, 3, 2, 5])}, "symbol_offsets decreases"),
        ({"symbol_offsets": np.array([0, 3, 3, 4])}, "does not cover its 5 entries"),
        ({"symbol_offsets": np.array([1, 3, 3, 5])}, "does not cover its 5 entries"),
        ({"loss_span_offsets": np.array([0, 3])}, "does not cover its 3 entries"),
        ({"advantage": np.array([0.0, np.nan, 1.0])}, "sample 1 has advantage nan"),
        ({"advantage": np.array([0.0, 1.0, np.inf])}, "sample 2 has advantage inf"),
        ({"reward": np.array([0.0])}, "reward has 1 rows for 3 samples"),
        ({"group_id": np.array(["a"])}, "group_id has 1 rows"),
    ],
)
def test_arrays_that_disagree(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        replace(small_batch(), **changes).validate("dump.parquet")
    assert str(caught.value).startswith("dump.parquet: ")
