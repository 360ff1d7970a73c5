"""The section `blocks` of a simulation's metrics."""

from typing import Any

import numpy as np

from psrl.core.samples.sample import FloatArray

from .block_policies import BlockPolicy


def blocks_section(
    policy: BlockPolicy, totals: dict[str, int], peak_bytes: int, busy_s: FloatArray
) -> dict[str, Any]:
    """What a block policy costs; docs/metrics.md has the formulas.

    Args:
        totals: tokens, blocks and reads of all programs and ranks, by name.
        peak_bytes: most K/V bytes that a device caches at a time.
        busy_s: [3, R, P] recomputation, transfers and look-ups of every device.
    """
    used, offloads = totals["hit_tokens"] + totals["miss_tokens"], policy.retention == "offload"
    rank, stage = np.unravel_index(np.argmax(busy_s.sum(axis=0)), busy_s.shape[1:])
    recompute_s, transfer_s, access_s = busy_s[:, rank, stage].tolist()
    return {
        "block_tokens": policy.block_tokens,
        "retention": policy.retention,
        "capacity_tokens": policy.capacity_tokens,
        "peak_cached_bytes": peak_bytes,
        "num_blocks": totals["num_blocks"],
        "num_block_reads": totals["num_block_reads"],
        "metadata_bytes": totals["metadata_bytes"],
        "internal_fragmentation": _one_minus(totals["cached_tokens"], totals["allocated_tokens"]),
        "unread_fraction": _one_minus(totals["read_tokens"], totals["cached_tokens"]),
        "hit_rate_lost": totals["lost_tokens"] / max(1, totals["logical_tokens"]),
        "cache_hit_rate": totals["hit_tokens"] / used if used else 1.0,
        "recomputed_tokens": 0 if offloads else totals["miss_tokens"],
        "offloaded_tokens": totals["sent_tokens"],
        "fetched_tokens": totals["miss_tokens"] if offloads else 0,
        "recompute_s": recompute_s,
        "transfer_s": transfer_s,
        "access_s": access_s,
        "extra_s": recompute_s + transfer_s + access_s,
    }


def _one_minus(part: int, whole: int) -> float:
    return 1.0 - part / whole if whole else 0.0
