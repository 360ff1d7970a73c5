"""Checkpoints resume bit for bit on the same layout, within rounding on another, or not at all."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from psrl.backend.compat import parallel_state
from psrl.backend.io import checkpoint as checkpoint_module
from psrl.backend.io.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.model import build_model
from psrl.backend.model.parameters import ParallelGroups, gather_full
from psrl.backend.options import OptimizerOptions
from psrl.backend.train.engine import RankEngine, optimizer_step, reduce_gradients
from psrl.backend.train.inputs import LossTokens, prepare_rank_program
from psrl.backend.train.optimizer import MainAdamW, MainGradients
from psrl.backend.train.phase_log import PhaseLog, resident_bytes
from psrl.backend.train.pipe import Pipeline
from psrl.backend.train.tokens import TokenIds
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.errors import BackendError, ConfigError
from tests.backend.cases import TINY, Case, single_process
from tests.backend.test_moe import MOE, ROUTER, moe_case

TIED = TINY.model_copy(update={"tied_embeddings": True, "qk_layernorm": True, "qkv_bias": False})
OPTIONS = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, max_gradient_norm=0.5)
ONE = ParallelConfig()


@dataclass(frozen=True)
class Step:
    """Loss and gradient norm of an update, and the full weights after it."""

    loss: float
    norm: float
    weights: dict[str, Tensor]


class Trainer:
    """A model that takes one optimizer step per case."""

    def __init__(
        self,
        spec: ModelSpec,
        parallel: ParallelConfig,
        pipeline: Pipeline,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = build_model(spec, parallel, seed=seed, dtype=dtype, init_std=0.3)
        self.gradients = MainGradients(self.model, ParallelGroups.current())
        self.optimizer = MainAdamW(self.gradients, OPTIONS)
        self._spec, self._pipeline = spec, pipeline

    def step(self, case: Case) -> Step:
        batch, rank = case.planned.batch, parallel_state.get_data_parallel_rank()
        engine = RankEngine(
            model=self.model,
            spec=self._spec,
            implementation="parts",
            loss=case.loss,
            router=ROUTER,
            pipeline=self._pipeline,
        )
        tokens = LossTokens(batch)
        ids = TokenIds(batch, self._spec.vocab_size)
        stage = {"stage": self._pipeline.stage, "num_stages": self._pipeline.num_stages}
        mine = prepare_rank_program(0, case.planned.program, rank, batch, ids, tokens, **stage)
        inputs = engine.look_ahead(mine, case.inputs)
        log = PhaseLog("update", rank, self._pipeline.stage, torch.device("cpu"), 0)
        loss = engine.run(mine, log, inputs).loss
        norm = reduce_gradients(self.gradients, log, mine.index)
        optimizer_step(self.optimizer, log, mine.index, norm)
        weights = gather_full(self.optimizer.state("main").items(), ParallelGroups.current())
        return Step(loss, norm, weights)


def cases(spec: ModelSpec, num_ranks: int) -> list[Case]:
    return [moe_case(seed, num_ranks, spec) for seed in (1, 2, 3)]


def train(
    spec: ModelSpec,
    parallel: ParallelConfig,
    sequence: Sequence[Case],
    load: Path | None = None,
    save: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Step]:
    """A step per case, from a checkpoint if there is one, and to one after the first step."""
    with model_parallel(parallel) as pipeline:
        trainer = Trainer(spec, parallel, pipeline, seed=5 if load else 3, dtype=dtype)
        if load is not None:
            progress = load_checkpoint(load, trainer.model, trainer.optimizer, spec)
            assert progress == {"iteration": 1}
            assert trainer.optimizer.num_steps == 1
        steps = []
        for i, case in enumerate(sequence):
            steps.append(trainer.step(case))
            if save is not None and i == 0:
                save_checkpoint(save, trainer.model, trainer.optimizer, spec, {"iteration": 1})
        return steps


EP2 = ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2)
TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
PP3 = ParallelConfig(pipeline_model_parallel_size=3)
DP2 = ParallelConfig(data_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "parallel", "dtype"),
    [
        (TIED, ONE, torch.bfloat16),
        (MOE, EP2, torch.float32),
        (TIED, DP2, torch.bfloat16),
        pytest.param(TIED, PP3, torch.float32, marks=pytest.mark.slow),
        pytest.param(TINY, TP2, torch.float32, marks=pytest.mark.slow),
    ],
    ids=["one_bf16", "ep2", "dp2_bf16", "pp3_tied", "tp2"],
)
def test_resuming_repeats_every_bit(
    tmp_path: Path, spec: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype
) -> None:
    sequence, path = cases(spec, parallel.data_parallel_size), tmp_path / "iteration_1"
    world = parallel.world_size
    straight = run_ranks(train, world, spec, parallel, sequence, None, path, dtype)
    resumed = run_ranks(train, world, spec, parallel, sequence[1:], path, None, dtype)
    for before, after in zip(straight, resumed, strict=True):
        for wanted, found in zip(before[1:], after, strict=True):
            assert (found.loss, found.norm) == (wanted.loss, wanted.norm)
            assert set(found.weights) == set(wanted.weights)
            for name, weight in wanted.weights.items():
                assert torch.equal(found.weights[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [
        (TIED, TP2, PP3),
        (MOE, EP2, ONE),
        pytest.param(TIED, PP3, DP2, marks=pytest.mark.slow),
        pytest.param(TINY, DP2, TP2, marks=pytest.mark.slow),
        pytest.param(
            MOE,
            ONE,
            TP2.model_copy(update={"data_parallel_size": 2, "expert_model_parallel_size": 4}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp2_pp3", "ep2_one", "pp3_dp2", "dp2_tp2", "one_tp2_ep4"],
)
def test_another_layout_continues_within_rounding(
    tmp_path: Path, spec: ModelSpec, first: ParallelConfig, second: ParallelConfig
) -> None:
    path = tmp_path / "iteration_1"
    one = cases(spec, 1)
    straight = run_ranks(train, 1, spec, ONE, one)[0]
    before = cases(spec, first.data_parallel_size)[:1]
    run_ranks(train, first.world_size, spec, first, before, None, path)
    after = cases(spec, second.data_parallel_size)[1:]
    if first.data_parallel_size > 1 or second.data_parallel_size > 1:
        # Other assignments to ranks are other random batches.
        straight = run_ranks(train, 1, spec, ONE, merged(before + after))[0]
    resumed = run_ranks(train, second.world_size, spec, second, after, path)[0]
    for wanted, found in zip(straight[1:], resumed, strict=True):
        assert found.norm == pytest.approx(wanted.norm, rel=2e-4)
        size = sum(float(w.square().sum()) for w in wanted.weights.values()) ** 0.5
        error = sum(float((found.weights[n] - w).square().sum()) for n, w in wanted.weights.items())
        assert error**0.5 <= 1e-4 * size


def merged(sequence: list[Case]) -> list[Case]:
    """The same batches, planned for one rank."""
    return [replace(case, planned=single_process(case.planned.batch, seed=9)) for case in sequence]


def sharded_bytes(parallel: ParallelConfig) -> tuple[int, dict[str, Tensor]]:
    """Bytes of optimizer state, and weights after steps with gradients that are given."""
    with model_parallel(parallel):
        model = build_model(TINY, parallel, seed=1, dtype=torch.float32, init_std=0.1)
        gradients = MainGradients(model, ParallelGroups.current())
        optimizer = MainAdamW(gradients, OPTIONS)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for step in range(3):
            for i, (_, view) in enumerate(gradients):
                noise = torch.randn(view.shape, generator=torch.Generator().manual_seed(i + step))
                view.copy_(noise)
            optimizer.step(1.0)
        main = optimizer.state("main")
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, main[name])
            assert not torch.equal(parameter, before[name])
        return resident_bytes(optimizer.tensors()), {
            n: p.detach().clone() for n, p in model.named_parameters()
        }


@pytest.mark.slow
def test_the_optimizer_is_sharded_over_data_parallel_ranks() -> None:
    whole, wanted = run_ranks(sharded_bytes, 1, ONE)[0]
    for nbytes, weights in run_ranks(sharded_bytes, 2, DP2):
        assert nbytes <= 0.5 * whole + 64
        assert all(torch.equal(weights[n], w) for n, w in wanted.items())


def die_while_saving(path: Path, parallel: ParallelConfig) -> None:
    real = checkpoint_module.save_file

    def dying(tensors: Any, file: Path) -> None:
        if "exp_avg_sq-rank00001" in str(file):
            os._exit(7)
        real(tensors, file)

    checkpoint_module.save_file = dying
    train(MOE, parallel, cases(MOE, 2)[:1], None, path)


@pytest.mark.slow
def test_a_rank_that_dies_while_saving_leaves_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "iteration_1"
    with pytest.raises(BackendError, match="rank 1 died"):
        run_ranks(die_while_saving, 2, path, EP2)
    assert not path.exists()
    assert latest_checkpoint(tmp_path) is None
    run_ranks(train, 2, MOE, EP2, cases(MOE, 2)[:1], None, path)
    assert latest_checkpoint(tmp_path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["iteration_1"]


def test_the_last_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for name in ("iteration_000009", "iteration_000010", ".psrl-0-0.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text("{}")
    (tmp_path / "iteration_000012").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "iteration_000010"
    assert latest_checkpoint(tmp_path / "none") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no header", "is no checkpoint: it has no checkpoint.json"),
        ("not JSON", "is damaged"),
        ("schema", "schema version 99, this psRL reads 1"),
        ("model", "has num_layers 7, the plan's tiny has 3"),
        ("file", "main of .* cannot be read"),
    ],
)
def test_wrong_checkpoints(tmp_path: Path, what: str, message: str) -> None:
    path = tmp_path / "iteration_1"
    sequence = cases(TINY, 1)[:1]
    run_ranks(train, 1, TINY, ONE, sequence, None, path)
    header = path / "checkpoint.json"
    content = json.loads(header.read_text())
    if what == "no header":
        header.unlink()
    elif what == "not JSON":
        header.write_text("{")
    elif what == "file":
        (path / "main-rank00000.safetensors").write_bytes(b"x")
    else:
        content["schema_version"] = 99 if what == "schema" else 1
        content["model"]["num_layers"] = 7 if what == "model" else 3
        header.write_text(json.dumps(content))
    with pytest.raises(BackendError, match=message):
        run_ranks(train, 1, TINY, ONE, sequence, path)


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "iteration_1").mkdir()
    arguments = (TINY, ONE, cases(TINY, 1)[:1], None, tmp_path / "iteration_1")
    with pytest.raises(ConfigError, match="exists already"):
        run_ranks(train, 1, *arguments)
