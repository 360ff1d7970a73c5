"""Compile the Triton kernels for a GPU that is not there, and report what the assembler made.

    python -m psrl.kernels.compile_report                   all shipped tiles, as a Markdown table
    python -m psrl.kernels.compile_report --target sm_90a --head-dim 128 --json

Every launch is made by the code that makes it in training; only the driver is replaced by one
that compiles. One process compiles for one target: Triton's cache does not tell targets apart.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from psrl.core.errors import BackendError
from psrl.kernels.attention.buffer_store import LinearStore
from psrl.kernels.benchmark.check import random_inputs
from psrl.kernels.benchmark.forests import Segment, pack_forest

from . import launch as host
from .attention_index import attention_index
from .configs import KernelTiles, Tiles, kernel_tiles

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_90a": 90}
"""sm_90a reads through tensor descriptors, sm_90 through pointers (both compile as sm_90a)."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KERNELS = ("forward", "dq", "dkv", "dkv_add")
OPCODES = ("HGMMA", "HMMA", "LDGSTS", "UTMALDG", "UTMASTG", "UTMAREDG", "LDL", "STL")


class OfflineDriver:
    """Enough of a driver to compile a launch: it never loads a binary."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compiler:
    """Stands in for a kernel: a launch compiles, and the binary is kept."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.compiled = self._kernel.warmup(*args, grid=grid, **options)

        return launch


class Usage(NamedTuple):
    """Resources of one binary; `local_bytes` counts spilled registers and the stack."""

    registers: int
    local_bytes: int
    shared_bytes: int
    opcodes: dict[str, int]


def usage(compiled: Any) -> Usage:
    """Registers, memory and counts of some opcodes, by the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        resources, assembly = (
            subprocess.run(
                [tools / tool, option, path], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", resources)
    if found is None:
        raise BackendError(f"cuobjdump printed no resource usage:\n{resources}")
    registers, stack, local = (int(group) for group in found.groups())
    counts = {name: len(re.findall(rf"\b{name}\b", assembly)) for name in OPCODES}
    return Usage(registers, stack + local, compiled.metadata.shared, counts)


def compile_launch(
    kernel: str, target: str, dtype: torch.dtype, head_dim: int, tiles: KernelTiles
) -> Usage:
    """Compile one of KERNELS as a launch with a cached prefix does.

    Its errors are Triton's, when it cannot.
    """
    use_tma = target == "sm_90a"
    triton.runtime.driver.set_active(OfflineDriver(GPUTarget("cuda", TARGETS[target], 32)))
    name = f"{kernel.removesuffix('_add')}_kernel"
    compiler = Compiler(getattr(host, name))
    setattr(host, name, compiler)
    try:
        _launch(kernel, dtype, head_dim, tiles, use_tma)
    finally:
        setattr(host, name, compiler._kernel)
    return usage(compiler.compiled)


def _launch(
    kernel: str, dtype: torch.dtype, head_dim: int, tiles: KernelTiles, use_tma: bool
) -> None:
    heads = (32, 8)
    q, k, v, dout = random_inputs(501, heads, head_dim, dtype)
    _, packed = pack_forest([Segment(-1, 1001)], [500])
    store = LinearStore(1000, 1, heads[1], head_dim, dtype)
    store.write(0, 0, k[:500], v[:500])
    index = attention_index(packed, store, tiles, q.device)
    cache = store.buffers(0)
    lse = torch.zeros(heads[0], 501)
    if kernel == "forward":
        host.attention_forward(q, k, v, cache, index.forward, 0.1, tiles.forward, use_tma)
        return
    if kernel == "dq":
        host.query_gradient(q, k, v, cache, dout, dout, lse, index.dq, 0.1, tiles.dq, use_tma)
        return
    sides = (q, dout, lse, lse, 0.1, tiles.dkv, use_tma)
    if kernel == "dkv_add":
        sums = store.gradient_buffers(0, [0])
        host.key_gradients(*cache, *sums, index.cached, *sides, add=True)
    else:
        host.key_gradients(k, v, k.clone(), v.clone(), index.local, *sides, add=False)


def tiles_of(kernel: str, tiles: KernelTiles) -> Tiles:
    """The tiles of one of KERNELS."""
    return getattr(tiles, kernel.removesuffix("_add"))


def report(target: str, dtype: str, head_dim: int) -> list[dict[str, Any]]:
    """One row per kernel with its shipped tiles."""
    tiles = kernel_tiles(DTYPES[dtype], head_dim, use_tma=target == "sm_90a")
    rows = []
    for kernel in KERNELS:
        shape = tiles_of(kernel, tiles)
        found = compile_launch(kernel, target, DTYPES[dtype], head_dim, tiles)
        rows.append(
            {
                "target": target,
                "dtype": dtype,
                "head_dim": head_dim,
                "kernel": kernel,
                "tiles": f"{shape.block_q} x {shape.block_k}",
                "warps": shape.num_warps,
                "stages": shape.num_stages,
                **found._replace(opcodes={})._asdict(),
                **{name: count for name, count in found.opcodes.items() if count},
            }
        )
        del rows[-1]["opcodes"]
    return rows


def shipped() -> list[tuple[str, str, int]]:
    """(target, dtype, head dimension) of every entry of the tables, and of padded heads."""
    short = {"sm_90a": (32, 64, 128, 256), "sm_90": (48, 96, 128, 192), "sm_80": (64, 96, 128, 256)}
    return [
        *((target, "bfloat16", dim) for target, dims in short.items() for dim in dims),
        ("sm_90a", "float16", 128),
        *(("sm_80", "float32", dim) for dim in (64, 128, 256)),
    ]


def main() -> None:
    """Compile here for one target, or in a process per target for all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    if options.target:
        rows = report(options.target, options.dtype, options.head_dim)
    else:
        rows = [row for job in shipped() for row in report_in_own_process(*job)]
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    columns = ["target", "dtype", "head_dim", "kernel", "tiles", "warps", "stages"]
    columns += ["registers", "local_bytes", "shared_bytes", *OPCODES[:4]]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(c, 0)) for c in columns) + " |")


def report_in_own_process(target: str, dtype: str, head_dim: int) -> list[dict[str, Any]]:
    """`report` in a fresh process without Triton's interpreter.

    Raises:
        BackendError: with the output of the process, if it fails.
    """
    command = [sys.executable, "-m", __spec__.name, "--json", "--target", target]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--dtype", dtype, "--head-dim", str(head_dim)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BackendError(f"{target} {dtype} {head_dim} does not compile:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
