"""Token-wise cuts of one rank's depth-first order, in units.

Equal contiguous cuts chain every micro-batch to the next and so hold all activations to the end.
A *unit* is a run of whole sibling subtrees of limited cost; it is cut evenly, and what is bigger
gives its head (the shared part) to a unit before. Small units hold less, large ones waste less
time.
"""

from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrl.core.samples.sample import FloatArray, IntArray
from psrl.planner.placement.placement import RankSegments

from .rank_tree import RankTree

SNAP = 0.01
"""A cut moves to the end of a node if that is within this share of a micro-batch's cost."""

# Parts of a unit beyond the wanted number, and as its multiple, that are tried until equal costs
# respect the token budget: the first tokens of long samples are cheap, so their part is large.
_EXTRA_PARTS = (
    (0, 1.0),
    (1, 1.0),
    (2, 1.0),
    (4, 1.1),
    (6, 1.25),
    (8, 1.5),
    (10, 2.0),
    (12, 3.0),
    (16, 4.0),
)


def unit_starts(rank_tree: RankTree, unit_s: float, micro_batch_s: float) -> list[int]:
    """Places at which units begin, ascending, the first 0.

    Args:
        unit_s: most that a run of whole siblings may cost.
        micro_batch_s: what a micro-batch should cost; no unit is closed below half of it.
    """
    if rank_tree.total_s <= unit_s:
        return [0]
    cost = rank_tree.cost_list_s
    end, parents = rank_tree.end.tolist(), rank_tree.parent.tolist()
    starts = [0]
    place, siblings_of = 0, -1

    def close_before(at: int) -> None:
        if at > starts[-1] and cost[at] - cost[starts[-1]] >= micro_batch_s / 2:
            starts.append(at)

    while place < len(end):
        subtree_s = cost[end[place]] - cost[place]
        if subtree_s <= unit_s:
            overfull = cost[end[place]] - cost[starts[-1]] > unit_s
            if overfull or parents[place] != siblings_of:
                close_before(place)
            siblings_of = parents[place]
            place = end[place]
        else:
            close_before(place)
            siblings_of = place
            place += 1
            if place < len(end):
                close_before(place)
    return starts


def cut_units(
    rank_tree: RankTree,
    starts: list[int],
    micro_batch_s: float,
    max_tokens: int,
    snap: float = SNAP,
) -> IntArray:
    """Token bounds of the micro-batches: each unit in even parts of about the given cost.

    Returns: [M + 1] ascending bounds in the rank's token order, the first 0.
    """
    units = _units(rank_tree, starts)
    fewest = -(-units.num_tokens // max_tokens)
    wanted = np.rint(units.cost_s / micro_batch_s) if micro_batch_s else np.ones(len(starts))
    num_parts = np.maximum(fewest, wanted.astype(np.int64))
    bounds = [np.zeros(1, np.int64)]
    for more, factor in _EXTRA_PARTS:
        parts = np.maximum(num_parts + more, (num_parts * factor).astype(np.int64))
        ends, sizes, first = _even_parts(rank_tree, units, parts, snap)
        good = np.maximum.reduceat(sizes, first) <= max_tokens
        bounds.append(ends[np.repeat(good, parts)])
        units, num_parts = units.only(~good), num_parts[~good]
        if not len(num_parts):
            break
    else:
        # Equal costs cannot respect the budget: equal tokens do.
        bounds.append(_equal_tokens(units, num_parts))
    return np.unique(np.concatenate(bounds))


def cut_exactly(
    rank_tree: RankTree, num_units: int, count: int, max_tokens: int, snap: float = SNAP
) -> IntArray | None:
    """Bounds of a given number of micro-batches, in even parts of units; None if one is too large.

    Of fewer tokens than that, every one has a micro-batch.

    Args:
        num_units: a unit costs at most this share of the rank.
    """
    if rank_tree.total_tokens <= count:
        return np.arange(rank_tree.total_tokens + 1)
    micro_batch_s = rank_tree.total_s / count
    unit_s = max(rank_tree.total_s / num_units, micro_batch_s) * (1.0 + 1e-9)
    starts = unit_starts(rank_tree, unit_s, micro_batch_s)
    units = _units(rank_tree, starts if len(starts) <= count else starts[:1])
    parts = _parts_of_units(units.cost_s, units.num_tokens, count)
    bounds = [np.zeros(1, np.int64)]
    for snapped in (snap, 0.0):
        ends, sizes, first = _even_parts(rank_tree, units, parts, snapped)
        good = np.minimum.reduceat(sizes, first) > 0
        bounds.append(ends[np.repeat(good, parts)])
        units, parts = units.only(~good), parts[~good]
        if not len(parts):
            break
    else:
        bounds.append(_equal_tokens(units, parts))
    found = np.sort(np.concatenate(bounds))
    return found if int(np.diff(found).max()) <= max_tokens else None


def segments_of(rank_tree: RankTree, bounds: IntArray) -> RankSegments:
    """Segments of contiguous micro-batches with the given token bounds."""
    edges = np.unique(np.concatenate([rank_tree.tokens_before, bounds]))
    start = edges[:-1]
    place = np.searchsorted(rank_tree.tokens_before, start, side="right") - 1
    return RankSegments(
        micro_batch=np.searchsorted(bounds, start, side="right") - 1,
        node=rank_tree.node[place],
        start_depth=rank_tree.start_depth[place] + start - rank_tree.tokens_before[place],
        num_tokens=np.diff(edges),
    )


class _Units(NamedTuple):
    """U contiguous runs of a rank's order: tokens `[begin, stop)`, costs `[low_s, high_s)`."""

    begin: IntArray
    stop: IntArray
    low_s: FloatArray
    high_s: FloatArray

    @property
    def num_tokens(self) -> IntArray:
        return self.stop - self.begin

    @property
    def cost_s(self) -> FloatArray:
        return self.high_s - self.low_s

    def only(self, chosen: npt.NDArray[np.bool_]) -> "_Units":
        return _Units(
            self.begin[chosen], self.stop[chosen], self.low_s[chosen], self.high_s[chosen]
        )


def _units(rank_tree: RankTree, starts: list[int]) -> _Units:
    edges = np.array([*starts, len(rank_tree.node)])
    tokens, cost_s = rank_tree.tokens_before[edges], rank_tree.cost_before_s[edges]
    return _Units(tokens[:-1], tokens[1:], cost_s[:-1], cost_s[1:])


class _Parts(NamedTuple):
    """Parts of all units in order: their ends and sizes, and where those of each unit begin."""

    end: IntArray
    num_tokens: IntArray
    first: IntArray


def _numbered(parts: IntArray) -> tuple[IntArray, IntArray]:
    """The unit of each part of all units, and the part's number in its unit, from 1."""
    unit = np.repeat(np.arange(len(parts)), parts)
    return unit, np.arange(1, len(unit) + 1) - (np.cumsum(parts) - parts)[unit]


def _even_parts(rank_tree: RankTree, units: _Units, parts: IntArray, snap: float) -> _Parts:
    """Parts of equal cost of each unit; where tokens are dear, some are empty."""
    unit, number = _numbered(parts)
    part_s = units.cost_s / parts
    target_s = units.low_s[unit] + part_s[unit] * number
    end = rank_tree.tokens_at(target_s, snap * part_s[unit])
    end = np.clip(end, units.begin[unit], units.stop[unit])
    first = np.cumsum(parts) - parts
    end[first + parts - 1] = units.stop
    begin = np.append(0, end[:-1])
    begin[first] = units.begin
    return _Parts(end, end - begin, first)


def _equal_tokens(units: _Units, parts: IntArray) -> IntArray:
    """Ends of parts of equally many tokens."""
    unit, number = _numbered(parts)
    return units.begin[unit] + units.num_tokens[unit] * number // parts[unit]


def _parts_of_units(unit_s: FloatArray, num_tokens: IntArray, count: int) -> IntArray:
    """Parts of each unit, `count` in all, such that the costliest part is as cheap as can be."""
    parts, costs, tokens = [1] * len(unit_s), unit_s.tolist(), num_tokens.tolist()

    def key(unit: int) -> float:
        # A unit of as many tokens as parts cannot be cut further.
        return -costs[unit] / parts[unit] if parts[unit] < tokens[unit] else 0.0

    heap = [(key(unit), unit) for unit in range(len(parts))]
    heapify(heap)
    for _ in range(count - len(parts)):
        unit = heap[0][1]
        parts[unit] += 1
        heapreplace(heap, (key(unit), unit))
    return np.array(parts)
