"""Speed and memory of prefix-shared execution beside dense execution by the same backend.

One process, one thread, float32, Megatron on the CPU, samples of a recorded tau-bench run. Dense
and shared runs alternate; both compute the same loss and gradient. Their micro-batches are
equally many, so the shared ones are smaller. The bars are on *sharing efficiency*: measured
speed-up over the ratio of FLOPs, by process CPU time, minimum of repeats, over the fastest dense
run of any number of micro-batches; and on the peak of kept activations and cached keys with their
gradients, of the same programs.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.model import build_model
from psrl.backend.model.parameters import ParallelGroups
from psrl.backend.options import LossOptions
from psrl.backend.train.engine import RankEngine
from psrl.backend.train.inputs import LossTokens, RankProgram, prepare_rank_program
from psrl.backend.train.optimizer import MainGradients
from psrl.backend.train.phase_log import PhaseLog, resident_bytes
from psrl.backend.train.stage import PhaseInputs
from psrl.backend.train.tokens import TokenIds
from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ModelSpec, ParallelConfig
from psrl.core.plan.plan import Program
from psrl.core.run.config import PlanningConfig, Setup
from psrl.core.run.events import Events
from psrl.core.run.relative_error import relative_error
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.core.samples.trace import open_trace
from psrl.kernels.attention.tree_attention import Implementation
from psrl.planner.micro_batching.all_ranks import sample_sets
from psrl.planner.micro_batching.assemble import Caching, build_rank
from psrl.planner.micro_batching.cut_rules import CutRule, cut_rank
from psrl.planner.micro_batching.rank_tree import tree_of_rank
from psrl.planner.micro_batching.token_cuts import segments_of
from psrl.planner.placement.placement import Placement
from psrl.planner.problem import PlanningProblem, ProgramProblem
from psrl.traces.slicing import slice_batch

from .measurement import Measurement

TRACE = Path(__file__).parents[1] / "examples" / "traces" / "tau_bench_airline"
NUM_REPEATS = 3
# Micro-batches asked for, and units of the shared cut, which bound what it holds.
CUTS = ((5, 2), (7, 3))
MIN_EFFICIENCY = {"forward": 0.9, "update": 0.85}
MAX_PEAK_RATIO = 0.6
CPU_CORE = DeviceSpec(
    name="cpu-core",
    peak_flops_per_s=120e9,
    memory_bytes=2**36,
    memory_bandwidth_bytes_per_s=10e9,
    gemm_efficiency=0.9,
    attention_efficiency=0.4,
    host_layer_s=1e-3,
    dtype_bytes=4,
)
CPU = torch.device("cpu")
SFT = LossOptions(kind="sft")
Recompute = Literal["off", "full", "ancestors", "ancestors dropped"]


def model_spec(hidden_size: int) -> ModelSpec:
    """Four layers of Qwen2.5's proportions."""
    return ModelSpec(
        name=f"bench-{hidden_size}",
        num_layers=4,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        num_query_groups=hidden_size // 128,
        kv_channels=64,
        ffn_hidden_size=3 * hidden_size,
        vocab_size=4096,
    )


def problems(
    batch: SampleBatch, model: ModelSpec, device: DeviceSpec = CPU_CORE
) -> tuple[ProgramProblem, ProgramProblem]:
    """The forward-only and the update program of a batch on one device."""
    cluster = ClusterSpec(
        device=device,
        num_hosts=1,
        devices_per_host=1,
        intra_host_bytes_per_s=2e9,
        inter_host_bytes_per_s=2e9,
        intra_host_latency_s=1e-4,
        inter_host_latency_s=1e-4,
    )
    setup = Setup(
        model=model,
        cluster=cluster,
        parallel=ParallelConfig(),
        # The number of micro-batches is chosen here, not by a budget.
        planning=PlanningConfig(max_tokens_per_micro_batch=int(batch.num_tokens.sum())),
    )
    forward, update = PlanningProblem(batch, "bench", 0, setup).programs()
    return forward, update


def dense_program(subproblem: ProgramProblem, num_micro_batches: int) -> Program:
    """Whole samples without sharing, spread evenly over micro-batches."""
    num_tokens = subproblem.samples.num_tokens
    sets: list[list[int]] = [[] for _ in range(num_micro_batches)]
    load = np.zeros(num_micro_batches, np.int64)
    for sample in np.argsort(-num_tokens, kind="stable").tolist():
        lightest = int(load.argmin())
        sets[lightest].append(sample)
        load[lightest] += num_tokens[sample]
    nobody = np.zeros(len(num_tokens), np.int64)
    placement = Placement(subproblem, nobody, np.arange(len(num_tokens)))
    return sample_sets(placement, [[np.array(s) for s in sets]], "dynamic").program


def shared_program(
    subproblem: ProgramProblem,
    num_micro_batches: int,
    num_units: int = 1,
    caching: Caching = "dynamic",
    recompute: Recompute = "off",
) -> Program:
    """Everything shared, cut by predicted cost in units.

    Args:
        num_micro_batches: of equal cost; units add some.
        num_units: 1 for plain even cuts, which hold most.
        recompute: what is computed twice, as in docs/exactness.md; ancestors are micro-batches
            that others read.
    """
    nobody = np.zeros(subproblem.samples.num_samples, np.int64)
    placement = Placement(subproblem, nobody, nobody)
    rank_tree = tree_of_rank(placement, 0)
    segments = segments_of(
        rank_tree, cut_rank(rank_tree, CutRule(num_micro_batches, num_units, 1.0))
    )
    program = build_rank(placement, 0, segments, caching).program
    if recompute == "off":
        return program
    table = program.micro_batches
    is_chosen = np.isin(table.micro_batch, program.blocks.micro_batch) | (recompute == "full")
    mode = "drop" if recompute == "ancestors dropped" else "recompute"
    activation = np.where(is_chosen, mode, "keep")
    return build_rank(placement, 0, segments, caching, activation).program


def flops(program: Program, model: ModelSpec) -> float:
    """What the program computes: 2 per weight and token, 4 per visible pair and channel.

    A backward costs twice its forward, attention's 2.5 times, and the head runs its forward again.
    """
    table = program.micro_batches
    linear = 2.0 * model.num_layers * model.active_layer_parameters * table.num_tokens.sum()
    pairs = 4.0 * model.num_layers * model.attention_width * table.pairs.sum()
    head = 2.0 * model.hidden_size * model.vocab_size * table.head_tokens.sum()
    if not program.is_update:
        return float(linear + pairs + head)
    return float(3.0 * linear + 3.5 * pairs + 4.0 * head)


@dataclass
class Bench:
    """One model on this process, and programs of one batch.

    Attributes:
        phase_inputs: what the loss of an update reads.
        logprobs: [number of loss tokens] of the last run, NaN before it.
        loss_value: of the last run.
    """

    batch: SampleBatch
    model: ModelSpec
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    implementation: Implementation = "parts"
    loss: LossOptions = SFT

    def __post_init__(self) -> None:
        weights = build_model(
            self.model, ParallelConfig(), seed=0, dtype=self.dtype, device=self.device
        )
        self.gradients = MainGradients(weights, ParallelGroups.current())
        self.loss_tokens = LossTokens(self.batch)
        self.engine = RankEngine(
            model=weights,
            spec=self.model,
            implementation=self.implementation,
            loss=self.loss,
            measure_activations=False,
        )
        self.logprobs = self._unknown()
        self.phase_inputs = PhaseInputs(self._unknown(), self._unknown())
        self.loss_value = float("nan")
        self._token_ids = TokenIds(self.batch, self.model.vocab_size)

    def _unknown(self) -> FloatArray:
        return np.full(len(self.loss_tokens), np.nan)

    def prepare(self, program: Program) -> RankProgram:
        return prepare_rank_program(
            0, program, 0, self.batch, self._token_ids, self.loss_tokens, self.device
        )

    def run(self, prepared: RankProgram) -> Events:
        """Run a program; the gradients of an update are in `gradients`."""
        return self._run(prepared, self.engine)

    def _run(self, prepared: RankProgram, engine: RankEngine) -> Events:
        self.gradients.zero()
        phase = "update" if prepared.program.is_update else "log_old_prob"
        log = PhaseLog(phase, 0, 0, self.device, self.static_bytes)
        found = engine.run(prepared, log, self.phase_inputs)
        self.logprobs, self.loss_value = found.logprobs, found.loss
        return log.finish()

    @property
    def static_bytes(self) -> int:
        """Bytes of weights and gradients."""
        return resident_bytes(self.engine.model.parameters(), self.gradients.tensors())

    def peak_bytes(self, prepared: RankProgram, activations: bool = True) -> int:
        """Peak of cached keys, their gradients and, if wanted, kept activations."""
        # Counting takes time, so it has a run of its own.
        events = self._run(prepared, replace(self.engine, measure_activations=activations))
        return int((events.kv_bytes + events.kv_gradient_bytes + events.activation_bytes).max())


@dataclass(frozen=True)
class Times:
    """[repeats] seconds of equal runs."""

    cpu_s: list[float]
    wall_s: list[float]


def timed(function: Callable[[], object], times: Times) -> None:
    gc.collect()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    function()
    times.cpu_s.append(time.process_time() - cpu_s)
    times.wall_s.append(time.perf_counter() - wall_s)


def speed() -> list[Measurement]:
    """Sharing efficiency and memory of each cut, forward-only and update."""
    batch = slice_batch(
        open_trace(TRACE).iteration(0),
        num_groups=2,
        trajectories_per_group=3,
        steps_per_trajectory=4,
    )
    model = model_spec(512)
    with model_parallel(ParallelConfig()):
        bench = Bench(batch, model)
        return [
            row for subproblem in problems(batch, model) for row in _efficiency(bench, subproblem)
        ]


def _efficiency(bench: Bench, subproblem: ProgramProblem) -> list[Measurement]:
    programs: dict[tuple[str, int], RankProgram] = {}
    for count, num_units in CUTS:
        shared = shared_program(subproblem, count, num_units)
        dense = dense_program(subproblem, len(shared.micro_batches))
        programs["dense", count] = bench.prepare(dense)
        programs["shared", count] = bench.prepare(shared)
    times = {key: Times([], []) for key in programs}
    gradients: dict[tuple[str, int], torch.Tensor] = {}
    for _ in range(NUM_REPEATS):
        for key, prepared in programs.items():
            timed(lambda prepared=prepared: bench.run(prepared), times[key])
            gradients[key] = torch.cat([g.flatten() for _, g in bench.gradients])
    rows = []
    for count, _ in CUTS:
        rows += _rows(bench.model, programs, times, count)
        if subproblem.is_update:
            where = _name(programs["shared", count].program)
            wanted, found = gradients["dense", count], gradients["shared", count]
            error = relative_error(float((found - wanted).norm()), float(wanted.norm()))
            rows.append(Measurement(f"{where}: gradient error", error, "", 5e-6, False))
            peaks = [bench.peak_bytes(programs[kind, count]) for kind in ("shared", "dense")]
            what = f"{where}: activation + KV peak / dense"
            rows.append(Measurement(what, peaks[0] / peaks[1], "", MAX_PEAK_RATIO, False))
    return rows


def _name(shared: Program) -> str:
    num_tokens = shared.micro_batches.num_tokens
    phase = "update" if shared.is_update else "forward"
    return f"{phase}, {len(num_tokens)} micro-batches of {num_tokens.mean():.0f} tokens"


def _rows(
    model: ModelSpec,
    programs: dict[tuple[str, int], RankProgram],
    times: dict[tuple[str, int], Times],
    count: int,
) -> list[Measurement]:
    dense, shared = (programs[kind, count].program for kind in ("dense", "shared"))
    ratio = flops(dense, model) / flops(shared, model)
    where = _name(shared)
    min_efficiency = MIN_EFFICIENCY["update" if dense.is_update else "forward"]

    def speedup(pick: Callable[[list[float]], float], clock: str) -> float:
        dense_s = min(pick(getattr(times["dense", n], clock)) for n, _ in CUTS)
        return dense_s / pick(getattr(times["shared", count], clock))

    cpu = speedup(min, "cpu_s")
    shared_s = min(times["shared", count].cpu_s)
    return [
        Measurement(f"{where}: FLOP ratio", ratio, "x"),
        Measurement(f"{where}: speed-up, minimum CPU time", cpu, "x"),
        Measurement(
            f"{where}: speed-up, median CPU time", speedup(statistics.median, "cpu_s"), "x"
        ),
        Measurement(f"{where}: speed-up, minimum wall time", speedup(min, "wall_s"), "x"),
        Measurement(f"{where}: dense", flops(dense, model) / (shared_s * cpu) / 1e9, "GFLOP/s"),
        Measurement(f"{where}: shared", flops(shared, model) / shared_s / 1e9, "GFLOP/s"),
        Measurement(f"{where}: sharing efficiency", cpu / ratio, "", min_efficiency),
    ]


def memory() -> list[Measurement]:
    """Peaks of cached keys and of activations, on a narrow model of the same proportions."""
    batch = slice_batch(
        open_trace(TRACE).iteration(0),
        num_groups=4,
        trajectories_per_group=4,
        steps_per_trajectory=6,
    )
    model = model_spec(128)
    with model_parallel(ParallelConfig()):
        bench = Bench(batch, model)
        forward, update = problems(batch, model)
        # About a thousand tokens each, in units that hold an eighth of the batch.
        cut = (-(-forward.tree.unique_tokens // 1024), 8)

        found = []
        for name, subproblem in (("forward", forward), ("update", update)):
            dynamic, everything = (
                bench.peak_bytes(bench.prepare(shared_program(subproblem, *cut, kind)), False)
                for kind in ("dynamic", "everything")
            )
            what = f"{name}: peak KV bytes, dynamic / cache everything"
            found.append(Measurement(what, dynamic / everything, "", 0.40, False))
        shared = shared_program(update, *cut)
        dense = dense_program(update, len(shared.micro_batches))
        dropped = shared_program(update, *cut, recompute="ancestors dropped")
        peaks = [bench.peak_bytes(bench.prepare(p)) for p in (shared, dropped, dense)]
        for what, peak, bar in zip(
            ("kept", "dropped"), peaks, (None, MAX_PEAK_RATIO), strict=False
        ):
            row = f"update: activation + KV peak / dense, ancestors {what}"
            found.append(Measurement(row, peak / peaks[2], "", bar, False))
        return found


def measure() -> list[Measurement]:
    """Run everything in one fresh process with one thread."""
    return run_ranks(_measure, 1, timeout_s=3600)[0]


def _measure() -> list[Measurement]:
    return [*memory(), *speed()]
