"""How long the ranks wait for the gradient reduction when part of it is overlapped."""

from dataclasses import dataclass

import numpy as np

from psrl.core.cost.cost_model import CostModel
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import FloatArray
from psrl.sim.options import SimOptions, gradient_buckets, reduce_scatter_share


@dataclass(frozen=True)
class Reduction:
    """Durations of what follows an update program's last op.

    Attributes:
        reduction_s: of the whole gradient reduction, nothing overlapped.
        step_s: of the optimizer step.
        num_buckets: buckets that are reduced as soon as they are ready; 0 for no overlap.
        scatter_share: share of the reduction that can be overlapped.
    """

    reduction_s: float
    step_s: float
    num_buckets: int
    scatter_share: float

    @classmethod
    def of(cls, plan: Plan, costs: CostModel, options: SimOptions) -> "Reduction":
        overlaps = options.overlap_gradient_reduction
        return cls(
            reduction_s=costs.gradient_reduction_s(),
            step_s=costs.optimizer_step_s(),
            num_buckets=gradient_buckets(plan) if overlaps else 0,
            scatter_share=reduce_scatter_share(plan),
        )

    def exposed_s(self, start_s: FloatArray, end_s: FloatArray) -> float:
        """Time from the arrival of the last worker to the end of the reduction.

        Bucket b of B is ready on a rank when the share b / B of its last backward is done. A
        stage reduces its buckets one after the other, each once it is ready on all ranks.

        Args:
            start_s, end_s: [P, K] last op of each worker; equal where it had none.
        """
        if not self.num_buckets:
            return self.reduction_s
        arrival_s = float(end_s.max())
        scatter_s = self.reduction_s * self.scatter_share
        done_s = np.zeros(len(end_s))
        for bucket in range(1, self.num_buckets + 1):
            left = 1.0 - bucket / self.num_buckets
            ready_s = (end_s - left * (end_s - start_s)).max(axis=1)
            done_s = np.maximum(done_s, ready_s) + scatter_s / self.num_buckets
        waits_s = max(float(done_s.max()) - arrival_s, 0.0)
        return waits_s + self.reduction_s * (1.0 - self.scatter_share)
