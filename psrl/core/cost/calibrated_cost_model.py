"""The calibrated cost model: `CostModel` with measured coefficients, stated error and domain."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from psrl.core.plan.plan import Plan

from .calibration import Calibration, Coefficients, Curve, load_calibration
from .cluster import Amount, ClusterSpec, ModelSpec, ParallelConfig, group_crosses_hosts
from .cost_model import RooflineCostModel
from .layer_time import Term

# Measured ranges end at round numbers by chance: this much beyond them is not worth a warning.
_MARGIN = 1.1


@dataclass(frozen=True)
class CalibratedCostModel(RooflineCostModel):
    """Predicts with a calibration; see `domain_warnings` before believing it.

    A calibration measured on Megatron's own GPT has score matrices in memory and products that
    add into main gradients. psRL has neither: its attention and its accumulation are predicted
    from the data sheet then.
    """

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
        sheet = Coefficients.of_device(self.cluster.device)
        own = ("score_passes", "attention_backward_factor", "accumulation_bytes_per_parameter")
        return chosen.model_copy(update={name: getattr(sheet, name) for name in own})

    @property
    def _curves(self) -> Mapping[str, Curve]:
        return self.calibration.all_reduce

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
            yield "accumulation: measured inside the products, predicted from the data sheet"
        elif not self.coefficients.accumulation_bytes_per_parameter:
            yield (
                "accumulation: the calibration says that main gradients cost nothing, or is from "
                "before psRL asked; make it again with `psrl calibrate`"
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
            "tensor_parallel_across_hosts_factor": not group_crosses_hosts(
                self.cluster, 1, parallel.tensor_model_parallel_size
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
    without: frozenset[Term] = frozenset(),
) -> RooflineCostModel:
    """The calibrated cost model, or the roofline where nothing was measured.

    Args:
        without: terms that cost nothing.
    """
    if calibration is None:
        return RooflineCostModel(model, cluster, parallel, without=without)
    return CalibratedCostModel(model, cluster, parallel, calibration, without=without)


def prediction_warnings(plan: Plan) -> tuple[str, ...]:
    """How predictions for a plan leave the domain of its calibration.

    None without a calibration: the roofline has no domain, and states no error.
    """
    if plan.calibration is None:
        return ()
    costs = CalibratedCostModel(plan.model, plan.cluster, plan.parallel, plan.calibration)
    return costs.plan_warnings(plan)
