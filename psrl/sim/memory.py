"""Will it fit: where the memory of a simulated or executed run exceeds the device."""

from dataclasses import dataclass

import numpy as np

from psrl.core.plan.plan import Plan
from psrl.core.run.events import Events


@dataclass(frozen=True)
class OutOfMemory:
    """The op of one (phase, rank, stage) that needs the most bytes, more than the device has."""

    phase: str
    rank: int
    stage: int
    op: str
    micro_batch: int
    needed_bytes: int
    limit_bytes: int


def out_of_memory(events: Events, plan: Plan) -> list[OutOfMemory]:
    """One finding per (phase, rank, stage) that does not fit, in the order of the events."""
    limit = plan.cluster.device.memory_bytes
    total = events.total_bytes
    over = np.flatnonzero(total > limit)
    over = over[np.argsort(-total[over], kind="stable")]
    worst: dict[tuple[str, int, int], int] = {}
    for row in over.tolist():
        where = str(events.phase[row]), int(events.rank[row]), int(events.stage[row])
        worst.setdefault(where, row)
    return [
        OutOfMemory(
            *(str(events.phase[row]), int(events.rank[row]), int(events.stage[row])),
            op=str(events.op[row]),
            micro_batch=int(events.micro_batch[row]),
            needed_bytes=int(total[row]),
            limit_bytes=limit,
        )
        for row in sorted(worst.values())
    ]
