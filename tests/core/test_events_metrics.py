"""Event logs on disk, and every metric of a run worked out by hand."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import PlanError
from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.run.events import GRADIENT_REDUCTION, EventLog, Events
from psrl.core.run.metrics import phase_metrics, run_metrics, sharing_metrics
from tests.core.cases import hand_batch, hand_program, wrap

NOTHING = MemoryState(100, 0, 0, 0, 0)


def add(
    log: EventLog,
    op: str,
    rank: int,
    start_s: float,
    end_s: float,
    *,
    phase: str = "update",
    program: int = 0,
    stage: int = 0,
    micro_batch: int = 0,
    num_tokens: int = 10,
    memory: MemoryState = NOTHING,
) -> None:
    log.add(phase, program, rank, stage, op, micro_batch, num_tokens, start_s, end_s, memory)


def two_rank_log() -> Events:
    """Update on two ranks: rank 0 works 1..7, rank 1 works 1..5; the reduction ends at 10."""
    log = EventLog()
    add(log, "forward", 1, 1.0, 2.0, num_tokens=20)
    add(log, "forward", 0, 1.0, 3.0, num_tokens=30, memory=MemoryState(100, 20, 3, 7, 0))
    add(log, "backward", 1, 3.0, 5.0, num_tokens=20, memory=MemoryState(100, 1, 0, 5, 4))
    add(log, "backward", 0, 3.0, 7.0, num_tokens=30)
    for rank in (0, 1):
        add(log, GRADIENT_REDUCTION, rank, 7.0, 10.0, micro_batch=-1, num_tokens=0)
    return log.finish()


def test_round_trip(tmp_path: Path) -> None:
    events = two_rank_log()
    events.save(tmp_path / "events.parquet")
    found = Events.load(tmp_path / "events.parquet")
    for f in fields(Events):
        left, right = getattr(found, f.name), getattr(events, f.name)
        np.testing.assert_array_equal(left, right)
        assert left.dtype.kind == right.dtype.kind
    events.save(tmp_path / "again.parquet")
    first, second = (tmp_path / name for name in ("events.parquet", "again.parquet"))
    assert first.read_bytes() == second.read_bytes()


def test_rows_are_ordered_by_phase_rank_stage_and_start() -> None:
    log = EventLog()
    add(log, "c", 1, 0.0, 1.0, phase="reference")
    add(log, "e", 0, 0.0, 1.0, phase="log_old_prob")
    add(log, "b", 0, 5.0, 6.0, phase="reference", stage=1)
    add(log, "a", 0, 7.0, 8.0, phase="reference")
    add(log, "d", 1, 0.0, 1.0, phase="reference")
    assert log.finish().op.tolist() == ["a", "b", "c", "d", "e"]


def test_empty_log(tmp_path: Path) -> None:
    events = EventLog().finish()
    assert len(events) == 0
    events.save(tmp_path / "e.parquet")
    assert len(Events.load(tmp_path / "e.parquet")) == 0
    assert phase_metrics(events, "update", ParallelConfig(), 10, 5) == {}


def test_files_that_are_no_event_log(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not an event log"):
        Events.load(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(PlanError, match="not an event log"):
        Events.load(tmp_path / "text.parquet")
    pq.write_table(pa.table({"phase": ["update"]}), tmp_path / "few.parquet")
    with pytest.raises(PlanError, match="not an event log"):
        Events.load(tmp_path / "few.parquet")


def test_phase_metrics_by_hand() -> None:
    found = phase_metrics(two_rank_log(), "update", ParallelConfig(data_parallel_size=2), 100, 50)
    busy_s = (2 + 4 + 3) + (1 + 2 + 3)
    assert found == {
        "makespan_s": 10.0,
        "worker_time_min_s": 4.0,
        "worker_time_max_s": 6.0,
        "worker_time_max_over_min": 1.5,
        "bubble_fraction": pytest.approx(1 - busy_s / 20),
        "executed_tokens": 50,
        "logical_tokens_per_s": 10.0,
        "unique_tokens_per_s": 5.0,
        "peak_memory_bytes": 130,
        "peak_kv_bytes": 9,
    }


def test_a_phase_that_did_not_run_has_no_metrics() -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    assert phase_metrics(two_rank_log(), "reference", parallel, 100, 50) == {}


def test_an_idle_rank_counts() -> None:
    parallel = ParallelConfig(data_parallel_size=3)
    found = phase_metrics(two_rank_log(), "update", parallel, 100, 50)
    assert found["worker_time_min_s"] == 0.0
    assert found["worker_time_max_over_min"] == float("inf")
    assert found["bubble_fraction"] == pytest.approx(1 - 15 / 30)


def test_tokens_are_counted_once_per_pipeline() -> None:
    log = EventLog()
    for stage in (0, 1):
        add(log, "forward", 0, stage, stage + 1.0, stage=stage, num_tokens=7)
        add(log, "recompute", 0, stage + 2.0, stage + 3.0, stage=stage, num_tokens=7)
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    found = phase_metrics(log.finish(), "update", parallel, 7, 7)
    assert found["executed_tokens"] == 7
    assert found["bubble_fraction"] == pytest.approx(1 - 4 / 8)


def test_waiting_between_optimizer_steps_is_not_work() -> None:
    log = EventLog()
    add(log, "forward", 0, 0.0, 4.0, program=0)
    add(log, "forward", 1, 0.0, 1.0, program=0)
    add(log, "forward", 0, 5.0, 6.0, program=1)
    add(log, "forward", 1, 5.0, 9.0, program=1)
    parallel = ParallelConfig(data_parallel_size=2)
    found = phase_metrics(log.finish(), "update", parallel, 1, 1)
    assert (found["worker_time_min_s"], found["worker_time_max_s"]) == (5.0, 5.0)


def test_overlapping_optimizer_steps_count_once() -> None:
    log = EventLog()
    add(log, "forward", 0, 0.0, 4.0, program=0)
    add(log, "forward", 0, 2.0, 6.0, program=1, stage=1)
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    assert phase_metrics(log.finish(), "update", parallel, 1, 1)["worker_time_max_s"] == 6.0


def test_sharing_metrics_by_hand() -> None:
    assert sharing_metrics(hand_batch()) == {
        "num_samples": 3,
        "logical_tokens": 9,
        "unique_tokens": 7,
        "prefix_match_rate": pytest.approx(2 / 9),
    }


def test_run_metrics_add_the_phases() -> None:
    log = EventLog()
    for rank, end_s in ((0, 2.0), (1, 4.0)):
        add(log, "forward", rank, 0.0, end_s, phase="reference", num_tokens=5)
        add(log, "forward", rank, 0.0, 2.0, num_tokens=5)
        add(log, "backward", rank, 2.0, 6.0, num_tokens=5)
    plan = replace(wrap(hand_program(), num_ranks=2, num_stages=1), predicted={"gap": 0.25})
    found = run_metrics(plan, hand_batch(), log.finish())
    assert list(found["phases"]) == ["reference", "update"]
    assert found["policy"] == "random"
    assert (found["makespan_s"], found["executed_tokens"]) == (10.0, 20)
    assert (found["worker_time_min_s"], found["worker_time_max_s"]) == (8.0, 10.0)
    assert found["worker_time_max_over_min"] == 1.25
    assert found["bubble_fraction"] == pytest.approx(0.25 * 0.4)
    assert found["logical_tokens_per_s"] == pytest.approx(2 * 9 / 10)
    assert found["unique_tokens_per_s"] == pytest.approx(2 * 7 / 10)
    assert (found["gap"], found["lower_bound_s"]) == (0.25, None)
    assert (found["peak_memory_bytes"], found["peak_kv_bytes"]) == (100, 0)


def test_the_bytes_of_an_op_add_up() -> None:
    log = EventLog()
    add(log, "forward", 0, 0.0, 1.0, memory=MemoryState(10000, 2000, 300, 40, 5))
    assert log.finish().total_bytes.tolist() == [12345]
