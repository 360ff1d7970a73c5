"""Generalised one-forward-one-backward schedules of one data-parallel rank.

A schedule is the op list of the *last* pipeline stage. Stage s of P runs P - 1 - s forwards
ahead of it before each backward; a child's backward always precedes its ancestors'. Plain 1F1B
is the special case without cached prefixes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    stages = [
        _StageClock.of(ops, stage, len(ops_by_stage), duration_s)
        for stage, ops in enumerate(ops_by_stage)
    ]
    window = len(max(ops_by_stage, key=len, default=())) if send_window is None else send_window
    progress = True
    while progress:
        progress = False
        for stage in stages:
            while stage.at < len(stage.steps) and stage.advance(stages, message_s, window):
                progress = True
            progress |= stage.told
            stage.told = False
    if any(stage.at < len(stage.steps) for stage in stages):
        return None
    return PipelineTiming([s.start_s for s in stages], [s.end_s for s in stages])


class _Step(NamedTuple):
    """An op with the stages that it hears from and tells; None if it does neither."""

    direction: int
    micro_batch: int
    duration_s: float
    source: int | None
    target: int | None


@dataclass
class _StageClock:
    """A stage on its way through its ops.

    Attributes:
        at, has_run: the op that is under way, and whether it only waits for its send.
        now_s: time of the stage.
        told: other stages may go on, since a message or a receive is new.
        sent, posted, sends: per direction, when a micro-batch's message arrives, when its receive
            was posted, and the micro-batches in the order of their sends.
    """

    steps: list[_Step]
    at: int = 0
    has_run: bool = False
    now_s: float = 0.0
    told: bool = False
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    sent: tuple[dict[int, float], dict[int, float]] = field(default_factory=lambda: ({}, {}))
    posted: tuple[dict[int, float], dict[int, float]] = field(default_factory=lambda: ({}, {}))
    sends: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    @classmethod
    def of(
        cls,
        ops: Sequence[Op],
        stage: int,
        num_stages: int,
        duration_s: Callable[[int, Op], float],
    ) -> "_StageClock":
        before = stage - 1 if stage > 0 else None
        after = stage + 1 if stage + 1 < num_stages else None
        steps = []
        for op in ops:
            source, target = (after, before) if op.kind == "backward" else (before, after)
            if op.kind == "recompute":
                source = target = None
            direction = int(op.kind == "backward")
            steps.append(_Step(direction, op.micro_batch, duration_s(stage, op), source, target))
        return cls(steps)

    def advance(
        self, stages: "list[_StageClock]", message_s: Callable[[int], float], window: int
    ) -> bool:
        """Finish the op under way; False if it must wait for another stage."""
        direction, micro_batch, duration_s, source, target = self.steps[self.at]
        if not self.has_run:
            if source is not None:
                if micro_batch not in self.posted[direction]:
                    self.posted[direction][micro_batch] = self.now_s
                    self.told = True
                arrival_s = stages[source].sent[direction].get(micro_batch)
                if arrival_s is None:
                    return False
                self.now_s = max(self.now_s, arrival_s)
            self.start_s.append(self.now_s)
            self.now_s += duration_s
            self.end_s.append(self.now_s)
            if target is not None:
                self.sends[direction].append(micro_batch)
                self.sent[direction][micro_batch] = self.now_s + message_s(micro_batch)
                self.told = True
            self.has_run = True
        if target is not None and len(self.sends[direction]) > window:
            oldest = self.sends[direction][-1 - window]
            posted_s = stages[target].posted[direction].get(oldest)
            if posted_s is None:
                return False
            self.now_s = max(self.now_s, posted_s)
        self.has_run = False
        self.at += 1
        return True
