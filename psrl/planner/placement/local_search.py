"""Local search on a placement: subtrees move or swap between pairs of ranks.

The objective is the pair (cost of the most loaded rank, sum of all ranks): equal maxima with
less duplicated work count as progress, else duplicates would stay and block later balance.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psrl.core.samples.sample import FloatArray, IntArray

from .cost_tree import CostTree, rank_costs

# Candidates of either side of a swap; more are thinned out by how well they fit.
_MAX_CANDIDATES = (160, 640)
_NUM_PARTNERS = 12
# Other ranks that are disturbed, in turn for so many steps each.
_KICKED_RANKS = (2, 2, 4, 1)
_STEPS_PER_KICK = 500
_MAX_DESCENT_STEPS = 40
_MIN_GAIN = 1e-4
_MAX_FRUITLESS_STEPS = 600


class _Moves(NamedTuple):
    """Subtrees that one rank can hand to another: what it saves, what the other one pays."""

    node: IntArray
    saved_s: FloatArray
    added_s: FloatArray


class LocalSearch:
    """A placement that is improved in place; deterministic for a seed.

    Args:
        leaf_rank: [L] rank of each leaf to start from.
    """

    def __init__(self, tree: CostTree, leaf_rank: IntArray, num_ranks: int, seed: int) -> None:
        self._tree = tree
        self._num_ranks = num_ranks
        self._rng = np.random.default_rng(seed)
        # Leaves of each rank below each node; a node is held where the count is positive.
        self._leaves = np.zeros((num_ranks, tree.num_nodes), np.int32)
        self._leaves[leaf_rank, tree.leaves] = 1
        rank, node = leaf_rank, tree.parent[tree.leaves]
        while len(node):
            inside = node >= 0
            rank, node = rank[inside], node[inside]
            np.add.at(self._leaves, (rank, node), 1)
            node = tree.parent[node]
        self._load_s = rank_costs(tree, leaf_rank, num_ranks)

    @property
    def worst_s(self) -> float:
        """Cost of the most loaded rank."""
        return float(self._load_s.max())

    @property
    def objective(self) -> tuple[float, float]:
        return self.worst_s, float(self._load_s.sum())

    def leaf_rank(self) -> IntArray:
        """[L] rank of each leaf."""
        rank = np.empty(len(self._tree.leaves), np.int64)
        for r in range(self._num_ranks):
            rank[self._leaves[r, self._tree.leaves] > 0] = r
        return rank

    def descend(self, goal_s: float, num_steps: int) -> None:
        """Improve the most loaded rank against light and random partners until none helps."""
        partners = _NUM_PARTNERS
        for _ in range(num_steps):
            order = np.argsort(self._load_s, kind="stable")
            if self._load_s[order[-1]] <= goal_s:
                return
            others = order[:-1]
            if len(others) > partners:
                drawn = self._rng.permutation(others[partners:])[:partners]
                others = np.concatenate([others[:partners], drawn])
            heaviest = int(order[-1])
            if not any(self._improve_pair(heaviest, int(other)) for other in others):
                return

    def iterate(self, goal_s: float, num_iterations: int) -> None:
        """Iterated local search: disturb the heaviest rank and a few others, descend, compare.

        It ends early when many steps in a row have not lowered the heaviest rank. A longer search
        goes on where a shorter one ends, so it is never worse.
        """
        lowest_s, since = self.worst_s, 0
        for iteration in range(num_iterations):
            since += 1
            if self.worst_s < lowest_s:
                lowest_s, since = self.worst_s, 0
            if since > _MAX_FRUITLESS_STEPS:
                return
            order = np.argsort(self._load_s, kind="stable")
            if self._load_s[order[-1]] <= goal_s:
                return
            kicked = _KICKED_RANKS[iteration // _STEPS_PER_KICK % len(_KICKED_RANKS)]
            drawn = self._rng.choice(order[:-1], min(kicked, len(order) - 1), replace=False)
            ranks = [int(order[-1]), *(int(r) for r in drawn)]
            leaves, load_s = self._leaves[ranks].copy(), self._load_s[ranks].copy()
            self._kick(ranks)
            self._descend_inside(ranks)
            new = self._load_s[ranks]
            better = new.max() < load_s.max() * (1.0 - 1e-7)
            cheaper = new.max() <= load_s.max() and new.sum() < load_s.sum()
            if not (better or cheaper):
                self._leaves[ranks], self._load_s[ranks] = leaves, load_s

    def _kick(self, ranks: list[int]) -> None:
        """One to three random moves, preferring those that bring parts of a group together."""
        for _ in range(int(self._rng.integers(1, 4))):
            source, target = self._rng.choice(ranks, 2, replace=False).tolist()
            moves = self._moves(source, target)
            if not len(moves.node):
                continue
            scaled = (moves.saved_s - moves.added_s) / (0.02 * self.worst_s)
            weight = np.exp(np.clip(scaled, -50.0, 4.0))
            chosen = self._rng.choice(len(weight), p=weight / weight.sum())
            self._move(int(moves.node[chosen]), source, target)
        self._reload(ranks)

    def _descend_inside(self, ranks: list[int]) -> None:
        for _ in range(_MAX_DESCENT_STEPS):
            order = sorted(ranks, key=lambda r: self._load_s[r])
            if not any(self._improve_pair(order[-1], other) for other in order[:-1]):
                return

    def _moves(self, source: int, target: int) -> _Moves:
        """All subtrees of `source`, each the largest with its leaves, and their prices."""
        tree, held = self._tree, self._leaves[source]
        nodes = np.flatnonzero(held)
        cost = tree.cost_s[nodes]
        end = np.searchsorted(nodes, tree.subtree_end[nodes])
        place = np.arange(len(nodes))
        missing = np.where(self._leaves[target][nodes] > 0, 0.0, cost)
        saved = _range_sums(cost, place, end)
        # Sum over the path: a node's value counts from its place to the end of its subtree.
        on_path = np.zeros(len(nodes) + 1)
        on_path[:-1] = missing
        on_path -= np.bincount(end, missing, minlength=len(nodes) + 1)
        above = np.cumsum(on_path)[:-1] - missing
        added = _range_sums(missing, place, end) + np.maximum(above, 0.0)
        movable = held[nodes] < held[tree.parent[nodes]]
        movable[:1] = False  # the root; a rank may also hold nothing
        at = np.flatnonzero(movable)
        return _Moves(nodes[at], saved[at], added[at])

    def _improve_pair(self, heavy: int, light: int) -> bool:
        """Make the best move or swap if it lowers the larger of the two loads."""
        load, other = float(self._load_s[heavy]), float(self._load_s[light])
        if load <= other:
            return False
        give = self._moves(heavy, light)
        if not len(give.node):
            return False
        after = np.maximum(load - give.saved_s, other + give.added_s)
        best = int(after.argmin())
        best_load, given, taken = float(after[best]), int(give.node[best]), -1
        take = self._moves(light, heavy) if other > 0.0 else None
        if take is not None and len(take.node):
            give = _thin_out(give, (load - other) / 2, _MAX_CANDIDATES[0])
            take = _thin_out(take, 0.0, _MAX_CANDIDATES[1])
            swapped = np.maximum(
                load - give.saved_s[:, None] + take.added_s,
                other + give.added_s[:, None] - take.saved_s,
            )
            # Inside one group the two prices would interact.
            group = self._tree.group
            swapped[group[give.node][:, None] == group[take.node]] = np.inf
            flat = int(swapped.argmin())
            if swapped.flat[flat] < best_load:
                best_load = float(swapped.flat[flat])
                given = int(give.node[flat // len(take.node)])
                taken = int(take.node[flat % len(take.node)])
        if best_load >= load * (1.0 - _MIN_GAIN):
            return False
        self._move(given, heavy, light)
        if taken >= 0:
            self._move(taken, light, heavy)
        self._reload([heavy, light])
        return True

    def _move(self, node: int, source: int, target: int) -> None:
        """Hand all leaves of `source` below a node to `target`; loads are stale afterwards."""
        tree, counts = self._tree, self._leaves
        end = int(tree.subtree_end[node])
        moved = int(counts[source, node])
        counts[target, node:end] += counts[source, node:end]
        counts[source, node:end] = 0
        above = int(tree.parent[node])
        while above >= 0:
            counts[source, above] -= moved
            counts[target, above] += moved
            above = int(tree.parent[above])

    def _reload(self, ranks: list[int]) -> None:
        for r in ranks:
            self._load_s[r] = self._tree.cost_s[self._leaves[r] > 0].sum()


def _range_sums(values: FloatArray, low: IntArray, high: IntArray) -> FloatArray:
    before = np.concatenate([[0.0], np.cumsum(values)])
    sums: FloatArray = before[high] - before[low]
    return sums


def _thin_out(moves: _Moves, wanted_s: float, most: int) -> _Moves:
    """At most that many moves: half closest to the wanted saving, half spread over the rest."""
    if len(moves.node) <= most:
        return moves
    by_fit = np.argsort(np.abs(moves.saved_s - wanted_s), kind="stable")
    rest = by_fit[most // 2 :]
    spread = rest[np.linspace(0, len(rest) - 1, most - most // 2).astype(np.int64)]
    chosen: npt.NDArray[np.int64] = np.unique(np.concatenate([by_fit[: most // 2], spread]))
    return _Moves(moves.node[chosen], moves.saved_s[chosen], moves.added_s[chosen])
