"""The tables of a plan: equal-length columns, one Parquet file each, with exact types."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.core.samples.sample import FloatArray, IntArray, StrArray

T = TypeVar("T", bound="Table")


@dataclass(frozen=True)
class Table:
    """Equal-length columns, one row per entry of one rank; subclasses name the others."""

    rank: IntArray

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def rows(self: T, index: npt.NDArray[Any] | slice) -> T:
        """The table of the chosen rows."""
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @classmethod
    def concatenate(cls: type[T], parts: list[T]) -> T:
        """All rows of several tables of this class, in order."""
        if not parts:
            return cls.empty()
        return cls(
            **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        )

    @classmethod
    def empty(cls: type[T]) -> T:
        return cls(**{name: np.empty(0, dtype) for name, (dtype, _) in column_types(cls).items()})


@dataclass(frozen=True)
class Assignments(Table):
    """Where each sample is trained, and with whom it may share."""

    sample: IntArray
    share_key: IntArray


@dataclass(frozen=True)
class Segments(Table):
    """Tokens of a tree node computed by one micro-batch; rows of a micro-batch in pre-order."""

    micro_batch: IntArray
    node: IntArray
    start_depth: IntArray
    num_tokens: IntArray


@dataclass(frozen=True)
class MicroBatches(Table):
    """Size and predicted time of each micro-batch; `activation` is keep | recompute | drop."""

    micro_batch: IntArray
    activation: StrArray
    num_tokens: IntArray
    pairs: IntArray
    head_tokens: IntArray
    forward_s: FloatArray
    backward_s: FloatArray


@dataclass(frozen=True)
class Schedule(Table):
    """Op list of the last pipeline stage of each rank, in order."""

    op: StrArray
    micro_batch: IntArray


@dataclass(frozen=True)
class Blocks(Table):
    """Cached keys and values: rows `[start_row, start_row + num_tokens)` of a micro-batch.

    A block is allocated by its micro-batch's forward, in whole units of the program's
    `block_tokens`, and released after op `release_op` of `release_micro_batch`; `release_op` "end"
    keeps it to the end of the program.
    """

    block: IntArray
    micro_batch: IntArray
    start_row: IntArray
    num_tokens: IntArray
    allocated_tokens: IntArray
    release_op: StrArray
    release_micro_batch: IntArray


TABLES: dict[str, type[Table]] = {
    "assignments": Assignments,
    "segments": Segments,
    "micro_batches": MicroBatches,
    "schedule": Schedule,
    "blocks": Blocks,
}


def column_types(table_class: type[Table]) -> dict[str, tuple[type[np.generic], pa.DataType]]:
    """Type of each column in memory and on disk."""
    types: dict[Any, tuple[type[np.generic], pa.DataType]] = {
        IntArray: (np.int64, pa.int64()),
        FloatArray: (np.float64, pa.float64()),
        StrArray: (np.str_, pa.string()),
    }
    return {f.name: types[f.type] for f in fields(table_class)}


def write_programs(path: Path, parts: list[T], table_class: type[T]) -> None:
    """Write the tables of all programs, with a column that names the program."""
    merged = table_class.concatenate(parts)
    columns: dict[str, Any] = {"program": np.repeat(np.arange(len(parts)), [len(p) for p in parts])}
    columns |= {f.name: getattr(merged, f.name) for f in fields(merged)}
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_programs(path: Path, table_class: type[T], num_programs: int) -> list[T]:
    """The tables of all programs.

    Raises:
        ValueError: naming the column that is missing, unknown, of another type or has gaps, or the
            program that plan.json does not list.
        OSError, pyarrow.ArrowException: if the file is missing or damaged.
    """
    arrow = pq.read_table(path)
    types = column_types(table_class)
    expected = {"program": pa.int64()} | {name: kind for name, (_, kind) in types.items()}
    if len(set(arrow.column_names)) < len(arrow.column_names):
        raise ValueError(f"{path.name} has a column twice: {', '.join(arrow.column_names)}")
    for what, names in (
        ("lacks", [n for n in expected if n not in arrow.column_names]),
        ("has the unknown", [n for n in arrow.column_names if n not in expected]),
    ):
        if names:
            raise ValueError(f"{path.name} {what} column {', '.join(names)}")
    for name, kind in expected.items():
        if arrow[name].type != kind:
            raise ValueError(f"column {name} of {path.name} holds {arrow[name].type}, not {kind}")
        if arrow[name].null_count:
            raise ValueError(f"column {name} of {path.name} has {arrow[name].null_count} gaps")
    program = arrow["program"].to_numpy()
    if len(program) and not 0 <= program.min() <= program.max() < num_programs:
        raise ValueError(
            f"{path.name} has rows of programs {program.min()}..{program.max()}, plan.json lists "
            f"{num_programs}"
        )
    whole = table_class(
        **{name: arrow[name].to_numpy().astype(dtype) for name, (dtype, _) in types.items()}
    )
    return [whole.rows(np.flatnonzero(program == i)) for i in range(num_programs)]
