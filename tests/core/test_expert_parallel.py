"""Expert parallelism: bytes and seconds by hand, and what dense models must not notice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.cost.calibrated_cost_model import CalibratedCostModel
from psrl.core.cost.calibration import Calibration, Coefficients, Domain
from psrl.core.cost.cluster import ClusterSpec, ModelSpec, ParallelConfig, check_layout
from psrl.core.cost.collectives import expert_exchange_line
from psrl.core.cost.cost_model import RooflineCostModel
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.cost.parameters import expert_data_parallel_size, optimizer_shard, rank_parameters
from psrl.core.cost.presets import MODELS
from tests.core.cases import a100_cluster

# Attention 8 * (2 * 8 + 2 * 4) + norms 2 * 8 = 208; router 8 * 4; an expert 3 * 8 * 5 = 120.
MOE = ModelSpec(
    name="hand",
    num_layers=4,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=2,
    ffn_hidden_size=10,
    vocab_size=32,
    qkv_bias=False,
    num_moe_experts=4,
    moe_topk=2,
    moe_ffn_hidden_size=5,
)


def layout(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=dp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
    )


def exchange_s(
    parallel: ParallelConfig, cluster: ClusterSpec | None = None, num_tokens: int = 1000
) -> float:
    where = a100_cluster() if cluster is None else cluster
    per_token_s, latency_s = expert_exchange_line(MOE, where, parallel)
    return num_tokens * per_token_s + latency_s


@pytest.mark.parametrize(
    ("name", "published"),
    [("qwen3-235b-a22b", 235_093_634_560), ("qwen3-30b-a3b", 30_532_122_624)],
)
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert MODELS[name].num_parameters == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3-235b-a22b", (94, 4096, 64, 4, 128, 128, 8, 1536, 151936)),
        ("qwen3-30b-a3b", (48, 2048, 32, 4, 128, 128, 8, 768, 151936)),
    ],
)
def test_presets_have_the_published_shape(name: str, published: tuple[int, ...]) -> None:
    m = MODELS[name]
    shape = (m.num_layers, m.hidden_size, m.num_attention_heads, m.num_query_groups)
    experts = (m.num_moe_experts, m.moe_topk, m.moe_ffn_hidden_size)
    assert (*shape, m.kv_channels, *experts, m.vocab_size) == published
    assert m.qk_layernorm
    assert not m.qkv_bias
    assert not m.tied_embeddings


def test_parameters_of_a_rank_by_hand() -> None:
    """Two layers per stage; tensor parallelism divides no expert, expert parallelism only those."""
    dense = 2 * (208 + 32) + 32 * 8
    assert rank_parameters(MOE, layout(pp=2)) == (dense, 2 * 4 * 120)
    assert rank_parameters(MOE, layout(pp=2, tp=2)) == (dense / 2, 2 * 4 * 120)
    assert rank_parameters(MOE, layout(pp=2, dp=4, ep=4)) == (dense, 2 * 120)
    assert rank_parameters(MOE, layout(tp=2, pp=2, dp=2, ep=4)) == (dense / 2, 2 * 120)


def test_static_bytes_by_hand() -> None:
    """2 bytes of weights, 4 of gradients; 12 of optimizer states over ranks of equal weights."""
    parallel = layout(pp=2, dp=8, ep=4)
    dense, own = 2 * (208 + 32) + 32 * 8, 2 * 120
    assert expert_data_parallel_size(parallel) == 2
    assert optimizer_shard(MOE, parallel) == dense / 8 + own / 2
    exact = dense + 8  # the last stage's norm
    static = MemoryModel(MOE, a100_cluster(), parallel).static_bytes
    assert static == (exact + own) * 6 + 12 * (exact / 8 + own / 2)


@given(st.sampled_from(["qwen2.5-7b", "qwen2.5-1.5b"]), st.sampled_from([1, 2, 4]))
def test_a_dense_model_has_no_experts_to_count(name: str, tp: int) -> None:
    model, parallel = MODELS[name], layout(tp=tp, pp=2, dp=2)
    dense, expert = rank_parameters(model, parallel)
    per_layer = model.attention_parameters + model.mlp_parameters
    assert expert == 0
    assert dense == (model.num_layers / 2 * per_layer + model.embedding_parameters) / tp
    assert expert_exchange_line(model, a100_cluster(), parallel) == (0.0, 0.0)


def test_all_shards_together_are_the_model() -> None:
    parallel = layout(tp=2, pp=1, dp=4, ep=4)
    dense, expert = rank_parameters(MOE, parallel)
    assert dense * 2 + expert * 4 == MOE.num_parameters - MOE.hidden_size


def test_exchange_inside_a_host_by_hand() -> None:
    """Dispatch and combine: 1,000 tokens to 2 experts each; three of four ranks are elsewhere."""
    nbytes = 1000 * 2 * 8 * 2
    expected = 2 * (nbytes * 3 / 4 / 300e9 + 5e-6)
    assert exchange_s(layout(dp=4, ep=4)) == pytest.approx(expected)


def test_exchange_across_hosts_takes_the_slower_link() -> None:
    """Four ranks on two hosts: half of the rows cross, a quarter stays inside the host."""
    parallel, nbytes = layout(dp=4, ep=4), 1000 * 2 * 8 * 2
    two_hosts = a100_cluster(devices_per_host=2, num_hosts=2)
    expected = 2 * (nbytes / 2 / 25e9 + 15e-6)
    assert exchange_s(parallel, two_hosts) == pytest.approx(expected)


def test_tensor_parallel_ranks_exchange_their_share_of_the_sequence() -> None:
    nbytes = 500 * 2 * 8 * 2
    found = exchange_s(layout(tp=2, dp=2, ep=4))
    assert found == pytest.approx(2 * (nbytes * 3 / 4 / 300e9 + 5e-6))


def test_no_tokens_exchange_nothing() -> None:
    model = RooflineCostModel(MOE, a100_cluster(), layout(dp=4, ep=4))
    found = model.op_parts(0, np.array([0.0, 1.0]), 0.0, 0.0, False)["expert_exchange"]
    assert np.asarray(found)[0] == 0.0
    assert np.asarray(found)[1] > 4 * 2 * 5e-6


def test_weights_of_touched_experts_are_read_and_all_get_a_gradient() -> None:
    """Of four experts a token chooses two: all of them are missed by n tokens half^n of the time.

    The backward reads the same ones and writes gradients of all, as Megatron runs an expert
    without tokens too.
    """
    where = a100_cluster()
    rate = where.device.memory_bandwidth_bytes_per_s * where.device.bandwidth_efficiency
    router_and_norms = 208 - 192 + 32
    for parallel, own, tokens_at_experts in (
        (layout(pp=2), 4, 3),
        (layout(pp=2, dp=4, ep=4), 1, 12),
        (layout(pp=2, tp=2, dp=2, ep=4), 1, 6),
        (layout(pp=2, tp=4, ep=2), 2, 1.5),
    ):
        tp = parallel.tensor_model_parallel_size
        slow = where.device.model_copy(update={"peak_flops_per_s": 1e30})
        model = RooflineCostModel(MOE, where.model_copy(update={"device": slow}), parallel)
        touched = own * (1 - 0.5**tokens_at_experts)
        read = model.op_parts(0, 3, 0, 0, is_backward=False)["weights"]
        assert read == pytest.approx(2 * (192 / tp + touched * 120) * 2 / rate)
        backward = model.op_parts(0, 3, 0, 0, is_backward=True)
        moved = 2 * 192 / tp + (touched + own) * 120
        assert backward["weights"] == pytest.approx(2 * moved * 2 / rate)
        layer = (192 + router_and_norms) / tp + own * 120
        parameters = 2 * layer + 32 * 8 / tp
        assert backward["accumulation"] == pytest.approx(parameters * 10 / rate)


COEFFICIENTS = Coefficients(gemm_efficiency=0.5, attention_efficiency=0.5, host_layer_s=0.0)
CALIBRATION = Calibration(
    sources=("by hand",),
    coefficients=COEFFICIENTS,
    domain=Domain(device="a100-80", dtype_bytes=2, attention="tree", ranges={}),
)


@pytest.mark.parametrize("calibrated", [False, True])
def test_every_layer_and_direction_pays_one_exchange(calibrated: bool) -> None:
    parallel, where = layout(pp=2, dp=4, ep=4), a100_cluster()
    model = RooflineCostModel(MOE, where, parallel)
    if calibrated:
        model = CalibratedCostModel(MOE, where, parallel, CALIBRATION)
    for is_backward in (False, True):
        parts = model.op_parts(0, 1000.0, 0.0, 0.0, is_backward)
        assert parts["expert_exchange"] == pytest.approx(2 * exchange_s(parallel))


@pytest.mark.parametrize("calibrated", [False, True])
def test_experts_are_reduced_by_those_who_hold_them(calibrated: bool) -> None:
    """With every rank its own experts only the dense part is left to reduce."""

    def reduction_s(ep: int) -> float:
        parallel = layout(dp=4, ep=ep)
        where = a100_cluster()
        if calibrated:
            return CalibratedCostModel(MOE, where, parallel, CALIBRATION).gradient_reduction_s()
        return RooflineCostModel(MOE, where, parallel).gradient_reduction_s()

    per_parameter = COEFFICIENTS.gradient_bytes_per_parameter if calibrated else 6
    dense, expert = 4 * (208 + 32) + 2 * 32 * 8, 4 * 4 * 120
    dense_s = 3 / 4 * dense * per_parameter / 300e9 + 2 * 5e-6
    assert reduction_s(4) == pytest.approx(dense_s)
    half_s = 1 / 2 * expert / 2 * per_parameter / 300e9 + 2 * 5e-6
    assert reduction_s(2) == pytest.approx(dense_s + half_s)


def test_the_paper_layout_is_legal_and_spreads_the_experts() -> None:
    """TP4, EP8 of Megatron with each expert split in four: 32 devices, 4 experts each."""
    model = MODELS["qwen3-235b-a22b"].model_copy(update={"num_layers": 96})
    parallel = layout(tp=4, pp=12, dp=32, ep=32)
    check_layout(model, a100_cluster(num_hosts=192), parallel)
    assert parallel.coupled_ranks == 8
    assert rank_parameters(model, parallel).expert == 8 * 4 * 3 * 4096 * 1536
