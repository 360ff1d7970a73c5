"""Search over parallel layouts and micro-batch budgets for a given number of devices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from psrl.core.cluster import ParallelConfig, check_layout
from psrl.core.config import Setup
from psrl.core.cost_model import MemoryModel
from psrl.core.errors import ConfigError, InfeasibleError

from .make_plan import make_plan
from .problem import PlanningProblem

_BUDGET_FACTORS = (0.5, 1.0, 2.0)
# The search compares layouts; the chosen one is planned again with the full effort.
_SEARCH_ITERATIONS = 100
# A layout whose lower bound is this far above the fastest plan is not planned.
_HOPELESS = 2.0


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
    """Plan every layout with every budget; the fastest first.

    Layouts whose weights and optimizer alone exceed the memory, and those whose lower bound is
    far above the fastest plan so far, are listed with the reason.
    """
    base = problem.setup
    found: list[LayoutChoice] = []
    fastest_s = float("inf")
    for parallel in layouts_of(base):
        for factor in _BUDGET_FACTORS:
            budget = max(1, int(base.planning.max_tokens_per_micro_batch * factor))
            setup = base.model_copy(
                update={
                    "parallel": parallel,
                    "planning": base.planning.model_copy(
                        update={
                            "max_tokens_per_micro_batch": budget,
                            "search_iterations": min(
                                base.planning.search_iterations, _SEARCH_ITERATIONS
                            ),
                        }
                    ),
                }
            )
            choice = _plan_one(replace(problem, setup=setup), policy, fastest_s)
            found.append(choice)
            fastest_s = min(fastest_s, choice.time_s)
    found.sort(key=lambda c: (c.time_s, c.peak_bytes))
    leanest = float("inf")
    marked = []
    for choice in found:
        on_front = not choice.reason and choice.peak_bytes < leanest
        leanest = min(leanest, choice.peak_bytes) if on_front else leanest
        marked.append(replace(choice, on_front=on_front))
    return marked


def _plan_one(problem: PlanningProblem, policy: str, fastest_s: float) -> LayoutChoice:
    setup = problem.setup
    static = MemoryModel(setup.model, setup.cluster, setup.parallel).static_bytes
    nothing = float("inf")
    if static > problem.memory_limit_bytes:
        return LayoutChoice(setup, nothing, static, "weights and optimizer exceed the memory")
    bound_s = sum(t.bound.cost_s + t.step_s for t in problem.programs())
    if bound_s > _HOPELESS * fastest_s:
        return LayoutChoice(setup, nothing, static, f"cannot be below {bound_s:.3f} s")
    try:
        predicted = make_plan(problem, policy, advise=False).predicted
    except InfeasibleError:
        return LayoutChoice(setup, nothing, static, "no plan fits the memory")
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
