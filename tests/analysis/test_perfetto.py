"""The Perfetto timeline: its schema, that slices never overlap, and what the arrows join."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from psrl.analysis.perfetto import timeline_records, write_timeline
from psrl.core.plan.packing import pack_rank
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import SampleBatch
from psrl.sim import simulate
from tests.sim.cases import random_plan

Record = dict[str, Any]
# What each kind of record must have, besides "ph", "name" and "pid".
KEYS = {
    "M": {"tid", "args"},
    "X": {"tid", "cat", "ts", "dur", "args"},
    "C": {"ts", "args"},
    "s": {"tid", "cat", "ts", "id"},
    "f": {"tid", "cat", "ts", "id", "bp"},
}


@pytest.fixture(scope="module", params=[(3, 2, 2), (11, 3, 4), (5, 1, 1)])
def case(request: pytest.FixtureRequest) -> tuple[Plan, SampleBatch, list[Record]]:
    plan, batch = random_plan(*request.param)
    return plan, batch, list(timeline_records(simulate(plan, batch), plan, batch))


Case = tuple[Plan, SampleBatch, list[Record]]


def of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["ph"] == kind]


def test_every_record_has_the_fields_of_its_kind(case: Case) -> None:
    plan, _, records = case
    for record in records:
        assert set(record) == {"ph", "name", "pid"} | KEYS[record["ph"]]
        assert isinstance(record["name"], str)
        assert 0 <= record["pid"] < plan.num_ranks
        assert record.get("ts", 0) >= 0
        assert record.get("dur", 0) >= 0
    names = {(r["name"], r["args"]["name"]) for r in of_kind(records, "M")}
    assert ("process_name", f"rank {plan.num_ranks - 1}") in names
    assert ("thread_name", f"stage {plan.parallel.pipeline_model_parallel_size - 1}") in names


def test_one_slice_per_op_and_none_overlap(case: Case) -> None:
    plan, batch, records = case
    events, slices = simulate(plan, batch), of_kind(records, "X")
    assert len(slices) == len(events)
    assert {s["cat"] for s in slices} == set(events.op.tolist())
    for rank in range(plan.num_ranks):
        for stage in range(plan.parallel.pipeline_model_parallel_size):
            mine = [s for s in slices if (s["pid"], s["tid"]) == (rank, stage)]
            mine.sort(key=lambda s: (s["ts"], s["ts"] + s["dur"]))
            for before, after in pairwise(mine):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-5
    total_s = sum(events.end_s[events.phase == phase].max() for phase in set(events.phase))
    assert max(s["ts"] + s["dur"] for s in slices) == pytest.approx(1e6 * total_s)


def test_counters_show_the_peaks_and_end_at_rest(case: Case) -> None:
    plan, batch, records = case
    events, counters = simulate(plan, batch), of_kind(records, "C")
    kv = events.kv_bytes + events.kv_gradient_bytes
    assert max(c["args"]["kv_bytes"] for c in counters) == kv.max()
    assert max(c["args"]["total_bytes"] for c in counters) == events.total_bytes.max()
    for rank in range(plan.num_ranks):
        for stage in range(plan.parallel.pipeline_model_parallel_size):
            name = f"stage {stage} bytes"
            mine = [c for c in counters if (c["pid"], c["name"]) == (rank, name)]
            last = max(mine, key=lambda c: float(c["ts"]))["args"]
            static = events.static_bytes[events.stage == stage].max()
            assert last == {"kv_bytes": 0, "total_bytes": static}


def test_arrows_join_an_owner_to_each_of_its_readers(case: Case) -> None:
    plan, batch, records = case
    slices = [s for s in of_kind(records, "X") if s["tid"] == 0 and s["cat"] == "forward"]
    starts, ends = ({r["id"]: r for r in of_kind(records, kind)} for kind in "sf")
    assert starts.keys() == ends.keys()

    def inside(arrow: Record) -> tuple[str, int, int, int]:
        found = [
            s
            for s in slices
            if s["pid"] == arrow["pid"] and s["ts"] < arrow["ts"] < s["ts"] + s["dur"]
        ]
        assert len(found) == 1
        details = found[0]["args"]
        return details["phase"], details["program"], arrow["pid"], details["micro_batch"]

    joined = [(*inside(starts[flow]), inside(ends[flow])[-1]) for flow in starts]
    expected = []
    for index, program in enumerate(plan.programs):
        tree = program.tree(batch)
        for rank in range(plan.num_ranks):
            mine = program.on_rank(rank)
            owner = dict(
                zip(mine.blocks.block.tolist(), mine.blocks.micro_batch.tolist(), strict=True)
            )
            for reader in pack_rank(mine, tree):
                for source in {owner[block] for block in reader.read_blocks}:
                    for phase in program.phases:
                        expected.append((phase, index, rank, source, reader.index))
    assert sorted(joined) == sorted(expected)


def test_the_file_is_json_and_equal_for_equal_input(tmp_path: Path) -> None:
    plan, batch = random_plan(8, num_ranks=2, num_stages=2)
    for name in ("a", "b"):
        write_timeline(tmp_path / name, simulate(plan, batch), plan, batch)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = json.loads(gzip.decompress((tmp_path / "a").read_bytes()))
    assert loaded["traceEvents"] == list(timeline_records(simulate(plan, batch), plan, batch))


def test_without_a_batch_there_are_no_arrows() -> None:
    plan, batch = random_plan(8, num_ranks=2, num_stages=2)
    records = list(timeline_records(simulate(plan, batch), plan, None))
    assert of_kind(records, "X")
    assert not of_kind(records, "s")
