"""Policies on one trace and set-up, dense training of the merged steps among them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.analysis.report.comparison import Comparison, comparison_of
from psrl.analysis.report.ladder import ladder
from psrl.analysis.report.merge_warnings import merge_warnings
from psrl.analysis.report.report import write_report
from psrl.analysis.tables import policy_table, write_comparison
from psrl.core.errors import ConfigError, InfeasibleError
from psrl.core.files import IfExists
from psrl.core.plan.policy_names import DEFAULT_POLICIES, MERGED_DENSE
from psrl.core.run.config import Setup
from psrl.core.run.run_directory import RunDir
from psrl.core.samples.trace import Trace, write_trace
from psrl.planner import PlanningProblem
from psrl.sim import OnProgress
from psrl.traces.stats import mode_stats
from psrl.traces.step_merging import MergedSteps

from .plans import planning_problem
from .policy_runs import DENSE, merged_steps, run_factors, run_merged, run_policy
from .runs import Run

Steps = Callable[[str], AbstractContextManager[None]]
"""Called with what is about to be done; left when it is done."""


@dataclass(frozen=True, eq=False)
class PolicyComparison:
    """Simulated runs of several policies.

    Attributes:
        baseline: what speed-ups refer to.
        names: everything compared, the baseline first.
        runs: by name, `merged_dense` among them where steps can be merged.
        infeasible: policies whose plan does not fit the memory, and why.
        merging: how steps merge; None for samples that are whole episodes already.
    """

    trace: Trace
    problem: PlanningProblem
    baseline: str
    names: tuple[str, ...]
    runs: dict[str, Run]
    infeasible: dict[str, str]
    merging: MergedSteps | None

    @cached_property
    def sharing(self) -> dict[str, dict[str, Any]]:
        """Token counts and match rates of every sampling mode that the samples allow."""
        return mode_stats(self.problem.batch, self.trace.header.sampling_mode)

    def factors(self, name: str) -> dict[str, dict[str, float]]:
        """Speed-up of each phase over the baseline as cuts x placement x sharing.

        Raises:
            PlanError: if the two ran no phase in common.
        """
        return run_factors(self.runs[self.baseline], self.runs[name])

    @property
    def warnings(self) -> list[str]:
        """How predictions leave the domain of their calibration."""
        return merge_warnings({name: run.metrics["warnings"] for name, run in self.runs.items()})

    @property
    def plan_time_s(self) -> dict[str, float]:
        """Wall time that each policy took to plan."""
        return {name: run.plan_time_s for name, run in self.runs.items()}

    def summary(self) -> Comparison:
        """What tables, ladder and sentences are made of; without events."""
        return comparison_of(
            baseline=self.baseline,
            setup=self.problem.setup,
            metrics={name: run.metrics for name, run in self.runs.items()},
            factors={name: self.factors(name) for name in self.runs if name != self.baseline},
            plan_time_s=self.plan_time_s,
            merging=None if self.merging is None else self.merging.counts(),
        )

    def table(self) -> pd.DataFrame:
        """A row per policy, the baseline first; docs/metrics.md has the columns."""
        return policy_table(self.summary())

    def ladder(self) -> pd.DataFrame:
        """From dense steps to psRL, a row per rung; docs/metrics.md has the columns."""
        return ladder(self.summary())

    def write(self, run: RunDir, config: Mapping[str, Any] | None = None) -> None:
        """Write everything but tables, plots and report.

        Args:
            config: further entries of config.json, such as the paths of the inputs.
        """
        problem, header = self.problem, self.trace.header
        named = {"trace": str(self.trace.path), "iteration": problem.iteration}
        run.write_json("setup.json", problem.setup.model_dump())
        run.write_json(
            "config.json",
            {**named, "policies": list(self.runs), "baseline": self.baseline, **(config or {})},
        )
        identity = {"path": str(self.trace.path), "content_hash": self.trace.content_hash}
        for name in ("source", "licence", "sampling_mode"):
            identity[name] = getattr(header, name)
        run.write_json("sharing.json", {**self.sharing, "trace": identity})
        if self.merging is not None:
            run.write_json("merging.json", self.merging.counts())
        for name, one in self.runs.items():
            folder = run.path / "policies" / name
            one.plan.save(folder / "plan")
            one.events.save(folder / "events.parquet")
            run.write_json(f"policies/{name}/metrics.json", one.metrics)
            if name != self.baseline:
                run.write_json(f"policies/{name}/factors.json", self.factors(name))
        if MERGED_DENSE in self.runs:
            self._write_merged(run.path / "policies" / MERGED_DENSE)
        run.note(plan_time_s=self.plan_time_s)

    def _write_merged(self, folder: Path) -> None:
        """The merged samples as a trace, which the plan of `merged_dense` belongs to."""
        assert self.merging is not None
        header, batch = self.trace.header, self.merging.batch
        write_trace(
            folder / "trace",
            [batch],
            source=header.source,
            licence=header.licence,
            sampling_mode="tree" if header.sampling_mode.startswith("tree") else "traj",
            notes=f"steps of {self.trace.content_hash} merged; {header.notes}",
        )
        num_spans = np.diff(batch.loss_span_offsets)
        if (np.repeat(batch.advantage, num_spans) != self.merging.span_advantage).any():
            columns = ("sample", "token", "advantage")
            values = dict(zip(columns, self.merging.token_advantages(), strict=True))
            pq.write_table(pa.table(values), folder / "token_advantages.parquet")

    def save(self, run_dir: str | Path, if_exists: IfExists = "error") -> Path:
        """Write a run directory with tables, plots and report; returns the report's path.

        Raises:
            ConfigError: if it exists already.
        """
        path = Path(run_dir)
        with RunDir(path, "compare", if_exists, comparison_details(self.trace)) as run:
            self.write(run)
            write_comparison(run.path, self.baseline)
            write_report(run.path, self.baseline, path)
        return path / "report.html"


def comparison_details(trace: Trace) -> dict[str, Any]:
    """Entries of the manifest of a comparison."""
    return {"trace_hash": trace.content_hash, "kind": "comparison"}


def compare(
    trace: Trace,
    setup: Setup,
    policies: Sequence[str] = DEFAULT_POLICIES,
    *,
    baseline: str = DENSE,
    iteration: int = 0,
    keep_infeasible: bool = False,
    step: Steps | None = None,
    progress: Callable[[], OnProgress | None] = lambda: None,
) -> PolicyComparison:
    """Plan and simulate one iteration of a trace under several policies.

    Step samples that continue each other are also merged and trained dense: row `merged_dense`.

    Args:
        baseline: what speed-ups refer to: one of the policies, or merged_dense.
        keep_infeasible: list policies that do not fit the memory instead of raising.
        step: told what is being done, e.g. to print it.
        progress: makes a listener for each simulation.

    Raises:
        ConfigError: if the baseline is not compared, or a policy is unknown.
        InfeasibleError: if a plan does not fit, unless those are kept.
    """
    problem = planning_problem(trace, setup, iteration)
    merging = merged_steps(problem, trace.header.sampling_mode)
    names = sorted(dict.fromkeys(policies), key=lambda name: name != baseline)
    if MERGED_DENSE not in names and merging is not None and merging.merges:
        names.insert(names.index(DENSE) + 1 if DENSE in names else 0, MERGED_DENSE)
    check_compared(names, baseline, merging)
    runs: dict[str, Run] = {}
    infeasible: dict[str, str] = {}
    for name in names:
        with (step or (lambda _: nullcontext()))(f"planning and simulating {name}"):
            try:
                if name == MERGED_DENSE and merging is not None:
                    runs[name] = run_merged(problem, merging, progress=progress())
                else:
                    runs[name] = run_policy(problem, name, progress=progress())
            except InfeasibleError as error:
                if not keep_infeasible:
                    raise
                infeasible[name] = error.message
    return PolicyComparison(trace, problem, baseline, tuple(names), runs, infeasible, merging)


def check_compared(names: Sequence[str], baseline: str, merging: MergedSteps | None) -> None:
    """Refuse a comparison without its baseline, or with merged steps that do not merge."""
    if MERGED_DENSE in (*names, baseline) and (merging is None or not merging.merges):
        raise ConfigError(
            f"{MERGED_DENSE}: no step of this trace continues the one before exactly",
            "leave it out",
        )
    if baseline not in names:
        raise ConfigError(
            f"the baseline {baseline!r} is not among the compared policies {', '.join(names)}",
            f"add it: --policies {' '.join((*names, baseline))}",
        )
