"""Bytes on a device op by op, by simple bookkeeping: the oracle of `psrl.core.plan.bytes_over_ops`.

It follows the packed micro-batches, as the backend does, and the same block cache.
"""

from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.block_cache import BlockCache
from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.plan.packing import pack_rank
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import stage_ops
from psrl.core.tree.prefix_tree import PrefixTree


def held_bytes(activation: str, tokens: int, rows: int, memory: MemoryModel, stage: int) -> int:
    """What one micro-batch holds between its forward and its backward."""
    num_stages = memory.parallel.pipeline_model_parallel_size
    if activation == "drop":
        return tokens * memory.stage_input_bytes_per_token if stage > 0 else 0
    held = tokens * memory.activation_bytes_per_token
    if activation == "recompute":
        held = tokens * memory.recompute_bytes_per_token
    if stage < num_stages - 1:
        return held
    return held + tokens * memory.final_norm_bytes_per_token + rows * memory.head_bytes_per_row


def op_by_op(
    program: Program,
    tree: PrefixTree,
    memory: MemoryModel,
    stage: int,
    with_working_set: bool = True,
) -> list[MemoryState]:
    """Bytes during each op of one rank's program on a stage.

    Args:
        with_working_set: that of one layer, which comes and goes inside an op; an executor
            measures what micro-batches hold.

    Raises:
        PlanError: if a block outlives the program, or is used while it is not alive.
    """
    num_stages = memory.parallel.pipeline_model_parallel_size
    table, cache = program.micro_batches, BlockCache(program.blocks)
    sizes = {
        m: (tokens, rows, activation)
        for m, tokens, rows, activation in zip(
            table.micro_batch.tolist(),
            table.num_tokens.tolist(),
            table.head_tokens.tolist(),
            table.activation.tolist(),
            strict=True,
        )
    }
    reads = {p.index: p.read_blocks for p in pack_rank(program, tree)}
    held: dict[int, int] = {}
    states = []
    for op in stage_ops(program.ops(), num_stages, stage):
        tokens, rows, activation = sizes[op.micro_batch]
        working = 0
        cache.begin(op)
        if op.kind == "forward":
            if program.is_update:
                held[op.micro_batch] = held_bytes(activation, tokens, rows, memory, stage)
            runs_bare = not program.is_update or activation != "keep"
        elif op.kind == "recompute":
            held[op.micro_batch] = held_bytes("keep", tokens, rows, memory, stage)
            runs_bare = False
        else:
            runs_bare = activation == "recompute"
            for block in reads[op.micro_batch]:
                cache.touch_gradient(block)
        if runs_bare and with_working_set:
            working = tokens * memory.activation_bytes_per_token // memory.layers_per_stage
        logits = min(rows, 1024) * memory.logits_bytes_per_token
        states.append(
            MemoryState(
                static_bytes=memory.static_bytes_on(stage, program.is_update),
                activation_bytes=sum(held.values()) + working,
                logits_bytes=logits if stage == num_stages - 1 else 0,
                kv_bytes=cache.live_tokens * memory.kv_bytes_per_token,
                kv_gradient_bytes=cache.gradient_tokens * memory.kv_gradient_bytes_per_token,
            )
        )
        cache.end(op)
        if op.kind == "backward":
            held.pop(op.micro_batch)
    cache.end_program()
    return states
