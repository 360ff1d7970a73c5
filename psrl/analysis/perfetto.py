"""A run as a timeline for Perfetto (https://ui.perfetto.dev): Chrome's JSON trace format, gzipped.

A process per data-parallel rank, a thread per pipeline stage, a slice per op; counters of bytes
per stage; an arrow from the forward that caches a prefix to the forwards that read it. Phases
follow each other on one time axis.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from psrl.core.plan.packing import pack_rank
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.events import Events
from psrl.core.samples.sample import SampleBatch

_MICROSECONDS = 1e6
_PICOSECONDS_DIGITS = 6

Record = dict[str, Any]


def write_timeline(path: Path, events: Events, plan: Plan, batch: SampleBatch | None) -> None:
    """Write a timeline; equal inputs give equal bytes.

    Args:
        path: file to write, by convention `timeline.json.gz`.
        events: of a simulated or executed run of the plan.
        batch: the plan's iteration of the trace; None leaves the arrows out.
    """
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for index, record in enumerate(timeline_records(events, plan, batch)):
            text = json.dumps(record, separators=(",", ":"), allow_nan=False)
            packed.write((",\n" if index else "\n").encode() + text.encode())
        packed.write(b"\n]}\n")


def timeline_records(events: Events, plan: Plan, batch: SampleBatch | None) -> Iterator[Record]:
    """The records of Chrome's trace format: names, then per phase slices, counters and arrows."""
    yield from _names(plan)
    begin_s, flow = 0.0, 0
    for phase in (p for p in PHASES if (events.phase == p).any()):
        mine = events.where(events.phase == phase)
        yield from _slices(mine, begin_s)
        yield from _counters(mine, begin_s)
        if batch is not None:
            for arrow in _arrows(mine, plan, batch, phase, begin_s):
                for end in arrow:
                    yield {**end, "id": flow}
                flow += 1
        begin_s += float(mine.end_s.max())


def _names(plan: Plan) -> Iterator[Record]:
    for rank in range(plan.num_ranks):
        name = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": name}
        for stage in range(plan.parallel.pipeline_model_parallel_size):
            name = {"name": f"stage {stage}"}
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": stage, "args": name}


def _microseconds(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, _PICOSECONDS_DIGITS)


def _slices(events: Events, begin_s: float) -> Iterator[Record]:
    """One complete slice per op; its end is the rounded end, so neighbours never overlap."""
    for phase, program, rank, stage, op, micro_batch, num_tokens, start_s, end_s in zip(
        *(
            getattr(events, name).tolist()
            for name in ("phase", "program", "rank", "stage", "op", "micro_batch", "num_tokens")
        ),
        events.start_s.tolist(),
        events.end_s.tolist(),
        strict=True,
    ):
        start, end = _microseconds(begin_s + start_s), _microseconds(begin_s + end_s)
        details = {"phase": phase, "program": program}
        if micro_batch >= 0:
            details |= {"micro_batch": micro_batch, "num_tokens": num_tokens}
        yield {
            "ph": "X",
            "name": f"{op} {micro_batch}" if micro_batch >= 0 else op,
            "cat": op,
            "pid": rank,
            "tid": stage,
            "ts": start,
            "dur": round(end - start, _PICOSECONDS_DIGITS),
            "args": details,
        }


def _counters(events: Events, begin_s: float) -> Iterator[Record]:
    """Bytes per stage at the start of every op that changes them, and at the end of the last."""
    kv = events.kv_bytes + events.kv_gradient_bytes
    columns = (events.rank, events.stage, events.start_s, kv, events.total_bytes)
    before: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, stage, start_s, kv_bytes, total_bytes in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if before.get((rank, stage)) == (kv_bytes, total_bytes):
            continue
        before[rank, stage] = kv_bytes, total_bytes
        yield _counter(rank, stage, begin_s + start_s, kv_bytes, total_bytes)
    for rank, stage in before:
        last = np.flatnonzero((events.rank == rank) & (events.stage == stage))[-1]
        at_rest = int(events.static_bytes[last])
        yield _counter(rank, stage, begin_s + float(events.end_s[last]), 0, at_rest)


def _counter(rank: int, stage: int, at_s: float, kv_bytes: int, total_bytes: int) -> Record:
    return {
        "ph": "C",
        "name": f"stage {stage} bytes",
        "pid": rank,
        "ts": _microseconds(at_s),
        "args": {"kv_bytes": kv_bytes, "total_bytes": total_bytes},
    }


def _arrows(
    events: Events, plan: Plan, batch: SampleBatch, phase: str, begin_s: float
) -> Iterator[tuple[Record, Record]]:
    """(start, end) of an arrow per (owner, reader), in the middle of their forwards on stage 0."""
    first = events.where((events.stage == 0) & (events.op == "forward"))
    columns = (first.program, first.rank, first.micro_batch)
    keys = zip(*(column.tolist() for column in columns), strict=True)
    spans = zip(first.start_s.tolist(), first.end_s.tolist(), strict=True)
    times = dict(zip(keys, spans, strict=True))
    for index, program in enumerate(plan.programs):
        if phase not in program.phases or not len(program.blocks):
            continue
        tree = program.tree(batch)
        for rank in range(plan.num_ranks):
            mine = program.on_rank(rank)
            owner = dict(
                zip(mine.blocks.block.tolist(), mine.blocks.micro_batch.tolist(), strict=True)
            )
            for reader in pack_rank(mine, tree):
                for source in sorted({owner[block] for block in reader.read_blocks}):
                    where = {"name": "prefix", "cat": "prefix", "pid": rank, "tid": 0}
                    wrote_s, reads_s = (
                        begin_s + sum(times[index, rank, m]) / 2 for m in (source, reader.index)
                    )
                    yield (
                        {**where, "ph": "s", "ts": _microseconds(wrote_s)},
                        {**where, "ph": "f", "bp": "e", "ts": _microseconds(reads_s)},
                    )
