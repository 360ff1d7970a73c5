"""Traces on disk: recorded training samples, one row group per RL iteration.

A trace is a directory: `trace.json` (schema, source, licence, sampling mode, symbol kind,
hashes), `samples.parquet` and, for block-hash traces, `symbols.parquet`. docs/trace-format.md
describes every column.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.core.errors import TraceError
from psrl.core.files import IfExists, new_directory

from .sample import IntArray, SampleBatch

TRACE_SCHEMA_VERSION = 1
SymbolKind = Literal["token", "block"]

_INT_COLUMNS = ("agent_step", "mini_batch")
_FLOAT_COLUMNS = ("advantage", "reward", "arrival_s", "generate_s", "environment_s")
_STRING_COLUMNS = ("group_id", "trajectory_id")


@dataclass(frozen=True)
class TraceHeader:
    """Contents of `trace.json`.

    Attributes:
        source: where the data comes from; licence: under which terms.
        sampling_mode: how samples were derived from episodes, e.g. "step" or "traj".
        symbol_kind: "token" (one token per symbol) or "block" (lengths in symbols.parquet).
        iteration_hashes: SHA-256 of each iteration's arrays.
        logical_tokens: tokens of all samples of all iterations.
    """

    source: str
    licence: str
    sampling_mode: str
    symbol_kind: SymbolKind
    iteration_hashes: tuple[str, ...]
    num_samples: int
    logical_tokens: int
    notes: str = ""

    @property
    def content_hash(self) -> str:
        """Identity of the trace: changes with any symbol, length, loss span or number."""
        parts = "\n".join((str(TRACE_SCHEMA_VERSION), self.symbol_kind, *self.iteration_hashes))
        return hashlib.sha256(parts.encode()).hexdigest()


class Trace:
    """An open trace; iterations are read when asked for, so memory is bounded by one."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = path
        self.header = header

    @property
    def num_iterations(self) -> int:
        return len(self.header.iteration_hashes)

    @property
    def content_hash(self) -> str:
        return self.header.content_hash

    @cached_property
    def symbol_num_tokens(self) -> IntArray | None:
        """[number of blocks] tokens of each block id; None for token-level traces."""
        if self.header.symbol_kind == "token":
            return None
        table = pq.read_table(self.path / "symbols.parquet")
        values: IntArray = table["num_tokens"].to_numpy().astype(np.int64)
        return values

    def iteration(self, index: int) -> SampleBatch:
        """Samples of one RL iteration, checked against the hash in the header.

        Raises:
            TraceError: if there is no such iteration, or the data are damaged or changed.
        """
        if not 0 <= index < self.num_iterations:
            raise TraceError(
                f"{self.path}: no iteration {index}, the trace has {self.num_iterations}",
                f"choose 0..{self.num_iterations - 1}",
            )
        try:
            file = pq.ParquetFile(self.path / "samples.parquet")
            if not file.schema_arrow.equals(_SCHEMA) or file.num_row_groups != self.num_iterations:
                raise ValueError(
                    f"samples.parquet has other columns, or not {self.num_iterations} row groups"
                )
            table = file.read_row_group(index)
            batch = _from_arrow(table, self.symbol_num_tokens)
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise TraceError(
                f"{self.path}: cannot read iteration {index} ({error})", "import the trace again"
            ) from None
        batch.validate(f"{self.path} iteration {index}")
        found = batch_hash(batch)
        if found != self.header.iteration_hashes[index]:
            raise TraceError(
                f"{self.path}: iteration {index} has hash {found[:12]}, trace.json says "
                f"{self.header.iteration_hashes[index][:12]}",
                "the files were changed after they were written; import the trace again",
            )
        return batch

    def __iter__(self) -> Iterator[SampleBatch]:
        return (self.iteration(i) for i in range(self.num_iterations))


def open_trace(path: Path) -> Trace:
    """Open a trace directory.

    Raises:
        TraceError: if it is not a trace of this schema.
    """
    header_path = path / "trace.json"
    try:
        raw = json.loads(header_path.read_text(encoding="utf-8"))
    except OSError:
        raise TraceError(
            f"{path} is not a trace: it has no trace.json",
            "make one with `psrl trace import FILE --out DIR`",
        ) from None
    except ValueError as error:
        raise TraceError(f"{header_path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise TraceError(f"{header_path}: holds no JSON object")
    version = raw.pop("schema_version", None)
    if version != TRACE_SCHEMA_VERSION:
        raise TraceError(
            f"{header_path}: schema version {version!r}, this psRL reads {TRACE_SCHEMA_VERSION}",
            f"make the trace again: psrl trace import FILE --out NEW_TRACE (its source is "
            f"{raw.get('source', 'not stated')!r})",
        )
    stated = raw.pop("content_hash", None)
    try:
        header = TraceHeader(**{**raw, "iteration_hashes": tuple(raw["iteration_hashes"])})
    except (KeyError, TypeError) as error:
        raise TraceError(f"{header_path}: wrong fields ({error})") from None
    if stated != header.content_hash:
        raise TraceError(f"{header_path}: content_hash does not match the iteration hashes")
    return Trace(path, header)


def write_trace(
    path: Path,
    iterations: Iterable[SampleBatch],
    *,
    source: str,
    licence: str,
    sampling_mode: str,
    notes: str = "",
    write_more: Callable[[Path], None] | None = None,
    if_exists: IfExists = "error",
    inputs: Iterable[Path] = (),
) -> Trace:
    """Write a trace directory, whole or not at all.

    All iterations must have the same symbol table.

    Args:
        write_more: writes further files into the directory that it is given.
        if_exists, inputs: see `new_directory`.

    Raises:
        ConfigError: see `new_directory`.
        TraceError: if an iteration is malformed, or there is no sample.
    """
    with new_directory(path, if_exists, inputs) as partial:
        header = _write_tables(partial, iterations, source, licence, sampling_mode, notes)
        if write_more is not None:
            write_more(partial)
    return Trace(path, header)


def _write_tables(
    directory: Path,
    iterations: Iterable[SampleBatch],
    source: str,
    licence: str,
    sampling_mode: str,
    notes: str,
) -> TraceHeader:
    hashes: list[str] = []
    num_samples = logical_tokens = 0
    symbol_num_tokens: IntArray | None = None
    with pq.ParquetWriter(directory / "samples.parquet", _SCHEMA, compression="zstd") as writer:
        for index, batch in enumerate(iterations):
            batch.validate(f"iteration {index}")
            if hashes and batch.symbol_num_tokens is not symbol_num_tokens:
                raise TraceError(f"iteration {index} has another symbol table than the ones before")
            symbol_num_tokens = batch.symbol_num_tokens
            if batch.num_samples:
                writer.write_table(_to_arrow(batch), row_group_size=batch.num_samples)
                hashes.append(batch_hash(batch))
            num_samples += batch.num_samples
            logical_tokens += batch.logical_tokens
    if not num_samples:
        raise TraceError("the trace is empty: no sample to write", "check the input and filters")
    if symbol_num_tokens is not None:
        table = pa.table({"num_tokens": symbol_num_tokens})
        pq.write_table(table, directory / "symbols.parquet", compression="zstd")
    header = TraceHeader(
        source=source,
        licence=licence,
        sampling_mode=sampling_mode,
        symbol_kind="token" if symbol_num_tokens is None else "block",
        iteration_hashes=tuple(hashes),
        num_samples=num_samples,
        logical_tokens=logical_tokens,
        notes=notes,
    )
    fields: dict[str, Any] = dict(vars(header))
    fields |= {"schema_version": TRACE_SCHEMA_VERSION, "content_hash": header.content_hash}
    text = json.dumps(fields, indent=1, sort_keys=True)
    (directory / "trace.json").write_text(text + "\n", encoding="utf-8")
    return header


def batch_hash(batch: SampleBatch) -> str:
    """SHA-256 of every column of a batch, with the lengths of its blocks instead of their table."""
    digest = hashlib.sha256()
    for array in (
        batch.symbols,
        batch.symbol_offsets,
        batch.occurrence_tokens,
        batch.loss_spans,
        batch.loss_span_offsets,
        *(getattr(batch, name) for name in (*_INT_COLUMNS, *_FLOAT_COLUMNS)),
    ):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array).tobytes())
    for name in _STRING_COLUMNS:
        digest.update(json.dumps(getattr(batch, name).tolist()).encode())
    return digest.hexdigest()


_SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("trajectory_id", pa.string()),
        *((name, pa.int64()) for name in _INT_COLUMNS),
        *((name, pa.float64()) for name in _FLOAT_COLUMNS),
        ("symbols", pa.list_(pa.int64())),
        ("loss_spans", pa.list_(pa.int64())),
    ]
)


def _to_arrow(batch: SampleBatch) -> pa.Table:
    columns: dict[str, Any] = {
        name: getattr(batch, name) for name in (*_INT_COLUMNS, *_FLOAT_COLUMNS)
    }
    for name in _STRING_COLUMNS:
        columns[name] = pa.array(getattr(batch, name).tolist(), pa.string())
    columns["symbols"] = _lists(batch.symbol_offsets, batch.symbols)
    columns["loss_spans"] = _lists(2 * batch.loss_span_offsets, batch.loss_spans.reshape(-1))
    return pa.table(columns, schema=_SCHEMA)


def _lists(offsets: IntArray, values: IntArray) -> pa.Array:
    if offsets[-1] >= 2**31:
        raise TraceError(
            f"one iteration has {int(offsets[-1])} symbols; at most 2^31 - 1 fit a row group",
            "split the iteration",
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def _from_arrow(table: pa.Table, symbol_num_tokens: IntArray | None) -> SampleBatch:
    def flat(name: str) -> tuple[IntArray, IntArray]:
        column: Any = table[name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        offsets: IntArray = column.offsets.to_numpy().astype(np.int64)
        values: IntArray = column.flatten().to_numpy()
        return values, offsets - offsets[0]

    def column(name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = table[name].to_numpy()
        return values

    symbols, symbol_offsets = flat("symbols")
    spans, span_offsets = flat("loss_spans")
    columns: dict[str, Any] = {n: column(n) for n in (*_INT_COLUMNS, *_FLOAT_COLUMNS)}
    columns |= {n: column(n).astype(np.str_) for n in _STRING_COLUMNS}
    return SampleBatch(
        symbols=symbols,
        symbol_offsets=symbol_offsets,
        symbol_num_tokens=symbol_num_tokens,
        loss_spans=spans.reshape(-1, 2),
        loss_span_offsets=span_offsets // 2,
        **columns,
    )
