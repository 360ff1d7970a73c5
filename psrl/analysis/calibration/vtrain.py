"""Calibration from public iteration times of Megatron on A100 (vTrain's ground truth)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from psrl.core.cost.calibration import Calibration, Domain, ErrorRow, Identification
from psrl.core.samples.sample import FloatArray, IntArray, StrArray

from .errors import cross_validate, error_row, error_table, folds_of
from .least_squares import Candidate, Fit, fit_coefficients
from .megatron_iterations import (
    COLUMNS,
    DEVICE,
    MULTI_HOST,
    Iterations,
    coefficients_of,
    predict_iterations_s,
    read_iterations,
)

MAX_TOKENS = 65536
"""Largest micro-batch of the domain. The one measured row above it, 131,072 tokens near the memory
limit, takes twice what the form says; it stays in the fit and in the error tables."""
SOURCES = (
    "iteration times of Megatron GPT models on A100, 2 to 512 GPUs (VIA-Research/vTrain)",
    "nccl-tests all-reduce logs on A100, 2 to 128 GPUs (NetX-lab/Echo)",
)

CANDIDATES = (
    Candidate("gemm_efficiency", 0.75, 0.3, 1.0),
    Candidate("gemm_tail_tiles", 54.0, 0.0, 450.0),
    Candidate("score_passes", 6.0, 0.0, 60.0),
    Candidate("head_passes", 3.0, 0.0, 30.0),
    Candidate("host_layer_s", 0.5e-3, 1e-5, 5e-3),
    Candidate("host_tensor_parallel_s", 0.25e-3, 0.0, 5e-3),
    Candidate("host_unfused_s", 0.25e-3, 0.0, 5e-3),
    Candidate("tensor_parallel_factor", 1.0, 0.1, 6.0),
    Candidate("step_s", 5e-3, 0.0, 0.1),
    Candidate("accumulation_bytes_per_parameter", 10.0, 0.0, 60.0),
)
MULTI_HOST_CANDIDATES = (
    Candidate(MULTI_HOST + "device_slowdown", 1.0, 0.5, 2.0),
    Candidate(MULTI_HOST + "tensor_parallel_factor", 1.0, 0.1, 6.0),
    Candidate(MULTI_HOST + "gradient_bytes_per_parameter", 8.0, 0.5, 80.0),
    Candidate(MULTI_HOST + "tensor_parallel_across_hosts_factor", 1.0, 0.1, 10.0),
)
_FIXED = (
    "attention_efficiency",
    "replicated_passes",
    "sharded_passes",
    "weight_passes",
    "message_efficiency",
    "gradient_bytes_per_parameter",
    "optimizer_bytes_per_parameter",
)
# 54 rows of several hosts stand beside 720 of one: without more weight they would not count.
_MULTI_HOST_WEIGHT = 4.0


def fit_iterations(data: Iterations) -> Fit:
    """Fit the coefficients of one host, and of several where such rows are present."""
    candidates: Sequence[Candidate] = CANDIDATES
    if data.multi_host.any():
        candidates = (*CANDIDATES, *MULTI_HOST_CANDIDATES)
    weights = np.where(data.multi_host, _MULTI_HOST_WEIGHT, 1.0)
    return fit_coefficients(
        lambda values: predict_iterations_s(data, values), data.measured_s, candidates, weights
    )


def held_out_s(data: Iterations, folds: IntArray) -> FloatArray:
    """Seconds of every iteration, predicted by a fit that had not seen its fold."""

    def fit_and_predict(known: IntArray, unseen: IntArray) -> FloatArray:
        return predict_iterations_s(data.rows(unseen), fit_iterations(data.rows(known)).values)

    return cross_validate(fit_and_predict, folds)


def groups_of(data: Iterations) -> dict[str, StrArray]:
    """Groupings for error tables: one host or several, number of GPUs, layout, micro-batch."""
    kind = np.where(data.multi_host, "several hosts", "one host")
    where = np.where(data.multi_host, " (several hosts)", "")
    groups = {
        "": kind,
        "num_devices": data.table["num_devices"].astype(str).to_numpy(np.str_),
    }
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        values = data.table[name].astype(str).to_numpy(np.str_)
        groups[name] = np.char.add(values, where)
    return groups


def iteration_errors(data: Iterations, predicted_s: FloatArray) -> tuple[ErrorRow, ...]:
    """All rows by group, then by kind and number of GPUs those inside the domain."""
    inside = np.flatnonzero(data.num_tokens <= MAX_TOKENS)
    groups = groups_of(data.rows(inside))
    inside_groups = {
        "inside the domain:": groups[""],
        "inside the domain: num_devices": groups["num_devices"],
    }
    return (
        *error_table(groups_of(data), predicted_s, data.measured_s),
        *error_table(inside_groups, predicted_s[inside], data.measured_s[inside]),
    )


def calibrate_vtrain(folder: Path, nccl_folder: Path, num_folds: int = 5) -> Calibration:
    """Fit all rows; the error table comes from cross-validation."""
    data = read_iterations(folder, nccl_folder)
    fit = fit_iterations(data)
    single, multi = coefficients_of(fit.values)
    held_out = held_out_s(data, folds_of(len(data), num_folds))
    errors = iteration_errors(data, held_out)
    return Calibration(
        sources=SOURCES,
        coefficients=single,
        multi_host=multi,
        identification=fit.identification | _fixed(),
        all_reduce=data.all_reduce,
        domain=_domain(data),
        errors=errors,
    )


def transfer_row(data: Iterations) -> ErrorRow:
    """Error on several hosts of a fit to one host alone: what an uncalibrated cluster costs."""
    one, several = (data.rows(np.flatnonzero(data.multi_host == kind)) for kind in (False, True))
    predicted_s = predict_iterations_s(several, fit_iterations(one).values)
    return error_row("several hosts, fitted to one host", predicted_s, several.measured_s)


def _fixed() -> dict[str, Identification]:
    reason = "fixed beforehand: iteration times do not tell it from the others"
    found = Identification(status="pinned", num_rows=0, reason=reason)
    return dict.fromkeys(_FIXED, found)


def _domain(data: Iterations) -> Domain:
    tokens = np.minimum(data.num_tokens, MAX_TOKENS)
    values = {
        "num_tokens": tokens,
        "keys_per_query": data.column("seq_length"),
        "hidden_size": data.column("hidden_size"),
        "layers_per_stage": data.column("num_layers") / data.column("pipeline_model_parallel_size"),
        **{name: data.column(name) for name in COLUMNS if name.endswith("parallel_size")},
        "num_devices": data.column("num_devices"),
    }
    ranges = {name: (float(v.min()), float(v.max())) for name, v in values.items()}
    return Domain(
        device=DEVICE.name, dtype_bytes=DEVICE.dtype_bytes, attention="scores", ranges=ranges
    )
