"""The benchmark times only right results, and the GPU script runs through on a CPU."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from psrl.core.errors import BackendError, ToleranceError
from psrl.kernels import benchmark
from psrl.kernels.baselines import sample_rows
from psrl.kernels.forests import Segment, pack_forest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


def rows_on_cpu(shapes: list[str]) -> list[benchmark.Row]:
    return benchmark.tree_attention_rows(
        shapes,
        ["parts", "sdpa"],
        device=torch.device("cpu"),
        dtype=torch.float32,
        heads=(2, 1),
        head_dim=16,
        max_tokens=100,
        repeats=1,
    )


def test_rows_and_csv(tmp_path: Path) -> None:
    rows = rows_on_cpu(["star", "path_60k"])
    assert [(r.shape, r.implementation) for r in rows] == [
        (s, i) for s in ("star", "path_60k") for i in ("parts", "sdpa")
    ]
    assert rows[2].num_tokens == 100
    assert rows[2].visible_pairs == 5050
    assert rows[2].computed_over_visible == round(2 * 128 * 64 / 5050, 4)
    assert rows[2].forward_bytes == 100 * 16 * 4 * (2 + 1 + 1 + 2)
    assert all(r.forward_ms > 0 and r.backward_ms > 0 for r in rows)
    benchmark.write_csv(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [r["device"] for r in read] == [r.device for r in rows]


@pytest.mark.parametrize("shape", benchmark.SHAPES)
def test_every_shape_packs(shape: str) -> None:
    segments = benchmark.SHAPES[shape](np.random.default_rng(0))
    (packed,) = pack_forest(segments)
    assert packed.total_tokens == sum(s.num_tokens for s in segments) > 10_000


def test_a_wrong_implementation_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = benchmark.tree_attention
    monkeypatch.setattr(benchmark, "tree_attention", lambda *a, **k: 1.001 * right(*a, **k))
    with pytest.raises(ToleranceError, match="parts has error 1"):
        rows_on_cpu(["star"])


def test_unknown_shape_is_refused() -> None:
    with pytest.raises(BackendError, match="unknown shape 'moon'"):
        rows_on_cpu(["moon"])


def test_unshared_samples_are_the_leaf_paths() -> None:
    segments = [Segment(-1, 2), Segment(0, 1), Segment(1, 2), Segment(0, 1)]
    rows, bounds = sample_rows(segments)
    assert rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]
    assert bounds.tolist() == [0, 5, 8]


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
    assert [row["implementation"] for row in report["table"]] == ["triton", "parts"]
    assert report["skipped"] == []
