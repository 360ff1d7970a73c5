"""Megatron's layer with tree attention: the module spec, and the metadata that reaches it.

A subclass of `PackedSeqParams` is the one argument that Megatron passes unchanged from the block
through layers and layer recompute to the core attention.

The layers are Megatron's local ones, also where TransformerEngine is installed: its layers fuse the
norms into the projections, under other names, and nothing here has been run with them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psrl.backend.compat import (
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)
from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import BackendError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.kernels import KeyValueStore, tree_attention
from psrl.kernels.attention.tree_attention import Implementation

from .moe import RoutedTokens


@dataclass
class TreeSeqParams(PackedSeqParams):
    """What a micro-batch's layers need; `qkv_format` stays None, so shapes are [T, 1, ...].

    Attributes:
        routed: read by the routers of a mixture-of-experts model; None to account for nothing.
    """

    packed: PackedMicroBatch | None = None
    store: KeyValueStore | None = None
    implementation: Implementation = "parts"
    routed: RoutedTokens | None = None


class TreeNorm(torch.nn.Module):
    """RMSNorm whose weight has the working precision and tells whether ranks see other rows."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class TreeCoreAttention(torch.nn.Module):
    """Core attention of one layer over the rank's own heads: every token sees its tree path.

    Supports grouped queries and a softmax scale. Dropout, soft-capping, windows and attention
    masks or biases are refused where the model is built. Rows beyond the micro-batch's tokens
    fill it up for sequence parallelism: they see nothing and nobody sees them.

    Attributes:
        params: of the micro-batch that ran last, for the router of the same layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: Any = None,
        cp_comm_type: Any = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.scale = softmax_scale
        self.params: TreeSeqParams | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, 1, H * D] outputs from [T, 1, H, D] queries and [T, 1, G, D] keys and values."""
        params = packed_seq_params
        if not isinstance(params, TreeSeqParams) or params.packed is None:
            raise BackendError("tree attention needs TreeSeqParams with a packed micro-batch")
        self.params = params
        num_tokens, num_filled = params.packed.total_tokens, len(query)
        if num_filled > num_tokens:
            # Not always: a slice's backward writes a gradient of the full size.
            query, key, value = (x[:num_tokens] for x in (query, key, value))
        out_THD = tree_attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            params.packed,
            store=params.store,
            layer=self.layer,
            scale=self.scale,
            implementation=params.implementation,
        )
        out_T1H = out_THD.flatten(1).unsqueeze(1)
        if num_filled == num_tokens:
            return out_T1H
        return torch.nn.functional.pad(out_T1H, (0, 0, 0, 0, 0, num_filled - num_tokens))


def tree_block_spec(model: ModelSpec, num_layers: int) -> Any:
    """Megatron's local layers with tree attention and our norm, and our norm after the last one."""
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=model.qk_layernorm,
        num_experts=model.num_moe_experts or None,
        moe_grouped_gemm=False,
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TreeNorm
    attention = parts.self_attention.submodules
    attention.core_attention = TreeCoreAttention
    if model.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TreeNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=TreeNorm)
