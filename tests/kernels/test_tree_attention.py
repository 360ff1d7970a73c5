"""Sharing is exact: the same outputs and gradients as every sample on its own."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from psrl.core.errors import BackendError
from psrl.core.plan.packing import LOCAL, PackedMicroBatch, pack_rank
from psrl.kernels import DictStore, tree_attention
from psrl.kernels.attention.tree_attention import Implementation
from tests.kernels.attention_cases import (
    Result,
    Rows,
    branching_case,
    largest_error,
    packed_tokens,
    plain_attention,
    random_case,
    random_rows,
    random_weights,
    release,
    run_alone,
    run_sharing,
    sample_tokens,
    sdpa_attention,
    summed_sizes,
    worst_error,
)
from tests.random_plans import RandomProgram, random_program

# All that take float64 on a CPU; `test_triton_attention` tests the other.
IMPLEMENTATIONS: tuple[Implementation, ...] = ("parts", "reference", "sdpa")

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def compare(case: RandomProgram, rows: Rows, implementation: Implementation) -> float:
    weights = random_weights(case, rows)
    expected = run_alone(case, rows, weights, plain_attention)
    found = run_sharing(case, rows, weights, implementation)
    return worst_error(found, expected, summed_sizes(case, rows, weights))


@pytest.mark.slow
@every_implementation
def test_random_programs_match_samples_alone(implementation: Implementation) -> None:
    reads = 0
    for seed in range(160):
        case = random_case(seed)
        reads += len(case.program.blocks)
        error = compare(case, random_rows(case, seed), implementation)
        assert error <= 1e-10, f"seed {seed}"
    assert reads > 160  # the cases do read across micro-batches


@every_implementation
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (7, 1), (14, 2)])
@pytest.mark.parametrize("length", [1, 63, 111, 300])
def test_head_ratios_and_chain_lengths(
    implementation: Implementation, heads: tuple[int, int], length: int
) -> None:
    case = branching_case(length, seed=length, max_micro_batches=3)
    rows = random_rows(case, length, heads=heads, head_dim=8)
    assert compare(case, rows, implementation) <= 1e-10


@pytest.mark.parametrize("length", [1, 63])
def test_one_error_of_the_tolerances_size_is_noticed(length: int) -> None:
    """In outputs and gradients; a gradient of zero takes rounding, and nothing above it."""
    case = branching_case(length, seed=length, max_micro_batches=3)
    rows = random_rows(case, length, head_dim=8)
    weights = random_weights(case, rows)
    expected = run_alone(case, rows, weights, plain_attention)
    sizes = summed_sizes(case, rows, weights)
    for name in Result._fields:
        exact = getattr(expected, name)
        vanishes = length == 1 and name in ("dq", "dk")
        largest = getattr(sizes, name).max() if vanishes else exact.abs().max()
        planted = exact.clone()
        planted[-1, 0, 0] += 1.01e-10 * largest
        assert worst_error(expected._replace(**{name: planted}), expected, sizes) > 1e-10, name
        planted[-1, 0, 0] = exact[-1, 0, 0] + 1e-17
        assert worst_error(expected._replace(**{name: planted}), expected, sizes) <= 1e-16, name


@pytest.mark.slow
@every_implementation
def test_uncut_chain_longer_than_one_square(implementation: Implementation) -> None:
    case = branching_case(1200, max_micro_batches=1)
    assert max(c.end - c.start for c in pack_rank(case.program, case.tree)[0].chains) == 1200
    rows = random_rows(case, 0, heads=(2, 1), head_dim=8)
    assert compare(case, rows, implementation) <= 1e-10


@pytest.mark.slow
def test_parts_match_reference_in_float32() -> None:
    for seed in range(40):
        case = (
            branching_case(100 + 10 * seed, seed, max_micro_batches=4)
            if seed % 4 == 0
            else random_case(seed)
        )
        rows = random_rows(case, seed, head_dim=16, dtype=torch.float32)
        weights = random_weights(case, rows)
        parts, reference = (run_sharing(case, rows, weights, i) for i in ("parts", "reference"))
        sizes = summed_sizes(case, rows, weights)
        assert worst_error(parts, reference, sizes) <= 2e-5, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize(
    ("implementation", "plain"), [("parts", sdpa_attention), ("reference", plain_attention)]
)
def test_bfloat16_is_as_good_as_unshared(
    implementation: Implementation, plain: Callable[..., Tensor], length: int
) -> None:
    shared_errors, unshared_errors = [], []
    for seed in range(8):
        case = branching_case(length, seed=seed, max_micro_batches=4)
        rows = random_rows(case, seed, heads=(4, 2), head_dim=32, dtype=torch.bfloat16)
        weights = random_weights(case, rows)
        exact_weights = [w.double() for w in weights]
        exact = run_alone(case, Rows(*(x.double() for x in rows)), exact_weights, plain_attention)
        unshared = run_alone(case, rows, weights, plain)
        shared = run_sharing(case, rows, weights, implementation)
        unshared_errors.append([a.double() - b for a, b in zip(unshared, exact, strict=True)])
        shared_errors.append([a.double() - b for a, b in zip(shared, exact, strict=True)])
    # FlashAttention's rule: twice the error of an unfused run. Seeds are pooled because the
    # largest error of a single small case is mostly luck.
    for i, name in enumerate(Result._fields):
        ours, theirs = (torch.cat([e[i] for e in es]) for es in (shared_errors, unshared_errors))
        assert ours.abs().max() <= 2 * theirs.abs().max(), name
        assert ours.square().mean() <= 4 * theirs.square().mean(), name


class ForgetfulStore(DictStore):
    """Drops what readers add, which no error message would ever report."""

    def add_gradient(self, *args: object) -> None:
        pass


@every_implementation
def test_dropped_reader_gradients_are_noticed(implementation: Implementation) -> None:
    case = branching_case(24, seed=5, max_micro_batches=4)
    rows = random_rows(case, 0)
    weights = random_weights(case, rows)
    expected = run_alone(case, rows, weights, plain_attention)
    broken = run_sharing(case, rows, weights, implementation, ForgetfulStore)
    assert largest_error(broken.out, expected.out) <= 1e-10
    assert largest_error(broken.dk, expected.dk) > 1e-3
    assert largest_error(broken.dv, expected.dv) > 1e-3


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_branches_are_bit_identical(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    for seed in range(30):
        case = random_case(seed, num_ranks=1) if seed else branching_case(600, max_micro_batches=3)
        rows, tree = random_rows(case, seed, head_dim=16, dtype=dtype), case.tree
        node = 1 + seed % (tree.num_nodes - 1)
        first, last = (int(tree.token_start[v]) for v in (node, node + 1))
        below = slice(first, int(tree.token_start[tree.subtree_end[node]]))
        changed = Rows(*(x.clone() for x in rows))
        for x in changed:
            x[first:last] = 3 * x[first:last] + 1
        before, after = (unique_outputs(case, r, implementation) for r in (rows, changed))
        assert not torch.equal(before[below], after[below])
        before[below] = after[below] = 0
        assert torch.equal(before, after), f"seed {seed}"


def unique_outputs(case: RandomProgram, rows: Rows, implementation: Implementation) -> Tensor:
    """[U, H, D] outputs of a one-rank program."""
    out = torch.full_like(rows.q, torch.nan)
    for packed, tokens, result in forward_all(case, rows, DictStore(), implementation):
        assert len(tokens) == packed.total_tokens
        out[tokens] = result
    return out


def forward_all(
    case: RandomProgram, rows: Rows, store: DictStore, implementation: Implementation
) -> list[tuple[PackedMicroBatch, Tensor, Tensor]]:
    done = []
    for packed in pack_rank(case.program, case.tree):
        tokens = packed_tokens(case, packed)
        leaves = [x[tokens] for x in rows]
        out = tree_attention(*leaves, packed, store=store, implementation=implementation)
        done.append((packed, tokens, out))
    return done


class PoisonedStore(DictStore):
    """Gives NaN in every row that the micro-batch in `reader` does not see."""

    reader: PackedMicroBatch

    def read(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        rows = super().read(block, layer)
        seen = torch.zeros(len(rows[0]), dtype=torch.bool)
        for run in (r for c in self.reader.chains for r in c.runs if r.source == block):
            seen[run.start : run.end] = True
        return tuple(x.masked_fill(~seen[:, None, None], torch.nan) for x in rows)


@pytest.mark.slow
@every_implementation
def test_unseen_cached_rows_may_hold_anything(implementation: Implementation) -> None:
    num_poisoned = 0
    for seed in range(60):
        case = random_case(seed, num_ranks=1, max_block_tokens=None)
        rows, store = random_rows(case, seed), PoisonedStore()
        clean = unique_outputs(case, rows, implementation)
        for packed in pack_rank(case.program, case.tree):
            store.reader, tokens = packed, packed_tokens(case, packed)
            leaves = [x[tokens].requires_grad_() for x in rows]
            out = tree_attention(*leaves, packed, store=store, implementation=implementation)
            assert torch.equal(out, clean[tokens])
            for gradient in torch.autograd.grad(out, leaves, torch.ones_like(out)):
                assert gradient.isfinite().all()
            read = [store.read(b, 0)[0] for b in packed.read_blocks]
            num_poisoned += sum(bool(k.isnan().any()) for k in read)
    assert num_poisoned > 10


class TwoLayers(torch.nn.Module):
    """Two attention layers with projections: gradients flow through both layers' stores."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocab_size, 16, dtype=torch.float64)
        self.qkv = torch.nn.ModuleList(
            [torch.nn.Linear(16, 32, dtype=torch.float64) for _ in range(2)]
        )

    def forward(self, token_ids, attention, recompute: bool) -> Tensor:
        x = self.embedding(token_ids)
        for layer in range(2):
            if recompute:
                x = checkpoint(self.block, x, layer, attention, use_reentrant=False)
            else:
                x = self.block(x, layer, attention)
        return x

    def block(self, x: Tensor, layer: int, attention) -> Tensor:
        q, k, v = self.qkv[layer](x).unflatten(1, (8, 4)).split([4, 2, 2], dim=1)
        return x + attention(q, k, v, layer).flatten(1).tanh()


@every_implementation
@pytest.mark.parametrize("recompute", [False, True])
def test_parameter_gradients_of_two_layers(implementation: Implementation, recompute: bool) -> None:
    for seed in range(12):
        case = random_case(seed, num_ranks=1, activations=("keep", "drop"))
        tree, model = case.tree, TwoLayers(3)
        ids = torch.empty(tree.unique_tokens, dtype=torch.int64)
        weight = torch.zeros(tree.unique_tokens, 16, dtype=torch.float64)
        expected = torch.zeros(())
        for sample in range(case.samples.num_samples):
            tokens = sample_tokens(case, sample)
            ids[tokens] = torch.from_numpy(case.samples.sample_symbols(sample))
            part = torch.randn(len(tokens), 16, dtype=torch.float64)
            weight.index_add_(0, tokens, part)
            x = model(ids[tokens], lambda q, k, v, _: plain_attention(q, k, v), recompute=False)
            expected = expected + (x * part).sum()
        gradient = torch.autograd.grad(expected, list(model.parameters()))
        loss = run_model(case, model, ids, weight, implementation, recompute)
        assert abs(loss - expected.item()) <= 1e-10 * max(1.0, abs(loss))
        for got, want in zip(model.parameters(), gradient, strict=True):
            assert largest_error(got.grad, want) <= 1e-10, f"seed {seed}"


def run_model(
    case: RandomProgram,
    model: TwoLayers,
    ids: Tensor,
    weight: Tensor,
    implementation: Implementation,
    recompute: bool,
) -> float:
    """Loss of a one-rank program; parameter gradients are left in the model."""
    store, total, live = DictStore(), 0.0, {}
    program, micro_batches = case.program.on_rank(0), pack_rank(case.program, case.tree)
    for op in program.ops():
        packed = micro_batches[op.micro_batch]
        tokens = packed_tokens(case, packed)

        def attention(q: Tensor, k: Tensor, v: Tensor, layer: int, packed=packed) -> Tensor:
            return tree_attention(
                q, k, v, packed, store=store, layer=layer, implementation=implementation
            )

        if op.kind == "backward":
            loss = live.pop(packed.index)
            total += loss.item()
            loss.backward()
        else:
            dropped = program.micro_batches.activation[packed.index] == "drop"
            with torch.set_grad_enabled(op.kind == "recompute" or not dropped):
                out = model(ids[tokens], attention, recompute)
                live[packed.index] = (out * weight[tokens]).sum()
        release(store, program, op.kind, packed.index)
    return total


@every_implementation
def test_backward_accepts_the_gradient_of_a_sum(implementation: Implementation) -> None:
    case = branching_case(20, max_micro_batches=1)
    (packed,) = pack_rank(case.program, case.tree)
    leaves = [x.requires_grad_() for x in random_rows(case, 0)]
    out = tree_attention(*leaves, packed, implementation=implementation)
    summed = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    dense = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for a, b in zip(summed, dense, strict=True):
        assert torch.equal(a, b)


@every_implementation
def test_scale_and_strided_inputs(implementation: Implementation) -> None:
    case = branching_case(20, max_micro_batches=1)
    (packed,) = pack_rank(case.program, case.tree)
    mixed = torch.randn(packed.total_tokens, 8, 4, dtype=torch.float64, requires_grad=True)
    q, k, v = mixed.split([4, 2, 2], dim=1)
    default = tree_attention(
        q.contiguous() * 0.5, k.contiguous(), v.contiguous(), packed, implementation=implementation
    )
    scaled = tree_attention(q, k, v, packed, implementation=implementation, scale=0.25)
    assert largest_error(scaled, default) <= 1e-12
    weight = torch.randn_like(scaled)
    gradients = [torch.autograd.grad(out, mixed, weight)[0] for out in (scaled, default)]
    assert largest_error(*gradients) <= 1e-12


@every_implementation
def test_empty_micro_batch(implementation: Implementation) -> None:
    empty = np.empty(0, np.int64)
    packed = PackedMicroBatch(0, empty, empty, empty, (), ())
    q = torch.empty(0, 4, 8, requires_grad=True)
    k, v = (torch.empty(0, 2, 8, requires_grad=True) for _ in range(2))
    out = tree_attention(q, k, v, packed, implementation=implementation)
    assert out.shape == (0, 4, 8)
    assert torch.autograd.grad(out.sum(), [q, k, v])[1].shape == (0, 2, 8)


def test_same_run_gives_the_same_bits() -> None:
    case = branching_case(300, max_micro_batches=3)
    rows = random_rows(case, 0, dtype=torch.float32)
    weights = random_weights(case, rows)
    first, second = (run_sharing(case, rows, weights, "parts") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (shape(6, 4), shape(6, 2, 8), shape(6, 2, 8), "expected q"),
        (shape(6, 4, 8), shape(6, 2, 8), shape(6, 1, 8), "expected q"),
        (shape(6, 4, 8), shape(6, 2, 8), shape(6, 2, 4), "expected q"),
        (shape(6, 4, 4), shape(6, 2, 8), shape(6, 2, 8), "head dimension"),
        (shape(5, 4, 8), shape(5, 2, 8), shape(5, 2, 8), "6 tokens"),
        (shape(6, 4, 8), shape(4, 2, 8), shape(4, 2, 8), "6 tokens"),
        (shape(6, 4, 8), shape(6, 3, 8), shape(6, 3, 8), "multiple"),
        (shape(6, 4, 8), shape(6, 2, 8, dtype=torch.float64), shape(6, 2, 8), "dtype"),
        (*[shape(6, 4, 8, dtype=torch.int64)] * 3, "dtype"),
        (shape(6, 8, 4).transpose(1, 2), shape(6, 2, 8), shape(6, 2, 8), "q has stride"),
        (shape(6, 4, 8), shape(6, 2, 8), shape(6, 8, 2).transpose(1, 2), "v has stride"),
    ],
)
def test_wrong_tensors_are_refused(q: Tensor, k: Tensor, v: Tensor, message: str) -> None:
    case = branching_case(3, max_micro_batches=1)
    (packed,) = pack_rank(case.program, case.tree)
    assert packed.total_tokens == 6
    with pytest.raises(BackendError, match=message):
        tree_attention(q, k, v, packed, implementation="reference")


def test_missing_store_and_unknown_implementation_are_refused() -> None:
    case = random_program(np.random.default_rng(0), branching_case(12).batch, max_micro_batches=1)
    (packed,) = pack_rank(case.program, case.tree)
    rows = random_rows(case, 0)
    caching = replace(packed, cached=((0, 0, 3),))
    chains = tuple(
        c._replace(runs=tuple(r._replace(source=0) for r in c.runs)) for c in packed.chains
    )
    assert any(run.source != LOCAL for chain in chains for run in chain.runs)
    for needy in (caching, replace(packed, chains=chains)):
        with pytest.raises(BackendError, match="store is None"):
            tree_attention(*rows, needy, implementation="parts")
    with pytest.raises(BackendError, match="unknown implementation 'flash'"):
        tree_attention(*rows, packed, implementation="flash")
