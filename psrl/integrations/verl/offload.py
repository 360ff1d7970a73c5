"""Giving device memory back while veRL's rollout needs it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class DeviceMemory:
    """The storages of some tensors, which can leave the device and come back.

    Tensors and views of them stay valid objects; while their storages are away they must not be
    read.

    Args:
        tensors: gives the tensors; asked at every release.
        keep_values: copy the values to the host; else they come back as zeros.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], keep_values: bool = True) -> None:
        self._tensors = tensors
        self._keep_values = keep_values
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def release(self) -> None:
        """Free the storages; does nothing if they are away."""
        if self.is_away:
            return
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in self._tensors())}
        for storage in storages.values():
            values = _bytes_of(storage).to("cpu", copy=True) if self._keep_values else None
            self._away.append((storage, storage.nbytes(), values))
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the storages back; does nothing if they are there."""
        for storage, nbytes, values in self._away:
            storage.resize_(nbytes)
            if values is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(values)
        self._away.clear()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
