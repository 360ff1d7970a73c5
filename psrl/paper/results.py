"""What the rows of the table ask of the measurements."""

import math
from collections.abc import Iterator
from typing import Any

from psrl.api.policy_runs import DENSE
from psrl.core.plan.policy_names import MERGED_DENSE

from .scenarios import Assumptions

FACTORS = ("cuts", "placement", "sharing")


class NotRunError(Exception):
    """A row needs a scenario that was not chosen."""


class Results:
    """Measurements by (scenario, mode, policy); times in seconds, memory in bytes."""

    def __init__(self, measured: list[dict[str, Any]], assumptions: Assumptions) -> None:
        self._runs = {(m["scenario"], m["mode"], m["policy"]): m for m in measured}
        self.assumptions = assumptions

    def run(self, scenario: str, mode: str, policy: str) -> dict[str, Any]:
        """One measurement.

        Raises:
            NotRunError: if the scenario was not run, or nothing of it fits the device.
        """
        found = self._runs.get((scenario, mode, policy))
        if found is None:
            raise NotRunError(f"scenario {scenario} was not run")
        if "metrics" not in found:
            raise NotRunError(f"{scenario} {mode} {policy} does not fit the device")
        return found

    def fits(self, scenario: str, mode: str, policy: str) -> bool:
        """Whether the run's peak, with all logits at once, fits the device.

        Raises:
            NotRunError: if the scenario was not run.
        """
        found = self._runs.get((scenario, mode, policy))
        if found is None:
            raise NotRunError(f"scenario {scenario} was not run")
        if "metrics" not in found:
            return False
        return bool(found["memory"]["whole_logits_peak_bytes"] <= found["device_bytes"])

    def runs(self, *scenarios: str) -> Iterator[tuple[str, str, str]]:
        """(scenario, mode, policy) of all runs of some scenarios that have metrics.

        Raises:
            NotRunError: if one of them was not run.
        """
        present = {key[0] for key in self._runs}
        for scenario in scenarios or sorted(present):
            if scenario not in present:
                raise NotRunError(f"scenario {scenario} was not run")
        for key, measured in self._runs.items():
            if "metrics" in measured and (not scenarios or key[0] in scenarios):
                yield key

    def phase(self, scenario: str, mode: str, policy: str, phase: str = "update") -> dict[str, Any]:
        """Metrics of a phase."""
        phases: dict[str, dict[str, Any]] = self.run(scenario, mode, policy)["metrics"]["phases"]
        return phases[phase]

    def phase_s(self, scenario: str, mode: str, policy: str, phase: str = "update") -> float:
        return float(self.phase(scenario, mode, policy, phase)["makespan_s"])

    def match_rate(self, scenario: str, mode: str) -> float:
        return float(self.run(scenario, mode, "verl")["metrics"]["prefix_match_rate"])

    def speedup(
        self, scenario: str, mode: str, over: str, policy: str = "psrl", phase: str = "update"
    ) -> float:
        """Time of one policy over another's."""
        before = self.phase_s(scenario, mode, over, phase)
        return before / self.phase_s(scenario, mode, policy, phase)

    def factors(
        self, scenario: str, mode: str, over: str, policy: str = "psrl", phase: str = "update"
    ) -> dict[str, float]:
        """The speed-up as cuts x placement x sharing; both sides were split against the baseline.

        The factors of a ratio are the ratios of the factors.
        """
        mine = self._against_baseline(scenario, mode, policy, phase)
        other = self._against_baseline(scenario, mode, over, phase)
        return {name: mine[name] / other[name] for name in FACTORS}

    def _against_baseline(
        self, scenario: str, mode: str, policy: str, phase: str
    ) -> dict[str, float]:
        found = self.run(scenario, mode, policy).get("factors")
        if found is None:
            return dict.fromkeys(FACTORS, 1.0)
        return {name: float(found[phase][name]) for name in FACTORS}

    def bounds(self, scenario: str, mode: str, policy: str, phase: str) -> tuple[float, float]:
        """FLOPs of veRL over the policy's least, and the largest speed-up that those allow."""
        base, mine = (
            self.run(scenario, mode, p)["metrics"]["arithmetic"][phase] for p in (DENSE, policy)
        )
        dense_s = self.phase_s(scenario, mode, DENSE, phase)
        return base["flops"] / mine["flops"], dense_s / mine["least_s"]

    def over_merged(self, scenario: str, mode: str, policy: str, phase: str) -> float:
        """Time of dense training of the merged steps over the policy's; NaN if none merges."""
        merged = self._runs.get((scenario, mode, MERGED_DENSE), {})
        if phase not in merged.get("metrics", {}).get("phases", {}):
            return math.nan
        return self.speedup(scenario, mode, MERGED_DENSE, policy, phase)

    def peak_bytes(self, scenario: str, mode: str, policy: str) -> float:
        """With the logits of all positions of a micro-batch."""
        return float(self.run(scenario, mode, policy)["memory"]["whole_logits_peak_bytes"])

    def pool_peak_bytes(self, scenario: str, mode: str, policy: str) -> float:
        """Of a system that fills the device with a cache pool, or needs more anyway."""
        measured = self.run(scenario, mode, policy)
        pool = self.assumptions.pool_fraction * float(measured["device_bytes"])
        return max(pool, self.peak_bytes(scenario, mode, policy))

    def iteration(self, scenario: str, mode: str, policy: str) -> dict[str, float]:
        """Rollout and training.

        Raises:
            NotRunError: if the run had no forward-only phases.
        """
        found: dict[str, float] | None = self.run(scenario, mode, policy).get("iteration")
        if found is None:
            raise NotRunError(f"{scenario} {mode} {policy} ran the update only")
        return found
