"""Time of one transformer layer and of the LM head as a function of calibrated coefficients.

One formula serves prediction (numbers) and fitting (arrays, one value per measured row). Form and
fixed values follow the measured study of Megatron iterations on A100 in docs/cost-model.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .calibration import Coefficients
from .cluster import Amount, DeviceSpec, ModelSpec

_TILE = 128
_LOGIT_BYTES = 4


class ForwardBackward(NamedTuple):
    """Seconds of the two directions; recomputation is not in the second."""

    forward_s: Amount
    backward_s: Amount


@dataclass(frozen=True)
class LayerShape:
    """One layer, and the LM head, on one tensor-parallel rank; fields may be arrays.

    Attributes:
        projections: (output width, input width) of every matrix product.
        attention_width: width of the rank's query heads together; `num_heads` of them.
        vocab_size: of the rank's part of the LM head.
    """

    hidden_size: Amount
    projections: tuple[tuple[Amount, Amount], ...]
    attention_width: Amount
    num_heads: Amount
    vocab_size: Amount
    tensor_parallel_size: Amount
    dtype_bytes: int

    @classmethod
    def of_model(
        cls, model: ModelSpec, tensor_parallel_size: int, dtype_bytes: int
    ) -> "LayerShape":
        """The experts of a token count as one wide MLP."""
        tp, hidden = tensor_parallel_size, model.hidden_size
        ffn = model.ffn_hidden_size
        if model.num_moe_experts:
            ffn = model.moe_topk * model.moe_ffn_hidden_size
        return cls(
            hidden_size=hidden,
            projections=(
                ((model.attention_width + 2 * model.kv_width) / tp, hidden),
                (hidden, model.attention_width / tp),
                (2 * ffn / tp, hidden),
                (hidden, ffn / tp),
            ),
            attention_width=model.attention_width / tp,
            num_heads=model.num_attention_heads / tp,
            vocab_size=model.vocab_size / tp,
            tensor_parallel_size=tp,
            dtype_bytes=dtype_bytes,
        )


@dataclass(frozen=True)
class LayerTime:
    """The form, for given coefficients, device and shape."""

    coefficients: Coefficients
    device: DeviceSpec
    shape: LayerShape

    def layer_s(
        self,
        num_tokens: Amount,
        pairs: Amount,
        all_reduce_s: Amount = 0.0,
        host_extra_s: Amount = 0.0,
        exchange_s: Amount = 0.0,
    ) -> ForwardBackward:
        """One layer: device and host, of which the slower counts, joined by a norm.

        Args:
            pairs: (query, key) pairs that attention computes.
            all_reduce_s: time of one tensor-parallel all-reduce of the layer's output; there are
                two in each direction.
            host_extra_s: added to the host's forward time.
            exchange_s: time of the two all-to-alls of the experts in one direction.
        """
        c, shape = self.coefficients, self.shape
        products = [self._products(num_tokens, out, into) for out, into in shape.projections]
        passes = self._passes_s(num_tokens, pairs)
        attention = self.attention_s(num_tokens, pairs)
        forward = sum(p.forward_s for p in products) + passes
        backward = sum(p.backward_s for p in products) + 2.0 * passes
        communication = 2.0 * all_reduce_s + exchange_s
        device_forward_s = c.device_slowdown * (forward + attention) + communication
        device_backward_s = communication + c.device_slowdown * (
            c.linear_backward_factor * backward + c.attention_backward_factor * attention
        )
        host_s = host_extra_s + c.host_layer_s
        host_s = host_s + c.host_tensor_parallel_s * np.greater(shape.tensor_parallel_size, 1)
        host_s = host_s * np.sign(num_tokens)
        return ForwardBackward(
            self._join(device_forward_s, host_s),
            self._join(device_backward_s, c.host_backward_factor * host_s),
        )

    def head_s(self, head_tokens: Amount) -> ForwardBackward:
        """Logits and loss; the backward computes the logits again, then two products."""
        c, shape = self.coefficients, self.shape
        product = self._products(head_tokens, shape.vocab_size, shape.hidden_size)
        moved = head_tokens * shape.vocab_size * _LOGIT_BYTES
        passes = c.head_passes * moved / self.device.memory_bandwidth_bytes_per_s
        forward = c.device_slowdown * (product.forward_s + passes)
        backward = c.device_slowdown * (product.backward_s + 2.0 * passes)
        return ForwardBackward(forward, forward + backward)

    def _join(self, device_s: Amount, host_s: Amount) -> Amount:
        q = self.coefficients.join_exponent
        joined: Amount = (device_s**q + host_s**q) ** (1.0 / q)
        return joined

    def _products(self, rows: Amount, output: Amount, into: Amount) -> ForwardBackward:
        """A [rows, into] x [into, output] product, and the two of its backward."""
        forward = self.product_s(rows, output, into)
        return ForwardBackward(
            forward, self.product_s(rows, into, output) + self.product_s(output, into, rows)
        )

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
