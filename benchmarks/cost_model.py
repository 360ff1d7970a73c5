"""Held-out errors of the calibrated cost model on public measurements.

Every prediction comes from a fit that had not seen the measurement. `psrl calibrate --measured`
prints the errors on executed runs of psRL.
"""

from pathlib import Path

import numpy as np

from psrl.analysis.calibration.errors import cross_validate, error_row, folds_of, group_folds
from psrl.analysis.calibration.h200_tables import calibrate_h200
from psrl.analysis.calibration.megatron_iterations import (
    Iterations,
    predict_iterations_s,
    read_iterations,
)
from psrl.analysis.calibration.vtrain import (
    fit_iterations,
    held_out_s,
    iteration_errors,
    transfer_row,
)
from psrl.core.cost.calibration import ErrorRow
from psrl.core.samples.sample import FloatArray, IntArray

from .measurement import Measurement

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples" / "calibration"
MEAN_PERCENT_BARS = {"one host": 6.0, "several hosts": 8.0}
NUM_REPEATS = 5


def cells(data: Iterations) -> list[tuple[float, ...]]:
    """[rows] hidden size, tensor parallel size and tokens of a micro-batch."""
    columns = data.column("hidden_size"), data.column("tensor_model_parallel_size")
    return list(zip(*columns, data.num_tokens, strict=True))


def with_residuals_s(data: Iterations, known: IntArray, unseen: IntArray) -> FloatArray:
    """The form times the median residual of a row's cell, drawn to 1 where that has few rows."""
    fit_s = predict_iterations_s(data, fit_iterations(data.rows(known)).values)
    seen: dict[tuple[float, ...], list[float]] = {}
    keys = cells(data)
    for row in known.tolist():
        seen.setdefault(keys[row], []).append(float(np.log(data.measured_s[row] / fit_s[row])))
    shrunk = {key: np.median(v) * len(v) / (len(v) + 1) for key, v in seen.items()}
    factors = np.exp([shrunk.get(keys[row], 0.0) for row in unseen.tolist()])
    return np.asarray(fit_s[unseen] * factors)


def repeated_rows(data: Iterations) -> list[ErrorRow]:
    """Both bars over several random partitions into folds, and stricter and looser hold-outs."""
    kinds = {"one host": ~data.multi_host, "several hosts": data.multi_host}
    rows = []
    for seed in range(NUM_REPEATS):
        predicted_s = held_out_s(data, folds_of(len(data), 5, seed))
        for name, chosen in kinds.items():
            times = predicted_s[chosen], data.measured_s[chosen]
            rows.append(error_row(f"{name}, partition {seed}", *times))
    strict_s = held_out_s(data, group_folds(cells(data)))
    table_s = cross_validate(
        lambda known, unseen: with_residuals_s(data, known, unseen), folds_of(len(data), 5)
    )
    for name, chosen in kinds.items():
        measured_s = data.measured_s[chosen]
        title = f"{name}, no row of the same (hidden, TP, tokens) in the fit"
        rows.append(error_row(title, strict_s[chosen], measured_s))
        rows.append(error_row(f"{name}, with a residual table", table_s[chosen], measured_s))
    return rows


def measure() -> list[Measurement]:
    data = read_iterations(DATA / "vtrain_a100", DATA / "nccl_a100")
    tables = {
        "A100 iterations": iteration_errors(data, held_out_s(data, folds_of(len(data), 5))),
        "A100, other hold-outs": repeated_rows(data),
        "A100, uncalibrated transfer": [transfer_row(data)],
        "H200 kernels": calibrate_h200(DATA / "h200").errors,
    }
    measurements = []
    for title, rows in tables.items():
        for row in rows:
            bar = MEAN_PERCENT_BARS.get(row.group) if title == "A100 iterations" else None
            what = f"{title}: {row.group} ({row.num_rows} rows)"
            measurements.append(Measurement(what, row.mean_percent, "mean |%|", bar, False))
    return measurements
