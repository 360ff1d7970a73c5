import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.run.relative_error import relative_error

EPSILON = float(np.finfo(np.float64).eps)
sizes = st.floats(1e-100, 1e100)


def test_a_reference_of_another_cpu_changes_nothing() -> None:
    """Terms of size 3 that cancel: 0 here, 1e-17 there; as reference and as result."""
    for found, wanted in ((1e-17, 0.0), (0.0, 1e-17), (2e-17, -1e-17)):
        error = relative_error(abs(found - wanted), abs(wanted), size=3.0, epsilon=EPSILON)
        assert 0 < error < 1e-16
    assert relative_error(1e-17, 0.0) == math.inf
    assert relative_error(2e-17, 1e-17) == 2.0


@given(st.floats(1e-16, 1e3), sizes, st.floats(1.0, 1e12), st.integers(1, 10_000))
def test_an_error_in_a_reference_above_the_floor_is_seen_in_full(
    planted: float, reference: float, cancelled: float, num_terms: int
) -> None:
    """However much cancels: here up to twelve digits of sixteen."""
    found = relative_error(
        planted * reference,
        reference,
        size=cancelled * reference,
        epsilon=EPSILON,
        num_terms=min(num_terms, int((1 / (EPSILON * cancelled)) ** 2) - 1),
    )
    assert found == pytest.approx(planted, rel=1e-12, abs=0)


@given(sizes, st.integers(1, 100))
def test_the_floor_follows_from_the_terms(size: float, num_terms: int) -> None:
    floor = EPSILON * math.sqrt(num_terms) * size
    given_terms = {"size": size, "epsilon": EPSILON, "num_terms": num_terms}
    below = relative_error(0.999 * floor, 0.0, **given_terms)
    assert below == pytest.approx(0.999 * EPSILON * math.sqrt(num_terms))
    assert relative_error(1.001 * floor, 0.0, **given_terms) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    for norms in ((bad, 1.0, 1.0), (1.0, bad, 1.0), (1.0, 1.0, bad), (0.0, bad, 1.0)):
        difference, reference, size = norms
        assert relative_error(difference, reference, size=size, epsilon=EPSILON) == math.inf


def test_rounding_of_random_sums_stays_below_the_floor() -> None:
    """Sums of shuffled float32 terms that cancel; the oracle is `math.fsum`."""
    rng = np.random.default_rng(0)
    epsilon = float(np.finfo(np.float32).eps)
    for count in (2, 30, 1000):
        half = rng.standard_normal(count).astype(np.float32)
        terms = np.concatenate([half, -half])
        assert math.fsum(terms.tolist()) == 0.0
        size = float(np.abs(terms).sum())
        for _ in range(50):
            rng.shuffle(terms)
            total = abs(float(np.cumsum(terms, dtype=np.float32)[-1]))
            error = relative_error(total, 0.0, size=size, epsilon=epsilon, num_terms=len(terms))
            assert error <= epsilon * math.sqrt(len(terms))
            assert relative_error(2e-5 * size, 0.0, size=size, epsilon=epsilon) == math.inf
