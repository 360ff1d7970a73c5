"""Megatron's process groups for the life of a veRL worker; its engines share them."""

from contextlib import ExitStack

import torch.distributed as dist

from psrl.backend.compat import parallel_state
from psrl.backend.launch import model_parallel
from psrl.backend.train.pipe import Pipeline, pipeline_groups
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError

_PIPELINES: dict[tuple[int, ...], Pipeline] = {}
_FOR_LIFE = ExitStack()


def join_pipeline(parallel: ParallelConfig, timeout_s: float) -> Pipeline:
    """The pipeline of this process; the first call of a process makes the groups.

    The default process group must exist. If another engine of the process, such as veRL's own
    critic, has made Megatron's groups, they are used.

    Raises:
        BackendError: if that engine has another layout.
    """
    sizes = _sizes(parallel)
    if sizes in _PIPELINES:
        return _PIPELINES[sizes]
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if found != sizes:
            raise BackendError(
                f"another engine of this process runs tensor, pipeline, data and expert parallel "
                f"sizes {found}, this one is configured with {sizes}",
                "give all colocated Megatron engines the same parallel sizes",
            )
        made = pipeline_groups(parallel, timeout_s)
    else:
        made = model_parallel(parallel, timeout_s)
    _PIPELINES[sizes] = _FOR_LIFE.enter_context(made)
    return _PIPELINES[sizes]


def _sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    return (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
        parallel.expert_model_parallel_size,
    )


def own_group() -> dist.ProcessGroup:
    """A group of this process alone: what veRL takes for the data-parallel group."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
