"""`psrl bench`: how fast an op runs here, beside other libraries on the same work."""

import importlib.util
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from psrl.core.errors import BackendError, ConfigError, ExitCode

from .output import OutputOptions

if TYPE_CHECKING:
    from psrl.kernels.benchmark.benchmark import Workload
    from psrl.kernels.benchmark.table import Table


@dataclass(frozen=True)
class Bench:
    """Time an op and other libraries on a registry of tree shapes, after checking its results.

    On a GPU: the Triton kernels in bfloat16 on whole shapes. On a CPU: the CPU implementation in
    float32 on shapes scaled down. A wrong result ends the run with exit code 4 and no times.
    """

    output: OutputOptions
    op: Literal["tree_attention"] = "tree_attention"
    """what to time"""
    shape: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """tree shape, repeatable; default all: grpo, star, deep_chain, wide_tree, tiny_nodes,
    path_60k"""
    baseline: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """library to compare with, repeatable; default all: sdpa (dense mask), flex_attention (block
    mask), unshared (FlashAttention on every sample whole)"""
    device: Literal["cpu", "cuda"] | None = None
    """default cuda where there is one"""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """default bfloat16 on a GPU, float32 on a CPU"""
    heads: tuple[int, int] = (32, 8)
    """query heads and key/value heads"""
    head_dim: int = 128
    max_tokens: int | None = None
    """scale shapes down to about this many tokens; default whole on a GPU, 1000 on a CPU"""
    repeats: int = 5
    """timed runs; times are medians"""
    csv: Path | None = None
    """file to add the rows to; rows of the same device and work are replaced"""

    def run(self) -> ExitCode:
        if importlib.util.find_spec("torch") is None:
            raise BackendError("psrl bench needs PyTorch", "pip install 'psrl[backend]'")
        from psrl.kernels.benchmark.baselines import BASELINES
        from psrl.kernels.benchmark.benchmark import measure
        from psrl.kernels.benchmark.shapes import SHAPES
        from psrl.kernels.benchmark.table import read_csv, write_csv

        _require_known("shape", self.shape, SHAPES)
        _require_known("baseline", self.baseline, BASELINES)
        workload = self._workload()
        if self.csv is not None:
            read_csv(self.csv)  # a file that cannot take the rows is refused before the work
        op: Literal["triton", "parts"] = "triton" if workload.device.type == "cuda" else "parts"
        with self.output.step(f"checking and timing {self.op} ({op}) on {workload.device.type}"):
            table = measure(op, self.shape or SHAPES, workload, self.baseline or BASELINES)
        if self.csv is not None:
            write_csv(table.rows, self.csv)
        result = {"op": self.op, "implementation": op, **asdict(table)}
        self.output.emit(result, describe_table(table, workload.max_tokens))
        return ExitCode.OK

    def _workload(self) -> "Workload":
        import torch

        from psrl.kernels.benchmark.benchmark import Workload

        num_query, num_key = self.heads
        if num_key < 1 or num_query % num_key or num_query < 1:
            raise ConfigError(
                f"--heads {num_query} {num_key}: query heads must be a multiple of key/value heads"
            )
        for name in ("head_dim", "max_tokens", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} is below 1")
        on_gpu = torch.cuda.is_available() if self.device is None else self.device == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise BackendError("torch sees no CUDA device", "pass --device cpu")
        max_tokens = self.max_tokens
        if max_tokens is None and not on_gpu:
            max_tokens = 1000
        return Workload(
            torch.device("cuda" if on_gpu else "cpu"),
            getattr(torch, self.dtype or ("bfloat16" if on_gpu else "float32")),
            self.heads,
            self.head_dim,
            max_tokens,
            self.repeats,
        )


def _require_known(option: str, chosen: Iterable[str], known: Iterable[str]) -> None:
    for name in chosen:
        if name not in known:
            raise ConfigError(f"unknown --{option} {name}", f"use one of {', '.join(known)}")


def describe_table(table: "Table", max_tokens: int | None) -> str:
    """What was measured, the table, and what was left out and why."""
    first = table.rows[0]
    size = "whole shapes" if max_tokens is None else f"shapes scaled to {max_tokens:,} tokens"
    lines = [
        f"{first.device}, {first.dtype}, {first.num_query_heads} query and {first.num_key_heads} "
        f"key/value heads of {first.head_dim}, {size}",
        f"{first.implementation}: error {table.worst_error:.1e} against float64; the others "
        "agree with it on the timed inputs",
        "",
        f"{'shape':<12}{'implementation':<16}{'tokens':>9}{'visible pairs':>15}{'tile area':>11}"
        f"{'lists ms':>10}{'forward ms':>12}{'backward ms':>13}{'TFLOP/s':>10}{'backward':>10}"
        f"{'slower by':>11}",
    ]
    for row in table.rows:
        ours = row.implementation == first.implementation
        lines.append(
            f"{row.shape:<12}{row.implementation:<16}{row.num_tokens:>9,}{row.visible_pairs:>15,}"
            + (f"{row.forward_area:>11.3f}{row.plan_ms:>10.1f}" if ours else f"{'':>21}")
            + f"{row.forward_ms:>12,.2f}{row.backward_ms:>13,.2f}{row.forward_tflops_per_s:>10.3g}"
            f"{row.backward_tflops_per_s:>10.3g}" + ("" if ours else f"{row.slower_by:>10.2f}x")
        )
    lines += [
        "",
        "TFLOP/s count visible pairs only. Tile area (of the forward, over the visible pairs) and "
        "block lists are those of the whole shape on Hopper.",
    ]
    return "\n".join(lines + _reasons(table))


def _reasons(table: "Table") -> list[str]:
    shapes: dict[tuple[str, str], list[str]] = {}
    for left_out in table.skipped:
        shapes.setdefault((left_out.baseline, left_out.reason), []).append(left_out.shape)
    return [
        f"not measured: {baseline} on {', '.join(names)}: {reason}"
        for (baseline, reason), names in shapes.items()
    ]
