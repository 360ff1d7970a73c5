"""The roofline and the memory model: published totals, hand-computed figures, monotonicity."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.cost.cluster import ClusterSpec, ModelSpec, ParallelConfig
from psrl.core.cost.cost_model import RooflineCostModel
from psrl.core.cost.layer_time import Term
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.cost.presets import DEVICES, MODELS

MODEL = MODELS["qwen2.5-7b"]


def cluster(num_hosts: int = 1, **device: float) -> ClusterSpec:
    return ClusterSpec(
        device=DEVICES["h100-80"].model_copy(update=device),
        num_hosts=num_hosts,
        devices_per_host=8,
        intra_host_bytes_per_s=450e9,
        inter_host_bytes_per_s=50e9,
        intra_host_latency_s=5e-6,
        inter_host_latency_s=15e-6,
    )


def costs(
    tp: int = 1, pp: int = 1, dp: int = 1, without: tuple[Term, ...] = (), **changes: float
) -> RooflineCostModel:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp
    )
    return RooflineCostModel(MODEL, cluster(**changes), parallel, without=frozenset(without))


# What is the same for all micro-batches, however small.
FIXED: tuple[Term, ...] = ("host", "weights", "accumulation")
Q_AND_OUTPUT = 2 * 3584 * 3584
K_AND_V = 2 * 3584 * 512
MLP = 3 * 3584 * 18944
PROJECTIONS = Q_AND_OUTPUT + K_AND_V + MLP
LAYER = PROJECTIONS + (3584 + 2 * 512) + 2 * 3584
BANDWIDTH = 3.35e12 * 0.8


@pytest.mark.parametrize(
    ("name", "published"), [("qwen2.5-7b", 7_615_616_512), ("qwen2.5-0.5b", 494_032_768)]
)
def test_parameter_counts_equal_the_published_checkpoints(name: str, published: int) -> None:
    assert MODELS[name].num_parameters == published


def test_moe_counts_all_experts_but_multiplies_with_the_chosen() -> None:
    moe = MODEL.model_copy(update={"num_moe_experts": 8, "moe_topk": 2, "moe_ffn_hidden_size": 100})
    assert moe.mlp_parameters == 8 * 3 * 3584 * 100 + 3584 * 8
    assert moe.active_layer_parameters == moe.attention_parameters + 2 * 3 * 3584 * 100


def test_flops_of_one_layer_by_hand() -> None:
    parts = costs().op_parts(0, 1000, 10**6, 0, is_backward=False)
    assert parts["linear"] == pytest.approx(28 * 1000 * 2 * PROJECTIONS / (989e12 * 0.75))
    assert parts["attention"] == pytest.approx(28 * 10**6 * 2 * 2 * 28 * 128 / (989e12 * 0.5))


def test_long_forward_approaches_its_flops() -> None:
    """With free memory and launches only projections, attention and the head remain."""
    model = costs(host_layer_s=0.0, memory_bandwidth_bytes_per_s=1e30)
    device = DEVICES["h100-80"]
    tokens, pairs, head = 4096, 4096 * 4097 // 2, 100
    flops_s = 28 * tokens * 2 * PROJECTIONS / (989e12 * 0.75)
    flops_s += 28 * pairs * 4 * 3584 / (989e12 * device.attention_efficiency)
    flops_s += head * 2 * 3584 * 152064 / (989e12 * 0.75)
    assert model.forward_s(tokens, pairs, head) == pytest.approx(flops_s, rel=1e-9)


def test_memory_bound_work_by_hand() -> None:
    """14 passes over the hidden states per layer, 4 over fp32 logits; weights are read once."""
    model = costs(host_layer_s=0.0, peak_flops_per_s=1e30)
    layers_s = 28 * 1000 * 14 * 2 * 3584 * 2 / BANDWIDTH
    weights_s = 28 * PROJECTIONS * 2 / BANDWIDTH
    assert model.forward_s(1000, 0, 0) == pytest.approx(layers_s + weights_s)
    head_s = (1000 * 4 * 4 + 3584 * 2) * 152064 / BANDWIDTH
    assert model.forward_s(0, 0, 1000) == pytest.approx(head_s)


@pytest.mark.parametrize("num_tokens", [1, 16, 2048])
def test_few_tokens_wait_for_the_weights_and_many_for_the_products(num_tokens: int) -> None:
    """A product takes the longer of the two; the backward reads the weights, and writes as many."""
    read_s = 28 * PROJECTIONS * 2 / BANDWIDTH
    compute_s = 28 * num_tokens * 2 * PROJECTIONS / (989e12 * 0.75)
    for is_backward, factor in ((False, 1), (True, 2)):
        parts = costs().op_parts(0, num_tokens, 0, 0, is_backward)
        assert parts["linear"] == pytest.approx(factor * compute_s)
        together_s = factor * max(read_s, compute_s)
        assert parts["linear"] + parts["weights"] == pytest.approx(together_s)


def test_every_backward_adds_its_weight_gradients_to_the_main_gradients() -> None:
    """bf16 read, fp32 read and written: 10 bytes of each parameter, 7 ms at TP2 PP2 on an H100."""
    layers_s = 14 * (LAYER / 2) * 10 / BANDWIDTH
    ends_s = 3584 * 152064 / 2 * 10 / BANDWIDTH
    model = costs(tp=2, pp=2)
    for num_tokens in (1, 5000):
        first, last = (model.op_parts(s, num_tokens, 0, 7, is_backward=True) for s in (0, 1))
        assert first["accumulation"] == pytest.approx(layers_s + ends_s)
        assert last["accumulation"] == pytest.approx(layers_s + ends_s)
    assert 0.0068 < layers_s + ends_s < 0.0073
    without_rows = model.op_parts(1, 100, 0, 0, is_backward=True)
    assert without_rows["accumulation"] == pytest.approx(layers_s)
    assert "accumulation" not in model.op_parts(1, 100, 0, 7, is_backward=False)
    alone = costs().op_parts(0, 100, 0, 7, is_backward=True)["accumulation"]
    assert alone == pytest.approx((28 * LAYER + 2 * 3584 * 152064) * 10 / BANDWIDTH)
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    for rows in (0, 7):  # the embedding has a gradient also where nothing is predicted
        found = replace(costs(), model=tied).op_parts(0, 100, 0, rows, is_backward=True)
        assert found["accumulation"] == pytest.approx((28 * LAYER + 3584 * 152064) * 10 / BANDWIDTH)


def test_gradients_in_float32_are_as_wide_as_their_main_gradients() -> None:
    model = costs(dtype_bytes=4)
    accumulation_s = model.op_parts(0, 100, 0, 0, is_backward=True)["accumulation"]
    assert accumulation_s == pytest.approx((28 * LAYER + 3584 * 152064) * 12 / BANDWIDTH)


def test_small_forward_costs_its_launches() -> None:
    launch_s = 28 * DEVICES["h100-80"].host_layer_s
    model = costs(without=("weights", "accumulation"))
    assert model.forward_s(1, 1, 0) == pytest.approx(launch_s, rel=1e-3)
    assert model.backward_s(1, 1, 0) == pytest.approx(2 * launch_s, rel=1e-3)


def test_a_host_that_computes_launches_before() -> None:
    sizes = 1000, 1000 * 1001 // 2, 0
    device_s = costs(host_layer_s=0.0).forward_s(*sizes)
    for overlaps in (True, False):
        found_s = costs(host_layer_s=device_s / 28, host_overlaps=overlaps).forward_s(*sizes)
        assert found_s == pytest.approx(device_s * (2**0.125 if overlaps else 2.0))


def test_backward_takes_twice_the_projections_and_more_of_attention() -> None:
    model = costs(without=FIXED)
    assert model.backward_s(10_000, 0, 0) == pytest.approx(2 * model.forward_s(10_000, 0, 0))
    assert model.backward_s(0, 10**9, 0) == pytest.approx(2.5 * model.forward_s(0, 10**9, 0))
    assert model.backward_s(0, 0, 500) == pytest.approx(3 * model.forward_s(0, 0, 500))


def test_nothing_costs_nothing() -> None:
    for tp in (1, 2):
        model = costs(tp=tp, pp=2)
        assert model.forward_s(0, 0, 0) == model.backward_s(0, 0, 0) == model.message_s(0) == 0.0


@given(st.integers(0, 10**5), st.integers(0, 10**9), st.integers(0, 10**4), st.integers(0, 2))
def test_more_work_never_takes_less(tokens: int, pairs: int, head: int, which: int) -> None:
    less = [tokens, pairs, head]
    more = less.copy()
    more[which] += 100
    for model in (costs(), costs(tp=2, pp=2)):
        assert model.forward_s(*more) >= model.forward_s(*less)
        assert model.backward_s(*more) >= model.backward_s(*less)
        assert model.message_s(more[0]) >= model.message_s(less[0])


def test_arrays_give_what_scalars_give() -> None:
    rng = np.random.default_rng(0)
    tokens, pairs, head = (rng.integers(0, high, 20) for high in (5000, 10**7, 500))
    tokens[0] = pairs[0] = head[0] = 0
    model = costs(tp=2, pp=2)
    for name in ("forward_s", "backward_s"):
        found = getattr(model, name)(tokens, pairs, head)
        single = [getattr(model, name)(*map(int, row)) for row in zip(tokens, pairs, head)]  # noqa: B905
        np.testing.assert_allclose(found, single, rtol=1e-12)
    single = [model.message_s(int(n)) for n in tokens]
    np.testing.assert_allclose(model.message_s(tokens), single, rtol=1e-12)


def test_tensor_parallel_halves_compute() -> None:
    one, two = (costs(tp=tp).op_parts(0, 900, 10**6, 300, is_backward=True) for tp in (1, 2))
    for term in ("linear", "weights", "attention", "accumulation", "head"):
        assert two[term] == pytest.approx(one[term] / 2), term
    assert two["elementwise"] == one["elementwise"]
    assert costs(tp=2).rank_parameters == pytest.approx(costs().rank_parameters / 2)


def test_tensor_parallel_pays_two_ring_all_reduces_per_layer_and_direction() -> None:
    ring = 2 * (1 / 2) * 1000 * 3584 * 2 / 450e9
    for is_backward in (False, True):
        parts = costs(tp=2).op_parts(0, 1000, 0, 0, is_backward)
        assert parts["tensor_parallel"] == pytest.approx(28 * 2 * (ring + 2 * 5e-6))
        assert costs().op_parts(0, 1000, 0, 0, is_backward)["tensor_parallel"] == 0.0


def test_tensor_parallel_across_hosts_waits_for_the_slowest_link() -> None:
    """Four ranks on two hosts: their two ports move 3/4 of the bytes twice."""

    def time_s(bytes_per_s: float, tp: int = 4, devices_per_host: int = 2) -> float:
        parallel = ParallelConfig(tensor_model_parallel_size=tp)
        slow = cluster(2).model_copy(
            update={"inter_host_bytes_per_s": bytes_per_s, "devices_per_host": devices_per_host}
        )
        parts = RooflineCostModel(MODEL, slow, parallel).op_parts(0, 1000, 0, 0, False)
        return float(parts["tensor_parallel"]) / (28 * 2)

    nbytes = 1000 * 3584 * 2
    assert time_s(50e9) == pytest.approx(2 * 3 / 4 * nbytes / (2 * 50e9) + 2 * 15e-6)
    assert time_s(5e6) == pytest.approx(2 * 3 / 4 * nbytes / (2 * 5e6) + 2 * 15e-6)
    # Hosts of six cut the second group of four in two and two.
    assert time_s(50e9, 4, 6) == pytest.approx(2 * 3 / 4 * nbytes / (2 * 50e9) + 2 * 15e-6)
    assert time_s(5e6, 2, 4) == pytest.approx(2 * 1 / 2 * nbytes / 450e9 + 2 * 5e-6)


def test_sequence_parallel_collectives_move_the_same_bytes() -> None:
    plain = costs(tp=4)
    sequence = plain.parallel.model_copy(update={"sequence_parallel": True})
    assert replace(plain, parallel=sequence).forward_s(900, 10**6, 0) == plain.forward_s(
        900, 10**6, 0
    )


def test_stages_divide_the_layers_and_the_last_has_the_head() -> None:
    model = costs(pp=4)
    layers = costs().forward_s(3000, 10**6, 0) / 4
    assert model.stage_forward_s(0, 3000, 10**6, 700) == pytest.approx(layers)
    assert model.stage_forward_s(3, 3000, 10**6, 0) == pytest.approx(layers)
    head_s = 700 * 152064 * (2 * 3584 / (989e12 * 0.75) + 16 / BANDWIDTH)
    assert model.forward_s(3000, 10**6, 700) == pytest.approx(layers + head_s)
    assert model.stage_backward_s(0, 3000, 10**6, 700) < model.backward_s(3000, 10**6, 700)


def test_messages_cross_hosts_only_when_a_pipeline_does() -> None:
    nbytes = 1000 * 3584 * 2
    assert costs(tp=2, pp=4).message_s(1000) == pytest.approx(nbytes / 450e9 + 5e-6)
    assert costs(tp=4, pp=4, num_hosts=2).message_s(1000) == pytest.approx(nbytes / 50e9 + 15e-6)


def test_sequence_parallel_ranks_send_their_own_rows() -> None:
    plain = costs(tp=4, pp=2)
    sequence = plain.parallel.model_copy(update={"sequence_parallel": True})
    nbytes = 1000 / 4 * 3584 * 2
    found = replace(plain, parallel=sequence).message_s(1000)
    assert found == pytest.approx(nbytes / 450e9 + 5e-6)


OP_TERMS: tuple[Term, ...] = (
    *("linear", "weights", "accumulation", "attention", "elementwise", "head"),
    *("tensor_parallel", "host"),
)


@given(st.integers(0, 10**5), st.integers(0, 10**9), st.integers(0, 10**4), st.sampled_from([1, 2]))
def test_terms_add_up_and_none_is_negative(tokens: int, pairs: int, head: int, pp: int) -> None:
    model = costs(tp=2, pp=pp)
    for stage in range(pp):
        for is_backward, time_s in ((False, model.stage_forward_s), (True, model.stage_backward_s)):
            parts = model.op_parts(stage, tokens, pairs, head, is_backward)
            assert min(parts.values()) >= 0.0
            whole = time_s(stage, tokens, pairs, head)
            assert sum(parts.values()) == pytest.approx(whole, rel=1e-12, abs=1e-15)


@given(st.integers(1, 10**5), st.integers(0, 10**9), st.integers(0, 10**4))
def test_nothing_is_slower_without_a_term(tokens: int, pairs: int, head: int) -> None:
    whole = costs(tp=2, pp=2)
    for term in OP_TERMS:
        less = replace(whole, without=frozenset([term]))
        assert less.op_parts(1, tokens, pairs, head, True).get(term, 0.0) == 0.0
        for name in ("forward_s", "backward_s"):
            found, before = (getattr(m, name)(tokens, pairs, head) for m in (less, whole))
            assert found <= before * (1 + 1e-12)
    assert replace(whole, without=frozenset(OP_TERMS)).backward_s(tokens, pairs, head) == 0.0
    beside: tuple[Term, ...] = ("message", "gradient_reduction", "optimizer_step")
    none = replace(whole, without=frozenset(beside))
    assert none.message_s(tokens) == none.gradient_reduction_s() == none.optimizer_step_s() == 0.0


@given(st.integers(1, 10**6), st.integers(0, 10**9), st.integers(0, 10**5))
def test_slopes_are_below_every_micro_batch(tokens: int, pairs: int, head: int) -> None:
    """What bounds charge for work: a large amount's time, beside which fixed parts vanish."""
    for model in (costs(), costs(tp=2, pp=2)):
        for time_s in (model.forward_s, model.backward_s):
            slopes = [float(time_s(*row)) / 1e9 for row in np.diag([1e9] * 3)]
            work_s = float(np.dot(slopes, [tokens, pairs, head]))
            assert work_s <= float(time_s(tokens, pairs, head)) * (1 + 1e-9)


def test_gradient_reduction_and_optimizer() -> None:
    assert costs().gradient_reduction_s() == 0.0
    parameters = MODEL.num_parameters - MODEL.hidden_size
    inside = 3 / 4 * parameters * (4 + 2) / 450e9 + 2 * 5e-6
    assert costs(dp=4).gradient_reduction_s() == pytest.approx(inside)
    across = 15 / 16 * parameters * (4 + 2) / (8 * 50e9) + 2 * 15e-6
    assert costs(dp=16, num_hosts=2).gradient_reduction_s() == pytest.approx(across)
    whole_stages = costs(dp=4, pp=4, num_hosts=2)
    inside = 3 / 4 * whole_stages.rank_parameters * (4 + 2) / 450e9 + 2 * 5e-6
    assert whole_stages.gradient_reduction_s() == pytest.approx(inside)
    step = 2 * 12 * parameters / 4 / BANDWIDTH + DEVICES["h100-80"].host_layer_s
    assert costs(dp=4).optimizer_step_s() == pytest.approx(step)


TINY = ModelSpec(
    name="hand",
    num_layers=4,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=2,
    ffn_hidden_size=16,
    vocab_size=32,
)


def test_bytes_per_token_by_hand() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    memory = MemoryModel(TINY, cluster(), parallel)
    assert memory.kv_bytes_per_token == 2 * 2 * (2 * 2 // 2) * 2
    assert memory.kv_gradient_bytes_per_token == 2 * memory.kv_bytes_per_token
    assert memory.stage_input_bytes_per_token == 8 * 2
    assert memory.recompute_bytes_per_token == 2 * 8 * 2 + 2 * 4
    norms = 2 * (3 * 8 * 2 + 4)
    projection, rotated, attention, mlp = 8 + 2 * 4, 8 + 4, 8, 3 * 16
    sharded = (projection + rotated + attention + mlp) * 2 + 4 * 4
    tables = 4 * 2 * 2
    assert memory.activation_bytes_per_token == 2 * (norms + sharded // 2 + tables)
    assert memory.final_norm_bytes_per_token == 2 * 8 * 2 + 4
    qk_norm = MemoryModel(TINY.model_copy(update={"qk_layernorm": True}), cluster(), parallel)
    more = qk_norm.activation_bytes_per_token - memory.activation_bytes_per_token
    assert more == 2 * ((2 * 8 + 4) * 2 + (4 + 2) * 4) // 2
    assert memory.logits_bytes_per_token == 2 * 4 * 32 // 2
    sequence = MemoryModel(TINY, cluster(), parallel.model_copy(update={"sequence_parallel": True}))
    assert sequence.activation_bytes_per_token == 2 * (norms // 2 + sharded // 2 + tables)
    assert sequence.final_norm_bytes_per_token == 8 * 2 + 2
    assert sequence.stage_input_bytes_per_token == 8
    wide = MemoryModel(TINY, cluster(dtype_bytes=8), parallel)
    assert wide.kv_gradient_bytes_per_token == wide.kv_bytes_per_token


def test_held_bytes_by_activation_and_stage() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    memory = MemoryModel(TINY, cluster(), parallel)
    kept, again, received = (
        memory.activation_bytes_per_token,
        memory.recompute_bytes_per_token,
        memory.stage_input_bytes_per_token,
    )
    assert kept > again > received
    tokens, rows = np.array([5, 0]), np.array([3, 0])

    def held(activation: str, stage: int) -> int:
        found = memory.held_bytes(activation, tokens, rows, stage)
        assert found[1] == 0
        return int(found[0])

    assert held("keep", stage=0) == 5 * kept
    head = 5 * memory.final_norm_bytes_per_token + 3 * memory.head_bytes_per_row
    assert held("keep", stage=1) == 5 * kept + head
    assert held("recompute", stage=1) == 5 * again + head
    assert [held("drop", stage) for stage in (0, 1)] == [0, 5 * received]


def test_static_bytes_by_hand() -> None:
    attention = 8 * (2 * 8 + 2 * 4) + (8 + 2 * 4) + 2 * 8
    layer = attention + 3 * 8 * 16
    parallel = ParallelConfig(pipeline_model_parallel_size=2, data_parallel_size=4)
    memory = MemoryModel(TINY, cluster(), parallel)
    first, last = 2 * layer + 32 * 8, 2 * layer + 32 * 8 + 8
    assert first % 4 == last % 4 == 0
    assert memory.static_bytes == last * (2 + 4 + 12 // 4)
    assert memory.static_bytes_on(0, is_update=True) == first * (2 + 4 + 12 // 4)
    assert memory.static_bytes_on(1, is_update=False) == memory.weight_bytes_on(1) == last * 2
