"""Small plans for the simulator's tests, hand-made and random, and a plain cost model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from psrl.core.cost.cluster import Amount, ClusterSpec, DeviceSpec, ModelSpec, ParallelConfig
from psrl.core.plan.plan import PHASES, Plan, Program
from psrl.core.plan.schedule import Op, interleave
from psrl.core.plan.tables import Assignments, Blocks, MicroBatches, Schedule, Segments
from psrl.core.run.config import PlanningConfig
from psrl.core.samples.sample import SampleBatch, make_batch
from tests.random_plans import random_batch, random_program, with_times

MODEL = ModelSpec(
    name="four-layers",
    num_layers=4,
    hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=4,
    ffn_hidden_size=16,
    vocab_size=32,
)


@dataclass(frozen=True)
class PlainCostModel:
    """Constant and per-token times, equal on all stages but for `per_stage_s`."""

    forward_token_s: float = 0.0
    forward_op_s: float = 0.0
    backward_token_s: float = 0.0
    backward_op_s: float = 0.0
    head_token_s: float = 0.0
    per_stage_s: float = 0.0
    message_op_s: float = 0.0
    message_token_s: float = 0.0
    reduction_s: float = 0.0
    step_s: float = 0.0

    def stage_forward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        own = self.forward_op_s + stage * self.per_stage_s
        return own + self.forward_token_s * num_tokens + self.head_token_s * head_tokens

    def stage_backward_s(
        self, stage: int, num_tokens: Amount, pairs: Amount, head_tokens: Amount
    ) -> Amount:
        own = self.backward_op_s + stage * self.per_stage_s
        return own + self.backward_token_s * num_tokens + 3 * self.head_token_s * head_tokens

    def forward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_forward_s(0, num_tokens, pairs, head_tokens)

    def backward_s(self, num_tokens: Amount, pairs: Amount, head_tokens: Amount) -> Amount:
        return self.stage_backward_s(0, num_tokens, pairs, head_tokens)

    def message_s(self, num_tokens: Amount) -> Amount:
        return self.message_op_s + self.message_token_s * num_tokens

    def gradient_reduction_s(self) -> float:
        return self.reduction_s

    def optimizer_step_s(self) -> float:
        return self.step_s


def make_plan(
    programs: Sequence[Program],
    num_ranks: int = 1,
    num_stages: int = 1,
    memory_bytes: int = 2**30,
) -> Plan:
    device = DeviceSpec(
        name="small",
        peak_flops_per_s=1e12,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=1e11,
        gemm_efficiency=0.5,
        attention_efficiency=0.5,
        host_layer_s=1e-5,
    )
    cluster = ClusterSpec(
        device=device,
        num_hosts=1,
        devices_per_host=num_ranks * num_stages,
        intra_host_bytes_per_s=1e10,
        inter_host_bytes_per_s=1e9,
        intra_host_latency_s=1e-6,
        inter_host_latency_s=1e-5,
    )
    parallel = ParallelConfig(pipeline_model_parallel_size=num_stages, data_parallel_size=num_ranks)
    phases = tuple(phase for phase in PHASES if any(phase in p.phases for p in programs))
    options = PlanningConfig()
    plan = Plan("hash", 0, "test", options, phases, MODEL, cluster, parallel, tuple(programs))
    return with_times(plan)


def chains_batch(num_tokens: Sequence[int]) -> SampleBatch:
    """Samples of the given lengths without any common token; all but the first are trained."""
    starts = np.cumsum([0, *num_tokens])
    return make_batch(
        [np.arange(a, z) for a, z in pairwise(starts)],
        [[(1, n)] if n > 1 else [] for n in num_tokens],
    )


def chains_program(
    batch: SampleBatch,
    samples_of_rank: Sequence[Sequence[int]],
    *,
    is_update: bool = True,
    mini_batch: int = 0,
    activation: Sequence[str] | None = None,
) -> Program:
    """One micro-batch per sample of a `chains_batch`, in plain 1F1B.

    Args:
        activation: of each micro-batch, on every rank; None keeps all.
    """
    sample = np.array([s for mine in samples_of_rank for s in mine], np.int64)
    sizes = [len(mine) for mine in samples_of_rank]
    rank = np.repeat(np.arange(len(sizes)), sizes)
    micro_batch = np.concatenate([np.arange(n) for n in sizes]).astype(np.int64)
    num_tokens = batch.num_tokens[sample]
    modes = ["keep"] * max(sizes) if activation is None else list(activation)
    ops: list[tuple[int, Op]] = []
    for owner, size in enumerate(sizes):
        order = range(size)
        dropped = frozenset(m for m in order if modes[m] == "drop")
        if is_update:
            mine = interleave(order, order, [k + 1 for k in order], dropped)
        else:
            mine = [Op("forward", m) for m in order]
        ops += [(owner, op) for op in mine]
    program = Program(
        phases=("update",) if is_update else ("log_old_prob", "reference"),
        is_update=is_update,
        mini_batch=mini_batch if is_update else -1,
        granularity_tokens=1,
        assignments=Assignments(rank, sample, np.zeros_like(sample)),
        segments=Segments.empty(),
        micro_batches=MicroBatches(
            rank=rank,
            micro_batch=micro_batch,
            activation=np.array([modes[m] for m in micro_batch], np.str_),
            num_tokens=num_tokens,
            pairs=num_tokens * (num_tokens + 1) // 2,
            head_tokens=num_tokens - 1,
            forward_s=np.zeros(len(rank)),
            backward_s=np.zeros(len(rank)),
        ),
        schedule=Schedule(
            rank=np.array([owner for owner, _ in ops], np.int64),
            op=np.array([op.kind for _, op in ops], np.str_),
            micro_batch=np.array([op.micro_batch for _, op in ops], np.int64),
        ),
        blocks=Blocks.empty(),
    )
    node = program.tree(batch).sample_node
    segments = Segments(rank, micro_batch, node, np.zeros_like(sample), num_tokens)
    return Program(**{**vars(program), "segments": segments})


def random_plan(
    seed: int, num_ranks: int, num_stages: int, *, memory_bytes: int = 2**30
) -> tuple[Plan, SampleBatch]:
    """A forward-only program and two update programs of one batch, all with shared prefixes."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    programs = [
        random_program(
            rng,
            batch,
            num_ranks=num_ranks,
            is_update=is_update,
            activations=("keep", "recompute", "drop") if is_update else ("keep",),
            max_block_tokens=3,
        ).program
        for is_update in (False, True, True)
    ]
    return make_plan(programs, num_ranks, num_stages, memory_bytes), batch
