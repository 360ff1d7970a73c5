"""Stage `speed` of the GPU check: time and memory of both phases, dense and shared in turn."""

import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from psrl.backend.train.inputs import RankProgram
from psrl.core.cost.presets import DEVICES
from psrl.core.samples.sample import SampleBatch
from psrl.planner.problem import ProgramProblem

from .backend import Bench, Times, dense_program, flops, problems, shared_program, timed
from .gpu_run import TOLERANCE, Result, Run, new_bench, result, sliced, use_own_policy


def speed(run: Run) -> None:
    """Time and memory of log-old-prob and update."""
    batch, model = sliced(run.scale.speed_slice), run.scale.speed_model
    with run.row(f"speed, {model.name}") as enough:
        if not enough:
            return
        bench = new_bench(run, batch, model, torch.bfloat16)
        forward, target = problems(batch, model, DEVICES["h200-141"])
        use_own_policy(bench, bench.prepare(dense_program(forward, dense_counts(run, batch)[0])))
        for phase, problem in (("log_old_prob", forward), ("update", target)):
            with run.row(f"speed, {phase}") as enough:
                if enough:
                    speed_rows(run, bench, problem, phase)


def dense_counts(run: Run, batch: SampleBatch) -> list[int]:
    """Micro-batches of the dense programs that are timed."""
    return [-(-batch.logical_tokens // tokens) for tokens in run.scale.dense_tokens]


@dataclass
class Timed:
    """One program, and what its runs showed.

    Attributes:
        times_s: of equal runs, without the first.
        allocated_bytes: most bytes that torch had allocated, weights and gradients included; None
            on a CPU.
        kv_bytes: most bytes of cached keys and values and of their gradients.
        errors: of an update against the first dense one.
    """

    kind: str
    prepared: RankProgram
    times_s: list[float] = field(default_factory=list)
    allocated_bytes: int | None = None
    kv_bytes: int = 0
    errors: dict[str, float] | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


def speed_rows(run: Run, bench: Bench, target: ProgramProblem, phase: str) -> None:
    """Dense programs of two cuts and shared ones in turn; the first round also shows memory."""
    programs = [
        Timed("dense", bench.prepare(dense_program(target, count)))
        for count in dense_counts(run, bench.batch)
    ]
    programs += [
        Timed("shared", bench.prepare(shared_program(target, count)))
        for count in run.scale.speed_cuts
    ]
    began_s = time.perf_counter()
    first_look(bench, programs)
    for number in range(run.scale.repeats):
        round_s = (time.perf_counter() - began_s) / (number + 1)
        if run.left_s < round_s:
            run.skip(f"speed, {phase}", f"{run.scale.repeats - number} repeats, for want of time")
            break
        for program in programs:
            times = Times([], [])
            timed(partial(bench.run, program.prepared), times)
            program.times_s += times.wall_s
    if not programs[-1].times_s:
        return
    for program in programs:
        run.report.speed.append(speed_row(bench, program, programs, phase))
        if program.errors is not None:
            run.report.passed &= program.errors["gradient"] <= TOLERANCE[bench.dtype]


def first_look(bench: Bench, programs: list[Timed]) -> None:
    """Run every program once: compiles kernels, fills in memory and errors."""
    on_gpu = bench.device.type == "cuda"
    dense: Result | None = None
    for program in programs:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        held_bytes = 0 if dense is None else dense.gradient.nbytes
        events = bench.run(program.prepared)
        if on_gpu:
            program.allocated_bytes = torch.cuda.max_memory_allocated() - held_bytes
        program.kv_bytes = int((events.kv_bytes + events.kv_gradient_bytes).max())
        if not program.prepared.program.is_update:
            continue
        if dense is None:
            dense = result(bench)
        else:
            program.errors = result(bench).errors(dense)


def speed_row(bench: Bench, own: Timed, programs: list[Timed], phase: str) -> dict[str, Any]:
    """Figures of one program; of a shared one beside the fastest dense one."""
    table, work = own.prepared.program.micro_batches, flops(own.prepared.program, bench.model)
    row = {
        "phase": phase,
        "kind": own.kind,
        "num_micro_batches": len(table),
        "num_tokens": int(table.num_tokens.sum()),
        "median_s": own.median_s,
        "times_s": own.times_s,
        "tflops_per_s": work / own.median_s / 1e12,
        "peak_allocated_bytes": own.allocated_bytes,
        "static_bytes": bench.static_bytes,
        "peak_kv_bytes": own.kv_bytes,
        "errors_vs_first_dense": own.errors,
    }
    if own.kind == "shared":
        dense = min((p for p in programs if p.kind == "dense"), key=lambda p: p.median_s)
        ratio = flops(dense.prepared.program, bench.model) / work
        speedup = dense.median_s / own.median_s
        row |= {"flop_ratio": ratio, "speedup": speedup, "sharing_efficiency": speedup / ratio}
    return row
