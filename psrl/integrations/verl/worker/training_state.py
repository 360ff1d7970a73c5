"""Gradients, optimizer, learning-rate schedule and checkpoints of an engine that trains."""

import math
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

from psrl.backend.io.checkpoint import load_checkpoint, save_checkpoint
from psrl.backend.model.parameters import ParallelGroups
from psrl.backend.model.weights import save_hf
from psrl.backend.options import OptimizerOptions
from psrl.backend.train.finite_step import may_step
from psrl.backend.train.optimizer import MainAdamW, MainGradients
from psrl.core.cost.cluster import ModelSpec

from .rollout import DeviceMemory

CHECKPOINT = "psrl"
HF_MODEL = "huggingface"


class TrainingState:
    """What training adds to a model.

    Args:
        optimizer_config, checkpoint_config: veRL's.

    Attributes:
        gradients, optimizer: psRL's sharded AdamW, with main weights in float32.
        gradient_memory, optimizer_memory: how they leave the device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        spec: ModelSpec,
        optimizer_config: Any,
        checkpoint_config: Any,
        on_nonfinite: Literal["stop", "skip"],
    ) -> None:
        self._model, self._spec = model, spec
        self._skips_nonfinite = on_nonfinite == "skip"
        self._contents = list(checkpoint_config.save_contents)
        self.gradients = MainGradients(model, ParallelGroups.current())
        limit = optimizer_config.clip_grad
        self.optimizer = MainAdamW(
            self.gradients,
            OptimizerOptions(
                learning_rate=optimizer_config.lr,
                beta1=optimizer_config.betas[0],
                beta2=optimizer_config.betas[1],
                weight_decay=optimizer_config.weight_decay,
                max_gradient_norm=limit if limit and limit > 0 else math.inf,
                on_nonfinite=on_nonfinite,
            ),
        )
        self._schedule = get_megatron_optimizer_param_scheduler(self.optimizer, optimizer_config)
        self.gradient_memory = DeviceMemory(self.gradients.tensors, keep_values=False)
        self.optimizer_memory = DeviceMemory(self.optimizer.tensors)
        self._saved: list[Path] = []

    def step(self) -> float:
        """Reduce the gradients over ranks and update; returns their norm before clipping.

        Raises:
            BackendError: if it is not finite, unless such steps are to be left out.
        """
        self.gradients.reduce()
        norm = self.gradients.norm()
        if may_step(None, norm, self.gradients, "update", {}, skip=self._skips_nonfinite):
            self.optimizer.step(norm)
        else:
            self.gradients.zero()
        return norm

    def step_schedule(self) -> float:
        """Advance veRL's schedule; returns the new learning rate."""
        self._schedule.step(1)
        return float(self.optimizer.param_groups[0]["lr"])

    def save(self, directory: Path, global_step: int, max_to_keep: int | None) -> None:
        """Write optimizer and main weights, and Hugging Face weights if `hf_model` is wanted.

        Args:
            max_to_keep: remove the oldest that this process saved beyond so many.
        """
        progress = {"global_step": global_step, "schedule": self._schedule.state_dict()}
        save_checkpoint(directory / CHECKPOINT, self._model, self.optimizer, self._spec, progress)
        if "hf_model" in self._contents:
            save_hf(self._model, self._spec, directory / HF_MODEL)
        self._saved.append(directory)
        while max_to_keep and len(self._saved) > max_to_keep:
            oldest = self._saved.pop(0)
            if dist.get_rank() == 0:
                shutil.rmtree(oldest)

    def load(self, directory: Path, remove: bool) -> None:
        """Take over what `save` wrote, under any parallel layout.

        Args:
            remove: delete it afterwards.
        """
        progress = load_checkpoint(directory / CHECKPOINT, self._model, self.optimizer, self._spec)
        self._schedule.load_state_dict(progress["schedule"])
        dist.barrier()
        if remove and dist.get_rank() == 0:
            shutil.rmtree(directory)
