"""Which ops and messages decide the time of ranks in step: back from the op that ends last.

Each step asks which of the waits of `psrl.core.plan.clock` was the last to end: the op before it
on its worker, the op that sent its message, or a message that kept the link or the send window
busy.
"""

from typing import NamedTuple

import numpy as np

from psrl.core.plan.clock import ProgramOps, ProgramTimes, waits_of
from psrl.core.plan.op_table import OP_NAMES


class StageOp(NamedTuple):
    """An op on a pipeline stage of a rank, by its position among the ranks."""

    rank: int
    stage: int
    op: str
    row: int


class CriticalPath(NamedTuple):
    """The ops that decide the time, in order, and where the time goes."""

    steps: tuple[StageOp, ...]
    op_s: dict[str, float]
    message_s: float

    @property
    def time_s(self) -> float:
        return sum(self.op_s.values()) + self.message_s


def critical_path(program: ProgramOps, times: ProgramTimes) -> CriticalPath:
    """The path of one program that begins at 0 and whose ranks all run in step."""
    waits, total = waits_of(program), program.num_ops
    num_stages, num_ops = program.kind.shape
    num_ranks = len(program.first_op) - 1
    each = num_ops // num_ranks
    kind, row = program.kind.ravel(), program.row.ravel()
    begin_s = np.zeros(num_stages * num_ranks)
    ended_s, taken_s = (np.append(t, begin_s) for t in (times.end_s, times.taken_s))
    messages = (
        (waits.source, waits.posted, waits.message_s),
        (waits.sent, waits.sent_posted, waits.sent_message_s),
    )
    steps: list[StageOp] = []
    op_s: dict[str, float] = {}
    message_s = 0.0
    at, ran = int(ended_s[:total].argmax()) if total else 0, True
    while at < total:
        if ran:
            stage, place = divmod(at, num_ops)
            name = str(OP_NAMES[kind[at]])
            steps.append(StageOp(place // each, stage, name, int(row[at])))
            op_s[name] = op_s.get(name, 0.0) + float(ended_s[at] - times.start_s[stage, place])
            # Of ranks in step the last one to take its message decides.
            together = stage * num_ops + place % each + each * np.arange(num_ranks)
            at = int(together[taken_s[together].argmax()])
        since_s, now_s = ended_s[waits.before[at]], taken_s[at]
        if since_s == now_s:
            at, ran = int(waits.before[at]), True
            continue
        for source, posted, lasts_s in messages:
            sent_s, free_s = ended_s[source[at]], taken_s[posted[at]]
            if max(sent_s, free_s) + lasts_s[at] == now_s:
                message_s += float(lasts_s[at])
                ran = bool(sent_s >= free_s)
                at = int((source if ran else posted)[at])
                break
        else:
            raise AssertionError(f"nothing explains why op {at} began at {now_s}")
    return CriticalPath(tuple(reversed(steps)), op_s, message_s)
