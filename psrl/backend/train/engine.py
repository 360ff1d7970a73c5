"""Runs one rank's programs op by op on its pipeline stage: messages, events, reduction, step."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch

from psrl.backend.compat import GPTModel, parallel_state
from psrl.backend.model.model import stage_rows
from psrl.backend.model.moe import RouterRun
from psrl.backend.options import LossOptions, RouterOptions
from psrl.core.cost.cluster import ModelSpec
from psrl.core.plan.bytes_over_ops import HEAD_CHUNK_TOKENS
from psrl.core.plan.clock import SEND_WINDOW
from psrl.core.plan.schedule import Op
from psrl.core.run.events import GRADIENT_REDUCTION, OPTIMIZER_STEP
from psrl.core.samples.sample import FloatArray
from psrl.kernels.attention.tree_attention import Implementation, prepare_attention

from .inputs import EdgeInputs, RankProgram
from .kv_store import BlockStore
from .look_ahead import forward_only
from .loss import sequence_log_ratios
from .optimizer import MainAdamW, MainGradients
from .phase_log import PhaseLog
from .pipe import SINGLE_STAGE, Pipe, Pipeline
from .stage import PhaseInputs, StageRun


class ProgramRun(NamedTuple):
    """What a run of a program gives on this rank.

    Attributes:
        loss: the rank's share; 0 if the program runs forward only, and on all stages but the last.
        logprobs: [number of loss tokens] where this rank owns the edge, NaN elsewhere.
        routers: what the routers reported; None for a dense model.
        peak_kv_bytes: most cached keys and values with their gradients.
    """

    loss: float
    logprobs: FloatArray
    routers: RouterRun | None
    peak_kv_bytes: int


@dataclass(frozen=True)
class RankEngine:
    """One stage of the model on one rank, and how its programs run.

    Attributes:
        pipeline: the stages, see `psrl.backend.launch.model_parallel`.
        measure_activations: count the bytes that autograd keeps; what a layer recomputes inside
            a backward is not counted.
        send_window: see `psrl.backend.train.pipe.Pipe`.
        stage_run: makes the run of a program; a subclass may take its loss from elsewhere.
    """

    model: GPTModel
    spec: ModelSpec
    implementation: Implementation
    loss: LossOptions
    router: RouterOptions = field(default_factory=RouterOptions)
    pipeline: Pipeline = SINGLE_STAGE
    measure_activations: bool = True
    send_window: int = SEND_WINDOW
    store_class: type[BlockStore] = BlockStore
    stage_run: Callable[..., StageRun] = StageRun

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def run(
        self,
        rank_program: RankProgram,
        log: PhaseLog | None = None,
        phase_inputs: PhaseInputs | None = None,
    ) -> ProgramRun:
        """Run all ops of a program.

        The gradients of an update are left to the hooks of the model's `MainGradients`, not yet
        reduced.

        Args:
            log: gets one row per op, which starts when its message has arrived.
            phase_inputs: needed by an update.
        """
        routers = self._router_run(rank_program, phase_inputs)
        store = self._store(rank_program)
        stage_run = self.stage_run(
            self.model,
            self.spec,
            rank_program,
            store,
            self.implementation,
            self.loss,
            np.full(rank_program.num_loss_tokens, np.nan),
            phase_inputs,
            routers,
            self.measure_activations and log is not None,
        )
        pipe = Pipe(
            self.pipeline,
            rank_program.ops,
            lambda m: self._message_shape(rank_program, m),
            self._dtype,
            self._device,
            send_window=self.send_window,
        )
        peak_kv_bytes = 0
        for op, next_op in zip_longest(rank_program.ops, rank_program.ops[1:]):
            received = pipe.receive(op)
            start_s = 0.0 if log is None else log.now_s()
            store.begin(op)
            result = stage_run.run(op, received)
            if next_op is not None:
                # The host has time for it while a device computes this op.
                self._prepare(rank_program, next_op, store)
            peak_kv_bytes = max(peak_kv_bytes, store.kv_bytes + store.kv_gradient_bytes)
            if log is not None:
                self._log_op(log, rank_program, op, start_s, stage_run)
            store.end(op)
            stage_run.release(op)
            pipe.send(op, result)
        pipe.flush()
        store.finish()
        return ProgramRun(stage_run.loss, stage_run.logprobs, routers, peak_kv_bytes)

    def _log_op(
        self, log: PhaseLog, rank_program: RankProgram, op: Op, start_s: float, stage_run: StageRun
    ) -> None:
        inputs = rank_program.micro_batches[op.micro_batch]
        log.add(
            rank_program.index,
            op.kind,
            start_s,
            op.micro_batch,
            0 if op.kind == "backward" else inputs.packed.total_tokens,
            stage_run.activation_bytes,
            self._logits_bytes(inputs.edges),
            stage_run.store.kv_bytes,
            stage_run.store.kv_gradient_bytes,
        )

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
        found = self.run(forward_only(rank_program))
        if balances:
            assert found.routers is not None
            fraction = found.routers.fractions().to(self._device)
            phase_inputs = replace(phase_inputs, expert_fraction=fraction)
        if self.loss.needs_sequence_ratio:
            numbers, logprobs = rank_program.numbers, found.logprobs
            logprobs[numbers] = sequence_log_ratios(
                rank_program.number_sample, logprobs[numbers], phase_inputs.old_logprob[numbers]
            )
            phase_inputs = replace(phase_inputs, sequence_log_ratio=logprobs)
        return phase_inputs

    def _router_run(
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

    def _logits_bytes(self, edges: EdgeInputs | None) -> int:
        """Logits of the largest chunk and their gradient; they are never kept after an op."""
        if edges is None:
            return 0
        rows = min(len(edges.rows), HEAD_CHUNK_TOKENS)
        width = self.spec.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        return 2 * rows * width * torch.promote_types(self._dtype, torch.float32).itemsize


def reduce_gradients(gradients: MainGradients, log: PhaseLog, program: int) -> float:
    """Reduce over the ranks that share weights; returns the norm of the full gradient."""
    start_s = log.now_s()
    gradients.reduce()
    log.add(program, GRADIENT_REDUCTION, start_s)
    return gradients.norm()


def optimizer_step(optimizer: MainAdamW, log: PhaseLog, program: int, norm: float) -> None:
    """One step with the reduced gradients of that norm, which are zero afterwards."""
    start_s = log.now_s()
    optimizer.step(norm)
    log.add(program, OPTIMIZER_STEP, start_s)
