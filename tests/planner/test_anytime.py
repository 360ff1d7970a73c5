"""Limits count work: none gives the heuristic, more is never worse, an interrupt leaves nothing."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from ortools.sat.python import cp_model

from psrl.core.run.config import Setup
from psrl.planner import make_plan
from psrl.planner.placement.cost_tree import rank_costs
from psrl.planner.placement.cp_search import place_items
from psrl.planner.placement.local_search import LocalSearch
from psrl.planner.placement.subsets import SetCosts
from psrl.planner.placement.two_level import two_level_leaves
from tests.planner.cases import make_setup, problem_of, update_of, workloads


def limited(setup: Setup, search_iterations: int, solver_work_limit: float) -> Setup:
    limits = {"search_iterations": search_iterations, "solver_work_limit": solver_work_limit}
    return setup.model_copy(update={"planning": setup.planning.model_copy(update=limits)})


@pytest.mark.parametrize("shape", sorted(workloads()))
def test_a_longer_search_is_never_worse(shape: str) -> None:
    num_ranks = 6
    subproblem = update_of(workloads()[shape], make_setup(num_ranks))
    tree, bound_s = subproblem.cost_tree, subproblem.bound.limit_s
    worst_s = [
        rank_costs(tree, two_level_leaves(tree, num_ranks, bound_s, n, 0), num_ranks).max()
        for n in (0, 1, 20, 120)
    ]
    assert (np.diff(worst_s) <= 1e-12 * worst_s[0]).all()
    assert worst_s[-1] >= bound_s


@pytest.mark.parametrize("name", ["psrl", "optimal"])
def test_a_limit_of_zero_gives_the_heuristic(name: str) -> None:
    batch = workloads()["chains"]
    setup = make_setup(6, max_tokens=8192)
    none = make_plan(problem_of(batch, limited(setup, 0, 0.0), ("update",)), name)
    some = make_plan(problem_of(batch, limited(setup, 30, 0.1), ("update",)), name)
    assert some.predicted["placement_gap"] <= none.predicted["placement_gap"] + 1e-12
    assert none.predicted["placement_gap"] < 0.2


def test_an_interrupted_search_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalSearch, "_kick", interrupt)
    problem = problem_of(workloads()["chains"], limited(make_setup(8), 50, 0.0), ("update",))
    with pytest.raises(KeyboardInterrupt):
        make_plan(problem, "psrl")


def test_an_interrupted_solver_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()

    def solve(*_: object) -> None:
        # To the process, as from a terminal: the main thread hears it while it waits.
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(10.0)

    monkeypatch.setattr(cp_model.CpSolver, "solve", solve)
    monkeypatch.setattr(cp_model.CpSolver, "stop_search", lambda _: stopped.set())
    costs = SetCosts(3, (1, 2, 4), (1.0, 2.0, 3.0))
    # A shell may have started the tests with interrupts ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            place_items(costs, 2, np.zeros(3, np.int64), 0.0, 1e9, 0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert stopped.is_set()


def test_an_interrupted_save_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = make_plan(problem_of(workloads()["stars"], make_setup(2), ("update",)), "verl")
    written = []

    def write(table: object, path: Path, **_: object) -> None:
        written.append(path)
        path.write_bytes(b"half")
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", write)
    with pytest.raises(KeyboardInterrupt):
        plan.save(tmp_path / "plan")
    assert list(tmp_path.iterdir()) == []
