"""`psrl reproduce`: scenarios, rules of the rows, and the command on a small workload."""

import json
from pathlib import Path

import numpy as np
import pytest

from psrl.cli import main
from psrl.core.errors import ConfigError, ExitCode
from psrl.paper.results import NotRunError, Results
from psrl.paper.rows import QUOTIENTS, RULES, reproduced_rows, row_of
from psrl.paper.scenarios import Assumptions, load_assumptions, load_scenarios
from psrl.paper.table import Published, read_published

PAPER = Path(__file__).parents[2] / "examples" / "paper"
WORKLOAD = """
name = "small"
tasks = 4
rollouts = 3
instructions_tokens = 50
prompt = { quantiles = [10, 30] }
turns = { quantiles = [2, 4] }
think = { quantiles = [5, 20] }
action = { quantiles = [2, 9] }
observation = { quantiles = [5, 40] }
summary = { quantiles = [5] }
"""
SCENARIO = """
title = "Small"
workload = "{workload}"
cluster = "cluster.toml"
modes = ["step"]
policies = ["verl", "psrl"]
blocks = ["fixed:16 everything"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one small scenario under the name that rows of ALFWorld ask for."""
    (tmp_path / "workload.toml").write_text(WORKLOAD)
    scenarios = tmp_path / "scenarios"
    scenarios.mkdir()
    text = SCENARIO.format(workload=tmp_path / "workload.toml")
    (scenarios / "alfworld_8.toml").write_text(text)
    cluster = (PAPER / "clusters" / "qwen2.5-1.5b_8.toml").read_text()
    (scenarios / "cluster.toml").write_text(cluster)
    (scenarios / "assumptions.toml").write_text((PAPER / "assumptions.toml").read_text())
    (scenarios / "published.csv").write_text((PAPER / "published.csv").read_text())
    (scenarios / "cluster.toml").rename(tmp_path / "cluster.toml")
    (scenarios / "alfworld_8.toml").write_text(text.replace("cluster.toml", "../cluster.toml"))
    return scenarios


def assumptions(**changes: object) -> Assumptions:
    return load_assumptions(PAPER).model_copy(update=changes)


def test_every_published_number_has_a_rule_and_every_rule_a_number() -> None:
    published = {row.id for row in read_published(PAPER / "published.csv")}
    assert published == set(RULES)
    for _, _, above, below in QUOTIENTS:
        assert {above, below} <= published


def test_the_scenarios_cover_what_the_paper_ran() -> None:
    scenarios = {s.name: s.content for s in load_scenarios(PAPER)}
    workloads = {content.workload for content in scenarios.values()}
    assert workloads == {"alfworld", "webshop", "search", "dtn"}
    modes = {mode for content in scenarios.values() for mode in content.modes}
    assert modes == {"traj", "step", "step_s", "step_rt", "tree", "tree_step"}
    for scenario in load_scenarios(PAPER):
        devices = scenario.setup(1000, assumptions()).cluster.num_devices
        named = [part for part in scenario.name.split("_") if part.isdigit()]
        assert named in ([], [str(devices)])
        assert scenario.content.policies[0] == "verl"


def test_mini_batches_are_even_and_mix_tasks() -> None:
    (scenario,) = load_scenarios(PAPER, ("search_8",))
    batch = scenario.batch("step", assumptions(optimizer_steps=3))
    sizes = np.bincount(batch.mini_batch)
    assert len(sizes) == 3
    assert sizes.max() - sizes.min() <= 1
    for mini_batch in range(3):
        tasks = np.unique(batch.group_id[batch.mini_batch == mini_batch])
        assert len(tasks) > 25
    again = scenario.batch("step", assumptions(optimizer_steps=3))
    assert (again.mini_batch == batch.mini_batch).all()


def test_length_scales_every_length_and_batch_scales_the_tasks() -> None:
    (plain,), (long,), (wide,) = (
        load_scenarios(PAPER, (name,)) for name in ("search_8", "search_8_long", "search_64")
    )
    batch, longer, wider = (s.batch("step", assumptions()) for s in (plain, long, wide))
    assert longer.num_samples == batch.num_samples
    assert longer.logical_tokens == pytest.approx(8 * batch.logical_tokens, rel=0.02)
    assert len(np.unique(wider.group_id)) == 4 * len(np.unique(batch.group_id))


def test_the_budget_is_the_longest_sample_rounded_up() -> None:
    (scenario,) = load_scenarios(PAPER, ("search_8",))
    planning = scenario.setup(1025, assumptions()).planning
    assert planning.max_tokens_per_micro_batch == 2048


def run_of(policy: str, update_s: float, cuts: float, peak: int = 10) -> dict[str, object]:
    update = {"makespan_s": update_s}
    measured: dict[str, object] = {
        "scenario": "search_64",
        "mode": "step",
        "policy": policy,
        "device_bytes": 100,
        "metrics": {"phases": {"update": update}},
        "memory": {"whole_logits_peak_bytes": peak},
    }
    if policy != "verl":
        factors = {"cuts": cuts, "placement": 1.0, "sharing": 2.0}
        measured["factors"] = {"update": factors}
    return measured


def test_factors_over_another_policy_multiply_to_the_speedup() -> None:
    runs = [run_of("verl", 12.0, 1.0), run_of("sglang_ps", 6.0, 1.0), run_of("psrl", 2.0, 3.0)]
    results = Results(runs, assumptions())
    for over, expected in (("verl", 6.0), ("sglang_ps", 3.0)):
        assert results.speedup("search_64", "step", over) == expected
        factors = results.factors("search_64", "step", over)
        assert np.prod(list(factors.values())) == pytest.approx(expected)
    row = row_of(Published("scale-search-sg", "", 1.5, "x", "S"), results)
    assert row.ours == 3.0
    assert row.verdict == "off"


def test_a_pool_fills_the_device_unless_more_is_needed() -> None:
    results = Results([run_of("verl", 1.0, 1.0, 20)], assumptions(pool_fraction=0.9))
    assert results.pool_peak_bytes("search_64", "step", "verl") == 90
    results = Results([run_of("verl", 1.0, 1.0, 95)], assumptions(pool_fraction=0.9))
    assert results.pool_peak_bytes("search_64", "step", "verl") == 95


def test_what_was_not_run_says_so() -> None:
    results = Results([run_of("verl", 1.0, 1.0)], assumptions())
    with pytest.raises(NotRunError, match="dtn_1536 was not run"):
        results.phase_s("dtn_1536", "step", "verl")
    rows = reproduced_rows(read_published(PAPER / "published.csv"), results)
    by_id = {row.published.id: row for row in rows}
    assert by_id["dtn-upd"].missing == "scenario dtn_1536 was not run"
    assert by_id["x-upd"].verdict == "not simulated"
    assert len(rows) == len(RULES) + len(QUOTIENTS)


@pytest.mark.slow
def test_the_command_writes_tables_and_figure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reproduce", "--scenarios", str(folder), "--workers", "1"]
    run = tmp_path / "run"
    assert main([*arguments, "--run-dir", str(run)]) == ExitCode.OK
    captured = capsys.readouterr()
    assert "[3/3]" in captured.err
    assert "ratios (the target)" in captured.out
    measured = json.loads((run / "measurements.json").read_text())
    names = {"alfworld_8 step verl", "alfworld_8 step merged_dense", "alfworld_8 step psrl"}
    assert set(measured) == names
    psrl = measured["alfworld_8 step psrl"]
    factors = psrl["factors"]["update"]
    product = factors["cuts"] * factors["placement"] * factors["sharing"]
    assert product == pytest.approx(factors["speedup"])
    assert factors["speedup"] > 1
    assert "fixed:16 everything" in psrl["blocks"]
    text = (run / "table.md").read_text()
    assert "| `pm-alf` | alfworld step: prefix match rate |" in text
    assert (run / "images" / "paper_ratios.png").is_file()

    again = tmp_path / "again"
    from_run = ["--from-run", str(run), "--run-dir", str(again)]
    assert main([*arguments, *from_run]) == ExitCode.OK
    for name in ("table.md", "table.csv", "table.json", "images/paper_ratios.svg"):
        assert (again / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"psrl"]', '"psrll"]', "unknown policy 'psrll'. Did you mean 'psrl'?"),
        ('["step"]', '["stepp"]', "unknown mode 'stepp'. Did you mean 'step'?"),
        ("title", "titel", "unknown key 'titel'. Did you mean 'title'?"),
        ("title =", "title", "not valid TOML"),
    ],
)
def test_a_wrong_scenario_is_refused_before_anything_runs(
    folder: Path, old: str, new: str, message: str
) -> None:
    path = folder / "alfworld_8.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message.replace("?", "[?]")):
        load_scenarios(folder)


def test_unknown_scenarios_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown scenario 'search'"):
        load_scenarios(PAPER, ("search",))
    with pytest.raises(ConfigError, match="has no scenarios"):
        load_scenarios(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_assumptions(tmp_path)


def test_nothing_half_written_is_left(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["reproduce", "--scenarios", str(folder), "--run-dir", str(run)]
    assert main([*arguments, "--from-run", str(tmp_path)]) == ExitCode.BAD_INPUT
    assert not run.exists()
    assert not run.with_name("run.partial").exists()
    assert main([*arguments, "--workers", "0"]) == ExitCode.BAD_INPUT
