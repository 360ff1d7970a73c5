"""The one door to megatron-core: its names, imported quietly, and patches for want of CUDA.

Everything else in this package imports Megatron's names from here. Works with 0.16.1 (Python
3.11) and 0.19.2 (Python 3.12, and 3.11 as `make test-megatron-next` installs it): only modules
that both have are named, and the model's parts (`embedding`, `decoder`, `output_layer`) are called
directly, because `GPTModel.forward` hands out hidden states in the newer version only.

Touch points on a machine without CUDA. Our own attention, norm, router, positions, schedule and
optimizer avoid all the others, and nothing in torch itself is patched:

* The modules `tensor_parallel.mappings` and `.layers`, `utils` and `moe.token_dispatcher` place
  buffers on the current CUDA device and copy counts on a CUDA stream. They see a `torch` whose
  `cuda` stands for the CPU. Sequence and expert parallelism need it.
* `moe.token_dispatcher.maybe_move_tensor_to_cpu`: gloo wants split sizes as plain numbers, and
  Megatron converts only what lies on a GPU.

* `tensor_parallel.random._get_cuda_rng_state` and `_set_cuda_rng_state`: full layer recompute
  saves and restores the generator of the CUDA device. Without dropout, which is refused, no
  number is drawn, so both do nothing.
* `torch._dynamo.config.disable`: Megatron's fused SwiGLU, which keeps a quarter fewer
  activations, is decorated for torch.compile; on a CPU that would start a C++ compiler for half
  a minute, so it runs uncompiled.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Megatron's warnings, e.g. that TransformerEngine, not needed, is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


with quiet():
    from megatron.core import parallel_state
    from megatron.core import utils as megatron_utils
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import layers as parallel_layers
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "GPTModel",
    "PackedSeqParams",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "gather_from_sequence_parallel_region",
    "get_gpt_layer_local_spec",
    "parallel_state",
    "prepare_megatron",
    "quiet",
    "reduce_from_tensor_model_parallel_region",
]


def prepare_megatron(rng: ModuleType = megatron_random) -> None:
    """Adapt Megatron to this machine before a model is built; any number of calls is one."""
    # 0.19.2 advises another model class at every construction.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    # Megatron calls two collectives by names that torch 2.13 replaces.
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated")
    # Dropout is refused, so nothing draws from the states that Megatron would keep per region.
    rng.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    if torch.cuda.is_available():
        return
    torch._dynamo.config.disable = True
    warnings.filterwarnings("ignore", r".*CUDA_DEVICE_MAX_CONNECTIONS")
    rng._get_cuda_rng_state = _no_state
    rng._set_cuda_rng_state = _ignore_state
    for module in (mappings, parallel_layers, megatron_utils, token_dispatcher):
        module.torch = _CPU_TORCH
    token_dispatcher.maybe_move_tensor_to_cpu = _as_plain_numbers


def _no_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _ignore_state(*_: Any, **__: Any) -> None:
    return None


class _CpuStream:
    """A CUDA stream on which everything is done at once."""

    def wait_stream(self, other: Any) -> None:
        return None

    def record_event(self) -> "_CpuStream":
        return self

    def synchronize(self) -> None:
        return None


class _CpuTorch:
    """`torch`, with a `cuda` whose current device is the CPU."""

    cuda = SimpleNamespace(
        Stream=_CpuStream,
        current_device=lambda: torch.device("cpu"),
        current_stream=_CpuStream,
        is_available=lambda: False,
        stream=lambda stream: nullcontext(),
        synchronize=lambda: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_CPU_TORCH = _CpuTorch()


def _as_plain_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
