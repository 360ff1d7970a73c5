"""Reasons that speak of our runs say what the runs show, whatever that is."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl.paper.computed_notes import (
    our_cuts,
    prefix_first,
    short_rollout,
    short_search,
    small_ps,
    step_tokens,
)
from psrl.paper.measure import tasks_on_ranks
from psrl.paper.notes import NOTES, RATIO_NOTES, note_text
from psrl.paper.results import NotRunError, Results
from psrl.paper.scenarios import load_assumptions
from psrl.paper.table import read_published
from psrl.planner import make_plan
from tests.planner.cases import make_setup, nasty_batch, problem_of

PAPER = Path(__file__).parents[2] / "examples" / "paper"


def results(*runs: dict[str, Any]) -> Results:
    return Results(list(runs), load_assumptions(PAPER))


def run_of(name: str, policy: str, update_s: float = 1.0, **more: Any) -> dict[str, Any]:
    scenario, mode = name.split()
    metrics = {"phases": {"update": {"makespan_s": update_s}}, "logical_tokens": 100}
    metrics |= more.pop("metrics", {})
    return {"scenario": scenario, "mode": mode, "policy": policy, "metrics": metrics, **more}


def factors(cuts: float) -> dict[str, Any]:
    return {"update": {"cuts": cuts, "placement": 1.0, "sharing": 1.0}}


def step(tasks: int, whole: int, empty: int) -> dict[str, int]:
    return {"tasks": tasks, "whole_tasks": whole, "ranks": 32, "empty_ranks": empty}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([step(16, 16, 16)], "16 of 16 tasks stay whole on one of 32 ranks, which leaves 16 ranks"),
        ([step(16, 16, 16), step(15, 15, 17)], "31 of 31 tasks .* leaves 16 to 17 ranks of a step"),
        ([step(64, 40, 0)], "40 of 64 tasks stay whole .* and no rank stays empty"),
    ],
)
def test_whole_tasks_leave_ranks_empty_or_not(steps: list[dict[str, int]], said: str) -> None:
    name = "dtn_1536_schedulers tree_step"
    found = results(run_of(name, "prefix_match_first", tasks_on_ranks=steps))
    text = prefix_first(found)
    assert re.search(said, text)
    assert ("must have spread" in text) == any(s["empty_ranks"] for s in steps)


def test_the_published_fastest_worker_has_work() -> None:
    values = {p.id: p.value for p in read_published(PAPER / "published.csv")}
    assert values["sched-pmf-min"] > 0.0


def test_tasks_and_ranks_are_counted_in_the_plan() -> None:
    batch = nasty_batch(3, 12, num_mini_batches=2)
    for policy in ("prefix_match_first", "balance_first"):
        plan = make_plan(problem_of(batch, make_setup(5, max_tokens=40)), policy)
        found = tasks_on_ranks(plan, batch)
        assert len(found) == 2
        for program, counts in zip(plan.phase_programs("update"), found, strict=True):
            of_task: dict[str, set[int]] = {}
            for sample, rank in zip(*map(np.ndarray.tolist, _columns(program)), strict=True):
                of_task.setdefault(str(batch.group_id[sample]), set()).add(rank)
            used = set().union(*of_task.values())
            assert counts == {
                "tasks": len(of_task),
                "whole_tasks": sum(len(ranks) == 1 for ranks in of_task.values()),
                "ranks": 5,
                "empty_ranks": 5 - len(used),
            }
            if policy == "prefix_match_first":
                assert counts["whole_tasks"] == counts["tasks"]


def _columns(program: Any) -> tuple[np.ndarray, np.ndarray]:
    return program.assignments.sample, program.assignments.rank


@pytest.mark.parametrize(("cuts", "said"), [(1.8, "gains 1.80x (cuts)"), (0.9, "gains nothing")])
def test_what_cuts_alone_gain(cuts: float, said: str) -> None:
    sizes = {"per_rank": 48.0, "mean_tokens": 1300.0}
    mine = run_of("dtn_1536 step", "psrl", micro_batches=sizes, factors=factors(cuts))
    text = our_cuts(results(run_of("dtn_1536 step", "verl"), mine))
    assert "into 48 micro-batches per rank of 1,300 tokens" in text
    assert said in text


@pytest.mark.parametrize(("ps_s", "said"), [(1.0, "cannot be so strong"), (2.0, "allow that")])
def test_how_strong_prefix_sharing_is(ps_s: float, said: str) -> None:
    times_s = {"verl": 3.0, "sglang_ps": ps_s, "psrl": 0.5}
    text = small_ps(results(*(run_of("webshop_8 step", p, t) for p, t in times_s.items())))
    assert f"SGLang-PS is {3.0 / ps_s:.2f} times as fast" in text
    assert said in text


@pytest.mark.parametrize(
    ("cuts", "long_s", "said"),
    [
        (0.8, 1.0, "must be longer"),
        (1.2, 1.0, "does not explain"),
        (0.8, 9.0, "does not explain"),
    ],
)
def test_whether_short_samples_explain_search(cuts: float, long_s: float, said: str) -> None:
    found = results(
        run_of("search_64 step", "verl", 2.0),
        run_of("search_64 step", "psrl", 1.5, factors=factors(cuts)),
        run_of("search_8_long step", "verl", 3.0),
        run_of("search_8_long step", "psrl", long_s),
    )
    assert said in short_search(found)
    assert f"cuts are worth {cuts:.2f}x" in short_search(found)


@pytest.mark.parametrize(("step_s", "said"), [(5.0, "costs less"), (6.0, "costs no less")])
def test_tokens_and_time_of_step_samples(step_s: float, said: str) -> None:
    found = results(
        run_of("webshop_8 step", "verl", step_s, metrics={"logical_tokens": 540}),
        run_of("webshop_8 traj", "verl", 1.0),
    )
    assert "5.40 times the tokens" in step_tokens(found)
    assert step_tokens(found).endswith(f"{said}.")


def test_how_much_of_an_iteration_is_training() -> None:
    iteration = {"training_s": 30.0, "synchronous_s": 40.0}
    found = results(run_of("webshop_8 step", "verl", iteration=iteration))
    assert "training is 75 % of veRL's WebShop step iteration" in short_rollout(found)


def test_notes_of_runs_that_were_not_chosen_say_nothing() -> None:
    asked = [note for note in (*NOTES.values(), *RATIO_NOTES.values()) if not isinstance(note, str)]
    assert len(asked) > 8
    for note in asked:
        with pytest.raises(NotRunError):
            note_text(note, results())
