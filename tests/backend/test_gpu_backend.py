"""The script of the GPU bars runs through on a CPU, and says what it had no time for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_script(output: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a dry run."""
    command = [sys.executable, "-m", "benchmarks.gpu_backend", "--dry-run", "--output", str(output)]
    done = subprocess.run(
        [*command, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.exists(), done.stderr
    return done.returncode, json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_dry_run_measures_everything(tmp_path: Path) -> None:
    code, report = run_script(tmp_path / "out.json")
    assert code == 0
    assert report["passed"]
    assert report["complete"]
    assert report["skipped"] == []
    found = {(r["dtype"], r["recompute"], r["num_micro_batches"]) for r in report["equality"]}
    assert len(found) == len(report["equality"]) == 2 * 4 * 2
    for row in report["equality"]:
        # Nothing is compared with itself: sharing rounds otherwise than another cut does.
        assert 0 < row["dense_vs_dense"]["gradient"] < row["bar"]
        assert 0 < row["shared_vs_dense"]["gradient"] < row["bar"]
    rows = report["speed"]
    assert [(r["phase"], r["kind"]) for r in rows] == [
        (phase, kind)
        for phase in ("log_old_prob", "update")
        for kind in ("dense", "dense", "shared")
    ]
    for row in rows:
        assert (row["peak_kv_bytes"] > 0) == (row["kind"] == "shared")
        assert row["peak_allocated_bytes"] is None
    for shared in rows[2::3]:
        assert shared["flop_ratio"] > 2
        efficiency = shared["speedup"] / shared["flop_ratio"]
        assert shared["sharing_efficiency"] == pytest.approx(efficiency)
    assert "torch" in report["environment"]["versions"]


@pytest.mark.slow
def test_without_time_everything_is_listed_as_skipped(tmp_path: Path) -> None:
    code, report = run_script(tmp_path / "out.json", "--budget-s", "0")
    assert code == 1
    assert not report["complete"]
    assert report["equality"] == report["speed"] == []
    assert len(report["skipped"]) == 3
    assert all("time budget of 0 s" in line for line in report["skipped"])
