"""`psrl trace synth | stats | slice | merge | validate`, from dials to figures."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from psrl.cli import main
from psrl.core.samples.trace import open_trace

DIALS = ("tasks=2", "rollouts=3", "iterations=2", "turns.quantiles=[2, 4]")


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    for mode in ("step", "tree_step"):
        arguments = ["--preset", "webshop", "--mode", mode, "--out", str(folder / mode), "--quiet"]
        assert main(["trace", "synth", *arguments, "--seed", "5", "--set", *DIALS]) == 0
    return folder


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["trace", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    value: dict[str, Any] = json.loads(captured.out)
    return value


def test_stats_of_all_iterations_add_up(
    synthetic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = result(capsys, "stats", str(synthetic / "step"), "--model", "qwen2.5-1.5b")
    assert set(stats["modes"]) == {"step", "traj"}
    assert [entry["iteration"] for entry in stats["iterations"]] == [0, 1]
    for mode, total in stats["modes"].items():
        parts = [entry["modes"][mode] for entry in stats["iterations"]]
        assert total["unique_tokens"] == sum(part["unique_tokens"] for part in parts)
        level = total["overall"]
        pairs, tokens = level["speedup_bound_pairs"], level["speedup_bound_tokens"]
        assert pairs < level["speedup_bound_flops"] < tokens
    assert stats["logical_tokens"] == stats["modes"]["step"]["logical_tokens"]
    second = result(capsys, "stats", str(synthetic / "step"), "--iteration", "1")
    assert second["modes"]["step"]["num_groups"] == 2
    assert "sample_tokens_median" in second["modes"]["step"]


def test_tree_traces_show_tree_modes(synthetic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = result(capsys, "stats", str(synthetic / "tree_step"))["modes"]
    assert set(modes) == {"tree_step", "traj", "tree"}
    # Six rollouts in each of two iterations: a path for each.
    assert modes["tree"]["num_samples"] == 12
    assert modes["tree"]["loss_tokens"] == modes["tree_step"]["loss_tokens"]
    main(["trace", "stats", str(synthetic / "tree_step")])
    text = capsys.readouterr().out
    assert "mode tree_step:\nlevel" in text
    assert "within mini-batch" in text


@pytest.mark.slow
def test_plots_come_with_their_numbers(synthetic: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    arguments = ["trace", "stats", str(synthetic / "tree_step"), "--plots", str(folder), "--quiet"]
    assert main(arguments) == 0
    stats = json.loads((folder / "stats.json").read_text())["modes"]["tree_step"]
    for name in ("match_rate", "tokens_by_depth", "tokens_by_readers", "branching"):
        assert (folder / f"{name}.png").stat().st_size > 5000
        assert (folder / f"{name}.svg").is_file()
    readers = pd.read_csv(folder / "tokens_by_readers.csv")
    assert readers["unique_tokens"].sum() == stats["unique_tokens"]
    depths = pd.read_csv(folder / "tokens_by_depth.csv")
    assert depths["logical_tokens"].sum() == stats["logical_tokens"]
    assert depths["unique_within_group"].sum() == stats["within_group"]["unique_tokens"]
    assert (depths["depth_from"][1:].to_numpy() == depths["depth_below"][:-1].to_numpy()).all()
    rates = pd.read_csv(folder / "match_rate.csv").set_index(["mode", "level"])
    assert rates.loc[("tree_step", "overall"), "prefix_match_rate"] == pytest.approx(
        stats["prefix_match_rate"]
    )
    forks = pd.read_csv(folder / "branching.csv")
    assert forks["forks"].sum() == stats["overall"]["num_forks"]


def test_slice_writes_another_mode(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "paths"
    arguments = ("slice", str(synthetic / "tree_step"), "--out", str(out), "--groups", "1")
    written = result(capsys, *arguments, "--mode", "tree")
    assert (written["sampling_mode"], written["num_samples"]) == ("tree", 3)
    assert open_trace(out).iteration(0).num_samples == 3
    assert main(["trace", "slice", str(synthetic / "step"), "--out", "x", "--mode", "tre"]) == 2
    assert "Did you mean 'tree'" in capsys.readouterr().err


@pytest.mark.slow
def test_merge_appends_or_joins(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(synthetic / mode) for mode in ("step", "tree_step")]
    both = result(capsys, "merge", *paths, "--out", str(tmp_path / "after"))
    assert (both["num_iterations"], both["sampling_mode"]) == (4, "mixed")
    joined = result(
        capsys, "merge", *paths, "--out", str(tmp_path / "beside"), "--how", "side_by_side"
    )
    assert (joined["num_iterations"], joined["num_samples"]) == (2, both["num_samples"])
    unique = [
        result(capsys, "stats", path)["modes"][mode]["unique_tokens"]
        for path, mode in zip(paths, ("step", "tree_step"), strict=True)
    ]
    merged = result(capsys, "stats", str(tmp_path / "beside"))
    assert merged["modes"]["mixed"]["unique_tokens"] == sum(unique)
    assert result(capsys, "validate", str(tmp_path / "beside"))["num_iterations"] == 2


def test_validate_notices_a_wrong_count(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "copy"
    path.mkdir()
    for file in (synthetic / "step").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    header = json.loads((path / "trace.json").read_text())
    (path / "trace.json").write_text(json.dumps(header | {"num_samples": 1}))
    assert main(["trace", "validate", str(path)]) == 2
    assert "trace.json says 1 with" in capsys.readouterr().err
    assert pq.ParquetFile(path / "samples.parquet").num_row_groups == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("synth", "--preset", "webshp", "--mode", "step"), "Did you mean 'webshop'"),
        (("synth", "--preset", "webshop", "--mode", "step", "--seed=-1"), "seed is -1"),
        (("synth", "--preset", "webshop", "--mode", "step", "--set", "taks=1"), "'taks'"),
        (("merge",), "no trace to merge"),
    ],
)
def test_mistakes_are_explained_and_write_nothing(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert main(["trace", *arguments, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_unknown_model(synthetic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "stats", str(synthetic / "step"), "--model", "qwen2.5-7"]) == 2
    assert "Did you mean 'qwen2.5-7b'" in capsys.readouterr().err
