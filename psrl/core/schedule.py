"""Generalised one-forward-one-backward schedules of one data-parallel rank.

A schedule is the op list of the *last* pipeline stage. Stage s of P runs P - 1 - s forwards
ahead of it before each backward; a child's backward always precedes its ancestors'. Plain 1F1B
is the special case without cached prefixes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

OpKind = Literal["forward", "backward", "recompute"]


class Op(NamedTuple):
    """One step of a stage: what runs, on which micro-batch."""

    kind: OpKind
    micro_batch: int


def forward_needs(forward_order: Sequence[int], backward_order: Sequence[int]) -> list[int]:
    """Forwards that must precede the k-th backward on the last stage, non-decreasing in k."""
    position = {micro_batch: i for i, micro_batch in enumerate(forward_order)}
    needs, most = [], 0
    for micro_batch in backward_order:
        most = max(most, position[micro_batch] + 1)
        needs.append(most)
    return needs


def eager_backward_order(forward_order: Sequence[int], readers: Sequence[set[int]]) -> list[int]:
    """Run each backward as soon as every reader of the micro-batch has run its own.

    Among several ready ones the one forwarded last goes first: it frees the deepest prefix.
    `readers[m]` are the micro-batches that read keys cached by m.
    """
    waiting: list[int] = []
    done: set[int] = set()
    order: list[int] = []
    for micro_batch in forward_order:
        waiting.append(micro_batch)
        while waiting:
            ready = next((m for m in reversed(waiting) if readers[m] <= done), None)
            if ready is None:
                break
            waiting.remove(ready)
            done.add(ready)
            order.append(ready)
    return order


def fill_counts(
    forward_order: Sequence[int],
    backward_order: Sequence[int],
    held_size: Callable[[int], float],
    budget: float | None = None,
) -> list[int]:
    """Forwards before the k-th backward on the last stage: as many as the budget holds.

    Running only what each backward needs drains the pipeline after every subtree; filling up to
    the peak that the needs force anyway costs no memory.

    Args:
        held_size: what a micro-batch occupies between its forward and its backward.
        budget: limit of the held sum; default the peak that `forward_needs` forces.
    """
    needs, total = forward_needs(forward_order, backward_order), len(forward_order)
    forwarded, freed = [0.0], [0.0]
    for micro_batch in forward_order:
        forwarded.append(forwarded[-1] + held_size(micro_batch))
    for micro_batch in backward_order:
        freed.append(freed[-1] + held_size(micro_batch))
    forced = max((forwarded[n] - freed[k] for k, n in enumerate(needs)), default=0.0)
    limit = forced if budget is None else max(budget, forced)
    counts, count = [], 0
    for k, need in enumerate(needs):
        count = max(count, need)
        while count < total and forwarded[count + 1] - freed[k] <= limit:
            count += 1
        counts.append(count)
    return counts


def interleave(
    forward_order: Sequence[int],
    backward_order: Sequence[int],
    counts: Sequence[int],
    dropped: frozenset[int] = frozenset(),
) -> list[Op]:
    """Op list in which `counts[k]` forwards precede the k-th backward."""
    ops: list[Op] = []
    done = 0
    for micro_batch, count in zip(backward_order, counts, strict=True):
        for waiting in forward_order[done:count]:
            ops.append(Op("forward", waiting))
        done = max(done, count)
        if micro_batch in dropped:
            ops.append(Op("recompute", micro_batch))
        ops.append(Op("backward", micro_batch))
    ops += [Op("forward", m) for m in forward_order[done:]]
    return ops


def stage_ops(last_stage: Sequence[Op], num_stages: int, stage: int) -> list[Op]:
    """Op list of one stage, derived from the last stage's."""
    ahead = num_stages - 1 - stage
    forward_order = [op.micro_batch for op in last_stage if op.kind == "forward"]
    backward_order = [op.micro_batch for op in last_stage if op.kind == "backward"]
    dropped = frozenset(op.micro_batch for op in last_stage if op.kind == "recompute")
    if not backward_order:
        return list(last_stage)
    counts, seen = [], 0
    for op in last_stage:
        if op.kind == "forward":
            seen += 1
        elif op.kind == "backward":
            counts.append(min(len(forward_order), seen + ahead))
    return interleave(forward_order, backward_order, counts, dropped)


@dataclass(frozen=True)
class PipelineTiming:
    """Start and end of every op of every stage, and the time at which the last one ends."""

    start_s: list[list[float]]
    end_s: list[list[float]]

    @property
    def makespan_s(self) -> float:
        return max((ends[-1] for ends in self.end_s if ends), default=0.0)


def pipeline_timing(
    ops_by_stage: Sequence[Sequence[Op]],
    duration_s: Callable[[int, Op], float],
    message_s: Callable[[int], float],
    send_window: int | None = None,
) -> PipelineTiming | None:
    """Times of a pipeline's ops, or None if the op lists deadlock.

    Args:
        duration_s: time of an op on a stage.
        message_s: time of a micro-batch's message between neighbouring stages.
        send_window: a send waits until the message `send_window` sends earlier in the same
            direction has met its receive; 0 is a blocking rendezvous, None never waits.
    """
    num_stages = len(ops_by_stage)
    steps = [_stage_steps(ops, s, num_stages) for s, ops in enumerate(ops_by_stage)]
    cursor = [0] * num_stages
    now = [0.0] * num_stages
    sent: dict[tuple[str, int, int], float] = {}
    posted: dict[tuple[str, int, int], float] = {}
    sends: dict[tuple[str, int], list[int]] = {}
    starts: list[list[float]] = [[] for _ in steps]
    ends: list[list[float]] = [[] for _ in steps]
    progress = True
    while progress:
        progress = False
        for s, todo in enumerate(steps):
            while cursor[s] < len(todo):
                action, op, peer = todo[cursor[s]]
                direction = "backward" if op.kind == "backward" else "forward"
                mine, theirs = (direction, s, op.micro_batch), (direction, peer, op.micro_batch)
                if action == "run":
                    starts[s].append(now[s])
                    now[s] += duration_s(s, op)
                    ends[s].append(now[s])
                elif action == "send":
                    queue = sends.setdefault((direction, s), [])
                    if mine not in sent:
                        queue.append(op.micro_batch)
                        sent[mine] = now[s] + message_s(op.micro_batch)
                        progress = True
                    if send_window is not None and len(queue) > send_window:
                        oldest = (direction, peer, queue[len(queue) - 1 - send_window])
                        if oldest not in posted:
                            break
                        now[s] = max(now[s], posted[oldest])
                else:
                    if mine not in posted:
                        posted[mine] = now[s]
                        progress = True
                    if theirs not in sent:
                        break
                    now[s] = max(now[s], sent[theirs])
                cursor[s] += 1
                progress = True
    if any(at < len(todo) for at, todo in zip(cursor, steps, strict=True)):
        return None
    return PipelineTiming(starts, ends)


def _stage_steps(ops: Sequence[Op], stage: int, num_stages: int) -> list[tuple[str, Op, int]]:
    """Receives, runs and sends of a stage in program order, each with its peer stage."""
    steps: list[tuple[str, Op, int]] = []
    for op in ops:
        source, target = stage - 1, stage + 1
        if op.kind == "backward":
            source, target = target, source
        exchanges = op.kind != "recompute"
        if exchanges and 0 <= source < num_stages:
            steps.append(("receive", op, source))
        steps.append(("run", op, stage))
        if exchanges and 0 <= target < num_stages:
            steps.append(("send", op, target))
    return steps
