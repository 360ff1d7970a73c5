"""The calibration file: coefficients of the cost model, their origin, error and domain.

Machine-written JSON, made by `psrl calibrate`; docs/cost-model.md explains every coefficient.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from psrl.core.errors import ConfigError
from psrl.core.files import write_file

from .cluster import Amount, DeviceSpec, Spec

AttentionKind = Literal["tree", "flash", "scores"]
"""What was measured: psRL's own kernels, FlashAttention on one causal chain per sample, or score
matrices that pass through memory."""


# Two norms, two residual adds, rotary embedding and SwiGLU, per layer and direction: each a read
# and a write of [tokens, hidden].
_ELEMENTWISE = 14
# Logits written, read for the loss and for their gradient, in float32.
_LOGIT_PASSES = 4


class Coefficients(Spec):
    """What measurements decide; `psrl.core.cost.layer_time` has the formulas.

    The defaults are what no calibration so far could tell apart from other coefficients; those of
    `weight_passes` and `accumulation_bytes_per_parameter` let a calibration from before they were
    known predict what it predicted.
    """

    gemm_efficiency: float = Field(gt=0, description="share of peak FLOP/s in large products")
    gemm_tail_tiles: float = Field(
        default=0.0, ge=0, description="128x128 output tiles that every product adds to its own"
    )
    attention_efficiency: float = Field(gt=0, description="share of peak with many visible keys")
    attention_half_keys: float = Field(
        default=0.0, ge=0, description="visible keys per query at half of attention_efficiency"
    )
    attention_backward_factor: float = Field(
        default=2.5, gt=0, description="FlashAttention's backward does 5 products for 2"
    )
    score_passes: float = Field(
        default=0.0, ge=0, description="passes over score matrices in memory, forward"
    )
    replicated_passes: float = Field(
        default=10.0, ge=0, description="passes over [tokens, hidden] that all TP ranks make"
    )
    sharded_passes: float = Field(default=14.0, ge=0, description="those that TP divides")
    linear_backward_factor: float = Field(
        default=1.0, gt=0, description="backward's device time / two products per forward product"
    )
    head_passes: float = Field(default=0.0, ge=0, description="passes over fp32 logits, forward")
    device_slowdown: float = Field(default=1.0, gt=0, description="all device time is multiplied")
    weight_passes: float = Field(
        default=0.0, ge=0, description="reads of a product's weights; its time is at least theirs"
    )
    accumulation_bytes_per_parameter: float = Field(
        default=0.0, ge=0, description="moved to add a weight gradient to its main gradient"
    )
    host_layer_s: float = Field(ge=0, description="host time of one layer's forward")
    host_tensor_parallel_s: float = Field(default=0.0, ge=0, description="added if TP > 1")
    host_unfused_s: float = Field(default=0.0, ge=0, description="added by an unfused softmax")
    host_op_s: float = Field(default=0.0, ge=0, description="host time of an op beside its layers")
    host_backward_factor: float = Field(default=2.0, gt=0, description="backward / forward")
    join_exponent: float = Field(
        default=8.0, ge=1, description="1: host and device take turns; large: they overlap"
    )
    tensor_parallel_factor: float = Field(
        default=1.0, ge=0, description="all-reduce in a layer / the same all-reduce measured alone"
    )
    tensor_parallel_across_hosts_factor: float = Field(default=1.0, ge=0)
    message_efficiency: float = Field(default=0.8, gt=0, description="share of a link's bandwidth")
    gradient_bytes_per_parameter: float = Field(default=6.0, ge=0)
    optimizer_bytes_per_parameter: float = Field(default=24.0, ge=0)
    step_s: float = Field(default=0.0, ge=0, description="constant time of an optimizer step")

    @classmethod
    def of_device(cls, device: DeviceSpec) -> "Coefficients":
        """Before any measurement: the data sheet, and the share of it that kernels reach.

        Bytes count at the data sheet's bandwidth, so what is moved is divided by the share.
        """
        share, narrow, wide = (
            device.bandwidth_efficiency,
            device.dtype_bytes,
            max(4, device.dtype_bytes),
        )
        return cls(
            gemm_efficiency=device.gemm_efficiency,
            attention_efficiency=device.attention_efficiency,
            replicated_passes=2 * _ELEMENTWISE / share,
            sharded_passes=0.0,
            head_passes=_LOGIT_PASSES / share,
            weight_passes=1.0 / share,
            # Autograd's hook reads the weight gradient, then reads and writes the main gradient.
            accumulation_bytes_per_parameter=(narrow + 2 * wide) / share,
            host_layer_s=device.host_layer_s,
            join_exponent=device.join_exponent,
            message_efficiency=1.0,
            # A main gradient is summed, and an updated weight gathered.
            gradient_bytes_per_parameter=wide + narrow,
            # AdamW reads and writes main weight, momentum and variance.
            optimizer_bytes_per_parameter=2 * 3 * wide / share,
            step_s=device.host_layer_s,
        )


class Identification(Spec):
    """How a coefficient got its value.

    Attributes:
        num_rows: measurements that move by at least 1 % if the coefficient doubles.
        relative_error: standard error / value, from the fit; None if it was not fitted.
        reason: why it was pinned.
    """

    status: Literal["fitted", "at_bound", "pinned"]
    num_rows: int
    relative_error: float | None = None
    reason: str = ""


class Curve(Spec):
    """Measured times of one collective by message size, ascending."""

    nbytes: tuple[float, ...] = Field(min_length=1)
    seconds: tuple[float, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "Curve":
        if len(self.nbytes) != len(self.seconds):
            raise ValueError(f"{len(self.nbytes)} sizes and {len(self.seconds)} times")
        if min(self.nbytes) <= 0 or min(self.seconds) <= 0:
            raise ValueError("sizes and times must be positive")
        if any(a >= b for a, b in zip(self.nbytes, self.nbytes[1:], strict=False)):
            raise ValueError("sizes must ascend")
        return self

    def time_s(self, nbytes: Amount) -> Amount:
        """Straight lines between the logarithms; constant below, proportional above; 0 for 0."""
        size = np.asarray(nbytes, np.float64)
        known, seconds = np.asarray(self.nbytes), np.asarray(self.seconds)
        inside = np.exp(np.interp(np.log(np.maximum(size, 1e-9)), np.log(known), np.log(seconds)))
        beyond = seconds[-1] * size / known[-1]
        time: Amount = np.where(size > known[-1], beyond, inside) * (size > 0)
        return time


class Domain(Spec):
    """Where measurements were made; a prediction elsewhere carries a warning.

    Attributes:
        ranges: smallest and largest measured value by name; docs/cost-model.md lists the names.
        attention: what kind of attention was measured.
        device, dtype_bytes: what it was measured on.
    """

    device: str
    dtype_bytes: int
    attention: AttentionKind
    ranges: dict[str, tuple[float, float]]


class ErrorRow(Spec):
    """Relative errors, in per cent, of one group of measurements.

    Attributes:
        held_out: whether every prediction came from a fit that had not seen the measurement.
        headline: whether the group is one of those that a tolerance applies to.
        bias_percent: median of predicted / measured - 1.
    """

    group: str
    held_out: bool
    headline: bool
    num_rows: int
    mean_percent: float
    median_percent: float
    p90_percent: float
    max_percent: float
    bias_percent: float


class Calibration(Spec):
    """A calibrated cost model as stored.

    Attributes:
        multi_host: coefficients that differ on clusters of several hosts.
        identification: by coefficient, "multi_host.<name>" for those of several hosts.
        all_reduce: measured curves by number of ranks.
        sources: what was measured, for people.
    """

    schema_version: Literal[1] = 1
    sources: tuple[str, ...]
    coefficients: Coefficients
    multi_host: dict[str, float] = Field(default_factory=dict)
    identification: dict[str, Identification] = Field(default_factory=dict)
    all_reduce: dict[str, Curve] = Field(default_factory=dict)
    domain: Domain
    errors: tuple[ErrorRow, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Calibration":
        self.for_hosts(2)
        for name in self.all_reduce:
            if not name.isdecimal() or int(name) < 2:
                raise ValueError(f"all_reduce: {name!r} is no number of ranks")
        return self

    def for_hosts(self, num_hosts: int) -> Coefficients:
        """The coefficients of a cluster with so many hosts."""
        if num_hosts == 1 or not self.multi_host:
            return self.coefficients
        return Coefficients.model_validate(self.coefficients.model_dump() | self.multi_host)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_file(path, self.model_dump_json(indent=1) + "\n")


def load_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    Raises:
        ConfigError: if it is missing or not a calibration of this schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"cannot read the calibration {path}", "make one with `psrl calibrate`"
        ) from None
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(
            f"{path}: not a calibration of schema 1: {where}: "
            f"{first['msg']} ({error.error_count()} problem(s) in all)",
            "make it again with `psrl calibrate`",
        ) from None
