"""Figures of a plan show every rank and every leaf; the numbers behind them add up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl.analysis.figures.plan_plots import save_plan_plots
from psrl.analysis.figures.plan_series import MAX_LEAVES, layout_table, rank_table, tree_table
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import SampleBatch
from psrl.planner import explain, make_plan
from tests.planner.cases import make_setup, problem_of, tree_batch, workloads


def planned(batch: SampleBatch, num_ranks: int = 3) -> tuple[Plan, list[dict[str, Any]]]:
    plan = make_plan(problem_of(batch, make_setup(num_ranks, max_tokens=512)), "dfs_cut")
    return plan, [report.as_json() for report in explain(plan, batch)]


LAYOUT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 4,
    "expert_model_parallel_size": 1,
    "recompute": "full",
    "max_tokens_per_micro_batch": 8192,
    "makespan_s": 1.5,
    "peak_memory_bytes": 2.0**34,
    "reason": "",
    "on_front": True,
}


PROGRESS = [
    {"program": program, "steps": steps, "gap": gap}
    for program, steps, gap in ((0, 0, 0.02), (0, 10, 0.001), (1, 0, 0.05), (1, 100, 0.01))
]


@pytest.mark.slow
def test_every_figure_has_png_svg_and_csv_and_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    batch = workloads()["chains"]
    plan, explanation = planned(batch)
    beaten = LAYOUT | {"makespan_s": 2.0, "on_front": False}
    layouts = [LAYOUT, beaten, LAYOUT | {"makespan_s": float("inf"), "reason": "too large"}]
    for name in ("a", "b"):
        paths = save_plan_plots(plan, batch, explanation, layouts, PROGRESS, tmp_path / name)
    names = ["worker_times", "duplicated_tokens", "tree_cut", "gap_over_steps", "layouts"]
    assert [p.stem for p in paths] == names
    for path in paths:
        for suffix in (".png", ".svg", ".csv"):
            written = path.with_suffix(suffix)
            assert written.read_bytes() == (tmp_path / "a" / written.name).read_bytes()


def test_ranks_add_up_to_the_plan() -> None:
    plan, explanation = planned(workloads()["one_group"])
    table = rank_table(explanation)
    assert len(table) == 2 * plan.num_ranks
    assert table["num_tokens"].sum() == plan.predicted["executed_tokens"]
    assert table["duplicated_tokens"].sum() == pytest.approx(plan.predicted["duplicated_tokens"])
    assert set(table["program"]) == {"log old prob", "update, mini-batch 0"}


def test_the_tree_shows_each_node_with_its_copies() -> None:
    batch = workloads()["one_group"]
    plan, _ = planned(batch)
    table = tree_table(plan, batch, 1)
    nodes = table.drop_duplicates("node")
    assert (nodes["copies"] * nodes["num_tokens"]).sum() == plan.programs[1].unique_tokens
    assert table["leaf"].nunique() == 32
    # The prompt is on all ranks, each answer on one.
    assert sorted(nodes["copies"])[-1] == 3
    assert (nodes["copies"] == 1).sum() == 32


def test_a_large_tree_shows_evenly_spread_leaves() -> None:
    batch = tree_batch([(50, [(5, [])] * 10)] * 200)
    plan, _ = planned(batch)
    table = tree_table(plan, batch, 0)
    assert table["leaf"].nunique() == MAX_LEAVES
    assert table["node"].nunique() > MAX_LEAVES
    assert np.array_equal(np.unique(table["start_depth"]), [0, 50])


def test_only_planned_layouts_are_in_the_table() -> None:
    table = layout_table([LAYOUT, LAYOUT | {"reason": "weights exceed the memory"}])
    assert len(table) == 1
    assert table[["TP", "PP", "DP", "EP"]].iloc[0].tolist() == [2, 1, 4, 1]


@pytest.mark.slow
def test_one_sample_of_one_token_can_be_drawn(tmp_path: Path) -> None:
    batch = tree_batch([(1, [])])
    plan, explanation = planned(batch, 2)
    assert len(save_plan_plots(plan, batch, explanation, [], [], tmp_path)) == 3
