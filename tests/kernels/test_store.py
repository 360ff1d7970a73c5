"""The in-memory store: copies, wide accumulators, rewriting on recompute."""

import pytest
import torch

from psrl.core.errors import BackendError
from psrl.kernels import DictStore


def test_write_copies_and_leaves_the_graph() -> None:
    store = DictStore()
    k = torch.ones(3, 2, 4, requires_grad=True)
    v = torch.zeros(3, 2, 4)
    store.write(5, 1, k, v)
    v += 1
    stored_k, stored_v = store.read(5, 1)
    assert not stored_k.requires_grad
    assert not stored_v.any()


def test_gradients_add_up_in_float32() -> None:
    store = DictStore()
    rows = torch.zeros(4, 1, 2, dtype=torch.bfloat16)
    store.write(0, 0, rows, rows)
    assert store.gradient(0, 0) is None
    one = torch.ones(2, 1, 2)
    for _ in range(300):  # bfloat16 sums of ones stop at 256
        store.add_gradient(0, 0, 1, 3, one, 2 * one)
    dk, dv = store.gradient(0, 0)
    assert dk.dtype == torch.float32
    assert dk[:, 0, 0].tolist() == [0, 300, 300, 0]
    assert dv[:, 0, 0].tolist() == [0, 600, 600, 0]


def test_gradients_of_float64_rows_are_float64() -> None:
    store = DictStore()
    rows = torch.zeros(1, 1, 1, dtype=torch.float64)
    store.write(0, 0, rows, rows)
    store.add_gradient(0, 0, 0, 1, rows, rows)
    assert store.gradient(0, 0)[0].dtype == torch.float64


def test_writing_again_keeps_gradients_and_other_layers() -> None:
    store = DictStore()
    rows = torch.ones(1, 1, 1)
    store.write(0, 0, rows, rows)
    store.add_gradient(0, 0, 0, 1, rows, rows)
    store.write(0, 0, rows, rows)
    assert store.gradient(0, 0)[0].item() == 1
    store.write(0, 1, rows, rows)
    assert store.gradient(0, 1) is None


def test_released_blocks_cannot_be_read() -> None:
    store = DictStore()
    rows = torch.ones(1, 1, 1)
    for block in (0, 1):
        store.write(block, 3, rows, rows)
    store.release(0)
    assert store.gradient(0, 3) is None
    store.read(1, 3)
    with pytest.raises(BackendError, match="block 0 of layer 3"):
        store.read(0, 3)
