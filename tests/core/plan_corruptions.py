"""Real plans on disk, and ways to spoil them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.cost.presets import MODELS
from psrl.core.run.config import PlanningConfig, Setup
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.core.samples.trace import open_trace, write_trace
from psrl.planner import PlanningProblem, make_plan
from tests.core.cases import cluster

Change = Callable[[Path], None]


class Base(NamedTuple):
    """What a plan is made with."""

    policy: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 2
    expert: int = 1
    recompute: str = "none"


BASES = {
    "psrl": Base("psrl"),
    "psrl_pp2": Base("psrl", pipeline=2, recompute="full"),
    "moe_ep2": Base("psrl", expert=2),
    "vllm_ps": Base("vllm_ps"),
    "verl": Base("verl", tensor=2),
}
"""Forward phases and two optimizer steps each."""


def samples() -> SampleBatch:
    """Three tasks of a shared prefix, branches, a duplicate, nested and short samples."""
    rng = np.random.default_rng(7)
    tokens: list[Any] = []
    groups: list[str] = []
    for task in range(3):
        prefix = rng.integers(1000, size=40) + 1000 * task
        for branch in range(4):
            new = rng.integers(1000, size=20 + 5 * branch)
            tokens.append(np.concatenate([prefix, new]))
            groups.append(f"task{task}")
        tokens += [tokens[-1], tokens[-1][:50], tokens[-2][:1]]
        groups += [f"task{task}"] * 3
    spans = [[(max(1, len(t) - 15), len(t))] if len(t) > 1 else [] for t in tokens]
    mini_batch = [0 if g == "task0" else 1 for g in groups]
    return make_batch(tokens, spans, group_id=groups, mini_batch=mini_batch)


def write_plan(directory: Path, base: Base) -> None:
    """A trace and a plan of it, in `trace` and `plan`."""
    kind = {"source": "test", "licence": "none", "sampling_mode": "step"}
    if not (directory / "trace").exists():
        write_trace(directory / "trace", [samples()], **kind)
    trace = open_trace(directory / "trace")
    parallel = ParallelConfig(
        tensor_model_parallel_size=base.tensor,
        pipeline_model_parallel_size=base.pipeline,
        data_parallel_size=base.data,
        expert_model_parallel_size=base.expert,
        recompute=base.recompute,
    )
    setup = Setup(
        model=MODELS["qwen3-moe-tiny" if base.expert > 1 else "qwen2.5-tiny"],
        cluster=cluster(parallel.world_size, 2**33),
        parallel=parallel,
        planning=PlanningConfig(max_tokens_per_micro_batch=80, search_iterations=20),
    )
    problem = PlanningProblem(trace.iteration(0), trace.content_hash, 0, setup)
    make_plan(problem, base.policy).save(directory / "plan")


def header(change: Callable[[dict[str, Any]], None]) -> Change:
    """Edit plan.json."""

    def edit(plan: Path) -> None:
        path = plan / "plan.json"
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))

    return edit


def put(key: str, value: Any) -> Change:
    """Set `a.b.0.c` of plan.json; a function changes what was there; ... deletes the key."""

    def change(raw: dict[str, Any]) -> None:
        target: Any = raw
        *tables, last = (int(part) if part.isdecimal() else part for part in key.split("."))
        for part in tables:
            target = target[part]
        if value is ...:
            del target[last]
        else:
            target[last] = value(target[last]) if callable(value) else value

    return header(change)


def table(name: str, change: Callable[[pd.DataFrame], pd.DataFrame | None]) -> Change:
    """Edit a table; the columns keep their types."""

    def edit(plan: Path) -> None:
        path = plan / f"{name}.parquet"
        old = pq.read_table(path)
        frame = old.to_pandas()
        changed = change(frame)
        frame = frame if changed is None else changed
        pq.write_table(pa.Table.from_pandas(frame, old.schema, preserve_index=False), path)

    return edit


def cell(name: str, column: str, value: Any, where: str = "rank == 0", program: int = -1) -> Change:
    """Change one cell, in the first row of a program (the last by default) that fits."""

    def change(frame: pd.DataFrame) -> None:
        number = program if program >= 0 else int(frame["program"].max())
        row = frame.index[(frame["program"] == number) & frame.eval(where)][0]
        old = frame.at[row, column]
        frame.at[row, column] = value(old) if callable(value) else value

    return table(name, change)


def without(name: str, place: int) -> Change:
    """Leave a row out."""
    return table(name, lambda frame: frame.drop(frame.index[place]))


def twice(name: str, place: int) -> Change:
    """Repeat a row behind itself."""
    return table(
        name,
        lambda frame: (
            pd.concat([frame.iloc[:place], frame.iloc[[place]], frame.iloc[place:]])
            if place >= 0
            else pd.concat([frame, frame.iloc[[place]]])
        ),
    )


def swapped(name: str, first: int, second: int) -> Change:
    """Two rows change places."""

    def change(frame: pd.DataFrame) -> pd.DataFrame:
        order = np.arange(len(frame))
        order[[first, second]] = order[[second, first]]
        return frame.iloc[order]

    return table(name, change)
