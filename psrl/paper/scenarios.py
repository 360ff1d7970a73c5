"""Scenarios of published experiments, and the one set of assumptions that all of them share."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from psrl.core.cost.cluster import Spec
from psrl.core.errors import ConfigError, suggest
from psrl.core.plan.plan import PHASES
from psrl.core.run.config import Setup, load_setup, parse
from psrl.core.samples.sample import SampleBatch
from psrl.traces.synth import SYNTH_MODES, Distribution, SynthSpec, load_spec, synthesise

ASSUMPTIONS_FILE = "assumptions.toml"

Texts = Annotated[tuple[str, ...], Field(strict=False)]


class Assumptions(Spec):
    """What the paper is silent on, the same for every scenario."""

    seed: int = Field(ge=0)
    optimizer_steps: int = Field(ge=1, description="mini-batches, drawn sample by sample")
    micro_batch_rounding_tokens: int = Field(
        ge=1, description="the budget is the longest sample, rounded up to this"
    )
    generation_tokens_per_s: float = Field(gt=0, description="of one trajectory in the rollout")
    pool_fraction: float = Field(
        gt=0, le=1, description="device memory that a preallocated cache leaves nothing of"
    )
    statements: Texts = Field(description="all of it for people")


class ScenarioFile(Spec):
    """One experiment: a workload on a cluster, in some sampling modes, under some policies."""

    title: str
    workload: str = Field(description="preset or file of `psrl trace synth`")
    cluster: str = Field(description="cluster file, relative to the scenario")
    modes: Texts = Field(min_length=1)
    policies: Texts = Field(min_length=1, description="the first is the baseline of speed-ups")
    phases: Texts = PHASES
    set: Texts = Field(default=(), description="changes of the cluster file")
    batch_scale: int = Field(default=1, ge=1, description="factor on the tasks of the workload")
    length_scale: int = Field(default=1, ge=1, description="factor on all lengths")
    blocks: Texts = Field(
        default=(), description="'BLOCKS CACHE' of `psrl simulate`, for the last policy"
    )


@dataclass(frozen=True)
class Scenario:
    """A scenario file by its name."""

    name: str
    path: Path
    content: ScenarioFile

    def setup(self, longest_tokens: int, assumptions: Assumptions) -> Setup:
        """The cluster file with the micro-batch budget of the longest sample."""
        unit = assumptions.micro_batch_rounding_tokens
        budget = -(-longest_tokens // unit) * unit
        overrides = (*self.content.set, f"planning.max_tokens_per_micro_batch={budget}")
        return load_setup(self.path.parent / self.content.cluster, overrides)

    def batch(self, mode: str, assumptions: Assumptions) -> SampleBatch:
        """The samples of one iteration, in mini-batches drawn over all tasks."""
        spec = scaled(load_spec(self.content.workload, mode), self.content)
        batch = synthesise(spec, mode, assumptions.seed).batches[0]
        order = np.random.default_rng(assumptions.seed).permutation(batch.num_samples)
        mini_batch = np.empty(batch.num_samples, np.int64)
        steps = min(assumptions.optimizer_steps, batch.num_samples)
        mini_batch[order] = np.arange(batch.num_samples) * steps // batch.num_samples
        return replace(batch, mini_batch=mini_batch)


def scaled(spec: SynthSpec, content: ScenarioFile) -> SynthSpec:
    """A workload with more tasks, or with every length multiplied."""
    factor = content.length_scale
    changes: dict[str, Any] = {"tasks": spec.tasks * content.batch_scale}
    for name in ("instructions_tokens", "max_prompt_tokens"):
        changes[name] = getattr(spec, name) * factor
    for name in ("prompt", "think", "action", "observation", "summary"):
        lengths: Distribution = getattr(spec, name)
        changes[name] = lengths.model_copy(update={"scale": lengths.scale * factor})
    return spec.model_copy(update=changes)


def load_assumptions(directory: Path) -> Assumptions:
    """Read the assumptions beside the scenarios.

    Raises:
        ConfigError: naming file and key.
    """
    path = directory / ASSUMPTIONS_FILE
    return parse(Assumptions, _toml(path), str(path))


def load_scenarios(directory: Path, names: tuple[str, ...] = ()) -> list[Scenario]:
    """All scenarios of a directory by name, or the named ones.

    Raises:
        ConfigError: if there are none, a name is unknown, or a file is wrong.
    """
    paths = {
        path.stem: path
        for path in sorted(directory.glob("*.toml"))
        if path.name != ASSUMPTIONS_FILE
    }
    if not paths:
        raise ConfigError(
            f"{directory} has no scenarios", "run in a checkout of psRL, or pass --scenarios DIR"
        )
    for name in names:
        if name not in paths:
            raise ConfigError(
                f"unknown scenario {name!r}.{suggest(name, list(paths))}",
                f"{directory} has {', '.join(paths)}",
            )
    chosen = [paths[name] for name in names] if names else list(paths.values())
    found = [
        Scenario(path.stem, path, parse(ScenarioFile, _toml(path), str(path))) for path in chosen
    ]
    for scenario in found:
        _check_names(scenario)
    return found


def _check_names(scenario: Scenario) -> None:
    """Refuse unknown modes, policies and phases before anything runs for minutes."""
    from psrl.planner import POLICIES

    content = scenario.content
    for kind, names, known in (
        ("mode", content.modes, SYNTH_MODES),
        ("policy", content.policies, tuple(POLICIES)),
        ("phase", content.phases, PHASES),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{scenario.path}: unknown {kind} {name!r}.{suggest(name, list(known))}",
                    f"known: {', '.join(known)}",
                )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"cannot read {path}", "pass --scenarios DIR") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
