"""psRL's engine as a Ray worker group: data, tensor and pipeline parallel."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs veRL: make test-verl")
pytestmark = [pytest.mark.verl, pytest.mark.slow]

import ray
from ray import cloudpickle
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.utils import tensordict_utils as tu

from tests.integrations.verl import workers
from tests.integrations.verl.batches import group_batch

LOSS = workers.Loss("gspo", "seq-mean-token-mean", clip=0.02)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    names = ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES", "VERL_DISABLE_FLASH_ATTN_CE")
    environment = {name: os.environ[name] for name in names}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    # The actors cannot import the tests.
    cloudpickle.register_pickle_by_value(sys.modules[workers.__name__])
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


def worker_group(num_workers: int, model: Path, **settings: Any) -> RayWorkerGroup:
    config = workers.worker_config("psrl", model, max_tokens=150, **settings)
    pool = RayResourcePool([num_workers], use_gpu=False, max_colocate_count=1)
    actor = RayClassWithInitArgs(cls=ray.remote(workers.RemoteWorker), config=config)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=actor, device_name="cpu")
    group.reset()
    return group


@pytest.mark.parametrize(
    ("num_workers", "sizes"),
    [
        (1, {}),
        (2, {}),
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2}),
    ],
    ids=["dp1", "dp2", "tp2", "pp2"],
)
def test_worker_group_equals_fsdp(
    cluster: None,
    tiny_qwen2: Path,
    fsdp: workers.Outcome,
    num_workers: int,
    sizes: dict[str, int],
) -> None:
    batch = group_batch()
    group = worker_group(num_workers, tiny_qwen2, **sizes)
    group.record_gradients()
    group.set_loss_fn(LOSS.function())
    inferred = group.infer_batch(workers.infer_request(batch)).get()
    logprob = workers.on_responses(inferred["log_probs"], batch)
    assert (logprob - fsdp.logprob).abs().max() <= 2e-6
    ready = workers.with_phase_results(batch, fsdp.logprob)
    trained = group.train_mini_batch(workers.update_request(ready, LOSS, None, 1)).get()
    metrics = tu.get(trained, "metrics")
    assert metrics["loss"][-1] == pytest.approx(fsdp.loss, rel=1e-5, abs=1e-6)
    for gradients in group.gradients():
        assert workers.relative_error(gradients, fsdp.gradients) <= 5e-6
    for weights in group.weights():
        assert workers.largest_difference(weights, fsdp.weights) <= 2e-4
    for actor in group.workers:
        ray.kill(actor)


@pytest.fixture(scope="module")
def fsdp(tiny_qwen2: Path) -> workers.Outcome:
    return workers.run_phases(workers.make_worker("fsdp2", tiny_qwen2), group_batch(), LOSS)
