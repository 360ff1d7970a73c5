"""Pipelines give the results of samples alone, whatever the plan, and end when a rank dies."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.train.inputs import LossTokens
from psrl.backend.train.kv_store import BlockStore
from psrl.backend.train.pipe import SINGLE_STAGE, Pipe
from psrl.backend.train.stage import PhaseInputs, StageRun
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError
from psrl.core.plan.schedule import Op, can_finish, stage_ops
from tests.backend.cases import (
    ACTIVATIONS,
    PPO,
    VARIANTS,
    Case,
    Outcome,
    relative_error,
    run_case,
    run_samples_alone,
    single_process,
)
from tests.random_plans import random_batch, random_program

PP2 = ParallelConfig(pipeline_model_parallel_size=2)
PP4 = ParallelConfig(pipeline_model_parallel_size=4)
PP8 = ParallelConfig(pipeline_model_parallel_size=8)
DP2_PP2 = PP2.model_copy(update={"data_parallel_size": 2})
TP2_PP2 = PP2.model_copy(update={"tensor_model_parallel_size": 2})


def make_case(seed: int, parallel: ParallelConfig, **program: Any) -> Case:
    """Several trees in many micro-batches, so that backwards and forwards take turns."""
    rng = np.random.default_rng(seed)
    batch = random_batch(
        rng,
        num_samples=int(rng.integers(1, 14)),
        num_groups=4,
        max_new_tokens=10,
        vocab_size=(3, 20)[seed % 2],
    )
    settings: dict[str, Any] = {
        "num_ranks": parallel.data_parallel_size,
        "max_micro_batches": 10,
        "random_order": seed % 3 > 0,
        "activations": ACTIVATIONS,
        "num_share_keys": 1 + seed % 4,
        "max_block_tokens": None if seed % 2 else 3,
        "granularity_tokens": 1 + 2 * (seed % 5 == 0),
    }
    planned = random_program(rng, batch, **settings | program)
    num_tokens = len(LossTokens(batch))
    known = PhaseInputs(rng.uniform(-5, -3, num_tokens), rng.uniform(-5, -3, num_tokens))
    num_layers = max(4, parallel.pipeline_model_parallel_size)
    spec = VARIANTS[seed % 2].model_copy(update={"num_layers": num_layers})
    # Smaller weights than elsewhere: with 8 layers the others amplify float32 rounding.
    return Case(planned, spec, known, PPO, init_std=0.1)


def make_cases(seeds: Sequence[int], parallel: ParallelConfig, **program: Any) -> list[Case]:
    return [make_case(seed, parallel, **program) for seed in seeds]


def alone(cases: list[Case], dtype: torch.dtype) -> list[Outcome]:
    with model_parallel(ParallelConfig()):
        return [run_samples_alone(case, dtype) for case in cases]


def errors(
    cases: list[Case],
    dtype: torch.dtype,
    parallel: ParallelConfig,
    wanted: list[Outcome],
    store_class: type[BlockStore] = BlockStore,
) -> list[dict[str, float]]:
    """Errors of all cases on this process; send windows of 1 to 3."""
    with model_parallel(parallel) as pipeline:
        found = [
            run_case(c, dtype, pipeline=pipeline, send_window=1 + i % 3, store_class=store_class)
            for i, c in enumerate(cases)
        ]
    return [relative_error(f, w) for f, w in zip(found, wanted, strict=True)]


def largest_errors(
    cases: list[Case], dtype: torch.dtype, parallel: ParallelConfig
) -> dict[str, float]:
    """Largest error over all cases and processes, which are started once."""
    wanted = run_ranks(alone, 1, cases, dtype)[0]
    world_size = parallel.world_size
    ranks = run_ranks(errors, world_size, cases, dtype, parallel, wanted)
    return {name: max(e[name] for rank in ranks for e in rank) for name in ranks[0][0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "seeds"),
    [
        (PP2, range(12)),
        (PP4, range(12, 20)),
        pytest.param(PP2, range(100, 300), marks=pytest.mark.slow),
        pytest.param(PP4, range(300, 420), marks=pytest.mark.slow),
        pytest.param(PP8, range(500, 540), marks=pytest.mark.slow),
    ],
    ids=["pp2", "pp4", "pp2-many", "pp4-many", "pp8-many"],
)
def test_random_plans_on_stages_equal_samples_alone(parallel: ParallelConfig, seeds: range) -> None:
    worst = largest_errors(make_cases(seeds, parallel), torch.float64, parallel)
    assert max(worst.values()) <= 1e-10, worst


def test_the_cases_are_hard() -> None:
    """They drop and read on many plans, and blocking sends would hang some of them."""
    cases = make_cases(range(40), PP2)
    programs = [case.planned.program for case in cases]
    assert sum(len(p.blocks) > 0 for p in programs) >= 30
    assert sum("drop" in p.micro_batches.activation for p in programs) >= 25
    assert sum(case.spec.tied_embeddings for case in cases) == 20
    for num_stages in (2, 4, 8):
        lists = [
            [stage_ops(p.on_rank(0).ops(), num_stages, stage) for stage in range(num_stages)]
            for p in programs
        ]
        hangs = {w: sum(not can_finish(stages, w) for stages in lists) for w in (0, 1, 2, 3)}
        assert hangs[0] >= 8, hangs
        assert hangs[1] == hangs[2] == hangs[3] == 0


def test_a_pipe_refuses_to_block_on_every_send() -> None:
    with pytest.raises(BackendError, match="send window 0"):
        Pipe(SINGLE_STAGE, [], lambda _: (1,), torch.float32, send_window=0)


def off_full_and_ancestors(case: Case) -> list[Case]:
    """The case without recompute, with it everywhere, and where others read cached keys."""
    program = case.planned.program
    table = program.micro_batches
    owners = program.blocks.rank * len(table) + program.blocks.micro_batch
    is_ancestor = np.isin(table.rank * len(table) + table.micro_batch, owners)
    return [
        replace(
            case,
            planned=replace(
                case.planned,
                program=replace(program, micro_batches=replace(table, activation=activation)),
            ),
        )
        for activation in (
            np.full(len(table), "keep"),
            np.full(len(table), "recompute"),
            np.where(is_ancestor, "recompute", "keep"),
        )
    ]


LAYOUTS = {"pp2": PP2, "pp4": PP4, "dp2-pp2": DP2_PP2, "tp2-pp2": TP2_PP2}


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_recompute_modes_in_float32(layout: str, num_seeds: int) -> None:
    parallel = LAYOUTS[layout]
    kept = make_cases(range(num_seeds), parallel, activations=("keep",))
    cases = [mode for case in kept for mode in off_full_and_ancestors(case)]
    cases += make_cases(range(num_seeds, 3 * num_seeds), parallel)
    worst = largest_errors(cases, torch.float32, parallel)
    assert worst["gradient"] <= 5e-6, worst
    assert worst["loss"] <= 5e-6, worst
    assert worst["logprob"] <= 2e-5, worst


def cut(case: Case, one_token: bool) -> Case:
    """The case in micro-batches of one token, or in a single one.

    Random cuts are tried until one cuts everywhere.
    """
    for seed in count():
        planned = single_process(
            case.planned.batch,
            seed=seed,
            activations=ACTIVATIONS,
            max_micro_batches=10**6 if one_token else 1,
        )
        if not one_token or planned.program.micro_batches.num_tokens.max() == 1:
            return replace(case, planned=planned)
    raise AssertionError


@pytest.mark.slow
def test_cuts_from_one_token_to_the_whole_batch() -> None:
    cases = make_cases(range(40), PP2)
    case = min(cases, key=lambda c: abs(c.planned.tree.unique_tokens - 15))
    cases = [cut(case, one_token) for one_token in (True, False)]
    assert len(cases[0].planned.program.micro_batches) >= 12
    assert len(cases[0].planned.program.blocks) > 5
    assert len(cases[1].planned.program.micro_batches) == 1
    worst = largest_errors(cases, torch.float32, PP2)
    assert worst["gradient"] <= 5e-6, worst
    assert worst["loss"] <= 5e-6, worst


def loss_and_norm(
    case: Case, seeds: Sequence[int], dtype: torch.dtype
) -> list[tuple[float, float]]:
    results = []
    with model_parallel(PP2) as pipeline:
        for seed in seeds:
            planned = single_process(case.planned.batch, seed=seed, activations=ACTIVATIONS)
            found = run_case(replace(case, planned=planned), dtype, pipeline=pipeline)
            square = sum(float(g.double().square().sum()) for g in found.gradients.values())
            results.append((found.loss, square**0.5))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(3))
def test_ten_cuts_of_a_batch_give_one_loss(batch: int) -> None:
    case = make_cases([batch], PP2)[0]
    seeds = [*range(10), 0]
    for results in run_ranks(loss_and_norm, 2, case, seeds, torch.float32):
        assert results[0] == results[-1], "the same cut gives the same bits"
        # Terms of either sign cancel in the loss, so its own size is no measure of rounding.
        spread = np.ptp(np.array(results), axis=0) / np.maximum(np.abs(results[0]), 1.0)
        assert len(set(results)) > 1, "the cuts are all the same"
        assert (spread <= 1e-6).all(), results


@pytest.mark.slow
def test_cuts_that_lie_further_apart_are_all_close_to_float64() -> None:
    """Of 24 batches this one amplifies rounding most: two of its cuts are 1.15e-6 apart."""
    case = make_cases([11], PP2)[0]
    (exact,) = run_ranks(loss_and_norm, 2, case, [0], torch.float64)[0]
    found = run_ranks(loss_and_norm, 2, case, [*range(10)], torch.float32)[0]
    error = np.abs(np.array(found) - exact) / np.maximum(np.abs(exact), 1.0)
    assert (error <= 1e-6).all(), error


class LossyStore(BlockStore):
    """Loses what readers add."""

    def add_gradient(
        self,
        block: int,
        layer: int,
        start: int,
        end: int,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        super().add_gradient(block, layer, start, end, 0 * dk, 0 * dv)


def test_losing_readers_gradients_is_noticed() -> None:
    cases = make_cases(range(8), PP2)
    wanted = run_ranks(alone, 1, cases, torch.float64)[0]
    ranks = run_ranks(errors, 2, cases, torch.float64, PP2, wanted, LossyStore)
    assert sum(e["gradient"] > 1e-4 for e in ranks[0]) >= 4
    assert max(e["logprob"] for e in ranks[0]) <= 1e-10


def train(cases: list[Case], parallel: ParallelConfig) -> None:
    with model_parallel(parallel) as pipeline:
        for case in cases:
            run_case(case, torch.float32, pipeline=pipeline)


@pytest.mark.slow
def test_a_rank_without_work_still_trains() -> None:
    """One sample on two ranks: the pipeline of the other rank only reduces gradients."""
    cases = [c for c in make_cases(range(60), DP2_PP2) if c.planned.batch.num_samples == 1][:3]
    assert cases
    worst = largest_errors(cases, torch.float64, DP2_PP2)
    assert max(worst.values()) <= 1e-10, worst


class RefusedError(BackendError):
    """Raised on purpose."""


@pytest.mark.slow
@pytest.mark.parametrize("dies", [True, False], ids=["killed", "raises"])
def test_a_rank_that_fails_inside_a_pipeline_stops_the_others(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    run = StageRun.run

    def fail_on_last_stage(self: StageRun, op: Op, message: Any) -> Any:
        if self.model.post_process and op.kind == "backward":
            raise SystemExit(3) if dies else RefusedError("stage 3 refuses", "ask it nicely")
        return run(self, op, message)

    monkeypatch.setattr(StageRun, "run", fail_on_last_stage)
    cases = make_cases([1, 2], PP4)
    with pytest.raises(BackendError, match="rank 3 died" if dies else "stage 3 refuses"):
        run_ranks(train, 4, cases, PP4)
