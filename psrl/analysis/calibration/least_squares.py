"""Bounded robust least squares that refuses to guess what the measurements do not say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from psrl.core.cost.calibration import Identification
from psrl.core.errors import ConfigError
from psrl.core.samples.sample import FloatArray

MIN_ROWS = 5
"""A coefficient seen by fewer measurements keeps its starting value."""

_SEEN = 0.01
_SEPARABLE = 1e-3
_MAX_RELATIVE_ERROR = 0.5
# Measurements repeat to about 1 %; a better fit than that is luck and proves no separation.
_MIN_NOISE = 0.01
# Residuals beyond 10 % count linearly: a slow host must not move the coefficients of the others.
_SOFT_RESIDUAL = 0.1

Values = Mapping[str, float]
Predict = Callable[[Values], FloatArray]
"""Coefficients by name to predicted seconds, one per measurement."""


@dataclass(frozen=True)
class Candidate:
    """A coefficient that a fit may change.

    Attributes:
        start: where the search begins, and the scale of the coefficient; positive.
        lower, upper: limits of what is physical.
        assumed: value if the measurements cannot tell; None for `start`.
    """

    name: str
    start: float
    lower: float
    upper: float
    assumed: float | None = None

    @property
    def pinned(self) -> float:
        """The value of a coefficient that is not fitted."""
        return self.start if self.assumed is None else self.assumed


@dataclass(frozen=True)
class Fit:
    """Values of all candidates, and how each was found."""

    values: dict[str, float]
    identification: dict[str, Identification]


def fit_coefficients(
    predict: Predict,
    measured_s: FloatArray,
    candidates: Sequence[Candidate],
    weights: FloatArray | None = None,
) -> Fit:
    """Minimise a soft-L1 loss of log(predicted / measured) over the candidates.

    A candidate is pinned at its assumed value
    - if fewer than `MIN_ROWS` measurements move by 1 % or more when it doubles, or
    - if others can replace it: they move all measurements alike, or its standard error exceeds
      half its value. Of several such candidates the last one listed is pinned.

    Raises:
        ConfigError: if a measured time is not positive.
    """
    if not (measured_s > 0).all():
        raise ConfigError(
            f"{int((~(measured_s > 0)).sum())} of {len(measured_s)} measured times are not positive"
        )
    weights = np.ones(len(measured_s)) if weights is None else weights
    problem = _Problem(predict, np.log(measured_s), weights)
    values = {c.name: c.start for c in candidates}
    known: dict[str, Identification] = {}
    free = list(candidates)

    def pin(candidate: Candidate, num_rows: int, reason: str) -> None:
        known[candidate.name] = Identification(status="pinned", num_rows=num_rows, reason=reason)
        values[candidate.name] = candidate.pinned
        free.remove(candidate)

    # What hides behind a slower host or device at the start may still decide at the solution.
    for candidate in candidates:
        rows = problem.num_rows_seeing(values, candidate, 10.0)
        if rows < MIN_ROWS:
            pin(candidate, rows, _too_few(rows))
    while twins := problem.inseparable(values, free):
        others = ", ".join(c.name for c in twins[:-1])
        rows = problem.num_rows_seeing(values, twins[-1])
        pin(twins[-1], rows, f"not separable: moves all measurements like {others}")
    rows_of: dict[str, int] = {}
    errors: dict[str, float] = {}
    while free:
        values |= problem.solve(values, free)
        rows_of = {c.name: problem.num_rows_seeing(values, c) for c in free}
        errors = problem.relative_errors(values, free)
        unseen = [c for c in free if rows_of[c.name] < MIN_ROWS]
        vague = [c for c in free if errors[c.name] > _MAX_RELATIVE_ERROR]
        if unseen:
            rows = rows_of[unseen[-1].name]
            pin(unseen[-1], rows, _too_few(rows))
        elif vague:
            last = vague[-1]
            error = errors[last.name]
            size = f"{error:.0%}" if error < 10.0 else "above 1000%"
            reason = f"not separable from the others: standard error {size}"
            pin(last, rows_of[last.name], reason)
        else:
            break
    for candidate in free:
        known[candidate.name] = Identification(
            status="at_bound" if _at_bound(values[candidate.name], candidate) else "fitted",
            num_rows=rows_of[candidate.name],
            relative_error=errors[candidate.name],
        )
    return Fit(values, {c.name: known[c.name] for c in candidates})


def _too_few(rows: int) -> str:
    return f"{rows} measurement(s) see it, at least {MIN_ROWS} must"


def _at_bound(value: float, candidate: Candidate) -> bool:
    margin = 1e-3 * candidate.start
    return value < candidate.lower + margin or value > candidate.upper - margin


@dataclass(frozen=True)
class _Problem:
    predict: Predict
    log_measured: FloatArray
    weights: FloatArray

    def log_predicted(self, values: Values) -> FloatArray:
        return np.log(np.maximum(self.predict(values), 1e-12))

    def num_rows_seeing(self, values: Values, candidate: Candidate, times: float = 2.0) -> int:
        """Measurements that move by 1 % when a coefficient grows so many times (0: from start)."""
        value = values[candidate.name]
        grown = value + (times - 1.0) * max(value, candidate.start)
        change = self.log_predicted({**values, candidate.name: grown}) - self.log_predicted(values)
        return int((np.abs(change) >= _SEEN).sum())

    def inseparable(self, values: Values, free: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that can move such that no measurement moves; empty if there are none."""
        if not free:
            return []
        jacobian = self.jacobian(values, free)
        norms = np.linalg.norm(jacobian, axis=0)
        seen = [c for c, norm in zip(free, norms, strict=True) if norm > 1e-6]
        if not seen:
            return []
        _, singular, directions = np.linalg.svd(jacobian[:, norms > 1e-6] / norms[norms > 1e-6])
        if len(singular) == len(seen) and singular[-1] > _SEPARABLE:
            return []
        moved = np.abs(directions[-1]) > 0.1
        return [c for c, part in zip(seen, moved.tolist(), strict=True) if part]

    def solve(self, values: Values, free: Sequence[Candidate]) -> dict[str, float]:
        scale = np.array([c.start for c in free])
        lower, upper = (np.array([getattr(c, side) for c in free]) for side in ("lower", "upper"))

        def named(x: FloatArray) -> dict[str, float]:
            return {c.name: float(v) for c, v in zip(free, x * scale, strict=True)}

        def residuals(x: FloatArray) -> FloatArray:
            difference = self.log_predicted({**values, **named(x)}) - self.log_measured
            return self.weights * difference

        first = np.clip([values[c.name] for c in free], lower, upper) / scale
        found = least_squares(
            residuals,
            first,
            bounds=(lower / scale, upper / scale),
            loss="soft_l1",
            f_scale=_SOFT_RESIDUAL,
            ftol=1e-6,
            xtol=1e-6,
            max_nfev=60,
        )
        return named(found.x)

    def jacobian(self, values: Values, free: Sequence[Candidate]) -> FloatArray:
        """[rows, free] weighted change of log(predicted) per relative change of a coefficient."""
        here, columns = self.log_predicted(values), []
        for candidate in free:
            value = values[candidate.name]
            step = 0.01 * max(value, candidate.start)
            # Step inwards from a bound: outside, the form may not be defined.
            step = -step if value + step > candidate.upper else step
            change = self.log_predicted({**values, candidate.name: value + step}) - here
            columns.append(self.weights * change / np.sign(step) / 0.01)
        return np.stack(columns, axis=1)

    def relative_errors(self, values: Values, free: Sequence[Candidate]) -> dict[str, float]:
        """Standard errors relative to the value, or to the start where that is larger."""
        residuals = self.weights * (self.log_predicted(values) - self.log_measured)
        noise = max(1.4826 * float(np.median(np.abs(residuals))), _MIN_NOISE)
        _, singular, directions = np.linalg.svd(self.jacobian(values, free), full_matrices=False)
        singular = np.maximum(singular, 1e-9 * singular.max())
        variance = ((directions.T / singular) ** 2).sum(axis=1)
        return {c.name: float(noise * np.sqrt(x)) for c, x in zip(free, variance, strict=True)}
