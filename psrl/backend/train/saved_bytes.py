"""Counts what autograd keeps for the backward."""

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor


class SavedBytes:
    """Bytes of the distinct storages saved inside the block, without those named beforehand.

    What a checkpointed part saves inside itself is not seen: it is dropped at once.

    Args:
        existing: weights, inputs and what else exists anyway.
        enabled: False counts nothing and costs nothing.
    """

    def __init__(self, existing: Iterable[Tensor], enabled: bool = True) -> None:
        self._known = {t.untyped_storage().data_ptr() for t in existing}
        self._saved: dict[int, int] = {}
        self._hooks = None
        if enabled:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            self._saved[address] = storage.nbytes()
        # Without the graph, a saved output would keep itself alive.
        return tensor.detach()

    def __enter__(self) -> "SavedBytes":
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, traceback)

    @property
    def total_bytes(self) -> int:
        return sum(self._saved.values())
