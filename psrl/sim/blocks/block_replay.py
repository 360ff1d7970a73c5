"""Which blocks one stage of one rank finds, misses and evicts while its ops run in order."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from psrl.core.plan.schedule import Op
from psrl.core.plan.tables import Blocks
from psrl.core.samples.sample import IntArray

from .block_policies import BlockPolicy, CachedReads


@dataclass(frozen=True)
class Replay:
    """The cache of one stage under a policy; arrays have an entry per op, in the stage's order.

    Attributes:
        live_tokens: [n] allocated while the op runs; above the capacity where the op itself needs
            more.
        evicted_tokens: [n] rows that are not cached while the op runs, but wanted later.
        hit_tokens, miss_tokens: [n] block tokens that the op found cached, or not.
        sent_tokens: [n] copied to the host before the op; a block is copied once, its keys do not
            change.
        missing: blocks that the op did not find.
    """

    live_tokens: IntArray
    evicted_tokens: IntArray
    hit_tokens: IntArray
    miss_tokens: IntArray
    sent_tokens: IntArray
    missing: tuple[tuple[int, ...], ...]


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
    ops: Sequence[Op], blocks: Blocks, reading: dict[int, list[int]], policy: BlockPolicy
) -> Replay:
    """Run one stage's ops over its rank's block table; evicts where the capacity demands it.

    Args:
        ops: in the stage's order.
        reading: see `reading_blocks`.
    """
    size = dict(zip(blocks.block.tolist(), blocks.allocated_tokens.tolist(), strict=True))
    rows = dict(zip(blocks.block.tolist(), blocks.num_tokens.tolist(), strict=True))
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
    next_use = partial(_next_use, _uses(ops, reading))
    capacity_tokens = float("inf") if policy.capacity_tokens is None else policy.capacity_tokens
    live: dict[int, None] = {}  # least recently used first
    on_host: set[int] = set()
    live_tokens = evicted_tokens = 0
    counts = np.zeros((5, len(ops)), np.int64)
    missing: list[tuple[int, ...]] = []
    for position, op in enumerate(ops):
        needed = reading[op.micro_batch]
        absent = tuple(block for block in needed if block not in live)
        new = owned[op.micro_batch] if op.kind == "forward" else []
        missing.append(absent)
        live_tokens += sum(size[block] for block in (*absent, *new))
        evicted_tokens -= sum(rows[block] for block in absent)
        for block in (*needed, *new):
            live.pop(block, None)
            live[block] = None
        sent = 0
        victims = partial(_victims, live, {*needed, *new}, policy, partial(next_use, position))
        for block in victims() if live_tokens > capacity_tokens else ():
            if live_tokens <= capacity_tokens:
                break
            del live[block]
            live_tokens -= size[block]
            if next_use(position, block) < float("inf"):
                evicted_tokens += rows[block]
                if policy.retention == "offload" and block not in on_host:
                    on_host.add(block)
                    sent += size[block]
        lost = sum(size[block] for block in absent)
        hits = sum(size[block] for block in needed) - lost
        counts[:, position] = live_tokens, evicted_tokens, hits, lost, sent
        for block in released[op.kind, op.micro_batch]:
            if block in live:
                del live[block]
                live_tokens -= size[block]
    live_of_op, evicted_of_op, hits_of_op, misses_of_op, sent_of_op = counts
    return Replay(live_of_op, evicted_of_op, hits_of_op, misses_of_op, sent_of_op, tuple(missing))


def _uses(ops: Sequence[Op], reading: dict[int, list[int]]) -> dict[int, list[int]]:
    """Positions of the ops that read each block."""
    uses: dict[int, list[int]] = defaultdict(list)
    for position, op in enumerate(ops):
        for block in reading[op.micro_batch]:
            uses[block].append(position)
    return uses


def _next_use(uses: dict[int, list[int]], position: int, block: int) -> float:
    """Position of the first op from `position` on that reads a block; infinite without one."""
    at = bisect_left(uses[block], position)
    return uses[block][at] if at < len(uses[block]) else float("inf")


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
