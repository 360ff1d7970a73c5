"""The model of a Hugging Face configuration, as far as psRL can run it."""

from collections.abc import Mapping
from typing import Any

from psrl.backend.model.hf_layout import check_hf_config
from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import BackendError

_FAMILIES = ("qwen2", "qwen3", "qwen3_moe")


def model_spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The specification of a model.

    Args:
        config: contents of `config.json`.

    Raises:
        BackendError: if the model or one of its features is not supported.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise BackendError(
            f"{where}: model type {family!r} is not supported, only {', '.join(_FAMILIES)}",
            "choose another actor_rollout_ref.model.path, or run this model without psRL",
        )
    if config.get("attention_dropout"):
        raise BackendError(
            f"{where}: attention_dropout = {config['attention_dropout']} is refused: samples that "
            "share a token must not draw different masks",
            "set +actor_rollout_ref.model.override_config.attention_dropout=0",
        )
    rope = config.get("rope_parameters") or {}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    experts = config.get("num_experts", 0) if family == "qwen3_moe" else 0
    spec = ModelSpec(
        name=str(config.get("_name_or_path") or family),
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim") or hidden // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", family == "qwen2")) or family == "qwen2",
        qk_layernorm=family != "qwen2",
        rotary_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_epsilon=config["rms_norm_eps"],
        num_moe_experts=experts,
        moe_topk=config["num_experts_per_tok"] if experts else 0,
        moe_ffn_hidden_size=config["moe_intermediate_size"] if experts else 0,
    )
    check_hf_config(dict(config), spec, where)
    return spec
