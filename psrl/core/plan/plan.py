"""The Plan: the only door between deciding, simulating and executing.

A plan holds one *program* per set of samples that may share keys and values: one for the
forward-only phases over the whole batch, one per optimizer step for the update. On disk it is a
directory with `plan.json` and one Parquet file per table.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from pydantic import Field, ValidationError

from psrl.core.cost.calibration import Calibration
from psrl.core.cost.cluster import ClusterSpec, ModelSpec, ParallelConfig, Spec
from psrl.core.errors import PlanError
from psrl.core.files import IfExists, new_directory
from psrl.core.run.config import PlanningConfig, problem_lines
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree

from .bound import Bound
from .schedule import Op
from .tables import (
    TABLES,
    Assignments,
    Blocks,
    MicroBatches,
    Schedule,
    Segments,
    T,
    Table,
    read_programs,
    write_programs,
)

PLAN_SCHEMA_VERSION = 2

PHASES = ("log_old_prob", "reference", "update")
"""What a plan may run, in the order of an RL iteration."""


class ProgramHeader(Spec):
    """What plan.json says about a program; see `Program`."""

    phases: tuple[str, ...]
    is_update: bool
    mini_batch: int
    granularity_tokens: int
    block_tokens: int
    bound: Bound | None


class PlanHeader(Spec):
    """Contents of plan.json; see `Plan`."""

    schema_version: int
    trace_hash: str = Field(pattern="^[0-9a-f]{64}$")
    iteration: int = Field(ge=0)
    policy: str = Field(min_length=1)
    options: PlanningConfig
    phases: tuple[str, ...]
    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig
    predicted: dict[str, float]
    calibration: Calibration | None
    programs: tuple[ProgramHeader, ...]


@dataclass(frozen=True)
class Program:
    """What all ranks do for one set of samples, in one or more phases.

    Attributes:
        phases: phases that run this program, e.g. ("log_old_prob", "reference") or ("update",).
        is_update: whether backward ops follow; all samples of an update share one mini_batch.
        mini_batch: optimizer step of an update; -1 for forward-only programs.
        granularity_tokens: prefixes are shared in whole blocks of this many tokens.
        block_tokens: cached blocks are allocated in whole multiples of this; 1 allocates what is
            cached.
        bound: on the work of the most loaded rank; None in a plan that states no lower bound.
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
    block_tokens: int = 1
    bound: Bound | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        """The five tables, in the order of the files on disk."""
        return tuple(getattr(self, name) for name in TABLES)

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
        phases: what the plan runs, some of `PHASES` in that order.
        predicted: metrics predicted by the planner (docs/metrics.md names them); empty for a plan
            that states none.
        calibration: of the cost model that times were predicted with; None for the roofline.
    """

    trace_hash: str
    iteration: int
    policy: str
    options: PlanningConfig
    phases: tuple[str, ...]
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

    def check_trace(self, trace: Trace) -> None:
        """Refuse another trace than that of the plan.

        Raises:
            PlanError: with both hashes.
        """
        if self.trace_hash != trace.content_hash:
            raise PlanError(
                f"the plan was made for trace {self.trace_hash[:12]}, {trace.path} is "
                f"{trace.content_hash[:12]}",
                "plan again for this trace, or pass the trace of the plan",
            )

    def batch_of(self, trace: Trace) -> SampleBatch:
        """The iteration that the plan was made for; see `check_trace`."""
        self.check_trace(trace)
        return trace.iteration(self.iteration)

    def save(
        self, directory: Path, if_exists: IfExists = "error", inputs: Iterable[Path] = ()
    ) -> None:
        """Write the plan directory; the same plan always gives the same bytes.

        Raises:
            ConfigError: see `new_directory`.
            PlanError: if the plan cannot be told in plan.json.
        """
        with new_directory(directory, if_exists, inputs) as partial:
            self._write(partial)

    def _header(self) -> PlanHeader:
        return PlanHeader(
            schema_version=PLAN_SCHEMA_VERSION,
            trace_hash=self.trace_hash,
            iteration=self.iteration,
            policy=self.policy,
            options=self.options,
            phases=self.phases,
            model=self.model,
            cluster=self.cluster,
            parallel=self.parallel,
            predicted=self.predicted,
            calibration=self.calibration,
            programs=tuple(
                ProgramHeader(
                    phases=p.phases,
                    is_update=p.is_update,
                    mini_batch=p.mini_batch,
                    granularity_tokens=p.granularity_tokens,
                    block_tokens=p.block_tokens,
                    bound=p.bound,
                )
                for p in self.programs
            ),
        )

    def _write(self, directory: Path) -> None:
        try:
            raw = self._header().model_dump(mode="json")
        except ValidationError as error:
            lines = problem_lines(PlanHeader, error, "plan")
            raise PlanError("\n".join(lines), "plan.json could not say this") from None
        text = json.dumps(raw, indent=1, sort_keys=True, allow_nan=False)
        (directory / "plan.json").write_text(text + "\n", encoding="utf-8")
        for name, table_class in TABLES.items():
            parts: list[Table] = [getattr(p, name) for p in self.programs]
            write_programs(directory / f"{name}.parquet", parts, table_class)

    @classmethod
    def load(cls, directory: Path) -> "Plan":
        """Read a plan directory.

        Raises:
            PlanError: if it is not a plan of this schema, with the command that renews an old one.
        """
        header = _read_header(directory)
        try:
            tables = {
                name: read_programs(
                    directory / f"{name}.parquet", table_class, len(header.programs)
                )
                for name, table_class in TABLES.items()
            }
        except (OSError, ValueError, pa.ArrowException) as error:
            raise PlanError(
                f"{directory}: damaged plan ({error})", "make the plan again with `psrl plan`"
            ) from None
        programs = tuple(
            Program(
                phases=p.phases,
                is_update=p.is_update,
                mini_batch=p.mini_batch,
                granularity_tokens=p.granularity_tokens,
                block_tokens=p.block_tokens,
                bound=p.bound,
                **{name: tables[name][i] for name in TABLES},  # type: ignore[arg-type]
            )
            for i, p in enumerate(header.programs)
        )
        return cls(
            trace_hash=header.trace_hash,
            iteration=header.iteration,
            policy=header.policy,
            options=header.options,
            phases=header.phases,
            model=header.model,
            cluster=header.cluster,
            parallel=header.parallel,
            programs=programs,
            predicted=header.predicted,
            calibration=header.calibration,
        )


def _read_header(directory: Path) -> PlanHeader:
    path = directory / "plan.json"
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text, parse_constant=_refuse_constant)
    except OSError:
        raise PlanError(
            f"{directory} is not a plan: it has no plan.json", "make one with `psrl plan`"
        ) from None
    except ValueError as error:
        raise PlanError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise PlanError(f"{path}: holds no JSON object")
    version = raw.get("schema_version")
    if version != PLAN_SCHEMA_VERSION or isinstance(version, bool):
        raise PlanError(
            f"{path}: schema version {version!r}, this psRL reads {PLAN_SCHEMA_VERSION}",
            f"make the plan again: {_renewal(raw)}",
        )
    try:
        return PlanHeader.model_validate_json(text)
    except ValidationError as error:
        lines = problem_lines(PlanHeader, error, str(path))
        raise PlanError("\n".join(lines), "make the plan again with `psrl plan`") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _renewal(raw: dict[str, Any]) -> str:
    """The command that makes a plan of another schema again, as far as its header says."""
    command = "psrl plan --trace TRACE --cluster CLUSTER.toml --out NEW_PLAN"
    if isinstance(raw.get("policy"), str):
        command += f" --policy {raw['policy']}"
    if isinstance(raw.get("iteration"), int):
        command += f" --iteration {raw['iteration']}"
    return command
