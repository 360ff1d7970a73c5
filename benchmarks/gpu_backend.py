"""What only a GPU can say about the backend, in one run of a few minutes.

    python -m benchmarks.gpu_backend --output benchmarks/results/gpu_backend.json

Stage `equality`: gradients, loss and logprobs of shared execution beside dense execution in
bfloat16 and float32, for every recompute mode and several cuts, next to the noise floor: dense
execution beside itself in another cut. Stage `speed`: both phases of a 1.5B model with random
weights on samples of a recorded tau-bench run, dense and shared alternating. The file is written
after every row; what the time budget no longer allows is listed in it. `--dry-run` goes through
all of it on a CPU with a tiny model.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from psrl.backend.execute import fastest_implementation
from psrl.backend.inputs import RankProgram
from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.loss import LossOptions
from psrl.backend.stage import PhaseInputs
from psrl.core.cluster import ModelSpec, ParallelConfig
from psrl.core.plan import Program
from psrl.core.presets import DEVICES, MODELS
from psrl.core.run import finite
from psrl.core.sample import FloatArray, SampleBatch
from psrl.core.trace import open_trace
from psrl.kernels.benchmark_table import device_name
from psrl.planner.problem import ProgramProblem
from psrl.traces.slicing import slice_batch

from .backend import (
    TRACE,
    Bench,
    Recompute,
    Times,
    dense_program,
    flops,
    problems,
    shared_program,
    timed,
)
from .run import environment

TOLERANCE = {torch.bfloat16: 2.5e-2, torch.float32: 5e-6}
"""Largest relative L2 error of the gradient of all parameters."""
LOSS = LossOptions(kind="ppo_clip", kl_coefficient=0.01)
MAX_RATIO_SHIFT = 0.1
"""Old and reference logprobs are off by up to this: ratios stay where clipping does not begin,
because there rounding would decide which branch a token takes."""
EQUALITY_SHARE = 0.5
"""Share of the time budget after which no equality row starts."""
GRACE_S = 60.0


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: a real one, or a dry one.

    Attributes:
        equality_slice, speed_slice: groups, trajectories per group, steps per trajectory.
        cuts: micro-batches of the equality rows' shared programs.
        dense_cuts: of the dense programs; the second gives the noise floor.
        speed_cuts: micro-batches of the shared programs that are timed.
        dense_tokens: per micro-batch of the dense programs that are timed.
    """

    device: torch.device
    models: tuple[ModelSpec, ...]
    speed_model: ModelSpec
    equality_slice: tuple[int, int, int]
    speed_slice: tuple[int, int, int]
    cuts: tuple[int, ...]
    dense_cuts: tuple[int, int]
    speed_cuts: tuple[int, ...]
    dense_tokens: tuple[int, int]
    repeats: int


def real_scale() -> Scale:
    """Sizes for a GPU with 80 GB or more."""
    preset = MODELS["qwen2.5-1.5b"]
    # Heads as in the timed model, so that the same kernels run, with fewer other weights.
    narrow = {"num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 1536, "vocab_size": 8192}
    qwen2 = preset.model_copy(update={"name": "qwen2.5-like", "tied_embeddings": False} | narrow)
    return Scale(
        device=torch.device("cuda"),
        models=(qwen2, qk_norm_variant(qwen2)),
        speed_model=preset,
        equality_slice=(2, 3, 4),
        speed_slice=(4, 4, 6),
        cuts=(1, 6, 48),
        dense_cuts=(3, 8),
        speed_cuts=(2, 3),
        dense_tokens=(16384, 8192),
        repeats=5,
    )


def dry_scale() -> Scale:
    """Sizes for one core of a CPU."""
    narrow = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
    tiny = MODELS["qwen2.5-tiny"].model_copy(update=narrow | heads)
    return Scale(
        device=torch.device("cpu"),
        models=(qk_norm_variant(tiny),),
        speed_model=tiny,
        equality_slice=(1, 1, 2),
        speed_slice=(1, 2, 2),
        cuts=(1, 3),
        dense_cuts=(1, 2),
        speed_cuts=(2,),
        dense_tokens=(6000, 3000),
        repeats=1,
    )


def qk_norm_variant(model: ModelSpec) -> ModelSpec:
    """The same shape with Qwen3's QK norm and a tied head."""
    changes = {"name": "qwen3-like", "qk_layernorm": True, "qkv_bias": False}
    return model.model_copy(update=changes | {"tied_embeddings": True})


@dataclass
class Report:
    """What the run found; written as JSON.

    Attributes:
        passed: no gradient of the rows so far is outside its tolerance.
        complete: the run reached its end, and nothing was skipped.
    """

    device: str
    dry_run: bool
    budget_s: float
    environment: dict[str, Any]
    passed: bool = True
    complete: bool = False
    skipped: list[str] = field(default_factory=list)
    equality: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A report in the making, and the time that is left for it."""

    report: Report
    output: Path
    scale: Scale
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        return self.report.budget_s - (time.perf_counter() - self.began_s)

    def save(self) -> None:
        text = json.dumps(finite(asdict(self.report)), indent=1, allow_nan=False)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(text + "\n", encoding="utf-8")

    def skip(self, what: str, why: str) -> None:
        self.report.skipped.append(f"{what}: {why}")
        self.save()

    @contextmanager
    def row(self, what: str, reserved_s: float = 0.0) -> Iterator[bool]:
        """Yields whether there is time for a row; what the device has no memory for is skipped."""
        enough = self.left_s > reserved_s
        if not enough:
            self.skip(what, f"the time budget of {self.report.budget_s:g} s is used up")
        try:
            yield enough
        except torch.cuda.OutOfMemoryError as error:
            self.skip(what, str(error).partition("\n")[0])
        self.save()


@dataclass(frozen=True)
class Result:
    """What one update gives. Gradients are one flat tensor on the device."""

    gradient: Tensor
    loss: float
    logprobs: FloatArray

    def errors(self, other: "Result") -> dict[str, float]:
        """Relative L2 errors of this result against another; the loss is absolute below 1."""
        shift = np.linalg.norm(self.logprobs - other.logprobs)
        return {
            "gradient": float((self.gradient - other.gradient).norm() / other.gradient.norm()),
            "loss": abs(self.loss - other.loss) / max(abs(other.loss), 1.0),
            "logprobs": float(shift / np.linalg.norm(other.logprobs)),
        }


def result(bench: Bench) -> Result:
    """The outcome of a bench's last run, which was an update."""
    (gradient,) = bench.gradients.tensors()
    return Result(gradient.clone(), bench.loss_value, bench.logprobs)


def update(bench: Bench, program: Program) -> Result:
    """Run an update once."""
    bench.run(bench.prepare(program))
    return result(bench)


def use_own_policy(bench: Bench, forward: RankProgram) -> None:
    """Run log-old-prob; the update is then slightly off that policy."""
    bench.run(forward)
    rng = np.random.default_rng(0)
    old, reference = (
        bench.logprobs + rng.uniform(-MAX_RATIO_SHIFT, MAX_RATIO_SHIFT, len(bench.logprobs))
        for _ in range(2)
    )
    bench.phase_inputs = PhaseInputs(old, reference)


def sliced(size: tuple[int, int, int]) -> SampleBatch:
    """Some samples of the shipped trace, with random advantages.

    The trace records no rewards; with advantages of 0 the KL penalty alone would be left, whose
    terms cancel, so that the error of the gradient would show rounding only.
    """
    groups, trajectories, steps = size
    batch = slice_batch(
        open_trace(TRACE).iteration(0),
        num_groups=groups,
        trajectories_per_group=trajectories,
        steps_per_trajectory=steps,
    )
    return replace(batch, advantage=np.random.default_rng(0).normal(size=batch.num_samples))


def equality(run: Run) -> None:
    """Errors of every model, dtype, recompute mode and cut."""
    batch = sliced(run.scale.equality_slice)
    for dtype, model in product(TOLERANCE, run.scale.models):
        what = f"equality, {model.name}, {dtype_name(dtype)}"
        with run.row(what, reserved_s(run)) as enough:
            if enough:
                equality_rows(run, new_bench(run, batch, model, dtype), what)


def reserved_s(run: Run) -> float:
    """Time that equality leaves to speed."""
    return (1 - EQUALITY_SHARE) * run.report.budget_s


def equality_rows(run: Run, bench: Bench, what: str) -> None:
    """Rows of one model and dtype."""
    forward, target = problems(bench.batch, bench.model, DEVICES["h200-141"])
    first, second = run.scale.dense_cuts
    use_own_policy(bench, bench.prepare(dense_program(forward, first)))
    dense = update(bench, dense_program(target, first))
    floor = update(bench, dense_program(target, second)).errors(dense)
    modes: tuple[Recompute, ...] = get_args(Recompute)
    for recompute, count in product(modes, run.scale.cuts):
        with run.row(f"{what}, recompute {recompute}, cut {count}", reserved_s(run)) as enough:
            if not enough:
                continue
            program = shared_program(target, count, recompute=recompute)
            errors = update(bench, program).errors(dense)
            passed = errors["gradient"] <= TOLERANCE[bench.dtype]
            run.report.passed &= passed
            row = {"model": bench.model.name, "dtype": dtype_name(bench.dtype)}
            run.report.equality.append(
                row
                | {"recompute": recompute, "num_micro_batches": len(program.micro_batches)}
                | {"shared_vs_dense": errors, "dense_vs_dense": floor}
                | {"bar": TOLERANCE[bench.dtype], "passed": passed}
            )


def new_bench(run: Run, batch: SampleBatch, model: ModelSpec, dtype: torch.dtype) -> Bench:
    """A model with random weights on the device, with its fastest attention."""
    device = run.scale.device
    return Bench(batch, model, dtype, device, fastest_implementation(device), LOSS)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        "static_bytes": bench.engine.static_bytes,
        "peak_kv_bytes": own.kv_bytes,
        "errors_vs_first_dense": own.errors,
    }
    if own.kind == "shared":
        dense = min((p for p in programs if p.kind == "dense"), key=lambda p: p.median_s)
        ratio = flops(dense.prepared.program, bench.model) / work
        speedup = dense.median_s / own.median_s
        row |= {"flop_ratio": ratio, "speedup": speedup, "sharing_efficiency": speedup / ratio}
    return row


def measure(scale: Scale, output: Path, budget_s: float, dry_run: bool) -> Report:
    """All stages, in the process group of this rank."""
    report = Report(device_name(scale.device), dry_run, budget_s, environment())
    run = Run(report, output, scale)
    with model_parallel(ParallelConfig(), budget_s + GRACE_S):
        for stage in (equality, speed):
            start_s = time.perf_counter()
            stage(run)
            report.seconds[stage.__name__] = round(time.perf_counter() - start_s, 1)
            run.save()
            print(f"{stage.__name__}: {report.seconds[stage.__name__]} s", file=sys.stderr)
    report.complete = not report.skipped
    run.save()
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; 0 if nothing is skipped and every gradient is within its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--budget-s", type=float, default=420, help="start no row after this")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args(arguments)
    if not (options.dry_run or torch.cuda.is_available()):
        parser.error("no GPU is there; pass --dry-run to try the script on a CPU")
    scale = dry_scale() if options.dry_run else real_scale()
    settings = (options.output, options.budget_s, options.dry_run)
    (report,) = run_ranks(measure, 1, scale, *settings, timeout_s=options.budget_s + GRACE_S)
    state = "passed" if report.passed else "FAILED"
    left_out = "" if report.complete else f", but incomplete ({len(report.skipped)} skipped)"
    print(f"{state}{left_out}: {options.output}", file=sys.stderr)
    return 0 if report.passed and report.complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
