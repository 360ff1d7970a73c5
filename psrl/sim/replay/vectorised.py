"""The vectorised engine: the same times as SimPy, by advancing all stages of all ranks at once.

Which op waits for which message is known beforehand, so no event queue is needed: in each round
every worker whose next op has its message runs it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from psrl.core.plan.op_table import BACKWARD, FORWARD, RECOMPUTE
from psrl.core.samples.sample import FloatArray, IntArray

from .reduction import Reduction
from .work import ProgramWork

_ROUNDS_PER_REPORT = 64


@dataclass(frozen=True)
class ProgramTimes:
    """When the ops of a `ProgramWork` ran.

    Attributes:
        start_s, end_s: [P, n] in each stage's order.
        reduced_s: start and end of the gradient reduction, end of the optimizer step; None if
            none followed.
        stuck: (rank position, stage) of workers that wait forever.
    """

    start_s: FloatArray
    end_s: FloatArray
    reduced_s: tuple[float, float, float] | None
    stuck: tuple[tuple[int, int], ...] = ()


def replay(
    works: list[ProgramWork],
    num_stages: int,
    reduction: Reduction,
    coupled_ranks: int,
    on_ops: Callable[[int, float], None],
) -> list[ProgramTimes]:
    """Times of the programs of a phase, one after the other on each worker.

    Args:
        coupled_ranks: neighbouring ranks whose k-th ops begin together.
        on_ops: told the number of ops that ran and the time reached.
    """
    now_s = np.zeros(num_stages * len(works[0].ranks)) if works else np.zeros(0)
    link_free_s = np.zeros((3, len(now_s)))
    found = []
    for work in works:
        times = _run(work, num_stages, now_s, link_free_s, coupled_ranks, on_ops)
        if work.is_update and not times.stuck:
            times = _reduce(work, times, now_s, reduction)
        found.append(times)
        if times.stuck:
            break
    return found


def _run(
    work: ProgramWork,
    num_stages: int,
    now_s: FloatArray,
    link_free_s: FloatArray,
    coupled_ranks: int,
    on_ops: Callable[[int, float], None],
) -> ProgramTimes:
    num_ranks, num_ops = len(work.ranks), work.kind.shape[1]
    stage_of = np.repeat(np.arange(num_stages), num_ranks)
    at = (np.arange(num_stages)[:, None] * num_ops + work.first_op[:-1]).ravel()
    end_at = (np.arange(num_stages)[:, None] * num_ops + work.first_op[1:]).ravel()
    kind, row, duration_s = work.kind.ravel(), work.row.ravel(), work.duration_s.ravel()
    arrival_s = _empty_inboxes(num_stages, len(work.num_tokens))
    start_s, end_s = np.empty(len(kind)), np.empty(len(kind))
    active = np.flatnonzero(at < end_at)
    rounds = ran = 0
    while len(active):
        op = at[active]
        k, r, s = kind[op], row[op], stage_of[active]
        came_s = arrival_s[k, s, r]
        ready = ~np.isnan(came_s)
        if coupled_ranks > 1:
            ready = ready.reshape(-1, coupled_ranks).all(axis=1).repeat(coupled_ranks)
        if not ready.any():
            break
        if not ready.all():
            op, k, r, s, came_s = op[ready], k[ready], r[ready], s[ready], came_s[ready]
            going = active[ready]
        else:
            going = active
        begin_s = np.maximum(now_s[going], came_s)
        if coupled_ranks > 1:
            begin_s = begin_s.reshape(-1, coupled_ranks).max(axis=1).repeat(coupled_ranks)
        finish_s = begin_s + duration_s[op]
        start_s[op], end_s[op], now_s[going] = begin_s, finish_s, finish_s
        target = s + np.where(k == FORWARD, 1, -1)
        sends = (k != RECOMPUTE) & (target >= 0) & (target < num_stages)
        k, r, target, sender = k[sends], r[sends], target[sends], going[sends]
        sent_s = finish_s[sends]
        queued_s = np.maximum(link_free_s[k, sender] - sent_s, 0.0)
        reached_s = sent_s + (queued_s + work.message_s[r])
        link_free_s[k, sender] = reached_s
        arrival_s[k, target, r] = reached_s
        at[going] += 1
        active = active[at[active] < end_at[active]]
        rounds, ran = rounds + 1, ran + len(going)
        if rounds % _ROUNDS_PER_REPORT == 0:
            on_ops(ran, float(now_s.max()))
            ran = 0
    on_ops(ran, float(now_s.max(initial=0.0)))
    stuck = tuple((int(w % num_ranks), int(w // num_ranks)) for w in active.tolist())
    shape = work.kind.shape
    return ProgramTimes(start_s.reshape(shape), end_s.reshape(shape), None, stuck)


def _empty_inboxes(num_stages: int, num_rows: int) -> FloatArray:
    """[3, P, M] arrival of each kind of message; NaN before it, -inf where none is needed."""
    arrival_s = np.full((3, num_stages, num_rows), np.nan)
    arrival_s[FORWARD, 0] = arrival_s[BACKWARD, -1] = arrival_s[RECOMPUTE] = -np.inf
    return arrival_s


def _reduce(
    work: ProgramWork, times: ProgramTimes, now_s: FloatArray, reduction: Reduction
) -> ProgramTimes:
    """The meeting after an update program, which all workers leave together."""
    last_start_s, last_end_s = last_ops(work, times.start_s, now_s.reshape(len(work.kind), -1))
    begin_s = float(now_s.max())
    reduced_s = begin_s + reduction.exposed_s(last_start_s, last_end_s)
    stepped_s = reduced_s + reduction.step_s
    now_s[:] = stepped_s
    return ProgramTimes(times.start_s, times.end_s, (begin_s, reduced_s, stepped_s))


def last_ops(
    work: ProgramWork, start_s: FloatArray, now_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """[P, K] start and end of each worker's last op; its arrival twice where it had none."""
    last: IntArray = work.first_op[1:] - 1
    has_ops = np.diff(work.first_op) > 0
    begin_s = np.where(has_ops, start_s[:, last], now_s) if start_s.shape[1] else now_s
    return begin_s, now_s.copy()
