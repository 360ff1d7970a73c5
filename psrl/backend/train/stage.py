"""Forward, recompute and backward of micro-batches on one pipeline stage of one rank.

Between its forward and its backward a micro-batch keeps its activations, each layer's input
(Megatron's full recompute), or what it received from the previous stage (drop: the forward runs
without a graph, to fill the cache, and again at the recompute op).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psrl.backend.compat import GPTModel
from psrl.backend.model.model import hidden_states, rotary_angles
from psrl.backend.model.moe import RoutedTokens, RouterRun
from psrl.backend.model.tree_spec import TreeSeqParams
from psrl.backend.options import LossOptions
from psrl.core.cost.cluster import ModelSpec
from psrl.core.plan.schedule import Op
from psrl.core.samples.sample import FloatArray
from psrl.kernels.attention.tree_attention import Implementation

from .inputs import EdgeInputs, MicroBatchInputs, RankProgram
from .kv_store import BlockStore
from .loss import EdgeValues, edge_terms, loss_weights
from .predictions import edge_predictions
from .saved_bytes import SavedBytes


@dataclass(frozen=True)
class PhaseInputs:
    """What an update's loss reads: [number of loss tokens] each, NaN where unknown.

    Attributes:
        sequence_log_ratio: see `psrl.backend.train.loss.sequence_log_ratios`; None if not needed.
        expert_fraction: see `psrl.backend.model.moe.RouterRun`; None if not needed.
    """

    old_logprob: FloatArray
    reference_logprob: FloatArray
    sequence_log_ratio: FloatArray | None = None
    expert_fraction: Tensor | None = None


@dataclass
class _Held:
    """What a micro-batch keeps between its forward and its backward.

    Attributes:
        received: [T, hidden] states of the previous stage; None on the first one.
        root: scalar from which its backward starts; None while it is dropped.
        arriving: where `_Root` finds the gradient of what was sent to the next stage.
    """

    received: Tensor | None
    root: Tensor | None = None
    arriving: list[Tensor] | None = None
    nbytes: int = 0


class _Root(torch.autograd.Function):
    """A scalar in place of a stage's output, so that the output is freed once it is sent.

    Its backward continues with the gradient that has arrived by then.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, arriving: list[Tensor]) -> Tensor:
        ctx.arriving = arriving
        return hidden_TH.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.arriving.pop(), None


@dataclass
class StageRun:
    """One run of one program on one stage.

    Attributes:
        logprobs: [number of loss tokens] filled where this rank owns the edge, on the last stage.
        phase_inputs: needed by an update.
        router_run: None for a dense model.
        measure_activations: see `RankEngine`.
        loss: the rank's share so far.
    """

    model: GPTModel
    spec: ModelSpec
    rank_program: RankProgram
    store: BlockStore
    implementation: Implementation
    loss_options: LossOptions
    logprobs: FloatArray
    phase_inputs: PhaseInputs | None
    router_run: RouterRun | None = None
    measure_activations: bool = True
    loss: float = 0.0

    def __post_init__(self) -> None:
        table = self.rank_program.program.micro_batches
        pairs = zip(table.micro_batch.tolist(), table.activation.tolist(), strict=True)
        self._activation: dict[int, str] = dict(pairs)
        self._held: dict[int, _Held] = {}
        self._dtype = next(self.model.parameters()).dtype
        self._weight = np.zeros(len(self.logprobs))
        if self.rank_program.program.is_update:
            weights = loss_weights(self.rank_program.number_sample, self.loss_options)
            self._weight[self.rank_program.numbers] = weights

    @property
    def activation_bytes(self) -> int:
        """Bytes that micro-batches keep for their backwards."""
        return sum(held.nbytes for held in self._held.values())

    def run(self, op: Op, message_TH: Tensor | None) -> Tensor | None:
        """Run one op.

        Args:
            message_TH: hidden states (forward) or their gradient (backward) from a neighbour.

        Returns:
            [T, hidden] what the next (forward) or previous stage needs; None if there is none.
        """
        inputs = self.rank_program.micro_batches[op.micro_batch]
        if op.kind == "forward":
            return self._forward(op.micro_batch, inputs, message_TH)
        if op.kind == "recompute":
            self._hold(op.micro_batch, inputs, self._held[op.micro_batch].received, False)
            return None
        return self._backward(op.micro_batch, message_TH)

    def release(self, op: Op) -> None:
        """Forget what a micro-batch kept, after its backward."""
        if op.kind == "backward":
            self._held.pop(op.micro_batch)

    def _forward(
        self, micro_batch: int, inputs: MicroBatchInputs, received_TH: Tensor | None
    ) -> Tensor | None:
        is_update = self.rank_program.program.is_update
        activation = self._activation[micro_batch]
        if is_update and activation != "drop":
            return self._hold(micro_batch, inputs, received_TH, activation == "recompute")
        with torch.no_grad():
            hidden_TH = self._hidden(inputs, received_TH)
            if not is_update and inputs.edges is not None:
                self._predictions(inputs.edges, hidden_TH)
        if is_update:
            nbytes = 0 if received_TH is None else received_TH.nbytes
            self._held[micro_batch] = _Held(received_TH, nbytes=nbytes)
        return None if self.model.post_process else hidden_TH

    def _hold(
        self,
        micro_batch: int,
        inputs: MicroBatchInputs,
        received_TH: Tensor | None,
        layer_recompute: bool,
    ) -> Tensor | None:
        """Run the forward with a graph, and keep it."""
        if received_TH is not None:
            received_TH.requires_grad_()
        held = _Held(received_TH)
        with SavedBytes(
            [*self.model.parameters(), *inputs.tensors, self.store.buffer],
            self.measure_activations,
        ) as saved:
            hidden_TH = self._hidden(inputs, received_TH, layer_recompute)
            if self.model.post_process:
                held.root = self._loss(inputs.edges, hidden_TH)
            else:
                held.arriving = []
                held.root = _Root.apply(hidden_TH, held.arriving)
        held.nbytes = saved.total_bytes
        self._held[micro_batch] = held
        return None if self.model.post_process else hidden_TH

    def _backward(self, micro_batch: int, gradient_TH: Tensor | None) -> Tensor | None:
        held = self._held[micro_batch]
        assert held.root is not None, f"micro-batch {micro_batch} has no graph"
        if gradient_TH is not None:
            assert held.arriving is not None, f"micro-batch {micro_batch} expects no gradient"
            held.arriving.append(gradient_TH)
        held.root.backward()
        return None if held.received is None else held.received.grad

    def _hidden(
        self,
        inputs: MicroBatchInputs,
        received_TH: Tensor | None,
        layer_recompute: bool = False,
    ) -> Tensor:
        routed = None
        if self.router_run is not None:
            routed = RoutedTokens(inputs.packed.index, inputs.multiplicity, self.router_run)
        params = TreeSeqParams(
            packed=inputs.packed,
            store=self.store,
            implementation=self.implementation,
            routed=routed,
        )
        rotary = rotary_angles(inputs.position_ids, self.spec, self._dtype)
        return hidden_states(
            self.model,
            inputs.token_ids,
            rotary,
            params,
            layer_recompute,
            received_TH,
            inputs.num_rows,
        )

    def _predictions(self, edges: EdgeInputs, hidden_TH: Tensor) -> tuple[Tensor, Tensor | None]:
        logprob_E, entropy_E = edge_predictions(self.model, hidden_TH, edges, self.loss_options)
        self.logprobs[edges.number] = logprob_E.detach().double().cpu().numpy()
        return logprob_E, entropy_E

    def _loss(self, edges: EdgeInputs | None, hidden_TH: Tensor) -> Tensor:
        """The micro-batch's share of the mini-batch's loss."""
        if edges is None:
            # Its backward must still run: readers left gradients for its cached rows.
            return (hidden_TH * 0.0).sum()
        logprob_E, entropy_E = self._predictions(edges, hidden_TH)
        values = self._edge_values(edges, logprob_E)
        terms_E = edge_terms(logprob_E, entropy_E, values, self.loss_options)
        loss = (values.weight * terms_E).sum()
        self.loss += float(loss.detach())
        return loss

    def _edge_values(self, edges: EdgeInputs, logprob_E: Tensor) -> EdgeValues:
        assert self.phase_inputs is not None, "an update needs PhaseInputs"

        def on_device(numbers: FloatArray | None) -> Tensor:
            if numbers is None:
                return torch.full_like(logprob_E, torch.nan)
            return torch.from_numpy(numbers[edges.number]).to(logprob_E)

        return EdgeValues(
            weight=on_device(self._weight),
            advantage=edges.advantage.to(logprob_E),
            old_logprob=on_device(self.phase_inputs.old_logprob),
            reference_logprob=on_device(self.phase_inputs.reference_logprob),
            sequence_log_ratio=on_device(self.phase_inputs.sequence_log_ratio),
        )
