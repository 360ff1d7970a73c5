"""Least squares that pins what it cannot know, hold-outs and error tables."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.analysis.calibration.errors import (
    cross_validate,
    error_row,
    error_table,
    folds_of,
    format_errors,
    group_folds,
)
from psrl.analysis.calibration.least_squares import Candidate, Predict, Values, fit_coefficients
from psrl.core.errors import ConfigError
from psrl.core.samples.sample import FloatArray, IntArray

RNG = np.random.default_rng(0)
TOKENS = RNG.uniform(100, 1000, 40)
PAIRS = RNG.uniform(1e3, 1e5, 40)
SLOPES = (
    Candidate("per_token_s", 1e-3, 0.0, 1.0),
    Candidate("per_pair_s", 1e-5, 0.0, 1.0),
    Candidate("fixed_s", 1e-2, 0.0, 1.0, assumed=0.0),
)


def linear(tokens: FloatArray, pairs: FloatArray, fixed: FloatArray | float = 1.0) -> Predict:
    def predict(values: Values) -> FloatArray:
        return np.asarray(
            values["per_token_s"] * tokens
            + values["per_pair_s"] * pairs
            + values["fixed_s"] * fixed
        )

    return predict


TRUE = {"per_token_s": 4e-3, "per_pair_s": 2e-5, "fixed_s": 0.3}


def test_known_coefficients_are_recovered() -> None:
    predict = linear(TOKENS, PAIRS)
    fit = fit_coefficients(predict, predict(TRUE), SLOPES)
    assert fit.values == pytest.approx(TRUE, rel=1e-4)
    assert {found.status for found in fit.identification.values()} == {"fitted"}


def test_a_slow_host_moves_no_coefficient() -> None:
    predict = linear(TOKENS, PAIRS)
    measured_s = predict(TRUE) * np.where(np.arange(40) % 10 == 0, 3.0, 1.0)
    assert fit_coefficients(predict, measured_s, SLOPES).values == pytest.approx(TRUE, rel=0.1)


@pytest.mark.parametrize(("num_seeing", "status"), [(4, "pinned"), (5, "fitted")])
def test_fewer_than_five_measurements_pin_a_coefficient(num_seeing: int, status: str) -> None:
    fixed = np.where(np.arange(40) < num_seeing, 1.0, 0.0)
    predict = linear(TOKENS, PAIRS, fixed * 100.0)
    fit = fit_coefficients(predict, predict(TRUE | {"fixed_s": 0.2}), SLOPES)
    found = fit.identification["fixed_s"]
    assert (found.status, found.num_rows) == (status, num_seeing)
    assert fit.values["fixed_s"] == pytest.approx(0.0 if status == "pinned" else 0.2, rel=1e-3)
    assert fit.values["per_pair_s"] == pytest.approx(TRUE["per_pair_s"], rel=0.1)


def test_a_coefficient_that_others_replace_is_pinned() -> None:
    predict = linear(TOKENS, 50.0 * TOKENS)
    truth = {"per_token_s": 4e-3, "per_pair_s": 1e-5, "fixed_s": 0.3}
    fit = fit_coefficients(predict, predict(truth), SLOPES)
    assert fit.identification["per_pair_s"].status == "pinned"
    assert "not separable" in fit.identification["per_pair_s"].reason
    assert fit.values == pytest.approx(truth, rel=1e-3), "the assumed value happens to be true"


def test_a_value_at_its_limit_is_marked() -> None:
    predict = linear(TOKENS, PAIRS)
    narrow = (Candidate("per_token_s", 1e-3, 0.0, 2e-3), *SLOPES[1:])
    fit = fit_coefficients(predict, predict(TRUE), narrow)
    assert fit.identification["per_token_s"].status == "at_bound"


def test_without_measurements_everything_is_assumed() -> None:
    none = np.empty(0)
    fit = fit_coefficients(linear(none, none), none, SLOPES)
    assert fit.values == {"per_token_s": 1e-3, "per_pair_s": 1e-5, "fixed_s": 0.0}
    assert {found.status for found in fit.identification.values()} == {"pinned"}


def test_times_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="2 of 3 measured times"):
        fit_coefficients(linear(TOKENS[:3], PAIRS[:3]), np.array([0.0, 1.0, np.nan]), SLOPES)


@given(num_rows=st.integers(1, 60), num_folds=st.integers(1, 9), seed=st.integers(0, 5))
def test_folds_are_even(num_rows: int, num_folds: int, seed: int) -> None:
    sizes = np.bincount(folds_of(num_rows, num_folds, seed), minlength=num_folds)
    assert sizes.sum() == num_rows
    assert sizes.max() - sizes.min() <= 1


def test_groups_stay_together() -> None:
    groups = ["a", "b", "a", "c", "b", "d"]
    folds = group_folds(groups, 2)
    assert folds[0] == folds[2]
    assert folds[1] == folds[4]
    assert sorted(np.bincount(folds_of(4, 2)).tolist()) == [2, 2]
    assert group_folds(groups).tolist() == [0, 1, 0, 2, 1, 3]


def test_no_row_is_predicted_by_a_fit_that_saw_it() -> None:
    measured = np.arange(10.0)

    def fit_and_predict(known: IntArray, unseen: IntArray) -> FloatArray:
        assert not set(known.tolist()) & set(unseen.tolist())
        assert len(known) + len(unseen) == 10
        return measured[unseen]

    assert cross_validate(fit_and_predict, folds_of(10, 3)).tolist() == measured.tolist()


def test_errors_by_hand() -> None:
    row = error_row("g", np.array([1.1, 0.8, 1.0, 1.0]), np.ones(4))
    assert (row.num_rows, row.held_out, row.headline) == (4, True, False)
    assert row.mean_percent == pytest.approx(7.5)
    assert row.median_percent == pytest.approx(5.0)
    assert row.max_percent == pytest.approx(20.0)
    assert row.bias_percent == pytest.approx(0.0)


def test_table_has_a_row_per_value_in_natural_order() -> None:
    groups = {"": np.array(["x"] * 3), "size": np.array(["64", "8", "64"])}
    rows = error_table(groups, np.array([1.0, 2.0, 1.0]), np.ones(3))
    assert [row.group for row in rows] == ["x", "size 8", "size 64"]
    assert [row.headline for row in rows] == [True, False, False]
    assert [row.max_percent for row in rows] == [100.0, 100.0, 0.0]
    assert format_errors(rows).splitlines()[2].split()[:4] == ["size", "8", "1", "100.0"]
