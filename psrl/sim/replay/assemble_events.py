"""From what each simulated rank did to the event log of all ranks."""

from typing import Any

import numpy as np
import numpy.typing as npt

from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.plan.clock import ProgramTimes
from psrl.core.plan.op_table import OP_NAMES
from psrl.core.run.events import GRADIENT_REDUCTION, OPTIMIZER_STEP, Events
from psrl.core.samples.sample import IntArray, ragged_take

from .work import ProgramWork

_NAMES = np.array([*OP_NAMES, GRADIENT_REDUCTION, OPTIMIZER_STEP], np.str_)
_REDUCTION, _STEP = len(OP_NAMES), len(OP_NAMES) + 1


def phase_events(works: list[ProgramWork], times: list[ProgramTimes], twin: IntArray) -> Events:
    """Events of one phase without its name, ordered by rank, stage, program and time.

    Args:
        twin: [R] for each rank the position of the simulated rank that does the same.
    """
    parts = [_program_columns(w, t, twin) for w, t in zip(works, times, strict=True)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # Within a program the rows are in that order already, and so are the programs.
    num_stages = int(columns["stage"].max(initial=0)) + 1
    order = np.argsort(columns["rank"] * num_stages + columns["stage"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    return Events(phase=np.full(len(order), ""), op=_NAMES[columns.pop("code")], **columns)


def _program_columns(
    work: ProgramWork, times: ProgramTimes, twin: IntArray
) -> dict[str, npt.NDArray[Any]]:
    """Columns of one program's events, rank by rank and stage by stage."""
    num_stages, num_ops = work.kind.shape
    num_extra = 2 if work.is_update else 0
    op_rows, first = ragged_take(work.first_op, np.repeat(twin, num_stages))
    stage = np.tile(np.arange(num_stages), len(twin))
    count = np.diff(first)
    op_rows = op_rows + np.repeat(stage, count) * num_ops
    # Every worker has `num_extra` rows behind its ops.
    where = np.arange(len(op_rows)) + num_extra * np.repeat(np.arange(len(stage)), count)
    total = len(op_rows) + num_extra * len(stage)
    micro_batch, num_tokens = work.micro_batch, work.num_tokens
    row = work.row.ravel()[op_rows]

    def spread(values: npt.NDArray[Any], extra: int) -> npt.NDArray[Any]:
        column = np.full(total, extra, values.dtype)
        column[where] = values
        return column

    code = spread(work.kind.ravel()[op_rows], 0)
    start_s = spread(times.start_s.ravel()[op_rows], 0)
    end_s = spread(times.end_s.ravel()[op_rows], 0)
    if times.reduced_s is not None:
        behind = np.cumsum(count + num_extra) - num_extra
        begin_s, reduced_s, stepped_s = times.reduced_s
        for at, kind, start, end in (
            (behind, _REDUCTION, begin_s, reduced_s),
            (behind + 1, _STEP, reduced_s, stepped_s),
        ):
            code[at], start_s[at], end_s[at] = kind, start, end
    memory = work.memory.reshape(-1, len(MemoryState._fields))
    states = {name: spread(memory[op_rows, i], 0) for i, name in enumerate(MemoryState._fields)}
    states["static_bytes"] = np.repeat(work.static_bytes[stage], count + num_extra)
    return {
        "program": np.full(total, work.program),
        "rank": np.repeat(np.repeat(np.arange(len(twin)), num_stages), count + num_extra),
        "stage": np.repeat(stage, count + num_extra),
        "code": code,
        "micro_batch": spread(micro_batch[row], -1),
        "num_tokens": spread(num_tokens[row], 0),
        "start_s": start_s,
        "end_s": end_s,
        **states,
    }
