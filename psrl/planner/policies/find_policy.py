"""Policies by name: psRL's own, those of installed packages, and functions of the user's modules.

docs/policies.md describes how to add one.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from psrl.core.errors import ConfigError, PlanError, PsrlError, suggest
from psrl.core.samples.sample import IntArray
from psrl.planner.problem import ProgramProblem

from .policies import POLICIES, Draft, Policy, with_our_cuts

ENTRY_POINT_GROUP = "psrl.policies"

UserPolicy = Callable[[ProgramProblem], Draft | IntArray]
"""Decides one program: the rank of each of its samples, or a whole draft."""


def find_policy(name: str) -> Policy:
    """The policy of a name.

    Args:
        name: a key of `POLICIES`, an entry point of the group `psrl.policies`, or
            `module:function` (the module may be a file, `folder/file.py:function`).

    Raises:
        ConfigError: if there is no such policy, module or function, or it cannot be called.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name:
        where, _, attribute = name.rpartition(":")
        found = getattr(_module(where, name), attribute, None)
        if found is None:
            raise ConfigError(
                f"policy {name!r}: {where} has no {attribute!r}",
                "pass module:function with a function of that module",
            )
        return _checked(name, found)
    points = _entry_points()
    if name in points:
        return _checked(name, _load(points[name]))
    known = [*POLICIES, *points]
    raise ConfigError(
        f"unknown policy {name!r}.{suggest(name, known)}",
        f"known policies: {', '.join(known)}; your own: module:function or folder/file.py:function",
    )


def _entry_points() -> dict[str, EntryPoint]:
    points = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in POLICIES:
            raise ConfigError(
                f"{_describe(point)}: psRL has a policy of that name",
                "rename it, or uninstall the package that declares it",
            )
        points[point.name] = point
    return points


def _describe(point: EntryPoint) -> str:
    return f"entry point '{point.name} = {point.value}' of {ENTRY_POINT_GROUP}"


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # the package may raise anything while it is imported
        raise ConfigError(
            f"{_describe(point)} cannot be loaded ({type(error).__name__}: {error})",
            "correct or uninstall the package that declares it",
        ) from None


def _module(where: str, name: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise ConfigError(f"policy {name!r}: there is no file {where}")
    try:
        if path.suffix == ".py":
            return _module_of_file(path)
        return importlib.import_module(where)
    except Exception as error:  # the module may raise anything while it is imported
        raise ConfigError(
            f"policy {name!r}: cannot import {where} ({type(error).__name__}: {error})",
            "install its package, set PYTHONPATH to its folder, or pass the file: "
            "folder/file.py:function",
        ) from None


def _module_of_file(path: Path) -> ModuleType:
    """The module of a file, outside the import path; executed once."""
    place = path.resolve()
    name = f"psrl_policy_{blake2b(str(place).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it is executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(name: str, function: Any) -> Policy:
    """The user's function, with errors that name it."""
    if not callable(function):
        raise ConfigError(
            f"policy {name!r} is of type {type(function).__name__}, not a function",
            "a policy is a function of one ProgramProblem",
        )

    def policy(subproblem: ProgramProblem) -> Draft:
        try:
            decided = function(subproblem)
        except PsrlError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise PlanError(
                f"policy {name!r} raised {type(error).__name__}: {error}",
                f"at {at.filename}:{at.lineno} in {at.name}",
            ) from error
        if isinstance(decided, Draft):
            return decided
        return with_our_cuts(subproblem, _ranks(name, subproblem, decided))

    return policy


def _ranks(name: str, subproblem: ProgramProblem, decided: Any) -> IntArray:
    num_samples, num_ranks = subproblem.samples.num_samples, subproblem.problem.num_ranks
    wanted = (
        f"return the rank of each of the {num_samples} samples as an integer array, "
        f"0..{num_ranks - 1}, or a psrl.planner.Draft"
    )
    if not isinstance(decided, np.ndarray):
        raise PlanError(f"policy {name!r} returned a {type(decided).__name__}", wanted)
    if decided.dtype.kind not in "iu" or decided.shape != (num_samples,):
        raise PlanError(
            f"policy {name!r} returned an array of {decided.dtype} of shape {decided.shape}", wanted
        )
    if num_samples and not 0 <= int(decided.min()) <= int(decided.max()) < num_ranks:
        raise PlanError(
            f"policy {name!r} returned ranks {int(decided.min())}..{int(decided.max())}", wanted
        )
    return decided.astype(np.int64)
