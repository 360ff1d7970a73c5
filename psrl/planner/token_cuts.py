"""Token-wise cuts of one rank's depth-first order, in units.

Equal contiguous cuts chain every micro-batch to the next and so hold all activations to the end.
A *unit* is a run of whole sibling subtrees of limited cost; it is cut evenly, and what is bigger
gives its head (the shared part) to a unit before. Small units hold less, large ones waste less
time.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from psrl.core.packing import visible_pairs
from psrl.core.sample import FloatArray, IntArray

from .layout import Layout, Pieces

# A cut moves to the end of a node if that is within this share of a micro-batch's cost.
_SNAP = 0.01


@dataclass(frozen=True, eq=False)
class RankView:
    """N nodes of one rank in pre-order, with the cost of their tokens.

    Attributes:
        node: [N] nodes of the layout's tree.
        end: [N] the subtree of place i on this rank is the places `i .. end[i] - 1`.
        parent: [N] place of the parent; -1 below the root.
        head_s: [N] cost of the predicted rows of a node, spread evenly over its tokens.
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
        room = cost_s - before[place]
        tokens = self.num_tokens[place]
        # x tokens cost a x^2 + b x, since x (x + 1) / 2 of their pairs are among themselves.
        unit = self.layout.target.unit_costs
        a = 0.5 * unit.pair_s
        b = (
            unit.token_s
            + unit.pair_s * (self.start_depth[place] + 0.5)
            + self.head_s[place] / tokens
        )
        x = 2.0 * room / (b + np.sqrt(b * b + 4.0 * a * room))
        inside = np.clip(np.rint(x), 0, tokens).astype(np.int64)
        rest = before[place + 1] - cost_s
        inside = np.where((room <= snap_s) & (room <= rest), 0, inside)
        inside = np.where((rest <= snap_s) & (rest < room), tokens, inside)
        return self.tokens_before[place] + inside


def rank_view(layout: Layout, rank: int) -> RankView:
    """The tree as one rank sees it."""
    tree, nodes = layout.tree, layout.nodes_of(rank)
    rows = layout.loss_rows.of(layout.rank == rank)
    head_tokens = rows.count(tree.token_start[nodes], tree.token_start[nodes + 1])
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


def cut_units(view: RankView, starts: list[int], micro_batch_s: float, max_tokens: int) -> IntArray:
    """Token bounds of the micro-batches: each unit in even parts of about the given cost.

    Returns: [M + 1] ascending bounds in the rank's token order, the first 0.
    """
    bounds = [np.zeros(1, np.int64)]
    for first, last in zip(starts, [*starts[1:], len(view.node)], strict=True):
        low, high = float(view.cost_before_s[first]), float(view.cost_before_s[last])
        begin, stop = int(view.tokens_before[first]), int(view.tokens_before[last])
        fewest = -(-(stop - begin) // max_tokens)
        num_parts = max(fewest, round((high - low) / micro_batch_s) if micro_batch_s else 1)
        for parts in (num_parts, num_parts + 1, num_parts + 2, num_parts + 4):
            targets = low + (high - low) * np.arange(1, parts) / parts
            snap_s = _SNAP * (high - low) / parts
            cuts = np.unique(np.clip(view.tokens_at(targets, snap_s), begin, stop))
            cuts = np.append(cuts[(cuts > begin) & (cuts < stop)], stop)
            if np.diff(cuts, prepend=begin).max() <= max_tokens:
                break
        else:
            # Equal costs cannot respect the budget: equal tokens do.
            parts = max(fewest, num_parts)
            cuts = begin + (stop - begin) * np.arange(1, parts + 1) // parts
        bounds.append(cuts)
    return np.unique(np.concatenate(bounds))


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
