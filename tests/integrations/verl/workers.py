"""veRL's own TrainingWorker with psRL's engine or veRL's FSDP2 engine, on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreOptimizerConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from psrl.backend.model.hf_layout import hf_source, separate
from psrl.backend.model.parameters import ParallelGroups, gather_full
from psrl.integrations.verl.cpu_platform import join_process_group
from psrl.integrations.verl.plugin import PsrlEngineConfig
from tests import gradient_errors

TEMPERATURE = 0.9
ONLY_RANK = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}


@dataclass(frozen=True)
class Loss:
    """A loss of veRL's actor configuration, with KL and entropy on unless changed."""

    mode: str = "vanilla"
    reduction: str = "token-mean"
    entropy: float = 0.01
    kl: bool = True
    scale: float | None = None
    clip: float = 0.2

    def function(self, rollouts: int = 4) -> Any:
        actor = FSDPActorConfig(
            strategy="fsdp",
            rollout_n=rollouts,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode=self.reduction,
            entropy_coeff=self.entropy,
            use_kl_loss=self.kl,
            kl_loss_coef=0.1,
            clip_ratio=self.clip,
            clip_ratio_low=self.clip,
            clip_ratio_high=self.clip + 0.08,
            loss_scale_factor=self.scale,
            policy_loss=PolicyLossConfig(
                loss_mode=self.mode, dro_beta=0.1 if self.mode == "dro" else None
            ),
        )
        return partial(ppo_loss, config=actor)


@dataclass
class Outcome:
    """What a worker did with a batch.

    Attributes:
        logprob, entropy: [samples, longest response] of log-old-prob, 0 outside the loss mask.
        gradients: of the last optimizer step, before clipping, by Hugging Face's names.
        weights: after it.
    """

    logprob: Tensor
    entropy: Tensor
    metrics: dict[str, Any]
    infer_metrics: dict[str, Any]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return float(self.metrics["loss"][-1])


def model_config(directory: Path) -> HFModelConfig:
    return HFModelConfig(
        path=str(directory),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )


def worker_config(
    kind: str,
    model: Path,
    max_tokens: int = 400,
    psrl: dict[str, Any] | None = None,
    clip_grad: float = 1e9,
    **engine: Any,
) -> TrainingWorkerConfig:
    """Configuration of a worker whose engine is `psrl` or `fsdp2`."""
    budget = {"max_token_len_per_gpu": max_tokens, "infer_max_token_len_per_gpu": max_tokens}
    common = {"lr": 1e-3, "weight_decay": 0.0, "total_training_steps": 10, "clip_grad": clip_grad}
    if kind == "psrl":
        options = {"device": "h100-80"} | (psrl or {})
        config: Any = PsrlEngineConfig(dtype="float32", psrl=options, **budget, **engine)
        optimizer: Any = McoreOptimizerConfig(lr_decay_style="constant", **common)
    else:
        config = FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            dtype="float32",
            mixed_precision={
                "param_dtype": "fp32",
                "reduce_dtype": "fp32",
                "buffer_dtype": "fp32",
            },
            use_torch_compile=False,
            **budget,
            **engine,
        )
        optimizer = FSDPOptimizerConfig(**common)
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=model_config(model),
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )


class RemoteWorker(TrainingWorker):
    """veRL's worker as a Ray actor without a GPU, which hands out what tests compare."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        join_process_group()
        torch.set_num_threads(1)
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def record_gradients(self) -> None:
        self._gradients = record_gradients(self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gradients(self) -> dict[str, Tensor]:
        return self._gradients

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, Tensor]:
        return weights_of(self)


def make_worker(kind: str, model: Path, **settings: Any) -> TrainingWorker:
    """A worker of this process, initialised."""
    config = worker_config(kind, model, **settings)
    # veRL has registered no FSDP engine for a CPU, but that of CUDA runs there.
    engine = {"VERL_ENGINE_DEVICE": "cuda"} if kind == "fsdp2" else {}
    with _environment(ONLY_RANK | engine):
        join_process_group()
        worker = TrainingWorker(config)
        worker.reset()
    return worker


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in values if name in before})


def record_gradients(worker: TrainingWorker) -> dict[str, Tensor]:
    """A dictionary that gets the full gradients at every optimizer step."""
    engine, found = worker.engine, {}
    if hasattr(engine, "state"):
        update = engine.state.optimizer.step

        def psrl_step(norm: float) -> None:
            spec = engine._setup.model
            full = gather_full(engine.state.gradients, ParallelGroups.current())
            for name, tensor in full.items():
                source = hf_source(name)
                found.update(zip(source.names, separate(tensor, source, spec), strict=True))
            for name in found:
                found[name] = found[name].clone()
            update(norm)

        engine.state.optimizer.step = psrl_step
        return found
    step = engine.optimizer_step

    def fsdp_step() -> Any:
        for name, parameter in engine.module.named_parameters():
            found[name] = _whole(parameter.grad).clone()
        return step()

    engine.optimizer_step = fsdp_step
    return found


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights_of(worker: TrainingWorker) -> dict[str, Tensor]:
    """All weights by Hugging Face's names, as the rollout gets them."""
    tensors, adapter = worker.engine.get_per_tensor_param()
    assert adapter is None
    return {name: _whole(tensor).detach().clone() for name, tensor in tensors}


def infer_request(batch: TensorDict) -> TensorDict:
    request = batch.clone()
    tu.assign_non_tensor(
        request,
        calculate_entropy=True,
        compute_loss=False,
        temperature=TEMPERATURE,
        global_token_num=None,
    )
    return request


def update_request(batch: TensorDict, loss: Loss, mini: int | None, epochs: int) -> TensorDict:
    request = batch.clone()
    tu.assign_non_tensor(
        request,
        calculate_entropy=loss.entropy != 0.0,
        temperature=TEMPERATURE,
        global_batch_size=mini or len(batch),
        mini_batch_size=mini or len(batch),
        epochs=epochs,
        seed=42,
        dataloader_kwargs={"shuffle": False},
    )
    return request


def on_responses(values: Tensor, batch: TensorDict) -> Tensor:
    """[samples, longest response] of a model output, 0 where the mask is."""
    cut = response_from_nested(values, batch["response_mask"]).to_padded_tensor(0.0)
    return cut * batch["response_mask"].to_padded_tensor(0)


def with_phase_results(batch: TensorDict, logprob: Tensor, seed: int = 1) -> TensorDict:
    """The batch with advantages, and old and reference logprobs around what was computed."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch["response_mask"].to_padded_tensor(0).float()
    noise = 0.3 * torch.randn(mask.shape, generator=generator)
    advantage = torch.randn(len(batch), 1, generator=generator)
    lengths = batch["response_mask"].offsets().diff().tolist()

    def ragged(values: Tensor) -> Tensor:
        rows = [values[i, :n].contiguous() for i, n in enumerate(lengths)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    done = batch.clone()
    done["advantages"] = ragged(advantage * mask)
    done["old_log_probs"] = ragged((logprob + noise) * mask)
    done["ref_log_prob"] = ragged((logprob - 0.5 * noise) * mask)
    return done


def run_phases(
    worker: TrainingWorker,
    batch: TensorDict,
    loss: Loss,
    base: Tensor | None = None,
    mini: int | None = None,
    epochs: int = 1,
) -> Outcome:
    """Log-old-prob and update through the worker's own methods.

    Args:
        base: logprobs that old and reference ones lie around; None for the computed ones.
    """
    gradients = record_gradients(worker)
    worker.set_loss_fn(loss.function())
    inferred = worker.infer_batch(infer_request(batch))
    logprob = on_responses(inferred["log_probs"], batch)
    entropy = on_responses(inferred["entropy"], batch)
    ready = with_phase_results(batch, logprob if base is None else base)
    trained = worker.train_mini_batch(update_request(ready, loss, mini, epochs))
    metrics = tu.get(trained, "metrics")
    weights = weights_of(worker)
    return Outcome(logprob, entropy, metrics, tu.get(inferred, "metrics"), dict(gradients), weights)


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest relative L2 error of a parameter's gradient."""
    return max(gradient_errors.by_parameter(found, wanted).values())


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert set(found) == set(wanted)
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted)


def metric(outcome: Outcome, name: str) -> float:
    values = outcome.metrics[name]
    return float(np.mean(values[-1]))
