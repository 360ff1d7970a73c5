"""Executes a plan: the three phases of an RL iteration on this rank, and what they leave behind."""

from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.events import EventLog, Events
from psrl.core.metrics import PHASES
from psrl.core.plan import Plan
from psrl.core.sample import FloatArray, SampleBatch
from psrl.core.trace import Trace
from psrl.kernels.tree_attention import Implementation

from .compat import parallel_state
from .engine import PhaseInputs, RankEngine
from .inputs import LossTokens, RankProgram, prepare_rank_program
from .launch import model_parallel
from .model import build_model
from .optimizer import MainAdamW, MainGradients
from .options import DTYPE_OF_BYTES, ExecuteOptions, check_executable
from .parameters import gather_full
from .tokens import TokenIds


@dataclass(frozen=True)
class Execution:
    """Result of a plan's execution, gathered from all ranks.

    Attributes:
        old_logprob, reference_logprob, logprob: [number of loss tokens] of the three phases, in
            the order of `loss_tokens`; NaN if the phase did not run.
        loss, gradient_norm: per update program, in order; the norm before clipping.
        gradients: full gradients by "mini_batch<k>.<name>", on the first process if they were kept.
        dtype: working precision that ran.
        implementation: attention that ran.
    """

    events: Events
    loss_tokens: LossTokens
    old_logprob: FloatArray
    reference_logprob: FloatArray
    logprob: FloatArray
    loss: list[float]
    gradient_norm: list[float]
    gradients: dict[str, Tensor]
    dtype: str
    implementation: str


def execute_plan(plan: Plan, trace: Trace, options: ExecuteOptions) -> Execution:
    """Run all phases of a plan on this rank of an existing process group.

    Every rank gets the gathered result. Phases run in the order log_old_prob, reference, update;
    the update reads the logprobs of the first two.

    Raises:
        PsrlError: see `check_executable` and `model_parallel`.
    """
    check_executable(plan, trace, options)
    with model_parallel(plan.parallel):
        return _PlanRun(plan, trace.iteration(plan.iteration), options).run()


class _PlanRun:
    def __init__(self, plan: Plan, batch: SampleBatch, options: ExecuteOptions) -> None:
        self._plan, self._options = plan, options
        self._rank = parallel_state.get_data_parallel_rank()
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        name = options.dtype or DTYPE_OF_BYTES.get(plan.cluster.device.dtype_bytes)
        if name is None:
            raise BackendError(
                f"no dtype has the plan's {plan.cluster.device.dtype_bytes} bytes",
                f"choose a dtype: {list(DTYPE_OF_BYTES.values())}",
            )
        self._dtype_name = name
        self._dtype = getattr(torch, name)
        self._implementation = options.implementation or fastest_implementation(self._device)
        self.loss_tokens = LossTokens(batch)
        token_ids = TokenIds(batch, plan.model.vocab_size, options.reduce_token_ids)
        self._programs = [
            prepare_rank_program(
                i, program, self._rank, batch, token_ids, self.loss_tokens, self._device
            )
            for i, program in enumerate(plan.programs)
        ]
        self._gradients: dict[str, Tensor] = {}
        self._events: list[Events] = []
        self._losses: list[float] = []
        self._norms: list[float] = []

    def run(self) -> Execution:
        policy = self._engine(perturb=0.0)
        old = self._forward_phase("log_old_prob", policy)
        reference = self._unknown()
        if self._phase("reference"):
            engine = self._engine(self._options.reference_perturb)
            reference = self._forward_phase("reference", engine)
            del engine
        logprob = self._update_phase(policy, PhaseInputs(old, reference))
        return Execution(
            events=concatenate_events(self._gather(concatenate_events(self._events))),
            loss_tokens=self.loss_tokens,
            old_logprob=old,
            reference_logprob=reference,
            logprob=logprob,
            loss=self._losses,
            gradient_norm=self._norms,
            gradients=self._gradients,
            dtype=self._dtype_name,
            implementation=self._implementation,
        )

    def _engine(self, perturb: float) -> RankEngine:
        model = build_model(
            self._plan.model,
            self._plan.parallel,
            seed=self._options.seed,
            dtype=self._dtype,
            device=self._device,
            init_std=self._options.init_std,
            perturb=perturb,
        )
        return RankEngine(
            model=model,
            spec=self._plan.model,
            rank=self._rank,
            log=EventLog(),
            implementation=self._implementation,
            loss=self._options.loss,
            measure_activations=self._options.measure_activations,
        )

    def _phase(self, phase: str) -> list[RankProgram]:
        return [p for p in self._programs if phase in p.program.phases]

    def _unknown(self) -> FloatArray:
        return np.full(len(self.loss_tokens), np.nan)

    def _forward_phase(self, phase: str, engine: RankEngine) -> FloatArray:
        programs = self._phase(phase)
        logprobs = self._unknown()
        runs = []
        for _ in range(self._options.warmup + self._options.repeat):
            engine.log = EventLog()
            engine.start_clock()
            for rank_program in programs:
                engine.run(rank_program, phase, logprobs)
            runs.append(engine.log.finish())
        self._events.append(_median_times(runs[self._options.warmup :]))
        return self._merge(logprobs, programs, phase)

    def _update_phase(self, engine: RankEngine, phase_inputs: PhaseInputs) -> FloatArray:
        programs = self._phase("update")
        logprobs = self._unknown()
        if not programs:
            return logprobs
        model = engine.model
        engine.gradients = MainGradients(model)
        before = [p.detach().clone() for p in model.parameters()]
        runs = []
        for _ in range(self._options.warmup + self._options.repeat):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
            engine.optimizer = MainAdamW(model, engine.gradients, self._options.optimizer)
            engine.log = EventLog()
            self._losses, self._norms = [], []
            engine.start_clock()
            for rank_program in programs:
                self._update(engine, rank_program, logprobs, phase_inputs)
            runs.append(engine.log.finish())
        self._events.append(_median_times(runs[self._options.warmup :]))
        return self._merge(logprobs, programs, "update")

    def _update(
        self,
        engine: RankEngine,
        rank_program: RankProgram,
        logprobs: FloatArray,
        phase_inputs: PhaseInputs,
    ) -> None:
        assert engine.gradients is not None
        loss = engine.run(rank_program, "update", logprobs, phase_inputs)
        norm = engine.finish_update(rank_program, "update")
        if self._options.keep_gradients:
            prefix = f"mini_batch{rank_program.program.mini_batch}."
            group = parallel_state.get_tensor_model_parallel_group()
            full = gather_full(engine.gradients, group)
            if dist.get_rank() == 0:
                self._gradients |= {prefix + name: value for name, value in full.items()}
        engine.step(rank_program, "update", norm)
        total = self._sum(np.array([loss]))
        self._losses.append(float(total[0]))
        self._norms.append(norm)

    def _sum(self, values: FloatArray) -> FloatArray:
        """Sum over data-parallel ranks."""
        tensor = torch.from_numpy(values.astype(np.float64)).to(self._device)
        dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
        return tensor.cpu().numpy()

    def _merge(self, logprobs: FloatArray, programs: list[RankProgram], phase: str) -> FloatArray:
        """Logprobs of all data-parallel ranks; each loss token must be computed by one of them."""
        mine = ~np.isnan(logprobs)
        count = self._sum(mine.astype(np.float64))
        expected = np.zeros(len(logprobs))
        for rank_program in programs:
            expected[rank_program.numbers] = 1.0
        wrong = np.flatnonzero(count != expected)
        if len(wrong):
            first = int(wrong[0])
            raise BackendError(
                f"phase {phase}: {len(wrong)} of {int(expected.sum())} loss tokens have no finite "
                f"logprob or were computed twice; the first is token "
                f"{int(self.loss_tokens.token[first])} of sample "
                f"{int(self.loss_tokens.sample[first])}, with {int(count[first])} values",
                "if the model's weights are finite, the plan is wrong: run check_plan on it",
            )
        total = self._sum(np.where(mine, logprobs, 0.0))
        return np.where(expected > 0, total, np.nan)

    def _gather(self, events: Events) -> list[Events]:
        """Events of all data-parallel ranks; tensor-parallel ranks do the same at the same time."""
        group = parallel_state.get_data_parallel_group()
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, events, group=group)
        return gathered


def fastest_implementation(device: torch.device) -> Implementation:
    """The fastest tree attention that is installed for a device."""
    if device.type == "cpu":
        return "parts"
    return "triton" if find_spec("triton") else "reference"


def concatenate_events(parts: list[Events]) -> Events:
    """Rows of several event tables: by phase in the order they ran, then rank."""
    joined = Events(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Events)}
    )
    phase = np.array([PHASES.index(name) for name in joined.phase.tolist()], np.int64)
    order = np.lexsort((np.arange(len(joined)), joined.rank, phase))
    return joined.where(order)


def _median_times(runs: list[Events]) -> Events:
    """The last run's events with the median start and end of each over all runs."""
    start, end = (
        np.median(np.stack([getattr(run, name) for run in runs]), axis=0)
        for name in ("start_s", "end_s")
    )
    return replace(runs[-1], start_s=start, end_s=end)
