"""A configuration bound: how few ranks can hold all groups of a tree under a limit.

A *group* is a subtree of the root. A rank *opens* it if it holds the group's root, and then pays
for it; work strictly below is done only by ranks that opened the group, and is taken to be
divisible at will. Rows that not all samples through the group's root predict may be trained by a
sample that ends inside its chain, without the rest of the chain: they are *loose*, one more group
that costs nothing to open. (They are below the tree's root, which every rank with any of this work
holds; the root's own such rows are left out.) What one rank may hold within a limit is a
*configuration*. For any prices of work,
ranks >= worth of all work / worth of the dearest configuration (Farley); a linear program over the
configurations found so far gives prices. Where a rank holds few groups this is stronger than
counting copies.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from ortools.linear_solver import pywraplp

from psrl.core.plan.bound import Bound
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.planner.placement.cost_tree import CostTree

from .forced_copies import SAFETY, copies_of

# More configurations of whole groups than this are not priced: no bound then.
_MAX_CONFIGURATIONS = 100_000
_MAX_ROUNDS = 40
# Pairs of a configuration and a group that are priced for one bound.
_MAX_WORK = 15_000_000
_COLUMNS_PER_ROUND = 60
_BISECTION_TOLERANCE = 4e-4
# Limits are tried upward from the given bound in doubling steps.
_FIRST_STEP = 2e-3


def raise_by_groups(tree: CostTree, num_ranks: int, known: Bound) -> Bound:
    """The given proven bound, or a higher one by configurations of groups."""
    low_s, high_s, step = known.limit_s, np.inf, _FIRST_STEP
    work = _Work(_MAX_WORK)
    while work.left > 0 and high_s > low_s * (1.0 + _BISECTION_TOLERANCE):
        middle = low_s * (1.0 + step) if np.isinf(high_s) else (low_s + high_s) / 2
        prices = prices_that_refute(tree, num_ranks, middle, work)
        if prices is None:
            high_s = middle
        else:
            low_s, step = middle, 2 * step
            limit_s, paid = middle * SAFETY, tuple(prices.tolist())
            known = Bound(kind="group configurations", limit_s=limit_s, prices=paid)
    return known


@dataclass
class _Work:
    """Pairs of a configuration and a group that may still be priced."""

    left: int


def prices_that_refute(
    tree: CostTree, num_ranks: int, limit_s: float, work: _Work | None = None
) -> FloatArray | None:
    """[G] prices that prove that no placement keeps the limit; None if none were found.

    The dearest configuration must be found exactly: all but one of its groups are whole, and all
    sets of whole groups that fit are tried. Nothing is proven where there are too many.
    """
    groups = _groups(tree, num_ranks, limit_s)
    if groups is None:
        return None
    whole = _whole_sets(groups.whole_s, groups.room_s)
    if whole is None:
        return None
    return _Columns(groups, whole).proof(num_ranks, work or _Work(_MAX_WORK))


@dataclass(frozen=True)
class _Groups:
    """G groups of a tree under a limit; the last is of the loose rows, if there are any.

    Attributes:
        room_s: what the limit leaves on a rank after the root of the tree.
        open_s: [G] cost of the group's root; all of a group without work below.
        inner_s: [G] most divisible work of the group that one rank can do.
        amount: [G] what a rank that holds the whole group contributes to `needed`.
        needed: [G] least amount of all ranks together, copies included.
    """

    room_s: float
    open_s: FloatArray
    inner_s: FloatArray
    amount: FloatArray
    needed: FloatArray

    @property
    def whole_s(self) -> FloatArray:
        return self.open_s + self.inner_s


def _groups(tree: CostTree, num_ranks: int, limit_s: float) -> _Groups | None:
    if len(tree.levels) < 2:
        return None
    copies = copies_of(tree, num_ranks, limit_s)
    roots = tree.levels[1]
    if copies is None or len(roots) < 2:
        return None
    open_s, loose_s = tree.shared_s[roots], tree.head_s[roots]
    inner = _subtree_sums(tree, tree.shared_s + tree.head_s) - open_s - loose_s
    forced = _subtree_sums(tree, copies * tree.shared_s + tree.head_s)
    forced -= copies[roots] * open_s + loose_s
    # Without inner work the group is one thing that somebody must hold.
    bare = inner <= 1e-9 * limit_s
    loose = loose_s.sum(keepdims=True)
    loose = loose[loose > 0.0]
    return _Groups(
        room_s=(limit_s - float(tree.shared_s[0])) * (1.0 + 1e-9),
        open_s=np.append(open_s, 0.0 * loose),
        inner_s=np.append(np.where(bare, 0.0, inner), loose),
        amount=np.append(np.where(bare, 1.0, inner), loose),
        needed=np.append(np.where(bare, 1.0, forced), loose),
    )


def _subtree_sums(tree: CostTree, node_s: FloatArray) -> FloatArray:
    """[G] sums over the groups."""
    before, roots = np.concatenate([[0.0], np.cumsum(node_s)]), tree.levels[1]
    sums: FloatArray = before[tree.subtree_end[roots]] - before[roots]
    return sums


def _whole_sets(whole_s: FloatArray, room_s: float) -> IntArray | None:
    """[C, K] all sets of up to K groups that fit whole, padded with -1; None if too many."""
    order = np.argsort(whole_s, kind="stable")
    ascending = whole_s[order]
    sets, left_s = np.empty((1, 0), np.int64), np.array([room_s])
    found, total = [sets], 1
    while len(sets):
        # Every set grows by each group after its last one that fits: those form a range.
        first = sets[:, -1] + 1 if sets.shape[1] else np.zeros(1, np.int64)
        count = np.maximum(np.searchsorted(ascending, left_s, side="right") - first, 0)
        total += int(count.sum())
        if total > _MAX_CONFIGURATIONS:
            return None
        grown = np.repeat(np.arange(len(sets)), count)
        offset = np.arange(len(grown)) - np.repeat(np.cumsum(count) - count, count)
        added = first[grown] + offset
        sets = np.concatenate([sets[grown], added[:, None]], axis=1)
        left_s = left_s[grown] - ascending[added]
        found.append(sets)
    widest = max(part.shape[1] for part in found)
    padded = [np.pad(p, ((0, 0), (0, widest - p.shape[1])), constant_values=-1) for p in found]
    place = np.concatenate(padded)
    return np.where(place >= 0, order[place], -1)


class _Columns:
    """The linear program over the configurations found so far."""

    def __init__(self, groups: _Groups, whole: IntArray) -> None:
        self._groups = groups
        self._whole = whole
        padded = np.append(groups.whole_s, 0.0)
        self._left_s: FloatArray = groups.room_s - padded[whole].sum(axis=1)
        self._solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        infinity = self._solver.infinity()
        self._rows = [self._solver.Constraint(float(n), infinity) for n in groups.needed]
        self._solver.Objective().SetMinimization()
        self._seen: set[tuple[tuple[int, ...], int]] = set()
        for g in range(len(groups.open_s)):
            share = self._part(np.array([groups.room_s]), g)[0]
            self._add((), g, float(share))

    def proof(self, num_ranks: int, work: _Work) -> FloatArray | None:
        """Prices that show that more ranks are needed."""
        enough = num_ranks * (1.0 + 1e-9)
        for _ in range(_MAX_ROUNDS):
            if self._solver.Solve() != pywraplp.Solver.OPTIMAL:
                return None
            if self._solver.Objective().Value() <= num_ranks:
                return None
            prices = np.maximum([row.dual_value() for row in self._rows], 0.0)
            if work.left <= 0:
                return None
            work.left -= len(self._whole) * len(prices)
            worth, part, amount = self._price(prices)
            if float(prices @ self._groups.needed) > enough * float(worth.max()):
                return prices
            dearest = np.argsort(-worth, kind="stable")
            new = (
                self._add(tuple(g for g in self._whole[c].tolist() if g >= 0), part[c], amount[c])
                for c in dearest[: 8 * _COLUMNS_PER_ROUND].tolist()
                if worth[c] > 1.0 + 1e-9
            )
            if not any(list(islice(filter(None, new), _COLUMNS_PER_ROUND))):
                return None
        return None

    def _price(self, prices: FloatArray) -> tuple[FloatArray, IntArray, FloatArray]:
        """[C] worth of each set with its best partial group, that group (-1: none), its amount."""
        groups, whole = self._groups, self._whole
        base = np.append(prices * groups.amount, 0.0)[whole].sum(axis=1)
        worth, part = base.copy(), np.full(len(whole), -1)
        amount = np.zeros(len(whole))
        for g in np.flatnonzero(prices > 0.0).tolist():
            share = self._part(self._left_s, g)
            candidate = base + prices[g] * share
            better = (candidate > worth) & (whole != g).all(axis=1)
            worth[better], part[better] = candidate[better], g
            amount[better] = share[better]
        return worth, part, amount

    def _part(self, left_s: FloatArray, g: int) -> FloatArray:
        """Amount of a group that fits into what is left, beside whole groups."""
        groups = self._groups
        room = left_s - groups.open_s[g]
        if groups.inner_s[g] == 0.0:
            return np.where(room >= 0.0, groups.amount[g], 0.0)
        share: npt.NDArray[np.float64] = np.clip(room, 0.0, groups.inner_s[g])
        return share

    def _add(self, whole: tuple[int, ...], part: int, amount: float) -> bool:
        key = (whole, part)
        if key in self._seen:
            return False
        self._seen.add(key)
        column = self._solver.NumVar(0.0, self._solver.infinity(), "")
        self._solver.Objective().SetCoefficient(column, 1.0)
        for g in whole:
            self._rows[g].SetCoefficient(column, float(self._groups.amount[g]))
        if part >= 0:
            self._rows[part].SetCoefficient(column, amount)
        return True
