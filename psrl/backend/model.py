"""Megatron-core's GPTModel with tree attention, and calls of its parts.

Dense decoders of Qwen2.5's and Qwen3's shape: RMSNorm, grouped queries with bias or QK norm,
SwiGLU without bias, rotary embeddings. Positions are depths in the prefix tree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from psrl.core.cluster import ModelSpec, ParallelConfig
from psrl.core.errors import BackendError

from .compat import GPTModel, TransformerConfig, parallel_state, prepare_megatron, quiet
from .parameters import fill_random
from .tree_spec import TreeSeqParams, tree_layer_spec

# Megatron's setting, the value that is known to be safe, and why any other is refused.
_REQUIRED = (
    ("hidden_dropout", (0, 0.0), "samples that share a token must not draw different masks"),
    ("attention_dropout", (0, 0.0), "samples that share a token must not draw different masks"),
    ("window_size", (None,), "a window cuts the path that shared keys rely on"),
    ("attn_logit_softcapping", (None, 0, 0.0), "the kernels do not cap scores"),
    ("mtp_num_layers", (None, 0), "multi-token prediction crosses branches"),
    ("multi_latent_attention", (False,), "the cache holds plain keys and values"),
    ("is_hybrid_model", (False,), "state-space layers carry state along the packed order"),
    ("num_moe_experts", (None,), "router losses must weigh shared tokens by multiplicity"),
    ("context_parallel_size", (1,), "a chain of tokens must be on one rank"),
    ("expert_model_parallel_size", (1,), "mixture-of-experts models are not supported yet"),
    ("sequence_parallel", (False,), "it is not supported yet"),
    ("pipeline_model_parallel_size", (1,), "it is not supported yet"),
)


def refuse_layout(model: ModelSpec, parallel: ParallelConfig) -> None:
    """Refuse what this backend cannot run.

    Raises:
        BackendError: naming the configuration key.
    """
    for refused, key, value in (
        (
            parallel.pipeline_model_parallel_size > 1,
            "parallel.pipeline_model_parallel_size",
            parallel.pipeline_model_parallel_size,
        ),
        (parallel.sequence_parallel, "parallel.sequence_parallel", True),
        (model.num_moe_experts > 0, "model.num_moe_experts", model.num_moe_experts),
    ):
        if refused:
            raise BackendError(
                f"the backend does not execute {key} = {value} yet",
                f"simulate this plan, or plan again with the default of {key}",
            )


def refuse_unproven(config: TransformerConfig) -> None:
    """Refuse settings under which sharing is not known to be exact.

    Raises:
        BackendError: naming the setting, its value and the reason.
    """
    for name, allowed, reason in _REQUIRED:
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise BackendError(
                f"Megatron setting {name} = {value} is refused: {reason}",
                f"set {name} to {allowed[0]}",
            )


def transformer_config(
    model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, **overrides: Any
) -> TransformerConfig:
    """Megatron's configuration of a model; `overrides` are Megatron's own names.

    Raises:
        BackendError: if a setting is refused.
    """
    refuse_layout(model, parallel)
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "ffn_hidden_size": model.ffn_hidden_size,
        "layernorm_epsilon": model.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "params_dtype": dtype,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "bias_activation_fusion": True,
        # These two need TransformerEngine or Apex.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    with quiet():
        config = TransformerConfig(**settings | overrides)
    refuse_unproven(config)
    return config


def build_model(
    model: ModelSpec,
    parallel: ParallelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    init_std: float = 0.02,
    perturb: float = 0.0,
    **overrides: Any,
) -> GPTModel:
    """A rank's GPTModel with random weights that are the same for every parallel size.

    `parallel_state` must be initialised.

    Args:
        perturb: see `fill_random`.
        overrides: further Megatron settings.

    Raises:
        BackendError: if a setting is refused.
    """
    prepare_megatron()
    gpt = GPTModel(
        transformer_config(model, parallel, dtype, **overrides),
        tree_layer_spec(model.qk_layernorm),
        vocab_size=model.vocab_size,
        max_sequence_length=1,  # only learned positions would use it
        position_embedding_type="none",  # the caller of the decoder gives rotary angles
        share_embeddings_and_output_weights=model.tied_embeddings,
    )
    # torch's RMSNorm does not follow params_dtype.
    gpt.to(dtype=dtype, device=device)
    fill_random(
        gpt,
        seed,
        init_std,
        model.num_layers,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        perturb,
    )
    return gpt


def rotary_angles(position_ids_T: Tensor, model: ModelSpec, dtype: torch.dtype) -> Tensor:
    """[T, 1, 1, D] rotary angles of explicit positions, in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, model.kv_channels, 2, device=position_ids_T.device).to(wide)
    frequency = 1.0 / model.rotary_base ** (exponent / model.kv_channels)
    angle = torch.outer(position_ids_T.to(wide), frequency)
    return torch.cat((angle, angle), dim=-1)[:, None, None, :]


def hidden_states(
    gpt: GPTModel,
    token_ids_T: Tensor,
    rotary_T11D: Tensor,
    params: TreeSeqParams,
    layer_recompute: bool = False,
) -> Tensor:
    """[T, hidden] outputs of the last layer's norm for one packed micro-batch.

    Args:
        layer_recompute: keep only each layer's input for the backward (Megatron's full
            recompute).
    """
    embedded_T1H = gpt.embedding(input_ids=token_ids_T[None], position_ids=None)
    with _full_recompute(gpt.config, layer_recompute):
        hidden_T1H = gpt.decoder(
            hidden_states=embedded_T1H,
            attention_mask=None,
            rotary_pos_emb=rotary_T11D,
            packed_seq_params=params,
        )
    return hidden_T1H.squeeze(1)


@contextmanager
def _full_recompute(config: TransformerConfig, enabled: bool) -> Iterator[None]:
    """Megatron reads these settings at every forward, so each micro-batch can have its own."""
    if not enabled:
        yield
        return
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    before = {name: getattr(config, name) for name in names}
    for name, value in zip(names, ("full", "uniform", 1), strict=True):
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def logits(gpt: GPTModel, hidden_RH: Tensor) -> Tensor:
    """[R, vocabulary / tensor-parallel size] logits of R hidden states."""
    tied = gpt.share_embeddings_and_output_weights
    weight = gpt.shared_embedding_or_output_weight() if tied else None
    return gpt.output_layer(hidden_RH.unsqueeze(1), weight=weight)[0].squeeze(1)
