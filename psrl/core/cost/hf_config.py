"""A model's shape from Hugging Face's `config.json`: every key is used, known not to matter, or
refused by name.

The families are those whose layers the backend builds: attention with or without qkv bias and
query/key norm, rotary embedding over the whole head, SwiGLU, optionally softmax-routed experts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psrl.core.errors import ConfigError, suggest

from .cluster import ModelSpec

# Keys that say nothing about what is computed from the weights.
_WITHOUT_EFFECT = {
    *("_attn_implementation", "_commit_hash", "_name_or_path", "architectures", "bos_token_id"),
    *("attn_implementation", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label"),
    *("initializer_range", "label2id", "max_position_embeddings", "max_window_layers"),
    *("model_type", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("pad_token_id", "problem_type", "return_dict", "rope_theta", "router_aux_loss_coef"),
    *("torch_dtype", "transformers_version", "use_cache"),
}
# Keys that may only say what the backend does; other values are refused.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "decoder_sparse_step": (1,),
    "hidden_act": ("silu",),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([], None),
    "norm_topk_prob": (True,),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "rope_scaling": (None, {"rope_type": "default"}, {"type": "default"}),
    "use_sliding_window": (False, None),
    "pruned_heads": ({}, None),
}
_SHAPE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "tie_word_embeddings",
)
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
# Of each family: qkv bias, and query/key norm; `attention_bias` must say the same or be absent.
_FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
# Releases leave keys out that have these values by the family's model class.
_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": False}


def model_from_hf_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The shape of a model.

    Args:
        config: contents of `config.json`.
        where: its path, for messages.

    Raises:
        ConfigError: naming every key that is missing, unknown, or has a value that the backend
            does not compute.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        near = suggest(str(family), list(_FAMILIES))
        raise ConfigError(
            f"{where}: model_type {family!r} is not supported.{near}",
            f"supported families: {', '.join(_FAMILIES)}",
        )
    qkv_bias, qk_layernorm = _FAMILIES[family]
    values, wrong = {**_DEFAULTS, **config}, []
    has_experts = family == "qwen3_moe"
    experts = values.pop("num_experts", values.pop("num_local_experts", None))
    needed = [*_SHAPE, *(_EXPERTS if has_experts else ())]
    if family == "qwen3":
        needed.append("head_dim")  # which it does not derive from the hidden size
    wrong += [f"{key} is missing" for key in needed if values.get(key) is None]
    if has_experts:
        if experts is None:
            wrong.append("num_experts (or num_local_experts) is missing")
        if "norm_topk_prob" not in values:
            wrong.append("norm_topk_prob is missing, which means false; only true is supported")
    elif experts is not None:
        wrong.append(f"num_experts = {experts!r} in a model of type {family}")
    rotary_base = _rotary_base(values, wrong)
    if values.pop("attention_bias", qkv_bias) not in (qkv_bias, None):
        wrong.append(f"attention_bias must be {str(qkv_bias).lower()} for {family}")
    _check_windows(values, family, wrong)
    known = {*needed, "head_dim", "rope_parameters"}
    for key, value in values.items():
        if key in known or key in _WITHOUT_EFFECT:
            continue
        if key not in _ONLY:
            wrong.append(f"{key} = {_short(value)} is not known")
        elif value not in _ONLY[key]:
            wrong.append(f"{key} = {_short(value)} is not supported")
    if wrong:
        raise ConfigError(
            f"{where}: {family} model refused: {'; '.join(wrong)}",
            "psRL computes only what it has proven equal to unshared training; docs/exactness.md",
        )
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    expert_width = values["moe_intermediate_size"] if has_experts else 0
    topk = values["num_experts_per_tok"] if has_experts else 0
    try:
        return ModelSpec(
            name=str(config.get("_name_or_path") or family),
            num_layers=values["num_hidden_layers"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=values["num_key_value_heads"],
            kv_channels=values.get("head_dim") or hidden // heads,
            ffn_hidden_size=topk * expert_width or values["intermediate_size"],
            vocab_size=values["vocab_size"],
            tied_embeddings=values["tie_word_embeddings"],
            qkv_bias=qkv_bias,
            qk_layernorm=qk_layernorm,
            rotary_base=rotary_base,
            norm_epsilon=float(values["rms_norm_eps"]),
            num_moe_experts=experts if has_experts else 0,
            moe_topk=topk,
            moe_ffn_hidden_size=expert_width,
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{where}: a key has a value of the wrong kind ({error})") from None


def read_hf_config(path: Path) -> ModelSpec:
    """The shape of the model of a `config.json`, or of the directory that holds it.

    Raises:
        ConfigError: see `model_from_hf_config`; or if there is no such JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror})",
            "a Hugging Face model is a directory with config.json",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return model_from_hf_config(config, str(file))


def differing_fields(a: ModelSpec, b: ModelSpec) -> list[str]:
    """Names of fields in which two models differ, other than in name.

    The width of dense layers does not count where both have experts instead.
    """
    fields = set(type(a).model_fields) - {"name"}
    if a.num_moe_experts and b.num_moe_experts:
        fields.remove("ffn_hidden_size")
    return sorted(name for name in fields if getattr(a, name) != getattr(b, name))


def _rotary_base(values: dict[str, Any], wrong: list[str]) -> float:
    """`rope_theta`, at the top as older releases write it, or among `rope_parameters`."""
    rope = values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        wrong.append(f"rope_parameters = {_short(rope)} is not supported")
        return 1.0
    wrong += [
        f"rope_parameters.{key} = {_short(value)} is not supported"
        for key, value in rope.items()
        if key != "rope_theta"
        and (key, value) not in (("rope_type", "default"), ("partial_rotary_factor", 1.0))
    ]
    stated = {v for v in (rope.get("rope_theta"), values.get("rope_theta")) if v is not None}
    if len(stated) != 1 or not isinstance(base := stated.pop(), int | float):
        wrong.append("rope_theta is missing or stated differently twice")
        return 1.0
    return float(base)


def _check_windows(values: dict[str, Any], family: str, wrong: list[str]) -> None:
    """Sliding windows by any of the keys that switch them on."""
    window = values.pop("sliding_window", None)
    is_optional = family.startswith("qwen")  # there `use_sliding_window` decides
    if window and not is_optional:
        wrong.append(f"sliding_window = {window!r} is not supported")
    kinds = values.pop("layer_types", None) or []
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other:
        wrong.append(f"layer_types = {', '.join(other)} is not supported")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
