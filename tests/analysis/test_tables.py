import math
import shutil
from pathlib import Path

import pytest

from psrl.analysis.report.comparison import load_comparison
from psrl.analysis.tables import (
    comparison_table,
    executed_table,
    format_comparison,
    format_executed,
    write_comparison,
)
from psrl.core.errors import PsrlError
from tests.analysis.conftest import edit_json, write_json

GOLDEN = """\
policy,makespan_s,speedup,merged_speedup,update_makespan_s,update_speedup,forward_makespan_s,\
forward_speedup,flop_ratio,speedup_bound,\
worker_time_min_s,worker_time_max_s,worker_time_max_over_min,bubble_fraction,executed_tokens,\
logical_tokens,unique_tokens,prefix_match_rate,num_samples,logical_tokens_per_s,\
unique_tokens_per_s,peak_memory_bytes,peak_kv_bytes,lower_bound_s,gap,memory_ratio
verl,20,1,,12,1,8,1,1,1.33333,15,19,1.25,0.125,3000000,1000000,250000,0.75,8,150000,37500,\
53687091200,0,,,1
psrl,9,2.22222,,5,2.4,4,2,4,4,8.3,8.5,1.25,0.125,920000,1000000,250000,0.75,8,333333,83333.3,\
57982058496,4294967296,8.9,0.0112,1.08
"""

TERMINAL = """\
policy  time (s)  speed-up  update  forward  max/min  bubbles     tokens  memory (GiB)  ratio\
  K/V (GiB)     gap
------------------------------------------------------------------------------------------------\
----------------
verl       20.00     1.00x   1.00x    1.00x    1.25x   12.5 %  3,000,000          50.0  1.00x\
       0.00       -
psrl        9.00     2.22x   2.40x    2.00x    1.25x   12.5 %    920,000          54.0  1.08x\
       4.00  1.12 %"""

EXECUTED = """\
policy  phase            tokens  time (s)  speed-up  memory (GiB)  K/V (GiB)
----------------------------------------------------------------------------
verl    log_old_prob  1,000,000      4.40     1.00x          50.0       0.00
verl    reference     1,000,000      4.40     1.00x          50.0       0.00
verl    update        1,000,000     13.20     1.00x          50.0       0.00
verl    all           3,000,000     22.00     1.00x          50.0       0.00
psrl    log_old_prob    300,000      2.00     2.20x          52.0       2.00
psrl    reference       300,000      2.00     2.20x          52.0       2.00
psrl    update          320,000      5.00     2.64x          54.0       4.00
psrl    all             920,000      9.00     2.44x          54.0       4.00"""


def test_golden_csv(comparison_run: Path) -> None:
    table = write_comparison(comparison_run)
    assert (comparison_run / "comparison.csv").read_text() == GOLDEN
    assert table["policy"].tolist() == ["verl", "psrl"]


def test_golden_terminal_tables(executed_run: Path) -> None:
    assert format_comparison(comparison_table(executed_run)) == TERMINAL
    assert format_executed(executed_table(executed_run)) == EXECUTED


def test_another_baseline_comes_first_and_inverts_the_speedup(comparison_run: Path) -> None:
    psrl, verl = (comparison_run / "policies" / name / "factors.json" for name in ("psrl", "verl"))
    shutil.move(psrl, verl)
    table = comparison_table(comparison_run, baseline="psrl")
    assert table["policy"].tolist() == ["psrl", "verl"]
    assert table["speedup"].tolist() == [1.0, 9 / 20]
    assert table["memory_ratio"].tolist() == [1.0, 50 / 54]


def test_planning_time_comes_from_the_manifest_and_stays_out_of_the_csv(
    comparison_run: Path,
) -> None:
    assert comparison_table(comparison_run)["plan_time_s"].isna().all()
    write_json(
        comparison_run / "manifest.json", {"schema_version": 1, "plan_time_s": {"psrl": 1.5}}
    )
    table = write_comparison(comparison_run)
    assert math.isnan(table["plan_time_s"][0])
    assert table["plan_time_s"][1] == 1.5
    assert (comparison_run / "comparison.csv").read_text() == GOLDEN
    assert "planning (s)" in format_comparison(table)


def test_policies_are_ordered_as_documented_then_by_name(comparison_run: Path) -> None:
    policies = comparison_run / "policies"
    for name in ("zeta", "alpha", "dfs_cut"):
        shutil.copytree(policies / "psrl", policies / name)
    assert load_comparison(comparison_run).policies == ("verl", "dfs_cut", "psrl", "alpha", "zeta")


def test_only_phases_that_all_policies_ran_are_compared(comparison_run: Path) -> None:
    path = comparison_run / "policies" / "verl" / "metrics.json"
    edit_json(path, lambda metrics: metrics["phases"].pop("reference"))
    table = comparison_table(comparison_run)
    assert table["makespan_s"].tolist() == [16.0, 7.0]
    assert load_comparison(comparison_run).phases == ("log_old_prob", "update")


def test_work_of_phases_adds_up(comparison_run: Path) -> None:
    path = comparison_run / "policies" / "psrl" / "metrics.json"
    work = {
        "log_old_prob": {"flops": 1e15, "least_s": 0.5},
        "reference": {"flops": 1e15, "least_s": 0.5},
        "update": {"flops": 2e15, "least_s": 4.0},
    }
    edit_json(path, lambda metrics: metrics.update(arithmetic=work))
    comparison = load_comparison(comparison_run)
    assert comparison.flop_ratio("psrl") == 20e15 / 4e15
    assert comparison.flop_ratio("psrl", ("update",)) == 12e15 / 2e15
    assert comparison.bound("psrl") == 20 / (0.5 + 0.5 + 4.0)
    assert comparison.bound("psrl", ("update",)) == 12 / 4


@pytest.mark.parametrize(
    "name",
    ["setup.json", "sharing.json", "policies/verl/metrics.json", "policies/psrl/factors.json"],
)
def test_a_missing_file_is_named(comparison_run: Path, name: str) -> None:
    (comparison_run / name).unlink()
    with pytest.raises(PsrlError, match=f"{name} is missing"):
        comparison_table(comparison_run)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("policies/verl/metrics.json", "makespan_s"),
        ("policies/psrl/factors.json", "update"),
        ("policies/psrl/metrics.json", "arithmetic"),
        ("sharing.json", "trace"),
        ("setup.json", "model"),
    ],
)
def test_a_missing_key_is_named_with_its_file(comparison_run: Path, name: str, key: str) -> None:
    edit_json(comparison_run / name, lambda value: value.pop(key))
    with pytest.raises(PsrlError, match=rf"{name}: .*{key}"):
        comparison_table(comparison_run)


def test_other_directories_and_unknown_baselines_are_refused(
    comparison_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(PsrlError, match="holds no policy"):
        comparison_table(tmp_path / "nothing")
    with pytest.raises(PsrlError, match="Did you mean 'verl'"):
        comparison_table(comparison_run, baseline="veri")


def test_executed_table_without_executed_runs_says_how_to_get_one(comparison_run: Path) -> None:
    with pytest.raises(PsrlError, match="psrl execute"):
        executed_table(comparison_run)


def test_executed_speedup_needs_an_executed_baseline(executed_run: Path) -> None:
    shutil.rmtree(executed_run / "executed" / "verl")
    assert executed_table(executed_run)["speedup"].isna().all()
