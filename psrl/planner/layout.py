"""Samples on ranks, what they share, and the pieces of their tree that a rank computes."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from psrl.core.loss_rows import LossRows, loss_rows
from psrl.core.prefix_tree import PrefixTree, build_prefix_tree
from psrl.core.sample import IntArray

from .problem import PlanningProblem, ProgramProblem


@dataclass(frozen=True, eq=False)
class Layout:
    """Samples on ranks, and which of them share: what the segments of a program refer to.

    Attributes:
        rank: [S] rank of each sample of the program.
        share_key: [S] samples share only with samples of the same key.
        granularity_tokens: prefixes are shared in whole blocks of this many tokens.
    """

    target: ProgramProblem
    rank: IntArray
    share_key: IntArray
    granularity_tokens: int = 1

    @property
    def problem(self) -> PlanningProblem:
        return self.target.problem

    @cached_property
    def _shares_everything(self) -> bool:
        return self.granularity_tokens == 1 and not self.share_key.any()

    @cached_property
    def tree(self) -> PrefixTree:
        if self._shares_everything:
            return self.target.tree
        return build_prefix_tree(self.target.samples, self.share_key, self.granularity_tokens)

    @cached_property
    def loss_rows(self) -> LossRows:
        if self._shares_everything:
            return self.target.loss_rows
        return loss_rows(self.tree, self.target.samples)

    def nodes_of(self, rank: int) -> IntArray:
        """Nodes that a rank's samples need, ascending."""
        tree = self.tree
        mine = self.rank[tree.sample_order] == rank
        before = np.concatenate([[0], np.cumsum(mine)])
        through = before[tree.first_sample + tree.samples_through] - before[tree.first_sample]
        needed = through > 0
        needed[0] = False
        return np.flatnonzero(needed)


class Pieces(NamedTuple):
    """Segments of one rank: tokens `[start_depth, start_depth + num_tokens)` of `node`."""

    micro_batch: IntArray
    node: IntArray
    start_depth: IntArray
    num_tokens: IntArray


def piece_tree(tree: PrefixTree, pieces: Pieces) -> tuple[IntArray, IntArray]:
    """Depth-first order of a rank's pieces, and the place of each one's parent in it (-1: none)."""
    order = np.lexsort((pieces.start_depth, pieces.node))
    node = pieces.node[order]
    place = np.arange(len(order))
    opens = np.append(True, node[1:] != node[:-1]) if len(node) else np.empty(0, bool)
    above = tree.parent[node]
    last_of_parent = np.searchsorted(node, above, side="right") - 1
    return order, np.where(opens, np.where(above > 0, last_of_parent, -1), place - 1)
