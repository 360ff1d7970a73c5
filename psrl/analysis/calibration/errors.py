"""Hold-outs and tables of relative errors."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from psrl.core.cost.calibration import ErrorRow
from psrl.core.samples.sample import FloatArray, IntArray, StrArray

FitAndPredict = Callable[[IntArray, IntArray], FloatArray]
"""(rows to fit, rows to predict) to predicted seconds of the latter."""


def folds_of(num_rows: int, num_folds: int, seed: int = 0) -> IntArray:
    """[num_rows] fold of each row: equal sizes, in random order."""
    folds: IntArray = np.random.default_rng(seed).permutation(num_rows) % num_folds
    return folds


def group_folds(groups: Sequence[Hashable], num_folds: int | None = None) -> IntArray:
    """[num_rows] fold of each row: rows of one group stay together.

    Args:
        num_folds: None for one fold per group.
    """
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    fold_of = folds_of(len(numbers), num_folds) if num_folds else np.arange(len(numbers))
    folds: IntArray = fold_of[[numbers[group] for group in groups]]
    return folds


def cross_validate(fit_and_predict: FitAndPredict, folds: IntArray) -> FloatArray:
    """Seconds of every row, each predicted by a fit to the other folds."""
    predicted_s = np.zeros(len(folds))
    for fold in np.unique(folds).tolist():
        inside = folds == fold
        unseen = np.flatnonzero(inside)
        predicted_s[unseen] = fit_and_predict(np.flatnonzero(~inside), unseen)
    return predicted_s


def error_row(
    group: str,
    predicted_s: FloatArray,
    measured_s: FloatArray,
    held_out: bool = True,
    headline: bool = False,
) -> ErrorRow:
    """Relative errors of one group, which must not be empty."""
    ratio = predicted_s / measured_s
    percent = 100.0 * np.abs(ratio - 1.0)
    return ErrorRow(
        group=group,
        held_out=held_out,
        headline=headline,
        num_rows=len(percent),
        mean_percent=float(percent.mean()),
        median_percent=float(np.median(percent)),
        p90_percent=float(np.percentile(percent, 90)),
        max_percent=float(percent.max()),
        bias_percent=float(100.0 * (np.median(ratio) - 1.0)),
    )


def error_table(
    groups: Mapping[str, StrArray],
    predicted_s: FloatArray,
    measured_s: FloatArray,
    held_out: bool = True,
) -> tuple[ErrorRow, ...]:
    """A row per value of every grouping, named "<grouping> <value>"; grouping "" is the headline.

    Args:
        groups: [rows] value of every row, by name of the grouping.
    """
    rows = []
    for grouping, values in groups.items():
        for value in sorted(set(values.tolist()), key=_natural):
            chosen = values == value
            name = f"{grouping} {value}".strip()
            times = predicted_s[chosen], measured_s[chosen]
            rows.append(error_row(name, *times, held_out, headline=grouping == ""))
    return tuple(rows)


def _natural(text: str) -> list[tuple[int, str]]:
    """Sort key that puts 8 before 64."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", text)]


def format_errors(rows: Sequence[ErrorRow]) -> str:
    """A text table."""
    width = max(len(row.group) for row in rows) + 2
    lines = [
        f"{'error, %':<{width}}{'rows':>6}{'mean':>8}{'median':>8}{'p90':>8}{'max':>8}{'bias':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row.group:<{width}}{row.num_rows:>6}{row.mean_percent:>8.1f}"
            f"{row.median_percent:>8.1f}{row.p90_percent:>8.1f}{row.max_percent:>8.1f}"
            f"{row.bias_percent:>+8.1f}" + ("" if row.held_out else "  in the fit")
        )
    return "\n".join(lines)
