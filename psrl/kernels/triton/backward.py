"""Backward kernels of tree attention: dQ over lists of key tiles, dK/dV over ranges of queries.

The rule and the lists are the forward's. Every row of a gradient has one owner program: nothing
depends on the order in which programs run, so equal inputs give equal bits.
"""

import triton
import triton.language as tl

from .tiles import INTERPRETED, any_length, dot, load_tile, store_tile


@triton.jit
def _query_gradient(
    dq,
    q,
    dout,
    lse,
    delta,
    k_source,
    v_source,
    k_column,
    v_column,
    k_stride,
    v_stride,
    query,
    query_start,
    query_end,
    visit_row,
    visit_slot,
    begin,
    end,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Sum of dS K over visits `[begin, end)`."""
    for visit in range(begin, end):
        row = tl.load(visit_row + visit)
        start = row
        stop = row
        if MASKED:
            slot = tl.load(visit_slot + visit) + tl.arange(0, BLOCK_K)
            start = tl.load(query_start + slot)
            stop = tl.load(query_end + slot)
        live = stop > start
        k = load_tile(
            k_source, row, k_column, k_stride, live, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED, USE_TMA
        )
        v = load_tile(
            v_source, row, v_column, v_stride, live, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED, USE_TMA
        )
        zero = tl.zeros((q.shape[0], BLOCK_K), tl.float32)
        weights = tl.math.exp2(dot(q, tl.trans(k), zero) * scale_log2 - lse[:, None])
        if MASKED:
            visible = (query[:, None] >= start[None, :]) & (query[:, None] < stop[None, :])
            weights = tl.where(visible, weights, 0.0)
        dscores = weights * (dot(dout, tl.trans(v), zero) - delta[:, None])
        dq = dot(dscores.to(k.dtype), k, dq)
    return dq


@any_length
def dq_kernel(
    q_source,
    k_source,
    v_source,
    k_cache,
    v_cache,
    dout_source,
    out_source,
    dq_target,
    lse_source,
    delta_target,
    query_start,
    query_end,
    offsets,
    visit_row,
    visit_slot,
    order,
    scale,
    scale_log2,
    num_queries,
    repeats,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    cache_stride,
    cache_head,
    out_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """dQ [T, H, D] of one block of queries of one head, and delta = sum(out * dout) [H, T]."""
    block = tl.load(order + tl.program_id(0))
    head = tl.program_id(1)
    group = head // repeats
    first = block * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    live = query < num_queries
    column = head * HEAD_DIM
    dout = load_tile(
        dout_source, first, column, out_stride, live, BLOCK_Q, HEAD_DIM, BLOCK_D, True, USE_TMA
    )
    out = load_tile(
        out_source, first, column, out_stride, live, BLOCK_Q, HEAD_DIM, BLOCK_D, True, False
    )
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_target + head * num_queries + query, delta, mask=live)
    q = load_tile(
        q_source, first, head * q_head, q_stride, live, BLOCK_Q, HEAD_DIM, BLOCK_D, True, USE_TMA
    )
    lse = tl.load(lse_source + head * num_queries + query, mask=live, other=float("inf"))
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for part in tl.static_range(0 if HAS_CACHE else 2, 4):
        begin = tl.load(offsets + block * 5 + part)
        end = tl.load(offsets + block * 5 + part + 1)
        dq = _query_gradient(
            dq,
            q,
            dout,
            lse,
            delta,
            k_cache if part < 2 else k_source,
            v_cache if part < 2 else v_source,
            group * (cache_head if part < 2 else k_head),
            group * (cache_head if part < 2 else v_head),
            cache_stride if part < 2 else k_stride,
            cache_stride if part < 2 else v_stride,
            query,
            query_start,
            query_end,
            visit_row,
            visit_slot,
            begin,
            end,
            scale_log2,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_K,
            part % 2 == 1,
            USE_TMA,
        )
    store_tile(dq_target, dq * scale, first, column, out_stride, live, HEAD_DIM, False)


@triton.jit
def _key_gradients(
    dk,
    dv,
    k,
    v,
    q_source,
    dout_source,
    lse_source,
    delta_source,
    start,
    stop,
    first_head,
    begin,
    gap_begin,
    gap_end,
    num_blocks,
    repeats,
    num_queries,
    q_stride,
    q_head,
    out_stride,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Sum over the heads of a group and `num_blocks` blocks from `begin` on, less the gap."""
    for step in range(0, repeats * num_blocks):
        head = first_head + step // num_blocks
        block = begin + step % num_blocks
        block += tl.where(block >= gap_begin, gap_end - gap_begin, 0)
        first = block * BLOCK_Q
        query = first + tl.arange(0, BLOCK_Q)
        live = query < num_queries
        q = load_tile(
            q_source,
            first,
            head * q_head,
            q_stride,
            live,
            BLOCK_Q,
            HEAD_DIM,
            BLOCK_D,
            True,
            USE_TMA,
        )
        dout = load_tile(
            dout_source,
            first,
            head * HEAD_DIM,
            out_stride,
            live,
            BLOCK_Q,
            HEAD_DIM,
            BLOCK_D,
            True,
            USE_TMA,
        )
        lse = tl.load(lse_source + head * num_queries + query, mask=live, other=float("inf"))
        delta = tl.load(delta_source + head * num_queries + query, mask=live, other=0.0)
        zero = tl.zeros((k.shape[0], BLOCK_Q), tl.float32)
        weights = tl.math.exp2(dot(k, tl.trans(q), zero) * scale_log2 - lse[None, :])
        if MASKED:
            visible = (query[None, :] >= start[:, None]) & (query[None, :] < stop[:, None])
            weights = tl.where(visible, weights, 0.0)
        dv = dot(weights.to(dout.dtype), dout, dv)
        dscores = weights * (dot(v, tl.trans(dout), zero) - delta[None, :])
        dk = dot(dscores.to(q.dtype), q, dk)
    return dk, dv


@any_length
def dkv_kernel(
    q_source,
    k_source,
    v_source,
    dout_source,
    dk_target,
    dv_target,
    lse_source,
    delta_source,
    query_start,
    query_end,
    ranges,
    tile_row,
    order,
    scale,
    scale_log2,
    num_queries,
    repeats,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    out_stride,
    target_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """dK and dV of one tile of keys of one group, written or (ADD) added to their rows.

    SPLIT runs the mask-free blocks in a loop of their own; else every block is masked.
    """
    tile = tl.load(order + tl.program_id(0))
    group = tl.program_id(1)
    row = tl.load(tile_row + tile)
    slot = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    start = tl.load(query_start + slot)
    stop = tl.load(query_end + slot)
    live = stop > start
    k = load_tile(
        k_source, row, group * k_head, k_stride, live, BLOCK_K, HEAD_DIM, BLOCK_D, True, USE_TMA
    )
    v = load_tile(
        v_source, row, group * v_head, v_stride, live, BLOCK_K, HEAD_DIM, BLOCK_D, True, USE_TMA
    )
    begin = tl.load(ranges + tile * 4)
    free_begin = tl.load(ranges + tile * 4 + 1)
    free_end = tl.load(ranges + tile * 4 + 2)
    end = tl.load(ranges + tile * 4 + 3)
    column = group * HEAD_DIM
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for masked in tl.static_range(0 if SPLIT else 1, 2):
        gap_begin = free_begin if SPLIT and masked else end
        gap_end = free_end if SPLIT and masked else end
        dk, dv = _key_gradients(
            dk,
            dv,
            k,
            v,
            q_source,
            dout_source,
            lse_source,
            delta_source,
            start,
            stop,
            group * repeats,
            begin if masked else free_begin,
            gap_begin,
            gap_end,
            (end - begin) - (gap_end - gap_begin) if masked else free_end - free_begin,
            repeats,
            num_queries,
            q_stride,
            q_head,
            out_stride,
            scale_log2,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_Q,
            masked == 1,
            USE_TMA,
        )
    dk *= scale
    if USE_TMA and ADD and not INTERPRETED:
        # One program owns the rows: a copy that adds, no race. A load would take registers.
        dk_target.atomic_add([row, column], dk)
        dv_target.atomic_add([row, column], dv)
    elif USE_TMA:
        if ADD:
            dk += dk_target.load([row, column])
            dv += dv_target.load([row, column])
        dk_target.store([row, column], dk.to(dk_target.dtype))
        dv_target.store([row, column], dv.to(dv_target.dtype))
    else:
        # Loaded again: so that it takes no registers in the loop.
        live = tl.load(query_end + slot) > tl.load(query_start + slot)
        store_tile(dk_target, dk, row, column, target_stride, live, HEAD_DIM, ADD)
        store_tile(dv_target, dv, row, column, target_stride, live, HEAD_DIM, ADD)
