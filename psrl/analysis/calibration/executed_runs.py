"""Reads executed psRL runs: the time of every op, beside its tokens, pairs and head tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from psrl.core.errors import ConfigError
from psrl.core.plan.plan import Plan
from psrl.core.run.events import Events
from psrl.core.run.run_directory import read_json, read_manifest
from psrl.core.samples.sample import FloatArray, IntArray, StrArray

_BYTES_OF_DTYPE = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class OpTable:
    """One row per op that computed.

    Attributes:
        head_tokens: of the op itself; 0 where it runs no head.
        recomputes: 1 where a backward first runs the layers' forward again, else 0.
    """

    phase: StrArray
    op: StrArray
    program: IntArray
    rank: IntArray
    stage: IntArray
    micro_batch: IntArray
    num_tokens: FloatArray
    pairs: FloatArray
    head_tokens: FloatArray
    recomputes: FloatArray
    measured_s: FloatArray

    def __len__(self) -> int:
        return len(self.phase)

    def rows(self, index: IntArray) -> "OpTable":
        """The chosen rows."""
        return OpTable(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class ExecutedRun:
    """The plan of an executed run, its timed ops, and events of reductions and optimizer steps."""

    name: str
    plan: Plan
    ops: OpTable
    steps: Events


def read_run(directory: Path) -> ExecutedRun:
    """Read a run directory of `psrl execute`.

    Raises:
        ConfigError: if it is no executed run, or its plan cannot be found.
        PlanError: if events or plan are damaged.
    """
    manifest = read_manifest(directory)
    if manifest.get("kind") != "executed":
        raise ConfigError(
            f"{directory} holds a run of kind {manifest.get('kind')!r}, not an executed one",
            "pass run directories of `psrl execute`, or of `psrl compare --execute`",
        )
    plan = Plan.load(_plan_path(directory, manifest))
    metrics = read_json(directory / "metrics.json")
    events = Events.load(directory / "events.parquet")
    return timed_ops(_run_name(directory), _with_dtype(plan, metrics), events)


def _run_name(directory: Path) -> str:
    """Runs inside a comparison are named after their policy, which needs the comparison's name."""
    path = directory.resolve()
    inside = path.parent.name == "executed"
    return f"{path.parent.parent.name}/{path.name}" if inside else path.name


def expand_runs(directories: Sequence[Path]) -> list[Path]:
    """Executed runs among the given directories and inside the comparisons among them.

    Raises:
        ConfigError: if there is none in one of them.
    """
    found = []
    for directory in directories:
        inside = sorted(directory.glob("executed/*/events.parquet"))
        if inside:
            found += [path.parent for path in inside]
        elif (directory / "events.parquet").exists():
            found.append(directory)
        else:
            raise ConfigError(
                f"{directory} has no events of an executed run",
                "pass run directories of `psrl execute`, or of `psrl compare --execute`",
            )
    return found


def _plan_path(directory: Path, manifest: Mapping[str, Any]) -> Path:
    """A comparison keeps its plans beside its executed runs, which name where they were made."""
    candidates = [
        directory / "plan",
        directory.parent.parent / "policies" / directory.name / "plan",
        Path(str(manifest.get("plan", ""))),
    ]
    for path in candidates:
        if (path / "plan.json").exists():
            return path
    raise ConfigError(
        f"the plan of {directory} is at none of {', '.join(map(str, candidates))}",
        f"put it at {candidates[0]}",
    )


def _with_dtype(plan: Plan, metrics: Mapping[str, Any]) -> Plan:
    """The plan with the working precision that ran, which `psrl execute --dtype` may change."""
    nbytes = _BYTES_OF_DTYPE.get(str(metrics.get("dtype")))
    if nbytes is None:
        return plan
    device = plan.cluster.device.model_copy(update={"dtype_bytes": nbytes})
    return replace(plan, cluster=plan.cluster.model_copy(update={"device": device}))


def timed_ops(name: str, plan: Plan, events: Events) -> ExecutedRun:
    """Join events with the micro-batch table of their plan.

    Raises:
        ConfigError: if an event belongs to no micro-batch of the plan.
    """
    compute = events.where(events.micro_batch >= 0)
    sizes: dict[tuple[int, int, int], tuple[int, int, int, str]] = {}
    for index, program in enumerate(plan.programs):
        table = program.micro_batches
        keys = zip(table.rank.tolist(), table.micro_batch.tolist(), strict=True)
        columns = (table.num_tokens, table.pairs, table.head_tokens, table.activation)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        sizes |= {(index, *key): row for key, row in zip(keys, rows, strict=True)}
    keys_of_ops = zip(
        compute.program.tolist(), compute.rank.tolist(), compute.micro_batch.tolist(), strict=True
    )
    try:
        found = [sizes[key] for key in keys_of_ops]
    except KeyError as error:
        raise ConfigError(
            f"{name}: the plan has no (program, rank, micro-batch) {error.args[0]}",
            "the events belong to another plan",
        ) from None
    activation = np.array([row[3] for row in found], np.str_)
    num_tokens, pairs, head_tokens = (
        np.array([row[i] for row in found], np.float64) for i in range(3)
    )
    # A dropped micro-batch's first forward only fills the cache.
    headless = (compute.op == "forward") & (activation == "drop") & (compute.phase == "update")
    recomputes = (compute.op == "backward") & (activation == "recompute")
    ops = OpTable(
        phase=compute.phase,
        op=compute.op,
        program=compute.program,
        rank=compute.rank,
        stage=compute.stage,
        micro_batch=compute.micro_batch,
        num_tokens=num_tokens,
        pairs=pairs,
        head_tokens=np.where(headless, 0.0, head_tokens),
        recomputes=recomputes.astype(np.float64),
        measured_s=compute.end_s - compute.start_s,
    )
    return ExecutedRun(name, plan, ops, events.where(events.micro_batch < 0))
