"""Bytes on every stage, op by op: the simulated ledger and the backend's measurement agree."""

import numpy as np
import pytest
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.train.stage import PhaseInputs
from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ParallelConfig
from psrl.core.cost.memory_model import MemoryModel
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


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [PP4, DP2_PP2], ids=["pp4", "dp2-pp2"])
def test_kv_bytes_equal_the_simulated_ledger_on_every_stage(parallel: ParallelConfig) -> None:
    """Cached keys, their gradients and logits, op by op; ops are those of the stage."""
    cases = make_cases(range(5), parallel)
    num_stages = parallel.pipeline_model_parallel_size
    world = run_ranks(outcomes, parallel.world_size, cases, parallel)
    num_checked = 0
    for process, results in enumerate(world):
        stage, rank = divmod(process, parallel.data_parallel_size)
        for case, outcome in zip(cases, results, strict=True):
            program = case.planned.program.on_rank(rank)
            ops = stage_ops(program.ops(), num_stages, stage)
            states = op_by_op(program, case.planned.tree, memory_model(case, parallel), stage)
            assert outcome.events is not None
            events = outcome.events.where(outcome.events.micro_batch >= 0)
            assert set(events.stage.tolist()) <= {stage}
            assert list(zip(events.op, events.micro_batch, strict=True)) == ops
            assert events.kv_bytes.tolist() == [s.kv_bytes for s in states]
            assert events.kv_gradient_bytes.tolist() == [s.kv_gradient_bytes for s in states]
            num_checked += sum(s.kv_gradient_bytes > 0 for s in states)
            if stage == num_stages - 1:
                wanted = [
                    min(n, 1024) * 2 * 4 * case.spec.vocab_size
                    for n in program.micro_batches.head_tokens[events.micro_batch].tolist()
                ]
                assert events.logits_bytes.tolist() == wanted
            else:
                assert not events.logits_bytes.any()
    assert num_checked > 20


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
    """Within 5 %, for plain and QK-normalised attention; dropping, a first stage keeps less."""
    num_stages = parallel.pipeline_model_parallel_size
    cases = [
        sized_case(size, activation, variant)
        for size in SIZES
        for activation in ("keep", "recompute", "drop")
        for variant in range(2)
    ]
    world = run_ranks(outcomes, num_stages, cases, parallel)
    for stage, results in enumerate(world):
        for case, outcome in zip(cases, results, strict=True):
            table = case.planned.program.micro_batches
            activation = str(table.activation[0])
            predicted = memory_model(case, parallel).held_bytes(
                activation,
                int(table.num_tokens[0]),
                int(table.head_tokens[0]),
                is_last_stage=stage == num_stages - 1,
            )
            assert outcome.events is not None
            measured = int(outcome.events.activation_bytes[0])
            if activation == "drop" and stage == 0:
                assert measured == 0
                assert predicted == (
                    0 if num_stages == 1 else table.num_tokens[0] * 4 * hidden(case)
                )
            else:
                assert predicted == pytest.approx(measured, rel=0.05), (
                    case.spec,
                    activation,
                    stage,
                )


def hidden(case: Case) -> int:
    return case.spec.hidden_size
