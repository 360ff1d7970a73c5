"""psRL against every other policy on many shapes, and token cuts against node-boundary cuts.

The published and the adversarial shapes are scaled down such that all policies plan all of them
in a few minutes; `benchmarks.planner` plans the full size. One optimizer step trains the batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from psrl.core.errors import InfeasibleError
from psrl.core.plan.plan import Plan
from psrl.core.run.config import PlanningConfig
from psrl.core.run.metrics import run_metrics
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import open_trace
from psrl.planner import POLICIES, PlanningProblem, make_plan
from psrl.planner.micro_batching.all_ranks import token_cuts
from psrl.planner.micro_batching.best_cuts import cut_group
from psrl.planner.micro_batching.built import BuiltProgram, join_groups
from psrl.planner.micro_batching.cut_rules import CutRule
from psrl.planner.micro_batching.rank_tree import tree_of_rank
from psrl.planner.micro_batching.token_cuts import SNAP
from psrl.planner.placement.placement import Placement
from psrl.sim import simulate
from psrl.traces.synth import load_spec, synthesise

from .measurement import Measurement
from .planner import grouped, grouped_paths, heavy_tailed, setup_of, with_long_path

TRACES = Path(__file__).resolve().parents[1] / "examples" / "traces"
PRESETS = ("webshop", "alfworld", "dtn", "search")
# Samples per published shape at most, of about 10,000; cuts need enough to fill micro-batches.
MAX_SAMPLES, MAX_SAMPLES_OF_CUTS = 300, 2000
RANKS = (4, 32, 256)
OTHERS = tuple(name for name in POLICIES if name not in ("psrl", "optimal"))
# Pipelines and their stages, for evenness and bubbles.
NUM_PIPELINES, NUM_STAGES = 2, 4
# Micro-batches of a pipeline; fewer where they would be so small that launches decide their time.
NUM_MICRO_BATCHES, MIN_TOKENS = 16, 4096


def measure() -> list[Measurement]:
    rows: list[Measurement] = []
    for what, batch in shapes(MAX_SAMPLES):
        for num_ranks in RANKS:
            rows += against_all_policies(what, batch, num_ranks)
    for what, batch in shapes(MAX_SAMPLES_OF_CUTS):
        rows += cuts(what, batch)
    return rows


def shapes(max_samples: int) -> Iterator[tuple[str, SampleBatch]]:
    """Published workloads, bundled real traces, and adversarial shapes, in one optimizer step."""
    for preset in PRESETS:
        for mode in ("step", "tree_step"):
            yield f"{preset} {mode}", published(preset, mode, max_samples)
    for path in sorted(p for p in TRACES.iterdir() if p.is_dir()):
        yield path.name, first_samples(open_trace(path).iteration(0), max_samples)
    rng = np.random.default_rng(2)
    tail = np.maximum(rng.zipf(1.6, 24), 1).clip(max=60)
    yield "one giant group", grouped(1, 256)
    yield "singletons", grouped(256, 1)
    yield "60K-token path", with_long_path(grouped_paths(32, 8))
    yield "heavy-tailed groups", heavy_tailed(tail)
    yield "few leaves per rank", grouped(16, 4)


def published(preset: str, mode: str, max_samples: int) -> SampleBatch:
    """An iteration of a preset with as many whole tasks as fit, at least one."""
    tasks = 1
    batch = synthetic(preset, mode, tasks)
    while batch.num_samples * 2 <= max_samples:
        tasks *= 2
        batch = synthetic(preset, mode, tasks)
    return first_samples(batch, max_samples)


def synthetic(preset: str, mode: str, tasks: int) -> SampleBatch:
    (batch,) = synthesise(load_spec(preset, mode, (f"tasks={tasks}",)), mode, 0).batches
    return batch


def first_samples(batch: SampleBatch, max_samples: int) -> SampleBatch:
    chosen = batch.select(np.arange(min(batch.num_samples, max_samples)))
    return replace(chosen, mini_batch=np.zeros(chosen.num_samples, np.int64))


def problem_of(batch: SampleBatch, num_ranks: int, num_stages: int = 1) -> PlanningProblem:
    setup = setup_of(num_ranks, search_iterations=300)
    if num_stages > 1:
        sizes = {"pipeline_model_parallel_size": num_stages}
        hosts = -(-num_ranks * num_stages // 8)
        cluster = setup.cluster.model_copy(update={"num_hosts": hosts, "devices_per_host": 8})
        parallel = setup.parallel.model_copy(update=sizes)
        setup = setup.model_copy(update={"cluster": cluster, "parallel": parallel})
    return PlanningProblem(batch, "bench", 0, setup, ("update",))


def against_all_policies(what: str, batch: SampleBatch, num_ranks: int) -> list[Measurement]:
    """psRL's makespan over the best of the other policies', and its gap to the bound."""
    problem = problem_of(batch, num_ranks)
    predicted = make_plan(problem, "psrl", advise=False).predicted
    others = {name: makespan_s(problem, name) for name in OTHERS}
    best = min(others, key=lambda name: others[name])
    # Times that add up the same ops in another order differ in the last digits.
    ratio = round(predicted["makespan_s"] / others[best], 9)
    place = f"{what}, {batch.num_samples} samples, {num_ranks} ranks"
    return [
        Measurement(f"{place}: makespan / best other ({best})", ratio, "", 1.0, False),
        Measurement(f"{place}: gap to the bound", 100.0 * predicted["gap"], "%"),
    ]


def makespan_s(problem: PlanningProblem, policy: str) -> float:
    """Infinite for a policy whose plan does not fit the memory."""
    try:
        return make_plan(problem, policy, advise=False).predicted["makespan_s"]
    except InfeasibleError:
        return float("inf")


def cuts(what: str, batch: SampleBatch) -> list[Measurement]:
    """Evenness of token cuts, and the bubbles of the fastest ones against node-boundary cuts."""
    problem = problem_of(batch, NUM_PIPELINES, NUM_STAGES)
    (subproblem,) = problem.programs()
    placement = POLICIES["dfs_cut"](subproblem).placement
    of_tokens, of_nodes = (cut_evenly(placement, snap) for snap in (SNAP, np.inf))
    fastest = (token_cuts(placement, memory_weight=0.0, snap=snap) for snap in (SNAP, np.inf))
    bubbles, bubbles_of_nodes = (100.0 * bubble_fraction(problem, built) for built in fastest)
    place = f"{what}, {batch.num_samples} samples"
    return [
        Measurement(f"{place}: micro-batch max / mean", unevenness(of_tokens), "", 1.02, False),
        Measurement(f"{place}: the same, node cuts", unevenness(of_nodes), ""),
        Measurement(
            f"{place}: bubbles, of node cuts {bubbles_of_nodes:.2f} %",
            bubbles,
            "%",
            bubbles_of_nodes,
            False,
        ),
    ]


def cut_evenly(placement: Placement, snap: float) -> BuiltProgram:
    """Every rank in the same number of micro-batches, as far as the token budget allows."""
    budget = placement.problem.setup.planning.max_tokens_per_micro_batch
    groups = []
    for rank in range(NUM_PIPELINES):
        rank_tree = tree_of_rank(placement, rank)
        fewest = -(-rank_tree.total_tokens // budget)
        wanted = max(1, min(NUM_MICRO_BATCHES, rank_tree.total_tokens // MIN_TOKENS))
        rule = CutRule(max(1.0, wanted / max(fewest, 1)), 1, 1.0, snap)
        groups.append(cut_group([rank_tree], rule))
    return join_groups(placement, groups)


def unevenness(built: BuiltProgram) -> float:
    """Costliest over mean predicted time of a rank's micro-batches, on the most uneven rank."""
    ratios = [1.0]
    for rank in built.ranks:
        table = rank.program.micro_batches
        if len(table):
            time_s = table.forward_s + table.backward_s
            ratios.append(float(time_s.max() / time_s.mean()))
    return max(ratios)


def bubble_fraction(problem: PlanningProblem, built: BuiltProgram) -> float:
    """Share of device time in the update without an op, simulated."""
    setup = problem.setup
    plan = Plan(
        trace_hash=problem.trace_hash,
        iteration=problem.iteration,
        policy="cuts",
        options=PlanningConfig(),
        phases=built.program.phases,
        model=setup.model,
        cluster=setup.cluster,
        parallel=setup.parallel,
        programs=(built.program,),
    )
    metrics = run_metrics(plan, problem.batch, simulate(plan, problem.batch))
    return float(metrics["phases"]["update"]["bubble_fraction"])
