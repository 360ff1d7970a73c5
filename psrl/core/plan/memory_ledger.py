"""Bytes on one device while a stage runs its ops: the one accounting that all parts share."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from psrl.core.cost.memory_model import MemoryModel

from .block_cache import BlockCache
from .plan import Program
from .schedule import Op

HEAD_CHUNK_TOKENS = 1024
"""Predicted positions whose logits exist at a time; the backend computes the head in chunks."""


class MemoryState(NamedTuple):
    """Bytes live on a device while an op runs."""

    static_bytes: int
    activation_bytes: int
    logits_bytes: int
    kv_bytes: int
    kv_gradient_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.static_bytes
            + self.activation_bytes
            + self.logits_bytes
            + self.kv_bytes
            + self.kv_gradient_bytes
        )


class Reader(Protocol):
    """A micro-batch, for instance a `PackedMicroBatch`, and the blocks that it reads."""

    @property
    def index(self) -> int: ...

    @property
    def read_blocks(self) -> frozenset[int]: ...


class MemoryLedger:
    """Memory of one stage of one rank, op by op.

    Args:
        program: one rank's program.
        packed: its micro-batches.
        memory: bytes per token.
        is_last_stage: whether the stage computes logits.
    """

    def __init__(
        self,
        program: Program,
        packed: Sequence[Reader],
        memory: MemoryModel,
        is_last_stage: bool,
    ) -> None:
        self.cache = BlockCache(program.blocks)
        self._memory = memory
        self._is_update = program.is_update
        self._is_last_stage = is_last_stage
        table = program.micro_batches
        columns = (table.num_tokens.tolist(), table.head_tokens.tolist(), table.activation.tolist())
        self._size = dict(zip(table.micro_batch.tolist(), zip(*columns, strict=True), strict=True))
        self._reads = {p.index: p.read_blocks for p in packed}
        self._held: dict[int, int] = {}
        self._held_bytes = 0

    def run(self, op: Op) -> MemoryState:
        """Account one op; returns the bytes live while it runs."""
        tokens, head_tokens, activation = self._size[op.micro_batch]
        memory = self._memory
        one_layer = tokens * memory.activation_bytes_per_token // memory.layers_per_stage
        self.cache.begin(op)
        transient = 0
        if op.kind == "forward":
            if self._is_update:
                self._hold(op.micro_batch, activation)
            if not self._is_update or activation != "keep":
                transient = one_layer
        elif op.kind == "recompute":
            self._hold(op.micro_batch, "keep")
        else:
            transient = one_layer if activation == "recompute" else 0
            for block in self._reads[op.micro_batch]:
                self.cache.touch_gradient(block)
        logits = min(head_tokens, HEAD_CHUNK_TOKENS) * memory.logits_bytes_per_token
        state = self._state(transient, logits if self._is_last_stage else 0)
        self.cache.end(op)
        if op.kind == "backward":
            self._held_bytes -= self._held.pop(op.micro_batch)
        return state

    def _hold(self, micro_batch: int, activation: str) -> None:
        tokens, head_tokens, _ = self._size[micro_batch]
        nbytes = self._memory.held_bytes(activation, tokens, head_tokens, self._is_last_stage)
        self._held_bytes += nbytes - self._held.get(micro_batch, 0)
        self._held[micro_batch] = nbytes

    def finish(self) -> MemoryState:
        """End the program; returns the bytes that stay.

        Raises:
            PlanError: if a block outlives the program.
        """
        self.cache.end_program()
        return self._state(0, 0)

    def _state(self, transient_bytes: int, logits_bytes: int) -> MemoryState:
        memory = self._memory
        return MemoryState(
            static_bytes=memory.static_bytes,
            activation_bytes=self._held_bytes + transient_bytes,
            logits_bytes=logits_bytes,
            kv_bytes=self.cache.live_tokens * memory.kv_bytes_per_token,
            kv_gradient_bytes=self.cache.gradient_tokens * memory.kv_gradient_bytes_per_token,
        )
