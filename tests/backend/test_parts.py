"""Token ids, parameter layouts, the key/value buffer, and logprobs from sliced logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from psrl.backend.compat import parallel_state
from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.model import build_model, transformer_config
from psrl.backend.model.parameters import ParallelGroups, gather_full, load_full, shard, unshard
from psrl.backend.options import OptimizerOptions
from psrl.backend.train.inputs import LossTokens, edge_inputs
from psrl.backend.train.kv_store import BlockStore, buffer_rows
from psrl.backend.train.loss import kl_terms
from psrl.backend.train.optimizer import MainAdamW, MainGradients
from psrl.backend.train.predictions import vocab_parallel_logprobs
from psrl.backend.train.tokens import TokenIds, expand_tokens, packed_token_ids
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError, PlanError
from psrl.core.plan.packing import LossEdges, pack_rank
from psrl.core.plan.schedule import Op
from psrl.core.samples.sample import make_batch
from psrl.kernels.attention.buffer_store import BufferStore
from tests.backend.cases import TINY, make_case, run_case, single_process
from tests.random_plans import random_program

BLOCKS = make_batch(
    [np.array([0, 1, 2]), np.array([0, 1]), np.array([2, 0])],
    [[(1, 6)], [], [(2, 4)]],
    symbol_num_tokens=np.array([3, 1, 4]),
)


def test_equal_blocks_have_equal_tokens_and_others_differ_in_the_first() -> None:
    first, second, third = (expand_tokens(BLOCKS, s, 1000) for s in range(3))
    assert [len(first), len(second), len(third)] == [8, 4, 7]
    assert np.array_equal(first[:4], second)
    assert np.array_equal(first[4:], third[:4])
    assert [first[0], first[3], first[4]] == [0, 1, 2]
    assert len(np.unique(first[1:3])) == 2
    assert (first < 1000).all()


def test_token_level_ids_are_kept_or_refused() -> None:
    batch = make_batch([np.array([5, 70, 5])], [[(1, 3)]])
    assert expand_tokens(batch, 0, 71).tolist() == [5, 70, 5]
    with pytest.raises(BackendError, match="token id 70, the model's vocabulary 64"):
        TokenIds(batch, 64)
    assert expand_tokens(batch, 0, 64, reduce_modulo=True).tolist() == [5, 6, 5]


@given(st.integers(0, 10**6))
def test_packed_tokens_are_those_of_every_sample_on_its_path(seed: int) -> None:
    planned = random_program(np.random.default_rng(seed))
    token_ids = TokenIds(planned.batch, 3)
    sample = planned.program.assignments.sample
    owner, token, hidden = planned.edges(0).sample, planned.edges(0).token, {}
    for packed in pack_rank(planned.program.on_rank(0), planned.tree):
        hidden[packed.index] = packed_token_ids(token_ids, packed, planned.tree, sample)
    edges = planned.edges(0)
    found = [hidden[m][r] for m, r in zip(edges.micro_batch, edges.row, strict=True)]
    assert found == token_ids.of_samples(sample[owner], token - 1).tolist()


@given(st.integers(0, 10**6))
def test_loss_tokens_are_numbered_in_order(seed: int) -> None:
    batch = random_program(np.random.default_rng(seed)).batch
    loss_tokens = LossTokens(batch)
    assert len(loss_tokens) == batch.loss_tokens
    number = loss_tokens.number(loss_tokens.sample, loss_tokens.token)
    assert np.array_equal(number, np.arange(len(loss_tokens)))
    spans = [
        (s, t)
        for s in range(batch.num_samples)
        for a, z in batch.sample_loss_spans(s)
        for t in range(a, z)
    ]
    assert spans == list(zip(loss_tokens.sample, loss_tokens.token, strict=True))


def test_edges_that_share_a_row_stay_in_its_chunk() -> None:
    batch = make_batch([np.arange(9)], [[(1, 9)]])
    row = np.array([5, 0, 3, 3, 0, 7, 7, 7])
    edges = LossEdges(np.zeros(8, np.int64), np.arange(1, 9), np.zeros(8, np.int64), row)
    inputs = edge_inputs(edges, np.array([0]), TokenIds(batch, 9), LossTokens(batch), chunk_rows=2)
    assert inputs is not None
    assert inputs.rows.tolist() == [0, 3, 5, 7]
    assert [(c.num_rows, c.edge_start, c.edge_end) for c in inputs.chunks] == [(2, 0, 4), (2, 4, 8)]
    assert inputs.chunk_row.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    assert sorted(inputs.target.tolist()) == list(range(1, 9))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("x.mlp.linear_fc1.weight", (8, 3)),
        ("x.self_attention.linear_qkv.bias", (8,)),
        ("x.mlp.linear_fc2.weight", (3, 8)),
        ("decoder.final_layernorm.weight", (8,)),
    ],
)
def test_shards_make_the_full_tensor(name: str, shape: tuple[int, ...]) -> None:
    full = torch.arange(float(np.prod(shape))).view(shape)
    for size in (1, 2, 4):
        shards = [shard(full, name, rank, size) for rank in range(size)]
        assert torch.equal(unshard(shards, name), full)
    gate_and_up = shard(torch.arange(8), "x.linear_fc1.weight", 1, 2)
    assert gate_and_up.tolist() == [2, 3, 6, 7]


def full_weights(size: int, perturb: float) -> dict[str, torch.Tensor]:
    parallel = ParallelConfig(tensor_model_parallel_size=size)
    with model_parallel(parallel):
        model = build_model(TINY, parallel, seed=1, dtype=torch.float32, perturb=perturb)
        rank = parallel_state.get_tensor_model_parallel_rank()
        full = gather_full(model.named_parameters(), ParallelGroups.current())
        load_full(model, full, rank, size)
        return gather_full(model.named_parameters(), ParallelGroups.current())


@pytest.mark.slow
def test_weights_do_not_depend_on_the_parallel_size() -> None:
    one = run_ranks(full_weights, 1, 1, 0.0)[0]
    two = run_ranks(full_weights, 2, 2, 0.0)[1]
    other = run_ranks(full_weights, 1, 1, 0.5)[0]
    assert list(one) == list(two)
    for name, weight in one.items():
        assert torch.equal(weight, two[name])
        assert not torch.equal(weight, other[name])


def sliced_logprobs() -> tuple[float, float]:
    """Difference to Megatron's cross entropy: logprobs, and gradients of the local logits."""
    with model_parallel(ParallelConfig(tensor_model_parallel_size=2)):
        group = parallel_state.get_tensor_model_parallel_group()
        generator = torch.Generator().manual_seed(2)
        full = 3 * torch.randn((5, 16), generator=generator)
        row = torch.tensor([0, 1, 1, 2, 3, 4, 4])
        target = torch.tensor([3, 15, 0, 8, 7, 2, 2])
        mine = full.chunk(2, dim=1)[group.rank()].clone().requires_grad_()
        theirs = mine.detach().clone().requires_grad_()
        weight = torch.arange(1.0, 8.0)
        ours = vocab_parallel_logprobs(mine, row, target, group)
        (ours * weight).sum().backward()
        other = -vocab_parallel_cross_entropy(theirs[row], target)
        (other * weight).sum().backward()
        return float((ours - other).abs().max()), float((mine.grad - theirs.grad).abs().max())


def test_sliced_logprobs_equal_megatrons() -> None:
    for errors in run_ranks(sliced_logprobs, 2):
        assert max(errors) <= 2e-6


class OneRank:
    """A tensor-parallel group of this process alone, without a process group behind it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def test_logprobs_are_as_exact_as_their_logits() -> None:
    """The error of one float32 number around 11, as a float32 logprob has it, is up to 4.8e-7."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((64, 50_000), generator=generator).requires_grad_()
    row, target = torch.arange(64), torch.arange(64) * 700
    exact = logits.detach().double().requires_grad_()
    found = vocab_parallel_logprobs(logits, row, target, OneRank())  # type: ignore[arg-type]
    expected = exact.log_softmax(dim=1)[row, target]
    assert float((found - expected).detach().abs().max()) <= 2.5e-7
    weight = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert float((logits.grad - exact.grad).norm() / exact.grad.norm()) <= 1e-7


def test_kl_estimate_is_zero_only_for_equal_policies() -> None:
    logprob = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    assert kl_terms(logprob, logprob).tolist() == [0.0, 0.0, 0.0]
    moved = kl_terms(logprob, logprob + torch.tensor([0.5, -0.5, 0.1]))
    assert moved.tolist() == pytest.approx(
        [np.exp(0.5) - 1.5, np.exp(-0.5) - 0.5, np.exp(0.1) - 1.1]
    )


def two_reads() -> BlockStore:
    """A store of a random program with at least one block, just after its first forward."""
    planned = single_process(make_case(1).planned.batch, seed=1)
    mine = planned.program.on_rank(0)
    assert len(mine.blocks), "this seed must cache something"
    store = BlockStore(mine, buffer_rows(mine, mine.ops()), 2, 1, 4, torch.bfloat16)
    for op in mine.ops():
        store.begin(op)
        if op.micro_batch == int(mine.blocks.micro_batch[0]):
            return store
        store.end(op)
    raise AssertionError("the owner has a forward")


def test_a_block_is_read_only_while_it_lives() -> None:
    planned = single_process(make_case(1).planned.batch, seed=1)
    table = planned.program.blocks
    block, rows = int(table.block[0]), int(table.num_tokens[0])
    store = two_reads()
    keys = torch.arange(rows * 4.0).view(rows, 1, 4)
    store.write(block, 1, keys, -keys)
    k, v = store.read(block, 1)
    assert torch.equal(k.float(), keys.bfloat16().float())
    assert torch.equal(v, -k)
    assert store.kv_gradient_bytes == 0
    assert store.gradient(block, 1) is None
    one = torch.ones(1, 1, 4)
    store.add_gradient(block, 1, rows - 1, rows, one, 2 * one)
    store.add_gradient(block, 1, rows - 1, rows, one, 2 * one)
    dk, dv = store.gradient(block, 1) or (None, None)
    assert dk is not None
    assert dv is not None
    assert dk.dtype == torch.float32
    assert dk[-1].tolist() == [[2.0] * 4]
    assert dv.sum() == 16.0
    assert store.kv_gradient_bytes == 2 * 2 * 4 * 4 * int(table.allocated_tokens[0])
    in_place, _ = store.gradient_buffers(1, [block])
    assert in_place[store.extent(block).end - 1].tolist() == [[2.0] * 4]
    assert isinstance(store, BufferStore)
    assert torch.equal(store.buffers(1)[0][store.extent(block).start], k[0])
    with pytest.raises(BackendError, match=f"has {rows} rows in the plan, got {rows + 1}"):
        store.write(block, 0, torch.ones(rows + 1, 1, 4), torch.ones(rows + 1, 1, 4))
    store.end(Op("backward", int(table.release_micro_batch[0])))
    assert store.gradient(block, 1) is None
    with pytest.raises(PlanError, match="not alive"):
        store.read(block, 1)


def held_bytes() -> dict[str, int]:
    """Activation bytes after the forward of one micro-batch, by what it keeps."""
    case, held = make_case(3), {}
    with model_parallel(ParallelConfig()):
        for activation in ("keep", "recompute", "drop"):
            planned = single_process(
                case.planned.batch, activations=(activation,), max_micro_batches=1
            )
            events = run_case(replace(case, planned=planned), torch.float32).events
            assert events is not None
            held[activation] = int(events.activation_bytes[events.op == "forward"][0])
    return held


def test_recompute_and_drop_keep_less() -> None:
    held = run_ranks(held_bytes, 1)[0]
    assert held["drop"] == 0
    assert 0 < held["recompute"] < 0.4 * held["keep"]


def steps(dtype: torch.dtype, num_steps: int) -> list[tuple[float, torch.Tensor]]:
    """Norm of the gradient and weights after each AdamW step on a quadratic."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor([3.0, -4.0, 0.0], dtype=dtype))
    gradients = MainGradients(module)
    options = OptimizerOptions(learning_rate=2e-3, max_gradient_norm=2.0)
    adamw = MainAdamW(gradients, options)
    results = []
    for _ in range(num_steps):
        for _ in range(2):  # two micro-batches add up
            (module.weight.square().sum() / 4).backward()
        norm = gradients.norm()
        adamw.step(norm)
        gradients.zero()
        results.append((norm, module.weight.detach().clone()))
    return results


def test_main_weights_keep_steps_that_bf16_would_lose() -> None:
    wide = run_ranks(steps, 1, torch.float32, 10)[0]
    narrow = run_ranks(steps, 1, torch.bfloat16, 10)[0]
    assert wide[0][0] == pytest.approx(5.0)
    assert wide[0][1].tolist() == pytest.approx([2.998, -3.998, 0.0])
    assert narrow[0][1].tolist() == [3.0, -4.0, 0.0]
    assert narrow[-1][1].dtype == torch.bfloat16
    assert torch.equal(narrow[-1][1], wide[-1][1].bfloat16())
    assert narrow[-1][1][0] < 3.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_dropout", 0.1), ("attention_dropout", 0.1), ("window_size", (8, 0))],
)
def test_unproven_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(BackendError, match=f"{name} = .* is refused"):
        transformer_config(TINY, ParallelConfig(), torch.float32, **{name: value})
