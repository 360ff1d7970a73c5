"""Options of psRL under veRL's engine configuration, and the set-up that the planner gets."""

import re
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from psrl.core.cost.calibration import load_calibration
from psrl.core.cost.cluster import (
    ClusterSpec,
    DeviceSpec,
    ModelSpec,
    ParallelConfig,
    Spec,
    check_layout,
)
from psrl.core.cost.presets import DEVICES
from psrl.core.errors import ConfigError
from psrl.core.run.config import PlanningConfig, Setup, parse
from psrl.planner.policies.find_policy import find_policy

KEY = "actor_rollout_ref.<actor|ref>.megatron.psrl"
"""Where the options stand in veRL's configuration."""


class PsrlOptions(Spec):
    """The mapping under `megatron.psrl`; every key has a default."""

    policy: str = Field(default="quick", description="scheduling policy, see docs/policies.md")
    device: str | None = Field(default=None, description="device preset; default: as detected")
    devices_per_host: int = Field(default=8, ge=1)
    intra_host_bytes_per_s: float = Field(default=450e9, gt=0)
    inter_host_bytes_per_s: float = Field(default=50e9, gt=0)
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    search_iterations: int = Field(default=2000, ge=0)
    calibration: str | None = Field(default=None, description="file of `psrl calibrate`")
    trace_dir: str | None = Field(default=None, description="write training batches as traces")
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="gradients that are not finite: stop, or skip as FSDP does"
    )
    timeout_s: float = Field(default=1800.0, gt=0, description="limit of a message or collective")


def parse_options(raw: dict[str, Any]) -> PsrlOptions:
    """Check the mapping.

    Raises:
        ConfigError: naming the key and what is allowed.
    """
    options = parse(PsrlOptions, dict(raw), KEY)
    try:
        find_policy(options.policy)
    except ConfigError as error:
        raise ConfigError(f"{KEY}.policy: {error.message}", error.hint) from None
    return options


def make_setup(
    options: PsrlOptions, model: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype
) -> Setup:
    """What the planner must know of model, cluster and budgets.

    Raises:
        ConfigError: if the device is not known, or the layout does not fit.
    """
    device = _device(options).model_copy(update={"dtype_bytes": dtype.itemsize})
    per_host = min(options.devices_per_host, parallel.world_size)
    cluster = ClusterSpec(
        device=device,
        num_hosts=-(-parallel.world_size // per_host),
        devices_per_host=per_host,
        intra_host_bytes_per_s=options.intra_host_bytes_per_s,
        inter_host_bytes_per_s=options.inter_host_bytes_per_s,
        intra_host_latency_s=5e-6,
        inter_host_latency_s=15e-6,
    )
    check_layout(model, cluster, parallel)
    path = options.calibration
    return Setup(
        model=model,
        cluster=cluster,
        parallel=parallel,
        planning=PlanningConfig(
            memory_fraction=options.memory_fraction, search_iterations=options.search_iterations
        ),
        calibration=None if path is None else load_calibration(Path(path)),
    )


def _device(options: PsrlOptions) -> DeviceSpec:
    known = f"set {KEY}.device to one of {', '.join(DEVICES)}"
    if options.device is not None:
        if options.device not in DEVICES:
            raise ConfigError(f"{KEY}.device: unknown device {options.device!r}", known)
        return DEVICES[options.device]
    if not torch.cuda.is_available():
        raise ConfigError("no GPU here whose figures the planner could take", known)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = device_preset(properties.name, properties.total_memory)
    if found is None:
        raise ConfigError(f"the planner has no figures of a {properties.name}", known)
    return found


def device_preset(name: str, memory_bytes: int) -> DeviceSpec | None:
    """The preset of a device by the name that CUDA gives it; None if there is none."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    same = [spec for key, spec in DEVICES.items() if key.split("-")[0] in words]
    return min(same, key=lambda spec: abs(spec.memory_bytes - memory_bytes), default=None)
