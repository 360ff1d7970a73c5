"""Forward kernel of tree attention: online softmax over a list of key tiles.

A key row is visible to queries `[query_start, query_end)`; `block_index` lists the tiles that a
block of queries visits, and which of them need no mask. Exponents are base 2.
"""

import triton
import triton.language as tl

from .tiles import any_length, dot, load_tile, store_tile


@triton.jit
def _attend(
    out,
    total,
    peak,
    q,
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
    """Online softmax over visits `[begin, end)`."""
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
        zero = tl.zeros((q.shape[0], BLOCK_K), tl.float32)
        scores = dot(q, tl.trans(k), zero) * scale_log2
        if MASKED:
            visible = (query[:, None] >= start[None, :]) & (query[:, None] < stop[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = new_peak
        if MASKED:  # A query that has seen no key yet: -inf minus -inf would be NaN.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.math.exp2(scores - shift[:, None])
        decay = tl.math.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        v = load_tile(
            v_source, row, v_column, v_stride, live, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED, USE_TMA
        )
        out = dot(weights.to(v.dtype), v, out * decay[:, None])
        peak = new_peak
    return out, total, peak


@any_length
def forward_kernel(
    q_source,
    k_source,
    v_source,
    k_cache,
    v_cache,
    out_target,
    lse_target,
    query_start,
    query_end,
    offsets,
    visit_row,
    visit_slot,
    order,
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
    """Outputs [T, H, D] and base-2 log-sum-exp [H, T] of one block of queries of one head."""
    block = tl.load(order + tl.program_id(0))
    head = tl.program_id(1)
    group = head // repeats
    query = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    live = query < num_queries
    q = load_tile(
        q_source,
        block * BLOCK_Q,
        head * q_head,
        q_stride,
        live,
        BLOCK_Q,
        HEAD_DIM,
        BLOCK_D,
        True,
        USE_TMA,
    )
    out = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    for part in tl.static_range(0 if HAS_CACHE else 2, 4):
        begin = tl.load(offsets + block * 5 + part)
        end = tl.load(offsets + block * 5 + part + 1)
        out, total, peak = _attend(
            out,
            total,
            peak,
            q,
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
    total = tl.where(live, total, 1.0)
    out = out / total[:, None]
    store_tile(out_target, out, block * BLOCK_Q, head * HEAD_DIM, out_stride, live, HEAD_DIM, False)
    tl.store(lse_target + head * num_queries + query, peak + tl.math.log2(total), mask=live)
