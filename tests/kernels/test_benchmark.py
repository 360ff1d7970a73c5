"""The benchmark times only right results, and the GPU script runs through on a CPU."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psrl.cli import main
from psrl.core.errors import BackendError, ConfigError, ToleranceError
from psrl.kernels.benchmark import baselines, benchmark
from psrl.kernels.benchmark.baselines import sample_rows
from psrl.kernels.benchmark.benchmark import Workload
from psrl.kernels.benchmark.forests import Segment, pack_forest
from psrl.kernels.benchmark.shapes import SHAPES, make_shape
from psrl.kernels.benchmark.table import Skipped, write_csv

Capture = pytest.CaptureFixture[str]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


CPU = Workload(torch.device("cpu"), torch.float32, (2, 1), 16, max_tokens=100, repeats=1)


def test_rows_of_the_op_and_of_the_baselines() -> None:
    table = benchmark.measure("parts", ["star", "path_60k"], CPU)
    assert [(r.shape, r.implementation) for r in table.rows] == [
        (s, i) for s in ("star", "path_60k") for i in ("parts", "sdpa", "unshared")
    ]
    assert [(s.baseline, s.shape) for s in table.skipped] == [
        ("flex_attention", "star"),
        ("flex_attention", "path_60k"),
    ]
    assert 0 < table.worst_error < 1e-5
    path, _, unshared = table.rows[3:]
    assert (path.num_tokens, path.visible_pairs, path.slower_by) == (100, 5050, 1.0)
    assert 1 < path.forward_area < 1.01
    assert 1 < path.dkv_area < 1.01
    assert path.forward_bytes == 100 * 16 * 4 * (2 + 1 + 1 + 2)
    times = [r.forward_ms + r.backward_ms for r in (path, unshared)]
    assert unshared.slower_by == pytest.approx(times[1] / times[0], rel=0.05)
    star_unshared = table.rows[2]
    assert star_unshared.visible_pairs == table.rows[0].visible_pairs
    assert star_unshared.forward_bytes > 4 * table.rows[0].forward_bytes


def test_csv_keeps_other_devices_and_replaces_the_same_work(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = benchmark.measure("parts", ["star"], CPU, ["sdpa"]).rows
    other = [replace(row, device="NVIDIA H200") for row in rows]
    write_csv(other, path)
    write_csv(rows, path)
    write_csv([replace(row, forward_ms=7.0) for row in rows], path)
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert [(r["device"], r["implementation"]) for r in read] == [
        (row.device, row.implementation) for row in (*other, *rows)
    ]
    assert [r["forward_ms"] for r in read[2:]] == ["7.0", "7.0"]
    path.write_text("device,speed\n")
    with pytest.raises(ConfigError, match="other columns"):
        write_csv(rows, path)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_packs_whole_and_scaled(shape: str) -> None:
    segments = make_shape(shape)
    (packed,) = pack_forest(segments)
    assert packed.total_tokens == sum(s.num_tokens for s in segments) > 10_000
    scaled = sum(s.num_tokens for s in make_shape(shape, 1000))
    assert 850 <= scaled <= 1000
    assert make_shape(shape, 10**9) == segments


def test_scaled_shapes_keep_whole_trees() -> None:
    prompts = make_shape("grpo", 40_000)
    assert [v for v, s in enumerate(prompts) if s.parent < 0] == [0, 17]
    assert len(prompts) == 34
    assert prompts == make_shape("grpo")[:34]


def test_a_wrong_implementation_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = benchmark.tree_attention
    monkeypatch.setattr(benchmark, "tree_attention", lambda *a, **k: 1.001 * right(*a, **k))
    with pytest.raises(ToleranceError, match="parts has error 1"):
        benchmark.measure("parts", ["star"], CPU)


def test_a_baseline_that_disagrees_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = baselines._by_heads
    monkeypatch.setattr(baselines, "_by_heads", lambda *a, **k: 1.01 * right(*a, **k))
    with pytest.raises(ToleranceError, match=r"sdpa and tree attention differ by 1\.0e-02 on star"):
        benchmark.measure("parts", ["star"], CPU)


def test_a_baseline_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel image\nlong trace")

    monkeypatch.setattr(baselines, "_by_heads", broken)
    table = benchmark.measure("parts", ["star"], CPU, ["sdpa"])
    assert table.skipped == [Skipped("sdpa", "star", "no kernel image")]
    monkeypatch.setitem(baselines.MAX_MASK_ENTRIES, "cpu", 100)
    table = benchmark.measure("parts", ["star"], CPU, ["sdpa"])
    assert "a dense mask of" in table.skipped[0].reason


def test_a_head_without_tiles_is_refused() -> None:
    with pytest.raises(BackendError, match="head dimension 300 is above 256"):
        benchmark.measure("parts", ["star"], replace(CPU, head_dim=300))


def test_unknown_shape_is_refused() -> None:
    with pytest.raises(BackendError, match="unknown shape 'moon'"):
        benchmark.measure("parts", ["moon"], CPU)


def bench(*arguments: str) -> int:
    return main(["bench", "--heads", "2", "1", "--head-dim", "16", "--repeats", "1", *arguments])


def test_command_says_what_it_measured(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.csv"
    options = ("--device", "cpu", "--max-tokens", "60", "--shape", "star", "--csv", str(path))
    path.parent.mkdir()
    path.write_text("a,b\n")
    assert bench(*options) == 2
    assert "has other columns" in capsys.readouterr().err
    path.unlink()
    path.parent.rmdir()
    assert bench(*options, "--quiet") == 0
    text = capsys.readouterr().out
    assert "float32, 2 query and 1 key/value heads of 16, shapes scaled to 60 tokens" in text
    assert "not measured: flex_attention on star: FlexAttention has no backward on a CPU" in text
    assert [line.split()[:2] for line in text.splitlines()[4:7]] == [
        ["star", "parts"],
        ["star", "sdpa"],
        ["star", "unshared"],
    ]
    assert path.read_text().count("\n") == 4
    assert bench(*options, "--baseline", "sdpa", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["implementation"] for row in result["rows"]] == ["parts", "sdpa"]


def test_command_prints_no_times_of_a_wrong_result(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = benchmark.tree_attention
    monkeypatch.setattr(benchmark, "tree_attention", lambda *a, **k: 1.001 * right(*a, **k))
    assert bench("--device", "cpu") == 4
    out, err = capsys.readouterr()
    assert not out
    assert "no time is reported for a wrong result" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--heads", "3", "2"), "must be a multiple"),
        (("--repeats", "0"), "--repeats 0 is below 1"),
        (("--head-dim", "0"), "--head-dim 0 is below 1"),
        (("--shape", "moon"), "unknown --shape moon"),
        (("--baseline", "magic"), "unknown --baseline magic"),
    ],
)
def test_command_refuses_bad_options(
    capsys: Capture, options: tuple[str, ...], message: str
) -> None:
    assert bench("--device", "cpu", *options) == 2
    assert message in capsys.readouterr().err


def test_unshared_samples_are_the_leaf_paths() -> None:
    segments = [Segment(-1, 2), Segment(0, 1), Segment(1, 2), Segment(0, 1)]
    rows, bounds = sample_rows(segments)
    assert rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]
    assert bounds.tolist() == [0, 5, 8]


@pytest.mark.slow
def test_gpu_script_runs_dry(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", "--output", tmp_path / "out.json"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"]
    assert report["repeats_equal"] == {"pointers": True}
    assert [row["kernel"] for row in report["sweep"]] == ["forward", "dq", "dkv"]
    assert [row["implementation"] for row in report["table"]] == ["triton", "sdpa", "unshared"]
    assert report["skipped"] == [
        "table: flex_attention on grpo: FlexAttention has no backward on a CPU"
    ]
