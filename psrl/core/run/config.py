"""Hand-written TOML configuration: strict keys, presets by name, errors that name the key."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError

from psrl.core.cost.calibration import Calibration, load_calibration
from psrl.core.cost.cluster import ClusterSpec, ModelSpec, ParallelConfig, Spec, check_layout
from psrl.core.cost.presets import DEVICES, MODELS
from psrl.core.errors import ConfigError, suggest

S = TypeVar("S", bound=BaseModel)


class PlanningConfig(Spec):
    """Budgets and effort of the planner."""

    max_tokens_per_micro_batch: int = Field(
        default=16384, ge=1, description="most tokens one micro-batch may compute"
    )
    memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="share of the device memory that a plan may use"
    )
    search_iterations: int = Field(
        default=2000, ge=0, description="local-search steps of the psrl policy; 0 = first heuristic"
    )
    solver_work_limit: float = Field(
        default=20.0,
        ge=0,
        description="OR-Tools' deterministic work, about seconds, of the optimal policy; 0 = none",
    )
    seed: int = Field(default=0, ge=0)


class Setup(Spec):
    """A cluster file: model, cluster, parallel layout and planning budgets."""

    model: ModelSpec
    cluster: ClusterSpec
    parallel: ParallelConfig
    planning: PlanningConfig = PlanningConfig()
    calibration: Calibration | None = Field(
        default=None, description="file of `psrl calibrate`, relative to this one; else a roofline"
    )


def load_setup(path: Path, overrides: tuple[str, ...] = ()) -> Setup:
    """Read a cluster file.

    Args:
        path: TOML file with tables model, cluster, parallel and (optional) planning; model and
            cluster.device take a preset name or `preset = "..."` plus changed fields.
        overrides: `table.key=value` texts with TOML values, applied after the file.

    Raises:
        ConfigError: naming file, key and what is allowed.
    """
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"cannot read {path}", "pass a TOML cluster file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
    for text in overrides:
        _apply_override(raw, text)
    if "model" in raw:
        raw["model"] = _with_preset(raw["model"], MODELS, f"{path}: model")
    cluster = raw.get("cluster")
    if isinstance(cluster, dict) and "device" in cluster:
        cluster["device"] = _with_preset(cluster["device"], DEVICES, f"{path}: cluster.device")
    if isinstance(raw.get("calibration"), str):
        raw["calibration"] = load_calibration(path.parent / raw["calibration"])
    setup = parse(Setup, raw, str(path))
    check_layout(setup.model, setup.cluster, setup.parallel)
    return setup


def parse(schema: type[S], raw: dict[str, Any], where: str) -> S:
    """Validate a raw mapping.

    Raises:
        ConfigError: one line per wrong key, with a suggestion for a mistyped one.
    """
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        lines = problem_lines(schema, error, where)
        raise ConfigError("\n".join(lines), "see examples/clusters for complete files") from None


def problem_lines(schema: type[BaseModel], error: ValidationError, where: str) -> list[str]:
    """A line for each wrong key, with a suggestion for a mistyped one."""
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = _known_keys(schema, problem["loc"][:-1])
            hint = suggest(str(problem["loc"][-1]), known)
            lines.append(f"{where}: unknown key '{key}'.{hint}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: key '{key}' is missing")
        else:
            lines.append(f"{where}: {key} = {problem['input']!r}: {problem['msg']}")
    return lines


def _known_keys(schema: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Keys of the table at a location; a number in it is the place in a list of tables."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = schema.model_fields[part].annotation
        inner = [annotation, *get_args(annotation)]
        tables = [a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)]
        if not tables:
            return []
        schema = tables[0]
    return list(schema.model_fields)


def _with_preset(value: Any, presets: dict[str, Any], where: str) -> Any:
    """A preset's fields, changed by the table's own; tables without a preset pass through."""
    table = {"preset": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or "preset" not in table:
        return value
    name = table["preset"]
    if not isinstance(name, str) or name not in presets:
        raise ConfigError(
            f"{where}: unknown preset {name!r}.{suggest(str(name), list(presets))}",
            f"known presets: {', '.join(presets)}",
        )
    other = table.get("name", name)
    if other != name and isinstance(other, str) and other in presets:
        raise ConfigError(
            f"{where}: preset {name!r} under the name {other!r}, which is another preset",
            "leave the name out, or choose the other preset",
        )
    changed = {k: v for k, v in table.items() if k != "preset"}
    return {**presets[name].model_dump(), **changed}


def _apply_override(raw: dict[str, Any], text: str) -> None:
    key, separator, value = text.partition("=")
    try:
        if not separator:
            raise tomllib.TOMLDecodeError("no '='")
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"cannot read override '{text}'",
            "write table.key=value with a TOML value, e.g. parallel.data_parallel_size=4",
        ) from None
    *tables, last = key.strip().split(".")
    target = raw
    for name in tables:
        inner = target.setdefault(name, {})
        if isinstance(inner, str):
            inner = target[name] = {"preset": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{text}': {name} is not a table")
        target = inner
    target[last] = parsed
