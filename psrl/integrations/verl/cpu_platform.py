"""A platform without an accelerator, which veRL lacks: for development and tests with gloo.

Name this module in VERL_USE_EXTERNAL_MODULES before the plugin, and set VERL_PLATFORM=cpu.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _device_module() -> types.ModuleType:
    """Stands where `torch.cuda` is used: one device, no memory to report, nothing to wait for."""

    def zero(*_: Any, **__: Any) -> int:
        return 0

    def nothing(*_: Any, **__: Any) -> None:
        return None

    module = types.ModuleType("cpu_device")
    functions: dict[str, Any] = dict.fromkeys(
        (
            "current_device",
            "max_memory_allocated",
            "max_memory_reserved",
            "memory_allocated",
            "memory_reserved",
        ),
        zero,
    )
    functions |= dict.fromkeys(
        (
            "empty_cache",
            "ipc_collect",
            "manual_seed",
            "manual_seed_all",
            "reset_peak_memory_stats",
            "set_device",
            "set_rng_state",
            "synchronize",
        ),
        nothing,
    )
    functions |= {
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": lambda *_: torch.zeros(1),
        "is_available": lambda: True,
        "mem_get_info": lambda *_: (1, 1),
    }
    vars(module).update(functions)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as the only device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def join_process_group() -> None:
    """Join the default group from torchrun's variables.

    A TrainingWorker must find it: veRL itself asks for gloo twice, which torch refuses.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
