"""Search over parallel layouts and micro-batch budgets for a given number of devices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from psrl.core.cost.cluster import ParallelConfig, check_layout
from psrl.core.errors import ConfigError, InfeasibleError
from psrl.core.run.config import Setup

from .make_plan import make_plan
from .problem import PlanningProblem

# Tried where the given budget gives one of the fastest plans, one of the front, or none that fits.
_OTHER_BUDGETS = (0.5, 2.0)
# The search compares layouts; the chosen one is planned again with the full effort.
_SEARCH_ITERATIONS = 100
# A layout whose lower bound is this far above the fastest plan is not planned.
_HOPELESS = 2.0
# Other budgets are planned where the given one comes this close to the fastest plan.
_PROMISING = 1.1
_TOO_LARGE = "no plan fits the memory"


@dataclass(frozen=True)
class LayoutChoice:
    """A set-up that was planned, or why it was not.

    Attributes:
        time_s, peak_bytes: predicted; infinite and the static bytes where nothing was planned.
        on_front: no other set-up is both faster and leaner.
    """

    setup: Setup
    time_s: float
    peak_bytes: float
    reason: str = ""
    on_front: bool = False

    @property
    def is_too_large(self) -> bool:
        """Whether a plan was tried, and none fits the memory."""
        return self.reason == _TOO_LARGE


def layouts_of(setup: Setup) -> Iterator[ParallelConfig]:
    """All layouts of the cluster's devices that divide the model, tensor parallelism in a host."""
    cluster, base = setup.cluster, setup.parallel
    count = cluster.num_devices
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    experts = setup.model.num_moe_experts
    for tensor in (size for size in sizes if size <= cluster.devices_per_host):
        for pipeline in (size for size in sizes if count // tensor % size == 0):
            data = count // (tensor * pipeline)
            for expert in range(1, tensor * data + 1) if experts else (1,):
                for recompute in ("none", "full"):
                    parallel = base.model_copy(
                        update={
                            "tensor_model_parallel_size": tensor,
                            "pipeline_model_parallel_size": pipeline,
                            "data_parallel_size": data,
                            "expert_model_parallel_size": expert,
                            "sequence_parallel": base.sequence_parallel or bool(experts),
                            "recompute": recompute,
                        }
                    )
                    try:
                        check_layout(setup.model, cluster, parallel)
                    except ConfigError:
                        continue
                    yield parallel


def search_layouts(problem: PlanningProblem, policy: str) -> list[LayoutChoice]:
    """Plan every layout, and the promising ones with other budgets; the fastest first.

    The most promising layouts come first. Those whose weights and optimizer alone exceed the
    memory, and those whose lower bound is far above the fastest plan so far, are listed with the
    reason.
    """
    budget = problem.setup.planning.max_tokens_per_micro_batch
    # The problems themselves keep prefix trees: not all of them at a time.
    bounded = [
        (_least_s(_with_layout(problem, parallel, budget)), parallel)
        for parallel in layouts_of(problem.setup)
    ]
    bounded.sort(key=lambda pair: pair[0])
    found: list[LayoutChoice] = []
    fastest_s = float("inf")
    for least_s, parallel in bounded:
        candidate = _with_layout(problem, parallel, budget)
        found.append(_plan_one(candidate, policy, least_s, fastest_s))
        fastest_s = min(fastest_s, found[-1].time_s)
    for choice in _with_front(found):
        is_near = not choice.reason and choice.time_s <= _PROMISING * fastest_s
        is_promising = is_near or choice.on_front
        for factor in _OTHER_BUDGETS:
            other = max(1, int(budget * factor))
            if is_promising or (choice.is_too_large and other < budget):
                candidate = _with_layout(problem, choice.setup.parallel, other)
                found.append(_plan_one(candidate, policy, 0.0, fastest_s))
    return _with_front(found)


def _with_front(found: list[LayoutChoice]) -> list[LayoutChoice]:
    """The fastest first, and marked which no other beats in both time and memory."""
    leanest = float("inf")
    marked = []
    for choice in sorted(found, key=lambda c: (c.time_s, c.peak_bytes)):
        on_front = not choice.reason and choice.peak_bytes < leanest
        leanest = min(leanest, choice.peak_bytes) if on_front else leanest
        marked.append(replace(choice, on_front=on_front))
    return marked


def _with_layout(
    problem: PlanningProblem, parallel: ParallelConfig, budget: int
) -> PlanningProblem:
    planning = problem.setup.planning
    effort = min(planning.search_iterations, _SEARCH_ITERATIONS)
    changed = planning.model_copy(
        update={"max_tokens_per_micro_batch": budget, "search_iterations": effort}
    )
    setup = problem.setup.model_copy(update={"parallel": parallel, "planning": changed})
    return replace(problem, setup=setup)


def _least_s(problem: PlanningProblem) -> float:
    """No plan of the layout takes less; infinite where its weights do not fit."""
    if problem.static_bytes > problem.memory_limit_bytes:
        return float("inf")
    return sum(t.bound.limit_s + t.step_s for t in problem.programs())


def _plan_one(
    problem: PlanningProblem, policy: str, least_s: float, fastest_s: float
) -> LayoutChoice:
    setup, static = problem.setup, problem.static_bytes
    nothing = float("inf")
    if least_s == nothing:
        return LayoutChoice(setup, nothing, static, "weights and optimizer exceed the memory")
    if least_s > _HOPELESS * fastest_s:
        return LayoutChoice(setup, nothing, static, f"cannot be below {least_s:.3f} s")
    try:
        predicted = make_plan(problem, policy, advise=False).predicted
    except InfeasibleError:
        return LayoutChoice(setup, nothing, static, _TOO_LARGE)
    return LayoutChoice(setup, predicted["makespan_s"], predicted["peak_memory_bytes"])


def format_choices(choices: list[LayoutChoice]) -> str:
    """A table for people; the time-memory front is marked."""
    lines = [
        f"{'TP':>4}{'PP':>4}{'DP':>4}{'EP':>4}{'recompute':>11}{'budget':>9}{'time':>12}"
        f"{'peak memory':>14}  front"
    ]
    for choice in choices:
        p = choice.setup.parallel
        budget = choice.setup.planning.max_tokens_per_micro_batch
        left = (
            f"{p.tensor_model_parallel_size:>4}{p.pipeline_model_parallel_size:>4}"
            f"{p.data_parallel_size:>4}{p.expert_model_parallel_size:>4}{p.recompute:>11}"
            f"{budget:>9,}"
        )
        if choice.reason:
            lines.append(f"{left}  {choice.reason}")
        else:
            peak = choice.peak_bytes / 2**30
            front = "*" if choice.on_front else ""
            lines.append(f"{left}{choice.time_s:>10.3f} s{peak:>10.2f} GiB  {front}")
    return "\n".join(lines)
