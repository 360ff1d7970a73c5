"""Tree shapes that benchmarks time, by name."""

from collections.abc import Callable

import numpy as np

from psrl.core.errors import BackendError

from .forests import Segment, join_forests, level_tree


def _grpo(rng: np.random.Generator) -> list[Segment]:
    return join_forests(
        [Segment(-1, int(rng.integers(512, 1537)))]
        + [Segment(0, int(n)) for n in rng.integers(200, 2001, 16)]
        for _ in range(4)
    )


SHAPES: dict[str, Callable[[np.random.Generator], list[Segment]]] = {
    "grpo": _grpo,
    "star": lambda rng: (
        [Segment(-1, 4096)] + [Segment(0, int(n)) for n in rng.integers(200, 1001, 64)]
    ),
    "deep_chain": lambda rng: level_tree(rng, [(1500, 3000), *[(100, 600)] * 6], 2),
    "wide_tree": lambda rng: level_tree(rng, [(2048, 2048), (300, 1000), (300, 1000)], 5),
    "tiny_nodes": lambda rng: join_forests(
        level_tree(rng, [(200, 400), *[(5, 40)] * 7], 2) for _ in range(4)
    ),
    "path_60k": lambda rng: [Segment(-1, 60_000)],
}
"""Prompts with responses, agents with branches, tiny nodes, one long path."""


def make_shape(name: str, max_tokens: int | None = None) -> list[Segment]:
    """Segments of a shape, the same at every call.

    Args:
        max_tokens: keep the first trees that fit, at least one, and scale its segments down to
            about this many tokens; for CPUs.

    Raises:
        BackendError: for an unknown shape.
    """
    if name not in SHAPES:
        raise BackendError(f"unknown shape {name!r}", f"use one of {list(SHAPES)}")
    segments = SHAPES[name](np.random.default_rng(0))
    if max_tokens is None:
        return segments
    ends = np.cumsum([s.num_tokens for s in segments])
    roots = [v for v, s in enumerate(segments) if s.parent < 0] + [len(segments)]
    last = max(roots[1], *(v for v in roots[1:] if ends[v - 1] <= max_tokens), 0)
    total = max(int(ends[last - 1]), max_tokens)
    return [
        s._replace(num_tokens=max(1, s.num_tokens * max_tokens // total)) for s in segments[:last]
    ]
