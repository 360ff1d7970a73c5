"""What the stages of the GPU check of the backend share: sizes, report, benches and results."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psrl.backend.execute import fastest_implementation
from psrl.backend.options import LossOptions
from psrl.backend.train.inputs import RankProgram
from psrl.backend.train.stage import PhaseInputs
from psrl.core.cost.cluster import ModelSpec
from psrl.core.run.relative_error import relative_error
from psrl.core.run.run_directory import finite
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.core.samples.trace import open_trace
from psrl.traces.slicing import slice_batch

from .backend import TRACE, Bench

TOLERANCE = {torch.bfloat16: 2.5e-2, torch.float32: 5e-6}
"""Largest relative L2 error of the gradient of all parameters."""
LOSS = LossOptions(kind="ppo_clip", kl_coefficient=0.01)
MAX_RATIO_SHIFT = 0.1
"""Old and reference logprobs are off by up to this: ratios stay where clipping does not begin,
because there rounding would decide which branch a token takes."""


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: a real one, or a dry one.

    Attributes:
        equality_slice, speed_slice: groups, trajectories per group, steps per trajectory.
        cuts: micro-batches of the equality rows' shared programs.
        dense_cuts: of the dense programs; the second gives the noise floor.
        speed_cuts: micro-batches of the shared programs that are timed.
        dense_tokens: per micro-batch of the dense programs that are timed.
    """

    device: torch.device
    models: tuple[ModelSpec, ...]
    speed_model: ModelSpec
    equality_slice: tuple[int, int, int]
    speed_slice: tuple[int, int, int]
    cuts: tuple[int, ...]
    dense_cuts: tuple[int, int]
    speed_cuts: tuple[int, ...]
    dense_tokens: tuple[int, int]
    repeats: int


@dataclass
class Report:
    """What the run found; written as JSON.

    Attributes:
        passed: no gradient of the rows so far is outside its tolerance.
        complete: the run reached its end, and nothing was skipped.
    """

    device: str
    dry_run: bool
    budget_s: float
    environment: dict[str, Any]
    passed: bool = True
    complete: bool = False
    skipped: list[str] = field(default_factory=list)
    equality: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A report in the making, and the time that is left for it."""

    report: Report
    output: Path
    scale: Scale
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        return self.report.budget_s - (time.perf_counter() - self.began_s)

    def save(self) -> None:
        text = json.dumps(finite(asdict(self.report)), indent=1, allow_nan=False)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(text + "\n", encoding="utf-8")

    def skip(self, what: str, why: str) -> None:
        self.report.skipped.append(f"{what}: {why}")
        self.save()

    @contextmanager
    def row(self, what: str, reserved_s: float = 0.0) -> Iterator[bool]:
        """Yields whether there is time for a row; what the device has no memory for is skipped."""
        enough = self.left_s > reserved_s
        if not enough:
            self.skip(what, f"the time budget of {self.report.budget_s:g} s is used up")
        try:
            yield enough
        except torch.cuda.OutOfMemoryError as error:
            self.skip(what, str(error).partition("\n")[0])
        self.save()


@dataclass(frozen=True)
class Result:
    """What one update gives. Gradients are one flat tensor on the device."""

    gradient: Tensor
    loss: float
    logprobs: FloatArray

    def errors(self, other: "Result") -> dict[str, float]:
        """Relative L2 errors of this result against another; the loss is absolute below 1."""
        gradient, logprobs = self.gradient - other.gradient, self.logprobs - other.logprobs
        return {
            "gradient": relative_error(float(gradient.norm()), float(other.gradient.norm())),
            "loss": relative_error(abs(self.loss - other.loss), max(abs(other.loss), 1.0)),
            "logprobs": relative_error(
                float(np.linalg.norm(logprobs)), float(np.linalg.norm(other.logprobs))
            ),
        }


def result(bench: Bench) -> Result:
    """The outcome of a bench's last run, which was an update."""
    (gradient,) = bench.gradients.tensors()
    return Result(gradient.clone(), bench.loss_value, bench.logprobs)


def use_own_policy(bench: Bench, forward: RankProgram) -> None:
    """Run log-old-prob; the update is then slightly off that policy."""
    bench.run(forward)
    rng = np.random.default_rng(0)
    old, reference = (
        bench.logprobs + rng.uniform(-MAX_RATIO_SHIFT, MAX_RATIO_SHIFT, len(bench.logprobs))
        for _ in range(2)
    )
    bench.phase_inputs = PhaseInputs(old, reference)


def sliced(size: tuple[int, int, int]) -> SampleBatch:
    """Some samples of the shipped trace, with random advantages.

    The trace records no rewards; with advantages of 0 the KL penalty alone would be left, whose
    terms cancel, so that the error of the gradient would show rounding only.
    """
    groups, trajectories, steps = size
    batch = slice_batch(
        open_trace(TRACE).iteration(0),
        num_groups=groups,
        trajectories_per_group=trajectories,
        steps_per_trajectory=steps,
    )
    return replace(batch, advantage=np.random.default_rng(0).normal(size=batch.num_samples))


def new_bench(run: Run, batch: SampleBatch, model: ModelSpec, dtype: torch.dtype) -> Bench:
    """A model with random weights on the device, with its fastest attention."""
    device = run.scale.device
    return Bench(batch, model, dtype, device, fastest_implementation(device), LOSS)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
