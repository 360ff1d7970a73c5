"""What a block policy costs: padding, metadata, misses, recomputed and transferred tokens."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from psrl.core.calibrated_cost_model import choose_cost_model
from psrl.core.cost_model import CostModel, MemoryModel
from psrl.core.packing import PackedMicroBatch, pack_rank
from psrl.core.plan import Blocks, Plan, Program
from psrl.core.prefix_tree import build_prefix_tree
from psrl.core.sample import SampleBatch

from .block_policies import BlockPolicy, CachedReads, policy_blocks

PCIE_BYTES_PER_S = 50e9
"""One direction of PCIe 5.0 x16 as copies reach it; transfers are counted as not overlapped."""


@dataclass(frozen=True)
class Replay:
    """One rank's cache under a policy.

    Attributes:
        peak_tokens: most allocated tokens at a time; above the capacity where one op needs more.
        hit_tokens, miss_tokens: block tokens that ops found cached, or not.
        sent_tokens: written to the host; a block is written once, its keys do not change.
        miss_of_op: (position in the op list, missing blocks).
    """

    peak_tokens: int
    hit_tokens: int
    miss_tokens: int
    sent_tokens: int
    miss_of_op: tuple[tuple[int, tuple[int, ...]], ...]


def reading_blocks(blocks: Blocks, reads: CachedReads) -> dict[int, list[int]]:
    """Blocks that each micro-batch reads."""
    starts: dict[int, list[int]] = defaultdict(list)
    numbers: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, int] = {}
    for block, owner, start, count in zip(
        blocks.block.tolist(),
        blocks.micro_batch.tolist(),
        blocks.start_row.tolist(),
        blocks.num_tokens.tolist(),
        strict=True,
    ):
        starts[owner].append(start)
        numbers[owner].append(block)
        ends[block] = start + count
    found = {}
    for reader, runs in reads.reads.items():
        mine: set[int] = set()
        for owner, start, end in runs:
            first = max(0, bisect_left(starts[owner], start + 1) - 1)
            last = bisect_left(starts[owner], end)
            mine.update(b for b in numbers[owner][first:last] if ends[b] > start)
        found[reader] = sorted(mine)
    return found


def replay_blocks(
    program: Program, blocks: Blocks, reading: dict[int, list[int]], policy: BlockPolicy
) -> Replay:
    """Run one rank's ops over a block table; evicts where the capacity demands it.

    Args:
        program: one rank's program; `blocks` stands for its own table.
        reading: see `reading_blocks`.
    """
    ops = program.ops()
    size = dict(zip(blocks.block.tolist(), blocks.allocated_tokens.tolist(), strict=True))
    owned: dict[int, list[int]] = defaultdict(list)
    released: dict[tuple[str, int], list[int]] = defaultdict(list)
    for block, owner, kind, reader in zip(
        blocks.block.tolist(),
        blocks.micro_batch.tolist(),
        blocks.release_op.tolist(),
        blocks.release_micro_batch.tolist(),
        strict=True,
    ):
        owned[owner].append(block)
        released[kind, reader].append(block)
    uses: dict[int, list[int]] = defaultdict(list)
    for position, op in enumerate(ops):
        for block in reading[op.micro_batch]:
            uses[block].append(position)

    def next_use(position: int, block: int) -> float:
        at = bisect_left(uses[block], position)
        return uses[block][at] if at < len(uses[block]) else float("inf")

    live: dict[int, None] = {}  # least recently used first
    tokens = peak = hits = misses = sent = 0
    on_host: set[int] = set()
    missing: list[tuple[int, tuple[int, ...]]] = []
    for position, op in enumerate(ops):
        needed = reading[op.micro_batch]
        absent = tuple(b for b in needed if b not in live)
        hits += sum(size[b] for b in needed if b in live)
        misses += sum(size[b] for b in absent)
        if absent:
            missing.append((position, absent))
        new = owned[op.micro_batch] if op.kind == "forward" else []
        pinned = {*needed, *new}
        tokens += sum(size[b] for b in (*absent, *new))
        for block in (*needed, *new):
            live.pop(block, None)
            live[block] = None
        if policy.capacity_tokens is not None and tokens > policy.capacity_tokens:
            for block in _victims(live, pinned, policy, partial(next_use, position)):
                if tokens <= policy.capacity_tokens:
                    break
                del live[block]
                tokens -= size[block]
                is_wanted = next_use(position, block) < float("inf")
                if policy.retention == "offload" and is_wanted and block not in on_host:
                    on_host.add(block)
                    sent += size[block]
        peak = max(peak, tokens)
        for block in released[op.kind, op.micro_batch]:
            if block in live:
                del live[block]
                tokens -= size[block]
    return Replay(peak, hits, misses, sent, tuple(missing))


def _victims(
    live: dict[int, None],
    pinned: set[int],
    policy: BlockPolicy,
    next_use: Callable[[int], float],
) -> Iterable[int]:
    """Blocks that the running op does not use, in the order in which they are evicted."""
    loose = [block for block in live if block not in pinned]
    if policy.retention == "lru":
        return loose
    return sorted(loose, key=lambda block: (-next_use(block), block))


def apply_block_policy(
    plan: Plan,
    batch: SampleBatch,
    policy: BlockPolicy,
    cost_model: CostModel | None = None,
    pcie_bytes_per_s: float = PCIE_BYTES_PER_S,
) -> tuple[Plan, dict[str, Any]]:
    """The plan with the policy's block tables, and the section `blocks` of the metrics.

    Evictions are not in the table: their costs are in the section, as `extra_s`. The replay runs
    the last stage's op order.
    """
    costs = cost_model or choose_cost_model(
        plan.model, plan.cluster, plan.parallel, plan.calibration
    )
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    totals: dict[str, float] = defaultdict(float)
    extra_s = np.zeros(plan.num_ranks)
    peak_tokens, programs = 0, []
    for program in plan.programs:
        tree, parts = program.tree(batch), []
        _add_lost_hits(totals, program, batch, policy)
        for rank in range(plan.num_ranks):
            mine = program.on_rank(rank)
            packed = pack_rank(mine, tree)
            reads = CachedReads.of(mine, packed)
            blocks = policy_blocks(mine, packed, reads, policy)
            reading = reading_blocks(blocks, reads)
            replay = replay_blocks(mine, blocks, reading, policy)
            parts.append(replace(blocks, rank=np.full(len(blocks), rank)))
            peak_tokens = max(peak_tokens, replay.peak_tokens)
            totals["allocated_tokens"] += int(blocks.allocated_tokens.sum())
            totals["cached_tokens"] += int(blocks.num_tokens.sum())
            totals["read_tokens"] += sum(int(r.sum()) for r in reads.is_read.values())
            totals["num_blocks"] += len(blocks)
            totals["num_block_reads"] += sum(len(found) for found in reading.values())
            totals["hit_tokens"] += replay.hit_tokens
            totals["miss_tokens"] += replay.miss_tokens
            totals["sent_tokens"] += replay.sent_tokens
            if policy.retention == "offload":
                moved = (replay.miss_tokens + replay.sent_tokens) * memory.kv_bytes_per_token
                seconds = moved / pcie_bytes_per_s
            else:
                seconds = _recompute_s(blocks, packed, replay, costs)
            extra_s[rank] += seconds * len(program.phases)
        programs.append(replace(program, blocks=Blocks.concatenate(parts)))
    return replace(plan, programs=tuple(programs)), _section(
        policy, totals, peak_tokens * memory.kv_bytes_per_token, float(extra_s.max(initial=0.0))
    )


def _add_lost_hits(
    totals: dict[str, float], program: Program, batch: SampleBatch, policy: BlockPolicy
) -> None:
    samples, key = batch.select(program.assignments.sample), program.assignments.share_key
    whole = build_prefix_tree(samples, key, policy.block_tokens or 1)
    totals["logical_tokens"] += whole.logical_tokens
    totals["lost_tokens"] += whole.unique_tokens - build_prefix_tree(samples, key).unique_tokens


def _recompute_s(
    blocks: Blocks, packed: list[PackedMicroBatch], replay: Replay, costs: CostModel
) -> float:
    """Forward time of the missing rows of each op, on the slowest stage."""
    positions = {p.index: p.position_ids for p in packed}
    rows = {
        block: (count, int((positions[owner][start : start + count] + 1).sum()))
        for block, owner, start, count in zip(
            blocks.block.tolist(),
            blocks.micro_batch.tolist(),
            blocks.start_row.tolist(),
            blocks.num_tokens.tolist(),
            strict=True,
        )
    }
    total_s = 0.0
    for _, missing in replay.miss_of_op:
        tokens = float(sum(rows[block][0] for block in missing))
        pairs = float(sum(rows[block][1] for block in missing))
        total_s += float(np.asarray(costs.forward_s(tokens, pairs, 0.0)))
    return total_s


def _section(
    policy: BlockPolicy, totals: dict[str, float], peak_bytes: int, extra_s: float
) -> dict[str, Any]:
    allocated, used = totals["allocated_tokens"], totals["hit_tokens"] + totals["miss_tokens"]
    offloads = policy.retention == "offload"
    return {
        "block_tokens": policy.block_tokens,
        "retention": policy.retention,
        "capacity_tokens": policy.capacity_tokens,
        "peak_cached_bytes": peak_bytes,
        "num_blocks": int(totals["num_blocks"]),
        "num_block_reads": int(totals["num_block_reads"]),
        "internal_fragmentation": 1.0 - totals["cached_tokens"] / allocated if allocated else 0.0,
        "unread_fraction": 1.0 - totals["read_tokens"] / totals["cached_tokens"]
        if totals["cached_tokens"]
        else 0.0,
        "hit_rate_lost": totals["lost_tokens"] / totals["logical_tokens"]
        if totals["logical_tokens"]
        else 0.0,
        "cache_hit_rate": totals["hit_tokens"] / used if used else 1.0,
        "recomputed_tokens": 0 if offloads else int(totals["miss_tokens"]),
        "offloaded_tokens": int(totals["sent_tokens"]),
        "fetched_tokens": int(totals["miss_tokens"]) if offloads else 0,
        "extra_s": extra_s,
    }
