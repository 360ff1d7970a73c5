"""`execute_plan` with checkpoints: a killed run resumes, bit for bit on the same layout."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from psrl.backend.executable import check_executable
from psrl.backend.execution import Execution
from psrl.backend.io import checkpoint as checkpoint_module
from psrl.backend.io.output import execute_to_directory
from psrl.backend.options import ExecuteOptions
from psrl.backend.train.stage import StageRun
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.errors import BackendError, ConfigError
from psrl.core.plan.plan import Plan
from psrl.core.plan.schedule import Op
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import Trace
from tests.backend.cases import TINY
from tests.backend.test_execute import OPTIONS, execute, make_plan, make_trace

ONE = ParallelConfig()
DP2 = ParallelConfig(data_parallel_size=2)
PP3 = ParallelConfig(pipeline_model_parallel_size=3)
TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
TIED = TINY.model_copy(update={"tied_embeddings": True})
FIRST, SECOND = "step_000000002", "step_000000004"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_trace(tmp_path_factory.mktemp("resume") / "trace")


def train(plan: Plan, trace: Trace, root: Path, resume: bool, **options: Any) -> Execution:
    return execute(plan, trace, replace(OPTIONS, checkpoint=root, resume=resume, **options))


def state(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by kind and name."""
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[f"{path.name.split('-')[0]}.{name}"] = file.get_tensor(name)
    return tensors


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def die_in_the_second_mini_batch(run: Any) -> Any:
    """`StageRun.run` whose process dies in the last stage's first backward after one step."""

    def dying(self: StageRun, op: Op, message: Any) -> Any:
        second = self.rank_program.program.mini_batch == 1
        if second and op.kind == "backward" and self.model.post_process:
            os._exit(9)
        return run(self, op, message)

    return dying


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "model", "options"),
    [
        (DP2, TIED, {}),
        pytest.param(PP3, TIED, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param(ONE, TINY, {"warmup": 1, "repeat": 2}, marks=pytest.mark.slow),
        pytest.param(TP2, TINY, {}, marks=pytest.mark.slow),
        pytest.param(
            DP2.model_copy(update={"pipeline_model_parallel_size": 3}),
            TIED,
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dp2", "pp3_bf16", "one_repeated", "tp2_sp", "dp2_pp3"],
)
def test_a_killed_iteration_is_repeated_bit_for_bit(
    trace: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: ParallelConfig,
    model: ModelSpec,
    options: dict[str, Any],
) -> None:
    plan, straight, killed = make_plan(trace, parallel, model), tmp_path / "a", tmp_path / "b"
    train(plan, trace, straight, False, **options)
    shutil.copytree(straight, killed)
    wanted = train(plan, trace, straight, True, **options)
    assert wanted.resumed_from == straight / FIRST
    assert wanted.checkpoint == straight / SECOND

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "run", die_in_the_second_mini_batch(StageRun.run))
        with pytest.raises(BackendError, match=r"rank \d died"):
            train(plan, trace, killed, True, **options)
    assert checkpoints(killed) == [FIRST]

    found = train(plan, trace, killed, True, **options)
    assert checkpoints(killed) == [FIRST, SECOND]
    assert (found.loss, found.gradient_norm) == (wanted.loss, wanted.gradient_norm)
    for name in ("old_logprob", "reference_logprob", "logprob"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    before, one, two = (state(p) for p in (straight / FIRST, straight / SECOND, killed / SECOND))
    assert one.keys() == two.keys() == before.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], before[name]) for name in one if "main." in name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [(DP2, PP3), pytest.param(PP3, TP2, marks=pytest.mark.slow)],
    ids=["dp2_pp3", "pp3_tp2"],
)
def test_another_layout_resumes_within_rounding(
    trace: Trace, tmp_path: Path, first: ParallelConfig, second: ParallelConfig
) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    train(make_plan(trace, first, TIED), trace, same, False)
    shutil.copytree(same, other)
    wanted = train(make_plan(trace, first, TIED), trace, same, True)
    found = train(make_plan(trace, second, TIED), trace, other, True)
    np.testing.assert_allclose(found.old_logprob, wanted.old_logprob, rtol=0, atol=2e-5)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=0, atol=2e-5)
    one, two = state(same / SECOND), state(other / SECOND)
    assert one.keys() == two.keys()
    main = [name for name in one if name.startswith("main.")]
    size = sum(float(one[name].square().sum()) for name in main) ** 0.5
    error = sum(float((one[name] - two[name]).square().sum()) for name in main) ** 0.5
    assert 0 < error <= 1e-4 * size


@pytest.mark.slow
def test_resuming_continues_the_policy_and_keeps_the_reference(
    trace: Trace, tmp_path: Path
) -> None:
    plan = make_plan(trace)
    first = train(plan, trace, tmp_path / "run", False)
    second = train(plan, trace, tmp_path / "run", True)
    assert np.array_equal(first.reference_logprob, second.reference_logprob)
    assert np.abs(first.old_logprob - second.old_logprob).max() > 1e-3
    only_forward = replace(plan, programs=plan.programs[:1])
    forward = train(only_forward, trace, tmp_path / "run", True)
    assert forward.checkpoint is None
    assert checkpoints(tmp_path / "run") == [FIRST, SECOND]
    assert np.abs(forward.old_logprob - second.old_logprob).max() > 1e-3


@pytest.mark.slow
def test_a_rank_that_dies_while_saving_leaves_nothing(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file = checkpoint_module.save_file

    def dying(tensors: Any, file: Path) -> None:
        if "exp_avg-rank00000" in str(file):
            os._exit(7)
        save_file(tensors, file)

    monkeypatch.setattr(checkpoint_module, "save_file", dying)
    options = replace(OPTIONS, checkpoint=tmp_path / "checkpoints")
    with (
        pytest.raises(BackendError, match="rank 0 died"),
        RunDir(tmp_path / "run", "execute") as directory,
    ):
        execute_to_directory(make_plan(trace, DP2), trace, options, directory.path)
    assert checkpoints(tmp_path) == ["checkpoints"]
    assert checkpoints(tmp_path / "checkpoints") == []


@pytest.mark.slow
def test_what_cannot_be_resumed_is_said(trace: Trace, tmp_path: Path) -> None:
    plan, root = make_plan(trace), tmp_path / "run"
    with pytest.raises(ConfigError, match="no complete checkpoint to resume from"):
        train(plan, trace, root, True)
    train(plan, trace, root, False)
    with pytest.raises(ConfigError, match=f"has checkpoint {FIRST} of an earlier run"):
        train(plan, trace, root, False)
    deeper = make_plan(trace, model=TINY.model_copy(update={"num_layers": 4}))
    with pytest.raises(BackendError, match="model has num_layers 3"):
        train(deeper, trace, root, True)
    assert checkpoints(root) == [FIRST]


def test_options_of_checkpoints(trace: Trace, tmp_path: Path) -> None:
    plan = make_plan(trace)
    with pytest.raises(ConfigError, match="add --checkpoint DIR"):
        check_executable(plan, trace, ExecuteOptions(resume=True))
    forward = replace(plan, programs=plan.programs[:1])
    with pytest.raises(ConfigError, match="no update phase"):
        check_executable(forward, trace, ExecuteOptions(checkpoint=tmp_path))
    check_executable(forward, trace, ExecuteOptions(checkpoint=tmp_path, resume=True))
