import re
from html import unescape
from pathlib import Path

import pytest

from psrl.analysis.report import report
from psrl.analysis.report.comparison import load_comparison
from psrl.analysis.report.report import write_report
from psrl.analysis.report.sentences import (
    balance_sentence,
    gain_sentence,
    recommended_policy,
    run_sentence,
)
from psrl.core.errors import PsrlError
from tests.analysis.conftest import GIB, edit_json, write_json

QUESTIONS = (
    "1. What do I gain?",
    "2. Against what?",
    "3. Why?",
    "4. Will it fit?",
    "5. Who waits?",
    "6. How sure are you?",
    "7. How do I run it?",
)


def read(run: Path, **options: Path) -> str:
    """Visible text of the report without its pictures, white space made single."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_figures", lambda comparison: {})
        html = report.write_report(run, **options).read_text(encoding="utf-8")
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html.partition("<body>")[2])).split())


def test_report_answers_seven_questions_in_order(comparison_run: Path) -> None:
    text = read(comparison_run)
    places = [text.index(question) for question in QUESTIONS]
    assert places == sorted(places)
    for sentence in (
        "8 samples of hand <made> (sampling mode step, licence CC0): 1,000,000 logical tokens, "
        "250,000 of them unique (75.0 % prefix match rate). qwen2.5-7b on 8 x a100-80 (1 host): "
        "tensor 2 x pipeline 2 x data 2, full recompute.",
        "psrl is 2.22x as fast as verl end to end (9.00 s against 20.0 s), 2.40x in the update and "
        "2.00x in the forward phases; it needs 4.00x fewer FLOPs, and no plan of that work gains "
        "more than 4.00x.",
        "From dense, as recorded to psrl: 2.17x shared, then 1.02x placed and cut; together 2.22x.",
        "The 2.40x of psrl in the update phase is 1.20x cuts x 1.00x placement x 2.00x sharing; "
        "most of it comes from sharing.",
        "psrl fits: it peaks at 54.0 GiB, 67.5 % of the 80.0 GiB of one a100-80 (in update), and "
        "1.08x the peak of verl (50.0 GiB).",
        "In the update phase of psrl the slowest rank works 1.00x as long as the fastest, and 8.0 "
        "% of the device time is bubbles; with verl the slowest rank works 1.22x as long as the "
        "fastest, and 20.0 % of the device time is bubbles.",
        "no measurement stands behind them",
        "The plan of psrl is ready to run on 8 devices, one process each, 2.22x as fast as verl by "
        "prediction",
    ):
        assert sentence in text


def test_report_is_self_contained(executed_run: Path) -> None:
    html = write_report(executed_run).read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|@import|url\(", html)
    sources = re.findall(r'src="([^"]{0,30})', html)
    assert len(sources) == 10
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "hand &lt;made&gt;" in html


@pytest.mark.slow
def test_report_is_deterministic_and_leaves_the_pictures(comparison_run: Path) -> None:
    first = write_report(comparison_run).read_bytes()
    write_json(
        comparison_run / "manifest.json", {"schema_version": 1, "plan_time_s": {"psrl": 3.0}}
    )
    assert write_report(comparison_run).read_bytes() == first
    names = {path.name for path in (comparison_run / "plots").iterdir()}
    stems = ["gain", "factors", "memory_over_time", "worker_times", "timeline", "tokens"]
    stems += ["iteration_stack", "throughput", "micro_batch_times", "ladder"]
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg", "csv")}
    assert not list(comparison_run.glob("*.partial"))


def test_commands_name_the_final_directory_and_quote_paths(comparison_run: Path) -> None:
    text = read(comparison_run, final_path=Path("runs/my demo"))
    execute = (
        "psrl execute 'runs/my demo/policies/psrl/plan' --trace 'traces/two words' "
        "--run-dir 'runs/my demo-psrl'"
    )
    assert execute in text
    assert f"torchrun --nproc-per-node 8 --no-python {execute}" in text
    assert "psrl verify 'runs/my demo-psrl' 'runs/my demo-verl'" in text


def test_several_hosts_rendezvous(comparison_run: Path) -> None:
    path = comparison_run / "setup.json"
    edit_json(path, lambda setup: setup["cluster"].update(num_hosts=4))
    text = read(comparison_run)
    assert "torchrun --nproc-per-node 8 --nnodes 4 --rdzv-backend c10d --rdzv-endpoint" in text


def test_executed_runs_and_exactness_replace_the_warning(executed_run: Path) -> None:
    text = read(executed_run)
    assert "no measurement" not in text
    assert (
        "The simulated times differ from the executed ones by 4.5 % on average and by 9.1 % at most"
        in text
    )
    assert "all 2 quantities agree, the worst (gradients) to 1.0e-06 relative" in text


def test_a_changed_result_is_not_hidden(executed_run: Path) -> None:
    checks = [
        {"quantity": "loss", "largest_relative_difference": 0.01, "tolerance": 5e-6},
        {"quantity": "logprob", "largest_relative_difference": float("nan"), "tolerance": 5e-6},
    ]
    write_json(executed_run / "exactness.json", checks)
    text = read(executed_run)
    assert "Sharing changed the result: loss by 1.0e-02 (tolerance 5e-06), logprob by nan" in text


@pytest.mark.parametrize(
    ("makespan_s", "expected"),
    [
        (24.0, "psrl is slower than verl: 0.71x its speed end to end (28.0 s against 20.0 s)"),
        (16.0, "psrl takes as long as verl (20.0 s against 20.0 s)"),
    ],
)
def test_gain_is_worded_by_the_numbers(
    comparison_run: Path, makespan_s: float, expected: str
) -> None:
    path = comparison_run / "policies" / "psrl" / "metrics.json"
    edit_json(path, lambda m: m["phases"]["update"].update(makespan_s=makespan_s))
    sentence = gain_sentence(load_comparison(comparison_run))
    assert sentence.startswith(expected)
    assert ("The fastest policy is verl" in sentence) == (makespan_s > 20)


def test_the_fastest_policy_that_fits_is_recommended(comparison_run: Path) -> None:
    assert recommended_policy(load_comparison(comparison_run)) == "psrl"
    path = comparison_run / "policies" / "psrl" / "metrics.json"
    edit_json(path, lambda m: m.update(peak_memory_bytes=90 * GIB))
    assert recommended_policy(load_comparison(comparison_run)) == "verl"
    text = read(comparison_run)
    assert "psrl does not fit: it peaks at 90.0 GiB, 10.0 GiB above the 80.0 GiB" in text
    assert "The plan of verl is ready to run on 8 devices" in text


def test_where_nothing_fits_no_plan_is_ready(comparison_run: Path) -> None:
    for policy in ("psrl", "verl"):
        path = comparison_run / "policies" / policy / "metrics.json"
        edit_json(path, lambda m: m.update(peak_memory_bytes=90 * GIB))
    comparison = load_comparison(comparison_run)
    sentence = run_sentence(comparison, recommended_policy(comparison))
    assert sentence == (
        "No policy of this run fits its devices: the plan of psrl peaks at 90.0 GiB, 10.0 GiB "
        "above the device's 80.0 GiB."
    )
    assert "ready to run" not in read(comparison_run)


def test_an_idle_rank_is_told_in_words(comparison_run: Path) -> None:
    path = comparison_run / "policies" / "psrl" / "metrics.json"
    infinite = {"worker_time_max_over_min": float("inf")}
    edit_json(path, lambda m: m["phases"]["update"].update(infinite))
    sentence = balance_sentence(load_comparison(comparison_run))
    assert sentence.startswith("In the update phase of psrl a rank has nothing to do")


@pytest.mark.slow
def test_a_lone_baseline_has_a_report(comparison_run: Path) -> None:
    for path in sorted((comparison_run / "policies" / "psrl").iterdir()):
        path.unlink()
    (comparison_run / "policies" / "psrl").rmdir()
    html = write_report(comparison_run).read_text(encoding="utf-8")
    assert html.count("data:image/png") == 7  # no speed-up to explain
    text = read(comparison_run)
    assert "there is no gain to report" in text
    assert "no other policy is faster and fits" in text


def test_missing_events_are_named_and_nothing_is_left(comparison_run: Path) -> None:
    (comparison_run / "policies" / "psrl" / "events.parquet").unlink()
    with pytest.raises(PsrlError, match=r"psrl/events\.parquet is missing"):
        write_report(comparison_run)
    assert not (comparison_run / "report.html").exists()
