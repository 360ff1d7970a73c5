"""Predicted time of micro-batches: a roofline over FLOPs, bytes and launches.

Form and constants follow the measured study of Megatron iterations that psRL's design cites:
time of a layer is the slower of host and device (joined by an 8-norm), or their sum where the host
itself computes; device time is projections + attention by visible pairs + memory-bound passes +
collectives of tensor and expert parallelism.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from .cluster import Amount, ClusterSpec, ModelSpec, ParallelConfig, pipeline_link
from .collectives import expert_exchange_s, gradient_reduction_s
from .memory_model import GRADIENT_BYTES_PER_PARAMETER, OPTIMIZER_BYTES_PER_PARAMETER
from .parameters import optimizer_shard, rank_parameters

# Memory-bound passes over [tokens, hidden] per layer and direction: two norms, two residual
# adds, rotary embedding and SwiGLU, each a read and a write of the working precision.
_ELEMENTWISE_PASSES = 14
# FlashAttention's backward does five matrix products where its forward does two.
_ATTENTION_BACKWARD_FACTOR = 2.5


class CostModel(Protocol):
    """What planner and simulator need to know about time; all arguments may be arrays."""

    def forward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        """Time of one micro-batch's forward on the slowest pipeline stage."""

    def backward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        """Time of one micro-batch's backward on the slowest pipeline stage."""

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
    """Data-sheet peaks times efficiencies; no measurement behind it, so no stated error."""

    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig

    @cached_property
    def layers_per_stage(self) -> int:
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size

    @cached_property
    def linear_s_per_token(self) -> float:
        """Projections and MLP of one layer's forward, on one tensor-parallel rank."""
        device = self.cluster.device
        flops = 2 * self.model.active_layer_parameters / self.parallel.tensor_model_parallel_size
        return flops / (device.peak_flops_per_s * device.gemm_efficiency)

    @cached_property
    def attention_s_per_pair(self) -> float:
        """Scores and weighted values of one visible (query, key) pair in one layer."""
        device = self.cluster.device
        flops = 4 * self.model.attention_width / self.parallel.tensor_model_parallel_size
        return flops / (device.peak_flops_per_s * device.attention_efficiency)

    @cached_property
    def elementwise_s_per_token(self) -> float:
        device = self.cluster.device
        moved = 2 * _ELEMENTWISE_PASSES * self.model.hidden_size * device.dtype_bytes
        return moved / (device.memory_bandwidth_bytes_per_s * device.bandwidth_efficiency)

    @cached_property
    def head_s_per_token(self) -> float:
        """Logits of one predicted position (forward), on one tensor-parallel rank."""
        device = self.cluster.device
        width = self.model.vocab_size / self.parallel.tensor_model_parallel_size
        matmul = 2 * self.model.hidden_size * width / device.peak_flops_per_s
        passes = 4 * width * 4 / device.memory_bandwidth_bytes_per_s
        return matmul / device.gemm_efficiency + passes / device.bandwidth_efficiency

    def _tensor_parallel_s(self, num_tokens: Amount) -> Amount:
        """Two ring all-reduces of [tokens, hidden] per layer and direction, inside a host."""
        size = self.parallel.tensor_model_parallel_size
        if size == 1:
            return 0.0 * num_tokens
        nbytes = num_tokens * self.model.hidden_size * self.cluster.device.dtype_bytes
        ring = 2 * (size - 1) / size * nbytes / self.cluster.intra_host_bytes_per_s
        return 2 * (ring + self.cluster.intra_host_latency_s * np.sign(num_tokens))

    @cached_property
    def _exchange_line(self) -> tuple[float, float]:
        """Seconds per token and per micro-batch of `expert_exchange_s`, which is a line."""
        one, two = (
            float(expert_exchange_s(self.model, self.cluster, self.parallel, n)) for n in (1.0, 2.0)
        )
        return two - one, 2.0 * one - two

    def _exchange_s(self, num_tokens: Amount) -> Amount:
        per_token_s, latency_s = self._exchange_line
        return num_tokens * per_token_s + latency_s * np.sign(num_tokens)

    def _layer_s(
        self, num_tokens: Amount, pairs: Amount, linear: float, attention: float
    ) -> Amount:
        device_s = (
            linear * num_tokens * (self.linear_s_per_token + self.elementwise_s_per_token)
            + attention * pairs * self.attention_s_per_pair
            + linear * self._tensor_parallel_s(num_tokens)
        )
        if self.parallel.expert_model_parallel_size > 1:
            device_s = device_s + self._exchange_s(num_tokens)
        host_s = linear * self.cluster.device.host_layer_s * np.sign(num_tokens)
        q = self.cluster.device.join_exponent
        joined: Amount = (device_s**q + host_s**q) ** (1 / q)
        return joined

    def _head_s(self, stage: int, head_tokens: Amount) -> Amount:
        is_last = stage == self.parallel.pipeline_model_parallel_size - 1
        return head_tokens * self.head_s_per_token * float(is_last)

    def stage_forward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        layers = self.layers_per_stage * self._layer_s(num_tokens, pairs, 1.0, 1.0)
        return layers + self._head_s(stage, head_tokens)

    def stage_backward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        """The backward proper; recomputation of a layer or a dropped micro-batch is not in it."""
        layers = self.layers_per_stage * self._layer_s(
            num_tokens, pairs, 2.0, _ATTENTION_BACKWARD_FACTOR
        )
        # The head is computed in chunks that are recomputed: forward again, then two products.
        return layers + 3.0 * self._head_s(stage, head_tokens)

    def forward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_forward_s(self._last_stage, num_tokens, pairs, head_tokens)

    def backward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_backward_s(self._last_stage, num_tokens, pairs, head_tokens)

    @property
    def _last_stage(self) -> int:
        """The slowest stage: it has as many layers as the others, and the head."""
        return self.parallel.pipeline_model_parallel_size - 1

    def message_s(self, num_tokens: Amount) -> Amount:
        link = pipeline_link(self.cluster, self.parallel)
        nbytes = num_tokens * self.model.hidden_size * self.cluster.device.dtype_bytes
        return nbytes / link.bytes_per_s + link.latency_s * np.sign(num_tokens)

    @cached_property
    def rank_parameters(self) -> float:
        """Parameters on one device of the largest (last) stage."""
        return rank_parameters(self.model, self.parallel).total

    def gradient_reduction_s(self) -> float:
        """Reduce-scatter of fp32 gradients and all-gather of the updated weights."""
        per_parameter = GRADIENT_BYTES_PER_PARAMETER + self.cluster.device.dtype_bytes
        return gradient_reduction_s(self.model, self.cluster, self.parallel, per_parameter)

    def optimizer_step_s(self) -> float:
        device = self.cluster.device
        moved = 2 * OPTIMIZER_BYTES_PER_PARAMETER * optimizer_shard(self.model, self.parallel)
        rate = device.memory_bandwidth_bytes_per_s * device.bandwidth_efficiency
        return float(moved / rate + device.host_layer_s)
