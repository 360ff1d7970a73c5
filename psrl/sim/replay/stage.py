"""Pipeline stages as SimPy processes, the links between them, and where they meet."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
from simpy import Environment, Event

from psrl.core.cost.cluster import first_device
from psrl.core.plan.clock import SEND_WINDOW, Reduction
from psrl.core.plan.op_table import BACKWARD, FORWARD
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import FloatArray

from .work import ProgramWork

Message = tuple[int, int]
"""(program, micro-batch row): a link carries each once."""


class Port:
    """A network port that carries one message at a time."""

    def __init__(self) -> None:
        self.free_s = 0.0


class Link:
    """One direction between two neighbouring stages.

    A message starts when it has been sent and its receive is posted, whichever comes last.

    Args:
        port: network port that the message must also get, shared with other links.
        repeats: how often the port carries the message: once per tensor-parallel rank behind it.
    """

    def __init__(self, env: Environment, port: Port | None = None, repeats: int = 1) -> None:
        self._env = env
        self._port, self._repeats = port, repeats
        self._half: dict[Message, tuple[Event, float]] = {}

    def send(self, message: Message, duration_s: float) -> Event:
        """Start sending; the event is the message's arrival."""
        return self._meet(message, duration_s)

    def post(self, message: Message) -> Event:
        """Post a receive; the event is the message's arrival."""
        return self._meet(message, 0.0)

    def _meet(self, message: Message, duration_s: float) -> Event:
        """The second of sender and receiver starts the message."""
        if message not in self._half:
            self._half[message] = self._env.event(), duration_s
            return self._half[message][0]
        arrival, other_s = self._half.pop(message)
        lasts_s, now_s = max(duration_s, other_s) * self._repeats, self._env.now
        begin_s = now_s if self._port is None else max(now_s, self._port.free_s)
        if self._port is not None:
            self._port.free_s = begin_s + lasts_s
        started: Event = self._env.timeout(begin_s - now_s + lasts_s)
        assert started.callbacks is not None  # it has not happened yet
        started.callbacks.append(arrival.trigger)
        return arrival


class Meeting:
    """Point that several workers pass together, again and again.

    The event's value is the largest amount that a worker brought.
    """

    def __init__(self, env: Environment, num_workers: int) -> None:
        self._env = env
        self._num_workers = num_workers
        self._brought: list[float] = []
        self._complete = env.event()

    def arrive(self, amount: float = 0.0) -> Event:
        """The event that the last worker has arrived; the next arrival opens a new meeting."""
        complete = self._complete
        self._brought.append(amount)
        if len(self._brought) == self._num_workers:
            complete.succeed(self._outcome())
            self._brought, self._complete = [], self._env.event()
        return complete

    def _outcome(self) -> float:
        return max(self._brought)


class ReductionMeeting(Meeting):
    """The gradient reduction of all workers; its event's value is how long it lasts.

    Attributes:
        start_s, end_s: [P, K] last op of each worker, written before it arrives.
    """

    def __init__(
        self, env: Environment, num_stages: int, num_ranks: int, reduction: Reduction
    ) -> None:
        super().__init__(env, num_stages * num_ranks)
        self.reduction = reduction
        self.start_s: FloatArray = np.zeros((num_stages, num_ranks))
        self.end_s: FloatArray = np.zeros((num_stages, num_ranks))

    def _outcome(self) -> float:
        return self.reduction.exposed_s(self.start_s, self.end_s)


@dataclass(frozen=True)
class StageWorker:
    """One stage of one rank (by its position among the simulated ranks).

    Attributes:
        receives, sends: the links of forward and backward ops; a missing kind has no neighbour.
        meeting: where the gradient reduction of an update program starts.
        group: where ranks that share experts begin each op together; None without them.
        taken_s, start_s, end_s: per program, of what has run so far.
        reduced_s: per update program: start and end of the reduction, end of the step.
    """

    env: Environment
    rank: int
    stage: int
    receives: dict[int, Link]
    sends: dict[int, Link]
    meeting: ReductionMeeting
    group: Meeting | None
    taken_s: list[list[float]] = field(default_factory=list)
    start_s: list[list[float]] = field(default_factory=list)
    end_s: list[list[float]] = field(default_factory=list)
    reduced_s: list[tuple[float, float, float]] = field(default_factory=list)

    def run(self, work: ProgramWork) -> Generator[Event, float, None]:
        """Run one program."""
        env, program, group = self.env, work.program, self.group
        taken_s: list[float] = []
        start_s: list[float] = []
        end_s: list[float] = []
        for times, mine_s in (self.taken_s, taken_s), (self.start_s, start_s), (self.end_s, end_s):
            times.append(mine_s)
        begin_s = env.now
        mine = slice(work.first_op[self.rank], work.first_op[self.rank + 1])
        kinds, rows = work.kind[self.stage, mine].tolist(), work.row[self.stage, mine].tolist()
        expected = {
            kind: deque((program, r) for k, r in zip(kinds, rows, strict=True) if k == kind)
            for kind in self.receives
        }
        posted: dict[int, Event] = {}
        under_way: dict[int, deque[Event]] = {kind: deque() for kind in self.sends}

        def post_next(kind: int) -> None:
            if expected[kind]:
                posted[kind] = self.receives[kind].post(expected[kind].popleft())

        for kind in self.receives:
            post_next(kind)
        durations_s = work.duration_s[self.stage, mine].tolist()
        for kind, row, duration_s in zip(kinds, rows, durations_s, strict=True):
            if kind in self.receives:
                yield posted[kind]
                post_next(kind)
            taken_s.append(env.now)
            if group is not None:
                duration_s = yield group.arrive(duration_s)
            start_s.append(env.now)
            yield env.timeout(duration_s)
            end_s.append(env.now)
            if kind in self.sends:
                arrival = self.sends[kind].send((program, row), float(work.message_s[row]))
                under_way[kind].append(arrival)
                if len(under_way[kind]) > SEND_WINDOW:
                    yield under_way[kind].popleft()
        last = (start_s[-1], end_s[-1]) if start_s else (begin_s, begin_s)
        for arrivals in under_way.values():
            yield from arrivals
        if work.is_update:
            yield from self._reduce(*last)

    def _reduce(self, last_start_s: float, last_end_s: float) -> Generator[Event, float, None]:
        env, meeting = self.env, self.meeting
        meeting.start_s[self.stage, self.rank] = last_start_s
        meeting.end_s[self.stage, self.rank] = last_end_s
        lasts_s = yield meeting.arrive()
        begin_s = env.now
        yield env.timeout(lasts_s)
        reduced_s = env.now
        yield env.timeout(meeting.reduction.step_s)
        self.reduced_s.append((begin_s, reduced_s, env.now))


def pipeline_workers(
    env: Environment,
    num_stages: int,
    num_ranks: int,
    meeting: ReductionMeeting,
    coupled_ranks: int,
    port_of: Callable[[int, int, int], tuple[Port | None, int]],
) -> list[StageWorker]:
    """All stages of all ranks, rank by rank, with a link per direction and pair of neighbours.

    Args:
        coupled_ranks: neighbouring ranks that begin each op together.
        port_of: shared port of messages from a stage of a rank to another stage, and how often
            it carries each.
    """
    groups: dict[tuple[int, int], Meeting] = {}
    workers = []
    for rank in range(num_ranks):
        forward = [Link(env, *port_of(rank, s, s + 1)) for s in range(num_stages - 1)]
        backward = [Link(env, *port_of(rank, s + 1, s)) for s in range(num_stages - 1)]
        for stage in range(num_stages):
            receives, sends = {}, {}
            if stage > 0:
                receives[FORWARD], sends[BACKWARD] = forward[stage - 1], backward[stage - 1]
            if stage < num_stages - 1:
                sends[FORWARD], receives[BACKWARD] = forward[stage], backward[stage]
            group = None
            if coupled_ranks > 1:
                key = stage, rank // coupled_ranks
                group = groups.setdefault(key, Meeting(env, coupled_ranks))
            workers.append(StageWorker(env, rank, stage, receives, sends, meeting, group))
    return workers


class SharedPorts:
    """Which network port the messages between two stages of a rank pass (`first_device`).

    Args:
        nics_per_host: ports that the devices of a host share in equal runs.
    """

    def __init__(self, plan: Plan, nics_per_host: int) -> None:
        self._per_host = plan.cluster.devices_per_host
        self._per_nic = self._per_host // nics_per_host
        self._parallel = plan.parallel
        self._ports: dict[int, Port] = {}

    def port_of(self, rank: int, stage: int, target: int) -> tuple[Port | None, int]:
        """The port of the sending host, or None inside a host; how often it carries a message."""
        device, other = (first_device(self._parallel, rank, s) for s in (stage, target))
        if device // self._per_host == other // self._per_host:
            return None, 1
        port = self._ports.setdefault(device // self._per_nic, Port())
        return port, min(self._parallel.tensor_model_parallel_size, self._per_nic)
