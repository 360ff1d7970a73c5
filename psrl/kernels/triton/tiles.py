"""Tiles of rows in device code: load, store, multiply.

Rows are read through pointers, or (USE_TMA) through host-made tensor descriptors over [rows,
columns], which copy whole tiles asynchronously on Hopper. A descriptor also reads rows that no
query sees: they must hold finite numbers, since 0 * NaN is NaN.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# One binary for any number of tokens, divisible by 16 or not, and for any ratio of heads.
any_length = triton.jit(do_not_specialize=["num_queries", "repeats"])


@triton.jit
def dot(a, b, acc):
    """acc + a b, float32 products exact."""
    if INTERPRETED:  # It keeps bfloat16 as integers, and would multiply those.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_tile(
    source,
    row,
    column,
    row_stride,
    live,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """[ROWS, BLOCK_D] from row `row` and column `column` on; zero beyond HEAD_DIM.

    MASKED reads zero for rows that are not `live` (descriptors: for rows outside the tensor).
    """
    if USE_TMA:
        return source.load([row, column])
    else:
        dims = tl.arange(0, BLOCK_D)
        rows = row.to(tl.int64) + tl.arange(0, ROWS)
        address = source + column + rows[:, None] * row_stride + dims[None, :]
        if MASKED and HEAD_DIM < BLOCK_D:
            return tl.load(address, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            return tl.load(address, mask=live[:, None], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            return tl.load(address, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(address)


@triton.jit
def store_tile(
    target,
    tile,
    row,
    column,
    row_stride,
    live,
    HEAD_DIM: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write, or add to, the live rows of [ROWS, HEAD_DIM]."""
    dims = tl.arange(0, tile.shape[1])
    rows = row.to(tl.int64) + tl.arange(0, tile.shape[0])
    address = target + column + rows[:, None] * row_stride + dims[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    if ADD:
        tile += tl.load(address, mask=mask, other=0.0)
    tl.store(address, tile.to(target.dtype.element_ty), mask=mask)
