"""Bytes on one device of one pipeline stage: weights, gradients, optimizer states, activations."""

from dataclasses import dataclass
from functools import cached_property

from psrl.core.samples.sample import IntArray

from .cluster import ClusterSpec, ModelSpec, ParallelConfig
from .parameters import expert_data_parallel_size, rank_parameters

# AdamW with fp32 main weights: main weight, momentum and variance.
OPTIMIZER_BYTES_PER_PARAMETER = 12
GRADIENT_BYTES_PER_PARAMETER = 4
# Row, target, number and a handful of float32 terms of the loss, at one edge per predicted row.
_LOSS_BYTES_PER_ROW = 64


@dataclass(frozen=True)
class MemoryModel:
    """Bytes on one device of one pipeline stage."""

    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig

    @cached_property
    def static_bytes(self) -> int:
        """Weights, fp32 gradients, and AdamW states sharded over the ranks of equal weights."""
        parallel, own = self.parallel, rank_parameters(self.model, self.parallel)

        def per_parameter(num_sharers: int) -> float:
            optimizer = OPTIMIZER_BYTES_PER_PARAMETER / num_sharers
            return self.cluster.device.dtype_bytes + GRADIENT_BYTES_PER_PARAMETER + optimizer

        dense = own.dense * per_parameter(parallel.data_parallel_size)
        return int(dense + own.expert * per_parameter(expert_data_parallel_size(parallel)))

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Cached K and V of one token in all layers of a stage."""
        layers = self.layers_per_stage
        width = self.model.kv_width // self.parallel.tensor_model_parallel_size
        return 2 * layers * width * self.cluster.device.dtype_bytes

    @cached_property
    def kv_gradient_bytes_per_token(self) -> int:
        """dK and dV accumulators of one cached token: at least fp32."""
        dtype_bytes = self.cluster.device.dtype_bytes
        return self.kv_bytes_per_token // dtype_bytes * max(4, dtype_bytes)

    @cached_property
    def layers_per_stage(self) -> int:
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size

    @cached_property
    def _replicated(self) -> float:
        """Share of [tokens, hidden] tensors between layers that one tensor-parallel rank keeps."""
        return 1.0 / self.parallel.sequence_shards

    @cached_property
    def _wide_bytes(self) -> int:
        """Bytes of what is computed in float32 or wider."""
        return max(4, self.cluster.device.dtype_bytes)

    @cached_property
    def activation_bytes_per_token(self) -> int:
        """Activations kept per token and stage between forward and backward, without recompute.

        What torch saves in Megatron's local layer, in units of the hidden size h, the widths a of
        the queries and g of K (or V), the head dimension d and the MLP width f; tests/backend
        compares it with the bytes that autograd keeps.

        * Two norms: input, normalised input and output, 3 h each, and a float32 scale.
        * Fused projection a + 2 g: V is a view of it. Rotated queries and keys a + g. Tables of
          cosines and sines, for the queries and for the keys, 4 d.
        * QK norm: normalised queries and keys a + g, and a float32 scale per head and group. The
          norm's input is a copy of the queries, a, unless every head has its own group; that of
          the keys is a view of the projection.
        * Attention output a, and a float32 log-sum-exp per head.
        * Gate and up 2 f, and their product f; of a mixture of experts those of the chosen ones.

        Tensor parallelism divides all but the norms and the tables, sequence parallelism also
        divides the norms.
        """
        model, narrow, wide = self.model, self.cluster.device.dtype_bytes, self._wide_bytes
        query, key = model.attention_width, model.kv_width
        norms = 2 * (3 * model.hidden_size * narrow + wide) * self._replicated
        ffn = model.moe_topk * model.moe_ffn_hidden_size or model.ffn_hidden_size
        sharded = (query + 2 * key + query + key + query + 3 * ffn) * narrow
        sharded += model.num_attention_heads * wide
        if model.qk_layernorm:
            is_copied = model.num_attention_heads > model.num_query_groups
            sharded += (query * (1 + is_copied) + key) * narrow
            sharded += (model.num_attention_heads + model.num_query_groups) * wide
        tables = 4 * model.kv_channels * narrow
        layer = norms + sharded / self.parallel.tensor_model_parallel_size + tables
        return int(self.layers_per_stage * layer)

    @cached_property
    def recompute_bytes_per_token(self) -> int:
        """Activations kept per token and stage under full layer recompute.

        Each layer's input, and the float32 rotary angles that all layers share.
        """
        angles = self.model.kv_channels * self._wide_bytes
        return self.layers_per_stage * self.stage_input_bytes_per_token + angles

    @cached_property
    def stage_input_bytes_per_token(self) -> int:
        """What a dropped micro-batch keeps: the hidden states that entered the stage.

        The first stage keeps nothing, token ids aside; the model counts them there too unless it
        is the only stage.
        """
        return int(self.model.hidden_size * self.cluster.device.dtype_bytes * self._replicated)

    @cached_property
    def final_norm_bytes_per_token(self) -> int:
        """Input, normalised input and float32 scale of the last stage's norm."""
        narrow = self.model.hidden_size * self.cluster.device.dtype_bytes
        return int((2 * narrow + self._wide_bytes) * self._replicated)

    @cached_property
    def head_bytes_per_row(self) -> int:
        """What a predicted position keeps on the last stage: its hidden state, for the head.

        Its logits are computed again; indices and loss terms are small numbers beside it.
        """
        return self.model.hidden_size * self.cluster.device.dtype_bytes + _LOSS_BYTES_PER_ROW

    def held_bytes(
        self, activation: str, num_tokens: IntArray, head_tokens: IntArray, is_last_stage: bool
    ) -> IntArray:
        """[M] bytes that micro-batches keep on a stage between their forward and their backward.

        Args:
            activation: keep | recompute | drop, as in the plan.
        """
        if activation == "drop":
            is_only_stage = self.parallel.pipeline_model_parallel_size == 1
            return num_tokens * (0 if is_only_stage else self.stage_input_bytes_per_token)
        per_token = self.activation_bytes_per_token
        if activation == "recompute":
            per_token = self.recompute_bytes_per_token
        if not is_last_stage:
            return num_tokens * per_token
        per_token += self.final_norm_bytes_per_token
        return num_tokens * per_token + head_tokens * self.head_bytes_per_row

    @cached_property
    def logits_bytes_per_token(self) -> int:
        """fp32 logits and their gradient of one predicted position."""
        return 8 * self.model.vocab_size // self.parallel.tensor_model_parallel_size
