"""Time to sum gradients and to gather new weights over the ranks of equal weights."""

import numpy as np

from .cluster import ClusterSpec, ModelSpec, ParallelConfig, reduction_crosses_hosts
from .expert_parallel import Amount, expert_data_parallel_size, rank_parameters


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
