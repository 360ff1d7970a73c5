"""Executes a plan: the three phases of an RL iteration on this rank, and what they leave behind."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psrl.backend.executable import check_executable, working_dtype
from psrl.backend.io.checkpoint import (
    checkpoint_name,
    checkpoint_to_resume,
    load_checkpoint,
    save_checkpoint,
)
from psrl.backend.model.model import build_model
from psrl.backend.model.parameters import ParallelGroups, gather_full
from psrl.backend.model.weights import load_hf
from psrl.backend.options import ExecuteOptions
from psrl.backend.train.engine import RankEngine
from psrl.backend.train.inputs import LossTokens, RankProgram, prepare_rank_program
from psrl.backend.train.optimizer import MainAdamW, MainGradients
from psrl.backend.train.pipe import Pipeline
from psrl.backend.train.stage import PhaseInputs
from psrl.backend.train.token_advantages import read_token_advantages
from psrl.backend.train.tokens import TokenIds
from psrl.core.errors import BackendError
from psrl.core.plan.plan import Plan
from psrl.core.run.events import EventLog, Events
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.core.samples.trace import Trace
from psrl.kernels.attention.tree_attention import Implementation

from .compat import parallel_state
from .execution import Execution, concatenate_events, median_times
from .launch import model_parallel


def execute_plan(plan: Plan, trace: Trace, options: ExecuteOptions) -> Execution:
    """Run all phases of a plan on this rank of an existing process group.

    Every rank gets the gathered result. Phases run in the order log_old_prob, reference, update;
    the update reads the logprobs of the first two.

    Raises:
        PsrlError: see `check_executable` and `model_parallel`.
    """
    check_executable(plan, trace, options)
    with model_parallel(plan.parallel, options.timeout_s) as pipeline:
        return _PlanRun(plan, trace.iteration(plan.iteration), options, pipeline).run()


class _PlanRun:
    def __init__(
        self, plan: Plan, batch: SampleBatch, options: ExecuteOptions, pipeline: Pipeline
    ) -> None:
        self._plan, self._options, self._pipeline = plan, options, pipeline
        self._rank = parallel_state.get_data_parallel_rank()
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._dtype_name = working_dtype(plan, options)
        self._dtype = getattr(torch, self._dtype_name)
        self._implementation = options.attention or fastest_implementation(self._device)
        self.loss_tokens = LossTokens(batch)
        if options.token_advantages is not None:
            self.loss_tokens.advantage = read_token_advantages(
                options.token_advantages, self.loss_tokens
            )
        token_ids = TokenIds(batch, plan.model.vocab_size, options.reduce_token_ids)
        self._programs = [
            prepare_rank_program(
                i,
                program,
                self._rank,
                batch,
                token_ids,
                self.loss_tokens,
                self._device,
                stage=pipeline.stage,
                num_stages=pipeline.num_stages,
                coupled_ranks=self._ranks_of_equal_rows,
            )
            for i, program in enumerate(plan.programs)
        ]
        self._gradients: dict[str, Tensor] = {}
        self._events: list[Events] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._router_losses: list[float] = []
        self._expert_loads: list[FloatArray] = []
        self._resumed_from: Path | None = None
        self._checkpoint: Path | None = None

    def run(self) -> Execution:
        policy = self._engine(self._options.weights, perturb=0.0)
        if self._options.checkpoint is not None:
            self._resumed_from = checkpoint_to_resume(
                self._options.checkpoint, self._options.resume
            )
        if self._resumed_from is not None:
            # The forward phases need the weights only, and report no gradients as held.
            gradients = MainGradients(policy.model, ParallelGroups.current())
            self._optimizer(policy, gradients)
            gradients.remove_hooks()
        old = self._forward_phase("log_old_prob", policy)
        reference = self._unknown()
        if self._phase("reference"):
            weights = self._options.reference_weights or self._options.weights
            engine = self._engine(weights, self._options.reference_perturb)
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
            router_loss=self._router_losses,
            expert_load=self._expert_loads,
            gradients=self._gradients,
            dtype=self._dtype_name,
            implementation=self._implementation,
            resumed_from=self._resumed_from,
            checkpoint=self._checkpoint,
        )

    def _engine(self, weights: Path | None, perturb: float) -> RankEngine:
        megatron_settings = {}
        if self._plan.model.num_moe_experts:
            dispatcher = self._options.router.dispatcher
            megatron_settings["moe_token_dispatcher_type"] = dispatcher
        model = build_model(
            self._plan.model,
            self._plan.parallel,
            seed=self._options.seed,
            dtype=self._dtype,
            device=self._device,
            init_std=self._options.init_std,
            perturb=perturb,
            **megatron_settings,
        )
        if weights is not None:
            load_hf(model, self._plan.model, weights)
        return RankEngine(
            model=model,
            spec=self._plan.model,
            rank=self._rank,
            log=EventLog(),
            implementation=self._implementation,
            loss=self._options.loss,
            router=self._options.router,
            pipeline=self._pipeline,
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
        self._events.append(median_times(runs[self._options.warmup :]))
        return self._merge(logprobs, programs, phase)

    def _update_phase(self, engine: RankEngine, phase_inputs: PhaseInputs) -> FloatArray:
        programs = self._phase("update")
        logprobs = self._unknown()
        if not programs:
            return logprobs
        model = engine.model
        engine.gradients = MainGradients(model, ParallelGroups.current())
        before = [p.detach().clone() for p in model.parameters()]
        runs = []
        for _ in range(self._options.warmup + self._options.repeat):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
            engine.optimizer = self._optimizer(engine, engine.gradients)
            engine.log = EventLog()
            self._losses, self._norms = [], []
            self._router_losses, self._expert_loads = [], []
            engine.start_clock()
            for rank_program in programs:
                self._update(engine, rank_program, logprobs, phase_inputs)
            runs.append(engine.log.finish())
        self._events.append(median_times(runs[self._options.warmup :]))
        merged = self._merge(logprobs, programs, "update")
        self._save(engine)
        return merged

    def _optimizer(self, engine: RankEngine, gradients: MainGradients) -> MainAdamW:
        """A new optimizer, or the one of the checkpoint, with the weights that belong to it."""
        optimizer = MainAdamW(gradients, self._options.optimizer)
        if self._resumed_from is not None:
            load_checkpoint(self._resumed_from, engine.model, optimizer, self._plan.model)
        return optimizer

    def _save(self, engine: RankEngine) -> None:
        if self._options.checkpoint is None:
            return
        assert engine.optimizer is not None
        name = checkpoint_name(engine.optimizer.num_steps)
        self._checkpoint = self._options.checkpoint / name
        progress = {"trace_hash": self._plan.trace_hash, "iteration": self._plan.iteration}
        save_checkpoint(
            self._checkpoint, engine.model, engine.optimizer, self._plan.model, progress
        )

    def _update(
        self,
        engine: RankEngine,
        rank_program: RankProgram,
        logprobs: FloatArray,
        phase_inputs: PhaseInputs,
    ) -> None:
        assert engine.gradients is not None
        inputs = engine.look_ahead(rank_program, phase_inputs)
        loss = engine.run(rank_program, "update", logprobs, inputs)
        norm = engine.finish_update(rank_program, "update")
        if self._options.keep_gradients:
            prefix = f"mini_batch{rank_program.program.mini_batch}."
            full = gather_full(engine.gradients, ParallelGroups.current())
            if dist.get_rank() == 0:
                self._gradients |= {prefix + name: value for name, value in full.items()}
        engine.step(rank_program, "update", norm)
        total = self._sum(np.array([loss]))
        self._losses.append(float(total[0]))
        self._norms.append(norm)
        routers = engine.router_run
        self._router_losses.append(routers.loss() if routers else 0.0)
        if routers:
            self._expert_loads.append(routers.load().numpy())

    def _sum(self, values: FloatArray) -> FloatArray:
        """Sum over data-parallel ranks and stages; tensor-parallel ranks hold the same values."""
        mine = values if self._is_first_tensor_rank else np.zeros_like(values)
        tensor = torch.from_numpy(mine.astype(np.float64)).to(self._device)
        dist.all_reduce(tensor)
        return tensor.cpu().numpy()

    @property
    def _ranks_of_equal_rows(self) -> int:
        gathers = self._options.router.dispatcher == "allgather"
        return self._plan.parallel.coupled_ranks if gathers else 1

    @property
    def _is_first_tensor_rank(self) -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0

    def _merge(self, logprobs: FloatArray, programs: list[RankProgram], phase: str) -> FloatArray:
        """Logprobs of all last stages; each loss token must be computed by one of them."""
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
        """Events of all (rank, stage); tensor-parallel ranks do the same at the same time."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, events if self._is_first_tensor_rank else None)
        return [events for events in gathered if events is not None]


def fastest_implementation(device: torch.device) -> Implementation:
    """The fastest tree attention that is installed for a device."""
    if device.type == "cpu":
        return "parts"
    return "triton" if find_spec("triton") else "reference"
