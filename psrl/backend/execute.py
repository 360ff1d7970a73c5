"""Executes a plan: the three phases of an RL iteration on this rank, and what they leave behind."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

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
from psrl.backend.options import DtypeName, ExecuteOptions
from psrl.backend.train.engine import (
    ProgramRun,
    RankEngine,
    optimizer_step,
    reduce_gradients,
)
from psrl.backend.train.finite_step import may_step
from psrl.backend.train.inputs import LossTokens, RankProgram, prepare_rank_program
from psrl.backend.train.optimizer import MainAdamW, MainGradients
from psrl.backend.train.phase_log import PhaseLog, resident_bytes
from psrl.backend.train.pipe import Pipeline
from psrl.backend.train.stage import PhaseInputs
from psrl.backend.train.token_advantages import read_token_advantages
from psrl.backend.train.tokens import TokenIds
from psrl.core.plan.plan import Plan
from psrl.core.run.events import EventLog, Events
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.core.samples.trace import Trace
from psrl.kernels.attention.tree_attention import Implementation

from .compat import GPTModel, parallel_state
from .execution import (
    Execution,
    concatenate_events,
    gather_events,
    median_times,
    merge_logprobs,
    sum_over_ranks,
)
from .launch import model_parallel


def execute_plan(plan: Plan, trace: Trace, options: ExecuteOptions) -> Execution:
    """Run all phases of a plan on this rank of an existing process group.

    Every rank gets the gathered result. The reference runs first, so that its weights are gone
    when the policy's come; then log_old_prob, and the update, which reads the logprobs of both.

    Raises:
        PsrlError: see `check_executable` and `model_parallel`.
    """
    check_executable(plan, trace, options)
    with model_parallel(plan.parallel, options.timeout_s) as pipeline:
        job = _Job.of(plan, trace.iteration(plan.iteration), options, pipeline)
        reference = _forward_phase(job, "reference", lambda: _reference_model(job))
        policy, resumed_from = _policy_model(job)
        old = _forward_phase(job, "log_old_prob", lambda: policy)
        inputs = PhaseInputs(old.logprob, reference.logprob)
        update = _update_phase(job, policy, resumed_from, inputs)
        events = concatenate_events([old.events, reference.events, update.phase.events])
        return Execution(
            events=concatenate_events(gather_events(events)),
            loss_tokens=job.loss_tokens,
            old_logprob=old.logprob,
            reference_logprob=reference.logprob,
            logprob=update.phase.logprob,
            loss=[step.loss for step in update.steps],
            gradient_norm=[step.norm for step in update.steps],
            skipped_mini_batches=[s.mini_batch for s in update.steps if s.is_skipped],
            router_loss=[step.router_loss for step in update.steps],
            expert_load=[step.expert_load for step in update.steps if step.expert_load is not None],
            gradients={k: v for step in update.steps for k, v in step.gradients.items()},
            dtype=job.dtype,
            implementation=job.implementation,
            resumed_from=resumed_from,
            checkpoint=update.checkpoint,
        )


@dataclass(frozen=True)
class _Job:
    """What all phases of an execution share on this rank."""

    plan: Plan
    options: ExecuteOptions
    pipeline: Pipeline
    rank: int
    device: torch.device
    dtype: DtypeName
    implementation: Implementation
    loss_tokens: LossTokens
    programs: tuple[RankProgram, ...]

    @classmethod
    def of(
        cls, plan: Plan, batch: SampleBatch, options: ExecuteOptions, pipeline: Pipeline
    ) -> "_Job":
        rank = parallel_state.get_data_parallel_rank()
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        loss_tokens = LossTokens(batch)
        if options.token_advantages is not None:
            loss_tokens.advantage = read_token_advantages(options.token_advantages, loss_tokens)
        token_ids = TokenIds(batch, plan.model.vocab_size, options.reduce_token_ids)
        gathers = options.router.dispatcher == "allgather"
        programs = [
            prepare_rank_program(
                i,
                program,
                rank,
                batch,
                token_ids,
                loss_tokens,
                device,
                stage=pipeline.stage,
                num_stages=pipeline.num_stages,
                coupled_ranks=plan.parallel.coupled_ranks if gathers else 1,
            )
            for i, program in enumerate(plan.programs)
        ]
        return cls(
            plan,
            options,
            pipeline,
            rank,
            device,
            working_dtype(plan, options),
            options.attention or fastest_implementation(device),
            loss_tokens,
            tuple(programs),
        )

    def programs_of(self, phase: str) -> list[RankProgram]:
        return [p for p in self.programs if phase in p.program.phases]

    def model(self, weights: Path | None, perturb: float) -> GPTModel:
        megatron_settings = {}
        if self.plan.model.num_moe_experts:
            megatron_settings["moe_token_dispatcher_type"] = self.options.router.dispatcher
        model = build_model(
            self.plan.model,
            self.plan.parallel,
            seed=self.options.seed,
            dtype=getattr(torch, self.dtype),
            device=self.device,
            init_std=self.options.init_std,
            perturb=perturb,
            **megatron_settings,
        )
        if weights is not None:
            load_hf(model, self.plan.model, weights)
        return model

    def engine(self, model: GPTModel) -> RankEngine:
        return RankEngine(
            model=model,
            spec=self.plan.model,
            implementation=self.implementation,
            loss=self.options.loss,
            router=self.options.router,
            pipeline=self.pipeline,
        )

    def log(self, phase: str, *resident: Iterable[Tensor]) -> PhaseLog:
        nbytes = resident_bytes(*resident)
        return PhaseLog(phase, self.rank, self.pipeline.stage, self.device, nbytes)


def _reference_model(job: _Job) -> GPTModel:
    options = job.options
    return job.model(options.reference_weights or options.weights, options.reference_perturb)


def _policy_model(job: _Job) -> tuple[GPTModel, Path | None]:
    """The policy, and the checkpoint that its weights are from."""
    options, model = job.options, job.model(job.options.weights, perturb=0.0)
    if options.checkpoint is None:
        return model, None
    resumed_from = checkpoint_to_resume(options.checkpoint, options.resume)
    if resumed_from is not None:
        # The forward phases need the weights only.
        gradients = MainGradients(model, ParallelGroups.current())
        _optimizer(job, model, gradients, resumed_from)
        gradients.remove_hooks()
    return model, resumed_from


class _Phase(NamedTuple):
    """What a phase gives: logprobs of all ranks, and this rank's events."""

    logprob: FloatArray
    events: Events


def _forward_phase(job: _Job, phase: str, model_of: Callable[[], GPTModel]) -> _Phase:
    programs = job.programs_of(phase)
    if not programs:
        return _Phase(np.full(len(job.loss_tokens), np.nan), EventLog().finish())
    engine = job.engine(model_of())
    runs = []
    for _ in range(job.options.num_runs):
        log = job.log(phase, engine.model.parameters())
        found = [engine.run(rank_program, log) for rank_program in programs]
        runs.append(log.finish())
    logprob = merge_logprobs(job.loss_tokens, found, programs, phase, job.device)
    return _Phase(logprob, median_times(runs[job.options.warmup :]))


class _Step(NamedTuple):
    """An optimizer step; `expert_load` is None for a dense model, `gradients` may be empty."""

    mini_batch: int
    loss: float
    norm: float
    is_skipped: bool
    router_loss: float
    expert_load: FloatArray | None
    gradients: dict[str, Tensor]


class _Update(NamedTuple):
    phase: _Phase
    steps: list[_Step]
    checkpoint: Path | None


def _update_phase(
    job: _Job, model: GPTModel, resumed_from: Path | None, inputs: PhaseInputs
) -> _Update:
    """The update, repeated from the same weights as often as the options say.

    Only then a copy of the weights stays on the device, unless a checkpoint has them.
    """
    if not job.programs_of("update"):
        nothing = np.full(len(job.loss_tokens), np.nan)
        return _Update(_Phase(nothing, EventLog().finish()), [], None)
    gradients = MainGradients(model, ParallelGroups.current())
    is_copied = job.options.num_runs > 1 and resumed_from is None
    copies = [p.detach().clone() for p in model.parameters()] if is_copied else []
    runs = []
    for number in range(job.options.num_runs):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), copies, strict=False):
                parameter.copy_(value)
        optimizer = _optimizer(job, model, gradients, resumed_from)
        log = job.log(
            "update", model.parameters(), gradients.tensors(), optimizer.tensors(), copies
        )
        steps, found = _all_steps(job, model, gradients, optimizer, log, inputs)
        runs.append(log.finish())
        if number < job.options.num_runs - 1:
            del optimizer  # before the next one exists
    programs = job.programs_of("update")
    logprob = merge_logprobs(job.loss_tokens, found, programs, "update", job.device)
    phase = _Phase(logprob, median_times(runs[job.options.warmup :]))
    return _Update(phase, steps, _save(job, model, optimizer))


def _all_steps(
    job: _Job,
    model: GPTModel,
    gradients: MainGradients,
    optimizer: MainAdamW,
    log: PhaseLog,
    inputs: PhaseInputs,
) -> tuple[list[_Step], list[ProgramRun]]:
    """An optimizer step per mini-batch."""
    engine, steps, found = job.engine(model), [], []
    for rank_program in job.programs_of("update"):
        run = engine.run(rank_program, log, engine.look_ahead(rank_program, inputs))
        norm = reduce_gradients(gradients, log, rank_program.index)
        kept = {}
        if job.options.keep_gradients:
            prefix = f"mini_batch{rank_program.program.mini_batch}."
            full = gather_full(gradients, ParallelGroups.current())
            if dist.get_rank() == 0:
                kept = {prefix + name: value for name, value in full.items()}
        loss = float(sum_over_ranks(np.array([run.loss]), job.device)[0])
        mini_batch = rank_program.program.mini_batch
        deviation = run.logprobs - inputs.old_logprob
        steps_now = may_step(
            loss,
            norm,
            gradients,
            f"update, mini-batch {mini_batch}",
            {
                "advantage": job.loss_tokens.advantage,
                "log ratio to the old policy": deviation[~np.isnan(deviation)],
            },
            skip=job.options.optimizer.on_nonfinite == "skip",
        )
        if steps_now:
            optimizer_step(optimizer, log, rank_program.index, norm)
        else:
            gradients.zero()
        routers = run.routers
        router_loss = routers.loss() if routers else 0.0
        steps.append(
            _Step(
                mini_batch,
                loss,
                norm,
                not steps_now,
                router_loss,
                routers.load().numpy() if routers else None,
                kept,
            )
        )
        found.append(run)
    return steps, found


def _optimizer(
    job: _Job, model: GPTModel, gradients: MainGradients, resumed_from: Path | None
) -> MainAdamW:
    """A new optimizer, or the one of the checkpoint, with the weights that belong to it."""
    optimizer = MainAdamW(gradients, job.options.optimizer)
    if resumed_from is not None:
        load_checkpoint(resumed_from, model, optimizer, job.plan.model)
    return optimizer


def _save(job: _Job, model: GPTModel, optimizer: MainAdamW) -> Path | None:
    if job.options.checkpoint is None:
        return None
    path = job.options.checkpoint / checkpoint_name(optimizer.num_steps)
    progress = {"trace_hash": job.plan.trace_hash, "iteration": job.plan.iteration}
    save_checkpoint(path, model, optimizer, job.plan.model, progress)
    return path


def fastest_implementation(device: torch.device) -> Implementation:
    """The fastest tree attention that is installed for a device."""
    if device.type == "cpu":
        return "parts"
    return "triton" if find_spec("triton") else "reference"
