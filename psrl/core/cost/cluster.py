"""Model, device, cluster and parallel layout: frozen specifications with divisibility checks."""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from psrl.core.errors import ConfigError

Amount = npt.NDArray[np.float64] | float
"""One number, or an array of them."""


class Spec(BaseModel):
    """Base of all specifications: frozen, finite numbers not coerced from text, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelSpec(Spec):
    """Shape of a decoder-only transformer (Megatron's names)."""

    name: str
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_query_groups: int = Field(ge=1)
    kv_channels: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    tied_embeddings: bool = False
    qkv_bias: bool = True
    qk_layernorm: bool = False
    rotary_base: float = Field(default=1e6, gt=0)
    norm_epsilon: float = Field(default=1e-6, gt=0)
    num_moe_experts: int = Field(default=0, ge=0)
    moe_topk: int = Field(default=0, ge=0)
    moe_ffn_hidden_size: int = Field(default=0, ge=0)

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_width(self) -> int:
        """Width of K (or V) of all groups together."""
        return self.num_query_groups * self.kv_channels

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention projections and its two norms."""
        projections = self.hidden_size * (2 * self.attention_width + 2 * self.kv_width)
        bias = self.attention_width + 2 * self.kv_width if self.qkv_bias else 0
        qk_norm = 2 * self.kv_channels if self.qk_layernorm else 0
        return projections + bias + qk_norm + 2 * self.hidden_size

    @property
    def mlp_parameters(self) -> int:
        """Weights of one layer's SwiGLU MLP, or of all its experts and the router."""
        if not self.num_moe_experts:
            return 3 * self.hidden_size * self.ffn_hidden_size
        expert = 3 * self.hidden_size * self.moe_ffn_hidden_size
        return self.num_moe_experts * expert + self.hidden_size * self.num_moe_experts

    @property
    def active_layer_parameters(self) -> int:
        """Weights of one layer that one token multiplies with."""
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        if self.num_moe_experts:
            mlp = self.moe_topk * 3 * self.hidden_size * self.moe_ffn_hidden_size
        return self.attention_parameters + mlp

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        layers = self.num_layers * (self.attention_parameters + self.mlp_parameters)
        heads = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return layers + heads + self.hidden_size


class DeviceSpec(Spec):
    """One accelerator: data-sheet peaks, and the share of them that kernels reach."""

    name: str
    peak_flops_per_s: float = Field(gt=0)
    memory_bytes: int = Field(gt=0)
    memory_bandwidth_bytes_per_s: float = Field(gt=0)
    gemm_efficiency: float = Field(gt=0, le=1)
    attention_efficiency: float = Field(gt=0, le=1)
    bandwidth_efficiency: float = Field(default=0.8, gt=0, le=1)
    host_layer_s: float = Field(
        ge=0, description="host time to launch one layer's forward; the backward takes twice that"
    )
    host_overlaps: bool = Field(
        default=True,
        description="the host launches while the device computes; false if the host computes",
    )
    dtype_bytes: int = Field(default=2, ge=2, le=8)

    @property
    def join_exponent(self) -> float:
        """Of the norm that joins host and device time of a layer: a smooth maximum, or the sum."""
        return 8.0 if self.host_overlaps else 1.0


class ClusterSpec(Spec):
    """Hosts of equal devices; bandwidths are per device and direction."""

    device: DeviceSpec
    num_hosts: int = Field(ge=1)
    devices_per_host: int = Field(ge=1)
    intra_host_bytes_per_s: float = Field(gt=0)
    inter_host_bytes_per_s: float = Field(gt=0)
    intra_host_latency_s: float = Field(ge=0)
    inter_host_latency_s: float = Field(ge=0)

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host


RecomputeMode = Literal["none", "full"]


class ParallelConfig(Spec):
    """Parallel sizes (Megatron's names) and activation recomputation of the whole run.

    `expert_model_parallel_size` adds no devices: an expert-parallel group is a run of
    neighbouring ranks of one pipeline stage, tensor-parallel ranks first, then data-parallel
    ones. An expert is never split over tensor-parallel ranks.
    """

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    expert_model_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    recompute: RecomputeMode = "none"

    @property
    def world_size(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.data_parallel_size
        )

    @property
    def sequence_shards(self) -> int:
        """Tensor-parallel ranks among which sequence parallelism divides the rows of a layer."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def coupled_ranks(self) -> int:
        """Neighbouring data-parallel ranks that share experts and so run one op pattern."""
        return max(1, self.expert_model_parallel_size // self.tensor_model_parallel_size)


class LinkSpec(NamedTuple):
    """One direction of a connection, as one device sees it."""

    bytes_per_s: float
    latency_s: float


def first_device(parallel: ParallelConfig, rank: int, stage: int) -> int:
    """Global number of the first tensor-parallel rank of a stage of a data-parallel rank.

    Megatron's order: tensor-parallel ranks are neighbours, then data-parallel ranks (expert- and
    context-parallel groups are runs of both), then stages; so the neighbouring stage is
    `world_size / pipeline_model_parallel_size` devices away.
    """
    tensor, data = parallel.tensor_model_parallel_size, parallel.data_parallel_size
    return tensor * (rank + data * stage)


def pipeline_link(cluster: ClusterSpec, parallel: ParallelConfig) -> LinkSpec:
    """What messages between pipeline stages travel on: the slowest link on their way.

    Stages come last in `first_device`, so as soon as the layout needs several hosts some
    neighbouring stages sit on different ones, and that pair sets the pace of the pipeline.
    """
    if parallel.world_size > cluster.devices_per_host:
        return LinkSpec(cluster.inter_host_bytes_per_s, cluster.inter_host_latency_s)
    return LinkSpec(cluster.intra_host_bytes_per_s, cluster.intra_host_latency_s)


def group_crosses_hosts(
    cluster: ClusterSpec, stride: npt.ArrayLike, size: npt.ArrayLike
) -> npt.NDArray[np.bool_]:
    """Whether some group of devices that communicate has members on different hosts.

    In the order of `first_device` a stage is divided into runs of `stride * size` neighbours, and
    each group has every `stride`-th of a run. Hosts of whole runs divide no group. Otherwise, in a
    layout that fills the cluster, the first host ends inside a run; wherever a run is cut, one of
    its groups has its first member before the cut and its last behind it.

    Args:
        stride: 1 for tensor-parallel groups, tensor-parallel size for the groups that reduce dense
            weights (data-parallel), expert-parallel size for those that reduce experts
            (expert-data-parallel).
        size: devices of a group.
    """
    is_divided = np.mod(cluster.devices_per_host, np.multiply(stride, size)) != 0
    return np.asarray((cluster.num_hosts > 1) & np.greater(size, 1) & is_divided)


def check_layout(model: ModelSpec, cluster: ClusterSpec, parallel: ParallelConfig) -> None:
    """Check that the parallel sizes fill the cluster and divide the model.

    Raises:
        ConfigError: with the arithmetic.
    """
    tp, pp, dp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
    )
    if parallel.world_size != cluster.num_devices:
        raise ConfigError(
            f"parallel sizes tensor({tp}) * pipeline({pp}) * data({dp}) = {parallel.world_size}, "
            f"but the cluster has {cluster.num_hosts} host(s) * {cluster.devices_per_host} = "
            f"{cluster.num_devices} devices",
            "change [parallel] or [cluster] until the products agree",
        )
    if pp > model.num_layers:
        raise ConfigError(
            f"{model.name} has {model.num_layers} layers, fewer than its {pp} pipeline stages",
            f"choose a pipeline parallel size that divides {model.num_layers}",
        )
    ep = parallel.expert_model_parallel_size
    for size, kind, name, what in (
        (tp, "tensor", "num_query_groups", model.num_query_groups),
        (tp, "tensor", "num_attention_heads", model.num_attention_heads),
        (tp, "tensor", "ffn_hidden_size", 0 if model.num_moe_experts else model.ffn_hidden_size),
        (tp, "tensor", "vocab_size", model.vocab_size),
        (pp, "pipeline", "num_layers", model.num_layers),
        (ep, "expert", "num_moe_experts", model.num_moe_experts),
    ):
        if what % size:
            raise ConfigError(
                f"{model.name}: {name} ({what}) is not divisible by "
                f"{kind}_model_parallel_size ({size})",
                f"choose a {kind} parallel size that divides {what}",
            )
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"{model.name}: num_attention_heads ({model.num_attention_heads}) is not a multiple "
            f"of num_query_groups ({model.num_query_groups})"
        )
    _check_experts(model, parallel)


def _check_experts(model: ModelSpec, parallel: ParallelConfig) -> None:
    tp, dp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.data_parallel_size,
        parallel.expert_model_parallel_size,
    )
    if not model.num_moe_experts:
        if ep > 1:
            raise ConfigError(
                f"{model.name} has no experts, but expert_model_parallel_size is {ep}",
                "set expert_model_parallel_size to 1, or choose a mixture-of-experts model",
            )
        if model.moe_topk or model.moe_ffn_hidden_size:
            raise ConfigError(
                f"{model.name} has num_moe_experts 0, but moe_topk {model.moe_topk} and "
                f"moe_ffn_hidden_size {model.moe_ffn_hidden_size}",
                "a dense model sets all three to 0, a mixture of experts none of them",
            )
        return
    if not 0 < model.moe_topk <= model.num_moe_experts:
        raise ConfigError(
            f"{model.name}: moe_topk ({model.moe_topk}) must lie in 1..{model.num_moe_experts}"
        )
    if not model.moe_ffn_hidden_size:
        raise ConfigError(
            f"{model.name}: {model.num_moe_experts} experts with moe_ffn_hidden_size 0",
            "set moe_ffn_hidden_size to the width of one expert",
        )
    if tp * dp % ep or (ep % tp and tp % ep):
        raise ConfigError(
            f"expert_model_parallel_size ({ep}) must divide tensor({tp}) * data({dp}) = {tp * dp} "
            "and be a multiple or a divisor of the tensor parallel size",
            "experts are spread over the tensor- and data-parallel ranks of a stage",
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"{model.name} has experts and tensor_model_parallel_size is {tp}: this needs "
            "sequence_parallel",
            "without it every tensor-parallel rank would route all tokens; set sequence_parallel",
        )
