"""The calibrated cost model: its form by hand, its file, and the warnings outside its domain."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.cost.calibrated_cost_model import CalibratedCostModel
from psrl.core.cost.calibration import (
    Calibration,
    Coefficients,
    Curve,
    Domain,
    ErrorRow,
    Identification,
    load_calibration,
)
from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ModelSpec, ParallelConfig
from psrl.core.cost.cost_model import RooflineCostModel
from psrl.core.cost.layer_time import LayerShape, LayerTime
from psrl.core.errors import ConfigError

MODEL = ModelSpec(
    name="hand",
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    ffn_hidden_size=512,
    vocab_size=1024,
)
DEVICE = DeviceSpec(
    name="card",
    peak_flops_per_s=1e12,
    memory_bytes=2**34,
    memory_bandwidth_bytes_per_s=1e11,
    gemm_efficiency=0.5,
    attention_efficiency=0.4,
    host_layer_s=0.0,
)
BARE = Coefficients(
    gemm_efficiency=0.5,
    attention_efficiency=0.4,
    replicated_passes=0.0,
    sharded_passes=0.0,
    host_layer_s=0.0,
    accumulation_bytes_per_parameter=1e-9,
)
DOMAIN = Domain(
    device="card", dtype_bytes=2, attention="tree", ranges={"num_tokens": (100.0, 1000.0)}
)


def costs(
    tp: int = 1, pp: int = 1, dp: int = 1, num_hosts: int = 1, **coefficients: float
) -> CalibratedCostModel:
    cluster = ClusterSpec(
        device=DEVICE,
        num_hosts=num_hosts,
        devices_per_host=tp * pp * dp // num_hosts,
        intra_host_bytes_per_s=1e10,
        inter_host_bytes_per_s=1e9,
        intra_host_latency_s=1e-6,
        inter_host_latency_s=1e-5,
    )
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp
    )
    calibration = Calibration(
        sources=("by hand",),
        coefficients=BARE.model_copy(update=coefficients),
        multi_host={"device_slowdown": 2.0},
        domain=DOMAIN,
    )
    return CalibratedCostModel(MODEL, cluster, parallel, calibration)


LAYER_WEIGHTS = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512
LINEAR_S = 2 * LAYER_WEIGHTS / (1e12 * 0.5)
PAIR_S = 4 * 256 / (1e12 * 0.4)
HEAD_S = 2 * 256 * 1024 / (1e12 * 0.5)


def test_products_pairs_and_head_by_hand() -> None:
    model = costs()
    forward = 4 * (300 * LINEAR_S + 5000 * PAIR_S) + 70 * HEAD_S
    assert model.forward_s(300, 5000, 70) == pytest.approx(forward)
    backward = 4 * (2 * 300 * LINEAR_S + 2.5 * 5000 * PAIR_S) + 3 * 70 * HEAD_S
    assert model.backward_s(300, 5000, 70) == pytest.approx(backward)


def test_every_coefficient_adds_its_own_term() -> None:
    def added(tp: int = 1, **coefficients: float) -> float:
        with_it = costs(tp, **coefficients).forward_s(300, 5000, 70)
        return float(with_it - costs(tp).forward_s(300, 5000, 70))

    tail_s = 2 * 128**2 * (256 + 256 + 256 + 512) / 5e11
    head_tail_s = 2 * 128**2 * 256 / 5e11
    assert added(gemm_tail_tiles=3.0) == pytest.approx(4 * 3 * tail_s + 3 * head_tail_s)
    assert added(attention_half_keys=10.0) == pytest.approx(4 * 10 * 300 * PAIR_S)
    assert added(replicated_passes=6.0) == pytest.approx(4 * 6 * 300 * 256 * 2 / 1e11)
    assert added(tp=2, sharded_passes=6.0) == pytest.approx(4 * 3 * 300 * 256 * 2 / 1e11)
    assert added(head_passes=5.0) == pytest.approx(5 * 70 * 1024 * 4 / 1e11)
    assert added(host_op_s=0.25) == pytest.approx(0.25)


def test_host_and_device_overlap_or_take_turns() -> None:
    device_s = float(costs().forward_s(300, 5000, 0)) / 4
    turns = costs(host_layer_s=0.5, join_exponent=1.0)
    assert turns.forward_s(300, 5000, 0) == pytest.approx(4 * (device_s + 0.5))
    assert turns.backward_s(0, 0, 70) == pytest.approx(3 * 70 * HEAD_S), "nothing to launch"
    overlap = costs(host_layer_s=0.5)
    assert overlap.forward_s(300, 5000, 0) == pytest.approx(4 * 0.5)
    assert overlap.backward_s(300, 5000, 0) == pytest.approx(4 * 2 * 0.5)
    assert costs(tp=2, host_layer_s=0.5, host_tensor_parallel_s=0.25).forward_s(
        300, 5000, 0
    ) == pytest.approx(4 * 0.75)


def test_only_the_last_stage_has_the_head() -> None:
    model = costs(pp=2)
    assert model.stage_forward_s(0, 300, 5000, 70) == pytest.approx(
        2 * (300 * LINEAR_S + 5000 * PAIR_S)
    )
    assert model.forward_s(300, 5000, 70) == model.stage_forward_s(1, 300, 5000, 70)


def test_tensor_parallel_uses_the_measured_curve() -> None:
    curve = Curve(nbytes=(1e3, 1e6), seconds=(1e-3, 1e-3))
    plain = costs(tp=2)
    measured = replace(
        plain, calibration=plain.calibration.model_copy(update={"all_reduce": {"2": curve}})
    )
    ring_s = 300 * 256 * 2 / 1e10 + 2e-6
    difference = measured.forward_s(300, 5000, 0) - plain.forward_s(300, 5000, 0)
    assert difference == pytest.approx(4 * 2 * (1e-3 - ring_s))
    slower = costs(tp=2, tensor_parallel_factor=3.0)
    assert slower.forward_s(300, 5000, 0) - plain.forward_s(300, 5000, 0) == pytest.approx(
        4 * 2 * 2 * ring_s
    )


def test_curve_lies_between_its_points() -> None:
    curve = Curve(nbytes=(100.0, 10000.0), seconds=(1e-5, 1e-3))
    assert curve.time_s(1000) == pytest.approx(1e-4)
    assert curve.time_s(10) == pytest.approx(1e-5)
    assert curve.time_s(40000) == pytest.approx(4e-3)
    assert np.asarray(curve.time_s(np.array([0.0, 100.0]))) == pytest.approx([0.0, 1e-5])


def test_several_hosts_have_their_own_coefficients() -> None:
    one, two = costs(dp=2), costs(dp=2, num_hosts=2)
    assert two.forward_s(300, 5000, 70) == pytest.approx(2 * one.forward_s(300, 5000, 70))
    assert two.message_s(10) == pytest.approx(10 * 256 * 2 / (1e9 * 0.8) + 1e-5)
    assert one.message_s(10) == pytest.approx(10 * 256 * 2 / (1e10 * 0.8) + 1e-6)


def test_gradient_reduction_and_optimizer_step() -> None:
    parameters = costs().rank_parameters
    assert costs().gradient_reduction_s() == 0.0
    inside = 3 / 4 * 6 * parameters / 1e10 + 2e-6
    assert costs(dp=4).gradient_reduction_s() == pytest.approx(inside)
    across = 3 / 4 * 6 * parameters / (2 * 1e9) + 2e-5
    assert costs(dp=4, num_hosts=2).gradient_reduction_s() == pytest.approx(across)
    assert costs(dp=4, step_s=0.5).optimizer_step_s() == pytest.approx(
        24 * parameters / 4 / 1e11 + 0.5
    )


@given(
    tokens=st.integers(1, 10**6),
    pairs=st.integers(0, 10**9),
    head=st.integers(0, 10**5),
    more=st.integers(1, 10**6),
)
def test_more_work_never_takes_less_time(tokens: int, pairs: int, head: int, more: int) -> None:
    model = costs(tp=2, pp=2, host_layer_s=1e-4, gemm_tail_tiles=5.0, attention_half_keys=50.0)
    base = model.forward_s(tokens, pairs, head), model.backward_s(tokens, pairs, head)
    for sizes in (
        (tokens + more, pairs, head),
        (tokens, pairs + more, head),
        (tokens, pairs, head + more),
    ):
        assert model.forward_s(*sizes) >= base[0]
        assert model.backward_s(*sizes) >= base[1]


def test_arrays_and_numbers_agree() -> None:
    model = costs(tp=2, host_layer_s=1e-4, gemm_tail_tiles=5.0)
    tokens, pairs, head = np.array([0.0, 10.0, 5000.0]), np.array([0.0, 50.0, 1e6]), np.zeros(3)
    for time in (model.forward_s, model.backward_s):
        each = [time(t, p, 0.0) for t, p in zip(tokens, pairs, strict=True)]
        assert np.asarray(time(tokens, pairs, head)) == pytest.approx(each)
        assert each[0] == 0.0


@given(
    sizes=st.tuples(st.integers(0, 10**5), st.integers(0, 10**9), st.integers(0, 10**4)),
    layout=st.sampled_from([(1, 1, 1, 1), (2, 2, 2, 1), (4, 1, 2, 2), (1, 2, 4, 4)]),
    host_overlaps=st.booleans(),
)
def test_both_models_are_one_form(
    sizes: tuple[int, int, int], layout: tuple[int, int, int, int], host_overlaps: bool
) -> None:
    """A calibration that found what the data sheet says predicts what the roofline predicts."""
    tp, pp, dp, ep = layout
    model = MODEL
    if ep > 1:
        moe = {"num_moe_experts": 8, "moe_topk": 2, "moe_ffn_hidden_size": 256}
        model = MODEL.model_copy(update=moe)
    device = DEVICE.model_copy(update={"host_layer_s": 1e-4, "host_overlaps": host_overlaps})
    cluster = costs(tp, pp, dp, num_hosts=2 if tp * pp * dp > 1 else 1).cluster
    cluster = cluster.model_copy(update={"device": device})
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=dp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
    )
    calibration = Calibration(
        sources=(), coefficients=Coefficients.of_device(device), domain=DOMAIN
    )
    roofline = RooflineCostModel(model, cluster, parallel)
    calibrated = CalibratedCostModel(model, cluster, parallel, calibration)
    for stage in range(pp):
        for name in ("stage_forward_s", "stage_backward_s"):
            assert getattr(roofline, name)(stage, *sizes) == getattr(calibrated, name)(
                stage, *sizes
            )
    assert roofline.message_s(sizes[0]) == calibrated.message_s(sizes[0])
    assert roofline.gradient_reduction_s() == calibrated.gradient_reduction_s()
    assert roofline.optimizer_step_s() == calibrated.optimizer_step_s()


def test_a_calibration_from_before_a_term_predicts_what_it_predicted(tmp_path: Path) -> None:
    text = costs().calibration.model_dump_json()
    old = json.loads(text)
    for name in ("weight_passes", "accumulation_bytes_per_parameter"):
        del old["coefficients"][name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old), encoding="utf-8")
    model = replace(costs(), calibration=load_calibration(path))
    assert model.backward_s(1, 0, 0) == pytest.approx(4 * 2 * LINEAR_S)
    assert any("psrl calibrate" in warning for warning in model.domain_warnings())


def test_accumulation_inside_the_products_of_other_software_is_not_used() -> None:
    """psRL adds each weight gradient to its main gradient: 10 bytes, at 0.8 of the bandwidth."""
    model = costs(accumulation_bytes_per_parameter=0.0)
    scores = DOMAIN.model_copy(update={"attention": "scores"})
    calibration = model.calibration.model_copy(update={"domain": scores})
    found = replace(model, calibration=calibration)
    assert found.coefficients.accumulation_bytes_per_parameter == pytest.approx(10 / 0.8)
    assert any("accumulation" in warning for warning in found.domain_warnings())


def test_experts_count_as_one_wide_mlp() -> None:
    moe = MODEL.model_copy(update={"num_moe_experts": 8, "moe_topk": 2, "moe_ffn_hidden_size": 256})
    wide, dense = (LayerShape.of_model(m, ParallelConfig(), 2) for m in (moe, MODEL))
    assert wide.mlp == dense.mlp
    assert wide.projections == dense.projections


def test_score_passes_count_where_scores_are_kept() -> None:
    shape = LayerShape.of_model(MODEL, ParallelConfig(), 2)
    kept = LayerTime(BARE.model_copy(update={"score_passes": 3.0}), DEVICE, shape)
    plain = LayerTime(BARE, DEVICE, shape)
    added = kept.layer_s(100, 10**6).forward_s - plain.layer_s(100, 10**6).forward_s
    assert added == pytest.approx(3 * 10**6 * 4 * 2 / 1e11)


def test_attention_measured_with_score_matrices_is_not_used() -> None:
    model = costs(score_passes=9.0, attention_backward_factor=2.0)
    scores = DOMAIN.model_copy(update={"attention": "scores"})
    calibration = model.calibration.model_copy(update={"domain": scores})
    found = replace(model, calibration=calibration).coefficients
    assert (found.score_passes, found.attention_backward_factor) == (0.0, 2.5)


def test_no_warning_inside_the_domain() -> None:
    assert costs().domain_warnings(np.array([100.0, 1000.0]), np.array([5e3, 5e5])) == ()


def test_warnings_name_what_lies_outside_the_domain() -> None:
    (warning,) = costs().domain_warnings(np.array([500.0, 0.0, 20.0, 4000.0]))
    assert warning == (
        "2 of 3 micro-batches have num_tokens from 20 to 4,000: measured from 100 to 1,000"
    )
    model = costs(tp=2)
    other = DOMAIN.model_copy(
        update={
            "device": "other",
            "dtype_bytes": 4,
            "attention": "scores",
            "ranges": {"tensor_model_parallel_size": (1.0, 1.0), "keys_per_query": (1.0, 10.0)},
        }
    )
    found = {"host_layer_s": Identification(status="pinned", num_rows=2)}
    calibration = model.calibration.model_copy(update={"domain": other, "identification": found})
    warnings = replace(model, calibration=calibration).domain_warnings(100.0, 5000.0)
    for word in ("other", "4 bytes", "score matrices", "assumed, not measured: host_layer_s"):
        assert any(word in warning for warning in warnings), word
    assert "tensor_model_parallel_size = 2: measured from 1 to 1" in warnings
    assert any("keys_per_query from 50 to 50" in warning for warning in warnings)


def test_pinned_coefficients_that_a_layout_does_not_use_are_no_assumption() -> None:
    pinned = Identification(status="pinned", num_rows=0)
    names = ("tensor_parallel_factor", "gradient_bytes_per_parameter", "multi_host.device_slowdown")
    model = costs()
    found = dict.fromkeys(names, pinned)
    calibration = model.calibration.model_copy(update={"identification": found})
    assert replace(model, calibration=calibration).domain_warnings() == ()
    two = replace(costs(tp=2, dp=2), calibration=calibration)
    assert two.domain_warnings() == (
        "assumed, not measured: tensor_parallel_factor, gradient_bytes_per_parameter",
    )


def test_file_round_trip(tmp_path: Path) -> None:
    row = ErrorRow(
        group="all",
        held_out=True,
        headline=True,
        num_rows=3,
        mean_percent=1.5,
        median_percent=1.0,
        p90_percent=2.0,
        max_percent=3.0,
        bias_percent=-0.5,
    )
    calibration = costs().calibration.model_copy(
        update={"errors": (row,), "all_reduce": {"4": Curve(nbytes=(8.0,), seconds=(1e-5,))}}
    )
    path = tmp_path / "deep" / "cost_model.json"
    calibration.save(path)
    assert load_calibration(path) == calibration
    assert [p.name for p in path.parent.iterdir()] == ["cost_model.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ("{}", "sources"),
        ('{"schema_version": 2}', "schema_version"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost_model.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_calibration(path)


def test_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="psrl calibrate"):
        load_calibration(tmp_path / "none.json")


@pytest.mark.parametrize(
    "change",
    [
        {"multi_host": {"no_such_coefficient": 1.0}},
        {"multi_host": {"gemm_efficiency": -1.0}},
        {"all_reduce": {"one": {"nbytes": [1.0], "seconds": [1.0]}}},
        {"all_reduce": {"2": {"nbytes": [2.0, 1.0], "seconds": [1.0, 1.0]}}},
        {"all_reduce": {"2": {"nbytes": [2.0], "seconds": [0.0]}}},
    ],
)
def test_contradictory_files_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    import json

    path = tmp_path / "cost_model.json"
    costs().calibration.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError):
        load_calibration(path)
