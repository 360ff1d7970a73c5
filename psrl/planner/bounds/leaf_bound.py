"""A configuration bound over the nodes of a tree, for ranks that hold few leaves.

What a rank holds is a set of nodes that is closed towards the root: a *configuration*. Within a
limit every node v must be held by at least k_v ranks (`bounds.copies_of`). For any prices of
nodes, `sum of k_v price_v <= ranks * worth of the dearest configuration`, or no placement keeps
the limit. A node is held with its whole chain: who has less of it counts as holding less, and pays
no less. A linear program over the configurations found so far gives prices; a knapsack on the
tree finds the dearest configurations.
"""

from typing import Any

import numpy as np
from ortools.linear_solver import pywraplp

from psrl.core.plan.bound import Bound
from psrl.core.samples.sample import IntArray
from psrl.planner.placement.cost_tree import CostTree

from .forced_copies import SAFETY, copies_of

# Costs count in whole cells of the limit, rounded down: every true configuration still fits.
_NUM_CELLS = 2000
# Sum of k_v price_v; worths are at most this, so that 32 bits hold them.
_ALL_PRICES = 1e9
_MAX_NODES = 2000
# With more leaves the configurations are too many for the bound to get anywhere.
_MAX_LEAVES_PER_RANK, _FEW_LEAVES = 4, 30
_BISECTION_TOLERANCE = 2e-3
_FIRST_STEP = 5e-3


def raise_by_leaves(
    tree: CostTree, num_ranks: int, known: Bound, high_s: float, num_rounds: int
) -> Bound:
    """The given proven bound, or a higher one by configurations of nodes.

    Args:
        high_s: cost of a known placement, which no bound exceeds.
        num_rounds: most rounds of prices, for all limits together.
    """
    many = len(tree.leaves) > max(_MAX_LEAVES_PER_RANK * num_ranks, _FEW_LEAVES)
    if many or tree.num_nodes > _MAX_NODES or len(tree.levels) < 2:
        return known
    search = _Configurations(tree, num_ranks)
    low_s, step, left = known.limit_s, _FIRST_STEP, num_rounds
    while left > 0 and high_s > low_s * (1.0 + _BISECTION_TOLERANCE):
        limit_s = min(low_s * (1.0 + step), (low_s + high_s) / 2)
        refuted, price, used = search.refute(limit_s, left)
        left -= used
        if refuted:
            low_s, step = limit_s, 2 * step
            known = _bound(tree, limit_s, price)
        else:
            high_s, step = limit_s, step / 2
    return known


def _bound(tree: CostTree, limit_s: float, price: IntArray | None) -> Bound:
    if price is None:
        return Bound(kind="forced copies", limit_s=limit_s * SAFETY)
    priced = np.flatnonzero(price)
    return Bound(
        kind="leaf configurations",
        limit_s=limit_s * SAFETY,
        nodes=tuple(tree.last_node[priced].tolist()),
        prices=tuple(price[priced].astype(np.float64).tolist()),
    )


class _Configurations:
    """Configurations found so far, which serve all limits that they fit."""

    def __init__(self, tree: CostTree, num_ranks: int) -> None:
        self._tree = tree
        self._num_ranks = num_ranks
        self._node_s = tree.shared_s
        self._end = tree.subtree_end.tolist()
        self._parent = tree.parent.tolist()
        self._known: dict[tuple[int, ...], float] = {}
        for leaf in tree.leaves.tolist():
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = self._parent[node]
            self._remember(path)

    def _remember(self, nodes: list[int]) -> tuple[int, ...] | None:
        key = tuple(sorted(nodes))
        if key in self._known:
            return None
        self._known[key] = float(self._node_s[list(key)].sum())
        return key

    def refute(self, limit_s: float, num_rounds: int) -> tuple[bool, IntArray | None, int]:
        """Whether provably no placement keeps the limit, by which prices of the nodes (None:
        by copies alone), and the rounds that it took."""
        copies = copies_of(self._tree, self._num_ranks, limit_s)
        if copies is None or copies[0] > self._num_ranks:
            return True, None, 1
        needed = copies.astype(np.int64)
        cells = np.floor(self._node_s * (_NUM_CELLS / limit_s) * (1.0 - 1e-12)).astype(np.int64)
        is_leaf = self._tree.subtree_end == np.arange(self._tree.num_nodes) + 1
        master = _Master(np.flatnonzero((needed > 1) | is_leaf), needed)
        for key, cost_s in self._known.items():
            if cost_s <= limit_s:
                master.add(key)
        for number in range(1, num_rounds + 1):
            value, price = master.prices()
            if value <= self._num_ranks * (1.0 + 1e-9):
                return False, None, number
            knapsack = _Knapsack(self._tree, cells, price)
            if int(price @ needed) > self._num_ranks * knapsack.dearest_worth:
                return True, price, number
            found = [self._remember(nodes) for nodes in knapsack.dear_configurations()]
            new = [key for key in found if key is not None]
            for key in new:
                master.add(key)
            if not new:
                return False, None, number
        return False, None, num_rounds


class _Master:
    """The fewest configurations, in fractions, that hold every node often enough."""

    def __init__(self, nodes: IntArray, needed: IntArray) -> None:
        self._nodes = nodes
        self._needed = needed
        self._solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        infinity = self._solver.infinity()
        self._row = {v: self._solver.Constraint(float(needed[v]), infinity) for v in nodes.tolist()}
        self._solver.Objective().SetMinimization()

    def add(self, nodes: tuple[int, ...]) -> None:
        column = self._solver.NumVar(0.0, self._solver.infinity(), "")
        self._solver.Objective().SetCoefficient(column, 1.0)
        for node in nodes:
            if node in self._row:
                self._row[node].SetCoefficient(column, 1.0)

    def prices(self) -> tuple[float, IntArray]:
        """Least number of configurations, and the [V] whole price of each node."""
        price = np.zeros(len(self._needed), np.int64)
        if self._solver.Solve() != pywraplp.Solver.OPTIMAL:
            return 0.0, price
        dual = np.maximum([self._row[v].dual_value() for v in self._nodes.tolist()], 0.0)
        scale = _ALL_PRICES / max(float(dual @ self._needed[self._nodes]), 1e-30)
        price[self._nodes] = np.floor(dual * scale)
        return float(self._solver.Objective().Value()), price


class _Knapsack:
    """The dearest configurations within the limit, by whole cells.

    In pre-order a node is held and the search goes on below it, or its subtree is skipped.
    """

    def __init__(self, tree: CostTree, cells: IntArray, price: IntArray) -> None:
        self._end, self._parent = tree.subtree_end.tolist(), tree.parent.tolist()
        self._cells, self._price = cells.tolist(), price.tolist()
        self._leaves = tree.leaves.tolist()
        shape = (tree.num_nodes + 1, _NUM_CELLS + 1)
        # Most worth of the nodes from v on, for the cells that are left; the ancestors are held.
        self._after = np.zeros(shape, np.int32)
        # Most worth of the nodes before v, for the cells that they use; negative: impossible.
        self._before = np.full(shape, -(2**30), np.int32)
        for v in range(tree.num_nodes - 1, -1, -1):
            row, used = self._after[v], self._cells[v]
            row[:] = self._after[self._end[v]]
            if used <= _NUM_CELLS:
                held = self._after[v + 1, : _NUM_CELLS + 1 - used] + np.int32(self._price[v])
                np.maximum(row[used:], held, out=row[used:])

    @property
    def dearest_worth(self) -> int:
        return int(self._after[0, _NUM_CELLS])

    def dear_configurations(self) -> list[list[int]]:
        """The dearest one, and for leaves that no earlier one holds the dearest with them."""
        before = self._before
        before[0] = 0
        for v in range(len(self._end)):
            row, skipped, used = before[v], before[self._end[v]], self._cells[v]
            np.maximum(skipped, row, out=skipped)
            if used <= _NUM_CELLS:
                held = before[v + 1, used:]
                worth = row[: _NUM_CELLS + 1 - used] + np.int32(self._price[v])
                np.maximum(held, worth, out=held)
        found = [self._nodes_after(0, _NUM_CELLS)]
        seen: set[int] = set()
        for leaf in self._leaves:
            room = _NUM_CELLS - self._cells[leaf]
            if leaf in seen or room < 0:
                continue
            worth = before[leaf, : room + 1] + self._after[leaf + 1, room::-1]
            left = int(worth.argmax())
            if worth[left] < 0:
                continue
            nodes = [*self._nodes_before(leaf, left), leaf]
            nodes += self._nodes_after(leaf + 1, room - left)
            seen.update(nodes)
            found.append(nodes)
        return found

    def _nodes_after(self, v: int, left: int) -> list[int]:
        nodes: list[int] = []
        while v < len(self._end):
            if self._after[v, left] == self._after[self._end[v], left]:
                v = self._end[v]
            else:
                nodes.append(v)
                left -= self._cells[v]
                v += 1
        return nodes

    def _nodes_before(self, v: int, used: int) -> list[int]:
        nodes: list[int] = []
        while v > 0:
            worth, last = self._before[v, used], v - 1
            spent = used - self._cells[last]
            if spent >= 0 and self._before[last, spent] + self._price[last] == worth >= 0:
                nodes.append(last)
                v, used = last, spent
                continue
            # Otherwise a subtree that ends before v was skipped: one around the node before.
            end, v = v, last
            while self._end[v] != end or self._before[v, used] != worth:
                v = self._parent[v]
        return nodes
