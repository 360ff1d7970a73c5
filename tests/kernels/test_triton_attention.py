"""The Triton kernels against float64, in Triton's interpreter (see `tests/conftest.py`).

It runs programs one after the other and needs milliseconds for each tile, so cases are small. It
truncates when it rounds to bfloat16, which doubles the errors of a GPU.
"""

import importlib.util
import inspect
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from psrl.core.errors import BackendError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.kernels import DictStore, KeyValueStore, LinearStore, prepare_attention, tree_attention
from psrl.kernels.benchmark.check import (
    TOLERANCE,
    Inputs,
    ancestor_mask,
    check_forest,
    exact_result,
    random_inputs,
    relative_errors,
    run_micro_batches,
    summed_sizes,
)
from psrl.kernels.benchmark.forests import Segment, pack_forest, parents, random_forest
from psrl.kernels.triton.configs import KernelTiles, Tiles

pytest.importorskip("triton", reason="Triton is not installed")

from psrl.kernels.attention import key_rows
from psrl.kernels.triton import attention_index, backward, block_index, forward, tiles
from psrl.kernels.triton import launch as host
from psrl.kernels.triton.attention import triton_attention
from psrl.kernels.triton.launch import attention_forward

pytestmark = pytest.mark.skipif(
    not tiles.INTERPRETED.value, reason="TRITON_INTERPRET was not 1 at the first import"
)

SMALL = KernelTiles(Tiles(32, 16, 1, 1), Tiles(16, 32, 1, 1), Tiles(16, 16, 1, 1, split=True))
WIDE = KernelTiles(Tiles(32, 32, 1, 1), Tiles(32, 32, 1, 1), Tiles(32, 32, 1, 1))

both_reads = pytest.mark.parametrize("use_tma", [False, True], ids=["pointers", "descriptors"])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedMicroBatch,
    store: KeyValueStore,
    tiles: KernelTiles = SMALL,
    use_tma: bool = False,
) -> Tensor:
    return triton_attention(q, k, v, packed, store, tiles=tiles, use_tma=use_tma)


def buffer_store(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> LinearStore:
    """A store whose first rows are taken, so that no extent begins with a tile."""
    store = LinearStore(rows + 7, 1, heads, head_dim, dtype)
    store.write(-7, 0, *torch.full((2, 7, heads, head_dim), 1e3, dtype=dtype))
    return store


@pytest.mark.slow
@both_reads
@pytest.mark.parametrize("seed", range(4))
def test_random_forests_in_several_micro_batches(seed: int, use_tma: bool) -> None:
    rng = np.random.default_rng(seed)
    num_tokens = int(rng.integers(60, 130))
    segments = random_forest(rng, num_tokens, (3, 12, 40)[seed % 3])
    cuts = sorted(rng.choice(np.arange(1, num_tokens), 2, replace=False).tolist())
    heads = [(2, 2), (4, 2), (3, 1), (2, 1)][seed]
    errors = check_forest(
        segments,
        partial(attend, use_tma=use_tma, tiles=(SMALL, WIDE)[seed % 2]),
        heads=heads,
        cuts=cuts,
        store=buffer_store(num_tokens, heads[1], 16, torch.float32) if seed // 2 else None,
        seed=seed,
    )
    assert max(errors.values()) <= TOLERANCE[torch.float32], errors


@both_reads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats(dtype: torch.dtype, use_tma: bool) -> None:
    segments = random_forest(np.random.default_rng(7), 90, 20)
    attention = partial(attend, use_tma=use_tma, tiles=WIDE)
    store = buffer_store(90, 1, 16, dtype)
    errors = check_forest(segments, attention, heads=(2, 1), dtype=dtype, cuts=[40], store=store)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 63, 111])
def test_stars_and_chains_of_odd_lengths(length: int) -> None:
    chain = [Segment(-1, length)]
    star = [Segment(-1, length), *[Segment(0, n) for n in (1, 20, 5)]]
    for segments in (chain, star):
        errors = check_forest(segments, partial(attend, tiles=WIDE), heads=(2, 1))
        assert max(errors.values()) <= TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("head_dim", [8, 24, 40])
def test_head_dimensions_that_are_no_tile(head_dim: int) -> None:
    segments = random_forest(np.random.default_rng(3), 50, 12)
    attention = partial(attend, tiles=WIDE)
    store = buffer_store(50, 1, head_dim, torch.float32)
    errors = check_forest(
        segments, attention, heads=(2, 1), head_dim=head_dim, cuts=[30], store=store
    )
    assert max(errors.values()) <= TOLERANCE[torch.float32], errors


def test_log_sum_exp() -> None:
    segments = random_forest(np.random.default_rng(5), 60, 12)
    inputs = random_inputs(60, (2, 1), 16, torch.float32)
    (packed,) = pack_forest(segments)
    index = attention_index.attention_index(packed, None, SMALL, torch.device("cpu"))
    _, lse = attention_forward(*inputs[:3], None, index.forward, 0.25, SMALL.forward, use_tma=False)
    expected = exact_result(parents(segments), inputs)[1]
    assert (lse * np.log(2) - expected).abs().max() <= 2e-5


def poisoned(x: Tensor, rows: int = 40) -> Tensor:
    """The same values inside a tensor full of NaN, at strides of a fused projection."""
    around = torch.full((len(x) + rows, x.shape[1], x.shape[2] + 8), torch.nan, dtype=x.dtype)
    inside = around[: len(x), :, : x.shape[2]]
    return inside.copy_(x)


@pytest.mark.slow
@both_reads
def test_padding_may_hold_anything(use_tma: bool) -> None:
    segments = random_forest(np.random.default_rng(11), 70, 12)
    inputs, micro_batches = (
        random_inputs(70, (2, 1), 16, torch.float32),
        pack_forest(segments, [33]),
    )
    attention = partial(attend, use_tma=use_tma, tiles=WIDE)
    store = buffer_store(70, 1, 16, torch.float32)
    if not use_tma:  # Descriptors promise finite numbers in the buffers only.
        for x in (*store.buffers(0), *store.gradient_buffers(0, [])):
            x[7 + 70 :] = torch.nan
            x[:7] = torch.nan
    clean = run_micro_batches(micro_batches, inputs, attention, DictStore())
    padded = run_micro_batches(
        micro_batches, Inputs(*(poisoned(x) for x in inputs)), attention, store
    )
    sizes = summed_sizes(inputs, ancestor_mask(parents(segments)))
    errors = relative_errors(padded, clean, sizes)
    assert max(errors.values()) <= 1e-6, errors


@both_reads
def test_gradients_of_unseen_rows_stay(use_tma: bool) -> None:
    """Rows of a block that this micro-batch does not see, and of other blocks, keep their sums."""
    segments = [Segment(-1, 20), Segment(0, 9), Segment(0, 15)]
    inputs, micro_batches = (
        random_inputs(44, (2, 1), 16, torch.float32),
        pack_forest(segments, [29]),
    )
    store = buffer_store(44, 1, 16, torch.float32)
    attention = partial(attend, use_tma=use_tma)
    run_micro_batches(micro_batches, inputs, attention, store)
    for total in store.gradient_buffers(0, []):
        assert (total[7:27] != 0).any((1, 2)).all()
        assert (total[:7] == 0).all()
        assert (total[27:] == 0).all()


@pytest.mark.slow
def test_recompute_gives_the_same_bits_and_adds_gradients_once() -> None:
    segments = random_forest(np.random.default_rng(2), 60, 12)
    inputs, micro_batches = (
        random_inputs(60, (2, 1), 16, torch.float32),
        pack_forest(segments, [25]),
    )

    def recomputing(*args: object) -> Tensor:
        return checkpoint(attend, *args, use_reentrant=False)

    stores = [buffer_store(60, 1, 16, torch.float32) for _ in range(2)]
    plain, again = (
        run_micro_batches(micro_batches, inputs, attention, store)
        for attention, store in zip((attend, recomputing), stores, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_other_branches_are_bit_identical() -> None:
    segments = [Segment(-1, 20), Segment(0, 21), Segment(0, 19)]
    (packed,) = pack_forest(segments)
    inputs = random_inputs(60, (2, 1), 16, torch.float32)
    changed = Inputs(*(x.clone() for x in inputs))
    for x in changed:
        x[20:41] = 3 * x[20:41] + 1
    before, after = (attend(*x[:3], packed, DictStore()) for x in (inputs, changed))
    assert torch.equal(before[:20], after[:20])
    assert torch.equal(before[41:], after[41:])
    assert not torch.equal(before[20:41], after[20:41])


def test_empty_micro_batch_and_dispatch() -> None:
    empty, packed = pack_forest([Segment(-1, 5)], [0])
    assert empty.total_tokens == 0
    inputs = random_inputs(5, (2, 1), 16, torch.float32)
    attention = partial(tree_attention, implementation="triton")

    def dispatched(q: Tensor, k: Tensor, v: Tensor, packed: PackedMicroBatch, store: object):
        return attention(q, k, v, packed, store=store)

    result = run_micro_batches([empty, packed], inputs, dispatched, DictStore())
    chain = np.arange(5) - 1
    sizes = summed_sizes(inputs, ancestor_mask(chain))
    errors = relative_errors(result, exact_result(chain, inputs)[0], sizes)
    assert max(errors.values()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "message"),
    [(16, torch.float64, "takes bfloat16"), (320, torch.float32, "head dimension 320")],
)
def test_unsupported_inputs_are_refused(head_dim: int, dtype: torch.dtype, message: str) -> None:
    (packed,) = pack_forest([Segment(-1, 5)])
    inputs = random_inputs(5, (2, 1), head_dim, dtype)
    with pytest.raises(BackendError, match=message):
        triton_attention(*inputs[:3], packed)


def test_misaligned_descriptors_and_foreign_rows_are_refused() -> None:
    (packed,) = pack_forest([Segment(-1, 5)])
    odd = [torch.zeros(5, 2, 17)[..., 1:] for _ in range(3)]
    with pytest.raises(BackendError, match="multiples of 16 bytes"):
        triton_attention(*odd, packed, use_tma=True)
    _, second = pack_forest([Segment(-1, 8)], [4])
    inputs, store = random_inputs(8, (2, 2), 16, torch.float32), DictStore()
    store.write(0, 0, *torch.zeros(2, 4, 1, 16))
    with pytest.raises(BackendError, match="cached rows need the heads"):
        attend(*(x[4:] for x in inputs[:3]), second, store)
    store.write(0, 0, *torch.zeros(2, 4, 2, 16, dtype=torch.float16))
    with pytest.raises(BackendError, match="cached rows need the dtype"):
        attend(*(x[4:] for x in inputs[:3]), second, store)


def test_the_index_is_built_once_and_follows_moved_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = attention_index._build
    monkeypatch.setattr(attention_index, "_build", lambda *a: built.append(0) or build(*a))
    segments = [Segment(-1, 20), Segment(0, 9), Segment(0, 15)]
    micro_batches, inputs = (
        pack_forest(segments, [29]),
        random_inputs(44, (2, 1), 16, torch.float32),
    )
    store = buffer_store(60, 1, 16, torch.float32)
    first = run_micro_batches(micro_batches, inputs, attend, store)
    assert len(built) == 2
    store.release(-7)
    store.release(0)
    again = run_micro_batches(micro_batches, inputs, attend, store)
    assert len(built) == 3
    sizes = summed_sizes(inputs, ancestor_mask(parents(segments)))
    assert max(relative_errors(again, first, sizes).values()) <= 1e-6
    keys = {id(p) for p in micro_batches}
    assert keys <= attention_index._indices.keys()
    del micro_batches
    assert not keys & attention_index._indices.keys()


def test_a_prepared_micro_batch_builds_nothing_in_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []
    build = attention_index._build
    monkeypatch.setattr(attention_index, "_build", lambda *a: built.append(0) or build(*a))
    micro_batches, inputs = (
        pack_forest([Segment(-1, 20), Segment(0, 9)], [15]),
        random_inputs(29, (2, 1), 16, torch.float32),
    )
    store = buffer_store(29, 1, 16, torch.float32)

    def prepared(q: Tensor, k: Tensor, v: Tensor, packed: PackedMicroBatch, store: KeyValueStore):
        prepare_attention(
            packed,
            implementation="triton",
            dtype=q.dtype,
            head_dim=16,
            device=q.device,
            store=store,
        )
        before = len(built)
        out = tree_attention(q, k, v, packed, store=store, implementation="triton")
        assert len(built) == before
        return out

    run_micro_batches(micro_batches, inputs, prepared, store)
    assert len(built) == 2
    prepare_attention(
        micro_batches[0],
        implementation="parts",
        dtype=torch.float32,
        head_dim=16,
        device=torch.device("cpu"),
    )


def test_missing_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (packed,) = pack_forest([Segment(-1, 5)])
    inputs = random_inputs(5, (2, 1), 16, torch.float32)
    dispatcher = sys.modules["psrl.kernels.attention.tree_attention"]
    monkeypatch.setattr(dispatcher, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="not installed"):
        tree_attention(*inputs[:3], packed, implementation="triton")


MUTANTS = [
    (forward, "(query[:, None] >= start[None, :])", "(query[:, None] > start[None, :])"),
    (forward, "(query[:, None] < stop[None, :])", "(query[:, None] <= stop[None, :])"),
    (backward, "(query[None, :] >= start[:, None])", "(query[None, :] > start[:, None])"),
    (backward, "(query[None, :] < stop[:, None])", "(query[None, :] <= stop[:, None])"),
    (backward, "group = head // repeats", "group = head % repeats"),
    (backward, "first_head + step // num_blocks", "first_head"),
    (backward, "group * repeats,", "group,"),
    (backward, "gap_end - gap_begin, 0)", "0, 0)"),
    (
        forward,
        "total = total * decay + tl.sum(weights, 1)",
        "total = total + tl.sum(weights, 1)",
    ),
    (tiles, "        tile += tl.load(", "        tile += 0 * tl.load("),
    (forward, "part % 2 == 1", "False"),
    (backward, "tl.static_range(0 if HAS_CACHE else 2, 4)", "tl.static_range(2, 4)"),
    (backward, "dq * scale", "dq"),
    (forward, "group = head // repeats", "group = head % repeats"),
    (backward, "(query[:, None] >= start[None, :])", "(query[:, None] > start[None, :])"),
    (backward, "part % 2 == 1", "False"),
    (backward, "dscores = weights * (dot(v", "dscores = (dot(v"),
    (block_index, "-(-all_start // block_q)", "all_start // block_q"),
    (block_index, "all_end // block_q)", "-(-all_end // block_q))"),
    (block_index, "-(-any_end // block_q)", "any_end // block_q"),
    (block_index, "offsets[1:, 0] = offsets[:-1, 4]", "offsets[1:, 0] = offsets[:-1, 3]"),
    (block_index, "tile + shift, block", "tile, block"),
    (key_rows, "offset = np.repeat(first -", "offset = np.repeat(first[::-1] -"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "old", "new"), MUTANTS, ids=range(len(MUTANTS)))
def test_planted_bugs_are_caught(
    module: ModuleType, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(module)
    assert old in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new).replace("from .", "from psrl.kernels.triton."))
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, mutant)
    spec.loader.exec_module(mutant)
    for user in (host, attention_index, forward, backward):
        for name, value in list(vars(user).items()):
            if callable(value) and name in vars(mutant) and value is vars(module).get(name):
                monkeypatch.setattr(user, name, vars(mutant)[name])
    assert mutant_error() > 1e-3


def mutant_error() -> float:
    """Largest error on a case that has every kind of visit; infinite when it does not run."""
    segments = [Segment(-1, 20), Segment(0, 38), Segment(1, 17), Segment(0, 20), Segment(0, 16)]
    store = buffer_store(111, 2, 16, torch.float32)
    with np.errstate(all="ignore"):
        try:
            errors = check_forest(segments, attend, heads=(4, 2), cuts=[85, 88], store=store)
        except Exception:
            return float("inf")
    return max(errors.values())


def test_the_case_for_planted_bugs_passes_without_one() -> None:
    assert mutant_error() <= TOLERANCE[torch.float32]
