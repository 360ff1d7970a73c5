"""Experts spread over ranks: the exchange of tokens in every layer, and whose weights are where.

Megatron's all-to-all dispatcher without capacity limits: a computed token travels to the ranks of
its top-k experts and back, in both directions of a layer. A shared token is computed and so
routed once, whatever its logical multiplicity. Experts are taken as equally loaded.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .cluster import ClusterSpec, ModelSpec, ParallelConfig

Amount = npt.NDArray[np.float64] | float

# Dispatch before the experts, combine behind them; the backward sends the gradients of both.
_EXCHANGES_PER_DIRECTION = 2


class RankParameters(NamedTuple):
    """Parameters on one device of the largest (last) pipeline stage.

    Attributes:
        dense: attention, norms, routers or MLPs, and embeddings; of all data-parallel ranks.
        expert: weights of the rank's own experts; of `expert_data_parallel_size` ranks.
    """

    dense: float
    expert: float

    @property
    def total(self) -> float:
        return self.dense + self.expert


def rank_parameters(model: ModelSpec, parallel: ParallelConfig) -> RankParameters:
    """Dense weights are divided by tensor parallelism, experts by expert parallelism alone."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    experts = model.num_moe_experts * 3 * model.hidden_size * model.moe_ffn_hidden_size
    layers = model.num_layers / pp * (model.attention_parameters + model.mlp_parameters - experts)
    heads = model.embedding_parameters * (2 if pp == 1 and not model.tied_embeddings else 1)
    own = model.num_layers / pp * experts / parallel.expert_model_parallel_size
    return RankParameters((layers + heads) / tp, own)


def expert_data_parallel_size(parallel: ParallelConfig) -> int:
    """Ranks of a stage that hold the same experts, and so reduce and shard them together."""
    devices = parallel.tensor_model_parallel_size * parallel.data_parallel_size
    return devices // parallel.expert_model_parallel_size


def optimizer_shard(model: ModelSpec, parallel: ParallelConfig) -> float:
    """Parameters whose optimizer states one device keeps (Megatron's distributed optimizer)."""
    dense, expert = rank_parameters(model, parallel)
    return dense / parallel.data_parallel_size + expert / expert_data_parallel_size(parallel)


def expert_exchange_s(
    model: ModelSpec, cluster: ClusterSpec, parallel: ParallelConfig, num_tokens: Amount
) -> Amount:
    """Time of a layer's two all-to-alls in one direction; 0 without expert parallelism.

    Alpha-beta: latency, plus the bytes of one device over its link. Of the E devices of a group,
    which are neighbours, the h on one host exchange inside it; the two links work side by side.

    Args:
        num_tokens: of a micro-batch; sequence parallelism gives each tensor-parallel rank its
            share.
    """
    size = parallel.expert_model_parallel_size
    if size == 1:
        return 0.0 * num_tokens
    on_host = min(size, cluster.devices_per_host)
    rows = num_tokens / parallel.tensor_model_parallel_size * model.moe_topk
    nbytes = rows * model.hidden_size * cluster.device.dtype_bytes
    inside_s = nbytes * (on_host - 1) / size / cluster.intra_host_bytes_per_s
    across_s = nbytes * (size - on_host) / size / cluster.inter_host_bytes_per_s
    crosses = size > on_host
    latency_s = cluster.inter_host_latency_s if crosses else cluster.intra_host_latency_s
    one = np.maximum(inside_s, across_s) + latency_s * np.sign(num_tokens)
    exchanges: Amount = _EXCHANGES_PER_DIRECTION * one
    return exchanges
