"""Fits the op times of executed psRL runs and says which error is left."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from psrl.core.cost.calibration import Calibration, Coefficients, Domain, ErrorRow
from psrl.core.errors import ConfigError
from psrl.core.plan.plan import PHASES
from psrl.core.run.events import GRADIENT_REDUCTION, OPTIMIZER_STEP
from psrl.core.samples.sample import FloatArray, IntArray

from .errors import cross_validate, error_row, error_table, group_folds
from .executed_ops import ExecutedOps, cost_model_of
from .executed_runs import expand_runs, read_run
from .least_squares import Candidate, Fit, Values, fit_coefficients

# A peak that the cluster file sets too low shows as an efficiency above 1, up to this.
_MAX_EFFICIENCY = 4.0
# Caches may spare bytes, other processes take bandwidth: this far above the data sheet's time.
_MAX_BYTES_FACTOR = 20.0
_TURNS, _OVERLAP = 1.0, 8.0
_NUM_FOLDS = 5


def op_candidates(ops: ExecutedOps) -> tuple[Candidate, ...]:
    """Coefficients that op times can decide, the most important first.

    The host takes no longer than the fastest op; a small start could hide behind the device.
    """
    base, layer_s = Coefficients.of_device(ops.device), ops.fastest_layer_s
    host_s = base.host_layer_s
    return (
        Candidate("gemm_efficiency", base.gemm_efficiency, 1e-3, _MAX_EFFICIENCY),
        Candidate("attention_efficiency", base.attention_efficiency, 1e-3, _MAX_EFFICIENCY),
        Candidate("host_layer_s", layer_s / 2, 0.0, layer_s, assumed=host_s),
        Candidate("head_passes", 2.0, 0.0, 100.0),
        Candidate("linear_backward_factor", 1.0, 0.2, 5.0),
        Candidate("attention_backward_factor", base.attention_backward_factor, 0.2, 20.0),
        Candidate("host_backward_factor", base.host_backward_factor, 0.2, 10.0),
        Candidate("tensor_parallel_factor", 1.0, 0.0, 50.0),
        Candidate("host_op_s", layer_s / 2, 0.0, layer_s, assumed=0.0),
        _bytes_candidate(base, "accumulation_bytes_per_parameter"),
        _bytes_candidate(base, "weight_passes"),
    )


def _bytes_candidate(base: Coefficients, name: str) -> Candidate:
    start = float(getattr(base, name))
    return Candidate(name, start, 0.0, _MAX_BYTES_FACTOR * start)


def fit_ops(ops: ExecutedOps, join_exponent: float) -> Fit:
    """Fit op times for a given way in which host and device work together."""
    base = _base(ops, join_exponent)

    def predict(values: Values) -> FloatArray:
        return ops.predict_s(base.model_copy(update=dict(values)))

    return fit_coefficients(predict, ops.measured_s, op_candidates(ops))


def _base(ops: ExecutedOps, join_exponent: float) -> Coefficients:
    base = Coefficients.of_device(ops.device)
    return base.model_copy(update={"join_exponent": join_exponent})


def held_out_s(ops: ExecutedOps, join_exponent: float) -> FloatArray:
    """Seconds of every op from a fit that saw no op of its micro-batch."""
    base = _base(ops, join_exponent)

    def fit_and_predict(known: IntArray, unseen: IntArray) -> FloatArray:
        values = fit_ops(ops.rows(known), join_exponent).values
        return ops.rows(unseen).predict_s(base.model_copy(update=values))

    return cross_validate(fit_and_predict, group_folds(ops.micro_batch_keys, _NUM_FOLDS))


def calibrate_executed(directories: Sequence[Path]) -> Calibration:
    """Fit the ops of executed runs of one device and precision; errors are held out.

    Raises:
        ConfigError: if a directory holds no executed run, runs do not fit together, or there are
            too few micro-batches for a hold-out.
        PlanError: if events or plan are damaged.
    """
    ops = ExecutedOps(tuple(read_run(path) for path in expand_runs(directories)))
    num_micro_batches = len(set(ops.micro_batch_keys))
    if num_micro_batches < _NUM_FOLDS:
        raise ConfigError(
            f"{num_micro_batches} executed micro-batch(es) are too few to fit and to hold out",
            f"execute a trace that gives at least {_NUM_FOLDS}, of different sizes",
        )
    exponents = (_TURNS, _OVERLAP) if ops.device.host_overlaps else (_TURNS,)
    unseen_s = {q: held_out_s(ops, q) for q in exponents}
    errors = {
        q: error_row("all ops", predicted_s, ops.measured_s).mean_percent
        for q, predicted_s in unseen_s.items()
    }
    best = min(errors, key=lambda q: errors[q])
    fit = fit_ops(ops, best)
    step_fit = _fit_steps(ops)
    coefficients = _base(ops, best).model_copy(update=fit.values | step_fit.values)
    return Calibration(
        sources=tuple(f"executed run {run.name} ({run.plan.policy})" for run in ops.runs),
        coefficients=coefficients,
        identification=fit.identification | step_fit.identification,
        domain=_domain(ops),
        errors=_errors(ops, unseen_s[best]),
    )


def _fit_steps(ops: ExecutedOps) -> Fit:
    """Bytes that reduction and optimizer move; a reduction starts when its last rank arrives."""
    base = Coefficients.of_device(ops.device).model_copy(update={"step_s": 0.0})
    fits = []
    for kind, name in (
        (OPTIMIZER_STEP, "optimizer_bytes_per_parameter"),
        (GRADIENT_REDUCTION, "gradient_bytes_per_parameter"),
    ):
        runs, measured_s = ops.step_times(kind)
        start = float(getattr(base, name))
        candidate = Candidate(name, start, 0.0, 1000.0 * start)

        def predict(values: Values, runs: IntArray = runs, kind: str = kind) -> FloatArray:
            costs = [
                cost_model_of(run.plan, base.model_copy(update=dict(values))) for run in ops.runs
            ]
            step = kind == OPTIMIZER_STEP
            times = [c.optimizer_step_s() if step else c.gradient_reduction_s() for c in costs]
            return np.array(times)[runs]

        fits.append(fit_coefficients(predict, measured_s, [candidate]))
    optimizer, gradient = fits
    return Fit(
        {**optimizer.values, **gradient.values, "step_s": 0.0},
        {**optimizer.identification, **gradient.identification},
    )


def _errors(ops: ExecutedOps, predicted_s: FloatArray) -> tuple[ErrorRow, ...]:
    """Time of whole phases per worker (the headline), then single ops by phase and kind."""
    rows = []
    for phase in PHASES:
        times = ops.phase_times(phase, predicted_s)
        if len(times[0]):
            rows.append(error_row(f"{phase}, whole", *times, headline=True))
    groups = {"op": ops.op_name, "run": ops.run_name}
    return (*rows, *error_table(groups, predicted_s, ops.measured_s))


def _domain(ops: ExecutedOps) -> Domain:
    ranges = {name: (float(v.min()), float(v.max())) for name, v in ops.domain_values().items()}
    return Domain(
        device=ops.device.name,
        dtype_bytes=ops.device.dtype_bytes,
        attention="tree",
        ranges=ranges,
    )
