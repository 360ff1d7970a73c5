"""Time implementations of tree attention on a registry of tree shapes.

Every row is gated: an implementation whose error against float64 is too large on a small forest
gets no time. TFLOP/s count the visible (query, key) pairs only, so wasted tiles cost speed.

Dimension letters: T tokens, H query heads, G key/value heads, D head dimension.
"""

import csv
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psrl.core.errors import BackendError, ToleranceError
from psrl.core.packing import PackedMicroBatch

from .block_index import key_index, query_index
from .check import TOLERANCE, Inputs, check_forest, random_inputs
from .configs import HOPPER
from .forests import Segment, join_forests, level_tree, pack_forest, random_forest
from .key_rows import cached_rows, key_runs, local_rows
from .tree_attention import Implementation, tree_attention

FORWARD_FLOPS = 4
"""Per visible pair, head and head dimension: two products of one multiply and one add each."""

BACKWARD_FLOPS = 10
"""Five products: scores again, dP, dV, dS to dQ and to dK."""


def _grpo(rng: np.random.Generator) -> list[Segment]:
    return join_forests(
        [Segment(-1, int(rng.integers(512, 1537)))]
        + [Segment(0, int(n)) for n in rng.integers(200, 2001, 16)]
        for _ in range(4)
    )


SHAPES: dict[str, Callable[[np.random.Generator], list[Segment]]] = {
    "grpo": _grpo,
    "star": lambda rng: (
        [Segment(-1, 4096)] + [Segment(0, int(n)) for n in rng.integers(200, 1001, 64)]
    ),
    "deep_chain": lambda rng: level_tree(rng, [(1500, 3000), *[(100, 600)] * 6], 2),
    "wide_tree": lambda rng: level_tree(rng, [(2048, 2048), (300, 1000), (300, 1000)], 5),
    "tiny_nodes": lambda rng: join_forests(
        level_tree(rng, [(200, 400), *[(5, 40)] * 7], 2) for _ in range(4)
    ),
    "path_60k": lambda rng: [Segment(-1, 60_000)],
}
"""Tree shapes by name: prompts with responses, agents with branches, tiny nodes, one long path."""


@dataclass(frozen=True)
class Row:
    """One measured implementation on one shape; medians of repeated runs.

    Attributes:
        visible_pairs: (query, key) pairs per head.
        computed_over_visible: area of the visited forward tiles over the visible pairs.
        plan_ms: host time to build the block lists.
        forward_bytes: read and written at least: q, k, v and the output, once.
    """

    device: str
    shape: str
    implementation: str
    num_tokens: int
    visible_pairs: int
    computed_over_visible: float
    forward_bytes: int
    plan_ms: float
    forward_ms: float
    backward_ms: float
    forward_tflops_per_s: float
    backward_tflops_per_s: float


def gate(
    implementation: Implementation,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device | str,
) -> float:
    """Largest error of an implementation on a small forest in two micro-batches.

    Raises:
        ToleranceError: if the error is above `check.TOLERANCE`: its times would mean nothing.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedMicroBatch, store: Any) -> Tensor:
        return tree_attention(q, k, v, packed, store=store, implementation=implementation)

    errors = check_forest(
        random_forest(np.random.default_rng(0), 150, 40),
        attention,
        head_dim=head_dim,
        dtype=dtype,
        cuts=[70],
        device=device,
    )
    worst = max(errors.values())
    if worst > TOLERANCE[dtype]:
        raise ToleranceError(
            f"{implementation} has error {worst:.1e} in {dtype}, above {TOLERANCE[dtype]:.1e}",
            "no time is reported for a wrong result; run the tests in tests/kernels",
        )
    return worst


def tree_attention_rows(
    shapes: Iterable[str],
    implementations: Iterable[Implementation],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    max_tokens: int | None = None,
    repeats: int = 5,
) -> list[Row]:
    """Measure implementations on shapes, after their gate.

    Args:
        max_tokens: scale the segments down to about this many tokens; for CPUs.

    Raises:
        BackendError: for an unknown shape.
        ToleranceError: if an implementation fails its gate.
    """
    rows = []
    chosen = list(implementations)
    for implementation in chosen:
        gate(implementation, dtype, head_dim, device)
    for shape in shapes:
        if shape not in SHAPES:
            raise BackendError(f"unknown shape {shape!r}", f"use one of {list(SHAPES)}")
        segments = SHAPES[shape](np.random.default_rng(0))
        (packed,) = pack_forest(shrink(segments, max_tokens))
        inputs = random_inputs(packed.total_tokens, heads, head_dim, dtype, device)
        for implementation in chosen:
            attention = partial(tree_attention, implementation=implementation)
            times = time_attention(attention, packed, inputs, repeats)
            rows.append(make_row(shape, implementation, packed, inputs, times))
    return rows


def shrink(segments: list[Segment], max_tokens: int | None) -> list[Segment]:
    total = sum(s.num_tokens for s in segments)
    if max_tokens is None or total <= max_tokens:
        return segments
    return [s._replace(num_tokens=max(1, s.num_tokens * max_tokens // total)) for s in segments]


def make_row(
    shape: str,
    implementation: str,
    packed: PackedMicroBatch,
    inputs: Inputs,
    times: tuple[float, float],
) -> Row:
    heads, head_dim, pairs = inputs.q.shape[1], inputs.q.shape[2], packed.pairs
    flops = pairs * heads * head_dim
    plan_s, area = plan_cost(packed, head_dim)
    forward_s, backward_s = times
    return Row(
        device=device_name(inputs.q.device),
        shape=shape,
        implementation=implementation,
        num_tokens=packed.total_tokens,
        visible_pairs=pairs,
        computed_over_visible=round(area / pairs, 4),
        forward_bytes=2 * inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes,
        plan_ms=round(plan_s * 1e3, 3),
        forward_ms=round(forward_s * 1e3, 3),
        backward_ms=round(backward_s * 1e3, 3),
        forward_tflops_per_s=round(FORWARD_FLOPS * flops / forward_s / 1e12, 6),
        backward_tflops_per_s=round(BACKWARD_FLOPS * flops / backward_s / 1e12, 6),
    )


def plan_cost(packed: PackedMicroBatch, head_dim: int) -> tuple[float, int]:
    """Seconds to build the lists of all kernels on the host, and area of the forward's tiles."""
    tiles = HOPPER[min(size for size in HOPPER if size >= head_dim)]
    start_s = time.perf_counter()
    runs = key_runs(packed)
    cached, local, num_queries = cached_rows(runs, None), local_rows(runs), packed.total_tokens
    shape = tiles.forward.block_q, tiles.forward.block_k
    visits = query_index(cached, local, num_queries, *shape)
    for rows in (cached, local):
        key_index(rows, num_queries, tiles.dkv.block_q, tiles.dkv.block_k)
    return time.perf_counter() - start_s, len(visits.row) * shape[0] * shape[1]


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


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def write_csv(rows: list[Row], path: Path) -> None:
    """One line per row, with the device in the first column."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
