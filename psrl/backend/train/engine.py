"""Runs one rank's programs op by op on its pipeline stage: messages, events, reduction, step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from psrl.backend.compat import GPTModel, parallel_state
from psrl.backend.model.model import stage_rows
from psrl.backend.model.moe import RouterRun
from psrl.backend.options import LossOptions, RouterOptions
from psrl.core.cost.cluster import ModelSpec
from psrl.core.plan.bytes_over_ops import HEAD_CHUNK_TOKENS, MemoryState
from psrl.core.plan.clock import SEND_WINDOW
from psrl.core.plan.schedule import Op
from psrl.core.run.events import GRADIENT_REDUCTION, OPTIMIZER_STEP, EventLog
from psrl.core.samples.sample import FloatArray
from psrl.kernels.attention.tree_attention import Implementation, prepare_attention

from .inputs import EdgeInputs, RankProgram
from .kv_store import BlockStore
from .look_ahead import forward_only
from .loss import sequence_log_ratios
from .optimizer import MainAdamW, MainGradients
from .pipe import SINGLE_STAGE, Pipe, Pipeline
from .stage import PhaseInputs, StageRun


@dataclass
class RankEngine:
    """One stage of the model on one rank, and how its programs run.

    Attributes:
        rank: data-parallel rank, as in the plan.
        log: gets one row per op; times are relative to `start_clock`, and an op starts when its
            message has arrived.
        pipeline: the stages, see `psrl.backend.launch.model_parallel`.
        gradients: None for a model that only runs forward.
        measure_activations: count the bytes that autograd keeps; what a layer recomputes inside
            a backward is not counted.
        send_window: see `psrl.backend.train.pipe.Pipe`.
        router_run: what the routers reported in the last run; None for a dense model.
        stage_run: makes the run of a program; a subclass may take its loss from elsewhere.
    """

    model: GPTModel
    spec: ModelSpec
    rank: int
    log: EventLog
    implementation: Implementation
    loss: LossOptions
    router: RouterOptions = field(default_factory=RouterOptions)
    pipeline: Pipeline = SINGLE_STAGE
    gradients: MainGradients | None = None
    optimizer: MainAdamW | None = None
    measure_activations: bool = True
    send_window: int = SEND_WINDOW
    store_class: type[BlockStore] = BlockStore
    router_run: RouterRun | None = None
    stage_run: Callable[..., StageRun] = StageRun
    _clock_start_s: float = 0.0

    def start_clock(self) -> None:
        """Set the zero of event times, at the same moment on all ranks."""
        self._synchronize()
        dist.barrier()
        self._clock_start_s = time.perf_counter()

    def _now_s(self) -> float:
        self._synchronize()
        return time.perf_counter() - self._clock_start_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, main gradients and optimizer state that exist now."""
        weights = sum(p.nbytes for p in self.model.parameters())
        gradients = self.gradients.nbytes if self.gradients else 0
        return weights + gradients + (self.optimizer.nbytes if self.optimizer else 0)

    def run(
        self,
        rank_program: RankProgram,
        phase: str,
        logprobs: FloatArray,
        phase_inputs: PhaseInputs | None = None,
    ) -> float:
        """Run all ops of a program; returns the rank's share of the loss.

        It is 0 if the program runs forward only, and on all stages but the last.

        Args:
            logprobs: [number of loss tokens] filled where this rank owns the edge.
            phase_inputs: needed by an update.

        Gradients of an update are added to `gradients`, not yet reduced.
        """
        self.router_run = self._new_router_run(rank_program, phase_inputs)
        store = self._store(rank_program)
        stage_run = self.stage_run(
            self.model,
            self.spec,
            rank_program,
            store,
            self.implementation,
            self.loss,
            logprobs,
            phase_inputs,
            self.router_run,
            self.measure_activations,
        )
        pipe = Pipe(
            self.pipeline,
            rank_program.ops,
            lambda m: self._message_shape(rank_program, m),
            self._dtype,
            self._device,
            send_window=self.send_window,
        )
        for op, next_op in zip_longest(rank_program.ops, rank_program.ops[1:]):
            received = pipe.receive(op)
            start_s = self._now_s()
            store.begin(op)
            result = stage_run.run(op, received)
            if next_op is not None:
                # The host has time for it while a device computes this op.
                self._prepare(rank_program, next_op, store)
            memory = MemoryState(
                static_bytes=self.static_bytes,
                activation_bytes=stage_run.activation_bytes,
                logits_bytes=self._logits_bytes(rank_program.micro_batches[op.micro_batch].edges),
                kv_bytes=store.kv_bytes,
                kv_gradient_bytes=store.kv_gradient_bytes,
            )
            store.end(op)
            stage_run.release(op)
            self._log_op(phase, rank_program, op, start_s, memory)
            pipe.send(op, result)
        pipe.flush()
        store.finish()
        return stage_run.loss

    def _prepare(self, rank_program: RankProgram, op: Op, store: BlockStore) -> None:
        """Lay out the attention of an op that comes next."""
        prepare_attention(
            rank_program.micro_batches[op.micro_batch].packed,
            implementation=self.implementation,
            dtype=self._dtype,
            head_dim=self.spec.kv_channels,
            device=self._device,
            store=store,
        )

    def look_ahead(self, rank_program: RankProgram, phase_inputs: PhaseInputs) -> PhaseInputs:
        """What the loss of an update must know of its whole mini-batch before the first backward.

        Runs the forwards without gradients if the loss has sequence ratios or balances experts;
        they are not logged, but take their time before the first op.
        """
        balances = self.spec.num_moe_experts > 0 and self.router.needs_fraction
        if not (self.loss.needs_sequence_ratio or balances):
            return phase_inputs
        log, self.log = self.log, EventLog()
        logprobs = np.full(len(phase_inputs.old_logprob), np.nan)
        self.run(forward_only(rank_program), "update", logprobs)
        self.log = log
        if balances:
            assert self.router_run is not None
            phase_inputs = replace(
                phase_inputs, expert_fraction=self.router_run.fractions().to(self._device)
            )
        if self.loss.needs_sequence_ratio:
            numbers = rank_program.numbers
            logprobs[numbers] = sequence_log_ratios(
                rank_program.number_sample, logprobs[numbers], phase_inputs.old_logprob[numbers]
            )
            phase_inputs = replace(phase_inputs, sequence_log_ratio=logprobs)
        return phase_inputs

    def _new_router_run(
        self, rank_program: RankProgram, phase_inputs: PhaseInputs | None
    ) -> RouterRun | None:
        if not self.spec.num_moe_experts:
            return None
        # Losses belong to updates; without phase inputs nothing is trained.
        return RouterRun(
            self.spec.num_layers,
            self.spec.num_moe_experts,
            rank_program.logical_tokens,
            self.router,
            None if phase_inputs is None else phase_inputs.expert_fraction,
        )

    def _store(self, rank_program: RankProgram) -> BlockStore:
        layers = self.model.decoder.layers
        return self.store_class(
            rank_program.program,
            rank_program.buffer_rows,
            len(layers),
            self.spec.num_query_groups // parallel_state.get_tensor_model_parallel_world_size(),
            self.spec.kv_channels,
            self._dtype,
            self._device,
            first_layer=layers[0].layer_number - 1,
        )

    def _message_shape(self, rank_program: RankProgram, micro_batch: int) -> tuple[int, int]:
        num_rows = rank_program.micro_batches[micro_batch].num_rows
        return stage_rows(self.model, num_rows), self.spec.hidden_size

    def finish_update(self, rank_program: RankProgram, phase: str) -> float:
        """Reduce the gradients over the ranks that share weights; returns the full norm."""
        assert self.gradients is not None, "only an engine with gradients can update"
        start_s = self._now_s()
        self.gradients.reduce()
        self._log_static(phase, rank_program, GRADIENT_REDUCTION, start_s)
        return self.gradients.norm()

    def step(self, rank_program: RankProgram, phase: str, gradient_norm: float) -> None:
        """One optimizer step with the reduced gradients, which are zero afterwards."""
        assert self.gradients is not None
        assert self.optimizer is not None
        start_s = self._now_s()
        self.optimizer.step(gradient_norm)
        self.gradients.zero()
        self._log_static(phase, rank_program, OPTIMIZER_STEP, start_s)

    def _logits_bytes(self, edges: EdgeInputs | None) -> int:
        """Logits of the largest chunk and their gradient; they are never kept after an op."""
        if edges is None:
            return 0
        rows = min(len(edges.rows), HEAD_CHUNK_TOKENS)
        width = self.spec.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        return 2 * rows * width * torch.promote_types(self._dtype, torch.float32).itemsize

    def _log_op(
        self, phase: str, rank_program: RankProgram, op: Op, start_s: float, memory: MemoryState
    ) -> None:
        packed = rank_program.micro_batches[op.micro_batch].packed
        num_tokens = 0 if op.kind == "backward" else packed.total_tokens
        self._log(phase, rank_program, op.kind, op.micro_batch, num_tokens, start_s, memory)

    def _log_static(self, phase: str, rank_program: RankProgram, kind: str, start_s: float) -> None:
        memory = MemoryState(self.static_bytes, 0, 0, 0, 0)
        self._log(phase, rank_program, kind, -1, 0, start_s, memory)

    def _log(
        self,
        phase: str,
        rank_program: RankProgram,
        kind: str,
        micro_batch: int,
        num_tokens: int,
        start_s: float,
        memory: MemoryState,
    ) -> None:
        self.log.add(
            phase,
            rank_program.index,
            self.rank,
            self.pipeline.stage,
            kind,
            micro_batch,
            num_tokens,
            start_s,
            self._now_s(),
            memory,
        )
