"""The Plan: the only door between deciding, simulating and executing.

A plan holds one *program* per set of samples that may share keys and values: one for the
forward-only phases over the whole batch, one per optimizer step for the update. On disk it is a
directory with `plan.json` and one Parquet file per table.
"""

import json
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.core.cost.calibration import Calibration
from psrl.core.cost.cluster import ClusterSpec, ModelSpec, ParallelConfig
from psrl.core.errors import PlanError
from psrl.core.files import IfExists, new_directory
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch, StrArray
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree

from .schedule import Op

PLAN_SCHEMA_VERSION = 1

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
        return cls(**{f.name: np.empty(0, _DTYPES[_type_name(f.type)]) for f in fields(cls)})


_DTYPES = {"IntArray": np.int64, "FloatArray": np.float64, "StrArray": np.str_}


def _type_name(annotation: Any) -> str:
    if annotation is IntArray:
        return "IntArray"
    return "FloatArray" if annotation is FloatArray else "StrArray"


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

    A block is allocated by its micro-batch's forward, with `allocated_tokens >= num_tokens`
    (fixed-size allocation rounds up), and released after op `release_op` of
    `release_micro_batch`; `release_op` "end" keeps it to the end of the program.
    """

    block: IntArray
    micro_batch: IntArray
    start_row: IntArray
    num_tokens: IntArray
    allocated_tokens: IntArray
    release_op: StrArray
    release_micro_batch: IntArray


_TABLES: dict[str, type[Table]] = {
    "assignments": Assignments,
    "segments": Segments,
    "micro_batches": MicroBatches,
    "schedule": Schedule,
    "blocks": Blocks,
}


@dataclass(frozen=True)
class Program:
    """What all ranks do for one set of samples, in one or more phases.

    Attributes:
        phases: phases that run this program, e.g. ("log_old_prob", "reference") or ("update",).
        is_update: whether backward ops follow; all samples of an update share one mini_batch.
        mini_batch: optimizer step of an update; -1 for forward-only programs.
        granularity_tokens: prefixes are shared in whole blocks of this many tokens.
    """

    phases: tuple[str, ...]
    is_update: bool
    mini_batch: int
    granularity_tokens: int
    assignments: Assignments
    segments: Segments
    micro_batches: MicroBatches
    schedule: Schedule
    blocks: Blocks

    @property
    def tables(self) -> tuple[Table, ...]:
        """The five tables, in the order of the files on disk."""
        return tuple(getattr(self, name) for name in _TABLES)

    def tree(self, batch: SampleBatch) -> PrefixTree:
        """The prefix tree that `segments.node` refers to.

        Its sample indices are positions in `assignments`, not in the batch.
        """
        samples = batch.select(self.assignments.sample)
        return build_prefix_tree(samples, self.assignments.share_key, self.granularity_tokens)

    def on_rank(self, rank: int) -> "Program":
        """The same program with only one rank's rows."""

        def mine(table: T) -> T:
            return table.rows(np.flatnonzero(table.rank == rank))

        return replace(
            self,
            assignments=mine(self.assignments),
            segments=mine(self.segments),
            micro_batches=mine(self.micro_batches),
            schedule=mine(self.schedule),
            blocks=mine(self.blocks),
        )

    def ops(self) -> list[Op]:
        """Op list of the last stage; only meaningful on one rank's program."""
        kinds, micro_batches = self.schedule.op.tolist(), self.schedule.micro_batch.tolist()
        return [Op(k, m) for k, m in zip(kinds, micro_batches, strict=True)]

    @cached_property
    def unique_tokens(self) -> int:
        """Tokens computed over all ranks; a prefix needed by two ranks counts twice."""
        return int(self.segments.num_tokens.sum())


@dataclass(frozen=True)
class Plan:
    """A complete decision for one RL iteration of one trace.

    Attributes:
        trace_hash: content hash of the trace; `iteration` is the index inside it.
        policy: name of the scheduling policy; `options` its parameters.
        predicted: metrics predicted by the planner (docs/metrics.md names them).
        calibration: of the cost model that times were predicted with; None for the roofline.
    """

    trace_hash: str
    iteration: int
    policy: str
    options: dict[str, Any]
    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig
    programs: tuple[Program, ...]
    predicted: dict[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None

    @property
    def num_ranks(self) -> int:
        return self.parallel.data_parallel_size

    def phase_programs(self, phase: str) -> list[Program]:
        """Programs that a phase runs, in order."""
        return [p for p in self.programs if phase in p.phases]

    def save(self, directory: Path, if_exists: IfExists = "error") -> None:
        """Write the plan directory; the same plan always gives the same bytes.

        Raises:
            ConfigError: see `new_directory`.
        """
        with new_directory(directory, if_exists) as partial:
            self._write(partial)

    def _write(self, directory: Path) -> None:
        header = {
            "schema_version": PLAN_SCHEMA_VERSION,
            "trace_hash": self.trace_hash,
            "iteration": self.iteration,
            "policy": self.policy,
            "options": self.options,
            "model": self.model.model_dump(),
            "cluster": self.cluster.model_dump(),
            "parallel": self.parallel.model_dump(),
            "predicted": self.predicted,
            "calibration": self.calibration and self.calibration.model_dump(mode="json"),
            "programs": [
                {
                    "phases": list(p.phases),
                    "is_update": p.is_update,
                    "mini_batch": p.mini_batch,
                    "granularity_tokens": p.granularity_tokens,
                }
                for p in self.programs
            ],
        }
        text = json.dumps(header, indent=1, sort_keys=True)
        (directory / "plan.json").write_text(text + "\n", encoding="utf-8")
        for name, table_class in _TABLES.items():
            columns: dict[str, Any] = {
                "program": np.repeat(
                    np.arange(len(self.programs)), [len(getattr(p, name)) for p in self.programs]
                )
            }
            merged = table_class.concatenate([getattr(p, name) for p in self.programs])
            columns |= {f.name: getattr(merged, f.name) for f in fields(merged)}
            pq.write_table(pa.table(columns), directory / f"{name}.parquet", compression="zstd")

    @classmethod
    def load(cls, directory: Path) -> "Plan":
        """Read a plan directory.

        Raises:
            PlanError: if it is not a plan of this schema.
        """
        path = directory / "plan.json"
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise PlanError(
                f"{directory} is not a plan: it has no plan.json", "make one with `psrl plan`"
            ) from None
        except ValueError as error:
            raise PlanError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(header, dict):
            raise PlanError(f"{path}: holds no JSON object")
        version = header.get("schema_version")
        if version != PLAN_SCHEMA_VERSION:
            raise PlanError(
                f"{path}: schema version {version}, this psRL reads {PLAN_SCHEMA_VERSION}",
                "make the plan again with this version",
            )
        tables: dict[str, list[Table]] = {}
        try:
            for name, table_class in _TABLES.items():
                tables[name] = _read_programs(
                    directory / f"{name}.parquet", table_class, len(header["programs"])
                )
            programs = tuple(
                Program(
                    tuple(p["phases"]),
                    p["is_update"],
                    p["mini_batch"],
                    p["granularity_tokens"],
                    *(tables[name][i] for name in _TABLES),  # type: ignore[arg-type]
                )
                for i, p in enumerate(header["programs"])
            )
            return cls(
                trace_hash=header["trace_hash"],
                iteration=header["iteration"],
                policy=header["policy"],
                options=header["options"],
                model=ModelSpec.model_validate(header["model"]),
                cluster=ClusterSpec.model_validate(header["cluster"]),
                parallel=ParallelConfig.model_validate(header["parallel"]),
                programs=programs,
                predicted=header["predicted"],
                calibration=_calibration(header["calibration"]),
            )
        except (KeyError, OSError, TypeError, ValueError, pa.ArrowException) as error:
            raise PlanError(
                f"{directory}: damaged plan ({type(error).__name__}: {error})",
                "make the plan again with `psrl plan`",
            ) from error


def _calibration(raw: Any) -> Calibration | None:
    return None if raw is None else Calibration.model_validate_json(json.dumps(raw))


def _read_programs(path: Path, table_class: type[T], num_programs: int) -> list[T]:
    arrow = pq.read_table(path)
    program = arrow["program"].to_numpy()
    if len(program) and not 0 <= program.min() <= program.max() < num_programs:
        raise ValueError(f"{path.name} has rows of a program that plan.json does not list")
    columns = {}
    for f in fields(table_class):
        dtype = _DTYPES[_type_name(f.type)]
        values = arrow[f.name].to_numpy()
        if (values.dtype == object) != (dtype is np.str_):
            raise TypeError(f"column {f.name} of {path.name} holds {arrow[f.name].type}")
        columns[f.name] = values.astype(dtype, casting="unsafe" if dtype is np.str_ else "safe")
    whole = table_class(**columns)
    return [whole.rows(np.flatnonzero(program == i)) for i in range(num_programs)]
