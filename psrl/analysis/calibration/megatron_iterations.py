"""Measured Megatron iterations on A100, and what the cost model says about them.

An iteration of p stages and m micro-batches takes `(m - 1) slowest + (p - 1) stage + slowest`
(1F1B), where the slowest stage has the LM head too, plus gradient reduction and a constant.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from psrl.core.cost.calibration import Coefficients, Curve
from psrl.core.cost.cluster import ClusterSpec
from psrl.core.cost.collectives import ring_s, tensor_parallel_s
from psrl.core.cost.layer_time import LayerShape, LayerTime
from psrl.core.cost.presets import DEVICES
from psrl.core.samples.sample import FloatArray, IntArray

from .least_squares import Values
from .nccl import read_curves
from .tables import read_table

COLUMNS = (
    "num_devices",
    "global_batch",
    "micro_batch",
    "hidden_size",
    "num_attention_heads",
    "num_layers",
    "seq_length",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "pipeline_model_parallel_size",
    "iteration_s",
)
MULTI_HOST = "multi_host."
"""Prefix of coefficients that belong to clusters of several hosts."""
DEVICE = DEVICES["a100-40"]
_HOST_DEVICES = 8
_VOCAB_SIZE = 50304
_BASE = Coefficients(
    gemm_efficiency=0.75,
    attention_efficiency=0.5,
    attention_backward_factor=2.0,
    score_passes=6.0,
    replicated_passes=10.0,
    sharded_passes=14.0,
    head_passes=2.0,
    weight_passes=1.25,
    host_layer_s=0.5e-3,
    gradient_bytes_per_parameter=4.0,
    optimizer_bytes_per_parameter=0.0,
)


@dataclass(frozen=True)
class Iterations:
    """Measured iterations as columns; `multi_host` says which of the two clusters ran them."""

    table: pd.DataFrame
    multi_host: np.ndarray
    all_reduce: dict[str, Curve]

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> FloatArray:
        """One column as floats."""
        return self.table[name].to_numpy(np.float64)

    def rows(self, index: IntArray | np.ndarray) -> "Iterations":
        """The chosen rows."""
        return Iterations(
            self.table.iloc[index].reset_index(drop=True), self.multi_host[index], self.all_reduce
        )

    @property
    def num_tokens(self) -> FloatArray:
        """[rows] tokens of a micro-batch."""
        return self.column("micro_batch") * self.column("seq_length")

    @cached_property
    def measured_s(self) -> FloatArray:
        return self.column("iteration_s")


def read_iterations(folder: Path, nccl_folder: Path) -> Iterations:
    """Read single_node.csv and multi_node.csv, and the all-reduce curves.

    Raises:
        ConfigError: if a table is missing or malformed.
    """
    parts = [read_table(folder / f"{name}_node.csv", COLUMNS) for name in ("single", "multi")]
    multi_host = np.repeat([False, True], [len(part) for part in parts])
    curves = read_curves(nccl_folder / "all_reduce.csv")
    return Iterations(pd.concat(parts, ignore_index=True), multi_host, curves)


def predict_iterations_s(data: Iterations, values: Values) -> FloatArray:
    """Seconds of every iteration under coefficients named as in `CANDIDATES`."""
    single, multi = coefficients_of(values)
    predicted_s = np.zeros(len(data))
    for chosen, coefficients, num_hosts in (
        (~data.multi_host, single, 1),
        (data.multi_host, Coefficients.model_validate(single.model_dump() | multi), 64),
    ):
        if chosen.any():
            part = data.rows(np.flatnonzero(chosen))
            predicted_s[chosen] = _iteration_s(part, coefficients, _cluster(num_hosts))
    return predicted_s


def coefficients_of(values: Values) -> tuple[Coefficients, dict[str, float]]:
    """Coefficients of one host, and those that differ on several."""
    multi = {k.removeprefix(MULTI_HOST): v for k, v in values.items() if k.startswith(MULTI_HOST)}
    single = {k: v for k, v in values.items() if not k.startswith(MULTI_HOST)}
    return _BASE.model_copy(update=single), multi


def _cluster(num_hosts: int) -> ClusterSpec:
    return ClusterSpec(
        device=DEVICE,
        num_hosts=num_hosts,
        devices_per_host=_HOST_DEVICES,
        intra_host_bytes_per_s=300e9,
        inter_host_bytes_per_s=25e9,
        intra_host_latency_s=0.0,
        inter_host_latency_s=0.0,
    )


def _iteration_s(data: Iterations, c: Coefficients, cluster: ClusterSpec) -> FloatArray:
    hidden, heads, layers, seq = (
        data.column(name)
        for name in ("hidden_size", "num_attention_heads", "num_layers", "seq_length")
    )
    tp, dp, pp = (
        data.column(f"{kind}_size")
        for kind in ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
    )
    micro_batch = data.column("micro_batch")
    num_tokens = data.num_tokens
    num_micro_batches = data.column("global_batch") / (micro_batch * dp)
    shape = LayerShape(
        hidden_size=hidden,
        projections=((3 * hidden / tp, hidden), (hidden, hidden / tp)),
        mlp=((4 * hidden / tp, hidden), (hidden, 4 * hidden / tp)),
        attention_width=hidden / tp,
        num_heads=heads / tp,
        vocab_size=_VOCAB_SIZE / tp,
        tensor_parallel_size=tp,
        dtype_bytes=DEVICE.dtype_bytes,
        parameters=12 * hidden**2 / tp,
    )
    time = LayerTime(c, DEVICE, shape)
    # Megatron's fused softmax wants a multiple of four score matrices.
    unfused_s = c.host_unfused_s * ((micro_batch * heads / tp) % 4 != 0)
    communication_s, nbytes = np.zeros(len(data)), num_tokens * hidden * DEVICE.dtype_bytes
    for size in np.unique(tp[tp > 1]).astype(int).tolist():
        rows = tp == size
        communication_s[rows] = tensor_parallel_s(cluster, size, nbytes[rows], c, data.all_reduce)
    layer = time.layer_s(num_tokens, num_tokens * seq, communication_s, unfused_s)
    head = time.head_s(num_tokens)
    # Full recompute: one row could not fit its score matrices otherwise. This head keeps its
    # logits: forward and backward together are what psRL's head does in its backward alone.
    stage_s = layers / pp * (2.0 * layer.forward_s + layer.backward_s)
    crosses = (cluster.num_hosts > 1) & (tp * dp >= cluster.devices_per_host)
    rate = np.where(crosses, cluster.inter_host_bytes_per_s, cluster.intra_host_bytes_per_s)
    message_bytes = num_tokens * hidden * DEVICE.dtype_bytes / tp
    hop_s = 2.0 * message_bytes / (rate * c.message_efficiency) * (pp > 1)
    slowest_s = stage_s + hop_s + head.backward_s
    pipeline_s = num_micro_batches * slowest_s + (pp - 1) * (stage_s + hop_s)
    parameters = (12 * hidden**2 * layers / pp + _VOCAB_SIZE * hidden) / tp
    reduction_s = ring_s(cluster, c.gradient_bytes_per_parameter * parameters, tp, dp)
    return np.asarray(pipeline_s + reduction_s + c.step_s, np.float64)
