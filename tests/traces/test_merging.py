"""Merged traces: nothing lost, no sharing invented, blocks of two files kept apart."""

from pathlib import Path

import numpy as np
import pytest

from psrl.core.errors import TraceError
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.core.samples.trace import Trace, write_trace
from psrl.traces.merging import merge_traces
from psrl.traces.stats import sharing_stats


def batch(rows: list[list[int]], table: np.ndarray | None = None, group: str = "g") -> SampleBatch:
    return make_batch(
        list(rows),
        [[(1, 2)]] * len(rows),
        symbol_num_tokens=table,
        group_id=[group] * len(rows),
        mini_batch=range(len(rows)),
    )


def write(path: Path, batches: list[SampleBatch]) -> Trace:
    return write_trace(path, batches, source=path.name, licence="CC0-1.0", sampling_mode="step")


@pytest.fixture
def traces(tmp_path: Path) -> list[Trace]:
    a, b = np.array([4, 2]), np.array([3])
    return [
        write(tmp_path / "a", [batch([[0, 1], [0]], a), batch([[1]], a)]),
        write(tmp_path / "b", [batch([[0]], b)]),
    ]


def test_append_puts_iterations_in_order_and_blocks_apart(traces: list[Trace]) -> None:
    merged = list(merge_traces(traces, "append"))
    assert [m.symbols.tolist() for m in merged] == [[0, 1, 0], [1], [2]]
    assert [m.num_tokens.tolist() for m in merged] == [[6, 4], [2], [3]]
    assert all(m.symbol_num_tokens is merged[0].symbol_num_tokens for m in merged)
    for m in merged:
        m.validate()


def test_side_by_side_joins_iterations_without_inventing_sharing(
    traces: list[Trace], tmp_path: Path
) -> None:
    first, second = merge_traces(traces, "side_by_side")
    first.validate()
    assert first.symbols.tolist() == [0, 1, 0, 2]
    assert first.group_id.tolist() == ["a/g", "a/g", "b/g"]
    assert first.loss_spans.tolist() == [[1, 2]] * 3
    assert first.mini_batch.tolist() == [0, 1, 0]
    assert second.symbols.tolist() == [1]
    assert sharing_stats(first)["unique_tokens"] == 6 + 3
    written = write(tmp_path / "merged", list(merge_traces(traces, "side_by_side")))
    assert written.iteration(0).num_tokens.tolist() == [6, 4, 3]


def test_token_traces_keep_their_ids(tmp_path: Path) -> None:
    parts = [write(tmp_path / name, [batch([[5, 6]])]) for name in "ab"]
    (joined,) = merge_traces(parts, "side_by_side")
    assert sharing_stats(joined)["unique_tokens"] == 2
    assert sharing_stats(joined)["within_group"]["unique_tokens"] == 4


def test_what_cannot_be_merged(traces: list[Trace], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace to merge"):
        merge_traces([], "append")
    tokens = write(tmp_path / "tokens", [batch([[5, 6]])])
    with pytest.raises(TraceError, match=r"a \(block\), tokens \(token\)"):
        merge_traces([traces[0], tokens], "append")
    with pytest.raises(TraceError, match="traces of one name: a, a"):
        merge_traces([traces[0], traces[0]], "side_by_side")
