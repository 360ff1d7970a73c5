"""Pipeline stages as SimPy processes, the links between them, and where they meet."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
from simpy import Environment, Event

from psrl.core.cost.cluster import first_device
from psrl.core.plan.op_table import BACKWARD, FORWARD
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import FloatArray

from .reduction import Reduction
from .work import ProgramWork

Message = tuple[int, int]
"""(program, micro-batch row): a link carries each once."""


class Port:
    """A network port that carries one message at a time."""

    def __init__(self) -> None:
        self.free_s = 0.0


class Link:
    """One direction between two neighbouring stages: messages in order, one at a time.

    Args:
        port: network port that the message must also get, shared with other links.
        repeats: how often the port carries the message: once per tensor-parallel rank behind it.
    """

    def __init__(self, env: Environment, port: Port | None = None, repeats: int = 1) -> None:
        self._env = env
        self._own, self._port, self._repeats = Port(), port, repeats
        self._sent: dict[Message, Event] = {}
        self._awaited: dict[Message, Event] = {}

    def send(self, message: Message, duration_s: float) -> None:
        """Queue a message; the sender goes on at once."""
        ports = [self._own] if self._port is None else [self._own, self._port]
        duration_s *= self._repeats
        queued_s = max(max(port.free_s for port in ports) - self._env.now, 0.0)
        arrival: Event = self._env.timeout(queued_s + duration_s)
        for port in ports:
            port.free_s = self._env.now + (queued_s + duration_s)
        awaited = self._awaited.pop(message, None)
        if awaited is None:
            self._sent[message] = arrival
        else:
            assert arrival.callbacks is not None  # it has not happened yet
            arrival.callbacks.append(awaited.trigger)

    def receive(self, message: Message) -> Event:
        """The arrival of a message, sent already or not."""
        sent = self._sent.pop(message, None)
        if sent is not None:
            return sent
        return self._awaited.setdefault(message, self._env.event())


class Meeting:
    """Point that several workers pass together, again and again."""

    def __init__(self, env: Environment, num_workers: int) -> None:
        self._env = env
        self._num_workers = num_workers
        self._arrived = 0
        self._complete = env.event()

    def arrive(self) -> Event:
        """The event that the last worker has arrived; the next arrival opens a new meeting."""
        complete = self._complete
        self._arrived += 1
        if self._arrived == self._num_workers:
            self._arrived, self._complete = 0, self._env.event()
            complete.succeed(self._outcome())
        return complete

    def _outcome(self) -> float:
        return 0.0


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
        start_s, end_s: per program, of what has run so far.
        reduced_s: per update program: start and end of the reduction, end of the step.
    """

    env: Environment
    rank: int
    stage: int
    receives: dict[int, Link]
    sends: dict[int, Link]
    meeting: ReductionMeeting
    group: Meeting | None
    start_s: list[list[float]] = field(default_factory=list)
    end_s: list[list[float]] = field(default_factory=list)
    reduced_s: list[tuple[float, float, float]] = field(default_factory=list)

    def run(self, work: ProgramWork) -> Generator[Event, float, None]:
        """Run one program."""
        env, program, group = self.env, work.program, self.group
        start_s: list[float] = []
        end_s: list[float] = []
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        mine = slice(work.first_op[self.rank], work.first_op[self.rank + 1])
        rows = work.row[self.stage, mine]
        for kind, row, duration_s, message_s in zip(
            work.kind[self.stage, mine].tolist(),
            rows.tolist(),
            work.duration_s[self.stage, mine].tolist(),
            work.message_s[rows].tolist(),
            strict=True,
        ):
            source, target = self.receives.get(kind), self.sends.get(kind)
            if source is not None:
                yield source.receive((program, row))
            if group is not None:
                yield group.arrive()
            start_s.append(env.now)
            yield env.timeout(duration_s)
            end_s.append(env.now)
            if target is not None:
                target.send((program, row), message_s)
        if work.is_update:
            yield from self._reduce(start_s[-1] if start_s else env.now)

    def _reduce(self, last_start_s: float) -> Generator[Event, float, None]:
        env, meeting = self.env, self.meeting
        meeting.start_s[self.stage, self.rank] = last_start_s
        meeting.end_s[self.stage, self.rank] = env.now
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
