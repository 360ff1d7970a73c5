"""The one door to megatron-core: its names, imported quietly, and patches for want of CUDA.

Everything else in this package imports Megatron's names from here. Works with 0.16.1 (Python
3.11) and 0.19.2 (Python 3.12): only modules that both have are named, and the model's parts
(`embedding`, `decoder`, `output_layer`) are called directly, because `GPTModel.forward` hands
out hidden states in the newer version only.

Touch points on a machine without CUDA. Tensor parallelism, our own attention, positions, schedule
and optimizer avoid all the others, so nothing in torch is patched:

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
from contextlib import contextmanager
from types import ModuleType
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
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "GPTModel",
    "PackedSeqParams",
    "TransformerConfig",
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
    if torch.cuda.is_available():
        return
    torch._dynamo.config.disable = True
    rng._get_cuda_rng_state = _no_state
    rng._set_cuda_rng_state = _ignore_state


def _no_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _ignore_state(*_: Any, **__: Any) -> None:
    return None
