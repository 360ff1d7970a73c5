"""Runs one rank's programs op by op: forward, backward, recompute, reduction, optimizer step.

Micro-batches held between forward and backward keep their activations, each layer's input
(Megatron's full recompute), or nothing but their token ids (drop: the forward runs without a
graph, to fill the cache, and again at the recompute op). The pipeline has one stage so far, so
the plan's op list is the rank's.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psrl.core.cluster import ModelSpec
from psrl.core.events import GRADIENT_REDUCTION, OPTIMIZER_STEP, EventLog
from psrl.core.memory import HEAD_CHUNK_TOKENS, MemoryState
from psrl.core.sample import FloatArray
from psrl.core.schedule import Op
from psrl.kernels.tree_attention import Implementation

from .compat import GPTModel, parallel_state
from .inputs import EdgeInputs, MicroBatchInputs, RankProgram
from .kv_store import BlockStore
from .loss import EdgeValues, LossOptions, edge_logprobs, edge_terms
from .model import hidden_states, rotary_angles
from .optimizer import MainAdamW, MainGradients
from .saved_bytes import SavedBytes
from .tree_spec import TreeSeqParams


@dataclass(frozen=True)
class PhaseInputs:
    """[number of loss tokens] logprobs that an update's loss reads; NaN where unknown."""

    old_logprob: FloatArray
    reference_logprob: FloatArray


@dataclass
class _Held:
    """What a micro-batch keeps between its forward and its backward."""

    loss: Tensor | None = None
    saved_bytes: int = 0


@dataclass
class _Running:
    """State of one run of one program."""

    rank_program: RankProgram
    store: BlockStore
    logprobs: FloatArray
    phase_inputs: PhaseInputs | None
    loss: float = 0.0
    logits_bytes: int = 0
    held: dict[int, _Held] = field(default_factory=dict)


@dataclass
class RankEngine:
    """One model on one rank, and how its programs run.

    Attributes:
        rank: data-parallel rank, as in the plan.
        log: gets one row per op; times are relative to `start_clock`.
        gradients: None for a model that only runs forward.
        measure_activations: count the bytes that autograd keeps; what a layer recomputes inside
            a backward is not counted.
    """

    model: GPTModel
    spec: ModelSpec
    rank: int
    log: EventLog
    implementation: Implementation
    loss: LossOptions
    gradients: MainGradients | None = None
    optimizer: MainAdamW | None = None
    measure_activations: bool = True
    store_class: type[BlockStore] = BlockStore
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
        """Run all ops of a program; returns the rank's share of the loss (0 if forward only).

        Args:
            logprobs: [number of loss tokens] filled where this rank owns the edge.
            phase_inputs: needed by an update.

        Gradients of an update are added to `gradients`, not yet reduced.
        """
        size = parallel_state.get_tensor_model_parallel_world_size()
        store = self.store_class(
            rank_program.program,
            rank_program.buffer_rows,
            self.spec.num_layers,
            self.spec.num_query_groups // size,
            self.spec.kv_channels,
            self._dtype,
            self._device,
        )
        running = _Running(rank_program, store, logprobs, phase_inputs)
        for op in rank_program.ops:
            start_s = self._now_s()
            store.begin(op)
            inputs = rank_program.micro_batches[op.micro_batch]
            running.logits_bytes = self._logits_bytes(inputs.edges)
            self._run_op(running, op, inputs)
            memory = self._memory(running)
            store.end(op)
            if op.kind == "backward":
                running.held.pop(op.micro_batch)
            tokens = 0 if op.kind == "backward" else inputs.packed.total_tokens
            self._log(phase, running, op.kind, op.micro_batch, tokens, start_s, memory)
        store.finish()
        return running.loss

    def _run_op(self, running: _Running, op: Op, inputs: MicroBatchInputs) -> None:
        program = running.rank_program.program
        if op.kind == "backward":
            held = running.held[op.micro_batch]
            assert held.loss is not None, f"micro-batch {op.micro_batch} has no graph"
            held.loss.backward()
            return
        params = TreeSeqParams(
            packed=inputs.packed, store=running.store, implementation=self.implementation
        )
        if not program.is_update:
            with torch.no_grad():
                hidden = self._hidden(inputs, params)
                self._record_logprobs(running, inputs.edges, hidden)
            return
        at = int(np.flatnonzero(program.micro_batches.micro_batch == op.micro_batch)[0])
        activation = str(program.micro_batches.activation[at])
        if activation == "drop" and op.kind == "forward":
            with torch.no_grad():
                self._hidden(inputs, params)
            running.held[op.micro_batch] = _Held()
            return
        with SavedBytes(
            [*self.model.parameters()], [running.store.buffer_storage], self.measure_activations
        ) as saved:
            hidden = self._hidden(inputs, params, layer_recompute=activation == "recompute")
            loss = self._loss(running, inputs.edges, hidden)
        running.held[op.micro_batch] = _Held(loss, saved.total_bytes)

    def _hidden(
        self, inputs: MicroBatchInputs, params: TreeSeqParams, layer_recompute: bool = False
    ) -> Tensor:
        rotary = rotary_angles(inputs.position_ids, self.spec, self._dtype)
        return hidden_states(self.model, inputs.token_ids, rotary, params, layer_recompute)

    def _record_logprobs(
        self, running: _Running, edges: EdgeInputs | None, hidden: Tensor
    ) -> Tensor | None:
        if edges is None:
            return None
        logprob_E = edge_logprobs(self.model, hidden, edges, self.loss.temperature)
        running.logprobs[edges.number] = logprob_E.detach().double().cpu().numpy()
        return logprob_E

    def _loss(self, running: _Running, edges: EdgeInputs | None, hidden: Tensor) -> Tensor:
        """The micro-batch's share of the mini-batch's token-mean loss."""
        logprob_E = self._record_logprobs(running, edges, hidden)
        if edges is None or logprob_E is None:
            # Its backward must still run: readers left gradients for its cached rows.
            return (hidden * 0.0).sum()
        terms = edge_terms(logprob_E, self._edge_values(running, edges, logprob_E), self.loss)
        loss = terms.sum() / len(running.rank_program.numbers)
        running.loss += float(loss.detach())
        return loss

    def _edge_values(self, running: _Running, edges: EdgeInputs, logprob_E: Tensor) -> EdgeValues:
        assert running.phase_inputs is not None, "an update needs PhaseInputs"

        def on_device(numbers: Any) -> Tensor:
            return torch.from_numpy(numbers[edges.number]).to(logprob_E)

        return EdgeValues(
            advantage=edges.advantage.to(logprob_E),
            old_logprob=on_device(running.phase_inputs.old_logprob),
            reference_logprob=on_device(running.phase_inputs.reference_logprob),
        )

    def finish_update(self, rank_program: RankProgram, phase: str) -> float:
        """Reduce the gradients over data-parallel ranks; returns the norm of the full gradient."""
        assert self.gradients is not None, "only an engine with gradients can update"
        start_s = self._now_s()
        tensor_parallel = parallel_state.get_tensor_model_parallel_group()
        self.gradients.reduce(parallel_state.get_data_parallel_group(), tensor_parallel)
        self._log_static(phase, rank_program, GRADIENT_REDUCTION, start_s)
        return self.gradients.norm(tensor_parallel)

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

    def _memory(self, running: _Running) -> MemoryState:
        return MemoryState(
            static_bytes=self.static_bytes,
            activation_bytes=sum(h.saved_bytes for h in running.held.values()),
            logits_bytes=running.logits_bytes,
            kv_bytes=running.store.kv_bytes,
            kv_gradient_bytes=running.store.kv_gradient_bytes,
        )

    def _log(
        self,
        phase: str,
        running: _Running,
        kind: str,
        micro_batch: int,
        num_tokens: int,
        start_s: float,
        memory: MemoryState,
    ) -> None:
        index = running.rank_program.index
        self.log.add(
            phase,
            index,
            self.rank,
            0,
            kind,
            micro_batch,
            num_tokens,
            start_s,
            self._now_s(),
            memory,
        )

    def _log_static(self, phase: str, rank_program: RankProgram, kind: str, start_s: float) -> None:
        memory = MemoryState(self.static_bytes, 0, 0, 0, 0)
        self.log.add(
            phase, rank_program.index, self.rank, 0, kind, -1, 0, start_s, self._now_s(), memory
        )
