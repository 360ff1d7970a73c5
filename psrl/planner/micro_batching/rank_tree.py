"""The tree as one rank sees it: its nodes in depth-first order, and what their tokens cost."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.planner.placement.placement import Placement

# Less than any cost that matters: keeps a division by costs of zero defined.
_TINY_S = 1e-300


class Sizes(NamedTuple):
    """What tokens or micro-batches are charged for: tokens, visible pairs and predicted rows."""

    num_tokens: FloatArray
    pairs: FloatArray
    head_tokens: FloatArray


@dataclass(frozen=True, eq=False)
class RankTree:
    """N nodes of one rank in pre-order, with the cost of their tokens.

    Attributes:
        node: [N] nodes of the placement's tree.
        end: [N] the subtree of place i on this rank is the places `i .. end[i] - 1`.
        parent: [N] place of the parent; -1 below the root.
    """

    placement: Placement
    rank: int
    node: IntArray
    end: IntArray
    parent: IntArray

    @cached_property
    def num_tokens(self) -> IntArray:
        return self.placement.tree.num_tokens[self.node]

    @cached_property
    def start_depth(self) -> IntArray:
        return self.placement.tree.start_depth[self.node]

    @cached_property
    def tokens_before(self) -> IntArray:
        """[N + 1] tokens before each node in the rank's order."""
        return np.concatenate([[0], np.cumsum(self.num_tokens)]).astype(np.int64)

    @cached_property
    def cost_before_s(self) -> FloatArray:
        """[N + 1] cost before each node in the rank's order."""
        runs = self._runs
        before: FloatArray = runs.cost_before_s[np.searchsorted(runs.edge, self.tokens_before)]
        return before

    @cached_property
    def cost_list_s(self) -> list[float]:
        """`cost_before_s` for loops."""
        costs: list[float] = self.cost_before_s.tolist()
        return costs

    @property
    def total_tokens(self) -> int:
        return int(self.tokens_before[-1])

    @property
    def total_s(self) -> float:
        return float(self.cost_before_s[-1])

    def tokens_at(self, cost_s: FloatArray, snap_s: FloatArray) -> IntArray:
        """Tokens of the rank's order that cost as much as each given amount, to the nearest.

        Args:
            snap_s: a boundary of nodes that is this close replaces the exact token.
        """
        before = self.cost_before_s
        place = np.clip(np.searchsorted(before, cost_s, side="right") - 1, 0, len(self.node) - 1)
        room, rest = cost_s - before[place], before[place + 1] - cost_s
        tokens = self._exact_tokens_at(cost_s)
        tokens = np.where((room <= snap_s) & (room <= rest), self.tokens_before[place], tokens)
        snaps_up = (rest <= snap_s) & (rest < room)
        return np.where(snaps_up, self.tokens_before[place + 1], tokens)

    def _exact_tokens_at(self, cost_s: FloatArray) -> IntArray:
        runs, unit = self._runs, self.placement.subproblem.unit_costs
        run = np.searchsorted(runs.cost_before_s, cost_s, side="right") - 1
        run = np.clip(run, 0, len(runs.depth) - 1)
        room = np.maximum(cost_s - runs.cost_before_s[run], 0.0)
        # n tokens of a run cost n first_s + n (n - 1) pair_s / 2: the positive root for the room.
        linear = unit.token_s + unit.pair_s * (runs.depth[run] + 0.5) + unit.head_s * runs.head[run]
        root = np.sqrt(linear * linear + 2.0 * unit.pair_s * room)
        inside = np.rint(2.0 * room / np.maximum(linear + root, _TINY_S))
        tokens: IntArray = np.minimum(runs.edge[run] + inside.astype(np.int64), runs.edge[run + 1])
        return tokens

    def sizes_before(self, tokens: IntArray) -> Sizes:
        """What the first so many tokens of the rank's order are charged for, for each number."""
        runs = self._runs
        if not len(runs.depth):
            return Sizes(*(np.zeros(len(tokens)) for _ in range(3)))
        run = np.searchsorted(runs.edge, tokens, side="right") - 1
        run = np.minimum(run, len(runs.depth) - 1)
        inside = tokens - runs.edge[run]
        pairs = runs.pairs_before[run] + visible_pairs(runs.depth[run], inside)
        head_tokens = runs.head_before[run] + inside * runs.head[run]
        return Sizes(*(a.astype(np.float64) for a in (tokens, pairs, head_tokens)))

    @cached_property
    def _runs(self) -> "_Runs":
        """Runs of tokens of one node that are all predicted, or not at all."""
        tree, unit = self.placement.tree, self.placement.subproblem.unit_costs
        start, end = self.placement.rank_rows.of(self.rank)
        low, high = self._position(start), self._position(end - 1) + 1
        edge = np.unique(np.concatenate([self.tokens_before, low, high]))
        begin, num_tokens = edge[:-1], np.diff(edge)
        place = np.searchsorted(self.tokens_before, begin, side="right") - 1
        depth = tree.start_depth[self.node[place]] + begin - self.tokens_before[place]
        # Intervals are disjoint and ascending: a run is in one iff more have begun than ended.
        begun = np.searchsorted(low, begin, side="right")
        head = begun > np.searchsorted(high, begin, side="right")
        pairs, head_tokens = visible_pairs(depth, num_tokens), num_tokens * head
        cost_s = unit.token_s * num_tokens + unit.pair_s * pairs + unit.head_s * head_tokens
        return _Runs(
            edge,
            depth,
            head,
            pairs_before=np.append(0, np.cumsum(pairs)),
            head_before=np.append(0, np.cumsum(head_tokens)),
            cost_before_s=np.append(0.0, np.cumsum(cost_s)),
        )

    def _position(self, token: IntArray) -> IntArray:
        """Places in the rank's token order of tokens of the tree."""
        start = self.placement.tree.token_start[self.node]
        place = np.searchsorted(start, token, side="right") - 1
        return self.tokens_before[place] + token - start[place]


class _Runs(NamedTuple):
    """K runs of tokens in a rank's order.

    Attributes:
        edge: [K + 1] first token of each, and the end.
        depth: [K] tokens above each in the tree.
        head: [K] whether its rows are predicted.
        pairs_before, head_before, cost_before_s: [K + 1] sums of the runs before.
    """

    edge: IntArray
    depth: IntArray
    head: npt.NDArray[np.bool_]
    pairs_before: IntArray
    head_before: IntArray
    cost_before_s: FloatArray


def tree_of_rank(placement: Placement, rank: int) -> RankTree:
    """The tree as one rank sees it."""
    tree, nodes = placement.tree, placement.nodes_of(rank)
    above = tree.parent[nodes]
    return RankTree(
        placement,
        rank,
        node=nodes,
        end=np.searchsorted(nodes, tree.subtree_end[nodes]),
        parent=np.where(above > 0, np.searchsorted(nodes, above), -1),
    )
