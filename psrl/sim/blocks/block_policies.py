"""Other ways to cut cached rows into blocks and to keep them, in place of the plan's own table.

What a micro-batch reads follows from the plan; a policy only changes in what pieces it is cached
and until when.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from psrl.core.errors import ConfigError
from psrl.core.plan.packing import LOCAL, PackedMicroBatch
from psrl.core.plan.plan import Program
from psrl.core.plan.tables import Blocks
from psrl.core.samples.sample import IntArray

BoolArray = npt.NDArray[np.bool_]
Retention = Literal["dynamic", "everything", "lru", "recompute", "offload"]
WITH_CAPACITY: tuple[Retention, ...] = ("lru", "recompute", "offload")


@dataclass(frozen=True)
class BlockPolicy:
    """How rows are cached.

    Attributes:
        block_tokens: size of a fixed block; None for adaptive ones, runs of rows of one lifetime.
        retention: "dynamic" keeps what is read until its last use, "everything" all rows to the
            end. With a capacity: "lru" caches all rows and evicts the least recently used block;
            "recompute" and "offload" cache what is read and evict the block needed last.
        capacity_tokens: of one device; None without a limit.
    """

    block_tokens: int | None = None
    retention: Retention = "dynamic"
    capacity_tokens: int | None = None

    @property
    def caches_all_rows(self) -> bool:
        return self.retention in ("everything", "lru")

    @classmethod
    def parse(cls, blocks: str, cache: str) -> "BlockPolicy":
        """From `adaptive` or `fixed:TOKENS`, and a retention, `:TOKENS` behind it if limited.

        Raises:
            ConfigError: if a text has another form.
        """
        kind, _, size = blocks.partition(":")
        retention, _, capacity = cache.partition(":")
        fixed, limited = kind == "fixed", retention in WITH_CAPACITY
        wrong = kind not in ("adaptive", "fixed") or fixed != _is_positive(size)
        if wrong or bool(size) != fixed:
            raise ConfigError(f"blocks {blocks!r}", "write adaptive or fixed:TOKENS")
        if (
            retention not in get_args(Retention)
            or limited != _is_positive(capacity)
            or bool(capacity) != limited
        ):
            raise ConfigError(
                f"cache {cache!r}",
                "write dynamic, everything, lru:TOKENS, recompute:TOKENS or offload:TOKENS",
            )
        return cls(
            int(size) if fixed else None,
            next(r for r in get_args(Retention) if r == retention),
            int(capacity) if limited else None,
        )


def _is_positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


@dataclass(frozen=True)
class CachedReads:
    """Who reads which rows of one rank.

    Attributes:
        is_read: per micro-batch [T] whether a later micro-batch reads the row.
        last_reader: per micro-batch [T] the reader that runs its forward last; -1 for none.
        reads: per reader (owner, start row, end row), not joined.
    """

    is_read: dict[int, BoolArray]
    last_reader: dict[int, IntArray]
    reads: dict[int, list[tuple[int, int, int]]]

    @classmethod
    def of(cls, program: Program, packed: list[PackedMicroBatch]) -> "CachedReads":
        """From one rank's program and its micro-batches."""
        table = program.blocks
        block_at = {
            block: (owner, start)
            for block, owner, start in zip(
                table.block.tolist(),
                table.micro_batch.tolist(),
                table.start_row.tolist(),
                strict=True,
            )
        }
        reads: dict[int, list[tuple[int, int, int]]] = {p.index: [] for p in packed}
        last_reader = {p.index: np.full(p.total_tokens, -1) for p in packed}
        by_index = {p.index: p for p in packed}
        for op in program.ops():
            if op.kind != "forward":
                continue
            for run in (r for c in by_index[op.micro_batch].chains for r in c.runs):
                if run.source == LOCAL:
                    continue
                owner, first = block_at[run.source]
                reads[op.micro_batch].append((owner, first + run.start, first + run.end))
                last_reader[owner][first + run.start : first + run.end] = op.micro_batch
        is_read = {owner: readers >= 0 for owner, readers in last_reader.items()}
        return cls(is_read, last_reader, reads)


def policy_blocks(
    program: Program, packed: list[PackedMicroBatch], reads: CachedReads, policy: BlockPolicy
) -> Blocks:
    """The block table of one rank under a policy, its capacity left out.

    Args:
        program: one rank's program; its own block table is not used.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    for micro_batch in packed:
        owner = micro_batch.index
        release = reads.last_reader[owner]
        if program.is_update:
            release = np.where(reads.is_read[owner], owner, -1)
        for start, end in _cuts(micro_batch, release, policy):
            if policy.caches_all_rows or (release[start:end] >= 0).any():
                size = policy.block_tokens or end - start
                rows.append((owner, start, end - start, size, _last(program, release[start:end])))
    columns = np.array(rows, np.int64).reshape(-1, 5)
    kept_to_end = policy.caches_all_rows
    release_op = "end" if kept_to_end else "backward" if program.is_update else "forward"
    rank = int(program.micro_batches.rank[0]) if len(program.micro_batches) else 0
    return Blocks(
        rank=np.full(len(rows), rank),
        block=np.arange(len(rows)),
        micro_batch=columns[:, 0],
        start_row=columns[:, 1],
        num_tokens=columns[:, 2],
        allocated_tokens=columns[:, 3],
        release_op=np.full(len(rows), release_op),
        release_micro_batch=np.full(len(rows), -1) if kept_to_end else columns[:, 4],
    )


def _cuts(
    micro_batch: PackedMicroBatch, release: IntArray, policy: BlockPolicy
) -> list[tuple[int, int]]:
    """Rows [start, end) of the pieces that may become blocks; a fixed one stays on one path."""
    if policy.block_tokens is not None:
        size = policy.block_tokens
        return [
            (start, min(start + size, chain.end))
            for chain in micro_batch.chains
            for start in range(chain.start, chain.end, size)
        ]
    if policy.caches_all_rows:
        return [(chain.start, chain.end) for chain in micro_batch.chains]
    edges = np.flatnonzero(np.diff(release)) + 1
    bounds = [0, *edges.tolist(), len(release)]
    return list(pairwise(bounds))


def _last(program: Program, release: IntArray) -> int:
    """The micro-batch whose op releases a block: of several readers, that which runs last."""
    if program.is_update:
        return int(release.max())
    order = {op.micro_batch: i for i, op in enumerate(program.ops())}
    readers = np.unique(release[release >= 0]).tolist()
    return max(readers, key=order.__getitem__, default=-1)
