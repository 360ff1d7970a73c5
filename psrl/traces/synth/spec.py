"""The dials of a generator, read from a preset or TOML file and overrides."""

import tomllib
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator

from psrl.core.cost.cluster import Spec
from psrl.core.errors import ConfigError, suggest
from psrl.core.run.config import parse
from psrl.core.samples.sample import FloatArray, IntArray

SYNTH_MODES = ("step", "step_s", "step_rt", "traj", "tree", "tree_step")
PRESETS = ("alfworld", "dtn", "search", "webshop")

_HINT = "docs/generators.md describes every dial"


class Distribution(Spec):
    """Whole numbers, by quantiles at equal steps of probability; one quantile is a constant.

    Between two quantiles all values are equally likely. Quantiles are what a table of measured
    lengths gives, and they keep the two humps that a mean and a spread would lose.
    """

    quantiles: Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
    scale: float = Field(default=1.0, gt=0, description="factor on every quantile")

    @field_validator("quantiles")
    @classmethod
    def _ascending(cls, quantiles: tuple[float, ...]) -> tuple[float, ...]:
        # NaN fails the first comparison.
        if not quantiles[0] >= 0 or not np.isfinite(quantiles).all():
            raise ValueError("must be finite and not negative")
        if any(b < a for a, b in pairwise(quantiles)):
            raise ValueError("must not decrease")
        return quantiles

    def values(self, probability: FloatArray) -> IntArray:
        """[n] values at the given probabilities in [0, 1]."""
        at = np.linspace(0.0, 1.0, len(self.quantiles))
        return np.rint(self.scale * np.interp(probability, at, self.quantiles)).astype(np.int64)

    @property
    def mean(self) -> float:
        """Mean before rounding."""
        q = np.asarray(self.quantiles)
        return self.scale * float((q[1:] + q[:-1]).mean() / 2 if len(q) > 1 else q[0])


class SynthSpec(Spec):
    """Dials of a workload; lengths in tokens.

    A task has a prompt behind the instructions that all tasks share. Each of its rollouts takes
    turns: the model thinks and acts, the environment answers.
    """

    name: str
    tasks: int = Field(ge=1, description="semantic groups per iteration")
    rollouts: int = Field(
        ge=1, description="trajectories per task; leaves of the tree in tree modes"
    )
    iterations: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1, description="optimizer steps per iteration")
    instructions_tokens: int = Field(ge=1, description="system prompt and examples of all tasks")
    prompt: Distribution = Field(description="task description, per task")
    turns: Distribution = Field(description="model calls, per rollout; at least 1")
    think: Distribution = Field(
        description="reasoning of a response; step_rt drops it from history"
    )
    action: Distribution = Field(description="rest of a response; at least 1")
    observation: Distribution = Field(description="answer of the environment, per turn")
    summary: Distribution = Field(description="end of a response in step_s: all that is kept")
    max_prompt_tokens: int = Field(
        default=2**31, ge=2, description="an episode ends before a call with a longer prompt"
    )
    rewrite_rate: float = Field(
        default=0.0, ge=0, le=1, description="probability that a turn begins by rewriting history"
    )
    rewrite_keep: float = Field(
        default=0.2, ge=0, le=1, description="length of a rewritten history over the old one"
    )
    fork_depth: float = Field(
        default=1.0, ge=0, le=1, description="tree: forks lie in this first part of a rollout"
    )
    branches: int = Field(default=1, ge=1, description="tree: rollouts that leave at each fork")
    success_rate: float = Field(default=0.5, ge=0, le=1, description="rollouts with reward 1")


def load_spec(source: str, mode: str, overrides: tuple[str, ...] = ()) -> SynthSpec:
    """The dials of one mode.

    Args:
        source: a name in `PRESETS` or the path of a TOML file. A table `modes.MODE` changes dials
            for that mode.
        mode: one of `SYNTH_MODES`.
        overrides: TOML texts such as `tasks=64` or `turns.scale=2`, applied last.

    Raises:
        ConfigError: naming file, key and what is allowed.
    """
    if mode not in SYNTH_MODES:
        raise ConfigError(
            f"unknown sampling mode '{mode}'.{suggest(mode, list(SYNTH_MODES))}",
            f"known modes are {', '.join(SYNTH_MODES)}",
        )
    raw = _toml(_read(source), source)
    modes = raw.pop("modes", {})
    if not isinstance(modes, dict) or not set(modes) <= set(SYNTH_MODES):
        raise ConfigError(f"{source}: modes must be tables named {', '.join(SYNTH_MODES)}", _HINT)
    raw = _merged(raw, modes.get(mode, {}))
    for text in overrides:
        raw = _merged(raw, _toml(text, f"override '{text}'"))
    try:
        return parse(SynthSpec, raw, source)
    except ConfigError as error:
        raise ConfigError(error.message, _HINT) from None


def _read(source: str) -> str:
    if source in PRESETS:
        return (files(__package__) / "presets" / f"{source}.toml").read_text(encoding="utf-8")
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"'{source}' is neither a preset nor a readable file.{suggest(source, list(PRESETS))}",
            f"known presets are {', '.join(PRESETS)}",
        ) from None


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{where}: not valid TOML ({error})", "write e.g. turns.scale=2"
        ) from None


def _merged(base: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Nested tables of `base`, with the values of `changed` in place of their own."""
    merged = dict(base)
    for key, value in changed.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = _merged(inner, value)
        merged[key] = value
    return merged
