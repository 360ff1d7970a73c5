"""What a simulation may vary besides the plan, and which engine replays it."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from psrl.core.cost.cost_model import CostModel, RooflineCostModel
from psrl.core.errors import ConfigError
from psrl.core.plan.clock import Reduction
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import FloatArray

Engine = Literal["simpy", "vectorised"]

LARGE_PLAN_OPS = 50_000
"""From this many ops on, "auto" takes the vectorised engine: SimPy would take seconds."""

# Megatron's default bucket: the larger of 40 million parameters and a million per rank.
_BUCKET_PARAMETERS = 40_000_000
_BUCKET_PARAMETERS_PER_RANK = 1_000_000
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class SimOptions:
    """Departures from an ideal cluster, and the choice of the engine.

    Attributes:
        engine: "auto" replays on SimPy unless the plan is large; both give the same events.
        slow_ranks: data-parallel rank -> factor on the time of its ops, e.g. {3: 1.2}.
        nics_per_host: network ports that the devices of a host share for pipeline messages to
            other hosts, first come, first served; None gives every device its own.
        overlap_gradient_reduction: reduce finished buckets during the last backward (Megatron's
            `overlap_grad_reduce`); the gather of the new weights stays where it is.
    """

    engine: Literal["auto", "simpy", "vectorised"] = "auto"
    slow_ranks: dict[int, float] = field(default_factory=dict)
    nics_per_host: int | None = None
    overlap_gradient_reduction: bool = False


def chosen_engine(plan: Plan, options: SimOptions) -> Engine:
    """The engine that `simulate` replays a plan on.

    Raises:
        ConfigError: if the options contradict each other or the plan's layout.
    """
    _check_options(plan, options)
    if options.engine != "auto":
        return options.engine
    is_large = plan_ops(plan) >= LARGE_PLAN_OPS and options.nics_per_host is None
    return "vectorised" if is_large else "simpy"


def plan_ops(plan: Plan) -> int:
    """Ops of all programs on all ranks and stages."""
    num_stages = plan.parallel.pipeline_model_parallel_size
    return num_stages * sum(len(program.schedule) for program in plan.programs)


def _check_options(plan: Plan, options: SimOptions) -> None:
    for rank, factor in options.slow_ranks.items():
        if not 0 <= rank < plan.num_ranks or not factor > 0:
            raise ConfigError(
                f"slow rank {rank} with factor {factor}: the plan has ranks 0.."
                f"{plan.num_ranks - 1}, and a factor is positive"
            )
    nics, devices = options.nics_per_host, plan.cluster.devices_per_host
    if nics is None:
        return
    if nics < 1 or devices % nics:
        raise ConfigError(
            f"{nics} network ports cannot be shared evenly by {devices} devices per host",
            f"choose a divisor of {devices}",
        )
    if options.engine == "vectorised":
        raise ConfigError(
            "shared network ports serve messages in the order of time, which only SimPy replays",
            "leave the engine at auto or simpy",
        )


def gradient_buckets(plan: Plan) -> int:
    """Buckets in which Megatron reduces the gradients of a stage."""
    parameters = RooflineCostModel(plan.model, plan.cluster, plan.parallel).rank_parameters
    bucket = max(_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * plan.num_ranks)
    return max(1, round(parameters / bucket))


def reduce_scatter_share(plan: Plan) -> float:
    """Share of a gradient reduction that sums fp32 gradients; the rest gathers new weights."""
    return _GRADIENT_BYTES / (_GRADIENT_BYTES + plan.cluster.device.dtype_bytes)


@dataclass(frozen=True)
class OverlappedReduction(Reduction):
    """A reduction whose finished buckets are summed during the last backward.

    Attributes:
        num_buckets: buckets that are reduced as soon as they are ready.
        scatter_share: share of the reduction that can be overlapped.
    """

    num_buckets: int
    scatter_share: float

    def exposed_s(self, start_s: FloatArray, end_s: FloatArray) -> float:
        """Bucket b of B is ready on a rank when the share b / B of its last backward is done.

        A stage reduces its buckets one after the other, each once it is ready on all ranks.
        """
        arrival_s = float(end_s.max())
        scatter_s = self.reduction_s * self.scatter_share
        done_s = np.zeros(len(end_s))
        for bucket in range(1, self.num_buckets + 1):
            left = 1.0 - bucket / self.num_buckets
            ready_s = (end_s - left * (end_s - start_s)).max(axis=1)
            done_s = np.maximum(done_s, ready_s) + scatter_s / self.num_buckets
        waits_s = max(float(done_s.max()) - arrival_s, 0.0)
        return waits_s + self.reduction_s * (1.0 - self.scatter_share)


def chosen_reduction(plan: Plan, costs: CostModel, options: SimOptions) -> Reduction:
    """What follows the ops of an update."""
    reduction_s, step_s = costs.gradient_reduction_s(), costs.optimizer_step_s()
    if not options.overlap_gradient_reduction:
        return Reduction(reduction_s, step_s)
    share = reduce_scatter_share(plan)
    return OverlappedReduction(reduction_s, step_s, gradient_buckets(plan), share)
