"""Megatron-core's GPTModel with tree attention, and calls of its parts.

Decoders of Qwen2.5's and Qwen3's shape, dense or with experts: RMSNorm, grouped queries with bias
or QK norm, SwiGLU without bias, rotary embeddings. Positions are depths in the prefix tree.

Under sequence parallelism a micro-batch is filled up to a multiple of the tensor-parallel size;
norms and residuals see each rank's slice of its rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from psrl.backend.compat import (
    GPTModel,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    parallel_state,
    prepare_megatron,
    quiet,
)
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.errors import BackendError

from .moe import TreeRouter
from .parameters import fill_random
from .tree_spec import TreeSeqParams, tree_block_spec

# Megatron's setting, the value that is known to be safe, and why any other is refused.
_REQUIRED = (
    ("hidden_dropout", (0, 0.0), "samples that share a token must not draw different masks"),
    ("attention_dropout", (0, 0.0), "samples that share a token must not draw different masks"),
    ("window_size", (None,), "a window cuts the path that shared keys rely on"),
    ("attn_logit_softcapping", (None, 0, 0.0), "the kernels do not cap scores"),
    ("mtp_num_layers", (None, 0), "multi-token prediction crosses branches"),
    ("multi_latent_attention", (False,), "the cache holds plain keys and values"),
    ("is_hybrid_model", (False,), "state-space layers carry state along the packed order"),
    ("moe_expert_capacity_factor", (None,), "a dropped token would differ between samples"),
    ("moe_input_jitter_eps", (None,), "samples that share a token must not draw different noise"),
    ("moe_router_score_function", ("softmax",), "our router takes the softmax of the chosen"),
    ("moe_router_pre_softmax", (False,), "our router takes the softmax of the chosen"),
    ("moe_router_topk_scaling_factor", (None,), "our router does not scale"),
    ("moe_router_num_groups", (None,), "our router chooses among all experts"),
    ("moe_router_enable_expert_bias", (False,), "the bias would count a shared token once"),
    ("moe_shared_expert_intermediate_size", (None,), "shared experts are not tested"),
    ("context_parallel_size", (1,), "a chain of tokens must be on one rank"),
    ("expert_tensor_parallel_size", (1,), "an expert stays whole"),
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
    tensor_size = parallel.tensor_model_parallel_size
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
        "tensor_model_parallel_size": tensor_size,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.sequence_parallel and tensor_size > 1,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "bias_activation_fusion": True,
        # These two need TransformerEngine or Apex.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    if model.num_moe_experts:
        settings |= {
            "num_moe_experts": model.num_moe_experts,
            "moe_router_topk": model.moe_topk,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_router_load_balancing_type": "none",  # our router has the losses
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": parallel.expert_model_parallel_size,
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

    `parallel_state` must be initialised. The first pipeline stage has the embedding, the last one
    the final norm and the head; if these two share a weight across stages, each has a copy, marked
    as Megatron marks it: `shared_embedding` on both, `shared` on the copy that counts no second
    time.

    Args:
        perturb: see `fill_random`.
        overrides: further Megatron settings.

    Raises:
        BackendError: if a setting is refused.
    """
    prepare_megatron()
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    is_first, is_last = stage == 0, stage == num_stages - 1
    config = transformer_config(model, parallel, dtype, **overrides)
    # Experts, which are whole, would warn that they are not sequence parallel.
    with quiet():
        gpt = GPTModel(
            config,
            tree_block_spec(model, model.num_layers // num_stages),
            vocab_size=model.vocab_size,
            max_sequence_length=1,  # only learned positions would use it
            position_embedding_type="none",  # the caller of the decoder gives rotary angles
            pre_process=is_first,
            post_process=is_last,
            # Between stages Megatron would synchronise the copies through CUDA.
            share_embeddings_and_output_weights=model.tied_embeddings and num_stages == 1,
        )
    if model.tied_embeddings and num_stages > 1:
        _mark_shared(gpt)
    if model.num_moe_experts:
        for layer in gpt.decoder.layers:
            attention = layer.self_attention.core_attention
            layer.mlp.router = TreeRouter(config, layer.layer_number - 1, attention)
    if is_last and config.sequence_parallel:
        # The head gets rows of whole micro-batches, the same on all tensor-parallel ranks.
        gpt.output_layer.sequence_parallel = False
        gpt.output_layer.allreduce_dgrad = True
    gpt.to(device=device)
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


def _mark_shared(gpt: GPTModel) -> None:
    if gpt.pre_process:
        gpt.embedding.word_embeddings.weight.shared_embedding = True
    elif gpt.post_process:
        gpt.output_layer.weight.shared_embedding = True
        gpt.output_layer.weight.shared = True


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
    received_TH: Tensor | None = None,
    num_rows: int = 0,
) -> Tensor:
    """Outputs of a stage for one packed micro-batch: [T, hidden] of the last norm on the last one.

    The others give the rows of `stage_rows`, which the next one takes.

    Args:
        layer_recompute: keep only each layer's input for the backward (Megatron's full
            recompute).
        received_TH: outputs of the previous stage; None on the first one.
        num_rows: fill the micro-batch up to so many rows, if it has fewer.
    """
    num_tokens = len(token_ids_T)
    size = parallel_state.get_tensor_model_parallel_world_size() if _slices_rows(gpt) else 1
    missing = stage_rows(gpt, max(num_tokens, num_rows)) * size - num_tokens
    if missing:
        token_ids_T = torch.nn.functional.pad(token_ids_T, (0, missing))
        rotary_T11D = torch.nn.functional.pad(rotary_T11D, (0, 0, 0, 0, 0, 0, 0, missing))
    embedded_T1H = None
    if received_TH is None:
        embedded_T1H = gpt.embedding(input_ids=token_ids_T[None], position_ids=None)
    else:
        gpt.decoder.set_input_tensor(received_TH.unsqueeze(1))
    with _full_recompute(gpt.config, layer_recompute):
        hidden_T1H = gpt.decoder(
            hidden_states=embedded_T1H,
            attention_mask=None,
            rotary_pos_emb=rotary_T11D,
            packed_seq_params=params,
        )
    # The decoder would keep what it received until the next micro-batch.
    gpt.decoder.set_input_tensor(None)
    hidden_TH = hidden_T1H.squeeze(1)
    if not gpt.post_process:
        return hidden_TH
    if _slices_rows(gpt):
        # The head's backward has summed the gradient over ranks already.
        hidden_TH = gather_from_sequence_parallel_region(
            hidden_TH, tensor_parallel_output_grad=False
        )
    return hidden_TH[:num_tokens]


def _slices_rows(gpt: GPTModel) -> bool:
    return bool(gpt.config.sequence_parallel)


def stage_rows(gpt: GPTModel, num_rows: int) -> int:
    """Rows of a micro-batch of so many rows that a tensor-parallel rank's layers see."""
    if not _slices_rows(gpt):
        return num_rows
    return -(-num_rows // parallel_state.get_tensor_model_parallel_world_size())


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
