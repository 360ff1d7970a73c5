"""Triton kernels read and add in the backend's own buffers, at the extents of its blocks."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.train.kv_store import BlockStore
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import PlanError
from psrl.kernels import BufferStore
from tests.backend.cases import Case, Outcome, make_case, relative_error, run_case


class InPlaceStore(BlockStore):
    """Refuses what a kernel that copies rows would call, and counts what kernels use instead."""

    num_buffers = 0
    num_gradient_buffers = 0
    _writing = False

    def write(self, block: int, layer: int, k_NGD: Tensor, v_NGD: Tensor) -> None:
        self._writing = True
        super().write(block, layer, k_NGD, v_NGD)
        self._writing = False

    def read(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        assert self._writing, "a kernel copied the rows of a block"
        return super().read(block, layer)

    def add_gradient(
        self, block: int, layer: int, start: int, end: int, dk: Tensor, dv: Tensor
    ) -> None:
        raise AssertionError("a kernel added a copy of its gradients")

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        InPlaceStore.num_buffers += 1
        return super().buffers(layer)

    def gradient_buffers(self, layer: int, blocks: Iterable[int]) -> tuple[Tensor, Tensor]:
        InPlaceStore.num_gradient_buffers += 1
        return super().gradient_buffers(layer, blocks)


def cases() -> list[Case]:
    """Cases with cached blocks, of a model with the smallest head dimension of the kernels."""
    found = [make_case(seed) for seed in range(3, 9)]
    found = [case for case in found if len(case.planned.program.blocks) > 1][:3]
    wide = {"num_layers": 2, "kv_channels": 16}
    return [replace(case, spec=case.spec.model_copy(update=wide)) for case in found]


def both(implementation: str, store_class: type[BlockStore]) -> tuple[list[Outcome], int, int]:
    with model_parallel(ParallelConfig()):
        outcomes = [
            run_case(case, torch.float32, implementation=implementation, store_class=store_class)
            for case in cases()
        ]
    return outcomes, InPlaceStore.num_buffers, InPlaceStore.num_gradient_buffers


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on the CPU")
def test_triton_trains_in_the_backends_buffers() -> None:
    pytest.importorskip("triton")
    assert len(cases()) == 3
    wanted, *_ = run_ranks(both, 1, "reference", BlockStore)[0]
    found, num_buffers, num_gradient_buffers = run_ranks(both, 1, "triton", InPlaceStore)[0]
    assert num_buffers > 0
    assert num_gradient_buffers > 0
    for f, w in zip(found, wanted, strict=True):
        error = relative_error(f, w)
        assert error["gradient"] <= 5e-6, error
        assert error["logprob"] <= 2e-5, error
        assert f.events is not None
        assert w.events is not None
        assert f.events.kv_bytes.tolist() == w.events.kv_bytes.tolist()
        assert f.events.kv_gradient_bytes.tolist() == w.events.kv_gradient_bytes.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_buffers_keep_the_contract(dtype: torch.dtype) -> None:
    """Equal strides, contiguous heads, finite rows, float32 sums that start at zero."""
    program = next(c for c in cases()).planned.program.on_rank(0)
    store = BlockStore(program, 64, 2, 2, 16, dtype, first_layer=3)
    assert isinstance(store, BufferStore)
    k, v = store.buffers(4)
    assert k.shape == v.shape == (64, 2, 16)
    assert k.stride() == v.stride() == (32, 16, 1)
    assert torch.isfinite(k).all()
    assert torch.isfinite(v).all()
    block = int(program.blocks.block[0])
    with pytest.raises(PlanError):
        store.extent(block)
    first = next(op for op in program.ops() if op.micro_batch == program.blocks.micro_batch[0])
    store.begin(first)
    extent = store.extent(block)
    num_rows = int(program.blocks.num_tokens[0])
    rows = torch.arange(num_rows * 32, dtype=dtype).view(num_rows, 2, 16)
    store.write(block, 4, rows, -rows)
    assert torch.equal(k[extent.start : extent.start + num_rows], rows)
    assert torch.equal(v[extent.start : extent.start + num_rows], -rows)
    sum_k, sum_v = store.gradient_buffers(4, [block])
    assert sum_k.dtype == torch.promote_types(dtype, torch.float32)
    assert sum_k.stride() == k.stride()
    assert not sum_k[extent.start : extent.end].any()
    sum_k[extent.start] += 2.5
    sum_v[extent.start] -= 1.5
    again_k, again_v = store.gradient_buffers(4, [block])
    np.testing.assert_array_equal(again_k[extent.start], np.full((2, 16), 2.5))
    np.testing.assert_array_equal(again_v[extent.start], np.full((2, 16), -1.5))
    gradient = store.gradient(block, 4)
    assert gradient is not None
    assert torch.equal(gradient[0][0], sum_k[extent.start])
