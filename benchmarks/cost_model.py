"""Print the held-out errors of the calibrated cost model on public measurements.

    python benchmarks/cost_model.py [--measured RUN ...]

Every prediction comes from a fit that had not seen the measurement. Results of the public data go
to benchmarks/results/cost_model.json; `--measured` also prints those of executed psRL runs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from psrl.analysis.calibration.errors import (
    cross_validate,
    error_row,
    folds_of,
    format_errors,
    group_folds,
)
from psrl.analysis.calibration.executed_fit import calibrate_executed
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
from psrl.core.calibration import ErrorRow
from psrl.core.sample import FloatArray, IntArray

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples" / "calibration"
RESULTS = ROOT / "benchmarks" / "results" / "cost_model.json"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measured", type=Path, nargs="*", default=[])
    measured: Sequence[Path] = parser.parse_args().measured
    data = read_iterations(DATA / "vtrain_a100", DATA / "nccl_a100")
    tables = {
        "A100 iterations, five folds": iteration_errors(
            data, held_out_s(data, folds_of(len(data), 5))
        ),
        "A100 iterations, other hold-outs": repeated_rows(data),
        "A100 iterations, uncalibrated transfer": [transfer_row(data)],
        "H200 kernels, five folds": calibrate_h200(DATA / "h200").errors,
    }
    for title, rows in tables.items():
        print(f"{title}\n{format_errors(rows)}\n")
    document = {title: [row.model_dump() for row in rows] for title, rows in tables.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if measured:
        errors = calibrate_executed(measured).errors
        print(f"executed psRL runs, five folds\n{format_errors(errors)}")


if __name__ == "__main__":
    main()
