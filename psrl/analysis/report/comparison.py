"""Reads the run directory of a comparison; everything else in this folder works on the result."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from psrl.core.errors import ConfigError, suggest
from psrl.core.plan.plan import PHASES
from psrl.core.plan.policy_names import MERGED_DENSE, POLICY_ORDER
from psrl.core.run.config import Setup
from psrl.core.run.events import Events
from psrl.core.run.run_directory import read_json, read_manifest

from .merge_warnings import merge_warnings

FACTORS = ("cuts", "placement", "sharing")

_PHASE_FIELDS = (
    "makespan_s",
    "worker_time_min_s",
    "worker_time_max_s",
    "worker_time_max_over_min",
    "bubble_fraction",
    "executed_tokens",
    "peak_memory_bytes",
    "peak_kv_bytes",
)
_RUN_FIELDS = (
    *_PHASE_FIELDS,
    "policy",
    "num_samples",
    "logical_tokens",
    "unique_tokens",
    "prefix_match_rate",
    "logical_tokens_per_s",
    "unique_tokens_per_s",
    "lower_bound_s",
    "gap",
    "phases",
)
_TRACE_FIELDS = ("path", "content_hash", "source", "licence", "sampling_mode")


@dataclass(frozen=True)
class Comparison:
    """What a comparison run holds, per policy; events are read when asked for.

    Attributes:
        path: the run directory.
        baseline: policy that speed-ups refer to.
        policies: names, the baseline first.
        metrics: policy -> `core.metrics.run_metrics`.
        factors: policy -> phase -> speedup, sharing, placement, cuts; without the baseline.
        sharing: sampling mode -> token counts.
        trace: path, content_hash, source, licence and sampling_mode.
        executed: policy -> metrics of the run on devices, for those that ran.
        exactness: quantity, largest_relative_difference, tolerance; empty if not checked.
        plan_time_s: policy -> time to plan, where the manifest has it.
        warnings: how predictions leave the domain of their calibration.
        merging: num_merged_samples, num_steps, appended, and why the other steps were not; None
            for samples that are whole episodes already.
    """

    path: Path
    baseline: str
    policies: tuple[str, ...]
    metrics: dict[str, dict[str, Any]]
    factors: dict[str, dict[str, dict[str, float]]]
    setup: Setup
    sharing: dict[str, dict[str, Any]]
    trace: dict[str, str]
    executed: dict[str, dict[str, Any]]
    exactness: list[dict[str, Any]]
    plan_time_s: dict[str, float]
    warnings: list[str]
    merging: dict[str, int] | None = None

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Phases that every policy ran, in the order of an iteration."""
        return tuple(p for p in PHASES if all(p in m["phases"] for m in self.metrics.values()))

    @property
    def main_phase(self) -> str:
        """The update if it ran, else the last phase."""
        return self.phases[-1]

    @property
    def forward_phases(self) -> tuple[str, ...]:
        return tuple(p for p in self.phases if p != "update")

    @property
    def focus(self) -> str:
        """The policy that the report speaks of: psrl, else the fastest."""
        if "psrl" in self.policies:
            return "psrl"
        return min(self.policies, key=lambda p: float(self.metrics[p]["makespan_s"]))

    def makespan_s(self, policy: str, phases: Iterable[str] | None = None) -> float:
        """Time of some phases together (default all); NaN for none."""
        chosen = self.phases if phases is None else tuple(phases)
        if not chosen:
            return math.nan
        return float(sum(self.metrics[policy]["phases"][p]["makespan_s"] for p in chosen))

    def speedup(self, policy: str, phases: Iterable[str] | None = None) -> float:
        """Baseline's time over the policy's."""
        chosen = self.phases if phases is None else tuple(phases)
        return self.makespan_s(self.baseline, chosen) / self.makespan_s(policy, chosen)

    def over_merged(self, policy: str) -> float:
        """Time of dense training of the merged steps over the policy's; NaN without it."""
        if MERGED_DENSE not in self.policies:
            return math.nan
        return self.makespan_s(MERGED_DENSE) / self.makespan_s(policy)

    def flop_ratio(self, policy: str, phases: Iterable[str] | None = None) -> float:
        """The baseline's FLOPs over those that the policy must spend: all shared, if it shares."""
        chosen = self.phases if phases is None else tuple(phases)
        base, mine = (
            sum(float(self.metrics[p]["arithmetic"][phase]["flops"]) for phase in chosen)
            for p in (self.baseline, policy)
        )
        return base / mine if mine else math.nan

    def bound(self, policy: str, phases: Iterable[str] | None = None) -> float:
        """Largest speed-up that the policy's arithmetic allows, were its devices never idle."""
        chosen = self.phases if phases is None else tuple(phases)
        arithmetic = self.metrics[policy]["arithmetic"]
        least_s = sum(float(arithmetic[phase]["least_s"]) for phase in chosen)
        return self.makespan_s(self.baseline, chosen) / least_s if least_s else math.nan

    def events(self, policy: str) -> Events:
        """Events of the simulated run of one policy."""
        path = self.path / "policies" / policy / "events.parquet"
        if not path.exists():
            raise ConfigError(f"{path} is missing", "is this a run of `psrl compare`?")
        return Events.load(path)

    def plan_directory(self, policy: str) -> Path:
        """Plan directory of one policy, relative to the run directory."""
        return Path("policies") / policy / "plan"


def load_comparison(run: Path, baseline: str = "verl") -> Comparison:
    """Read a comparison run directory.

    Raises:
        ConfigError: naming the file or key that is missing.
    """
    folder = run / "policies"
    found = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder} holds no policy", "is this a run of `psrl compare`?")
    if baseline not in found:
        raise ConfigError(
            f"{run} has no policy {baseline!r} to compare with.{suggest(baseline, found)}",
            f"choose a baseline out of {', '.join(sorted(found))}, or compare with it included",
        )
    policies = (baseline, *(p for p in sorted(found, key=_rank) if p != baseline))
    metrics = {p: _metrics(folder / p / "metrics.json", ("arithmetic",)) for p in policies}
    if not set.intersection(*(set(m["phases"]) for m in metrics.values())):
        raise ConfigError(f"{run}: no phase was run by every policy", "compare again")
    factors = {p: _factors(folder / p / "factors.json", metrics[p]["phases"]) for p in policies[1:]}
    sharing = read_json(run / "sharing.json")
    _require(sharing, ("trace",), run / "sharing.json")
    trace = sharing.pop("trace")
    _require(trace, _TRACE_FIELDS, run / "sharing.json")
    executed = run / "executed"
    ran = [p for p in policies if (executed / p).is_dir()]
    exactness, manifest = run / "exactness.json", run / "manifest.json"
    merging = run / "merging.json"
    return Comparison(
        path=run,
        baseline=baseline,
        policies=policies,
        metrics=metrics,
        factors=factors,
        setup=_setup(run / "setup.json"),
        sharing=sharing,
        trace=trace,
        executed={p: _metrics(executed / p / "metrics.json") for p in ran},
        exactness=_checks(exactness) if exactness.exists() else [],
        plan_time_s=read_manifest(run).get("plan_time_s", {}) if manifest.exists() else {},
        warnings=merge_warnings({p: metrics[p].get("warnings", []) for p in policies}),
        merging=read_json(merging) if merging.exists() else None,
    )


def comparison_of(
    baseline: str,
    setup: Setup,
    metrics: dict[str, dict[str, Any]],
    factors: dict[str, dict[str, dict[str, float]]],
    plan_time_s: dict[str, float],
    merging: dict[str, int] | None,
) -> Comparison:
    """A comparison that was not written, without events, for its tables.

    Args:
        metrics, factors, plan_time_s: by policy; all as in `Comparison`.
    """
    others = (p for p in sorted(metrics, key=_rank) if p != baseline)
    return Comparison(
        path=Path(),
        baseline=baseline,
        policies=(baseline, *others),
        metrics=metrics,
        factors=factors,
        setup=setup,
        sharing={},
        trace={},
        executed={},
        exactness=[],
        plan_time_s=plan_time_s,
        warnings=[],
        merging=merging,
    )


def _setup(path: Path) -> Setup:
    """The setup as stored: its calibration is in it, unlike in a hand-written one."""
    try:
        return Setup.model_validate_json(json.dumps(read_json(path)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path}: {where}: {first['msg']}", "write it again with this version of psRL"
        ) from None


def _checks(path: Path) -> list[dict[str, Any]]:
    """Exactness checks; JSON has no infinity, so null is one."""
    rows: list[dict[str, Any]] = read_json(path)
    return [{k: math.inf if v is None else v for k, v in row.items()} for row in rows]


def _rank(policy: str) -> tuple[int, str]:
    known = policy in POLICY_ORDER
    return (POLICY_ORDER.index(policy) if known else len(POLICY_ORDER), policy)


def _metrics(path: Path, further: tuple[str, ...] = ()) -> dict[str, Any]:
    metrics: dict[str, Any] = read_json(path)
    _require(metrics, (*_RUN_FIELDS, *further), path)
    for phase in metrics["phases"].values():
        _require(phase, _PHASE_FIELDS, path)
    for entry in (metrics, *metrics["phases"].values()):
        # JSON has no infinity: null is the ratio to a rank that has nothing to do.
        if entry["worker_time_max_over_min"] is None:
            entry["worker_time_max_over_min"] = math.inf
    return metrics


def _factors(path: Path, ran: Iterable[str]) -> dict[str, dict[str, float]]:
    """Factors per phase."""
    raw: dict[str, dict[str, float]] = read_json(path)
    _require(raw, ran, path)
    for phase in ran:
        _require(raw[phase], ("speedup", *FACTORS), path)
    return {phase: raw[phase] for phase in ran}


def _require(value: dict[str, Any], keys: Iterable[str], path: Path) -> None:
    missing = [key for key in keys if key not in value]
    if missing:
        raise ConfigError(
            f"{path}: missing {', '.join(missing)}", "write it again with this version of psRL"
        )
