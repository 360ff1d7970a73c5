"""Time of one transformer layer and of the LM head as a function of coefficients.

One formula serves prediction (numbers) and fitting (arrays, one value per measured row). Form and
fixed values follow the measured study of Megatron iterations on A100 in docs/cost-model.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from .calibration import Coefficients
from .cluster import Amount, DeviceSpec, ModelSpec, ParallelConfig
from .parameters import layer_parameters

_TILE = 128
_LOGIT_BYTES = 4

Term = Literal[
    "linear",
    "weights",
    "accumulation",
    "attention",
    "elementwise",
    "head",
    "tensor_parallel",
    "expert_exchange",
    "host",
    "message",
    "gradient_reduction",
    "optimizer_step",
]
"""What a prediction is made of; docs/cost-model.md says what each one is."""

Parts = dict[Term, Amount]
"""Seconds by term; what is missing costs nothing."""


class ForwardBackward(NamedTuple):
    """Seconds of the two directions; recomputation is not in the second."""

    forward_s: Amount
    backward_s: Amount


@dataclass(frozen=True)
class LayerShape:
    """One layer, and the LM head, on one tensor-parallel rank; fields may be arrays.

    Attributes:
        projections, mlp: (output width, input width) of every matrix product of the attention and
            of the MLP; the experts of a token count as one wide MLP.
        attention_width: width of the rank's query heads together; `num_heads` of them.
        vocab_size: of the rank's part of the LM head.
        parameters: weights of the layer on the device, all experts included.
        experts: None for a dense model.
    """

    hidden_size: Amount
    projections: tuple[tuple[Amount, Amount], ...]
    mlp: tuple[tuple[Amount, Amount], ...]
    attention_width: Amount
    num_heads: Amount
    vocab_size: Amount
    tensor_parallel_size: Amount
    dtype_bytes: int
    parameters: Amount = 0.0
    experts: "OwnExperts | None" = None

    @classmethod
    def of_model(cls, model: ModelSpec, parallel: ParallelConfig, dtype_bytes: int) -> "LayerShape":
        tp, hidden = parallel.tensor_model_parallel_size, model.hidden_size
        ffn, experts = model.ffn_hidden_size, None
        if model.num_moe_experts:
            ffn = model.moe_topk * model.moe_ffn_hidden_size
            experts = OwnExperts.of_model(model, parallel)
        return cls(
            hidden_size=hidden,
            projections=(
                ((model.attention_width + 2 * model.kv_width) / tp, hidden),
                (hidden, model.attention_width / tp),
            ),
            mlp=((2 * ffn / tp, hidden), (hidden, ffn / tp)),
            attention_width=model.attention_width / tp,
            num_heads=model.num_attention_heads / tp,
            vocab_size=model.vocab_size / tp,
            tensor_parallel_size=tp,
            dtype_bytes=dtype_bytes,
            parameters=layer_parameters(model, parallel).total,
            experts=experts,
        )


class OwnExperts(NamedTuple):
    """A device's experts of one layer.

    Attributes:
        weights: of all of them.
        chosen_share: probability that a token chooses a given expert, under uniform routing.
        gathered: tokens that reach the device's group of experts / tokens of its micro-batch.
    """

    weights: float
    chosen_share: float
    gathered: float

    @classmethod
    def of_model(cls, model: ModelSpec, parallel: ParallelConfig) -> "OwnExperts":
        tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        weights = layer_parameters(model, parallel).expert
        return cls(weights, model.moe_topk / model.num_moe_experts, ep / tp)

    def touched_weights(self, num_tokens: Amount) -> Amount:
        """Expected weights of those that some token chooses: 1 - (1 - k / E)^tokens of each."""
        missed = (1.0 - self.chosen_share) ** (self.gathered * num_tokens)
        return self.weights * (1.0 - missed)


class _Products(NamedTuple):
    """Products of [tokens, inputs] with weights, together: all that their times depend on."""

    weights: Amount
    inputs: Amount
    outputs: Amount
    num_products: int

    @classmethod
    def of(cls, widths: tuple[tuple[Amount, Amount], ...]) -> "_Products":
        return cls(
            weights=sum((out * into for out, into in widths), 0.0),
            inputs=sum((into for _, into in widths), 0.0),
            outputs=sum((out for out, _ in widths), 0.0),
            num_products=len(widths),
        )


@dataclass(frozen=True)
class LayerTime:
    """The form, for given coefficients, device and shape.

    Attributes:
        without: terms that cost nothing.
    """

    coefficients: Coefficients
    device: DeviceSpec
    shape: LayerShape
    without: frozenset[Term] = frozenset()

    def layer_s(
        self,
        num_tokens: Amount,
        pairs: Amount,
        all_reduce_s: Amount = 0.0,
        host_extra_s: Amount = 0.0,
        exchange_s: Amount = 0.0,
    ) -> ForwardBackward:
        """Both directions of one layer; see `device_parts` and `join`."""
        forward, backward = (
            self.join(
                self.device_parts(num_tokens, pairs, is_backward, all_reduce_s, exchange_s),
                self.host_s(num_tokens, is_backward, host_extra_s),
            )
            for is_backward in (False, True)
        )
        return ForwardBackward(forward, backward)

    def device_parts(
        self,
        num_tokens: Amount,
        pairs: Amount,
        is_backward: bool,
        all_reduce_s: Amount = 0.0,
        exchange_s: Amount = 0.0,
    ) -> Parts:
        """What the device does for one layer in one direction, one thing after the other.

        Args:
            pairs: (query, key) pairs that attention computes.
            all_reduce_s: time of one tensor-parallel all-reduce of the layer's output; there are
                two in each direction.
            exchange_s: time of the two all-to-alls of the experts in one direction.
        """
        c, shape = self.coefficients, self.shape
        factor = c.linear_backward_factor if is_backward else 1.0
        twice = 2.0 if is_backward else 1.0
        linear: Amount = 0.0
        weights: Amount = 0.0
        for products, read, written in self._weights_moved(num_tokens):
            compute_s = factor * self._products_s(products, num_tokens, is_backward)
            linear = linear + compute_s
            if c.weight_passes:
                moved_s = self._weights_s(read + written if is_backward else read)
                weights = weights + np.maximum(moved_s * np.sign(num_tokens) - compute_s, 0.0)
        attention = self.attention_s(num_tokens, pairs)
        parts: Parts = {
            "linear": linear,
            "weights": weights,
            "attention": attention * (c.attention_backward_factor if is_backward else 1.0),
            "elementwise": factor * twice * self._passes_s(num_tokens, pairs),
            "tensor_parallel": 2.0 * all_reduce_s,
            "expert_exchange": exchange_s,
        }
        for term in ("linear", "weights", "attention", "elementwise"):
            parts[term] = c.device_slowdown * parts[term]
        if is_backward:
            parts["accumulation"] = self.accumulation_s(shape.parameters) * np.sign(num_tokens)
        return self._kept(parts)

    def host_s(self, num_tokens: Amount, is_backward: bool, extra_s: Amount = 0.0) -> Amount:
        """What the host needs to launch one layer.

        Args:
            extra_s: added to the forward's time.
        """
        c = self.coefficients
        if "host" in self.without:
            return 0.0
        several = np.greater(self.shape.tensor_parallel_size, 1)
        forward_s = extra_s + c.host_layer_s + c.host_tensor_parallel_s * several
        factor = c.host_backward_factor if is_backward else 1.0
        time: Amount = factor * forward_s * np.sign(num_tokens)
        return time

    def join(self, parts: Mapping[Term, Amount], host_s: Amount) -> Amount:
        """The slower of device and host, smoothed by a norm."""
        device_s, q = sum(parts.values()), self.coefficients.join_exponent
        joined: Amount = device_s + host_s
        if q != 1.0:
            joined = (device_s**q + host_s**q) ** (1.0 / q)
        return joined

    def head_s(self, head_tokens: Amount) -> ForwardBackward:
        """Both directions of the head; see `head_parts`."""
        forward, backward = (
            sum(self.head_parts(head_tokens, is_backward).values()) for is_backward in (False, True)
        )
        return ForwardBackward(forward, backward)

    def head_parts(self, head_tokens: Amount, is_backward: bool) -> Parts:
        """Logits and loss; the backward computes the logits again, then two products."""
        c, products = self.coefficients, self._head
        moved = head_tokens * self.shape.vocab_size * _LOGIT_BYTES
        passes = c.head_passes * moved / self.device.memory_bandwidth_bytes_per_s
        weights_s = self._weights_s(products.weights) * np.sign(head_tokens)
        forward = passes + np.maximum(self._products_s(products, head_tokens, False), weights_s)
        if not is_backward:
            return self._kept({"head": c.device_slowdown * forward})
        computed = self._products_s(products, head_tokens, True)
        backward = np.maximum(computed, 2.0 * weights_s) + 2.0 * passes
        accumulation = self.accumulation_s(products.weights) * np.sign(head_tokens)
        head = c.device_slowdown * (forward + backward)
        return self._kept({"head": head, "accumulation": accumulation})

    def accumulation_s(self, parameters: Amount) -> Amount:
        """One micro-batch's weight gradients, read, added to main gradients in memory."""
        c, rate = self.coefficients, self.device.memory_bandwidth_bytes_per_s
        if "accumulation" in self.without:
            return 0.0
        return c.device_slowdown * c.accumulation_bytes_per_parameter * parameters / rate

    def _kept(self, parts: Parts) -> Parts:
        return {k: v for k, v in parts.items() if k not in self.without} if self.without else parts

    @cached_property
    def _groups(self) -> tuple[_Products, _Products]:
        return _Products.of(self.shape.projections), _Products.of(self.shape.mlp)

    @cached_property
    def _head(self) -> _Products:
        return _Products.of(((self.shape.vocab_size, self.shape.hidden_size),))

    def _weights_moved(self, num_tokens: Amount) -> tuple[tuple[_Products, Amount, Amount], ...]:
        """By group of products: weights that they read, and weight gradients that they write.

        Every expert gets a gradient, if of zeros: Megatron runs those without tokens too.
        """
        attention, mlp = self._groups
        read = written = mlp.weights
        if self.shape.experts is not None:
            read = self.shape.experts.touched_weights(num_tokens)
            written = self.shape.experts.weights
        return (attention, attention.weights, attention.weights), (mlp, read, written)

    def _weights_s(self, weights: Amount) -> Amount:
        c, rate = self.coefficients, self.device.memory_bandwidth_bytes_per_s
        return c.weight_passes * weights * self.shape.dtype_bytes / rate

    def _products_s(self, products: _Products, rows: Amount, is_backward: bool) -> Amount:
        """`product_s` of each product [rows, input] x [input, output], or of its backward's two."""
        c = self.coefficients
        tail_flops = 2.0 * _TILE**2 * c.gemm_tail_tiles
        if is_backward:
            flops = rows * (4.0 * products.weights + products.num_products * tail_flops)
            flops = flops + tail_flops * products.outputs * np.sign(rows)
        else:
            flops = 2.0 * rows * products.weights
            flops = flops + tail_flops * products.inputs * np.sign(rows)
        return flops / (self.device.peak_flops_per_s * c.gemm_efficiency)

    def product_s(self, rows: Amount, columns: Amount, depth: Amount) -> Amount:
        """Tiles of the output, and those that the last wave and the launch are worth."""
        c = self.coefficients
        tiles = rows * columns / _TILE**2 + c.gemm_tail_tiles * np.sign(rows)
        tile_flops = 2.0 * _TILE**2 * depth
        return tiles * tile_flops / (self.device.peak_flops_per_s * c.gemm_efficiency)

    def attention_s(self, num_tokens: Amount, pairs: Amount) -> Amount:
        """Efficiency grows with x = pairs / num_tokens visible keys as x / (x + half)."""
        c = self.coefficients
        flops = 4.0 * self.shape.attention_width * (pairs + c.attention_half_keys * num_tokens)
        return flops / (self.device.peak_flops_per_s * c.attention_efficiency)

    def _passes_s(self, num_tokens: Amount, pairs: Amount) -> Amount:
        c, shape = self.coefficients, self.shape
        passes = c.replicated_passes + c.sharded_passes / shape.tensor_parallel_size
        values = passes * num_tokens * shape.hidden_size + c.score_passes * pairs * shape.num_heads
        return values * shape.dtype_bytes / self.device.memory_bandwidth_bytes_per_s
