"""What a policy decides on: the samples of an iteration, the set-up, and what may be shared."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.cost_model import CostModel
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import ConfigError, suggest
from psrl.core.plan.plan import PHASES
from psrl.core.run.config import Setup
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.loss_rows import LossRows, loss_rows
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree
from psrl.planner.bounds.forced_copies import Bound, rank_cost_bound
from psrl.planner.bounds.group_bound import raise_by_groups
from psrl.planner.placement.cost_tree import CostTree, UnitCosts, build_cost_tree
from psrl.planner.placement.set_costs import SetCosts, sample_set_costs
from psrl.planner.placement.subset_search import MAX_ITEMS, lowest_maximum

# Amount at which a cost model's fixed parts (launches, latencies) have vanished beside the slope.
_LARGE = 1e9
# More items than this are too many for one model of OR-Tools.
MAX_SOLVER_ITEMS = 30


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """One RL iteration of one trace on one set-up.

    Attributes:
        phases: phases to plan, some of log_old_prob, reference, update.

    Raises:
        ConfigError: for an unknown phase.
    """

    batch: SampleBatch
    trace_hash: str
    iteration: int
    setup: Setup
    phases: tuple[str, ...] = PHASES

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
        return choose_cost_model(setup.model, setup.cluster, setup.parallel, setup.calibration)

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
        cost = self.problem.cost_model

        def slope(tokens: float, pairs: float, head_tokens: float) -> float:
            forward = cost.forward_s(tokens, pairs, head_tokens)
            if not self.is_update:
                return len(self.phases) * float(forward) / _LARGE
            total = forward + cost.backward_s(tokens, pairs, head_tokens)
            if self.problem.base_activation == "recompute":
                total = total + cost.forward_s(tokens, pairs, 0.0)
            return float(total) / _LARGE

        return UnitCosts(slope(_LARGE, 0.0, 0.0), slope(0.0, _LARGE, 0.0), slope(0.0, 0.0, _LARGE))

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
        if self.least_set_costs is not None and self.least_set_costs.num_items <= MAX_ITEMS:
            lowest_s = lowest_maximum(self.least_set_costs, num_ranks) * (1.0 - 1e-9)
            return max(bound, Bound(lowest_s, "all placements"))
        raised_s = raise_by_groups(self.cost_tree, num_ranks, bound.cost_s)
        return max(bound, Bound(raised_s, "configurations of groups"))

    @property
    def rank_cost_bound_s(self) -> float:
        return self.bound.cost_s

    @cached_property
    def item_of_sample(self) -> IntArray:
        """[S] what small problems place: each sample, or with many samples each leaf."""
        samples = np.arange(self.samples.num_samples)
        return samples if len(samples) <= MAX_ITEMS else self.cost_tree.leaf_of_sample

    @cached_property
    def set_costs(self) -> SetCosts | None:
        """What a rank pays for the samples of some items; None if there are many items."""
        return self._set_costs(np.full(self.samples.num_samples, True))

    @cached_property
    def least_set_costs(self) -> SetCosts | None:
        """The same, but only what no placement of the samples can avoid."""
        # Of the samples that ride with a leaf, the longest is the one that makes it one.
        by_depth = np.argsort(-self.tree.end_depth[self.tree.sample_node], kind="stable")
        _, first = np.unique(self.item_of_sample[by_depth], return_index=True)
        makes_the_item = np.full(len(by_depth), False)
        makes_the_item[by_depth[first]] = True
        return self._set_costs(makes_the_item)

    def _set_costs(self, counts_rows: npt.NDArray[np.bool_]) -> SetCosts | None:
        if int(self.item_of_sample.max(initial=0)) >= MAX_SOLVER_ITEMS:
            return None
        item = self.item_of_sample
        return sample_set_costs(self.tree, self.loss_rows, self.unit_costs, item, counts_rows)

    @cached_property
    def step_s(self) -> float:
        """Gradient reduction and optimizer step that end an update."""
        if not self.is_update:
            return 0.0
        cost = self.problem.cost_model
        return cost.gradient_reduction_s() + cost.optimizer_step_s()
