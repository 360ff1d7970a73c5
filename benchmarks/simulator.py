"""Speed and memory of the simulator on the paper's largest cluster.

Every rank has its own samples of other lengths, so that no rank is the twin of another. Planning
and making the trace are not timed; only `simulate` is.
"""

import resource

import numpy as np

from psrl.core.cost.cluster import ClusterSpec, ParallelConfig
from psrl.core.cost.presets import DEVICES, MODELS
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.run.config import PlanningConfig, Setup
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.planner import PlanningProblem, make_plan
from psrl.sim import SimOptions, simulate
from psrl.sim.options import plan_ops

from .measurement import Measurement, fastest_s

_BLOCK_TOKENS = 100
_NUM_STAGES = 12
_TENSOR_SIZE = 4


def dtn_batch(num_tasks: int, seed: int = 0) -> SampleBatch:
    """Step samples of deep-research tasks: 8 rollouts of about 11 turns of 2.1k tokens each."""
    rng = np.random.default_rng(seed)
    symbols, spans, groups, mini_batch = [], [], [], []
    used = 0

    def fresh(mean_blocks: int) -> np.ndarray:
        nonlocal used
        count = int(rng.integers(mean_blocks // 2, 3 * mean_blocks // 2))
        used += count
        return np.arange(used - count, used)

    for task in range(num_tasks):
        head = fresh(50)
        for rollout in range(8):
            path = head
            for _ in range(int(rng.integers(6, 17))):
                path = np.concatenate([path, fresh(21)])
                end = len(path) * _BLOCK_TOKENS
                symbols.append(path)
                spans.append([(end - 7 * _BLOCK_TOKENS, end)])
                groups.append(f"task{task}")
                mini_batch.append((8 * task + rollout) % 3)
    lengths = np.full(used, _BLOCK_TOKENS)
    return make_batch(
        list(symbols), spans, symbol_num_tokens=lengths, group_id=groups, mini_batch=mini_batch
    )


def dtn_plan(batch: SampleBatch, num_ranks: int, max_tokens: int) -> Plan:
    """A plan with our cuts on Qwen3-235B-A22B with TP4 and PP12."""
    model = MODELS["qwen3-235b-a22b"].model_copy(update={"num_layers": 96})  # divisible by 12
    setup = Setup(
        model=model,
        cluster=ClusterSpec(
            device=DEVICES["h100-80"],
            num_hosts=_TENSOR_SIZE * _NUM_STAGES * num_ranks // 8,
            devices_per_host=8,
            intra_host_bytes_per_s=450e9,
            inter_host_bytes_per_s=50e9,
            intra_host_latency_s=5e-6,
            inter_host_latency_s=15e-6,
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=_TENSOR_SIZE,
            pipeline_model_parallel_size=_NUM_STAGES,
            data_parallel_size=num_ranks,
            expert_model_parallel_size=_TENSOR_SIZE,
            sequence_parallel=True,
            recompute="full",
        ),
        planning=PlanningConfig(max_tokens_per_micro_batch=max_tokens, search_iterations=0),
    )
    return make_plan(PlanningProblem(batch, "benchmark", 0, setup), "sharing_agnostic")


def _op_rate(num_tasks: int, num_ranks: int) -> tuple[float, int]:
    batch = dtn_batch(num_tasks)
    plan = dtn_plan(batch, num_ranks, 4096)
    return fastest_s(lambda: simulate(plan, batch), 2), plan_ops(plan)


def measure() -> list[Measurement]:
    """12,288 GPUs, half and a quarter of them with as much less work, and SimPy beside it."""
    whole_s, num_ops = _op_rate(48, 256)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    half_s, half_ops = _op_rate(24, 128)
    small = dtn_batch(3)
    plan = dtn_plan(small, 16, 4096)
    simpy_s = fastest_s(lambda: simulate(plan, small, options=SimOptions(engine="simpy")), 1)
    reference_s = fastest_s(
        lambda: simulate(plan, small, options=SimOptions(engine="vectorised")), 1
    )
    name = f"DTN iteration, 12,288 GPUs, {len(PHASES)} phases"
    return [
        Measurement(f"{name}: time", whole_s, "s", 10.0, False),
        Measurement(f"{name}: peak memory of the process", peak_gib, "GiB", 4.0, False),
        Measurement(f"{name}: ops", float(num_ops), ""),
        Measurement(f"{name}: rate", num_ops / whole_s, "ops/s", 300e3),
        Measurement(
            "time per op, 12,288 over 6,144 GPUs with half the work",
            (whole_s / num_ops) / (half_s / half_ops),
            "ratio",
            1.2,
            False,
        ),
        Measurement("SimPy engine, 768 GPUs: rate", plan_ops(plan) / simpy_s, "ops/s"),
        Measurement("vectorised engine, 768 GPUs: rate", plan_ops(plan) / reference_s, "ops/s"),
    ]
