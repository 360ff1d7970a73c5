"""What a policy decides on: the samples of an iteration, the set-up, and what may be shared."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.cost_model import CostModel
from psrl.core.cost.layer_time import Term
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.cost.unit_costs import UnitCosts, unit_costs
from psrl.core.errors import ConfigError, suggest
from psrl.core.plan.bound import Bound
from psrl.core.plan.plan import PHASES
from psrl.core.run.config import Setup
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.loss_rows import LossRows, loss_rows
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree
from psrl.planner.bounds.forced_copies import SAFETY, rank_cost_bound
from psrl.planner.bounds.group_bound import raise_by_groups
from psrl.planner.placement.cost_tree import CostTree, build_cost_tree
from psrl.planner.placement.subsets import (
    MAX_ITEMS,
    Items,
    SetCosts,
    items_of,
    lowest_maximum,
    sample_set_costs,
)

# More items than this are too many for one model of OR-Tools.
MAX_SOLVER_ITEMS = 30


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """One RL iteration of one trace on one set-up.

    Attributes:
        phases: phases to plan, some of log_old_prob, reference, update.
        without: terms of the cost model that cost nothing, to see what they decide.

    Raises:
        ConfigError: for an unknown phase.
    """

    batch: SampleBatch
    trace_hash: str
    iteration: int
    setup: Setup
    phases: tuple[str, ...] = PHASES
    without: frozenset[Term] = frozenset()

    def __post_init__(self) -> None:
        for phase in self.phases:
            if phase not in PHASES:
                raise ConfigError(
                    f"unknown phase {phase!r}.{suggest(phase, list(PHASES))}",
                    f"known phases: {', '.join(PHASES)}",
                )
        if not self.phases:
            raise ConfigError("no phase to plan", f"choose some of {', '.join(PHASES)}")

    @cached_property
    def cost_model(self) -> CostModel:
        setup = self.setup
        return choose_cost_model(
            setup.model, setup.cluster, setup.parallel, setup.calibration, self.without
        )

    @cached_property
    def memory_model(self) -> MemoryModel:
        return MemoryModel(self.setup.model, self.setup.cluster, self.setup.parallel)

    @property
    def num_ranks(self) -> int:
        return self.setup.parallel.data_parallel_size

    @property
    def num_stages(self) -> int:
        return self.setup.parallel.pipeline_model_parallel_size

    @property
    def static_bytes(self) -> int:
        """What the fullest stage holds in all plans of these phases."""
        return self.memory_model.static_bytes_on(self.num_stages - 1, "update" in self.phases)

    @property
    def memory_limit_bytes(self) -> int:
        planning = self.setup.planning
        return int(self.setup.cluster.device.memory_bytes * planning.memory_fraction)

    @property
    def base_activation(self) -> str:
        """What a micro-batch keeps for its backward unless a policy chooses otherwise."""
        return "recompute" if self.setup.parallel.recompute == "full" else "keep"

    def programs(self) -> tuple["ProgramProblem", ...]:
        """Sample sets that may share: the whole batch forward-only, then one per mini-batch."""
        return self._programs

    @cached_property
    def _programs(self) -> tuple["ProgramProblem", ...]:
        forward_only = tuple(p for p in PHASES if p in self.phases and p != "update")
        found = []
        if forward_only:
            everything = np.arange(self.batch.num_samples)
            found.append(ProgramProblem(self, forward_only, False, -1, everything))
        if "update" in self.phases:
            for mini_batch in np.unique(self.batch.mini_batch).tolist():
                members = np.flatnonzero(self.batch.mini_batch == mini_batch)
                found.append(ProgramProblem(self, ("update",), True, mini_batch, members))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class ProgramProblem:
    """The samples of one program: they may share, and all ranks run them together.

    Attributes:
        members: [S] batch indices of the samples, ascending; index s below means `members[s]`.
    """

    problem: PlanningProblem
    phases: tuple[str, ...]
    is_update: bool
    mini_batch: int
    members: IntArray

    @cached_property
    def samples(self) -> SampleBatch:
        return self.problem.batch.select(self.members)

    @cached_property
    def tree(self) -> PrefixTree:
        """The prefix tree when everything is shared."""
        return build_prefix_tree(self.samples)

    @cached_property
    def loss_rows(self) -> LossRows:
        return loss_rows(self.tree, self.samples)

    @cached_property
    def unit_costs(self) -> UnitCosts:
        """Seconds on the last stage, all phases together, without fixed costs per micro-batch."""
        recompute = self.problem.base_activation == "recompute"
        return unit_costs(self.problem.cost_model, len(self.phases), self.is_update, recompute)

    @cached_property
    def cost_tree(self) -> CostTree:
        return build_cost_tree(self.tree, self.loss_rows, self.unit_costs)

    @cached_property
    def bound(self) -> Bound:
        """No placement gives every rank less work than this, all phases together.

        The best that takes little time: all placements are compared where there are few.
        """
        num_ranks = self.problem.num_ranks
        bound = rank_cost_bound(self.cost_tree, num_ranks)
        if num_ranks == 1:
            return bound
        if self.set_costs is not None and self.set_costs.num_items <= MAX_ITEMS:
            # Of the samples that ride with a leaf, the longest cannot leave it.
            makes_the_item = np.full(len(self.items.of_sample), False)
            makes_the_item[self.items.makers] = True
            least = self.set_costs if self.items.is_exact else self._set_costs(makes_the_item)
            lowest_s = lowest_maximum(least, num_ranks) * SAFETY
            if lowest_s > bound.limit_s:
                placed = tuple(self.items.makers.tolist())
                bound = Bound(kind="enumeration", limit_s=lowest_s, samples=placed)
            if self.items.is_exact:
                return bound
        return raise_by_groups(self.cost_tree, num_ranks, bound)

    @property
    def rank_cost_bound_s(self) -> float:
        return self.bound.limit_s

    @cached_property
    def items(self) -> Items:
        """What small problems place."""
        return items_of(self.tree, self.loss_rows, self.cost_tree.leaf_of_sample)

    @cached_property
    def set_costs(self) -> SetCosts | None:
        """What a rank pays for the samples of some items; None if there are many items."""
        if len(self.items.makers) > MAX_SOLVER_ITEMS:
            return None
        return self._set_costs(np.full(self.samples.num_samples, True))

    def _set_costs(self, counts_rows: npt.NDArray[np.bool_]) -> SetCosts:
        item = self.items.of_sample
        return sample_set_costs(self.tree, self.loss_rows, self.unit_costs, item, counts_rows)

    @cached_property
    def step_s(self) -> float:
        """Gradient reduction and optimizer step that end an update."""
        if not self.is_update:
            return 0.0
        cost = self.problem.cost_model
        return cost.gradient_reduction_s() + cost.optimizer_step_s()
