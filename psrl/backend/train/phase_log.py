"""Times and bytes of one phase on this rank."""

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.run.events import EventLog, Events


def resident_bytes(*tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of tensors that stay for a whole phase."""
    storages = (t.untyped_storage() for group in tensors for t in group)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class PhaseLog:
    """One row per op; times are relative to its creation, at the same moment on all ranks.

    Args:
        rank: data-parallel rank, as in the plan.
        static_bytes: what stays on the device during the phase.
    """

    def __init__(
        self, phase: str, rank: int, stage: int, device: torch.device, static_bytes: int
    ) -> None:
        self._place = rank, stage
        self._phase, self._device, self._static_bytes = phase, device, static_bytes
        self._events = EventLog()
        self._zero_s = 0.0
        self.now_s()
        dist.barrier()
        self._zero_s = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since the start, when the device has done what it was told to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._zero_s

    def add(
        self,
        program: int,
        kind: str,
        start_s: float,
        micro_batch: int = -1,
        num_tokens: int = 0,
        activation_bytes: int = 0,
        logits_bytes: int = 0,
        kv_bytes: int = 0,
        kv_gradient_bytes: int = 0,
    ) -> None:
        """Log an op that ends now.

        Args:
            program: its number in the plan.
        """
        memory = MemoryState(
            self._static_bytes, activation_bytes, logits_bytes, kv_bytes, kv_gradient_bytes
        )
        end_s = self.now_s()
        place = self._phase, program, *self._place
        self._events.add(*place, kind, micro_batch, num_tokens, start_s, end_s, memory)

    def finish(self) -> Events:
        """All rows."""
        return self._events.finish()
