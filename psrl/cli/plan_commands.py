"""`psrl plan`."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psrl.core.cost.calibrated_cost_model import prediction_warnings
from psrl.core.errors import ExitCode, InfeasibleError
from psrl.core.files import IfExists, check_new_directory
from psrl.core.plan.plan import Plan
from psrl.core.run.config import load_setup
from psrl.core.samples.trace import open_trace

from .output import OutputOptions, format_warnings

if TYPE_CHECKING:
    from psrl.planner import PlanningProblem
    from psrl.planner.explanation.explain import ProgramReport


@dataclass(frozen=True)
class PlanCommand:
    """Choose placement, micro-batches, order and caching for one iteration of a trace."""

    trace: Path
    """trace directory"""
    cluster: Path
    """cluster file (TOML): model, cluster, parallel layout, planning budgets"""
    out: Path
    """plan directory to write"""
    output: OutputOptions
    policy: str = "psrl"
    """scheduling policy of docs/policies.md, or your own: module:function or file.py:function"""
    iteration: int = 0
    explain: bool = False
    """say why: balance, duplicated tokens, idle pipeline, memory, bound, for every program; and
    what each term of the cost model contributes, and decides of the micro-batches"""
    search: bool = False
    """first choose tensor, pipeline and data parallel sizes, recompute and micro-batch budget for
    the cluster's devices; the table shows time against memory"""
    plots: Path | None = None
    """directory for figures (PNG, SVG, CSV): worker times, duplicated tokens, the tree with its
    cut, the gap over search steps (takes the search's time again) and, with --search, time against
    memory"""
    set: tuple[str, ...] = ()
    """change a value of the cluster file, e.g. planning.max_tokens_per_micro_batch=8192"""
    if_exists: IfExists = "error"
    """or overwrite: replace an older directory of psRL"""

    def run(self) -> ExitCode:
        from psrl.api.plans import planning_problem
        from psrl.planner import (
            cost_terms,
            explain,
            format_cost_terms,
            format_explanation,
            make_plan,
        )

        inputs = [self.trace, self.cluster]
        check_new_directory(self.out, self.if_exists, inputs)
        setup = load_setup(self.cluster, self.set)
        problem = planning_problem(open_trace(self.trace), setup, self.iteration)
        result: dict[str, Any] = {"plan": str(self.out)}
        texts: list[str] = []
        if self.search:
            problem = self._search(problem, result, texts)
        started_s = time.perf_counter()
        with self.output.step(f"planning with {self.policy}"):
            plan = make_plan(problem, self.policy)
        plan_time_s = time.perf_counter() - started_s
        plan.save(self.out, self.if_exists, inputs)
        texts.append(describe_plan(plan, self.out))
        reports = explain(plan, problem.batch) if self.explain or self.plots else []
        if self.explain:
            result["explanation"] = [report.as_json() for report in reports]
            texts.append(format_explanation(plan, reports))
            terms = cost_terms(plan, problem.batch)
            result["cost_terms"] = [program.as_json() for program in terms]
            texts.append(format_cost_terms(terms))
        if self.plots:
            with self.output.step("drawing"):
                paths = self._draw(self.plots, problem, plan, reports, result.get("layouts", []))
            result["plots"] = [str(path) for path in paths]
            texts.append("plots: " + ", ".join(result["plots"]))
        warnings = prediction_warnings(plan)
        texts += format_warnings(warnings)
        result |= {"policy": plan.policy, **plan.predicted, "plan_time_s": plan_time_s}
        result["warnings"] = list(warnings)
        self.output.emit(result, "\n\n".join(texts))
        return ExitCode.OK

    def _draw(
        self,
        directory: Path,
        problem: "PlanningProblem",
        plan: Plan,
        reports: list["ProgramReport"],
        layouts: list[dict[str, Any]],
    ) -> list[Path]:
        from psrl.analysis.figures.plan_plots import save_plan_plots
        from psrl.planner import search_progress

        # Other policies do not search for a placement.
        searched = search_progress(problem) if self.policy in ("psrl", "optimal") else []
        progress = [point._asdict() for point in searched]
        explanation = [report.as_json() for report in reports]
        return save_plan_plots(plan, problem.batch, explanation, layouts, progress, directory)

    def _search(
        self, problem: "PlanningProblem", result: dict[str, Any], texts: list[str]
    ) -> "PlanningProblem":
        """The problem with the fastest layout and budget.

        Raises:
            InfeasibleError: if none fits.
        """
        from psrl.planner import format_choices, search_layouts

        with self.output.step("searching layouts"):
            choices = search_layouts(problem, self.policy)
        table = format_choices(choices)
        if choices[0].reason:
            devices = problem.setup.cluster.num_devices
            raise InfeasibleError(
                f"no layout of {devices} devices fits the memory\n{table}",
                "use more or larger devices, or a smaller model",
            )
        texts.append(table)
        result["layouts"] = [
            {
                **choice.setup.parallel.model_dump(),
                "max_tokens_per_micro_batch": choice.setup.planning.max_tokens_per_micro_batch,
                "makespan_s": choice.time_s,
                "peak_memory_bytes": choice.peak_bytes,
                "reason": choice.reason,
                "on_front": choice.on_front,
            }
            for choice in choices
        ]
        best = choices[0].setup
        planning = best.planning.model_copy(
            update={"search_iterations": problem.setup.planning.search_iterations}
        )
        return replace(problem, setup=best.model_copy(update={"planning": planning}))


def describe_plan(plan: Plan, path: Path) -> str:
    """A few lines about a plan."""
    predicted = plan.predicted
    lines = [f"{path}: policy {plan.policy} on {plan.num_ranks} data-parallel rank(s)"]
    for program in plan.programs:
        what = f"mini-batch {program.mini_batch}" if program.is_update else "whole batch"
        lines.append(
            f"  {' + '.join(program.phases)} ({what}): {len(program.assignments):,} samples, "
            f"{program.unique_tokens:,} tokens to compute, {len(program.micro_batches):,} "
            f"micro-batches, {len(program.blocks):,} cached blocks"
        )
    lines.append(
        f"  predicted {predicted['makespan_s']:.3f} s, proven lower bound "
        f"{predicted['lower_bound_s']:.3f} s, gap {predicted['gap']:.2%}"
    )
    return "\n".join(lines)
