"""Runs a program's attention micro-batch by micro-batch, and every sample alone, to compare.

U unique tokens of the tree, H query heads, G key/value heads, D head dimension. Queries, keys and
values are free inputs, one row per unique token, so every gradient can be checked.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from psrl.core.plan.packing import PackedMicroBatch, pack_rank
from psrl.core.run.relative_error import relative_error
from psrl.core.samples.sample import make_batch
from psrl.kernels import DictStore, tree_attention
from psrl.kernels.attention.tree_attention import Implementation
from psrl.kernels.benchmark import check
from tests.random_plans import RandomProgram, random_program


class Rows(NamedTuple):
    """Queries [U, H, D], keys and values [U, G, D] of all unique tokens."""

    q: Tensor
    k: Tensor
    v: Tensor


class Result(NamedTuple):
    """Outputs of each sample, concatenated [logical tokens, H, D], and gradients [U, ...]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def random_case(seed: int, **options: object) -> RandomProgram:
    """A small program whose shape, ranks and blocks all depend on the seed."""
    rng = np.random.default_rng(seed)
    chosen = {
        "num_ranks": 1 + seed % 2,
        "max_block_tokens": (None, 2, 5)[seed % 3],
        "activations": ("keep", "recompute", "drop"),
        "random_order": seed % 4 > 0,
    }
    return random_program(rng, **{**chosen, **options})


def branching_case(length: int, seed: int = 0, **options: object) -> RandomProgram:
    """Two samples of `length` tokens that part in the middle, and half of one more."""
    half = length // 2
    left = np.arange(length)
    right = np.concatenate([left[:half], 10_000 + np.arange(length - half)])
    third = np.concatenate([left[: half // 2], 20_000 + np.arange(half)])
    batch = make_batch([left, right, third][: 1 + 2 * (length > 1)], [[]] * (1 + 2 * (length > 1)))
    return random_program(np.random.default_rng(seed), batch, **options)


def random_rows(
    case: RandomProgram,
    seed: int,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Rows:
    """Random rows; `heads` are the numbers of query and of key/value heads."""
    generator = torch.Generator().manual_seed(seed)
    count = case.tree.unique_tokens
    return Rows(
        *(
            torch.randn(count, h, head_dim, generator=generator, dtype=torch.float64).to(dtype)
            for h in (heads[0], heads[1], heads[1])
        )
    )


def random_weights(case: RandomProgram, rows: Rows, seed: int = 1) -> list[Tensor]:
    """Per sample [tokens, H, D]: the linear functional whose gradients are compared."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, *rows.q.shape[1:], generator=generator, dtype=torch.float64).to(rows.q.dtype)
        for n in case.samples.num_tokens.tolist()
    ]


def sample_tokens(case: RandomProgram, sample: int) -> Tensor:
    """Unique-token index of each token of a sample."""
    tree = case.tree
    nodes = tree.path(int(tree.sample_node[sample]))
    spans = [np.arange(tree.token_start[v], tree.token_start[v + 1]) for v in nodes]
    return torch.from_numpy(np.concatenate([*spans, np.empty(0, np.int64)]))


def packed_tokens(case: RandomProgram, packed: PackedMicroBatch) -> Tensor:
    """Unique-token index of each row of a micro-batch."""
    tree = case.tree
    first = tree.token_start[packed.node] - tree.start_depth[packed.node] + packed.start_depth
    spans = [np.arange(a, a + n) for a, n in zip(first, packed.num_tokens, strict=True)]
    return torch.from_numpy(np.concatenate(spans))


def run_alone(
    case: RandomProgram, rows: Rows, weights: list[Tensor], attention: Callable[..., Tensor]
) -> Result:
    """Every sample by itself; gradients are summed over samples in at least float32."""
    wide = torch.promote_types(rows.q.dtype, torch.float32)
    gradients = [torch.zeros_like(x, dtype=wide) for x in rows]
    outs = []
    for sample, weight in enumerate(weights):
        tokens = sample_tokens(case, sample)
        leaves = [x[tokens].requires_grad_() for x in rows]
        out = attention(*leaves)
        for total, part in zip(gradients, torch.autograd.grad(out, leaves, weight), strict=True):
            total.index_add_(0, tokens, part.to(wide))
        outs.append(out.detach())
    return Result(torch.cat(outs), *gradients)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sample, written out with repeated heads."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sample by torch's own fused operator."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def run_sharing(
    case: RandomProgram,
    rows: Rows,
    weights: list[Tensor],
    implementation: Implementation,
    make_store: Callable[[], DictStore] = DictStore,
) -> Result:
    """The program's ops in schedule order, one store per rank, blocks released as planned."""
    wide = torch.promote_types(rows.q.dtype, torch.float32)
    gradients = [torch.zeros_like(x, dtype=wide) for x in rows]
    outs: list[Tensor] = [torch.empty(0)] * len(weights)
    for rank in range(case.num_ranks):
        program, store = case.program.on_rank(rank), make_store()
        samples = np.flatnonzero(case.program.assignments.rank == rank).tolist()
        rank_weight, rank_out = torch.zeros_like(rows.q), torch.full_like(rows.q, torch.nan)
        for sample in samples:
            rank_weight.index_add_(0, sample_tokens(case, sample), weights[sample])
        micro_batches = pack_rank(program, case.tree)
        activation = program.micro_batches.activation
        live: dict[int, tuple[list[Tensor], Tensor]] = {}
        for op in program.ops():
            packed = micro_batches[op.micro_batch]
            tokens = packed_tokens(case, packed)
            if op.kind == "backward":
                leaves, out = live.pop(packed.index)
                parts = torch.autograd.grad(out, leaves, rank_weight[tokens])
                for total, part in zip(gradients, parts, strict=True):
                    total.index_add_(0, tokens, part.to(wide))
            else:
                keep = op.kind == "recompute" or activation[packed.index] != "drop"
                leaves = [x[tokens].requires_grad_(keep) for x in rows]
                out = tree_attention(*leaves, packed, store=store, implementation=implementation)
                assert op.kind == "forward" or torch.equal(rank_out[tokens], out)
                rank_out[tokens] = out.detach()
                live[packed.index] = leaves, out
            release(store, program, op.kind, packed.index)
        assert not program.is_update or not live
        for sample in samples:
            outs[sample] = rank_out[sample_tokens(case, sample)]
    return Result(torch.cat(outs), *gradients)


def release(store: DictStore, program: object, kind: str, micro_batch: int) -> None:
    """Release the blocks that die with an op."""
    blocks = program.blocks
    dead = (blocks.release_op == kind) & (blocks.release_micro_batch == micro_batch)
    for block in blocks.block[dead].tolist():
        store.release(block)


def summed_sizes(case: RandomProgram, rows: Rows, weights: list[Tensor]) -> Result:
    """Results with every term by its magnitude, in float64."""
    totals, outs = [torch.zeros_like(x, dtype=torch.float64) for x in rows], []
    for sample, weight in enumerate(weights):
        tokens = sample_tokens(case, sample)
        visible = torch.ones((len(tokens), len(tokens)), dtype=torch.bool).tril()
        out, *parts = check.summed_sizes(check.Inputs(*(x[tokens] for x in rows), weight), visible)
        for total, part in zip(totals, parts, strict=True):
            total.index_add_(0, tokens, part)
        outs.append(out)
    return Result(torch.cat(outs), *totals)


def largest_error(result: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """Largest difference over the largest expected value; `size` as for `relative_error`."""
    if not expected.numel():
        return 0.0
    wide = torch.promote_types(result.dtype, torch.float32)
    result, expected = result.detach().double(), expected.detach().double()
    return relative_error(
        float((result - expected).abs().max()),
        float(expected.abs().max()),
        size=0.0 if size is None else float(size.max()),
        epsilon=torch.finfo(wide).eps,
        num_terms=expected.shape[-1],
    )


def worst_error(result: Result, expected: Result, sizes: Result) -> float:
    """Largest error of the outputs and the three gradients."""
    return max(map(largest_error, result, expected, sizes))
