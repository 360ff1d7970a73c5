"""Calibration from the public tables in examples/calibration."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from psrl.analysis.calibration.errors import error_row, folds_of
from psrl.analysis.calibration.h200_tables import (
    calibrate_h200,
    reduce_attention,
    reduce_collectives,
    reduce_gemm,
)
from psrl.analysis.calibration.megatron_iterations import (
    COLUMNS,
    Iterations,
    coefficients_of,
    predict_iterations_s,
    read_iterations,
)
from psrl.analysis.calibration.nccl import curves_to_table, parse_nccl_log, read_curves
from psrl.analysis.calibration.tables import read_table
from psrl.analysis.calibration.vtrain import (
    CANDIDATES,
    calibrate_vtrain,
    fit_iterations,
    held_out_s,
    transfer_row,
)
from psrl.core.cost.calibration import Calibration, Coefficients
from psrl.core.cost.layer_time import LayerShape, LayerTime
from psrl.core.cost.presets import DEVICES
from psrl.core.errors import ConfigError

DATA = Path(__file__).resolve().parents[2] / "examples" / "calibration"


@pytest.fixture(scope="module")
def iterations() -> Iterations:
    return read_iterations(DATA / "vtrain_a100", DATA / "nccl_a100")


@pytest.fixture(scope="module")
def a100() -> Calibration:
    return calibrate_vtrain(DATA / "vtrain_a100", DATA / "nccl_a100")


def test_held_out_error_meets_the_bars(a100: Calibration) -> None:
    errors = {row.group: row for row in a100.errors}
    assert all(row.held_out for row in a100.errors)
    assert errors["one host"].mean_percent <= 6.0
    assert errors["several hosts"].mean_percent <= 8.0
    assert (errors["one host"].num_rows, errors["several hosts"].num_rows) == (720, 54)
    for devices in (64, 256, 512):
        assert errors[f"inside the domain: num_devices {devices}"].mean_percent <= 8.0


@pytest.mark.slow
def test_half_of_the_rows_predicts_the_other_half(iterations: Iterations) -> None:
    half = folds_of(len(iterations), 2, seed=1)
    predicted_s = held_out_s(iterations, half)
    for chosen, bar in ((~iterations.multi_host, 6.0), (iterations.multi_host, 8.0)):
        row = error_row("half", predicted_s[chosen], iterations.measured_s[chosen])
        assert row.mean_percent <= bar


def test_another_cluster_needs_its_own_calibration(iterations: Iterations) -> None:
    row = transfer_row(iterations)
    assert row.num_rows == 54
    assert row.mean_percent > 12.0


def test_two_rows_do_not_decide_a_coefficient(a100: Calibration) -> None:
    found = a100.identification["multi_host.tensor_parallel_across_hosts_factor"]
    assert (found.status, found.num_rows) == ("pinned", 2)
    assert a100.multi_host["tensor_parallel_across_hosts_factor"] == 1.0
    assert a100.identification["host_layer_s"].status == "fitted"


def test_known_coefficients_are_recovered(iterations: Iterations) -> None:
    truth = {
        "gemm_efficiency": 0.6,
        "gemm_tail_tiles": 100.0,
        "score_passes": 4.0,
        "head_passes": 5.0,
        "host_layer_s": 0.4e-3,
        "host_tensor_parallel_s": 0.1e-3,
        "host_unfused_s": 0.3e-3,
        "tensor_parallel_factor": 1.5,
        "accumulation_bytes_per_parameter": 12.0,
        "step_s": 8e-3,
        "multi_host.device_slowdown": 1.1,
        "multi_host.tensor_parallel_factor": 0.5,
        "multi_host.gradient_bytes_per_parameter": 12.0,
        "multi_host.tensor_parallel_across_hosts_factor": 1.0,
    }
    noise = np.exp(np.random.default_rng(0).normal(0.0, 0.005, len(iterations)))
    table = iterations.table.assign(iteration_s=predict_iterations_s(iterations, truth) * noise)
    fit = fit_iterations(Iterations(table, iterations.multi_host, iterations.all_reduce))
    assert fit.values == pytest.approx(truth, rel=0.15)
    for name in ("gemm_efficiency", "score_passes", "host_layer_s", "multi_host.device_slowdown"):
        assert fit.values[name] == pytest.approx(truth[name], rel=0.03)


def test_an_iteration_is_1f1b_of_its_micro_batches(iterations: Iterations) -> None:
    row = {
        "num_devices": 4,
        "global_batch": 12,
        "micro_batch": 2,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_layers": 8,
        "seq_length": 512,
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 4,
        "iteration_s": 1.0,
    }
    data = Iterations(pd.DataFrame([row]), np.array([False]), iterations.all_reduce)
    values = {candidate.name: candidate.start for candidate in CANDIDATES}
    coefficients, _ = coefficients_of(values)
    device, hidden = DEVICES["a100-40"], 1024
    shape = LayerShape(
        hidden_size=hidden,
        projections=((3 * hidden, hidden), (hidden, hidden)),
        mlp=((4 * hidden, hidden), (hidden, 4 * hidden)),
        attention_width=hidden,
        num_heads=16,
        vocab_size=50304,
        tensor_parallel_size=1,
        dtype_bytes=2,
        parameters=12 * hidden**2,
    )
    layer = LayerTime(coefficients, device, shape).layer_s(1024, 1024 * 512)
    head_s = LayerTime(coefficients, device, shape).head_s(1024).backward_s
    hop_s = 2 * 1024 * hidden * 2 / (300e9 * coefficients.message_efficiency)
    stage_s = 2 * (2 * layer.forward_s + layer.backward_s) + hop_s
    expected = 6 * (stage_s + head_s) + 3 * stage_s + coefficients.step_s
    assert predict_iterations_s(data, values) == pytest.approx([expected])


def test_an_unfused_softmax_costs_host_time(iterations: Iterations) -> None:
    tp8 = (iterations.column("tensor_model_parallel_size") == 8) & ~iterations.multi_host
    chosen = iterations.rows(np.flatnonzero(tp8))
    values = {candidate.name: candidate.start for candidate in CANDIDATES}
    slower = predict_iterations_s(chosen, values | {"host_unfused_s": 10e-3})
    differs = slower > 1.05 * predict_iterations_s(chosen, values | {"host_unfused_s": 0.0})
    assert differs.tolist() == (chosen.column("micro_batch") % 2 == 1).tolist()


LOG = """
#       size         count      type   redop     time   algbw   busbw  error     time   algbw
[1,0]<stdout>:        2048           512     float     sum    36.05    0.06    0.11    N/A    35.59
           8             2     float     sum     4.47    0.00    0.00  0e+00     0.47    0.02
           8             2     float     sum     4.40    0.00    0.00  0e+00     0.47    0.02
"""


def test_nccl_log_gives_out_of_place_times(tmp_path: Path) -> None:
    curve = parse_nccl_log(LOG)
    assert curve.nbytes == (8.0, 2048.0)
    assert curve.seconds == pytest.approx((4.40e-6, 36.05e-6))
    path = tmp_path / "all_reduce.csv"
    curves_to_table({"16": curve, "2": curve}).to_csv(path, index=False)
    assert read_curves(path) == {"2": curve, "16": curve}
    with pytest.raises(ConfigError, match="nccl-tests"):
        parse_nccl_log("# nothing")


def test_h200_kernels(tmp_path: Path) -> None:
    calibration = calibrate_h200(DATA / "h200")
    errors = {row.group: row for row in calibration.errors}
    assert [row.group for row in calibration.errors if row.headline] == ["GEMM", "attention"]
    assert errors["GEMM"].mean_percent <= 15.0
    assert errors["attention"].mean_percent <= 15.0
    assert errors["attention seq_length 8192"].mean_percent <= 6.0
    assert 0.7 < calibration.coefficients.gemm_efficiency < 0.85
    assert calibration.identification["host_layer_s"].status == "pinned"
    assert sorted(calibration.all_reduce) == ["2", "4", "8"]
    calibration.save(tmp_path / "h200.json")


def test_h200_tables_are_reduced_to_medians() -> None:
    gemm = pd.DataFrame(
        {
            "gemm_dtype": ["bfloat16"] * 4 + ["fp8"],
            "m": [256, 256, 256, 300, 256],
            "n": [1024] * 5,
            "k": [1024] * 5,
            "latency": [1.0, 3.0, 2.0, 9.0, 9.0],
        }
    )
    assert reduce_gemm(gemm).to_dict("records") == [
        {"m": 256, "n": 1024, "k": 1024, "seconds": 2e-3}
    ]
    row = {
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
        "step": 0,
        "head_dim": 128,
        "num_heads": 8,
        "batch_size": 4,
        "isl": 256,
        "latency": 5.0,
    }
    other = [{**row, name: value} for name, value in (("window_size", 128), ("isl", 128))]
    reduced = reduce_attention(pd.DataFrame([row, {**row, "latency": 7.0}, *other]))
    assert reduced.to_dict("records") == [
        {"batch_size": 4, "seq_length": 256, "num_heads": 8, "head_dim": 128, "seconds": 6e-3}
    ]
    nccl = pd.DataFrame(
        {
            "nccl_dtype": ["half", "half", "int8"],
            "op_name": ["all_reduce"] * 3,
            "num_gpus": [2] * 3,
            "message_size": [256, 512, 256],
            "latency": [1.0, 2.0, 3.0],
        }
    )
    assert reduce_collectives(nccl).to_dict("records") == [
        {"collective": "all_reduce", "num_ranks": 2, "nbytes": 256, "seconds": 1e-3}
    ]


def test_malformed_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data"):
        read_table(tmp_path / "none.csv", COLUMNS)
    path = tmp_path / "table.csv"
    path.write_text("m,n\n1,\n")
    with pytest.raises(ConfigError, match="1 empty cell"):
        read_table(path, ("m", "n"))
    with pytest.raises(ConfigError, match="k"):
        read_table(path, ("m", "k"))
    path.write_text("m,n\n")
    with pytest.raises(ConfigError, match="0 rows"):
        read_table(path, ("m", "n"))


def test_default_coefficients_are_those_of_the_data_sheet() -> None:
    device = DEVICES["h100-80"]
    assert Coefficients.of_device(device).gemm_efficiency == device.gemm_efficiency
