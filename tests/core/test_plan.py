"""Plan directories: exact round trip, same bytes, and errors for what is not a plan."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.core.errors import ConfigError, PlanError
from psrl.core.plan.plan import Plan
from psrl.core.plan.tables import Blocks, MicroBatches
from tests.core.cases import random_case, wrap

TABLES = ("assignments", "segments", "micro_batches", "schedule", "blocks")


def two_program_plan() -> Plan:
    """An update and a forward-only program of many micro-batches; the second without blocks."""
    first, second = random_case(1).program, random_case(10).program
    plan = wrap(first, replace(second, blocks=Blocks.empty()), num_ranks=3)
    return replace(plan, predicted={"makespan_s": 1.5})


def assert_same(found: Plan, expected: Plan) -> None:
    for f in fields(Plan):
        if f.name != "programs":
            assert getattr(found, f.name) == getattr(expected, f.name), f.name
    for a, b in zip(found.programs, expected.programs, strict=True):
        for f in fields(a):
            if f.name not in TABLES:
                assert getattr(a, f.name) == getattr(b, f.name), f.name
        for x, y in zip(a.tables, b.tables, strict=True):
            assert type(x) is type(y)
            for column in fields(x):
                left, right = getattr(x, column.name), getattr(y, column.name)
                np.testing.assert_array_equal(left, right, err_msg=column.name)
                assert left.dtype.kind == right.dtype.kind


def test_round_trip(tmp_path: Path) -> None:
    plan = two_program_plan()
    plan.save(tmp_path / "plan")
    assert_same(Plan.load(tmp_path / "plan"), plan)


@pytest.mark.parametrize("programs", [(), (random_case(1).program,)])
def test_round_trip_of_empty_tables(tmp_path: Path, programs: tuple) -> None:
    plan = wrap(*(replace(p, blocks=Blocks.empty()) for p in programs), num_ranks=3)
    plan.save(tmp_path / "plan")
    assert_same(Plan.load(tmp_path / "plan"), plan)


def test_saving_is_byte_identical(tmp_path: Path) -> None:
    two_program_plan().save(tmp_path / "a")
    Plan.load(tmp_path / "a").save(tmp_path / "b")
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == sorted(["plan.json", *(f"{name}.parquet" for name in TABLES)])
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_existing_directory_is_kept(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        two_program_plan().save(tmp_path / "plan")
    assert list((tmp_path / "plan").iterdir()) == []


def test_nothing_is_left_when_saving_fails(tmp_path: Path) -> None:
    plan = replace(two_program_plan(), predicted={"makespan_s": math.nan})
    with pytest.raises(PlanError, match=r"plan: predicted\.makespan_s = nan"):
        plan.save(tmp_path / "plan")
    assert list(tmp_path.iterdir()) == []


def test_not_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no plan\.json") as caught:
        Plan.load(tmp_path)
    assert "psrl plan" in caught.value.hint
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"has no plan\.json"):
        Plan.load(tmp_path / "file")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"{}"])
def test_header_that_is_no_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema_version", 3, "schema version 3, this psRL reads 2"),
        ("schema_version", "2", "schema version '2', this psRL reads 2"),
        ("schema_version", True, "schema version True"),
        ("schema_version", None, "schema version None"),
        ("model", {"name": "x"}, r"key 'model\.num_layers' is missing"),
        ("programs", 5, "programs = 5"),
        ("programs", [], r"rows of programs 0\.\.1, plan\.json lists 0"),
        ("policy", ..., "key 'policy' is missing"),
        ("polcy", "psrl", r"unknown key 'polcy'\. Did you mean 'policy'"),
        ("predicted", {"makespan_s": "1.5"}, r"predicted\.makespan_s = '1\.5'"),
        ("predicted", {"makespan_s": math.inf}, "Infinity is no number"),
        ("iteration", 0.0, "iteration = 0.0"),
        ("iteration", -1, "iteration = -1"),
        ("trace_hash", "0", "trace_hash = '0'"),
        ("options", {"sed": 0}, r"unknown key 'options\.sed'\. Did you mean 'seed'"),
        ("options", {"memory_fraction": 2.0}, r"options\.memory_fraction = 2\.0"),
        ("calibration", {"schema_version": 2}, r"calibration\.schema_version = 2"),
    ],
)
def test_changed_header(tmp_path: Path, key: str, value: object, message: str) -> None:
    two_program_plan().save(tmp_path / "plan")
    path = tmp_path / "plan" / "plan.json"
    header = json.loads(path.read_text())
    if value is ...:
        del header[key]
    else:
        header[key] = value
    path.write_text(json.dumps(header))
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan")


@pytest.mark.parametrize("name", TABLES)
def test_damaged_tables(tmp_path: Path, name: str) -> None:
    two_program_plan().save(tmp_path / "plan")
    path = tmp_path / "plan" / f"{name}.parquet"
    whole, table = path.read_bytes(), pq.read_table(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PlanError, match="damaged plan"):
        Plan.load(tmp_path / "plan")
    words = pa.array(["x"] * len(table))
    for changed in (table.drop_columns(["rank"]), table.set_column(1, "rank", words)):
        pq.write_table(changed, path)
        with pytest.raises(PlanError, match="rank"):
            Plan.load(tmp_path / "plan")
    path.unlink()
    with pytest.raises(PlanError, match="damaged plan"):
        Plan.load(tmp_path / "plan")


def test_numbers_where_words_belong(tmp_path: Path) -> None:
    two_program_plan().save(tmp_path / "plan")
    path = tmp_path / "plan" / "schedule.parquet"
    table = pq.read_table(path)
    numbers = pa.array(np.zeros(len(table), np.int64))
    pq.write_table(table.set_column(table.schema.get_field_index("op"), "op", numbers), path)
    with pytest.raises(PlanError, match=r"column op of schedule.parquet holds int64"):
        Plan.load(tmp_path / "plan")


def test_fractions_where_whole_numbers_belong(tmp_path: Path) -> None:
    two_program_plan().save(tmp_path / "plan")
    path = tmp_path / "plan" / "segments.parquet"
    table = pq.read_table(path)
    halves = pa.array(table["node"].to_numpy() + 0.5)
    pq.write_table(table.set_column(table.schema.get_field_index("node"), "node", halves), path)
    with pytest.raises(PlanError, match="damaged plan"):
        Plan.load(tmp_path / "plan")


def test_on_rank_keeps_one_ranks_rows() -> None:
    case = random_case(1)
    parts = [case.program.on_rank(rank) for rank in range(case.num_ranks)]
    for i, whole in enumerate(case.program.tables):
        assert sum(len(part.tables[i]) for part in parts) == len(whole)
        for rank, part in enumerate(parts):
            assert (part.tables[i].rank == rank).all()
    assert sum(part.unique_tokens for part in parts) == case.program.unique_tokens


def test_programs_of_a_phase() -> None:
    update, forward = random_case(1).program, random_case(10).program
    plan = wrap(
        replace(forward, phases=("log_old_prob", "reference"), is_update=False),
        replace(update, phases=("update",), is_update=True),
    )
    assert plan.phase_programs("reference") == [plan.programs[0]]
    assert plan.phase_programs("update") == [plan.programs[1]]
    assert plan.phase_programs("rollout") == []


def test_tables_concatenate_and_choose_rows() -> None:
    table = random_case(1).program.micro_batches
    twice = MicroBatches.concatenate([table, table])
    assert len(twice) == 2 * len(table)
    assert twice.rows(slice(len(table), None)).num_tokens.tolist() == table.num_tokens.tolist()
    assert len(MicroBatches.concatenate([])) == 0
    assert MicroBatches.empty().activation.dtype.kind == "U"
