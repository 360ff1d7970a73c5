"""The visibility rule, literally: key slot s is visible to query i iff
`query_start[s] <= i < query_end[s]`.

It holds because tokens are packed in depth-first order: the queries below a token are one run.
Cached prefixes follow the same rule as local tokens, with `query_start` at their first reader.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from psrl.core.errors import PlanError
from psrl.core.plan.packing import LOCAL, KeyRun, PackedMicroBatch
from psrl.core.samples.sample import IntArray


@dataclass(frozen=True)
class Visibility:
    """S key slots of a micro-batch of T queries: the cached rows that it reads, then its own rows.

    Attributes:
        runs: cached rows in slot order; the last T slots are the micro-batch's own rows.
        query_start, query_end: [S] queries that see each slot.
    """

    runs: tuple[KeyRun, ...]
    query_start: IntArray
    query_end: IntArray

    def mask(self, num_queries: int) -> npt.NDArray[np.bool_]:
        """[T, S] whether a query sees a slot."""
        query = np.arange(num_queries)[:, None]
        return (self.query_start <= query) & (query < self.query_end)


def visibility(packed: PackedMicroBatch) -> Visibility:
    """Key slots of a micro-batch and the queries that see them; unread cached rows get no slot.

    Raises:
        PlanError: if the queries that see a key are not one run: no depth-first order.
    """
    readers = {LOCAL: _Readers(packed.total_tokens)}
    for chain in packed.chains:
        own = np.arange(chain.start, chain.end)
        readers[LOCAL].add(chain.start, chain.end, own, chain.end)
        for run in chain.runs:
            source = readers.setdefault(run.source, _Readers())
            source.add(run.start, run.end, chain.start, chain.end)
    local = readers.pop(LOCAL)
    runs: list[KeyRun] = []
    starts, ends = [], []
    for block in sorted(readers):
        seen = np.flatnonzero(readers[block].num_queries)
        first_of_run = np.flatnonzero(np.diff(seen, prepend=-2) > 1)
        for rows in np.split(seen, first_of_run[1:]):
            runs.append(KeyRun(block, int(rows[0]), int(rows[-1]) + 1))
        starts.append(readers[block].query_start[seen])
        ends.append(readers[block].query_end[seen])
        readers[block].check(f"block {block}", packed.index)
    local.check("the micro-batch", packed.index)
    return Visibility(
        tuple(runs),
        np.concatenate([*starts, local.query_start]),
        np.concatenate([*ends, local.query_end]),
    )


class _Readers:
    """First, last and number of queries that see each row of one source of keys."""

    def __init__(self, num_rows: int = 0) -> None:
        self.query_start = np.zeros(num_rows, np.int64)
        self.query_end = np.zeros(num_rows, np.int64)
        self.num_queries = np.zeros(num_rows, np.int64)

    def add(self, start: int, end: int, query_start: int | IntArray, query_end: int) -> None:
        """Queries `[query_start, query_end)` see rows `[start, end)`; chains come in order."""
        missing = end - len(self.num_queries)
        if missing > 0:
            for name in ("query_start", "query_end", "num_queries"):
                setattr(self, name, np.pad(getattr(self, name), (0, missing)))
        rows = slice(start, end)
        unseen = self.num_queries[rows] == 0
        self.query_start[rows] = np.where(unseen, query_start, self.query_start[rows])
        self.query_end[rows] = query_end
        self.num_queries[rows] += query_end - query_start

    def check(self, name: str, micro_batch: int) -> None:
        broken = np.flatnonzero(self.query_end - self.query_start != self.num_queries)
        if len(broken):
            row = int(broken[0])
            raise PlanError(
                f"micro-batch {micro_batch}: row {row} of {name} is seen by "
                f"{self.num_queries[row]} queries between {self.query_start[row]} and "
                f"{self.query_end[row]}, not by one run of them",
                "pack tokens in depth-first pre-order",
            )
