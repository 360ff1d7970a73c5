"""Experts: routing losses and loads count a shared token once per sample through it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.model import transformer_config
from psrl.backend.model.moe import RouterRun, router_loss, rows_to_exchange, token_multiplicity
from psrl.backend.options import LossOptions, RouterOptions
from psrl.backend.train import inputs as inputs_module
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.errors import BackendError
from psrl.core.plan.packing import pack_rank
from psrl.core.plan.plan import Program
from psrl.core.plan.tables import Schedule
from psrl.core.samples.sample import make_batch
from tests.backend.alone import SampleAlone, train_alone
from tests.backend.cases import (
    TINY,
    Case,
    Outcome,
    make_case,
    relative_error,
    run_case,
    single_process,
)

MOE = TINY.model_copy(
    update={
        "num_layers": 2,
        "qkv_bias": False,
        "qk_layernorm": True,
        "num_moe_experts": 4,
        "moe_topk": 2,
        "moe_ffn_hidden_size": 24,
    }
)
ROUTER = RouterOptions(balance_coefficient=0.7, z_coefficient=0.05)
GSPO = LossOptions(kind="gspo", kl_coefficient=0.0)


def moe_case(seed: int, num_ranks: int = 1, spec: ModelSpec = MOE) -> Case:
    """A random case; with several ranks, one whose ranks can run one op pattern."""
    for attempt in range(100):
        case = replace(make_case(seed + 1000 * attempt, num_ranks=num_ranks), spec=spec)
        table = case.planned.program.micro_batches
        sizes = {int((table.rank == rank).sum()) for rank in range(num_ranks)}
        if len(sizes) == 1 and sizes != {0}:
            break
    program = one_pattern(case.planned.program, num_ranks)
    return replace(case, planned=replace(case.planned, program=program))


def one_pattern(program: Program, num_ranks: int) -> Program:
    """All forwards, then all backwards from the last: valid for any program, the same on ranks."""
    table = program.micro_batches
    count = int((table.rank == 0).sum())
    activation = table.activation[table.rank == 0]
    ops = [("forward", m) for m in range(count)]
    for m in reversed(range(count)):
        ops += [("recompute", m)] * (activation[m] == "drop") + [("backward", m)]
    kind, micro_batch = map(np.array, zip(*ops, strict=True))
    schedule = Schedule(
        rank=np.repeat(np.arange(num_ranks), len(ops)),
        op=np.tile(kind, num_ranks),
        micro_batch=np.tile(micro_batch, num_ranks),
    )
    same = replace(table, activation=np.tile(activation, num_ranks))
    return replace(program, schedule=schedule, micro_batches=same)


def loss_alone(case: Case, router: RouterOptions) -> Callable[[list[SampleAlone]], Tensor]:
    """PPO or GSPO with the k3 penalty, and the router losses over the tokens of all samples."""

    def loss(samples: list[SampleAlone]) -> Tensor:
        total = torch.zeros((), dtype=samples[0].logprob.dtype)
        trained = [s for s in samples if len(s.logprob)]
        for s in trained:
            ratio = torch.exp(s.logprob - s.old)
            if case.loss.kind == "gspo":
                ratio = torch.exp((s.logprob - s.old).mean()).expand_as(s.logprob)
            worst = torch.maximum(-ratio * s.advantage, -ratio.clamp(0.8, 1.2) * s.advantage)
            kl = torch.expm1(s.reference - s.logprob) - (s.reference - s.logprob)
            terms = worst + case.loss.kl_coefficient * kl
            if case.loss.kind == "gspo":
                total = total + terms.mean() / len(trained)
            else:
                total = total + terms.sum() / sum(len(t.logprob) for t in trained)
        for layer in range(case.spec.num_layers):
            logits = torch.cat([s.routing[layer] for s in samples if s.routing])
            total = total + dense_router_loss(logits, case.spec.moe_topk, router)
        return total

    return loss


def dense_router_loss(logits: Tensor, topk: int, router: RouterOptions) -> Tensor:
    """Load-balancing loss and z-loss over [tokens, experts] router logits."""
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(topk, dim=1).indices, 1.0)
    fraction = chosen.sum(dim=0) / chosen.sum()
    mean = torch.softmax(logits, dim=1).mean(dim=0)
    balance = logits.shape[1] * (fraction.detach() * mean).sum()
    z = torch.logsumexp(logits, dim=1).square().mean()
    return router.balance_coefficient * balance + router.z_coefficient * z


def load_alone(routing: Sequence[list[Tensor]], topk: int) -> Tensor:
    """[layers, experts] tokens of all samples that each expert got."""
    layers = zip(*(r for r in routing if r), strict=True)
    return torch.stack(
        [
            torch.cat(logits).topk(topk, dim=1).indices.flatten().bincount(minlength=4)
            for logits in layers
        ]
    ).double()


def run_alone(cases: list[Case], dtype: torch.dtype, router: RouterOptions) -> list[Outcome]:
    with model_parallel(ParallelConfig()):
        return [run_one_alone(case, dtype, router) for case in cases]


def run_one_alone(case: Case, dtype: torch.dtype, router: RouterOptions) -> Outcome:
    seen: list[list[Tensor]] = []

    def loss(samples: list[SampleAlone]) -> Tensor:
        seen.extend([logits.detach() for logits in s.routing] for s in samples)
        return loss_alone(case, router)(samples)

    outcome = train_alone(case, dtype, loss)
    return replace(outcome, expert_load=load_alone(seen, case.spec.moe_topk))


def run_shared(
    cases: list[Case], dtype: torch.dtype, router: RouterOptions, parallel: ParallelConfig
) -> list[Outcome]:
    with model_parallel(parallel) as pipeline:
        return [
            replace(
                run_case(
                    case,
                    dtype,
                    pipeline=pipeline,
                    router=router,
                    sequence_parallel=parallel.sequence_parallel,
                ),
                events=None,
            )
            for case in cases
        ]


@pytest.mark.slow
def test_experts_equal_samples_alone_in_fp64() -> None:
    cases = [moe_case(seed) for seed in range(8)]
    cases += [replace(moe_case(3), loss=GSPO)]
    wanted = run_ranks(run_alone, 1, cases, torch.float64, ROUTER)[0]
    single = ParallelConfig()
    found = run_ranks(run_shared, 1, cases, torch.float64, ROUTER, single)[0]
    for f, w in zip(found, wanted, strict=True):
        error = relative_error(f, w)
        assert max(error.values()) <= 1e-10, error
        assert torch.equal(f.expert_load, w.expert_load)


EP2 = ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2)
TP2_EP2 = ParallelConfig(
    tensor_model_parallel_size=2,
    data_parallel_size=2,
    expert_model_parallel_size=2,
    sequence_parallel=True,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "dispatcher"),
    [
        (EP2, "alltoall"),
        (EP2, "allgather"),
        pytest.param(TP2_EP2, "alltoall", marks=pytest.mark.slow),
        pytest.param(
            TP2_EP2.model_copy(update={"expert_model_parallel_size": 4}),
            "alltoall",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            EP2.model_copy(update={"pipeline_model_parallel_size": 2}),
            "alltoall",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ep2", "ep2_allgather", "tp2_ep2_sp", "tp2_ep4_sp", "pp2_ep2"],
)
def test_expert_parallel_equals_samples_alone(parallel: ParallelConfig, dispatcher: str) -> None:
    router = replace(ROUTER, dispatcher=dispatcher)
    cases = [moe_case(seed, parallel.data_parallel_size) for seed in range(1, 5)]
    wanted = run_ranks(run_alone, 1, cases, torch.float32, router)[0]
    world = parallel.world_size
    found = run_ranks(run_shared, world, cases, torch.float32, router, parallel)
    for outcomes in found:
        for f, w in zip(outcomes, wanted, strict=True):
            error = relative_error(f, w)
            assert error["gradient"] <= 5e-6, error
            assert error["loss"] <= 5e-6, error
            assert error["logprob"] <= 2e-5, error
            assert torch.equal(f.expert_load, w.expert_load)


def without_multiplicity(cases: list[Case]) -> list[Outcome]:
    real = inputs_module.token_multiplicity
    inputs_module.token_multiplicity = lambda *arguments: np.ones_like(real(*arguments))
    return run_shared(cases, torch.float64, ROUTER, ParallelConfig())


@pytest.mark.slow
def test_forgetting_multiplicity_is_noticed() -> None:
    cases = [moe_case(seed) for seed in range(4)]
    wanted = run_ranks(run_alone, 1, cases, torch.float64, ROUTER)[0]
    found = run_ranks(without_multiplicity, 1, cases)[0]
    for f, w in zip(found, wanted, strict=True):
        error = relative_error(f, w)
        assert error["gradient"] > 1e-3
        assert error["logprob"] <= 1e-10, "multiplicity must not touch the forward"


def test_multiplicity_counts_the_ranks_own_samples() -> None:
    tokens = [[1, 2, 3], [1, 2, 4], [1, 2], [1, 5]]
    batch = make_batch(list(map(np.array, tokens)), [[(1, len(t))] for t in tokens])
    planned = single_process(batch, num_ranks=2, max_micro_batches=1, seed=4)
    program, tree = planned.program, planned.tree
    logical = 0
    for rank in range(2):
        own = program.assignments.sample[program.assignments.rank == rank]
        for packed in pack_rank(program.on_rank(rank), tree):
            found = token_multiplicity(program, rank, tree, packed)
            assert found[0] == len(own), "all samples begin with token 1"
            logical += found.sum()
    assert logical == sum(map(len, tokens))


def megatrons_losses() -> list[float]:
    """Our losses over one whole batch, minus Megatron's own."""
    from megatron.core.transformer.moe.moe_utils import (
        switch_load_balancing_loss_func,
        z_loss_func,
    )

    logits = 2 * torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    chosen = torch.zeros(11, 4).scatter(1, logits.topk(2).indices, 1.0)
    counts = torch.ones(11)
    errors = []
    for balance, z in ((0.3, 0.0), (0.0, 0.2)):
        options = RouterOptions(balance, z)
        run = RouterRun(1, 4, 11, options, chosen.sum(dim=0, keepdim=True) / 22)
        ours = router_loss(run, 0, logits, counts)
        assert ours is not None
        theirs = (
            switch_load_balancing_loss_func(
                logits.softmax(dim=-1),
                chosen.sum(dim=0),
                11,
                topk=2,
                num_experts=4,
                moe_aux_loss_coeff=balance,
            )
            if balance
            else z_loss_func(logits, z)
        )
        errors.append(float(ours - theirs))
    return errors


def test_router_losses_are_megatrons() -> None:
    assert max(map(abs, megatrons_losses())) <= 1e-6


def test_balance_needs_the_whole_mini_batch() -> None:
    run = RouterRun(1, 4, 3, RouterOptions(balance_coefficient=1.0))
    with pytest.raises(BackendError, match="fractions of the whole mini-batch"):
        router_loss(run, 0, torch.zeros(3, 4), torch.ones(3))


def test_gathered_micro_batches_have_equal_rows() -> None:
    case = moe_case(2, num_ranks=2)
    program = case.planned.program
    rows = [rows_to_exchange(program, rank, 2) for rank in range(2)]
    assert rows[0] == rows[1]
    sizes = program.micro_batches.num_tokens.reshape(2, -1)
    assert list(rows[0].values()) == sizes.max(axis=0).tolist()
    alone = rows_to_exchange(program, 0, 1)
    assert list(alone.values()) == sizes[0].tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_expert_capacity_factor", 1.5),
        ("moe_input_jitter_eps", 0.1),
        ("moe_router_pre_softmax", True),
        ("moe_shared_expert_intermediate_size", 8),
    ],
)
def test_unproven_routing_is_refused(name: str, value: object) -> None:
    with pytest.raises(BackendError, match=f"{name} = .* is refused"):
        transformer_config(MOE, ParallelConfig(), torch.float32, **{name: value})
