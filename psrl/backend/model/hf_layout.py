"""Hugging Face's names, shapes and configuration of Qwen2.5, Qwen3 and Qwen3-MoE models.

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


def hf_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Contents of `config.json`.

    Raises:
        BackendError: if the model is of none of the three families.
    """
    if spec.qkv_bias == spec.qk_layernorm or (spec.num_moe_experts and spec.qkv_bias):
        raise BackendError(
            f"{spec.name} (qkv_bias {spec.qkv_bias}, qk_layernorm {spec.qk_layernorm}, "
            f"{spec.num_moe_experts} experts) is neither Qwen2, Qwen3 nor Qwen3-MoE",
            "Hugging Face has no model class for it",
        )
    family = ("qwen2", "Qwen2ForCausalLM")
    if spec.qk_layernorm:
        family = ("qwen3", "Qwen3ForCausalLM")
    if spec.num_moe_experts:
        family = ("qwen3_moe", "Qwen3MoeForCausalLM")
    config: dict[str, Any] = {
        "architectures": [family[1]],
        "model_type": family[0],
        "hidden_act": "silu",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "attention_bias": spec.qkv_bias,
        "use_sliding_window": False,
        **_shape(spec),
    }
    if spec.num_moe_experts:
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def _shape(spec: ModelSpec) -> dict[str, Any]:
    """Keys that must agree between `config.json` and the model."""
    shape = {
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
        del shape["intermediate_size"]  # of dense layers, which there are none of
        shape |= {
            "num_experts": spec.num_moe_experts,
            "num_experts_per_tok": spec.moe_topk,
            "moe_intermediate_size": spec.moe_ffn_hidden_size,
        }
    return shape


_UNSUPPORTED = (
    ("use_sliding_window", (None, False)),
    ("rope_scaling", (None,)),
    ("norm_topk_prob", (None, True)),
    ("decoder_sparse_step", (None, 1)),
    ("mlp_only_layers", (None, [])),
)


def check_hf_config(config: dict[str, Any], spec: ModelSpec, where: str) -> None:
    """Check what shapes of tensors cannot tell; keys that a file leaves out are not checked.

    Raises:
        BackendError: naming the key and both values.
    """
    rope = config.get("rope_parameters") or {}
    found = {"rope_theta": rope.get("rope_theta"), "rope_scaling": None} | config
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = rope["rope_type"]
    for key, wanted in _shape(spec).items():
        if found.get(key) is not None and found[key] != wanted:
            raise BackendError(
                f"{where}: {key} is {found[key]}, the plan's model {spec.name} has {wanted}",
                "plan with the model that these weights are of",
            )
    for key, allowed in _UNSUPPORTED:
        if found.get(key) not in allowed:
            raise BackendError(f"{where}: {key} = {found[key]} is not supported")
