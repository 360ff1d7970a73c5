"""How far apart two results are that may differ by the order of their sums only."""

import math


def relative_error(
    difference: float,
    reference: float,
    *,
    size: float = 0.0,
    epsilon: float = 0.0,
    num_terms: int = 1,
) -> float:
    """Norm of a difference over that of the reference, or over that of the terms if all cancel.

    Adding n terms rounds n - 1 times, by at most epsilon / 2 of a partial sum each and with either
    sign. So a sum is off by about epsilon / 2 * sqrt(n) * (sum of the terms' magnitudes) at most,
    and two orders of it differ by twice that (Higham and Mary 2019, "A new approach to
    probabilistic rounding error analysis"). Where terms cancel to less, the reference is zero on
    one CPU and 1e-17 on another, and dividing by it says nothing: if reference and difference are
    both within that floor, the difference is measured against the terms. A reference or a
    difference above the floor is judged as if there were none.

    Args:
        difference: norm of found - wanted.
        reference: norm of wanted.
        size: the same norm of what was summed, each term by its magnitude; 0 if nothing cancels.
        epsilon: distance from 1 to the next number of the less exact dtype.
        num_terms: of the sum that cancels.

    Returns:
        0 for equal results; infinity where a norm is not finite, and over a reference of 0.
    """
    if not all(map(math.isfinite, (difference, reference, size))):
        return math.inf
    if difference == 0.0:
        return 0.0
    if max(difference, reference) <= epsilon * math.sqrt(num_terms) * size:
        return difference / size
    return difference / reference if reference else math.inf
