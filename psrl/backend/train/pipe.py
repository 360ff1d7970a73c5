"""Messages between the stages of a pipeline: hidden states forward, their gradients backward.

Both sides know the plan, so a message carries neither shape nor tag: messages of one direction
arrive in the order of the op lists. One process group per direction keeps the two apart.
`psrl.core.plan.clock` predicts the times of these messages, and with its send window or a smaller
one no plan that passes `check_plan` hangs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError
from psrl.core.plan.clock import RECEIVE_AHEAD, SEND_WINDOW
from psrl.core.plan.schedule import Op


@dataclass(frozen=True)
class Pipeline:
    """The pipeline that a process belongs to.

    Attributes:
        ranks: process of each stage.
        stage: of this process.
        forward, backward: process group of each direction; None if there is one stage.
    """

    ranks: tuple[int, ...]
    stage: int
    forward: dist.ProcessGroup | None = None
    backward: dist.ProcessGroup | None = None

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.ranks) - 1


SINGLE_STAGE = Pipeline(ranks=(0,), stage=0)


@contextmanager
def pipeline_groups(parallel: ParallelConfig, timeout_s: float) -> Iterator[Pipeline]:
    """This process's pipeline in Megatron's rank order, in which stages vary slowest.

    Every process of the default group must call it.
    """
    num_stages = parallel.pipeline_model_parallel_size
    width = parallel.world_size // num_stages
    column = [tuple(range(first, parallel.world_size, width)) for first in range(width)]
    stage, first = divmod(dist.get_rank(), width)
    if num_stages == 1:
        yield Pipeline(column[first], stage)
        return
    forward, backward = (
        dist.new_subgroups_by_enumeration(
            [list(ranks) for ranks in column], timeout=timedelta(seconds=timeout_s)
        )[0]
        for _ in range(2)
    )
    yield Pipeline(column[first], stage, forward, backward)
    # Not after an error: the other processes may still wait in these groups.
    for group in (forward, backward):
        dist.destroy_process_group(group)


class _Inbox:
    """Messages from one neighbour, received in plan order."""

    def __init__(
        self,
        source: int,
        group: dist.ProcessGroup,
        expected: Sequence[int],
        buffer_of: Callable[[int], Tensor],
        ahead: int,
    ) -> None:
        self._source, self._group, self._ahead = source, group, ahead
        self._expected = deque(expected)
        self._buffer_of = buffer_of
        self._posted: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._post()

    def _post(self) -> None:
        while self._expected and len(self._posted) < self._ahead:
            micro_batch = self._expected.popleft()
            buffer = self._buffer_of(micro_batch)
            work = dist.irecv(buffer, self._source, group=self._group)
            self._posted.append((micro_batch, buffer, work))

    def receive(self, micro_batch: int) -> Tensor:
        posted, buffer, work = self._posted.popleft()
        assert posted == micro_batch, f"received micro-batch {posted}, the op needs {micro_batch}"
        work.wait()
        self._post()
        return buffer


class _Outbox:
    """Messages to one neighbour; at most `window` are unfinished."""

    def __init__(self, target: int, group: dist.ProcessGroup, window: int) -> None:
        self._target, self._group, self._window = target, group, window
        self._unfinished: dict[int, tuple[Tensor, dist.Work]] = {}

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._target, group=self._group)
        self._unfinished[micro_batch] = (tensor, work)
        while len(self._unfinished) > self._window:
            self.finish(next(iter(self._unfinished)))

    def finish(self, micro_batch: int) -> None:
        """Wait until a message has arrived, unless it has been waited for already."""
        if micro_batch in self._unfinished:
            self._unfinished.pop(micro_batch)[1].wait()

    def flush(self) -> None:
        for micro_batch in list(self._unfinished):
            self.finish(micro_batch)


class Pipe:
    """Messages of one stage while it runs one op list.

    Args:
        ops: of this stage.
        shape_of: shape of a micro-batch's message, either direction.
        send_window: sends under way per direction, whose tensors stay alive; at least 1.
        receive_ahead: receives posted before they are needed; at least 1.

    Raises:
        BackendError: if one of them is smaller.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ops: Sequence[Op],
        shape_of: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        send_window: int = SEND_WINDOW,
        receive_ahead: int = RECEIVE_AHEAD,
    ) -> None:
        if send_window < 1 or receive_ahead < 1:
            raise BackendError(
                f"send window {send_window}, receives ahead {receive_ahead}: both must be at "
                "least 1, because stages that block on every message can wait for each other"
            )
        self._inbox: dict[str, _Inbox] = {}
        self._outbox: dict[str, _Outbox] = {}
        previous, following = pipeline.stage - 1, pipeline.stage + 1
        for kind, source, target, group in (
            ("forward", previous, following, pipeline.forward),
            ("backward", following, previous, pipeline.backward),
        ):
            if group is None:
                continue
            if 0 <= source < pipeline.num_stages:
                self._inbox[kind] = _Inbox(
                    pipeline.ranks[source],
                    group,
                    [op.micro_batch for op in ops if op.kind == kind],
                    lambda micro_batch: torch.empty(
                        shape_of(micro_batch), dtype=dtype, device=device
                    ),
                    receive_ahead,
                )
            if 0 <= target < pipeline.num_stages:
                self._outbox[kind] = _Outbox(pipeline.ranks[target], group, send_window)

    def receive(self, op: Op) -> Tensor | None:
        """Wait for what an op reads; None if it reads nothing from a neighbour."""
        inbox = self._inbox.get(op.kind)
        if inbox is None:
            return None
        message = inbox.receive(op.micro_batch)
        if op.kind == "backward":
            # The gradient answers our hidden states, so these have arrived.
            self._outbox["forward"].finish(op.micro_batch)
        return message

    def send(self, op: Op, message: Tensor | None) -> None:
        """Start sending an op's result to the neighbour that needs it, if one does."""
        outbox = self._outbox.get(op.kind)
        if outbox is None:
            return
        assert message is not None, f"{op} has nothing to send"
        outbox.send(op.micro_batch, message)

    def flush(self) -> None:
        """Wait until all messages have arrived."""
        for outbox in self._outbox.values():
            outbox.flush()
