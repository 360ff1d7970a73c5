"""Pipeline stages as SimPy processes, the links between them, and their meeting point."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from simpy import Environment, Event

from .work import StageWork

Message = tuple[int, int]
"""(program, micro_batch): a link carries each once."""


class Link:
    """One direction between two neighbouring stages: messages in order, one at a time."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._free_s = 0.0
        self._sent: dict[Message, Event] = {}
        self._awaited: dict[Message, Event] = {}

    def send(self, message: Message, duration_s: float) -> None:
        """Queue a message; the sender goes on at once."""
        queued_s = max(self._free_s - self._env.now, 0.0)
        arrival: Event = self._env.timeout(queued_s + duration_s)
        self._free_s = self._env.now + (queued_s + duration_s)
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
    """Point that all (rank, stage) workers pass together."""

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
            complete.succeed()
        return complete


@dataclass(frozen=True)
class StageWorker:
    """One stage of one rank.

    Attributes:
        receives, sends: the links of forward and backward ops; a missing kind has no neighbour.
        meeting: where the gradient reduction of an update program starts.
        start_s, end_s: of what has run so far.
    """

    env: Environment
    rank: int
    stage: int
    receives: dict[str, Link]
    sends: dict[str, Link]
    meeting: Meeting
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)

    def run(self, work: StageWork, meeting_s: Sequence[float]) -> Generator[Event, None, None]:
        """Run one program.

        Args:
            meeting_s: durations of what an update program does after its meeting.
        """
        env, start_s, end_s, program = self.env, self.start_s, self.end_s, work.program
        for op, micro_batch, duration_s, message_s in zip(
            work.op, work.micro_batch, work.duration_s, work.message_s, strict=True
        ):
            source, target = self.receives.get(op), self.sends.get(op)
            if source is not None:
                yield source.receive((program, micro_batch))
            start_s.append(env.now)
            yield env.timeout(duration_s)
            end_s.append(env.now)
            if target is not None:
                target.send((program, micro_batch), message_s)
        if work.is_update:
            yield self.meeting.arrive()
            for duration_s in meeting_s:
                start_s.append(env.now)
                yield env.timeout(duration_s)
                end_s.append(env.now)


def pipeline_workers(
    env: Environment, rank: int, num_stages: int, meeting: Meeting
) -> list[StageWorker]:
    """The stages of one rank, joined by a link per direction and pair of neighbours."""
    forward = [Link(env) for _ in range(num_stages - 1)]
    backward = [Link(env) for _ in range(num_stages - 1)]
    workers = []
    for stage in range(num_stages):
        receives, sends = {}, {}
        if stage > 0:
            receives["forward"], sends["backward"] = forward[stage - 1], backward[stage - 1]
        if stage < num_stages - 1:
            sends["forward"], receives["backward"] = forward[stage], backward[stage]
        workers.append(StageWorker(env, rank, stage, receives, sends, meeting))
    return workers
