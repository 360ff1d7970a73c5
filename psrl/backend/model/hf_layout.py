"""Hugging Face's names, shapes and configuration of Llama, Qwen2.5, Qwen3 and Qwen3-MoE models.

A canonical parameter (`psrl.backend.model.parameters`) is one tensor there, or several joined:
queries, keys and values group by group, gate and up projection one after the other.
"""

import re
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import BackendError


class HfSource(NamedTuple):
    """Tensors that make up one canonical parameter, and how they are joined."""

    names: tuple[str, ...]
    join: Literal["none", "groups", "rows"] = "none"


_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_ONE_TO_ONE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
# By qkv bias, query/key norm and experts.
_FAMILIES = {
    (True, False, False): ("qwen2", "Qwen2ForCausalLM"),
    (False, False, False): ("llama", "LlamaForCausalLM"),
    (False, True, False): ("qwen3", "Qwen3ForCausalLM"),
    (False, True, True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


def hf_source(name: str) -> HfSource:
    """Where a canonical parameter comes from.

    Raises:
        BackendError: if Hugging Face's models have no such parameter.
    """
    if name in _OUTSIDE_LAYERS:
        return HfSource((_OUTSIDE_LAYERS[name],))
    layer, _, inner = name.removeprefix("decoder.layers.").partition(".")
    prefix = f"model.layers.{layer}."
    if inner in _ONE_TO_ONE:
        return HfSource((prefix + _ONE_TO_ONE[inner],))
    if inner.startswith("self_attention.linear_qkv."):
        kind = inner.rsplit(".", 1)[1]
        return HfSource(tuple(f"{prefix}self_attn.{p}_proj.{kind}" for p in "qkv"), "groups")
    if inner == "mlp.linear_fc1.weight":
        return HfSource(_gate_and_up(f"{prefix}mlp."), "rows")
    expert = _EXPERT.fullmatch(inner)
    if expert:
        inside = f"{prefix}mlp.experts.{expert[1]}."
        if expert[2] == "1":
            return HfSource(_gate_and_up(inside), "rows")
        return HfSource((f"{inside}down_proj.weight",))
    raise BackendError(f"parameter {name} has no counterpart in a Hugging Face model")


def _gate_and_up(prefix: str) -> tuple[str, str]:
    return f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"


def join(tensors: list[Tensor], source: HfSource, spec: ModelSpec) -> Tensor:
    """The full canonical parameter from Hugging Face's tensors."""
    if source.join == "none":
        return tensors[0]
    if source.join == "rows":
        return torch.cat(tensors)
    grouped = [t.unflatten(0, (spec.num_query_groups, -1)) for t in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def separate(full: Tensor, source: HfSource, spec: ModelSpec) -> list[Tensor]:
    """Hugging Face's tensors from the full canonical parameter: the inverse of `join`."""
    if source.join == "none":
        return [full]
    if source.join == "rows":
        return list(full.chunk(2))
    queries = spec.attention_width // spec.num_query_groups
    sizes = [queries, spec.kv_channels, spec.kv_channels]
    grouped = full.unflatten(0, (spec.num_query_groups, -1))
    return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


def hf_tensor_names(spec: ModelSpec) -> set[str]:
    """Names of all tensors of a model: each of them is loaded, and no other may be there."""
    names = [n for n in _OUTSIDE_LAYERS if n != "output_layer.weight" or not spec.tied_embeddings]
    inner = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
    inner += [f"self_attention.linear_{part}.weight" for part in ("qkv", "proj")]
    inner += ["self_attention.linear_qkv.bias"] if spec.qkv_bias else []
    inner += [f"self_attention.{p}_layernorm.weight" for p in "qk"] if spec.qk_layernorm else []
    if spec.num_moe_experts:
        inner.append("mlp.router.weight")
    mlps = [f"mlp.experts.local_experts.{e}." for e in range(spec.num_moe_experts)] or ["mlp."]
    inner += [f"{mlp}linear_fc{n}.weight" for mlp in mlps for n in (1, 2)]
    names += [f"decoder.layers.{i}.{name}" for i in range(spec.num_layers) for name in inner]
    return {tensor for name in names for tensor in hf_source(name).names}


def hf_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Contents of `config.json`.

    Raises:
        BackendError: if Hugging Face has no model class for it.
    """
    kind = (spec.qkv_bias, spec.qk_layernorm, spec.num_moe_experts > 0)
    if kind not in _FAMILIES:
        raise BackendError(
            f"{spec.name} (qkv_bias {spec.qkv_bias}, qk_layernorm {spec.qk_layernorm}, "
            f"{spec.num_moe_experts} experts) is none of "
            f"{', '.join(name for name, _ in _FAMILIES.values())}",
            "Hugging Face has no model class for it",
        )
    model_type, architecture = _FAMILIES[kind]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "attention_bias": spec.qkv_bias,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_query_groups,
        "head_dim": spec.kv_channels,
        "intermediate_size": spec.ffn_hidden_size,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rotary_base,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if spec.num_moe_experts:
        config |= {
            "num_experts": spec.num_moe_experts,
            "num_experts_per_tok": spec.moe_topk,
            "moe_intermediate_size": spec.moe_ffn_hidden_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config
