"""Replay a plan: every phase is one SimPy run of all ranks and stages."""

from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import fields, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
from simpy import Environment, Event

from psrl.core.cost_model import CostModel, RooflineCostModel
from psrl.core.errors import PlanError
from psrl.core.events import GRADIENT_REDUCTION, OPTIMIZER_STEP, Events
from psrl.core.memory import MemoryState
from psrl.core.metrics import PHASES
from psrl.core.plan import Plan
from psrl.core.sample import SampleBatch

from .stage import Meeting, StageWorker, pipeline_workers
from .work import StageWork, program_work

Progress = Callable[[int, int], None]
"""Called with the number of finished and of all (program, rank, stage) runs."""


def simulate(
    plan: Plan,
    batch: SampleBatch,
    cost_model: CostModel | None = None,
    *,
    phases: tuple[str, ...] | None = None,
    progress: Progress | None = None,
) -> Events:
    """Run a plan op by op in simulated time and memory.

    Times of a phase count from its own start. Tensor-parallel ranks do the same and are simulated
    once; phases that run the same programs take the same time and are simulated once too. Running
    out of device memory is no error but a result: see `out_of_memory`.

    Args:
        plan: a plan that passes `check_plan`.
        batch: the iteration of the trace that it was made for.
        cost_model: durations; None for the roofline of the plan's model, cluster and layout.
        phases: phases to run; None for all that the plan's programs name.
        progress: told about finished work.

    Raises:
        PlanError: if a phase has no program, the op lists deadlock, or a cached block is used
            while it is not alive.
    """
    costs = cost_model or RooflineCostModel(plan.model, plan.cluster, plan.parallel)
    programs_of = {phase: _program_indices(plan, phase) for phase in _chosen(plan, phases)}
    distinct = dict.fromkeys(programs_of.values())
    num_workers = plan.num_ranks * plan.parallel.pipeline_model_parallel_size
    total, finished = sum(len(run) for run in distinct) * num_workers, count(1)

    def on_finish() -> None:
        if progress is not None:
            progress(next(finished), total)

    runs = {indices: _run_programs(plan, indices, batch, costs, on_finish) for indices in distinct}
    parts = [
        replace(runs[indices], phase=np.full(len(runs[indices]), phase))
        for phase, indices in programs_of.items()
    ]
    return _concatenate(parts)


def _chosen(plan: Plan, phases: tuple[str, ...] | None) -> list[str]:
    """The phases to run, in the order of an RL iteration."""
    known = {phase for program in plan.programs for phase in program.phases}
    wanted = known if phases is None else set(phases)
    if not wanted or not wanted <= known & set(PHASES):
        raise PlanError(
            f"cannot simulate the phases {sorted(wanted)}: the plan's programs name "
            f"{sorted(known)}",
            f"choose among {', '.join(p for p in PHASES if p in known) or 'the phases of a plan'}",
        )
    return [phase for phase in PHASES if phase in wanted]


def _program_indices(plan: Plan, phase: str) -> tuple[int, ...]:
    return tuple(i for i, program in enumerate(plan.programs) if phase in program.phases)


def _run_programs(
    plan: Plan,
    indices: tuple[int, ...],
    batch: SampleBatch,
    costs: CostModel,
    on_finish: Callable[[], None],
) -> Events:
    """Events of one phase that runs the given programs, without the phase's name."""
    works: dict[tuple[int, int], list[StageWork]] = defaultdict(list)
    for index in indices:
        for rank, stage, work in program_work(plan, index, batch, costs):
            works[rank, stage].append(work)
    env = Environment()
    meeting = Meeting(env, len(works))
    num_stages = plan.parallel.pipeline_model_parallel_size
    workers = [
        worker
        for rank in range(plan.num_ranks)
        for worker in pipeline_workers(env, rank, num_stages, meeting)
    ]
    meeting_s = costs.gradient_reduction_s(), costs.optimizer_step_s()

    def run_all(worker: StageWorker) -> Generator[Event, None, None]:
        for work in works[worker.rank, worker.stage]:
            yield from worker.run(work, meeting_s)
            on_finish()

    processes = [env.process(run_all(worker)) for worker in workers]
    env.run()
    stuck = [w for w, p in zip(workers, processes, strict=True) if p.is_alive]
    if stuck:
        raise PlanError(
            f"{len(stuck)} of {len(workers)} pipeline stages wait forever, the first is stage "
            f"{stuck[0].stage} of rank {stuck[0].rank}",
            "check_plan says which rule the plan breaks",
        )
    return _concatenate(
        [_stage_events(worker, works[worker.rank, worker.stage]) for worker in workers]
    )


def _stage_events(worker: StageWorker, works: list[StageWork]) -> Events:
    """What a worker's programs did, with the times at which it did so."""
    parts = [_work_rows(work) for work in works]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    total = len(columns["program"])
    return Events(
        phase=np.full(total, ""),
        rank=np.full(total, worker.rank),
        stage=np.full(total, worker.stage),
        start_s=np.array(worker.start_s, np.float64),
        end_s=np.array(worker.end_s, np.float64),
        **columns,
    )


def _work_rows(work: StageWork) -> dict[str, npt.NDArray[Any]]:
    """Columns of `Events` that are known before the work runs."""
    last = [GRADIENT_REDUCTION, OPTIMIZER_STEP] if work.is_update else []
    rows = [*range(len(work.op)), *(len(work.op) for _ in last)]
    memory = work.memory[rows]
    return {
        "program": np.full(len(rows), work.program),
        "op": np.array([*work.op, *last], np.str_),
        "micro_batch": np.array([*work.micro_batch, *(-1 for _ in last)], np.int64),
        "num_tokens": np.array([*work.num_tokens, *(0 for _ in last)], np.int64),
        **{name: memory[:, i] for i, name in enumerate(MemoryState._fields)},
    }


def _concatenate(parts: list[Events]) -> Events:
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Events)}
    return Events(**{name: np.concatenate(arrays) for name, arrays in columns.items()})
