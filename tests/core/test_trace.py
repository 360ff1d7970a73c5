"""Trace directories: exact round trip, detection of every change, nothing half-written."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.core.errors import ConfigError, TraceError
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.core.samples.trace import Trace, batch_hash, open_trace, write_trace


def token_batch(shift: int = 0) -> SampleBatch:
    return make_batch(
        [[2**63 - 1, 5, 6 + shift], [], [5, 6]],
        [[(1, 2), (2, 3)], [], []],
        group_id=["gr\u00fcn", "b", "b"],
        trajectory_id=["t0", "", "t2"],
        agent_step=[0, 1, 2],
        mini_batch=[1, 0, 0],
        advantage=[0.1, -2.0, 0.0],
        reward=[1.0, np.nan, 0.0],
        arrival_s=[0.0, 0.5, np.nan],
    )


def block_batch(lengths: np.ndarray) -> SampleBatch:
    return make_batch([[0, 1], [0, 2]], [[(3, 5)], []], symbol_num_tokens=lengths)


def write(path: Path, *batches: SampleBatch) -> Trace:
    return write_trace(path, batches, source="hand", licence="none", sampling_mode="traj")


def assert_same(found: SampleBatch, expected: SampleBatch) -> None:
    for f in fields(SampleBatch):
        a, b = getattr(found, f.name), getattr(expected, f.name)
        assert (a is None) == (b is None), f.name
        np.testing.assert_array_equal(a, b, err_msg=f.name)


def test_token_trace_round_trip(tmp_path: Path) -> None:
    batches = [token_batch(), token_batch(shift=1)]
    written = write(tmp_path / "t", *batches)
    trace = open_trace(tmp_path / "t")
    assert trace.header == written.header
    assert (trace.num_iterations, trace.header.num_samples) == (2, 6)
    assert trace.header.logical_tokens == 10
    assert trace.header.symbol_kind == "token"
    for found, expected in zip(trace, batches, strict=True):
        assert_same(found, expected)


def test_block_trace_round_trip(tmp_path: Path) -> None:
    lengths = np.array([3, 4, 1])
    write(tmp_path / "t", block_batch(lengths), block_batch(lengths))
    trace = open_trace(tmp_path / "t")
    assert trace.header.symbol_kind == "block"
    assert_same(trace.iteration(1), block_batch(lengths))


def test_writing_is_byte_identical(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, token_batch())
    for file in ("trace.json", "samples.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


CHANGES = {
    "symbols": np.array([2**63 - 1, 5, 7, 5, 6]),
    "symbol_offsets": np.array([0, 3, 4, 5]),
    "loss_spans": np.array([[1, 2], [2, 4]]),
    "loss_span_offsets": np.array([0, 1, 1, 2]),
    "group_id": np.array(["a", "b", "b"]),
    "trajectory_id": np.array(["t0", "t1", "t2"]),
    "agent_step": np.array([0, 1, 3]),
    "mini_batch": np.array([0, 0, 0]),
    "advantage": np.array([0.1, -2.0, 1e-300]),
    "reward": np.array([1.0, np.nan, 0.5]),
    "arrival_s": np.array([0.0, 0.5, 1.0]),
    "generate_s": np.array([0.0, np.nan, np.nan]),
    "environment_s": np.array([np.nan, 0.0, np.nan]),
    "symbol_num_tokens": None,
}


@pytest.mark.parametrize("name", [f.name for f in fields(SampleBatch)])
def test_hash_depends_on(name: str) -> None:
    if name == "symbol_num_tokens":
        changed = block_batch(np.array([3, 5, 1]))
        assert batch_hash(changed) != batch_hash(block_batch(np.array([3, 4, 1])))
    else:
        changed = replace(token_batch(), **{name: CHANGES[name]})
        assert batch_hash(changed) != batch_hash(token_batch())


def test_hash_keeps_columns_apart() -> None:
    """The same text cut at other places is another trace."""
    first = make_batch([[1], [2]], [[], []], group_id=["a", "b"], trajectory_id=["c", "d"])
    second = make_batch([[1], [2]], [[], []], group_id=["a", "bc"], trajectory_id=["", "d"])
    assert batch_hash(first) != batch_hash(second)


def test_content_hash_depends_on_symbol_kind_and_order(tmp_path: Path) -> None:
    ones = np.ones(3, np.int64)
    tokens = make_batch([[0, 1], [0, 2]], [[], []])
    blocks = replace(tokens, symbol_num_tokens=ones)
    other = make_batch([[0]], [[]])
    hashes = {
        write(tmp_path / "tokens", tokens).content_hash,
        write(tmp_path / "blocks", blocks).content_hash,
        write(tmp_path / "two", tokens, other).content_hash,
        write(tmp_path / "owt", other, tokens).content_hash,
    }
    assert len(hashes) == 4


def test_existing_directory_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "t", token_batch())
    with pytest.raises(ConfigError, match="exists already"):
        write(tmp_path / "t", token_batch(shift=1))
    assert_same(open_trace(tmp_path / "t").iteration(0), token_batch())


@pytest.mark.parametrize("batches", [[], [make_batch([], [])]])
def test_empty_trace_is_refused(tmp_path: Path, batches: list[SampleBatch]) -> None:
    with pytest.raises(TraceError, match="empty"):
        write(tmp_path / "t", *batches)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_the_source_fails(tmp_path: Path) -> None:
    def failing() -> Iterator[SampleBatch]:
        yield token_batch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(tmp_path / "t", failing(), source="", licence="", sampling_mode="")
    assert list(tmp_path.iterdir()) == []


def test_malformed_iteration_is_named(tmp_path: Path) -> None:
    bad = replace(token_batch(), symbols=np.array([1, 5, -6, 5, 6]))
    with pytest.raises(TraceError, match="iteration 1: symbol id -6"):
        write(tmp_path / "t", token_batch(), bad)
    assert list(tmp_path.iterdir()) == []


def test_iterations_share_one_symbol_table(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="iteration 1 has another symbol table"):
        write(tmp_path / "t", block_batch(np.array([3, 4, 1])), block_batch(np.array([3, 4, 2])))


def test_iteration_out_of_range(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", token_batch())
    for index in (-1, 1):
        with pytest.raises(TraceError, match=f"no iteration {index}, the trace has 1"):
            trace.iteration(index)


def test_not_a_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no trace\.json") as caught:
        open_trace(tmp_path)
    assert "psrl trace import" in caught.value.hint


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b'{"schema_version": 1}'])
def test_header_that_is_no_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.json"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema_version", 99, "schema version 99, this psRL reads 1"),
        ("content_hash", "0" * 64, "content_hash does not match"),
        ("surprise", 1, "wrong fields"),
        ("iteration_hashes", 3, "wrong fields"),
    ],
)
def test_changed_header(tmp_path: Path, key: str, value: object, message: str) -> None:
    write(tmp_path / "t", token_batch())
    path = tmp_path / "t" / "trace.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(TraceError, match=message):
        open_trace(tmp_path / "t")


def test_every_damaged_byte_range_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "t", token_batch())
    path = tmp_path / "t" / "samples.parquet"
    whole = path.read_bytes()
    for cut in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="cannot read iteration 0"):
            open_trace(tmp_path / "t").iteration(0)
    path.unlink()
    with pytest.raises(TraceError, match="cannot read iteration 0"):
        open_trace(tmp_path / "t").iteration(0)


def test_exchanged_data_are_noticed(tmp_path: Path) -> None:
    write(tmp_path / "t", token_batch())
    write(tmp_path / "u", token_batch(shift=1))
    data = (tmp_path / "u" / "samples.parquet").read_bytes()
    (tmp_path / "t" / "samples.parquet").write_bytes(data)
    with pytest.raises(TraceError, match="files were changed"):
        open_trace(tmp_path / "t").iteration(0)


def test_lost_row_group_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "t", token_batch(), token_batch(shift=1))
    write(tmp_path / "u", token_batch())
    data = (tmp_path / "u" / "samples.parquet").read_bytes()
    (tmp_path / "t" / "samples.parquet").write_bytes(data)
    with pytest.raises(TraceError, match="not 2 row groups"):
        open_trace(tmp_path / "t").iteration(0)


def test_other_columns_are_noticed(tmp_path: Path) -> None:
    write(tmp_path / "t", token_batch())
    path = tmp_path / "t" / "samples.parquet"
    table = pq.read_table(path)
    flat = pa.array([1, 2, 3])
    for changed in (
        table.drop_columns(["reward"]),
        table.set_column(table.schema.get_field_index("symbols"), "symbols", flat),
        table.append_column("extra", flat),
    ):
        pq.write_table(changed, path)
        with pytest.raises(TraceError, match="has other columns"):
            open_trace(tmp_path / "t").iteration(0)


def test_missing_symbol_table_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "t", block_batch(np.array([3, 4, 1])))
    (tmp_path / "t" / "symbols.parquet").unlink()
    with pytest.raises(TraceError, match="cannot read iteration 0"):
        open_trace(tmp_path / "t").iteration(0)
