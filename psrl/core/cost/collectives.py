"""What communication takes by the links that it crosses: rings, all-to-alls, pipeline messages."""

from collections.abc import Mapping

import numpy as np

from .calibration import Coefficients, Curve
from .cluster import (
    Amount,
    ClusterSpec,
    ModelSpec,
    ParallelConfig,
    group_crosses_hosts,
    pipeline_link,
)
from .parameters import expert_data_parallel_size, rank_parameters

# Dispatch before the experts, combine behind them; the backward sends the gradients of both.
_EXCHANGES_PER_DIRECTION = 2


def ring_s(cluster: ClusterSpec, nbytes: Amount, stride: Amount, size: Amount) -> Amount:
    """Reduce-scatter and all-gather of every device's `nbytes` together; 0 for a single device.

    A ring runs at the rate of its slowest link. Across hosts, the devices of a ring that share a
    host use all of their network ports, as far as the links inside the host keep up; the host with
    the fewest of them sets the pace. Each half waits once for the latency of the slowest link.

    Args:
        stride, size: see `group_crosses_hosts`.
    """
    run = np.asarray(stride) * size
    # Runs start at multiples of their length, so a host's part of one is a multiple of the gcd.
    part = np.gcd(np.asarray(run, np.int64), cluster.devices_per_host)
    per_host = np.minimum(size, np.maximum(1, part // np.asarray(stride)))
    across = group_crosses_hosts(cluster, stride, size)
    inside_rate = cluster.intra_host_bytes_per_s
    across_rate = np.minimum(cluster.inter_host_bytes_per_s * per_host, inside_rate)
    rate = np.where(across, across_rate, inside_rate)
    latency = np.where(across, cluster.inter_host_latency_s, cluster.intra_host_latency_s)
    time: Amount = ((size - 1) / size * nbytes / rate + 2.0 * latency) * np.greater(size, 1)
    return time


def tensor_parallel_s(
    cluster: ClusterSpec,
    size: int,
    nbytes: Amount,
    c: Coefficients,
    curves: Mapping[str, Curve] | None = None,
) -> Amount:
    """An all-reduce of every device's `nbytes` over `size` neighbouring devices.

    With sequence parallelism an all-gather and a reduce-scatter move the same bytes. (The second
    all-gather of a layer's input, in its backward, overlaps with the products.)

    Args:
        curves: measured inside a host, or as far as a host goes: a ring is used where there is
            none, and wherever a group crosses hosts if it is slower.
    """
    if size == 1:
        return 0.0 * nbytes
    latency_s = float(ring_s(cluster, 0.0, 1, size))
    per_byte_s = float(ring_s(cluster, 2.0, 1, size)) - latency_s
    across = bool(group_crosses_hosts(cluster, 1, size))
    factor = c.tensor_parallel_across_hosts_factor if across else c.tensor_parallel_factor
    time: Amount = nbytes * per_byte_s + latency_s * np.sign(nbytes)
    if curves:
        nearest = min(curves, key=lambda name: abs(np.log(int(name) / size)))
        measured_s = curves[nearest].time_s(nbytes)
        time = np.maximum(measured_s, time) if across else measured_s
    return factor * time


def gradient_reduction_s(
    model: ModelSpec, cluster: ClusterSpec, parallel: ParallelConfig, bytes_per_parameter: float
) -> float:
    """Time to sum gradients and to gather new weights over the ranks of equal weights.

    A ring for dense weights; after it one for experts, over the ranks that hold the same ones.

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


def expert_exchange_line(
    model: ModelSpec, cluster: ClusterSpec, parallel: ParallelConfig
) -> tuple[float, float]:
    """Seconds per token, and per micro-batch, of a layer's two all-to-alls in one direction.

    Megatron's all-to-all dispatcher without capacity limits: a computed token travels to the
    ranks of its top-k experts and back. A shared token is computed and so routed once, whatever
    its logical multiplicity. Experts are taken as equally loaded.

    Alpha-beta: latency, plus the bytes of one device over its link. Of the E devices of a group,
    which are neighbours, the h on one host exchange inside it; the two links work side by side.
    Sequence parallelism gives each tensor-parallel rank its share of the tokens. Zero without
    expert parallelism.
    """
    size = parallel.expert_model_parallel_size
    if size == 1:
        return 0.0, 0.0
    on_host = min(size, cluster.devices_per_host)
    row_bytes = model.moe_topk * model.hidden_size * cluster.device.dtype_bytes
    nbytes = row_bytes / parallel.tensor_model_parallel_size
    inside_s = nbytes * (on_host - 1) / size / cluster.intra_host_bytes_per_s
    across_s = nbytes * (size - on_host) / size / cluster.inter_host_bytes_per_s
    crosses = size > on_host
    latency_s = cluster.inter_host_latency_s if crosses else cluster.intra_host_latency_s
    both = _EXCHANGES_PER_DIRECTION
    return both * max(inside_s, across_s), both * latency_s


def message_s(
    model: ModelSpec,
    cluster: ClusterSpec,
    parallel: ParallelConfig,
    num_tokens: Amount,
    efficiency: float = 1.0,
) -> Amount:
    """Hidden states of one micro-batch to a neighbouring stage, over the slowest link on the way.

    Every tensor-parallel rank sends over its own link: all rows, or with sequence parallelism its
    own ones.

    Args:
        efficiency: share of the link's bandwidth.
    """
    link = pipeline_link(cluster, parallel)
    row_bytes = model.hidden_size * cluster.device.dtype_bytes / parallel.sequence_shards
    per_token_s = row_bytes / (link.bytes_per_s * efficiency)
    time: Amount = num_tokens * per_token_s + link.latency_s * np.sign(num_tokens)
    return time
