"""What the attention benchmark reports: rows of measurements, and the CSV file that keeps them."""

import csv
import importlib.metadata
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch

from psrl.core.errors import ConfigError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.kernels.attention.key_rows import cached_rows, key_runs, local_rows
from psrl.kernels.triton.block_index import key_index, query_index
from psrl.kernels.triton.configs import kernel_tiles

from .check import Inputs

FORWARD_FLOPS = 4
"""Per visible pair, head and head dimension: two products of one multiply and one add each."""

BACKWARD_FLOPS = 10
"""Five products: scores again, dP, dV, dS to dQ and to dK."""


@dataclass(frozen=True)
class Row:
    """One measured implementation on one shape; medians of repeated runs.

    Attributes:
        visible_pairs: (query, key) pairs of the tree, per head.
        forward_area, dkv_area: area of the tiles shipped for Hopper over the visible pairs of the
            whole shape, of the forward and of the dK/dV kernel: what block skipping leaves.
        plan_ms: host time to build the block lists of the whole shape.
        forward_bytes: read and written at least: q, k, v and the output, once.
        slower_by: time of this implementation's forward and backward over that of tree attention.
    """

    device: str
    torch: str
    triton: str
    dtype: str
    shape: str
    implementation: str
    num_tokens: int
    num_query_heads: int
    num_key_heads: int
    head_dim: int
    visible_pairs: int
    forward_area: float
    dkv_area: float
    plan_ms: float
    forward_bytes: int
    forward_ms: float
    backward_ms: float
    forward_tflops_per_s: float
    backward_tflops_per_s: float
    slower_by: float


_COLUMNS = [f.name for f in fields(Row)]


@dataclass(frozen=True)
class Skipped:
    """A baseline without times on a shape, and why."""

    baseline: str
    shape: str
    reason: str


@dataclass
class Table:
    """Measured rows, and the baselines that gave none.

    Attributes:
        worst_error: of tree attention against float64 on a small forest.
    """

    worst_error: float
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


class PlanCost(NamedTuple):
    """Host time of the block lists of all kernels, and area of the tiles over visible pairs."""

    time_s: float
    forward_area: float
    dkv_area: float


def plan_cost(packed: PackedMicroBatch, head_dim: int) -> PlanCost:
    """Build the lists for the tiles shipped for Hopper.

    Raises:
        BackendError: for a head dimension without tiles.
    """
    tiles = kernel_tiles(torch.bfloat16, head_dim, use_tma=True)
    forward, dkv = tiles.forward, tiles.dkv
    start_s = time.perf_counter()
    runs = key_runs(packed)
    cached, local, num_queries = cached_rows(runs, None), local_rows(runs), packed.total_tokens
    visits = query_index(cached, local, num_queries, forward.block_q, forward.block_k)
    keys = [key_index(rows, num_queries, dkv.block_q, dkv.block_k) for rows in (cached, local)]
    time_s = time.perf_counter() - start_s
    num_visits = sum(int((index.ranges[:, 3] - index.ranges[:, 0]).sum()) for index in keys)
    return PlanCost(
        time_s,
        len(visits.row) * forward.block_q * forward.block_k / packed.pairs,
        num_visits * dkv.block_q * dkv.block_k / packed.pairs,
    )


def make_row(
    shape: str,
    implementation: str,
    packed: PackedMicroBatch,
    inputs: Inputs,
    cost: PlanCost,
    times_s: tuple[float, float],
    slower_by: float,
) -> Row:
    """The row of measured times of forward and backward."""
    (_, num_heads, head_dim), pairs = inputs.q.shape, packed.pairs
    flops = pairs * num_heads * head_dim
    return Row(
        device=device_name(inputs.q.device),
        torch=torch.__version__,
        triton=_version("triton"),
        dtype=str(inputs.q.dtype).removeprefix("torch."),
        shape=shape,
        implementation=implementation,
        num_tokens=packed.total_tokens,
        num_query_heads=num_heads,
        num_key_heads=inputs.k.shape[1],
        head_dim=head_dim,
        visible_pairs=pairs,
        forward_area=round(cost.forward_area, 4),
        dkv_area=round(cost.dkv_area, 4),
        forward_bytes=2 * inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes,
        plan_ms=round(cost.time_s * 1e3, 3),
        forward_ms=round(times_s[0] * 1e3, 3),
        backward_ms=round(times_s[1] * 1e3, 3),
        forward_tflops_per_s=round(FORWARD_FLOPS * flops / times_s[0] / 1e12, 6),
        backward_tflops_per_s=round(BACKWARD_FLOPS * flops / times_s[1] / 1e12, 6),
        slower_by=round(slower_by, 3),
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} thread(s)"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of an earlier `write_csv`; none if there is no file.

    Raises:
        ConfigError: if the file has other columns.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != _COLUMNS:
            raise ConfigError(f"{path} has other columns", "choose another file")
        return list(reader)


def write_csv(rows: list[Row], path: Path) -> None:
    """Add rows to a file, in place of those of the same device and the same work.

    Raises:
        ConfigError: if the file has other columns.
    """
    key = _COLUMNS[: _COLUMNS.index("visible_pairs")]
    new = [{name: str(value) for name, value in asdict(row).items()} for row in rows]
    replaced = {tuple(row[name] for name in key) for row in new}
    old = [row for row in read_csv(path) if tuple(row[name] for name in key) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(old + new)
