"""Time tree attention beside other libraries on a registry of tree shapes.

Times are gated twice: the implementation must be near float64 on a small forest, and every other
library must agree with it on the very inputs that are timed. TFLOP/s count the visible (query,
key) pairs only, so wasted tiles and unshared prefixes cost speed.

Dimension letters: T tokens, H query heads, G key/value heads, D head dimension.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psrl.core.errors import BackendError, ToleranceError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.core.run.relative_error import relative_error
from psrl.kernels.attention.tree_attention import Implementation, tree_attention

from .baselines import BASELINES, Baseline, make_baseline
from .check import TOLERANCE, Inputs, check_forest, random_inputs
from .forests import pack_forest, random_forest
from .shapes import make_shape
from .table import Skipped, Table, make_row, plan_cost

GATE_TOKENS = {"cpu": 60, "cuda": 700}
"""Of the forest that must be right before anything is timed; Triton's interpreter is slow."""


@dataclass(frozen=True)
class Workload:
    """What is timed, apart from the shape.

    Attributes:
        heads: numbers of query and of key/value heads.
        max_tokens: scale shapes down to about this many tokens; None for their full size.
        repeats: timed runs, after one that compiles.
    """

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    head_dim: int
    max_tokens: int | None
    repeats: int


def gate(implementation: Implementation, workload: Workload) -> float:
    """Largest error of an implementation on a small forest in two micro-batches.

    Raises:
        ToleranceError: if the error is above `check.TOLERANCE`: its times would mean nothing.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedMicroBatch, store: Any) -> Tensor:
        return tree_attention(q, k, v, packed, store=store, implementation=implementation)

    num_tokens = GATE_TOKENS[workload.device.type]
    errors = check_forest(
        random_forest(np.random.default_rng(0), num_tokens, num_tokens // 4),
        attention,
        head_dim=workload.head_dim,
        dtype=workload.dtype,
        cuts=[num_tokens // 2],
        device=workload.device,
    )
    worst, bar = max(errors.values()), TOLERANCE[workload.dtype]
    if worst > bar:
        raise ToleranceError(
            f"{implementation} has error {worst:.1e} in {workload.dtype}, above {bar:.1e}",
            "no time is reported for a wrong result; run the tests in tests/kernels",
        )
    return worst


def measure(
    implementation: Implementation,
    shapes: Iterable[str],
    workload: Workload,
    baselines: Iterable[str] = BASELINES,
) -> Table:
    """Tree attention by one implementation, and baselines, on shapes.

    Raises:
        BackendError: for an unknown shape, or if the implementation cannot run on the device.
        ToleranceError: if the implementation fails its gate, or a baseline disagrees with it.
    """
    table = Table(gate(implementation, workload))
    for shape in shapes:
        _measure_shape(implementation, shape, workload, list(baselines), table)
    return table


def _measure_shape(
    implementation: Implementation,
    shape: str,
    workload: Workload,
    baselines: list[str],
    table: Table,
) -> None:
    cost = plan_cost(pack_forest(make_shape(shape))[0], workload.head_dim)
    segments = make_shape(shape, workload.max_tokens)
    (packed,) = pack_forest(segments)
    inputs = random_inputs(
        packed.total_tokens, workload.heads, workload.head_dim, workload.dtype, workload.device
    )
    ours = Baseline(partial(tree_attention, implementation=implementation), inputs)
    times = time_attention(ours.attention, packed, inputs, workload.repeats)
    table.rows.append(make_row(shape, implementation, packed, inputs, cost, times, 1.0))
    expected = ours.attention(*inputs[:3], packed)
    for name in baselines:
        try:
            baseline = make_baseline(name, segments, packed, inputs)
            _require_agreement(name, shape, baseline, packed, expected)
            theirs = time_attention(baseline.attention, packed, baseline.inputs, workload.repeats)
        except (BackendError, ImportError, RuntimeError) as error:
            # Another library that is missing, too large or broken must not end the run.
            reason = (str(error) or repr(error)).splitlines()[0]
            table.skipped.append(Skipped(name, shape, reason[:200]))
            continue
        slower_by = sum(theirs) / sum(times)
        table.rows.append(make_row(shape, name, packed, baseline.inputs, cost, theirs, slower_by))


def _require_agreement(
    name: str, shape: str, baseline: Baseline, packed: PackedMicroBatch, expected: Tensor
) -> None:
    out = baseline.attention(*baseline.inputs[:3], packed).float()
    wanted = (expected if baseline.rows is None else expected[baseline.rows]).float()
    error = relative_error(float((out - wanted).norm()), float(wanted.norm()))
    bar = 2 * TOLERANCE[expected.dtype]
    if not error <= bar:
        raise ToleranceError(
            f"{name} and tree attention differ by {error:.1e} on {shape}, above {bar:.1e}",
            "one of them is wrong there, so no times are reported",
        )


def time_attention(
    attention: Callable[..., Tensor], packed: PackedMicroBatch, inputs: Inputs, repeats: int
) -> tuple[float, float]:
    """Median seconds of forward and of backward, after one run that compiles."""
    forward_s, backward_s = [], []
    for _ in range(repeats + 1):
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        start_s = _clock(inputs.q)
        out = attention(*leaves, packed)
        middle_s = _clock(inputs.q)
        torch.autograd.grad(out, leaves, inputs.dout)
        forward_s.append(middle_s - start_s)
        backward_s.append(_clock(inputs.q) - middle_s)
    return float(np.median(forward_s[1:])), float(np.median(backward_s[1:]))


def _clock(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
