"""psRL as veRL's training engine: old logprobs, reference and actor update run psRL plans.

Every rank gets the whole batch: to veRL the engine is one data-parallel rank, as its own dynamic
context parallelism is. Each rank plans the batch for all ranks and runs its part. veRL slices the
mini-batches, so their membership is the trainer's; ranks and micro-batches are psRL's.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.py_functional import append_to_dict
from verl.workers.engine.base import BaseEngine, BaseEngineCtx
from verl.workers.utils.losses import ppo_loss

from psrl.backend.compat import parallel_state
from psrl.backend.execute import fastest_implementation
from psrl.backend.model.model import build_model
from psrl.backend.model.weights import load_hf
from psrl.backend.options import LossOptions, RouterOptions
from psrl.backend.train.engine import RankEngine
from psrl.core.cost.hf_config import model_from_hf_config
from psrl.core.errors import BackendError
from psrl.integrations.verl.batch.batch_run import BatchRun
from psrl.integrations.verl.batch.planning import BatchPlanner
from psrl.integrations.verl.batch.sample_loss import (
    WholeSampleLoss,
    loss_fields,
    plain_fields,
    temperature,
)
from psrl.integrations.verl.batch.samples import whole_samples
from psrl.integrations.verl.batch.trace_export import TraceExport
from psrl.integrations.verl.settings.options import make_setup, parse_options
from psrl.integrations.verl.settings.refusals import (
    check_batch,
    check_configuration,
    is_token_wise,
    parallel_config,
)
from psrl.integrations.verl.worker.process_groups import join_pipeline, own_group
from psrl.integrations.verl.worker.rollout import DeviceMemory, rollout_weights
from psrl.integrations.verl.worker.training_state import TrainingState

logger = logging.getLogger(__name__)


class PsrlEngine(BaseEngine):
    """One rank's model, optimizer and plans behind veRL's engine interface.

    Raises:
        PsrlError: for a configuration that psRL refuses, naming its key.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        check_configuration(engine_config, model_config, optimizer_config)
        self.mode: str | None = None
        self._model_config, self._engine_config = model_config, engine_config
        self._optimizer_config, self._checkpoint_config = optimizer_config, checkpoint_config
        self._options = parse_options(engine_config.psrl)
        self._dtype: torch.dtype = getattr(torch, engine_config.dtype)
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        spec = model_from_hf_config(model_config.hf_config.to_dict(), str(model_config.path))
        parallel = parallel_config(engine_config, dist.get_world_size())
        self._setup = make_setup(self._options, spec, parallel, self._dtype)
        self._pipeline = join_pipeline(parallel, self._options.timeout_s)
        self._own_group = own_group()
        self._train_depth = 0
        self._export: TraceExport | None = None
        if self._options.trace_dir is not None and dist.get_rank() == 0:
            self._export = TraceExport(Path(self._options.trace_dir))

    def initialize(self) -> None:
        """Build the model with the weights of `model.path`, and its optimizer."""
        setup, router = self._setup, RouterOptions()
        settings: dict[str, Any] = {}
        if setup.model.num_moe_experts:
            settings["moe_token_dispatcher_type"] = router.dispatcher
        self.model = build_model(
            setup.model,
            setup.parallel,
            seed=self._engine_config.seed,
            dtype=self._dtype,
            device=self._device,
            **settings,
        )
        path = Path(self._model_config.local_path)
        load_hf(self.model, setup.model, path, check_config=False)
        rank = parallel_state.get_data_parallel_rank()
        rank_engine = RankEngine(
            model=self.model,
            spec=setup.model,
            implementation=fastest_implementation(self._device),
            loss=LossOptions(),
            router=router,
            pipeline=self._pipeline,
            measure_activations=False,
        )
        gathers = router.dispatcher == "allgather"
        planner = BatchPlanner(
            setup,
            self._options.policy,
            rank,
            self._pipeline,
            self._device,
            setup.parallel.coupled_ranks if gathers else 1,
        )
        self._run = BatchRun(rank_engine, planner)
        self.state: TrainingState | None = None
        if not self._engine_config.forward_only:
            self.state = TrainingState(
                self.model,
                setup.model,
                self._optimizer_config,
                self._checkpoint_config,
                self._options.on_nonfinite,
            )
        self._weight_memory = DeviceMemory(lambda: list(self.model.parameters()))
        self._offload_as_configured()

    def forward_backward_batch(
        self,
        data: TensorDict,
        loss_function: Callable[..., Any] | None,
        forward_only: bool = False,
    ) -> dict[str, Any]:
        """Run a batch; the gradients of an update stay unreduced until `optimizer_step`.

        Returns:
            model_output (forward only), loss and metrics, on every rank.
        """
        fields = plain_fields(data)
        check_batch(fields)
        samples = whole_samples(data, fields.get("uid"))
        mask = data["loss_mask"] if "loss_mask" in data else data["response_mask"]
        num_trained = int((mask.values() if mask.is_nested else mask).sum())
        if not forward_only and not len(samples.loss_tokens):
            raise BackendError("the mini-batch has no trained token: its loss is not defined")
        tu.assign_non_tensor(data, sp_size=1, dp_size=1, batch_num_tokens=num_trained)
        on_device = loss_fields(data, self._device)
        whole = WholeSampleLoss(
            function=loss_function,
            data=on_device,
            samples=samples,
            token_wise=_is_token_wise(loss_function),
            with_entropy=bool(fields.get("calculate_entropy", False)),
            dtype=torch.promote_types(self._dtype, torch.float32),
        )
        scale, max_tokens = temperature(data, fields), int(fields["max_token_len_per_gpu"])
        metrics = self._run(whole, scale, not forward_only, max_tokens)
        if metrics["psrl/prefix_match_rate"] == 0.0 and dist.get_rank() == 0:
            logger.warning("no samples of this batch share a prefix: nothing to gain, nothing lost")
        if not forward_only and self._export is not None:
            self._export.add(samples, data)
        loss, loss_metrics = whole.evaluate()
        collected: dict[str, Any] = {}
        append_to_dict(collected, loss_metrics)
        append_to_dict(collected, metrics)
        output = whole.model_output() if forward_only else {}
        return {"model_output": output, "loss": [loss], "metrics": collected}

    def optimizer_zero_grad(self) -> None:
        self._training_state().gradients.zero()

    def optimizer_step(self) -> float:
        """Reduce the gradients and update; returns their norm before clipping."""
        return self._training_state().step()

    def lr_scheduler_step(self) -> float:
        return self._training_state().step_schedule()

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "eval", **kwargs)

    def enter_mode(self, mode: str) -> None:
        self._train_depth += mode == "train"

    def leave_mode(self, mode: str, failed: bool) -> None:
        """A trace's iteration ends with the outermost train mode."""
        self._train_depth -= mode == "train"
        if mode == "train" and self._train_depth == 0 and not failed and self._export is not None:
            self._export.finish()

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._own_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """All ranks have all outputs; one returns them."""
        return bool(dist.get_rank() == 0)

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Hugging Face names and full tensors, in turn; every rank must take all of them."""
        self._weight_memory.restore()
        return rollout_weights(self.model, self._setup.model), None

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self._engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self._engine_config.optimizer_offload)

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move weights, optimizer and gradients (as zeros) between the device and the host."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if self._device.type == "cpu":
            return  # there is no other memory to move to
        chosen = [self._weight_memory] if model else []
        if self.state is not None:
            chosen += [self.state.optimizer_memory] if optimizer else []
            chosen += [self.state.gradient_memory] if grad or (model and device == "cpu") else []
        for memory in chosen:
            if device == "cpu":
                memory.release()
            else:
                memory.restore()

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """See `TrainingState.save`."""
        _refuse_hdfs(hdfs_path)
        self.to(self._device.type)
        self._training_state().save(Path(local_path), global_step, max_ckpt_to_keep)
        self._offload_as_configured()

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        """See `TrainingState.load`."""
        _refuse_hdfs(hdfs_path)
        self.to(self._device.type)
        self._training_state().load(Path(local_path), del_local_after_load)
        self._offload_as_configured()

    def _training_state(self) -> TrainingState:
        if self.state is None:
            raise BackendError("this engine is forward_only: it has no optimizer")
        return self.state

    def _offload_as_configured(self) -> None:
        self.to(
            "cpu",
            model=self.is_param_offload_enabled,
            optimizer=self.is_optimizer_offload_enabled,
            grad=self.is_param_offload_enabled,
        )


class _Mode(BaseEngineCtx):
    """veRL's train or eval mode: brings offloaded memory to the device and gives it back."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.model.train(self.mode == "train")
        self.engine.enter_mode(self.mode)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self.engine.leave_mode(self.mode, exc_type is not None)
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_value, traceback)


def _is_token_wise(function: Callable[..., Any] | None) -> bool:
    if isinstance(function, partial) and function.func is ppo_loss:
        return is_token_wise(function.keywords["config"])
    return False


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise BackendError(
            f"checkpoints in HDFS ({path}) are not supported",
            "set trainer.default_hdfs_dir=null and a shared trainer.default_local_dir",
        )
