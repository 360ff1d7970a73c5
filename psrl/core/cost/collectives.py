"""Time of collectives by the links that they cross: rings of equal weights, exchange of experts."""

import numpy as np

from .cluster import Amount, ClusterSpec, ModelSpec, ParallelConfig, reduction_crosses_hosts
from .parameters import expert_data_parallel_size, rank_parameters

# Dispatch before the experts, combine behind them; the backward sends the gradients of both.
_EXCHANGES_PER_DIRECTION = 2


def gradient_reduction_s(
    model: ModelSpec, cluster: ClusterSpec, parallel: ParallelConfig, bytes_per_parameter: float
) -> float:
    """A ring for dense weights; after it one for experts, over the ranks that hold the same ones.

    Args:
        bytes_per_parameter: of its gradient and of the updated weight.
    """
    dense, expert = rank_parameters(model, parallel)
    tensor, data = parallel.tensor_model_parallel_size, parallel.data_parallel_size
    reduction_s = float(ring_s(cluster, bytes_per_parameter * dense, tensor, data))
    if expert:
        stride, size = parallel.expert_model_parallel_size, expert_data_parallel_size(parallel)
        reduction_s += float(ring_s(cluster, bytes_per_parameter * expert, stride, size))
    return reduction_s


def ring_s(cluster: ClusterSpec, nbytes: Amount, stride: Amount, size: Amount) -> Amount:
    """Reduce-scatter and all-gather of every device's `nbytes` together; 0 for a single device.

    Across hosts, the devices of a ring that share a host use all of their network ports, as far
    as the links inside the host keep up.

    Args:
        stride, size: see `reduction_crosses_hosts`.
    """
    per_host = np.minimum(size, np.maximum(1, cluster.devices_per_host // np.asarray(stride)))
    across = reduction_crosses_hosts(cluster, stride, size)
    inside_rate = cluster.intra_host_bytes_per_s
    across_rate = np.minimum(cluster.inter_host_bytes_per_s * per_host, inside_rate)
    rate = np.where(across, across_rate, inside_rate)
    latency = np.where(across, cluster.inter_host_latency_s, cluster.intra_host_latency_s)
    time: Amount = ((size - 1) / size * nbytes / rate + 2.0 * latency) * np.greater(size, 1)
    return time


def expert_exchange_s(
    model: ModelSpec, cluster: ClusterSpec, parallel: ParallelConfig, num_tokens: Amount
) -> Amount:
    """Time of a layer's two all-to-alls in one direction; 0 without expert parallelism.

    Megatron's all-to-all dispatcher without capacity limits: a computed token travels to the
    ranks of its top-k experts and back. A shared token is computed and so routed once, whatever
    its logical multiplicity. Experts are taken as equally loaded.

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
