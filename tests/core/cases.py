"""Small plans shared by the tests of plans, packing, rules and memory."""

from dataclasses import replace

import numpy as np

from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ModelSpec, ParallelConfig
from psrl.core.cost.presets import DEVICES
from psrl.core.plan.plan import PHASES, Plan, Program
from psrl.core.plan.tables import Assignments, Blocks, MicroBatches, Schedule, Segments, Table
from psrl.core.run.config import PlanningConfig
from psrl.core.samples.sample import SampleBatch, make_batch
from tests.random_plans import RandomProgram, random_batch, random_program, with_times

MODEL = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=2,
    ffn_hidden_size=16,
    vocab_size=32,
)
DEVICE = DeviceSpec(
    name="hand",
    peak_flops_per_s=1e12,
    memory_bytes=2**30,
    memory_bandwidth_bytes_per_s=1e11,
    gemm_efficiency=0.5,
    attention_efficiency=0.5,
    host_layer_s=1e-4,
)


def cluster(num_devices: int, memory_bytes: int = 2**30) -> ClusterSpec:
    return ClusterSpec(
        device=DEVICE.model_copy(update={"memory_bytes": memory_bytes}),
        num_hosts=1,
        devices_per_host=num_devices,
        intra_host_bytes_per_s=1e9,
        inter_host_bytes_per_s=1e9,
        intra_host_latency_s=1e-6,
        inter_host_latency_s=1e-6,
    )


def a100_cluster(num_hosts: int = 1, devices_per_host: int = 8, **device: float) -> ClusterSpec:
    """Hosts of A100s on NVLink and InfiniBand."""
    return ClusterSpec(
        device=DEVICES["a100-80"].model_copy(update=device),
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        intra_host_bytes_per_s=300e9,
        inter_host_bytes_per_s=25e9,
        intra_host_latency_s=5e-6,
        inter_host_latency_s=15e-6,
    )


def wrap(
    *programs: Program, num_ranks: int = 1, num_stages: int = 2, memory_bytes: int = 2**30
) -> Plan:
    """A plan that predicts nothing but the times of its micro-batches."""
    parallel = ParallelConfig(pipeline_model_parallel_size=num_stages, data_parallel_size=num_ranks)
    plan = Plan(
        trace_hash="0" * 64,
        iteration=0,
        policy="random",
        options=PlanningConfig(seed=1),
        phases=tuple(phase for phase in PHASES if any(phase in p.phases for p in programs)),
        model=MODEL,
        cluster=cluster(parallel.world_size, memory_bytes),
        parallel=parallel,
        programs=programs,
    )
    return with_times(plan)


def random_case(seed: int) -> RandomProgram:
    """A program whose every option depends on the seed."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, num_samples=int(rng.integers(1, 9)))
    return random_program(
        rng,
        batch,
        num_ranks=int(rng.integers(1, 4)),
        max_micro_batches=int(rng.integers(1, 8)),
        is_update=bool(rng.random() < 0.7),
        random_order=bool(rng.random() < 0.7),
        activations=("keep", "recompute", "drop"),
        max_block_tokens=None if rng.random() < 0.5 else int(rng.integers(1, 4)),
        num_share_keys=int(rng.integers(1, 3)),
        granularity_tokens=int(rng.integers(1, 4)),
    )


def with_values(table: Table, row: int, **values: object) -> Table:
    """The table with some columns of one row changed."""
    columns = {}
    for name, value in values.items():
        columns[name] = getattr(table, name).copy()
        if columns[name].dtype.kind == "U":
            columns[name] = columns[name].astype("U16")
        columns[name][row] = value
    return replace(table, **columns)


def without_row(table: Table, row: int) -> Table:
    return table.rows(np.delete(np.arange(len(table)), row))


def hand_batch() -> SampleBatch:
    """Tree: node 1 = tokens 1 2, below it node 2 = 3 4 and node 3 = 5; node 4 = 6 7."""
    return make_batch([[1, 2, 3, 4], [1, 2, 5], [6, 7]], [[(1, 4)], [(2, 3)], [(1, 2)]])


def hand_program() -> Program:
    """`hand_batch` on two ranks, written out by hand.

    Rank 0 computes the shared prefix in micro-batch 0, token 3 in the dropped micro-batch 1, and
    tokens 4 and 5 in the layer-recomputed micro-batch 2. Rank 1 computes tokens 6 and 7.
    """
    return Program(
        phases=("update",),
        is_update=True,
        mini_batch=0,
        granularity_tokens=1,
        assignments=Assignments(
            rank=np.array([0, 0, 1]), sample=np.array([0, 1, 2]), share_key=np.array([0, 0, 0])
        ),
        segments=Segments(
            rank=np.array([0, 0, 0, 0, 1]),
            micro_batch=np.array([0, 1, 2, 2, 0]),
            node=np.array([1, 2, 2, 3, 4]),
            start_depth=np.array([0, 2, 3, 2, 0]),
            num_tokens=np.array([2, 1, 1, 1, 2]),
        ),
        micro_batches=MicroBatches(
            rank=np.array([0, 0, 0, 1]),
            micro_batch=np.array([0, 1, 2, 0]),
            activation=np.array(["keep", "drop", "recompute", "keep"]),
            num_tokens=np.array([2, 1, 2, 2]),
            pairs=np.array([3, 3, 7, 3]),
            head_tokens=np.array([2, 1, 0, 1]),
            forward_s=np.array([2.0, 1.0, 2.0, 2.0]),
            backward_s=np.array([4.0, 2.0, 4.0, 4.0]),
        ),
        schedule=Schedule(
            rank=np.array([0, 0, 0, 0, 0, 0, 0, 1, 1]),
            op=np.array(
                ["forward"] * 3
                + ["backward", "recompute", "backward", "backward", "forward", "backward"]
            ),
            micro_batch=np.array([0, 1, 2, 2, 1, 1, 0, 0, 0]),
        ),
        blocks=Blocks(
            rank=np.array([0, 0]),
            block=np.array([0, 1]),
            micro_batch=np.array([0, 1]),
            start_row=np.array([0, 0]),
            num_tokens=np.array([2, 1]),
            allocated_tokens=np.array([4, 4]),
            release_op=np.array(["backward", "backward"]),
            release_micro_batch=np.array([0, 1]),
        ),
        block_tokens=4,
    )
