"""Predicted time of micro-batches, by one form: data-sheet coefficients here, measured ones in
`calibrated_cost_model`.

Form and constants follow the measured study of Megatron iterations that psRL's design cites:
time of a layer is the slower of host and device (joined by an 8-norm), or their sum where the host
itself computes; device time is projections + attention by visible pairs + memory-bound passes +
collectives of tensor and expert parallelism + main gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from .calibration import Coefficients, Curve
from .cluster import Amount, ClusterSpec, ModelSpec, ParallelConfig
from .collectives import (
    expert_exchange_line,
    gradient_reduction_s,
    message_s,
    tensor_parallel_s,
)
from .layer_time import LayerShape, LayerTime, Parts, Term
from .parameters import embedding_parameters, optimizer_shard, rank_parameters


class CostModel(Protocol):
    """What planner and simulator need to know about time; all arguments may be arrays."""

    def forward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        """Time of one micro-batch's forward on the last pipeline stage."""

    def backward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        """Time of one micro-batch's backward on the last pipeline stage."""

    def stage_forward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        """Time of one micro-batch's forward on one stage."""

    def stage_backward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        """Time of one micro-batch's backward on one stage."""

    def message_s(self, num_tokens: Amount) -> Amount:
        """Time to send one micro-batch's hidden states to a neighbouring stage."""

    def gradient_reduction_s(self) -> float:
        """Time to reduce the gradients over the data-parallel ranks."""

    def optimizer_step_s(self) -> float:
        """Time of one optimizer step."""


@dataclass(frozen=True)
class RooflineCostModel:
    """Data-sheet peaks times efficiencies; no measurement behind it, so no stated error.

    Attributes:
        without: terms that cost nothing, to see what they decide.
    """

    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig
    without: frozenset[Term] = field(default=frozenset(), kw_only=True)

    @cached_property
    def coefficients(self) -> Coefficients:
        return Coefficients.of_device(self.cluster.device)

    @cached_property
    def layer_time(self) -> LayerTime:
        device = self.cluster.device
        shape = LayerShape.of_model(self.model, self.parallel, device.dtype_bytes)
        return LayerTime(self.coefficients, device, shape, self.without)

    @cached_property
    def layers_per_stage(self) -> int:
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size

    @property
    def _last_stage(self) -> int:
        """As many layers as the others, and the head: the slowest one where rows are predicted."""
        return self.parallel.pipeline_model_parallel_size - 1

    @property
    def _curves(self) -> Mapping[str, Curve]:
        """Measured all-reduces by number of ranks."""
        return {}

    @cached_property
    def _exchange_line(self) -> tuple[float, float]:
        return expert_exchange_line(self.model, self.cluster, self.parallel)

    def _layer(self, num_tokens: Amount, pairs: Amount, is_backward: bool) -> tuple[Parts, Amount]:
        """What the device does for one layer, and the host's time for it."""
        row_bytes = self.model.hidden_size * self.cluster.device.dtype_bytes
        all_reduce_s = tensor_parallel_s(
            self.cluster,
            self.parallel.tensor_model_parallel_size,
            num_tokens * row_bytes,
            self.coefficients,
            self._curves,
        )
        exchange_s: Amount = 0.0
        if self.parallel.expert_model_parallel_size > 1:
            per_token_s, latency_s = self._exchange_line
            exchange_s = num_tokens * per_token_s + latency_s * np.sign(num_tokens)
        time = self.layer_time
        parts = time.device_parts(num_tokens, pairs, is_backward, all_reduce_s, exchange_s)
        return parts, time.host_s(num_tokens, is_backward)

    def layers_s(self, num_tokens: Amount, pairs: Amount, is_backward: bool = False) -> Amount:
        """The layers of one stage alone; forward, as layer recompute runs them in a backward."""
        return self.layers_per_stage * self.layer_time.join(
            *self._layer(num_tokens, pairs, is_backward)
        )

    def _beside_layers(
        self, stage: int, num_tokens: Amount, head_tokens: Amount, is_backward: bool
    ) -> Parts:
        """Head, gradient of the embedding, and the host's time for an op."""
        parts: Parts = {}
        if stage == self._last_stage:
            parts = self.layer_time.head_parts(head_tokens, is_backward)
        # A single stage with tied embeddings adds one gradient of both uses.
        is_counted = self.model.tied_embeddings and self._last_stage == 0
        if is_backward and stage == 0:
            own = embedding_parameters(self.model, self.parallel)
            gradient_s = self.layer_time.accumulation_s(own) * np.sign(num_tokens)
            known_s = parts.get("accumulation", 0.0)
            both = np.maximum(known_s, gradient_s) if is_counted else known_s + gradient_s
            parts["accumulation"] = both
        if self.coefficients.host_op_s and "host" not in self.without:
            parts["host"] = self.coefficients.host_op_s * np.sign(num_tokens)
        return parts

    def _op_s(
        self,
        stage: int,
        num_tokens: Amount,
        pairs: Amount,
        head_tokens: Amount,
        is_backward: bool,
    ) -> Amount:
        beside = self._beside_layers(stage, num_tokens, head_tokens, is_backward)
        time: Amount = self.layers_s(num_tokens, pairs, is_backward) + sum(beside.values())
        return time

    def op_parts(
        self,
        stage: int,
        num_tokens: Amount,
        pairs: Amount,
        head_tokens: Amount,
        is_backward: bool,
    ) -> Parts:
        """Seconds by term, which add up to `stage_forward_s` or `stage_backward_s`.

        The host counts with what it adds to the device's time; so does the reading of weights,
        with what it adds to the time of the products.
        """
        parts, host_s = self._layer(num_tokens, pairs, is_backward)
        joined_s = self.layer_time.join(parts, host_s)
        layer: Parts = {**parts, "host": joined_s - sum(parts.values())}
        beside = self._beside_layers(stage, num_tokens, head_tokens, is_backward)
        return {
            term: self.layers_per_stage * layer.get(term, 0.0) + beside.get(term, 0.0)
            for term in dict.fromkeys([*layer, *beside])
        }

    def stage_forward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        return self._op_s(stage, num_tokens, pairs, head_tokens, False)

    def stage_backward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        """The backward proper; recomputation of a layer or a dropped micro-batch is not in it."""
        return self._op_s(stage, num_tokens, pairs, head_tokens, True)

    def forward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_forward_s(self._last_stage, num_tokens, pairs, head_tokens)

    def backward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_backward_s(self._last_stage, num_tokens, pairs, head_tokens)

    def message_s(self, num_tokens: Amount) -> Amount:
        if "message" in self.without:
            return 0.0 * num_tokens
        efficiency = self.coefficients.message_efficiency
        return message_s(self.model, self.cluster, self.parallel, num_tokens, efficiency)

    @cached_property
    def rank_parameters(self) -> float:
        """Parameters on one device of the largest (last) stage."""
        return rank_parameters(self.model, self.parallel).total

    def gradient_reduction_s(self) -> float:
        """Reduce-scatter of main gradients and all-gather of the updated weights."""
        if "gradient_reduction" in self.without:
            return 0.0
        per_parameter = self.coefficients.gradient_bytes_per_parameter
        return gradient_reduction_s(self.model, self.cluster, self.parallel, per_parameter)

    def optimizer_step_s(self) -> float:
        if "optimizer_step" in self.without:
            return 0.0
        c, rate = self.coefficients, self.cluster.device.memory_bandwidth_bytes_per_s
        moved = c.optimizer_bytes_per_parameter * optimizer_shard(self.model, self.parallel)
        return float(moved / rate + c.step_s)
