"""Gaps of placements to proven bounds, planning times, balance, and psRL against all policies."""

import gc
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from psrl.core.cost.cluster import ClusterSpec, ParallelConfig
from psrl.core.cost.presets import DEVICES, MODELS
from psrl.core.plan.plan import Plan
from psrl.core.plan.tables import MicroBatches
from psrl.core.run.config import PlanningConfig, Setup
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.core.samples.trace import open_trace
from psrl.planner import POLICIES, PlanningProblem, make_plan
from psrl.planner.bounds.forced_copies import copies_of
from psrl.traces.synth import load_spec, synthesise

from .measurement import Measurement

TAU_BENCH = Path(__file__).resolve().parents[1] / "examples" / "traces" / "tau_bench_airline"
LEAVES_PER_RANK_TO_BALANCE = 16
# A rank whose work is close to the longest sample's cannot be balanced.
DOMINATING = 1.1


@dataclass(frozen=True)
class Timed:
    """A plan, the CPU seconds that it took, and its problem."""

    plan: Plan
    time_s: float
    problem: PlanningProblem

    def percent(self, name: str) -> float:
        return 100.0 * self.plan.predicted[name]


def measure() -> list[Measurement]:
    return [
        *real_trace(),
        *scale(),
        *no_sharing(),
        *few_leaves(),
        *small_instances(),
        *all_policies(),
    ]


def setup_of(num_ranks: int, search_iterations: int = 2000) -> Setup:
    """Data-parallel H100s with a 1.5B model: no other parallelism, so placement is all."""
    return Setup(
        model=MODELS["qwen2.5-1.5b"],
        cluster=ClusterSpec(
            device=DEVICES["h100-80"],
            num_hosts=-(-num_ranks // 8),
            devices_per_host=min(num_ranks, 8),
            intra_host_bytes_per_s=450e9,
            inter_host_bytes_per_s=50e9,
            intra_host_latency_s=5e-6,
            inter_host_latency_s=15e-6,
        ),
        parallel=ParallelConfig(data_parallel_size=num_ranks, recompute="full"),
        planning=PlanningConfig(search_iterations=search_iterations),
    )


def planned(batch: SampleBatch, num_ranks: int, policy: str = "psrl", **options: int) -> Timed:
    """Plan one update of the whole batch, timed with the building of its tree."""
    one_step = np.zeros(batch.num_samples, np.int64)
    whole = batch.select(np.arange(batch.num_samples))
    whole = type(whole)(**{**vars(whole), "mini_batch": one_step})
    problem = PlanningProblem(whole, "bench", 0, setup_of(num_ranks, **options), ("update",))
    gc.collect()
    started_s = time.process_time()
    plan = make_plan(problem, policy)
    return Timed(plan, time.process_time() - started_s, problem)


def gaps(what: str, run: Timed, bar: float | None, time_bar_s: float | None) -> list[Measurement]:
    return [
        Measurement(f"{what}: placement gap", run.percent("placement_gap"), "%", bar, False),
        Measurement(f"{what}: makespan gap", run.percent("gap"), "%"),
        Measurement(f"{what}: CPU time", run.time_s, "s", time_bar_s, False),
    ]


def real_trace() -> list[Measurement]:
    batch = open_trace(TAU_BENCH).iteration(0)
    rows = []
    for ranks in (4, 8, 32):
        what, final = f"tau-bench, {ranks} ranks", planned(batch, ranks)
        rows += [*gaps(what, final, 0.2, None), *first_plan(what, batch, final)]
    return rows


def first_plan(what: str, batch: SampleBatch, final: Timed) -> list[Measurement]:
    """How soon the heuristic's plan is there, and how far it is behind the searched one."""
    first = planned(batch, final.plan.num_ranks, search_iterations=0)
    behind = 100.0 * (makespan_s(first) / makespan_s(final) - 1.0)
    return [
        Measurement(f"{what}: first plan behind the final", behind, "%", 1.0, False),
        Measurement(f"{what}: first plan, CPU time", first.time_s, "s", 2.0, False),
    ]


def scale() -> list[Measurement]:
    rows = []
    for what, batch, ranks, gap_bar, time_bar_s in (
        ("10k leaves, 32 ranks", grouped(1250, 8), 32, 0.5, 5.0),
        ("10k step samples, 32 ranks", webshop(181), 32, 1.0, 10.0),
        ("100k leaves, 256 ranks", grouped(12500, 8), 256, 1.0, 20.0),
    ):
        final = planned(batch, ranks)
        rows += gaps(what, final, gap_bar, time_bar_s)
        rows += first_plan(what, batch, final)
        rows += balance(what, final)
    return rows


def balance(what: str, run: Timed) -> list[Measurement]:
    """Evenness of ranks and micro-batches, and what the evenness costs."""
    (subproblem,) = run.problem.programs()
    (program,) = run.plan.programs
    rows = []
    num_ranks = run.plan.num_ranks
    balanceable = len(subproblem.cost_tree.leaves) >= LEAVES_PER_RANK_TO_BALANCE * num_ranks
    if (
        balanceable
        and subproblem.bound.limit_s > DOMINATING * subproblem.cost_tree.longest_sample_s
    ):
        predicted = run.plan.predicted
        ratio = predicted["worker_time_max_s"] / predicted["worker_time_min_s"]
        rows.append(Measurement(f"{what}: worker time max/min", ratio, "", 1.02, False))
    excess = 100.0 * run.plan.predicted["duplicated_tokens"] / subproblem.tree.unique_tokens
    forced = 100.0 * _forced_tokens(run) / subproblem.tree.unique_tokens
    name = f"{what}: duplicated tokens beyond the forced"
    rows.append(Measurement(name, excess - forced, "% points", 1.5, False))
    even = planned(run.problem.batch, num_ranks, "dfs_cut").plan.programs[0].micro_batches
    rows.append(
        Measurement(f"{what}: micro-batch max/mean, even cuts", _spread(even), "", 1.02, False)
    )
    chosen = _spread(program.micro_batches)
    rows.append(Measurement(f"{what}: micro-batch max/mean, chosen units", chosen, ""))
    return rows


def _spread(table: MicroBatches) -> float:
    """Time of the largest micro-batch over the mean, average of the ranks."""
    cost_s = table.forward_s + table.backward_s
    ranks = [cost_s[table.rank == r] for r in np.unique(table.rank)]
    return float(np.mean([mine.max() / mine.mean() for mine in ranks]))


def _forced_tokens(run: Timed) -> float:
    """Duplicated work that any placement of this makespan has, in tokens of average cost."""
    (subproblem,) = run.problem.programs()
    tree = subproblem.cost_tree
    copies = copies_of(tree, run.plan.num_ranks, run.plan.predicted["makespan_s"])
    assert copies is not None
    tokens_per_s = subproblem.tree.unique_tokens / tree.shared_s.sum()
    return float(((copies - 1.0) * tree.shared_s).sum() * tokens_per_s)


def no_sharing() -> list[Measurement]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.0, 0.8, 10_000), 16, 20_000).astype(np.int64)
    batch = blocks([[i] for i in range(len(lengths))], lengths)
    ours, verl = planned(batch, 32), planned(batch, 32, "verl")
    ratio = makespan_s(ours) / makespan_s(verl)
    return [
        Measurement("10k unshared samples, 32 ranks: makespan / verl's", ratio, "", 1.01, False),
        Measurement("10k unshared samples, 32 ranks: CPU time", ours.time_s, "s", 0.2, False),
    ]


def few_leaves() -> list[Measurement]:
    """Gaps where a rank holds 2 to 16 leaves: physically large, and part of them loose bounds."""
    rows = []
    for what, batch, ranks in (
        ("tree, 4 leaves per rank", tree_groups(16), 256),
        ("star, 8 leaves per rank", grouped(64, 8), 64),
        ("star, 16 leaves per rank", grouped(64, 8), 32),
        ("chain, 2 leaves per rank", webshop(64), 256),
        ("chain, 4 leaves per rank", webshop(64), 128),
    ):
        for policy in ("psrl", "optimal"):
            run = planned(batch, ranks, policy)
            (program,) = run.plan.programs
            assert program.bound is not None
            gap = run.percent("placement_gap")
            rows.append(
                Measurement(f"{what}, {policy}: placement gap ({program.bound.kind})", gap, "%")
            )
            rows.append(Measurement(f"{what}, {policy}: CPU time", run.time_s, "s"))
    return rows


def small_instances() -> list[Measurement]:
    """`optimal` against all placements of the leaves, 200 random cases."""
    rng = np.random.default_rng(5)
    equal = above_optimum = 0
    for _ in range(200):
        num_ranks = int(rng.integers(2, 4))
        run = planned(random_groups(rng, int(rng.integers(3, 8))), num_ranks, "optimal")
        (subproblem,) = run.problem.programs()
        costs = subproblem.set_costs
        assert costs is not None
        best = min(
            costs.of_ranks(np.array((0, *rest)), num_ranks).max()
            for rest in itertools.product(range(num_ranks), repeat=costs.num_items - 1)
        )
        # Of the placement: the plan may prefer another one for its launches and latencies.
        draft = POLICIES["optimal"](subproblem)
        ranks = draft.placement.rank[subproblem.items.makers]
        found = costs.of_ranks(ranks, num_ranks).max()
        equal += int(found <= best * (1.0 + 1e-9))
        above_optimum += int(draft.bound.limit_s > best * (1.0 + 1e-9))
    return [
        Measurement("optimal equals brute force, of 200 cases", equal, "cases", 200),
        Measurement("bounds above the optimum, of 200 cases", above_optimum, "cases", 0, False),
    ]


def all_policies() -> list[Measurement]:
    """psRL's makespan over the best of the other policies' on every shape."""
    rows = []
    for what, batch in shapes().items():
        for ranks in (4, 32, 256):
            problem = planned(batch, ranks, search_iterations=500)
            others = {
                name: makespan_s(planned(batch, ranks, name))
                for name in POLICIES
                if name not in ("psrl", "optimal")
            }
            best = min(others, key=lambda name: others[name])
            ratio = makespan_s(problem) / others[best]
            place = f"{what}, {ranks} ranks"
            rows += first_plan(place, batch, problem)
            rows.append(
                Measurement(f"{place}: makespan / best other ({best})", ratio, "", 1.0, False)
            )
            rows.append(
                Measurement(f"{place}: placement gap", problem.percent("placement_gap"), "%")
            )
    return rows


def makespan_s(run: Timed) -> float:
    return run.plan.predicted["makespan_s"]


def shapes() -> dict[str, SampleBatch]:
    rng = np.random.default_rng(2)
    tail = np.maximum(rng.zipf(1.6, 48), 1).clip(max=120)
    return {
        "star": grouped(64, 8),
        "chain": webshop(16),
        "tree": tree_groups(16),
        "singletons": grouped(512, 1),
        "one giant group": grouped(1, 512),
        "60K-token path": with_long_path(grouped_paths(32, 8)),
        "heavy-tailed groups": heavy_tailed(tail),
    }


Paths = tuple[list[list[int]], list[int]]


def grouped(num_groups: int, num_rollouts: int) -> SampleBatch:
    """Prompts of about 1000 tokens with independent answers of about 500."""
    paths, lengths = grouped_paths(num_groups, num_rollouts)
    return blocks(paths, np.array(lengths, np.int64))


def grouped_paths(num_groups: int, num_rollouts: int, seed: int = 0) -> Paths:
    return grouped_sizes(np.full(num_groups, num_rollouts), seed)


def grouped_sizes(num_rollouts: np.ndarray, seed: int) -> Paths:
    rng = np.random.default_rng(seed)
    paths: list[list[int]] = []
    lengths: list[int] = []
    for count in num_rollouts.tolist():
        prompt = len(lengths)
        lengths.append(int(rng.integers(600, 1400)))
        for _ in range(count):
            paths.append([prompt, len(lengths)])
            lengths.append(int(rng.lognormal(6.0, 0.6)) + 2)
    return paths, lengths


def heavy_tailed(num_rollouts: np.ndarray) -> SampleBatch:
    paths, lengths = grouped_sizes(num_rollouts, 3)
    return blocks(paths, np.array(lengths, np.int64))


def tree_groups(num_groups: int) -> SampleBatch:
    """Every prompt with four turns, four times each, three levels deep."""
    rng = np.random.default_rng(1)
    paths: list[list[int]] = []
    lengths: list[int] = []

    def grow(path: list[int], depth: int) -> None:
        here = [*path, len(lengths)]
        lengths.append(int(rng.integers(200, 800)))
        if depth == 3:
            paths.append(here)
            return
        for _ in range(4):
            grow(here, depth + 1)

    for _ in range(num_groups):
        grow([], 0)
    return blocks(paths, np.array(lengths, np.int64))


def with_long_path(others: Paths) -> SampleBatch:
    paths, lengths = others
    return blocks([*paths, [len(lengths)]], np.array([*lengths, 60_000], np.int64))


def random_groups(rng: np.random.Generator, num_leaves: int) -> SampleBatch:
    paths: list[list[int]] = []
    lengths: list[int] = []
    while len(paths) < num_leaves:
        prompt = len(lengths)
        lengths.append(int(rng.lognormal(6.0, 0.8)) + 2)
        for _ in range(int(rng.integers(1, num_leaves - len(paths) + 1))):
            paths.append([prompt, len(lengths)])
            lengths.append(int(rng.lognormal(6.0, 0.8)) + 2)
    return blocks(paths, np.array(lengths, np.int64))


def blocks(paths: list[list[int]], lengths: np.ndarray) -> SampleBatch:
    """Samples of blocks; the last block of each is trained, its first token left out."""
    ends = [int(lengths[path].sum()) for path in paths]
    spans = [
        [(end - int(lengths[path[-1]]) + 1, end)] for path, end in zip(paths, ends, strict=True)
    ]
    groups = [str(path[0]) for path in paths]
    return make_batch(paths, spans, symbol_num_tokens=lengths, group_id=groups)


def webshop(num_tasks: int) -> SampleBatch:
    """A synthetic WebShop iteration, one sample per agent step."""
    spec = load_spec("webshop", "step", (f"tasks={num_tasks}",))
    (batch,) = synthesise(spec, "step", 0).batches
    return batch
