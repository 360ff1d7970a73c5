"""One measured figure beside its bar, and how to time."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """A figure; `bar` is None where none is set."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    more_is_better: bool = True

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.more_is_better else self.value <= self.bar


def fastest_s(function: Callable[[], object], repeats: int) -> float:
    """Shortest CPU time of some calls of single-threaded code.

    CPU time and the minimum, because other work on the machine only ever adds time.
    """
    times_s = []
    for _ in range(repeats):
        gc.collect()
        started_s = time.process_time()
        function()
        times_s.append(time.process_time() - started_s)
    return min(times_s)
