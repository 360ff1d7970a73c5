"""The op table of a program as integer arrays, and each stage's order of it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from psrl.core.errors import PlanError
from psrl.core.samples.sample import IntArray

from .plan import Program
from .tables import Table

FORWARD, BACKWARD, RECOMPUTE = range(3)
OP_NAMES = np.array(["forward", "backward", "recompute"], np.str_)


def op_codes(names: np.ndarray) -> IntArray:
    """Codes of op names; -1 for any other name."""
    codes = np.full(len(names), -1, np.int64)
    for code, name in enumerate(OP_NAMES):
        codes[names == name] = code
    return codes


@dataclass(frozen=True)
class OpTable:
    """Ops of the last stage of R ranks: rank r owns `[first_op[r], first_op[r + 1])`.

    Attributes:
        kind: [n] FORWARD, BACKWARD or RECOMPUTE.
        row: [n] micro-batch of each op, as a row of the rank-sorted micro-batch table.
        first_op: [R + 1] offsets.
    """

    kind: IntArray
    row: IntArray
    first_op: IntArray

    @cached_property
    def rank(self) -> IntArray:
        return np.repeat(np.arange(len(self.first_op) - 1), np.diff(self.first_op))


def sorted_by_rank(table: Table) -> tuple[IntArray, IntArray]:
    """Row order of a table by rank (stable), and the rank of each of those rows."""
    order = np.argsort(table.rank, kind="stable")
    return order, table.rank[order]


def find_rows(program: Program, rank: IntArray, micro_batch: IntArray) -> IntArray:
    """Rows of (rank, micro-batch) in the rank-sorted micro-batch table; -1 where there is none."""
    order, owner = sorted_by_rank(program.micro_batches)
    number = program.micro_batches.micro_batch[order]
    width = int(max(number.max(initial=0), micro_batch.max(initial=0))) + 1
    keys, wanted = owner * width + number, rank * width + micro_batch
    by_key = np.argsort(keys, kind="stable")
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(keys[by_key], wanted), len(keys) - 1)
    found = by_key[at]
    return np.where((keys[found] == wanted) & (micro_batch >= 0), found, -1)


def op_table(program: Program, num_ranks: int | None = None) -> OpTable:
    """The last stage's ops of all ranks.

    Args:
        num_ranks: None if the program is that of one rank, whichever it is.

    Raises:
        PlanError: if an op has an unknown kind or names no micro-batch.
    """
    order, rank = sorted_by_rank(program.schedule)
    kind = op_codes(program.schedule.op[order])
    row = find_rows(program, rank, program.schedule.micro_batch[order])
    bad = np.flatnonzero((kind < 0) | (row < 0))
    if len(bad):
        at = order[bad[0]]
        raise PlanError(
            f"rank {int(program.schedule.rank[at])} runs {program.schedule.op[at]} of micro-batch "
            f"{int(program.schedule.micro_batch[at])}, which the plan does not define",
            "check_plan says which rule the plan breaks",
        )
    if num_ranks is None:
        return OpTable(kind, row, np.array([0, len(rank)]))
    return OpTable(kind, row, np.searchsorted(rank, np.arange(num_ranks + 1)))


def stage_order(ops: OpTable, is_update: bool, num_stages: int, stage: int) -> IntArray:
    """[n] the ops in the order of a stage, rank by rank: `stage_ops` for all ranks.

    A stage runs P - 1 - stage forwards more than the last one before each backward.
    """
    if not is_update:
        return np.arange(len(ops.kind))
    is_forward = ops.kind == FORWARD
    before = np.concatenate([[0], np.cumsum(is_forward)])
    forwards_before = before[:-1] - before[ops.first_op[ops.rank]]
    num_forwards = np.diff(before[ops.first_op])[ops.rank]
    ahead = np.minimum(forwards_before + (num_stages - 1 - stage), num_forwards)
    # The i-th forward follows every backward that needs at most i forwards.
    key = np.where(is_forward, 2 * forwards_before + 1, 2 * ahead)
    order: IntArray = np.lexsort((key, ops.rank))
    return order
