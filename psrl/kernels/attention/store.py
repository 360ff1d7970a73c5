"""Where cached keys and values live, and where the gradients of their readers add up.

A micro-batch writes rows that later micro-batches read. Their backward adds dK/dV here, and the
owner's backward takes the sum into its own keys and values. Rows are addressed by block and
layer, never by tensor identity, so a forward may run twice (activation recompute).

Dimension letters: N rows of a block, G key/value heads, D head dimension.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from psrl.core.errors import BackendError
from psrl.core.plan.packing import CachedRows


class KeyValueStore(Protocol):
    """Cached rows of all live blocks, per layer."""

    def write(self, block: int, layer: int, k_NGD: Tensor, v_NGD: Tensor) -> None:
        """Copy the rows of a block; the owner's forward calls it, again when it recomputes."""

    def read(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a block's keys and values, [N, G, D] each, outside any autograd graph."""

    def add_gradient(
        self, block: int, layer: int, start: int, end: int, dk: Tensor, dv: Tensor
    ) -> None:
        """Add a reader's gradient of rows `[start, end)`, [end - start, G, D] each.

        Accumulators are float32 or wider, whatever the dtype of the rows.
        """

    def gradient(self, block: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """Accumulated dK and dV, [N, G, D] each; None if no reader has added any."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of tensors of this dtype are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def write_cached(
    store: Any, layer: int, cached: tuple[CachedRows, ...], k_TGD: Tensor, v_TGD: Tensor
) -> None:
    """Store the rows of a micro-batch that later ones read."""
    for block, start, count in cached:
        store.write(block, layer, k_TGD[start : start + count], v_TGD[start : start + count])


def add_reader_gradients(
    store: Any, layer: int, cached: tuple[CachedRows, ...], dk_TGD: Tensor, dv_TGD: Tensor
) -> None:
    """Add in place what the readers of a micro-batch's cached rows left in the store."""
    for block, start, count in cached:
        gradient = store.gradient(block, layer)
        if gradient is not None:
            dk_TGD[start : start + count] += gradient[0]
            dv_TGD[start : start + count] += gradient[1]


class DictStore:
    """A store without a memory budget: every block is its own pair of tensors."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._gradients: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def write(self, block: int, layer: int, k_NGD: Tensor, v_NGD: Tensor) -> None:
        self._rows[block, layer] = (k_NGD.detach().clone(), v_NGD.detach().clone())

    def read(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        if (block, layer) not in self._rows:
            raise BackendError(
                f"block {block} of layer {layer} is read but not stored",
                "run the forward of the micro-batch that caches it first, with the same store",
            )
        return self._rows[block, layer]

    def add_gradient(
        self, block: int, layer: int, start: int, end: int, dk: Tensor, dv: Tensor
    ) -> None:
        if (block, layer) not in self._gradients:
            k, v = self.read(block, layer)
            dtype = accumulator_dtype(k.dtype)
            self._gradients[block, layer] = (
                torch.zeros_like(k, dtype=dtype),
                torch.zeros_like(v, dtype=dtype),
            )
        sum_k, sum_v = self._gradients[block, layer]
        sum_k[start:end] += dk
        sum_v[start:end] += dv

    def gradient(self, block: int, layer: int) -> tuple[Tensor, Tensor] | None:
        return self._gradients.get((block, layer))

    def release(self, block: int) -> None:
        """Forget a block's rows and gradients in all layers."""
        for table in (self._rows, self._gradients):
            for key in [key for key in table if key[0] == block]:
                del table[key]
