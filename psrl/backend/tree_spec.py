"""Megatron's layer with tree attention: the module spec, and the metadata that reaches it.

A subclass of `PackedSeqParams` is the one argument that Megatron passes unchanged from the block
through layers and layer recompute to the core attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.packing import PackedMicroBatch
from psrl.kernels import KeyValueStore, tree_attention
from psrl.kernels.tree_attention import Implementation

from .compat import PackedSeqParams, TransformerConfig, get_gpt_layer_local_spec


@dataclass
class TreeSeqParams(PackedSeqParams):
    """What a micro-batch's attention needs; `qkv_format` stays None, so shapes are [T, 1, ...]."""

    packed: PackedMicroBatch | None = None
    store: KeyValueStore | None = None
    implementation: Implementation = "parts"


class TreeCoreAttention(torch.nn.Module):
    """Core attention of one layer over the rank's own heads: every token sees its tree path.

    Supports grouped queries and a softmax scale. Dropout, soft-capping, windows and attention
    masks or biases are refused where the model is built.
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
        return out_THD.flatten(1).unsqueeze(1)


def tree_layer_spec(qk_layernorm: bool) -> Any:
    """Megatron's local layer spec (RMSNorm) with tree attention as core attention."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = TreeCoreAttention
    return spec
