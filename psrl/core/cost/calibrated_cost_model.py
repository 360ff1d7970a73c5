"""The calibrated cost model: `CostModel` with measured coefficients, stated error and domain."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from psrl.core.plan.plan import Plan

from .calibration import Calibration, Coefficients, load_calibration
from .cluster import Amount, ClusterSpec, ModelSpec, ParallelConfig, pipeline_link
from .collectives import expert_exchange_s, gradient_reduction_s
from .cost_model import CostModel, RooflineCostModel
from .layer_time import ForwardBackward, LayerShape, LayerTime
from .parameters import optimizer_shard, rank_parameters

# Measured ranges end at round numbers by chance: this much beyond them is not worth a warning.
_MARGIN = 1.1


@dataclass(frozen=True)
class CalibratedCostModel:
    """Predicts with a calibration; see `domain_warnings` before believing it.

    psRL's attention keeps no score matrices. What a calibration measured on software that does
    is not used for attention here.
    """

    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig
    calibration: Calibration

    @classmethod
    def from_file(
        cls, path: Path, model: ModelSpec, cluster: ClusterSpec, parallel: ParallelConfig
    ) -> "CalibratedCostModel":
        """Read the calibration.

        Raises:
            ConfigError: see `load_calibration`.
        """
        return cls(model, cluster, parallel, load_calibration(path))

    @cached_property
    def coefficients(self) -> Coefficients:
        chosen = self.calibration.for_hosts(self.cluster.num_hosts)
        if self.calibration.domain.attention != "scores":
            return chosen
        return chosen.model_copy(update={"score_passes": 0.0, "attention_backward_factor": 2.5})

    @cached_property
    def layer_time(self) -> LayerTime:
        tp, dtype_bytes = (
            self.parallel.tensor_model_parallel_size,
            self.cluster.device.dtype_bytes,
        )
        shape = LayerShape.of_model(self.model, tp, dtype_bytes)
        return LayerTime(self.coefficients, self.cluster.device, shape)

    @property
    def layers_per_stage(self) -> int:
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size

    @property
    def _last_stage(self) -> int:
        """The slowest stage: it has as many layers as the others, and the head."""
        return self.parallel.pipeline_model_parallel_size - 1

    def all_reduce_s(self, num_ranks: int, nbytes: Amount, across_hosts: bool) -> Amount:
        """The measured curve, or a ring at the cluster's bandwidth where none was measured."""
        if num_ranks == 1:
            return 0.0 * nbytes
        measured = self.calibration.all_reduce_s(num_ranks, nbytes)
        if measured is not None:
            return measured
        cluster = self.cluster
        rate = cluster.inter_host_bytes_per_s if across_hosts else cluster.intra_host_bytes_per_s
        latency = cluster.inter_host_latency_s if across_hosts else cluster.intra_host_latency_s
        return 2.0 * (num_ranks - 1) / num_ranks * nbytes / rate + latency * np.sign(nbytes)

    def _tensor_parallel_s(self, num_tokens: Amount) -> Amount:
        c, size = self.coefficients, self.parallel.tensor_model_parallel_size
        across = size > self.cluster.devices_per_host
        factor = c.tensor_parallel_across_hosts_factor if across else c.tensor_parallel_factor
        nbytes = num_tokens * self.model.hidden_size * self.cluster.device.dtype_bytes
        return factor * self.all_reduce_s(size, nbytes, across)

    def _layer_s(self, num_tokens: Amount, pairs: Amount) -> ForwardBackward:
        exchange_s = expert_exchange_s(self.model, self.cluster, self.parallel, num_tokens)
        all_reduce_s = self._tensor_parallel_s(num_tokens)
        return self.layer_time.layer_s(num_tokens, pairs, all_reduce_s, exchange_s=exchange_s)

    def layers_forward_s(self, num_tokens: Amount, pairs: Amount) -> Amount:
        """The layers of one stage alone, as layer recompute runs them inside a backward."""
        layer = self._layer_s(num_tokens, pairs)
        return self.layers_per_stage * layer.forward_s

    def stage_forward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        layers = self.layers_forward_s(num_tokens, pairs)
        head = self.layer_time.head_s(head_tokens).forward_s * float(stage == self._last_stage)
        return layers + head + self.coefficients.host_op_s * np.sign(num_tokens)

    def stage_backward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        """The backward proper; recomputation of a layer or a dropped micro-batch is not in it."""
        layer = self._layer_s(num_tokens, pairs)
        head = self.layer_time.head_s(head_tokens).backward_s * float(stage == self._last_stage)
        op_s = self.coefficients.host_op_s * np.sign(num_tokens)
        return self.layers_per_stage * layer.backward_s + head + op_s

    def forward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_forward_s(self._last_stage, num_tokens, pairs, head_tokens)

    def backward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_backward_s(self._last_stage, num_tokens, pairs, head_tokens)

    def message_s(self, num_tokens: Amount) -> Amount:
        link = pipeline_link(self.cluster, self.parallel)
        nbytes = num_tokens * self.model.hidden_size * self.cluster.device.dtype_bytes
        rate = link.bytes_per_s * self.coefficients.message_efficiency
        return nbytes / rate + link.latency_s * np.sign(num_tokens)

    @cached_property
    def rank_parameters(self) -> float:
        """Parameters on one device of the largest (last) stage."""
        return rank_parameters(self.model, self.parallel).total

    def gradient_reduction_s(self) -> float:
        per_parameter = self.coefficients.gradient_bytes_per_parameter
        return gradient_reduction_s(self.model, self.cluster, self.parallel, per_parameter)

    def optimizer_step_s(self) -> float:
        c, device = self.coefficients, self.cluster.device
        moved = c.optimizer_bytes_per_parameter * optimizer_shard(self.model, self.parallel)
        return float(moved / device.memory_bandwidth_bytes_per_s + c.step_s)

    def domain_warnings(
        self, num_tokens: Amount | None = None, pairs: Amount | None = None
    ) -> tuple[str, ...]:
        """One sentence per way in which a prediction leaves what was measured; empty if none.

        Args:
            num_tokens, pairs: of the micro-batches to predict; None to check only model, cluster
                and layout.
        """
        return tuple(self._setup_warnings()) + tuple(self._size_warnings(num_tokens, pairs))

    def _setup_warnings(self) -> Iterator[str]:
        domain, device, parallel = self.calibration.domain, self.cluster.device, self.parallel
        if device.name != domain.device:
            yield f"device {device.name}: the calibration was measured on {domain.device}"
        if device.dtype_bytes != domain.dtype_bytes:
            yield (
                f"working precision of {device.dtype_bytes} bytes: measured with "
                f"{domain.dtype_bytes} bytes"
            )
        if domain.attention == "flash":
            yield "attention: measured on one causal chain per sample, not with psRL's tree kernels"
        if domain.attention == "scores":
            yield (
                "attention: measured with score matrices in memory; psRL's attention is "
                f"predicted at {self.coefficients.attention_efficiency:.2f} of peak, unmeasured"
            )
        if self.model.num_moe_experts:
            yield "mixture of experts: only dense models were measured"
        assumed = self._assumed()
        if assumed:
            yield f"assumed, not measured: {', '.join(assumed)}"
        values = {
            "hidden_size": self.model.hidden_size,
            "layers_per_stage": self.layers_per_stage,
            "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "num_devices": self.cluster.num_devices,
        }
        for name, value in values.items():
            low, high = domain.ranges.get(name, (value, value))
            if not low <= value <= high:
                yield f"{name} = {value:,}: measured from {low:,.0f} to {high:,.0f}"

    def _assumed(self) -> list[str]:
        """Coefficients of this layout that the calibration had to pin."""
        parallel, several = self.parallel, self.cluster.num_hosts > 1
        unused = {
            "tensor_parallel_factor": parallel.tensor_model_parallel_size == 1,
            "host_tensor_parallel_s": parallel.tensor_model_parallel_size == 1,
            "gradient_bytes_per_parameter": parallel.data_parallel_size == 1,
            "tensor_parallel_across_hosts_factor": (
                parallel.tensor_model_parallel_size <= self.cluster.devices_per_host
            ),
        }
        pinned = [
            name
            for name, found in self.calibration.identification.items()
            if found.status == "pinned" and (several or not name.startswith("multi_host."))
        ]
        return [name for name in pinned if not unused.get(name.removeprefix("multi_host."))]

    def _size_warnings(self, num_tokens: Amount | None, pairs: Amount | None) -> Iterator[str]:
        if num_tokens is None:
            return
        tokens = np.atleast_1d(np.asarray(num_tokens, np.float64))
        computed = tokens > 0
        sizes = {"num_tokens": tokens[computed]}
        if pairs is not None:
            keys = np.broadcast_to(np.asarray(pairs, np.float64), tokens.shape)
            sizes["keys_per_query"] = keys[computed] / tokens[computed]
        for name, values in sizes.items():
            low, high = self.calibration.domain.ranges.get(name, (0.0, np.inf))
            outside = (values < low / _MARGIN) | (values > high * _MARGIN)
            if outside.any():
                yield (
                    f"{int(outside.sum())} of {len(values)} micro-batches have {name} from "
                    f"{values[outside].min():,.0f} to {values[outside].max():,.0f}: measured "
                    f"from {low:,.0f} to {high:,.0f}"
                )

    def plan_warnings(self, plan: Plan) -> tuple[str, ...]:
        """`domain_warnings` of all micro-batches of a plan."""
        tables = [program.micro_batches for program in plan.programs]
        if not tables:
            return self.domain_warnings()
        tokens, pairs = (
            np.concatenate([getattr(table, name) for table in tables]).astype(np.float64)
            for name in ("num_tokens", "pairs")
        )
        return self.domain_warnings(tokens, pairs)


def choose_cost_model(
    model: ModelSpec,
    cluster: ClusterSpec,
    parallel: ParallelConfig,
    calibration: Calibration | None,
) -> CostModel:
    """The calibrated cost model, or the roofline where nothing was measured."""
    if calibration is None:
        return RooflineCostModel(model, cluster, parallel)
    return CalibratedCostModel(model, cluster, parallel, calibration)


def prediction_warnings(plan: Plan) -> tuple[str, ...]:
    """How predictions for a plan leave the domain of its calibration.

    None without a calibration: the roofline has no domain, and states no error.
    """
    if plan.calibration is None:
        return ()
    costs = CalibratedCostModel(plan.model, plan.cluster, plan.parallel, plan.calibration)
    return costs.plan_warnings(plan)
