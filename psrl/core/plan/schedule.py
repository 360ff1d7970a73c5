"""Generalised one-forward-one-backward schedules of one data-parallel rank.

A schedule is the op list of the *last* pipeline stage. Stage s of P runs P - 1 - s forwards
ahead of it before each backward; a child's backward always precedes its ancestors'. Plain 1F1B
is the special case without cached prefixes.
"""

from collections.abc import Callable, Sequence
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


def can_finish(ops_by_stage: Sequence[Sequence[Op]], send_window: int = 1) -> bool:
    """Whether all stages get to the end of their op lists, however long ops and messages take.

    Here a receive is posted only when its op comes up, and a sender waits until the message
    `send_window` sends earlier in that direction has met its receive; 0 is a blocking send. A
    window of 1 is harder than `psrl.core.plan.clock`, which posts receives one ahead and lets
    more messages wait: whatever waits there for a message waits here for it or for a later op, so
    op lists that finish here finish there, and in `psrl.backend.train.pipe` too.
    """
    num_stages = len(ops_by_stage)
    at, has_run = [0] * num_stages, [False] * num_stages
    sent: set[tuple[int, Op]] = set()
    posted: set[tuple[int, Op]] = set()
    sends: dict[tuple[int, OpKind], list[Op]] = {}

    def advance(stage: int) -> bool:
        """Finish the op that is under way; False if it must wait for another stage."""
        op = ops_by_stage[stage][at[stage]]
        step = {"forward": 1, "backward": -1, "recompute": 0}[op.kind]
        source, target = stage - step, stage + step
        if not has_run[stage]:
            if step and 0 <= source < num_stages:
                posted.add((stage, op))
                if (source, op) not in sent:
                    return False
            has_run[stage] = True
            sent.add((stage, op))
            sends.setdefault((stage, op.kind), []).append(op)
        mine = sends[stage, op.kind]
        is_full = step and 0 <= target < num_stages and len(mine) > send_window
        if is_full and (target, mine[-1 - send_window]) not in posted:
            return False
        has_run[stage] = False
        at[stage] += 1
        return True

    while True:
        before = sum(at), len(sent), len(posted)
        for stage, ops in enumerate(ops_by_stage):
            while at[stage] < len(ops) and advance(stage):
                pass
        if (sum(at), len(sent), len(posted)) == before:
            return all(at[stage] == len(ops) for stage, ops in enumerate(ops_by_stage))
