"""An update's program as a forward-only one: the same micro-batches, without gradients."""

from dataclasses import replace

import numpy as np

from psrl.core.plan.schedule import Op

from .inputs import RankProgram
from .kv_store import buffer_rows


def forward_only(rank_program: RankProgram) -> RankProgram:
    """The forwards of a program; blocks live until their last reader's."""
    program = rank_program.program
    order = [op.micro_batch for op in rank_program.ops if op.kind == "forward"]
    last_reader = dict(
        zip(program.blocks.block.tolist(), program.blocks.micro_batch.tolist(), strict=True)
    )
    for micro_batch in order:
        packed = rank_program.micro_batches[micro_batch].packed
        last_reader |= dict.fromkeys(packed.read_blocks, micro_batch)
    release = [last_reader[block] for block in program.blocks.block.tolist()]
    ops = [Op("forward", micro_batch) for micro_batch in order]
    forwards = replace(
        program,
        is_update=False,
        schedule=program.schedule.rows(np.flatnonzero(program.schedule.op == "forward")),
        blocks=replace(
            program.blocks,
            release_op=np.full(len(release), "forward"),
            release_micro_batch=np.array(release, np.int64),
        ),
    )
    return replace(
        rank_program, program=forwards, ops=tuple(ops), buffer_rows=buffer_rows(forwards, ops)
    )
