"""Put several traces together: their iterations one after the other, or side by side in one."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np

from psrl.core.errors import TraceError
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.samples.trace import Trace

MergeMode = Literal["append", "side_by_side"]


def merge_traces(traces: Sequence[Trace], how: MergeMode) -> Iterator[SampleBatch]:
    """The iterations of several traces as those of one, read when asked for.

    Block ids of different traces are kept apart: equal numbers mean nothing across files. Token
    ids are taken as they are.

    Args:
        traces: of one symbol kind.
        how: "append" puts iterations after each other; "side_by_side" joins the i-th iterations
            of all traces into one batch, mini-batch k with mini-batch k. It prefixes groups
            with the name of the trace's directory, so that they stay apart.

    Raises:
        TraceError: if there is nothing to merge, token and block traces are mixed, or two traces
            to join have one name.
    """
    if not traces:
        raise TraceError("no trace to merge", "name at least one")
    kinds = {trace.header.symbol_kind for trace in traces}
    if len(kinds) > 1:
        listed = ", ".join(f"{trace.path.name} ({trace.header.symbol_kind})" for trace in traces)
        raise TraceError(
            f"token and block traces cannot be merged: {listed}",
            "import the token traces with --hashes-only",
        )
    names = [trace.path.name for trace in traces]
    if how == "side_by_side" and len(set(names)) < len(names):
        raise TraceError(f"traces of one name: {', '.join(names)}", "give each its own name")
    return _append(traces) if how == "append" else _side_by_side(traces)


def _append(traces: Sequence[Trace]) -> Iterator[SampleBatch]:
    table, starts = _joint_table(traces)
    for trace, start in zip(traces, starts, strict=True):
        for batch in trace:
            yield replace(batch, symbols=batch.symbols + start, symbol_num_tokens=table)


def _side_by_side(traces: Sequence[Trace]) -> Iterator[SampleBatch]:
    table, starts = _joint_table(traces)
    for index in range(max(trace.num_iterations for trace in traces)):
        parts = []
        for trace, start in zip(traces, starts, strict=True):
            if index < trace.num_iterations:
                batch = trace.iteration(index)
                group = np.array([f"{trace.path.name}/{g}" for g in batch.group_id], np.str_)
                parts.append(replace(batch, symbols=batch.symbols + start, group_id=group))
        yield replace(_concatenate(parts), symbol_num_tokens=table)


def _joint_table(traces: Sequence[Trace]) -> tuple[IntArray | None, list[int]]:
    """One block table for all traces, and where the blocks of each start in it."""
    lengths = [trace.symbol_num_tokens for trace in traces]
    tables = [table for table in lengths if table is not None]
    if not tables:
        return None, [0] * len(traces)
    return np.concatenate(tables), np.cumsum([0, *map(len, tables)])[:-1].tolist()


def _concatenate(batches: Sequence[SampleBatch]) -> SampleBatch:
    """All samples of batches of one symbol table."""

    def offsets(name: str) -> IntArray:
        lengths = np.concatenate([np.diff(getattr(batch, name)) for batch in batches])
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    columns = {
        f.name: np.concatenate([getattr(batch, f.name) for batch in batches])
        for f in fields(SampleBatch)
        if f.name not in ("symbol_offsets", "loss_span_offsets", "symbol_num_tokens")
    }
    return replace(
        batches[0],
        symbol_offsets=offsets("symbol_offsets"),
        loss_span_offsets=offsets("loss_span_offsets"),
        **columns,
    )
