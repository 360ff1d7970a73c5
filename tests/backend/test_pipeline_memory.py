"""Bytes on every stage, op by op: the simulated ledger and the backend's measurement agree."""

from collections import Counter

import numpy as np
import pytest
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.train.stage import PhaseInputs
from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ParallelConfig
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.plan.packing import loss_edges
from psrl.core.plan.schedule import stage_ops
from psrl.core.samples.sample import make_batch
from tests.backend.cases import PPO, VARIANTS, Case, Outcome, run_case, single_process
from tests.backend.test_pipeline import DP2_PP2, PP2, PP4, make_cases
from tests.memory_ledger import op_by_op


def outcomes(cases: list[Case], parallel: ParallelConfig) -> list[Outcome]:
    with model_parallel(parallel) as pipeline:
        return [run_case(case, torch.float32, pipeline=pipeline) for case in cases]


def memory_model(case: Case, parallel: ParallelConfig) -> MemoryModel:
    device = DeviceSpec(
        name="test",
        peak_flops_per_s=1e12,
        memory_bytes=2**34,
        memory_bandwidth_bytes_per_s=1e11,
        gemm_efficiency=0.5,
        attention_efficiency=0.5,
        host_layer_s=1e-5,
        dtype_bytes=4,
    )
    cluster = ClusterSpec(
        device=device,
        num_hosts=1,
        devices_per_host=parallel.world_size,
        intra_host_bytes_per_s=1e10,
        inter_host_bytes_per_s=1e10,
        intra_host_latency_s=1e-6,
        inter_host_latency_s=1e-6,
    )
    return MemoryModel(case.spec, cluster, parallel)


# Five terms of a loss with clipping and a KL penalty, in float64.
LOSS_BYTES_PER_EDGE = 56


def loss_term_bytes(case: Case, rank: int) -> dict[int, int]:
    """What the terms of each micro-batch's loss take beyond the account.

    Its tables know predicted rows only, and it counts one edge for each.
    """
    planned = case.planned
    samples = planned.batch.select(planned.program.assignments.sample)
    edges = loss_edges(planned.program, rank, planned.tree, samples)
    more = {}
    for m in planned.program.on_rank(rank).micro_batches.micro_batch.tolist():
        mine = edges.of(m)
        more[m] = (len(mine.row) - len(np.unique(mine.row))) * LOSS_BYTES_PER_EDGE
    return more


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [ParallelConfig(), PP4, DP2_PP2], ids=["alone", "pp4", "dp2-pp2"]
)
def test_the_log_equals_the_account_on_every_op(parallel: ParallelConfig) -> None:
    """All bytes: static ones, held activations, logits, keys and values, and their gradients."""
    cases = make_cases(range(6), parallel)
    num_stages = parallel.pipeline_model_parallel_size
    world = run_ranks(outcomes, parallel.world_size, cases, parallel)
    seen: Counter[str] = Counter()
    for process, results in enumerate(world):
        stage, rank = divmod(process, parallel.data_parallel_size)
        for case, outcome in zip(cases, results, strict=True):
            program, memory = case.planned.program.on_rank(rank), memory_model(case, parallel)
            assert outcome.events is not None
            events = outcome.events.where(outcome.events.micro_batch >= 0)
            assert set(events.stage.tolist()) <= {stage}
            ops = stage_ops(program.ops(), num_stages, stage)
            assert list(zip(events.op, events.micro_batch, strict=True)) == ops
            # These runs have no optimizer.
            resident = 2 * memory.weight_bytes_on(stage)
            more = loss_term_bytes(case, rank) if stage == num_stages - 1 else {}
            activation = program.micro_batches.activation.tolist()
            held: set[int] = set()
            for i, state in enumerate(
                op_by_op(program, case.planned.tree, memory, stage, with_working_set=False)
            ):
                op = ops[i]
                if op.kind == "recompute" or activation[op.micro_batch] != "drop":
                    held.add(op.micro_batch)
                wanted = state._replace(
                    static_bytes=resident,
                    activation_bytes=state.activation_bytes + sum(more.get(m, 0) for m in held),
                )
                found = [int(getattr(events, name)[i]) for name in MemoryState._fields]
                assert found == list(wanted), (case.spec, op, activation[op.micro_batch])
                seen += Counter({n: getattr(wanted, n) > 0 for n in MemoryState._fields})
                if op.kind == "backward":
                    held.discard(op.micro_batch)
    assert min(seen[name] for name in MemoryState._fields) > 20


# hidden, heads, groups, head dimension, MLP width, layers, tokens, predicted positions
SIZES = (
    (32, 4, 2, 8, 40, 4, 64, 20),
    (64, 8, 2, 8, 100, 2, 96, 33),
    (128, 4, 4, 32, 384, 4, 200, 199),
    (128, 4, 2, 64, 384, 2, 200, 10),
)


def sized_case(size: tuple[int, ...], activation: str, variant: int) -> Case:
    """One sample in one micro-batch of a model of the given size."""
    hidden, heads, groups, head_dim, ffn, layers, num_tokens, num_rows = size
    spec = VARIANTS[variant].model_copy(
        update={
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": head_dim,
            "ffn_hidden_size": ffn,
            "num_layers": layers,
        }
    )
    batch = make_batch([np.arange(num_tokens) % 40], [[(num_tokens - num_rows, num_tokens)]])
    planned = single_process(batch, max_micro_batches=1, activations=(activation,))
    known = PhaseInputs(np.full(num_rows, -4.0), np.full(num_rows, -4.0))
    return Case(planned, spec, known, PPO)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(), PP2], ids=["pp1", "pp2"])
def test_activation_model_equals_what_autograd_keeps(parallel: ParallelConfig) -> None:
    """To the byte, for plain and QK-normalised attention in several sizes."""
    num_stages = parallel.pipeline_model_parallel_size
    cases = [
        sized_case(size, activation, variant)
        for size in SIZES
        for activation in ("keep", "recompute", "drop")
        for variant in range(2)
    ]
    world = run_ranks(outcomes, num_stages, cases, parallel)
    for stage, results in enumerate(world):
        is_last = stage == num_stages - 1
        for case, outcome in zip(cases, results, strict=True):
            table = case.planned.program.micro_batches
            activation = str(table.activation[0])
            predicted = memory_model(case, parallel).held_bytes(
                activation, table.num_tokens, table.head_tokens, stage
            )
            if is_last and activation != "drop":
                predicted = predicted + loss_term_bytes(case, 0)[0]
            assert outcome.events is not None
            assert int(outcome.events.activation_bytes[0]) == int(predicted[0]), (
                case.spec,
                activation,
                stage,
            )
