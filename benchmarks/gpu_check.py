"""Everything about the Triton kernels that only a GPU can say, in one run of a few minutes.

    python benchmarks/gpu_check.py --output benchmarks/results/h200.json

Stages: errors against float64, equal bits on repeated runs, a sweep of tile shapes, and a table
of TFLOP/s beside other libraries. The file is written after every stage; a stage that the time
budget no longer allows is skipped and named. `--dry-run` goes through all stages on a CPU, in
Triton's interpreter, with tiny sizes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from psrl.core.plan.packing import PackedMicroBatch
from psrl.kernels import KeyValueStore, LinearStore
from psrl.kernels.benchmark.benchmark import Workload, measure
from psrl.kernels.benchmark.check import (
    TOLERANCE,
    Inputs,
    check_forest,
    random_inputs,
    run_micro_batches,
)
from psrl.kernels.benchmark.forests import pack_forest, random_forest
from psrl.kernels.benchmark.shapes import SHAPES, make_shape
from psrl.kernels.benchmark.table import device_name
from psrl.kernels.triton import launch as host
from psrl.kernels.triton.attention import triton_attention
from psrl.kernels.triton.attention_index import attention_index
from psrl.kernels.triton.configs import KernelTiles, Tiles, can_use_tma

SWEEP = {
    "forward": [
        *((128, 64, 8, stages) for stages in (2, 3, 4)),
        *((128, 128, 8, stages) for stages in (2, 3)),
        *((64, 64, 4, 3), (64, 128, 4, 2)),
    ],
    "dq": [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 128, 8, 2)],
    "dkv": [
        *((64, 128, 8, 2, split) for split in (False, True)),
        *((32, 128, 8, 3, split) for split in (False, True)),
        *((64, 64, 8, 2, split) for split in (False, True)),
        *((32, 128, 8, 2), (64, 64, 8, 3), (64, 64, 4, 2)),
    ],
}
"""Tile shapes to measure at head dimension 128: block_q, block_k, warps, stages, split."""


@dataclass
class Report:
    """What the run found; written as JSON."""

    device: str
    triton: str
    torch: str
    passed: bool = True
    skipped: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    repeats_equal: dict[str, bool] = field(default_factory=dict)
    sweep: list[dict[str, Any]] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: a real one, or a dry one.

    Attributes:
        num_tokens: of the forests whose results are checked.
        max_tokens: of the shapes that are timed; None for their full size.
        cases: (dtype, head dimension, query heads, key/value heads) to check.
    """

    device: torch.device
    num_tokens: int
    max_tokens: int | None
    heads: tuple[int, int]
    head_dim: int
    cases: list[tuple[torch.dtype, int, int, int]]
    repeats: int


def real_scale() -> Scale:
    """Sizes for a GPU."""
    ratios = ((8, 8), (8, 2), (7, 1))
    cases = [(torch.bfloat16, dim, *heads) for dim, heads in product((64, 128), ratios)]
    cases += [(torch.bfloat16, dim, 4, 2) for dim in (96, 256)] + [(torch.float16, 128, 4, 2)]
    cases += [(torch.float32, d, 4, 2) for d in (64, 128)]
    return Scale(torch.device("cuda"), 700, None, (32, 8), 128, cases, repeats=10)


def dry_scale() -> Scale:
    """Sizes for the interpreter."""
    case = (torch.float32, 16, 2, 1)
    return Scale(torch.device("cpu"), 40, 60, (2, 1), 16, [case], repeats=1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedMicroBatch,
    store: KeyValueStore,
    use_tma: bool | None = None,
) -> Tensor:
    """The Triton implementation, reads chosen by argument."""
    return triton_attention(q, k, v, packed, store, use_tma=use_tma)


def tma_choices(scale: Scale, dtype: torch.dtype, head_dim: int) -> list[bool]:
    """Pointers, and descriptors where the device has them."""
    on_gpu = scale.device.type == "cuda"
    capability = torch.cuda.get_device_capability() if on_gpu else (0, 0)
    return [False, True] if can_use_tma(capability, dtype, head_dim) else [False]


def check_errors(scale: Scale, report: Report) -> None:
    """Random forests in three micro-batches, each dtype, head dimension, ratio and way to read."""
    for number, (dtype, head_dim, *heads) in enumerate(scale.cases):
        rng = np.random.default_rng(number)
        total = scale.num_tokens + number
        segments = random_forest(rng, total, (6, 60, 300)[number % 3])
        cuts = sorted(rng.choice(np.arange(1, total), 2, replace=False).tolist())
        for use_tma in tma_choices(scale, dtype, head_dim):
            found = check_forest(
                segments,
                partial(attention, use_tma=use_tma),
                heads=(heads[0], heads[1]),
                head_dim=head_dim,
                dtype=dtype,
                cuts=cuts,
                store=LinearStore(total, 1, heads[1], head_dim, dtype, scale.device),
                device=scale.device,
            )
            passed = max(found.values()) <= TOLERANCE[dtype]
            report.passed &= passed
            report.errors.append(
                {"dtype": str(dtype), "head_dim": head_dim, "heads": heads, "use_tma": use_tma}
                | {"passed": passed}
                | found
            )


def check_repeats(scale: Scale, report: Report) -> None:
    """The same inputs give the same bits, run after run."""
    dtype, head_dim, *heads = scale.cases[0]
    total = 4 * scale.num_tokens
    segments = random_forest(np.random.default_rng(1), total, 200)
    micro_batches = pack_forest(segments, [total // 3, total // 2])
    inputs = random_inputs(total, (heads[0], heads[1]), head_dim, dtype, scale.device)
    for use_tma in tma_choices(scale, dtype, head_dim):
        results = []
        for _ in range(scale.repeats + 1):
            store = LinearStore(total, 1, heads[1], head_dim, dtype, scale.device)
            run = partial(attention, use_tma=use_tma)
            results.append(run_micro_batches(micro_batches, inputs, run, store))
        equal = all(
            torch.equal(a, b)
            for other in results[1:]
            for a, b in zip(results[0], other, strict=True)
        )
        report.repeats_equal["descriptors" if use_tma else "pointers"] = equal
        report.passed &= equal


def sweep(scale: Scale, report: Report) -> None:
    """Time each kernel alone with each of its tile shapes, on the shape `grpo`."""
    dtype = torch.bfloat16 if scale.device.type == "cuda" else torch.float32
    use_tma = tma_choices(scale, dtype, scale.head_dim)[-1]
    (packed,) = pack_forest(make_shape("grpo", scale.max_tokens))
    inputs = random_inputs(packed.total_tokens, scale.heads, scale.head_dim, dtype, scale.device)
    flops = packed.pairs * scale.heads[0] * scale.head_dim
    for kernel, shapes in SWEEP.items():
        for shape in shapes if scale.device.type == "cuda" else [(32, 16, 1, 1)]:
            row: dict[str, Any] = {"kernel": kernel, "tiles": list(shape)}
            try:
                time_s = _time_kernel(kernel, Tiles(*shape), packed, inputs, use_tma, scale)
            except triton.runtime.errors.OutOfResources as error:
                report.sweep.append(row | {"error": str(error)})
                continue
            products = {"forward": 2, "dq": 3, "dkv": 4}[kernel]
            rate = 2 * products * flops / time_s / 1e12
            report.sweep.append(row | {"ms": time_s * 1e3, "tflops_per_s": rate})


def _time_kernel(
    kernel: str,
    tiles: Tiles,
    packed: PackedMicroBatch,
    inputs: Inputs,
    use_tma: bool,
    scale: Scale,
) -> float:
    index = attention_index(packed, None, KernelTiles(tiles, tiles, tiles), scale.device)
    q, k, v, dout = inputs
    lse = torch.zeros(q.shape[1], q.shape[0], device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    factor = scale.head_dim**-0.5
    launches: dict[str, Callable[[], object]] = {
        "forward": lambda: host.attention_forward(
            q, k, v, None, index.forward, factor, tiles, use_tma
        ),
        "dq": lambda: host.query_gradient(
            q, k, v, None, dout, dout, lse, index.dq, factor, tiles, use_tma
        ),
        "dkv": lambda: host.key_gradients(
            k, v, dk, dv, index.local, q, dout, lse, lse, factor, tiles, use_tma, add=False
        ),
    }
    times_s = []
    for _ in range(scale.repeats + 1):
        start_s = _now(q)
        launches[kernel]()
        times_s.append(_now(q) - start_s)
    return float(np.median(times_s[1:]))


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def table(scale: Scale, report: Report) -> None:
    """Forward and backward of all shapes beside other libraries. Only after a passed check."""
    if not report.passed:
        report.skipped.append("table: a check failed, so no time is worth reporting")
        return
    dtype = torch.bfloat16 if scale.device.type == "cuda" else torch.float32
    workload = Workload(
        scale.device, dtype, scale.heads, scale.head_dim, scale.max_tokens, scale.repeats
    )
    found = measure("triton", SHAPES if scale.max_tokens is None else ["grpo"], workload)
    report.table += [asdict(row) for row in found.rows]
    report.skipped += [f"table: {s.baseline} on {s.shape}: {s.reason}" for s in found.skipped]


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; 0 if every check passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--budget-s", type=float, default=420, help="start no stage after this")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args(arguments)
    scale = dry_scale() if options.dry_run else real_scale()
    report = Report(device_name(scale.device), triton.__version__, torch.__version__)
    began_s = time.perf_counter()
    for stage in (check_errors, check_repeats, table, sweep):
        start_s = time.perf_counter()
        if start_s - began_s > options.budget_s:
            report.skipped.append(f"{stage.__name__}: {options.budget_s} s are over")
            continue
        stage(scale, report)
        report.seconds[stage.__name__] = round(time.perf_counter() - start_s, 1)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        print(f"{stage.__name__}: {report.seconds[stage.__name__]} s", file=sys.stderr)
    print(f"{'passed' if report.passed else 'FAILED'}: {options.output}", file=sys.stderr)
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
