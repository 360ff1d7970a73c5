"""Another veRL, or settings of it under which psRL is not known to give the same result: refused.

Configurations are read by attribute, so this module does not import veRL.
"""

from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError, ConfigError

VERL_VERSION = "0.9.1"

UNDECLARED = {
    "cachetools": "cachetools",
    "fastapi": "fastapi",
    "transfer_queue": "TransferQueue",
    "uvicorn": "uvicorn",
}
"""Modules that veRL's trainer and workers import without declaring them, and their packages."""

Rule = tuple[str, tuple[Any, ...], str]

_NONE_OR_ONE = (None, 1)
_OFF = (None, False)

# Path under the engine's configuration, what is allowed, and why nothing else is.
_ENGINE: tuple[Rule, ...] = (
    ("context_parallel_size", _NONE_OR_ONE, "a chain of tokens must be on one rank"),
    ("dynamic_context_parallel", _OFF, "psRL places the tokens itself"),
    ("expert_tensor_parallel_size", _NONE_OR_ONE, "an expert stays whole"),
    ("virtual_pipeline_model_parallel_size", _NONE_OR_ONE, "psRL's schedule is not interleaved"),
    ("use_megatron_fsdp", _OFF, "psRL has its own sharded optimizer"),
    ("use_dist_checkpointing", _OFF, "psRL reads Hugging Face weights and its own checkpoints"),
    ("use_fused_kernels", _OFF, "a fused head has one label per token, a shared token several"),
    ("qat.enable", _OFF, "quantized training is not tested"),
    ("router_replay.mode", (None, "disabled"), "samples that share a token may differ in routes"),
    ("full_determinism", _OFF, "it sets up kernels that psRL does not run"),
    ("override_ddp_config", (None, {}), "psRL does not use Megatron's DDP"),
    ("override_mcore_model_config", (None, {}), "its settings would have no effect"),
)
_MODEL: tuple[Rule, ...] = (
    ("lora_rank", (None, 0), "adapters are not tested"),
    ("lora.rank", (None, 0), "adapters are not tested"),
    ("lora_adapter_path", (None,), "adapters are not tested"),
    ("mtp.enable", _OFF, "multi-token prediction crosses branches"),
    ("use_fused_kernels", _OFF, "a fused head has one label per token, a shared token several"),
)
_OPTIMIZER: tuple[Rule, ...] = (
    ("optimizer", (None, "adam"), "psRL's optimizer is AdamW"),
    ("use_precision_aware_optimizer", _OFF, "psRL keeps gradients and moments in float32"),
    ("override_optimizer_config", (None, {}), "its settings would have no effect"),
)
# Of `override_transformer_config`: they choose kernels or details of a recompute that psRL does
# not run, and change no result.
_WITHOUT_EFFECT = {
    "attention_backend",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
}


def check_verl() -> None:
    """Check version and undeclared dependencies, without importing veRL.

    Raises:
        ConfigError: naming what is installed, what is needed, and the command that fixes it.
    """
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        version = "none"
    if version != VERL_VERSION:
        raise ConfigError(
            f"psRL's engine is written for verl {VERL_VERSION}, installed: {version}",
            f"pip install 'verl=={VERL_VERSION}', or unset VERL_USE_EXTERNAL_MODULES to run "
            "without psRL",
        )
    missing = [package for module, package in UNDECLARED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"verl {VERL_VERSION} needs packages that it does not declare; missing: "
            f"{', '.join(missing)}",
            "pip install 'psrl[verl]', or: pip install " + " ".join(missing),
        )


def check_configuration(engine: Any, model: Any, optimizer: Any) -> None:
    """Check everything that does not depend on a batch.

    Raises:
        BackendError: naming the key, its value and the reason.
    """
    _check(engine, _ENGINE, "megatron")
    _check(model, _MODEL, "model")
    if not engine.forward_only:
        _check(optimizer, _OPTIMIZER, "optim")
    transformer = dict(engine.override_transformer_config or {})
    where = "megatron.override_transformer_config"
    for key, value in transformer.items():
        if key not in _WITHOUT_EFFECT and value not in (None, False):
            raise _refused(f"{where}.{key}", value, "psRL builds the model itself", None)
    granularity = transformer.get("recompute_granularity")
    if granularity not in (None, "full"):
        reason = "psRL keeps a micro-batch's activations, or recomputes whole layers"
        raise _refused(f"{where}.recompute_granularity", granularity, reason, "full")
    if engine.dtype not in ("bfloat16", "float32"):
        raise _refused("megatron.dtype", engine.dtype, "there is no loss scaling", "bfloat16")


def parallel_config(engine: Any, world_size: int) -> ParallelConfig:
    """The parallel layout of an engine's configuration.

    Raises:
        BackendError: if it does not divide the number of processes.
    """
    tensor, pipeline = engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size
    if world_size % (tensor * pipeline):
        raise BackendError(
            f"{world_size} processes are not a multiple of megatron.tensor_model_parallel_size "
            f"({tensor}) * megatron.pipeline_model_parallel_size ({pipeline})"
        )
    granularity = dict(engine.override_transformer_config or {}).get("recompute_granularity")
    return ParallelConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        data_parallel_size=world_size // (tensor * pipeline),
        expert_model_parallel_size=engine.expert_model_parallel_size or 1,
        sequence_parallel=bool(engine.sequence_parallel) and tensor > 1,
        recompute="full" if granularity == "full" else "none",
    )


def check_batch(fields: dict[str, Any]) -> None:
    """Check what a batch asks for.

    Args:
        fields: non-tensor values by key.

    Raises:
        BackendError: naming the key and the reason.
    """
    if not fields.get("use_dynamic_bsz", True):
        raise BackendError(
            "use_dynamic_bsz=False: psRL cuts micro-batches by tokens, not by samples",
            "set actor_rollout_ref.actor.use_dynamic_bsz=True with ppo_max_token_len_per_gpu, and "
            "the same for actor_rollout_ref.rollout and .ref: log_prob_use_dynamic_bsz=True with "
            "log_prob_max_token_len_per_gpu",
        )
    if fields.get("max_token_len_per_gpu") is None:
        raise BackendError(
            "the batch has no max_token_len_per_gpu",
            "set actor_rollout_ref.actor.ppo_max_token_len_per_gpu and "
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        )
    if fields.get("distillation_use_topk"):
        reason = "it needs logits of more than the target tokens"
        raise _refused("distillation.distillation_loss.use_topk", True, reason, False)
    if any(fields.get("multi_modal_inputs") or ()):
        raise BackendError(
            "the batch has multi_modal_inputs: prefixes are shared by token ids, which do not tell "
            "images apart",
            "train a text-only model, or run without psRL",
        )


# Losses whose derivative at a token depends on that token's logprob alone, given whole samples.
TOKEN_WISE_MODES = frozenset({"vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "dro", "cispo"})
_TOKEN_WISE_REDUCTIONS = frozenset(
    {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"}
)


def is_token_wise(actor: Any) -> bool:
    """Whether a PPO loss of this actor configuration is token-wise.

    Where not, the mini-batch needs one more forward. That holds for sequence ratios (gspo), for
    losses that veRL computes per micro-batch without a global denominator (geo_mean, kl_cov), and
    for seq-mean-token-sum-norm without `loss_scale_factor`, which divides by the longest response:
    psRL takes all of these over the whole mini-batch.

    Raises:
        BackendError: for a loss that draws random numbers.
    """
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    if mode == "clip_cov":
        reason = "it clips tokens at random, so ranks and repeated runs would not agree"
        raise _refused("actor.policy_loss.loss_mode", mode, reason, "kl_cov")
    reduction = actor.loss_agg_mode
    fixed = reduction == "seq-mean-token-sum-norm" and actor.loss_scale_factor is not None
    return mode in TOKEN_WISE_MODES and (fixed or reduction in _TOKEN_WISE_REDUCTIONS)


def _check(config: Any, table: Iterable[Rule], where: str) -> None:
    for path, allowed, reason in table:
        value: Any = config
        for name in path.split("."):
            value = value.get(name) if hasattr(value, "get") else getattr(value, name, None)
        if value not in allowed:
            raise _refused(f"{where}.{path}", value, reason, allowed[-1])


def _refused(key: str, value: Any, reason: str, instead: Any) -> BackendError:
    change = f"remove {key}" if instead is None else f"set {key}={instead}"
    return BackendError(
        f"{key} = {value} is refused: {reason}",
        f"{change} (under actor_rollout_ref.actor or .ref), or run without psRL",
    )
