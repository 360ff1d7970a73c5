"""Token-wise cuts of one rank's depth-first order, in units.

Equal contiguous cuts chain every micro-batch to the next and so hold all activations to the end.
A *unit* is a run of whole sibling subtrees of limited cost; it is cut evenly, and what is bigger
gives its head (the shared part) to a unit before. Small units hold less, large ones waste less
time.
"""

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

import numpy as np

from psrl.core.packing import visible_pairs
from psrl.core.sample import FloatArray, IntArray

from .layout import Layout, Pieces

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


@dataclass(frozen=True, eq=False)
class RankView:
    """N nodes of one rank in pre-order, with the cost of their tokens.

    Attributes:
        node: [N] nodes of the layout's tree.
        end: [N] the subtree of place i on this rank is the places `i .. end[i] - 1`.
        parent: [N] place of the parent; -1 below the root.
        head_s: [N] cost of the predicted rows of a node.
    """

    layout: Layout
    rank: int
    node: IntArray
    end: IntArray
    parent: IntArray
    head_s: FloatArray

    @cached_property
    def num_tokens(self) -> IntArray:
        return self.layout.tree.num_tokens[self.node]

    @cached_property
    def start_depth(self) -> IntArray:
        return self.layout.tree.start_depth[self.node]

    @cached_property
    def tokens_before(self) -> IntArray:
        """[N + 1] tokens before each node in the rank's order."""
        return np.concatenate([[0], np.cumsum(self.num_tokens)]).astype(np.int64)

    @cached_property
    def cost_before_s(self) -> FloatArray:
        """[N + 1] cost before each node in the rank's order."""
        unit = self.layout.target.unit_costs
        pairs = visible_pairs(self.start_depth, self.num_tokens)
        cost = unit.token_s * self.num_tokens + unit.pair_s * pairs + self.head_s
        return np.concatenate([[0.0], np.cumsum(cost)])

    @property
    def total_tokens(self) -> int:
        return int(self.tokens_before[-1])

    def tokens_at(self, cost_s: FloatArray, snap_s: float) -> IntArray:
        """Tokens of the rank's order that cost as much as each given amount, at least roughly.

        Args:
            snap_s: a boundary of nodes that is this close replaces the exact token.
        """
        before = self.cost_before_s
        place = np.clip(np.searchsorted(before, cost_s, side="right") - 1, 0, len(self.node) - 1)
        room, rest = cost_s - before[place], before[place + 1] - cost_s
        tokens = self.num_tokens[place]
        inside = self._tokens_inside(place, room)
        inside = np.where((room <= snap_s) & (room <= rest), 0, inside)
        inside = np.where((rest <= snap_s) & (rest < room), tokens, inside)
        return self.tokens_before[place] + inside

    def _tokens_inside(self, place: IntArray, room_s: FloatArray) -> IntArray:
        """Tokens of the nodes at some places that cost as much as given, to the nearest token."""
        tree, unit, rows = self.layout.tree, self.layout.target.unit_costs, self.layout.rank_rows
        start, depth = tree.token_start[self.node[place]], self.start_depth[place]

        def cost_s(num_tokens: IntArray) -> FloatArray:
            head = rows.count(self.rank, start, start + num_tokens)
            cost: FloatArray = (
                unit.token_s * num_tokens
                + unit.pair_s * visible_pairs(depth, num_tokens)
                + unit.head_s * head
            )
            return cost

        # Predicted rows are clustered, so only bisection is sure to converge.
        low, high = np.zeros(len(place), np.int64), self.num_tokens[place]
        while (high - low > 1).any():
            middle = (low + high) // 2
            below = cost_s(middle) <= room_s
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        nearer_high = cost_s(high) - room_s < room_s - cost_s(low)
        return np.where(nearer_high, high, low)


def rank_view(layout: Layout, rank: int) -> RankView:
    """The tree as one rank sees it."""
    tree, nodes = layout.tree, layout.nodes_of(rank)
    start, end = tree.token_start[nodes], tree.token_start[nodes + 1]
    head_tokens = layout.rank_rows.count(rank, start, end)
    parent = np.where(tree.parent[nodes] > 0, np.searchsorted(nodes, tree.parent[nodes]), -1)
    return RankView(
        layout,
        rank,
        node=nodes,
        end=np.searchsorted(nodes, tree.subtree_end[nodes]),
        parent=parent,
        head_s=head_tokens * np.float64(layout.target.unit_costs.head_s),
    )


def unit_starts(view: RankView, unit_s: float, micro_batch_s: float) -> list[int]:
    """Places at which units begin, ascending, the first 0.

    Args:
        unit_s: most that a run of whole siblings may cost.
        micro_batch_s: what a micro-batch should cost; no unit is closed below half of it.
    """
    cost = view.cost_before_s.tolist()
    end, parents = view.end.tolist(), view.parent.tolist()
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
    view: RankView,
    starts: list[int],
    micro_batch_s: float,
    max_tokens: int,
    snap: float = SNAP,
) -> IntArray:
    """Token bounds of the micro-batches: each unit in even parts of about the given cost.

    Returns: [M + 1] ascending bounds in the rank's token order, the first 0.
    """
    bounds = [np.zeros(1, np.int64)]
    for first, last in zip(starts, [*starts[1:], len(view.node)], strict=True):
        unit_s = float(view.cost_before_s[last] - view.cost_before_s[first])
        begin, stop = int(view.tokens_before[first]), int(view.tokens_before[last])
        fewest = -(-(stop - begin) // max_tokens)
        num_parts = max(fewest, round(unit_s / micro_batch_s) if micro_batch_s else 1)
        for extra in _EXTRA_PARTS:
            parts = max(num_parts + extra[0], int(num_parts * extra[1]))
            cuts = _even_cuts(view, first, last, parts, snap)
            if np.diff(cuts, prepend=begin).max() <= max_tokens:
                break
        else:
            # Equal costs cannot respect the budget: equal tokens do.
            parts = max(fewest, num_parts)
            cuts = begin + (stop - begin) * np.arange(1, parts + 1) // parts
        bounds.append(cuts)
    return np.unique(np.concatenate(bounds))


def cut_exactly(
    view: RankView, num_units: int, count: int, max_tokens: int, snap: float = SNAP
) -> IntArray | None:
    """Bounds of a given number of micro-batches, in even parts of units; None if one is too large.

    Of fewer tokens than that, every one has a micro-batch.

    Args:
        num_units: a unit costs at most this share of the rank.
    """
    total_tokens, total_s = view.total_tokens, float(view.cost_before_s[-1])
    if total_tokens <= count:
        return np.arange(total_tokens + 1)
    micro_batch_s = total_s / count
    unit_s = max(total_s / num_units, micro_batch_s) * (1.0 + 1e-9)
    starts = unit_starts(view, unit_s, micro_batch_s)
    if len(starts) > count:
        starts = starts[:1]
    edges = np.array([*starts, len(view.node)])
    unit_costs_s, unit_tokens = (
        np.diff(x[edges]) for x in (view.cost_before_s, view.tokens_before)
    )
    parts = _parts_of_units(unit_costs_s, unit_tokens, count)
    bounds = [np.zeros(1, np.int64)]
    for first, last, num_parts in zip(edges[:-1], edges[1:], parts, strict=True):
        begin, stop = int(view.tokens_before[first]), int(view.tokens_before[last])
        for snapped in (snap, 0.0):
            cuts = _even_cuts(view, first, last, num_parts, snapped)
            if len(cuts) == num_parts:
                break
        else:
            cuts = begin + (stop - begin) * np.arange(1, num_parts + 1) // num_parts
        bounds.append(cuts)
    found = np.concatenate(bounds)
    return found if int(np.diff(found).max()) <= max_tokens else None


def pieces_of(view: RankView, bounds: IntArray) -> Pieces:
    """Segments of contiguous micro-batches with the given token bounds."""
    edges = np.unique(np.concatenate([view.tokens_before, bounds]))
    start = edges[:-1]
    place = np.searchsorted(view.tokens_before, start, side="right") - 1
    return Pieces(
        micro_batch=np.searchsorted(bounds, start, side="right") - 1,
        node=view.node[place],
        start_depth=view.start_depth[place] + start - view.tokens_before[place],
        num_tokens=np.diff(edges),
    )


def _even_cuts(view: RankView, first: int, last: int, parts: int, snap: float) -> IntArray:
    """Bounds behind the first of the parts of equal cost of the places `first .. last - 1`."""
    low, high = float(view.cost_before_s[first]), float(view.cost_before_s[last])
    begin, stop = int(view.tokens_before[first]), int(view.tokens_before[last])
    targets = low + (high - low) * np.arange(1, parts) / parts
    cuts = np.unique(np.clip(view.tokens_at(targets, snap * (high - low) / parts), begin, stop))
    return np.append(cuts[(cuts > begin) & (cuts < stop)], stop)


def _parts_of_units(unit_s: FloatArray, num_tokens: IntArray, count: int) -> list[int]:
    """Parts of each unit, `count` in all, such that the costliest part is as cheap as can be."""
    parts = [1] * len(unit_s)

    def key(unit: int) -> float:
        # A unit of as many tokens as parts cannot be cut further.
        return -float(unit_s[unit]) / parts[unit] if parts[unit] < num_tokens[unit] else 0.0

    heap = [(key(unit), unit) for unit in range(len(parts))]
    heapify(heap)
    for _ in range(count - len(parts)):
        unit = heap[0][1]
        parts[unit] += 1
        heapreplace(heap, (key(unit), unit))
    return parts
