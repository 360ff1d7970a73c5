"""Bytes on one device of one pipeline stage: weights, gradients, optimizer states, activations."""

from dataclasses import dataclass
from functools import cached_property

from psrl.core.samples.sample import IntArray

from .cluster import ClusterSpec, ModelSpec, ParallelConfig
from .parameters import expert_data_parallel_size, stage_parameters

# AdamW with fp32 main weights: main weight, momentum and variance.
OPTIMIZER_BYTES_PER_PARAMETER = 12
GRADIENT_BYTES_PER_PARAMETER = 4
_NUM_OPTIMIZER_STATES = 3
# Seven terms of a clipped loss with a KL penalty in float64 (two are bounded log ratios), at one
# edge per predicted row.
_LOSS_BYTES_PER_ROW = 56


@dataclass(frozen=True)
class MemoryModel:
    """Bytes on one device of one pipeline stage."""

    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig

    @cached_property
    def static_bytes(self) -> int:
        """What an update holds on the fullest stage, the last, whatever it runs."""
        return self.static_bytes_on(self.parallel.pipeline_model_parallel_size - 1, is_update=True)

    def weight_bytes_on(self, stage: int) -> int:
        """The stage's parameters in the working precision."""
        own = stage_parameters(self.model, self.parallel, stage)
        return own.total * self.cluster.device.dtype_bytes

    def static_bytes_on(self, stage: int, is_update: bool) -> int:
        """Bytes that stay on a stage: weights, and in an update what trains them.

        That are gradients in float32 or wider, filled up to a multiple of the ranks that reduce
        them, and AdamW's main weights and moments of the rank's share of these.
        """
        static = self.weight_bytes_on(stage)
        if not is_update:
            return static
        own, parallel = stage_parameters(self.model, self.parallel, stage), self.parallel
        for count, num_sharers in (
            (own.dense, parallel.data_parallel_size),
            (own.expert, expert_data_parallel_size(parallel)),
        ):
            share = -(-count // num_sharers)
            static += share * (num_sharers + _NUM_OPTIMIZER_STATES) * self._wide_bytes
        return static

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
        """What a dropped micro-batch keeps behind the first stage: what entered the stage."""
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
        self, activation: str, num_tokens: IntArray, head_tokens: IntArray, stage: int
    ) -> IntArray:
        """[M] bytes that micro-batches keep on a stage between their forward and their backward.

        Args:
            activation: keep | recompute | drop, as in the plan.
        """
        if activation == "drop":
            return num_tokens * (self.stage_input_bytes_per_token if stage else 0)
        per_token = self.activation_bytes_per_token
        if activation == "recompute":
            per_token = self.recompute_bytes_per_token
        if stage < self.parallel.pipeline_model_parallel_size - 1:
            return num_tokens * per_token
        per_token += self.final_norm_bytes_per_token
        return num_tokens * per_token + head_tokens * self.head_bytes_per_row

    @cached_property
    def logits_bytes_per_token(self) -> int:
        """Logits in float32 or wider and their gradient of one predicted position."""
        width = self.model.vocab_size // self.parallel.tensor_model_parallel_size
        return 2 * width * self._wide_bytes
