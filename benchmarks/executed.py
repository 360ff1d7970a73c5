"""Predicted against measured time of executed plans that the calibration has not seen.

Five policies' plans of a recorded tau-bench slice run on two data-parallel processes; their op
times calibrate the cost model. With it, plans of another trace and of other layouts are made,
simulated, and only then executed. Every plan is executed in several rounds over all plans, and of
each phase the fastest execution counts: other work on the machine, or on the host that a virtual
machine shares, only ever adds time, for seconds to minutes.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

import psrl
from psrl.analysis.calibration.executed_fit import calibrate_executed
from psrl.analysis.simulated_vs_measured import agreement
from psrl.backend.execution import concatenate_events
from psrl.backend.options import ExecuteOptions
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.config import Setup, load_setup
from psrl.core.run.events import Events
from psrl.core.samples.trace import Trace, open_trace, write_trace
from psrl.planner import PlanningProblem, make_plan
from psrl.sim import simulate
from psrl.traces.slicing import slice_batch
from psrl.traces.synth import load_spec, synthesise

from .measurement import Measurement

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples" / "clusters" / "2cpu.toml"
RECORDED = ROOT / "examples" / "traces" / "tau_bench_airline"
POLICIES = ("verl", "sglang_ps", "dfs_cut", "psrl")
CALIBRATED_POLICIES = (*POLICIES, "vllm_ps")
MAX_ERROR_PERCENT = 10.0
NUM_ROUNDS = 3
OPTIONS = ExecuteOptions(warmup=1, timeout_s=1800.0)


@dataclass(frozen=True)
class Case:
    """Plans of one trace on one layout, all executed."""

    name: str
    trace: Trace
    setup: Setup
    policies: tuple[str, ...] = POLICIES


def recorded_slice(path: Path) -> Trace:
    """20 step samples of a recorded tau-bench run: 2 tasks, 2 episodes each, 5 steps each."""
    recorded = open_trace(RECORDED)
    batch = slice_batch(
        recorded.iteration(0), num_groups=2, trajectories_per_group=2, steps_per_trajectory=5
    )
    header = recorded.header
    return write_trace(
        path, [batch], source=header.source, licence=header.licence, sampling_mode="step"
    )


def drawn(path: Path) -> Trace:
    """52 step samples of one WebShop task of 8 episodes, drawn from published statistics."""
    recording = synthesise(load_spec("webshop", "step", ("tasks=1",)), "step", seed=0)
    return write_trace(
        path,
        recording.batches,
        source=recording.source,
        licence=recording.licence,
        sampling_mode=recording.sampling_mode,
    )


def layout(*changes: str) -> Setup:
    return load_setup(CLUSTER, ("planning.max_tokens_per_micro_batch=2048", *changes))


@dataclass(frozen=True)
class Executed:
    """A plan's simulated and executed runs.

    Attributes:
        folder: run directory of the simulation; the plan is inside.
        run: run directory of the execution, whose events are the fastest of each phase.
        spread: of the slowest round over the fastest, all phases together.
    """

    case: str
    policy: str
    folder: Path
    run: Path
    spread: float


def execute(cases: list[Case], folder: Path) -> list[Executed]:
    """Plan and simulate everything, then execute it in rounds."""
    plans: dict[tuple[str, str], tuple[Plan, Trace, Path]] = {}
    for case in cases:
        problem = PlanningProblem(case.trace.iteration(0), case.trace.content_hash, 0, case.setup)
        for policy in case.policies:
            where = folder / case.name / policy
            plan = make_plan(problem, policy)
            plan.save(where / "plan")
            simulate(plan, problem.batch).save(where / "events.parquet")
            plans[case.name, policy] = plan, case.trace, where
    for number in range(NUM_ROUNDS):
        for plan, trace, where in plans.values():
            run = where / f"round{number}"
            psrl.execute(plan, trace, run, OPTIONS, plan_path=where / "plan")
    return [
        Executed(case, policy, where, where / "round0", _keep_fastest(where))
        for (case, policy), (_, _, where) in plans.items()
    ]


def _keep_fastest(where: Path) -> float:
    """Put the fastest round of each phase into the first run; returns the spread of rounds."""
    rounds = [Events.load(where / f"round{i}" / "events.parquet") for i in range(NUM_ROUNDS)]
    fastest, total_s = [], np.zeros(NUM_ROUNDS)
    for phase in PHASES:
        parts = [events.where(events.phase == phase) for events in rounds]
        times_s = np.array([part.end_s.max() for part in parts])
        fastest.append(parts[int(times_s.argmin())])
        total_s += times_s
    concatenate_events(fastest).save(where / "round0" / "events.parquet")
    return float(total_s.max() / total_s.min())


def measure() -> list[Measurement]:
    measurements = []
    with tempfile.TemporaryDirectory(prefix="psrl-executed-") as temporary:
        folder = Path(temporary)
        recorded, drawn_trace = recorded_slice(folder / "recorded"), drawn(folder / "drawn")
        seen = execute(
            [Case("calibrated", recorded, layout(), CALIBRATED_POLICIES)], folder / "seen"
        )
        calibration = calibrate_executed([executed.run for executed in seen])
        for row in calibration.errors:
            if row.headline:
                what = f"held out in the fit: {row.group} ({row.num_rows} workers)"
                measurements.append(_error(what, row.mean_percent, "mean |%|"))
        known = {"calibration": calibration}
        single = "parallel.data_parallel_size=1"
        setups = {
            "WebShop, DP2": (drawn_trace, layout()),
            "WebShop, one process": (drawn_trace, layout(single, "cluster.devices_per_host=1")),
            "tau-bench, PP2": (
                recorded,
                layout(single, "parallel.pipeline_model_parallel_size=2"),
            ),
        }
        unseen = execute(
            [
                Case(name, trace, setup.model_copy(update=known))
                for name, (trace, setup) in setups.items()
            ],
            folder / "unseen",
        )
        table = pd.concat(
            [
                agreement(e.run, e.folder).assign(case=e.case, policy=e.policy, spread=e.spread)
                for e in unseen
            ],
            ignore_index=True,
        )
    for phase in PHASES:
        of_phase = table[table["phase"] == phase]
        errors = 100.0 * of_phase["time_error"].abs()
        what = f"predicted before execution: {phase} ({len(errors)} runs)"
        measurements.append(_error(what, float(errors.mean()), "mean |%|", MAX_ERROR_PERCENT))
        measurements.append(_error(what, float(errors.max()), "max |%|"))
    for row in table.to_dict("records"):
        what = f"{row['case']}: {row['policy']} {row['phase']}, {row['measured_s']:.2f} s"
        measurements.append(_error(what, 100.0 * row["time_error"], "%"))
    same = float((table["workers_in_order"] * table["kv_ops_equal"]).min())
    memory = 100.0 * float(table["memory_error"].abs().max())
    measurements += [
        Measurement("ops in predicted order with predicted K/V bytes", 100.0 * same, "%", 100.0),
        _error("peak of activations, logits and K/V", memory, "max |%|", MAX_ERROR_PERCENT),
        _error("slowest round of a plan over its fastest", float(table["spread"].max()), "x"),
    ]
    return measurements


def _error(what: str, value: float, unit: str, bar: float | None = None) -> Measurement:
    return Measurement(what, value, unit, bar, more_is_better=False)
