"""Replay a plan: every phase is one run of all ranks and stages, on SimPy or vectorised."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from simpy import Environment, Event

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.cost_model import CostModel
from psrl.core.errors import PlanError
from psrl.core.plan.clock import ProgramTimes, Reduction, check_finished, phase_times
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.events import Events
from psrl.core.samples.sample import SampleBatch
from psrl.sim.blocks.block_effects import BlockEffects
from psrl.sim.options import SimOptions, chosen_engine, chosen_reduction

from .assemble_events import phase_events
from .stage import Port, ReductionMeeting, SharedPorts, StageWorker, pipeline_workers
from .work import ProgramWork, phase_work


@dataclass(frozen=True)
class Progress:
    """How far a simulation is: ops of the phase that ran, of all, and the time reached in it."""

    phase: str
    finished_ops: int
    total_ops: int
    simulated_s: float


OnProgress = Callable[[Progress], None]


def simulate(
    plan: Plan,
    batch: SampleBatch,
    cost_model: CostModel | None = None,
    *,
    phases: tuple[str, ...] | None = None,
    options: SimOptions | None = None,
    effects: Sequence[BlockEffects] | None = None,
    progress: OnProgress | None = None,
) -> Events:
    """Run a plan op by op in simulated time and memory.

    Times of a phase count from its own start. Tensor-parallel ranks do the same and are simulated
    once, and so are data-parallel ranks that do exactly the same; phases that run the same
    programs take the same time and are simulated once too. Running out of device memory is no
    error but a result: see `out_of_memory`.

    Args:
        plan: a plan that passes `check_plan`.
        batch: the iteration of the trace that it was made for.
        cost_model: durations; None for the roofline of the plan's model, cluster and layout.
        phases: phases to run; None for all that the plan's programs name.
        options: engine, slow ranks, shared network ports, overlap; `chosen_engine` says which
            engine runs.
        effects: what other blocks than the planner's change, per program; `apply_block_policy`.
        progress: told about finished ops.

    Raises:
        PlanError: if a phase has no program, the op lists deadlock, or a cached block is used
            while it is not alive.
        ConfigError: if the options contradict each other or the plan's layout.
    """
    options = options or SimOptions()
    costs = cost_model or choose_cost_model(
        plan.model, plan.cluster, plan.parallel, plan.calibration
    )
    engine = chosen_engine(plan, options)
    programs_of = {phase: _program_indices(plan, phase) for phase in _chosen(plan, phases)}
    runs: dict[tuple[int, ...], Events] = {}
    parts = []
    for phase, indices in programs_of.items():
        if indices not in runs:
            works, twin = phase_work(plan, indices, batch, costs, options, effects)
            on_ops = _reporter(phase, works, progress)
            reduction = chosen_reduction(plan, costs, options)
            run = _run_vectorised if engine == "vectorised" else _run_simpy
            times = run(plan, works, reduction, options, on_ops)
            runs[indices] = phase_events(works, times, twin)
        parts.append(replace(runs[indices], phase=np.full(len(runs[indices]), phase)))
    return _concatenate(parts)


def _reporter(
    phase: str, works: list[ProgramWork], progress: OnProgress | None
) -> Callable[[int, float], None]:
    finished, total = 0, sum(work.num_ops for work in works)

    def on_ops(num_ops: int, simulated_s: float) -> None:
        nonlocal finished
        finished += num_ops
        if progress is not None and num_ops:
            progress(Progress(phase, finished, total, simulated_s))

    return on_ops


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


def _run_vectorised(
    plan: Plan,
    works: list[ProgramWork],
    reduction: Reduction,
    options: SimOptions,
    on_ops: Callable[[int, float], None],
) -> list[ProgramTimes]:
    times = phase_times(works, reduction, plan.parallel.coupled_ranks, on_ops)
    ranks = works[0].ranks.tolist()
    num_workers = plan.parallel.pipeline_model_parallel_size * len(ranks)
    check_finished([(ranks[k], stage) for k, stage in times[-1].stuck], num_workers)
    return times


def _run_simpy(
    plan: Plan,
    works: list[ProgramWork],
    reduction: Reduction,
    options: SimOptions,
    on_ops: Callable[[int, float], None],
) -> list[ProgramTimes]:
    env = Environment()
    num_stages, num_ranks = plan.parallel.pipeline_model_parallel_size, len(works[0].ranks)
    meeting = ReductionMeeting(env, num_stages, num_ranks, reduction)

    def own_port(rank: int, stage: int, target: int) -> tuple[Port | None, int]:
        return None, 1

    port_of = own_port
    if options.nics_per_host is not None:
        port_of = SharedPorts(plan, options.nics_per_host).port_of
    coupled_ranks = plan.parallel.coupled_ranks
    workers = pipeline_workers(env, num_stages, num_ranks, meeting, coupled_ranks, port_of)

    def run_all(worker: StageWorker) -> Generator[Event, float, None]:
        for work in works:
            yield from worker.run(work)
            on_ops(len(worker.end_s[-1]), env.now)

    processes = [env.process(run_all(worker)) for worker in workers]
    env.run()
    waiting = [w for w, p in zip(workers, processes, strict=True) if p.is_alive]
    check_finished([(int(works[0].ranks[w.rank]), w.stage) for w in waiting], len(workers))
    return [_times_of(works, i, workers) for i, _ in enumerate(works)]


def _times_of(works: list[ProgramWork], index: int, workers: list[StageWorker]) -> ProgramTimes:
    """Times of one program."""
    work = works[index]
    taken_s, start_s, end_s = np.empty((3, *work.kind.shape))
    for worker in workers:
        mine = slice(work.first_op[worker.rank], work.first_op[worker.rank + 1])
        taken_s[worker.stage, mine] = worker.taken_s[index]
        start_s[worker.stage, mine] = worker.start_s[index]
        end_s[worker.stage, mine] = worker.end_s[index]
    if not work.is_update:
        return ProgramTimes(taken_s, start_s, end_s)
    updates_before = sum(w.is_update for w in works[:index])
    return ProgramTimes(taken_s, start_s, end_s, workers[0].reduced_s[updates_before])


def _concatenate(parts: list[Events]) -> Events:
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Events)}
    return Events(**{name: np.concatenate(arrays) for name, arrays in columns.items()})
