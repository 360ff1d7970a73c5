"""Parts of the adapter that need no veRL."""

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.hf_layout import hf_source, separate
from psrl.backend.model.model import build_model
from psrl.backend.model.parameters import ParallelGroups, gather_full
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.cost.presets import DEVICES
from psrl.core.errors import BackendError, ConfigError
from psrl.integrations.verl.settings import refusals
from psrl.integrations.verl.settings.options import device_preset, make_setup, parse_options
from psrl.integrations.verl.settings.refusals import is_token_wise
from psrl.integrations.verl.worker.process_groups import join_pipeline
from psrl.integrations.verl.worker.rollout import DeviceMemory, rollout_weights
from tests.backend.cases import TINY
from tests.backend.test_moe import MOE


def test_wrong_verl_version_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.10.0")
    with pytest.raises(ConfigError, match=r"installed: 0\.10\.0(.|\n)*pip install 'verl==0\.9\.1'"):
        refusals.check_verl()


def test_missing_verl_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match="installed: none"):
        refusals.check_verl()


def test_missing_undeclared_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.1")
    monkeypatch.setattr(
        refusals, "find_spec", lambda name: None if name == "transfer_queue" else object()
    )
    with pytest.raises(ConfigError, match="missing: TransferQueue"):
        refusals.check_verl()


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100-80"),
        ("NVIDIA H200", 140, "h200-141"),
        ("NVIDIA H20", 95, "h20-96"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80"),
        ("NVIDIA L4", 23, None),
    ],
)
def test_device_is_known_by_its_name(name: str, gib: int, preset: str | None) -> None:
    assert device_preset(name, gib * 2**30) == (None if preset is None else DEVICES[preset])


def test_planner_gets_layout_and_precision() -> None:
    options = parse_options({"device": "h200-141", "devices_per_host": 4})
    parallel = ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=4)
    setup = make_setup(options, TINY, parallel, torch.float32)
    assert (setup.cluster.num_hosts, setup.cluster.devices_per_host) == (2, 4)
    assert setup.cluster.device.dtype_bytes == 4
    wide = ParallelConfig(tensor_model_parallel_size=8)
    with pytest.raises(ConfigError, match="not divisible"):
        make_setup(options.model_copy(update={"devices_per_host": 8}), TINY, wide, torch.bfloat16)


@pytest.mark.parametrize(
    ("mode", "reduction", "scale", "wanted"),
    [
        ("vanilla", "token-mean", None, True),
        ("cispo", "seq-mean-token-mean", None, True),
        ("vanilla", "seq-mean-token-sum-norm", 100, True),
        ("vanilla", "seq-mean-token-sum-norm", None, False),
        ("gspo", "seq-mean-token-mean", None, False),
        ("geo_mean", "token-mean", None, False),
        ("registered_by_a_user", "token-mean", None, False),
    ],
)
def test_only_proven_losses_are_token_wise(
    mode: str, reduction: str, scale: int | None, wanted: bool
) -> None:
    actor = SimpleNamespace(
        policy_loss={"loss_mode": mode}, loss_agg_mode=reduction, loss_scale_factor=scale
    )
    assert is_token_wise(actor) is wanted


def test_memory_leaves_and_comes_back() -> None:
    flat = torch.arange(12.0)
    view = flat[4:].view(2, 4)
    memory = DeviceMemory(lambda: [flat, view])
    memory.release()
    memory.release()
    assert flat.untyped_storage().nbytes() == 0
    memory.restore()
    memory.restore()
    assert view.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    view += 1
    assert flat[4] == 5, "the view lost its storage"


def test_memory_without_values_comes_back_as_zeros() -> None:
    flat = torch.ones(5)
    memory = DeviceMemory(lambda: [flat], keep_values=False)
    memory.release()
    memory.restore()
    assert flat.tolist() == [0.0] * 5


def streamed(spec: ModelSpec, parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """What one rank hands to the rollout."""
    with model_parallel(parallel):
        model = build_model(spec, parallel, seed=1, dtype=torch.float32)
        return {name: tensor.clone() for name, tensor in rollout_weights(model, spec)}


def stored(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The same weights, gathered from an undivided model."""
    with model_parallel(ParallelConfig()):
        model = build_model(spec, ParallelConfig(), seed=1, dtype=torch.float32)
        named = [(n, p.detach()) for n, p in model.named_parameters()]
        full = gather_full(named, ParallelGroups.current())
        return {
            hf: part.clone()
            for name, tensor in full.items()
            for hf, part in zip(
                hf_source(name).names, separate(tensor, hf_source(name), spec), strict=True
            )
        }


TIED = TINY.model_copy(update={"tied_embeddings": True, "num_layers": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (TINY, {"tensor_model_parallel_size": 2}),
        (TIED, {"pipeline_model_parallel_size": 2}),
        (MOE, {"data_parallel_size": 2, "expert_model_parallel_size": 2}),
    ],
    ids=["tp2", "pp2-tied", "ep2"],
)
def test_every_rank_streams_the_whole_model(spec: ModelSpec, sizes: dict[str, int]) -> None:
    parallel = ParallelConfig(**sizes)
    wanted = run_ranks(stored, 1, spec)[0]
    for found in run_ranks(streamed, parallel.world_size, spec, parallel):
        assert set(found) == set(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


def join_twice() -> Any:
    """Two engines of a process, then one with another layout."""
    same = ParallelConfig()
    first = join_pipeline(same, 60.0)
    again = join_pipeline(same.model_copy(update={"recompute": "full"}), 60.0)
    with pytest.raises(BackendError, match="colocated"):
        join_pipeline(ParallelConfig(data_parallel_size=2), 60.0)
    return first is again


def test_engines_of_a_process_share_its_groups() -> None:
    assert run_ranks(join_twice, 1) == [True]
