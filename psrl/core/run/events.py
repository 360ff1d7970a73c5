"""What happened when: one schema for simulated and executed runs."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.core.errors import PlanError
from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.samples.sample import FloatArray, IntArray, StrArray

GRADIENT_REDUCTION = "gradient_reduction"
OPTIMIZER_STEP = "optimizer_step"


@dataclass(frozen=True)
class Events:
    """One row per op of each (rank, stage); times in seconds from the start of the phase's run.

    Attributes:
        phase: log_old_prob, reference or update.
        program: index of the plan's program.
        op: forward, backward, recompute, gradient_reduction or optimizer_step.
        micro_batch: -1 for the last two.
        num_tokens: tokens computed by the op; 0 for the last two.
        static_bytes .. kv_gradient_bytes: bytes live on the device while the op ran.
    """

    phase: StrArray
    program: IntArray
    rank: IntArray
    stage: IntArray
    op: StrArray
    micro_batch: IntArray
    num_tokens: IntArray
    start_s: FloatArray
    end_s: FloatArray
    static_bytes: IntArray
    activation_bytes: IntArray
    logits_bytes: IntArray
    kv_bytes: IntArray
    kv_gradient_bytes: IntArray

    def __len__(self) -> int:
        return len(self.phase)

    @property
    def total_bytes(self) -> IntArray:
        return (
            self.static_bytes
            + self.activation_bytes
            + self.logits_bytes
            + self.kv_bytes
            + self.kv_gradient_bytes
        )

    def where(self, mask: np.ndarray) -> "Events":
        """The rows of a boolean mask or an index array."""
        return Events(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})

    def save(self, path: Path) -> None:
        """Write a Parquet file."""
        table = pa.table({f.name: getattr(self, f.name) for f in fields(self)})
        pq.write_table(table, path, compression="zstd")

    @classmethod
    def load(cls, path: Path) -> "Events":
        """Read a Parquet file.

        Raises:
            PlanError: if it is missing or has other columns.
        """
        try:
            table = pq.read_table(path)
            columns = {f.name: table[f.name].to_numpy() for f in fields(cls)}
        except (OSError, KeyError, pa.ArrowException) as error:
            raise PlanError(f"{path}: not an event log ({error})") from None
        for name in ("phase", "op"):
            columns[name] = columns[name].astype(np.str_)
        return cls(**columns)


class EventLog:
    """Collects rows while a run goes on."""

    def __init__(self) -> None:
        self._rows: list[tuple[str | int | float, ...]] = []

    def add(
        self,
        phase: str,
        program: int,
        rank: int,
        stage: int,
        op: str,
        micro_batch: int,
        num_tokens: int,
        start_s: float,
        end_s: float,
        memory: MemoryState,
    ) -> None:
        """Append one op."""
        self._rows.append(
            (
                phase,
                program,
                rank,
                stage,
                op,
                micro_batch,
                num_tokens,
                start_s,
                end_s,
                memory.static_bytes,
                memory.activation_bytes,
                memory.logits_bytes,
                memory.kv_bytes,
                memory.kv_gradient_bytes,
            )
        )

    def finish(self) -> Events:
        """All rows, ordered by phase as logged, then rank, stage and start."""
        columns: list[tuple[str | int | float, ...]] = list(zip(*self._rows, strict=True))
        columns = columns or [() for _ in fields(Events)]
        types = {"phase": np.str_, "op": np.str_, "start_s": np.float64, "end_s": np.float64}
        events = Events(
            **{
                f.name: np.array(column, types.get(f.name, np.int64))
                for f, column in zip(fields(Events), columns, strict=True)
            }
        )
        position = {phase: i for i, phase in enumerate(dict.fromkeys(events.phase.tolist()))}
        phase = np.array([position[p] for p in events.phase.tolist()], np.int64)
        return events.where(np.lexsort((events.start_s, events.stage, events.rank, phase)))
