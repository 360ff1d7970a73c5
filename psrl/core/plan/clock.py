"""The clock: when each op of a pipeline runs. Planner, `check_plan` and simulator share this rule.

A worker is a stage of a data-parallel rank and runs its ops in order.

* A message goes from the end of an op to the next stage's op on the same micro-batch, for a
  backward to the stage before. It starts once it has been sent and its receive is posted, lasts
  `message_s`, and is taken by its op when both are there.
* A receive is posted when the message before it in its direction has been taken, the first one
  when the worker begins the program (`RECEIVE_AHEAD` is 1). So a link carries one message at a
  time in each direction, in order, and the two directions do not meet.
* After it has sent a message a worker goes on once the one `SEND_WINDOW` messages before it in
  that direction has arrived, and it leaves a program once all its messages have arrived.
* Ranks that share experts begin each op together, when all of them have taken their messages; it
  lasts as long as the slowest of them.
* The programs of a phase run one after the other on each worker. An update ends with a meeting of
  all workers, the gradient reduction and the optimizer step.

`psrl.backend.train.pipe` runs these rules; the SimPy engine says them again in processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from psrl.core.errors import PlanError
from psrl.core.samples.sample import FloatArray, IntArray

from .op_table import BACKWARD, FORWARD

SEND_WINDOW = 2
"""Messages per direction that a worker may have under way when it goes on."""
RECEIVE_AHEAD = 1
"""Receives per direction that are posted before they are needed; the recurrence assumes 1."""

_ROUNDS_PER_REPORT = 64


@dataclass(frozen=True)
class ProgramOps:
    """What P stages of K ranks run in one program: n ops per stage, M micro-batches.

    Attributes:
        is_update: whether a gradient reduction and an optimizer step follow.
        first_op: [K + 1] rank k owns the ops `[first_op[k], first_op[k + 1])` of each stage.
        kind, row: [P, n] what each stage runs, in order, and on which micro-batch.
        duration_s: [P, n] of each op by itself.
        message_s: [M] time of a micro-batch's message between neighbouring stages.
    """

    is_update: bool
    first_op: IntArray
    kind: IntArray
    row: IntArray
    duration_s: FloatArray
    message_s: FloatArray

    @property
    def num_ops(self) -> int:
        return int(self.kind.size)


@dataclass(frozen=True)
class Reduction:
    """What follows the ops of an update: the gradient reduction, then the optimizer step."""

    reduction_s: float
    step_s: float

    def exposed_s(self, start_s: FloatArray, end_s: FloatArray) -> float:
        """Time from the arrival of the last worker to the end of the reduction.

        Args:
            start_s, end_s: [P, K] last op of each worker; when it begins, twice, without ops.
        """
        return self.reduction_s


@dataclass(frozen=True)
class ProgramTimes:
    """When the ops of a program ran.

    Attributes:
        taken_s, start_s, end_s: [P, n] in each stage's order: when the op has its message, begins
            and ends; only ranks that share experts begin later than they could.
        reduced_s: start and end of the gradient reduction, end of the optimizer step; None if
            none followed.
        stuck: (position of the rank, stage) of workers that wait forever.
    """

    taken_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    reduced_s: tuple[float, float, float] | None = None
    stuck: tuple[tuple[int, int], ...] = ()

    @property
    def last_s(self) -> float:
        """End of all that ran."""
        if self.reduced_s is not None:
            return self.reduced_s[-1]
        return float(self.end_s.max(initial=0.0))


def phase_times(
    programs: Sequence[ProgramOps],
    reduction: Reduction,
    coupled_ranks: int = 1,
    on_ops: Callable[[int, float], None] = lambda num_ops, now_s: None,
) -> list[ProgramTimes]:
    """Times of the programs of a phase; a program in which a worker is stuck is the last one.

    Args:
        coupled_ranks: neighbouring ranks that share experts.
        on_ops: told the number of ops that ran and the time reached.
    """
    begin_s = np.zeros(0)
    found: list[ProgramTimes] = []
    for program in programs:
        num_stages, num_ranks = len(program.kind), len(program.first_op) - 1
        if not found:
            begin_s = np.zeros((num_stages, num_ranks))
        duration_s = _of_slowest(program, coupled_ranks)
        if num_stages == 1:
            times = _run_alone(program, duration_s, begin_s, on_ops)
            arrived_s = begin_s
        else:
            times, arrived_s = _run(program, duration_s, begin_s, coupled_ranks, on_ops)
        if not times.stuck:
            last = program.first_op[1:] - 1
            has_ops = np.diff(program.first_op) > 0
            last_end_s = _where_ops(has_ops, times.end_s, last, begin_s)
            if program.is_update:
                last_start_s = _where_ops(has_ops, times.start_s, last, begin_s)
                meet_s = float(last_end_s.max())
                reduced_s = meet_s + reduction.exposed_s(last_start_s, last_end_s)
                stepped_s = reduced_s + reduction.step_s
                times = replace(times, reduced_s=(meet_s, reduced_s, stepped_s))
                begin_s = np.full_like(begin_s, stepped_s)
            else:
                begin_s = np.maximum(last_end_s, arrived_s)
        found.append(times)
        if times.stuck:
            break
    return found


def _where_ops(
    has_ops: np.ndarray, times_s: FloatArray, op: IntArray, otherwise_s: FloatArray
) -> FloatArray:
    """[P, K] times of one op of each worker, or what else holds for those without ops."""
    return np.where(has_ops, times_s[:, op], otherwise_s) if times_s.size else otherwise_s


def _of_slowest(program: ProgramOps, coupled_ranks: int) -> FloatArray:
    """[P, n] durations of ops of ranks that share experts: those of the slowest."""
    if coupled_ranks == 1:
        return program.duration_s
    slowest, first_op = program.duration_s.copy(), program.first_op.tolist()
    for leader in range(0, len(first_op) - 1, coupled_ranks):
        bounds = first_op[leader : leader + coupled_ranks + 1]
        if len({end - first for first, end in pairwise(bounds)}) > 1:
            raise PlanError(
                f"ranks {leader}..{leader + coupled_ranks - 1} share experts but run different "
                "numbers of ops",
                "check_plan says which rule the plan breaks",
            )
        mine = slice(bounds[0], bounds[-1])
        each = slowest[:, mine].reshape(len(slowest), coupled_ranks, -1)
        each[:] = each.max(axis=1, keepdims=True)
        slowest[:, mine] = each.reshape(len(slowest), -1)
    return slowest


def _run_alone(
    program: ProgramOps,
    duration_s: FloatArray,
    begin_s: FloatArray,
    on_ops: Callable[[int, float], None],
) -> ProgramTimes:
    """The recurrence on one stage: without messages an op begins when the one before it ends.

    Ranks that share experts need no meeting: they begin together, and their ops last equally long.
    """
    start_s, end_s = np.empty_like(duration_s), np.empty_like(duration_s)
    first_op = program.first_op.tolist()
    for rank, (first, end) in enumerate(pairwise(first_op)):
        times_s = np.add.accumulate(np.append(begin_s[0, rank], duration_s[0, first:end]))
        start_s[0, first:end], end_s[0, first:end] = times_s[:-1], times_s[1:]
    on_ops(program.num_ops, float(end_s.max(initial=0.0)))
    return ProgramTimes(start_s, start_s, end_s)


class Waits(NamedTuple):
    """What each of N ops waits for: places of ops, or N + w for the begin of worker w.

    Attributes:
        before: the op before it on its worker must have ended.
        source, posted, message_s: the message that it takes starts once `source` has ended and
            `posted` has taken its message.
        sent, sent_posted, sent_message_s: the same of the message that must have arrived before
            the worker goes on. Without a message the three say nothing beyond `before`.
    """

    before: IntArray
    source: IntArray
    posted: IntArray
    message_s: FloatArray
    sent: IntArray
    sent_posted: IntArray
    sent_message_s: FloatArray


def waits_of(program: ProgramOps) -> Waits:
    """What the ops of a program wait for, beside the other ranks of their group."""
    (num_stages, num_ops), num_ranks = program.kind.shape, len(program.first_op) - 1
    kind, row, total = program.kind.ravel(), program.row.ravel(), program.kind.size
    stage = np.repeat(np.arange(num_stages), num_ops)
    rank = np.repeat(np.arange(num_ranks), np.diff(program.first_op))
    worker = (np.arange(num_stages)[:, None] * num_ranks + rank).ravel()
    begin = total + worker
    place = np.arange(total)
    follows = np.zeros(total, np.bool_)  # another op of its worker
    follows[1:] = worker[1:] == worker[:-1]
    before = np.where(follows, place - 1, begin)
    source, posted = before.copy(), begin.copy()
    message_s = np.zeros(total)
    sent, sent_posted, sent_message_s = before.copy(), begin.copy(), np.zeros(total)
    windows = []
    for code, step in ((FORWARD, 1), (BACKWARD, -1)):
        mine = np.flatnonzero(kind == code)
        place_of = np.zeros((num_stages, len(program.message_s)), np.int64)
        place_of[stage[mine], row[mine]] = mine
        same = worker[mine[1:]] == worker[mine[:-1]]
        posted[mine[1:][same]] = mine[:-1][same]
        neighbour = stage[mine] - step
        takes = mine[(neighbour >= 0) & (neighbour < num_stages)]
        source[takes] = place_of[stage[takes] - step, row[takes]]
        message_s[takes] = program.message_s[row[takes]]
        # A sender, and the one whose message must have arrived before its worker goes on.
        sender, awaited = mine[SEND_WINDOW:], mine[: -SEND_WINDOW or None]
        neighbour = stage[sender] + step
        keep = (worker[sender] == worker[awaited]) & (neighbour >= 0) & (neighbour < num_stages)
        keep &= np.append(follows, False)[sender + 1]
        sender, awaited = sender[keep], awaited[keep]
        windows.append((sender + 1, awaited, place_of[stage[awaited] + step, row[awaited]]))
    for op, awaited, receiver in windows:
        sent[op], sent_posted[op] = awaited, posted[receiver]
        sent_message_s[op] = program.message_s[row[awaited]]
    return Waits(before, source, posted, message_s, sent, sent_posted, sent_message_s)


def _run(
    program: ProgramOps,
    duration_s: FloatArray,
    begin_s: FloatArray,
    coupled_ranks: int,
    on_ops: Callable[[int, float], None],
) -> tuple[ProgramTimes, FloatArray]:
    """The recurrence: in each round every worker whose next op knows its times runs it.

    Returns: times, and [P, K] when the last message of each worker has arrived.
    """
    (num_stages, num_ops), total = program.kind.shape, program.kind.size
    waits, duration_s = waits_of(program), duration_s.ravel()
    # When each op, and behind them each worker's begin, has ended and has taken its message; NaN
    # as long as that is not known. [5, N] an op takes its message at the largest of these times,
    # each so much later.
    nodes = total + begin_s.size
    known_s = np.full(2 * nodes, np.nan)
    ended_s, taken_s = known_s[:nodes], known_s[nodes:]
    ended_s[total:] = taken_s[total:] = begin_s.ravel()
    start_s = taken_s if coupled_ranks == 1 else np.empty(total)
    needs = np.stack(
        [waits.before, waits.source, waits.posted + nodes, waits.sent, waits.sent_posted + nodes]
    )
    message_s, sent_message_s = waits.message_s, waits.sent_message_s
    later_s = np.stack([np.zeros(total), message_s, message_s, sent_message_s, sent_message_s])
    first = np.arange(num_stages)[:, None] * num_ops
    begin_at, end_at = ((first + f).ravel() for f in (program.first_op[:-1], program.first_op[1:]))
    busy = begin_at < end_at
    op, end_op = begin_at[busy], end_at[busy]
    rounds = ran = 0
    while len(op):
        wait_s = known_s.take(needs.take(op, axis=1))
        wait_s += later_s.take(op, axis=1)
        begins_s = np.maximum.reduce(wait_s)
        taken_s[op] = begins_s
        if coupled_ranks > 1:
            begins_s = begins_s.reshape(-1, coupled_ranks).max(axis=1).repeat(coupled_ranks)
            start_s[op] = begins_s
        ended_s[op] = ends_s = begins_s + duration_s.take(op)
        ready = begins_s == begins_s
        num_ready = int(np.count_nonzero(ready))
        if not num_ready:
            break
        rounds, ran = rounds + 1, ran + num_ready
        if rounds % _ROUNDS_PER_REPORT == 0:
            on_ops(ran, float(np.fmax.reduce(ends_s)))
            ran = 0
        op += ready
        finished = op == end_op
        if np.count_nonzero(finished):
            op, end_op = op[~finished], end_op[~finished]
    on_ops(ran, float(np.fmax.reduce(ended_s[:total], initial=0.0)))
    rank_of = np.repeat(np.arange(begin_s.shape[1]), np.diff(program.first_op))
    stuck = tuple((int(rank_of[i % num_ops]), i // num_ops) for i in op.tolist())
    arrived_s = begin_s.ravel().copy()
    if not (stuck or program.is_update):
        came_s = np.maximum(ended_s[waits.source], taken_s[waits.posted]) + message_s
        workers = np.arange(begin_s.size)
        worker = np.append(np.repeat(workers, end_at - begin_at), workers)
        np.maximum.at(arrived_s, worker[waits.source], came_s)
    shape = num_stages, num_ops
    times = ProgramTimes(
        taken_s[:total].reshape(shape),
        start_s[:total].reshape(shape),
        ended_s[:total].reshape(shape),
        stuck=stuck,
    )
    return times, arrived_s.reshape(begin_s.shape)


def check_finished(stuck: Sequence[tuple[int, int]], num_workers: int) -> None:
    """Refuse times of op lists in which some workers wait forever.

    Args:
        stuck: (rank, stage) of these workers.
    """
    if stuck:
        rank, stage = min(stuck)
        raise PlanError(
            f"{len(stuck)} of {num_workers} pipeline stages wait forever, the first is stage "
            f"{stage} of rank {rank}",
            "check_plan says which rule the plan breaks",
        )
