"""One recorded training sample, and how to make it from masks and per-token values."""

from dataclasses import dataclass
from hashlib import sha256
from math import nan

import numpy as np

from psrl.core.samples.sample import FloatArray, IntArray

from .reading import BoolArray


@dataclass(frozen=True)
class RecordedSample:
    """Symbols, trained token ranges, and where the sample belongs.

    Attributes:
        loss_spans: ascending token ranges `[start, end)`; a sample without any is left out.
        trajectory_id: empty gives the sample a trajectory of its own.
        advantage: NaN derives it from the rewards of the group.
        iteration: RL iteration as recorded; None when the recording does not tell.
    """

    symbols: IntArray
    loss_spans: tuple[tuple[int, int], ...]
    group_id: str
    trajectory_id: str
    agent_step: int = 0
    advantage: float = nan
    reward: float = nan
    arrival_s: float = nan
    generate_s: float = nan
    environment_s: float = nan
    iteration: int | None = None


def spans_of(mask: BoolArray, start: int = 0) -> tuple[tuple[int, int], ...]:
    """Ranges of trained tokens; the first token of a sample has no predecessor, so never it.

    Args:
        mask: [n] which tokens are trained.
        start: position of the first of them in the sample.
    """
    flags = np.concatenate([[False], mask, [False]])
    if start == 0:
        flags[1:2] = False
    edges = (np.flatnonzero(flags[1:] != flags[:-1]) + start).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def mean_advantage(values: FloatArray, mask: BoolArray) -> tuple[float, bool]:
    """Mean over the trained tokens, and whether they differ; NaN without trained tokens."""
    trained = values[mask]
    if not len(trained):
        return nan, False
    return float(trained.mean()), bool(np.ptp(trained) > 1e-6 * max(1.0, np.abs(trained).max()))


def text_digest(text: str) -> str:
    """Group name of a task that has none: twelve hex digits of its text."""
    return sha256(text.encode()).hexdigest()[:12]


def token_digest(tokens: IntArray) -> str:
    """Group name of a task that has none: twelve hex digits of its prompt's token ids."""
    return sha256(tokens.astype("<i8").tobytes()).hexdigest()[:12]
