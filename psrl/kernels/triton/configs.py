"""Tile shapes of the Triton kernels: a table, so that a launch never measures or guesses.

The entries compile without register spills and within shared memory (`tests/kernels` compiles
them all, `benchmarks/gpu_check.py` measures others). Keys are the padded head dimension; smaller
ones use the smallest entry.
"""

from dataclasses import dataclass

import torch

from psrl.core.errors import BackendError

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Tiles:
    """Shape of one kernel's tiles.

    Attributes:
        block_q, block_k: queries and keys of a tile.
        num_warps, num_stages: warps of a program, depth of its software pipeline.
        split: a loop without masks for the tiles that need none (dK/dV only; the other kernels
            always have it).
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    split: bool = False


@dataclass(frozen=True)
class KernelTiles:
    """Tiles of the three kernels."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles


def _same(tiles: Tiles) -> KernelTiles:
    return KernelTiles(tiles, tiles, tiles)


HOPPER = {
    64: KernelTiles(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
    128: KernelTiles(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
    256: KernelTiles(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
}
"""16-bit floats through tensor descriptors: compute capability 9.x, up to 227 KiB shared memory."""

POINTER = {
    64: KernelTiles(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2)),
    128: KernelTiles(Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    256: KernelTiles(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2)),
}
"""16-bit floats through pointers: compute capability 8.0 and newer, up to 99 KiB."""

POINTER_FLOAT32 = {
    64: _same(Tiles(32, 32, 4, 2)),
    128: KernelTiles(Tiles(32, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2)),
    256: _same(Tiles(16, 16, 4, 2)),
}
"""float32 without tensor cores, for comparisons: exact products, not fast."""

INTERPRETER = _same(Tiles(32, 16, 1, 1))
"""Small tiles for Triton's interpreter, whose time goes per tile and not per element."""


def padded_head_dim(head_dim: int) -> int:
    """Power of two >= 16 that a tile spans.

    Raises:
        BackendError: above MAX_HEAD_DIM.
    """
    if head_dim > MAX_HEAD_DIM:
        raise BackendError(
            f"head dimension {head_dim} is above {MAX_HEAD_DIM}, the largest with Triton tiles",
            'use implementation="reference"',
        )
    return max(16, 1 << (head_dim - 1).bit_length())


def can_use_tma(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """Whether tensor descriptors serve: Hopper, 16-bit floats, a head dimension that is a tile's.

    Descriptors copy whole columns, so a padded head would read its neighbour.
    """
    return capability[0] == 9 and dtype.itemsize == 2 and padded_head_dim(head_dim) == head_dim


def kernel_tiles(dtype: torch.dtype, head_dim: int, use_tma: bool) -> KernelTiles:
    """Tiles for 16-bit floats or float32.

    Raises:
        BackendError: for other dtypes.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise BackendError(
            f"Triton tree attention takes bfloat16, float16 or float32, got {dtype}",
            'use implementation="reference" for float64',
        )
    table = HOPPER if use_tma else POINTER if dtype.itemsize == 2 else POINTER_FLOAT32
    return table[max(64, padded_head_dim(head_dim))]
