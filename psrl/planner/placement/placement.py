"""Samples on ranks, what they share, and the segments of their tree that a rank computes."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import FloatArray, IntArray
from psrl.core.tree.loss_rows import LossRows, RankRows, loss_rows
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree
from psrl.core.tree.rank_nodes import nodes_of_ranks
from psrl.planner.problem import PlanningProblem, ProgramProblem


@dataclass(frozen=True, eq=False)
class Placement:
    """Samples on ranks, and which of them share: what the segments of a program refer to.

    Attributes:
        rank: [S] rank of each sample of the program.
        share_key: [S] samples share only with samples of the same key.
        granularity_tokens: prefixes are shared in whole blocks of this many tokens.
    """

    subproblem: ProgramProblem
    rank: IntArray
    share_key: IntArray
    granularity_tokens: int = 1

    @property
    def problem(self) -> PlanningProblem:
        return self.subproblem.problem

    @cached_property
    def _shares_everything(self) -> bool:
        return self.granularity_tokens == 1 and not self.share_key.any()

    @cached_property
    def tree(self) -> PrefixTree:
        if self._shares_everything:
            return self.subproblem.tree
        return build_prefix_tree(self.subproblem.samples, self.share_key, self.granularity_tokens)

    @cached_property
    def loss_rows(self) -> LossRows:
        if self._shares_everything:
            return self.subproblem.loss_rows
        return loss_rows(self.tree, self.subproblem.samples)

    @cached_property
    def _nodes(self) -> tuple[IntArray, IntArray]:
        """Nodes that the samples of each rank need, by rank, and where each rank's begin."""
        ranks, nodes = nodes_of_ranks(self.tree, self.rank)
        return nodes, np.searchsorted(ranks, np.arange(self.problem.num_ranks + 1))

    def nodes_of(self, rank: int) -> IntArray:
        """Nodes that a rank's samples need, ascending."""
        nodes, begins = self._nodes
        return nodes[begins[rank] : begins[rank + 1]]

    @cached_property
    def rank_rows(self) -> RankRows:
        """Distinct predicted rows of every rank."""
        return self.loss_rows.by_rank(self.rank, self.tree)

    @cached_property
    def _assigned(self) -> tuple[IntArray, IntArray]:
        order = np.argsort(self.rank, kind="stable")
        return order, np.searchsorted(self.rank[order], np.arange(self.problem.num_ranks + 1))

    def samples_of(self, rank: int) -> IntArray:
        """Samples on a rank, ascending."""
        order, begins = self._assigned
        return order[begins[rank] : begins[rank + 1]]


def shared_placement(subproblem: ProgramProblem, rank: IntArray) -> Placement:
    """All samples of a rank share."""
    return Placement(subproblem, rank, np.zeros(len(rank), np.int64))


def rank_work_s(placement: Placement) -> FloatArray:
    """[D] work of each rank, all phases, without fixed costs: no plan of it is faster."""
    tree, unit = placement.tree, placement.subproblem.unit_costs
    ranks, nodes = nodes_of_ranks(tree, placement.rank)
    pairs = visible_pairs(tree.start_depth, tree.num_tokens)
    node_s = unit.token_s * tree.num_tokens + unit.pair_s * pairs
    start = np.arange(placement.problem.num_ranks) * tree.unique_tokens
    rows = placement.rank_rows.union.count(start, start + tree.unique_tokens)
    shared = np.bincount(ranks, node_s[nodes], minlength=placement.problem.num_ranks)
    work_s: FloatArray = shared + unit.head_s * rows
    return work_s


class RankSegments(NamedTuple):
    """Segments of one rank: tokens `[start_depth, start_depth + num_tokens)` of `node`."""

    micro_batch: IntArray
    node: IntArray
    start_depth: IntArray
    num_tokens: IntArray
