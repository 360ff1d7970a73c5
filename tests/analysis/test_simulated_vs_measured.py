"""A simulated run against an executed one: a real pair of runs, and damage done to it by hand.

`runs/` holds 12 samples of a public tau-bench trace (counts and times only), executed on two CPU
processes of a busy machine, and the simulation of the same plan with a calibration.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from psrl.analysis.figures.agreement_plots import kv_curve_figure
from psrl.analysis.simulated_vs_measured import (
    agreement,
    disagreements,
    format_agreement,
    kv_curves,
)
from psrl.cli import main
from psrl.core.errors import ConfigError, ExitCode
from psrl.core.run.events import Events

RUNS = Path(__file__).parent / "runs"
MEASURED, SIMULATED = RUNS / "executed", RUNS / "simulated"

Change = Callable[[Events], Events]


def test_the_committed_runs_agree_in_everything_but_time() -> None:
    table = agreement(MEASURED, SIMULATED)
    assert table["phase"].tolist() == ["log_old_prob", "reference", "update"]
    assert (table["workers_in_order"] == 1.0).all()
    assert (table["kv_ops_equal"] == 1.0).all()
    assert (table["kv_largest_difference_bytes"] == 0).all()
    assert table["simulated_peak_kv_bytes"].tolist() == table["measured_peak_kv_bytes"].tolist()
    assert table["measured_peak_kv_bytes"].max() > 10**6
    assert (table["memory_error"].abs() < 1e-3).all()
    assert (table["kendall_tau"] > 0.85).all()
    # The machine was busy with other work while the update ran.
    assert table["time_error"].tolist() == pytest.approx([-0.100, -0.007, -0.287], abs=1e-3)
    assert disagreements(table, 0.3) == []
    assert disagreements(table, 0.15) == ["update: time is off by -28.7 %"]
    text = format_agreement(table)
    assert "-28.7 %" in text
    assert "Traceback" not in text


def test_every_column_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(agreement(MEASURED, SIMULATED).columns) <= set(
        re.findall(r"`(\w+)`", " ".join(rows))
    )


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[Change], pd.DataFrame]:
    """Compare the simulated run with a changed copy of itself that claims to be executed."""

    def compare(change: Change) -> pd.DataFrame:
        real = tmp_path / "real"
        shutil.copytree(MEASURED, real)
        change(Events.load(SIMULATED / "events.parquet")).save(real / "events.parquet")
        return agreement(real, SIMULATED)

    return compare


def test_a_run_agrees_with_itself(changed: Callable[[Change], pd.DataFrame]) -> None:
    table = changed(lambda events: events)
    assert (table["time_error"] == 0).all()
    assert (table["kendall_tau"] == 1).all()
    assert disagreements(table, 0.0) == []


def test_times_are_compared_phase_by_phase(changed: Callable[[Change], pd.DataFrame]) -> None:
    def slower(events: Events) -> Events:
        factor = np.where(events.phase == "update", 1.25, 1.0)
        return replace(events, start_s=events.start_s * factor, end_s=events.end_s * factor)

    table = changed(slower)
    assert table["time_error"].tolist() == pytest.approx([0, 0, -0.2])
    assert len(disagreements(table, 0.19)) == 1
    assert disagreements(table, 0.21) == []


def test_ops_in_another_order_are_found(changed: Callable[[Change], pd.DataFrame]) -> None:
    def swap(events: Events) -> Events:
        first, second = np.flatnonzero((events.phase == "update") & (events.rank == 0))[:2]
        start_s = events.start_s.copy()
        start_s[[first, second]] = start_s[[second, first]]
        return replace(events, start_s=start_s)

    table = changed(swap)
    assert table["workers_in_order"].tolist() == [1.0, 1.0, 0.5]
    assert table["kendall_tau"].tolist()[:2] == [1.0, 1.0]
    assert table["kendall_tau"].iloc[2] < 1.0
    assert disagreements(table, 1.0) == ["update: ops ran in another order"]


def test_one_cached_byte_is_found(changed: Callable[[Change], pd.DataFrame]) -> None:
    def more(events: Events) -> Events:
        kv_bytes = events.kv_bytes.copy()
        kv_bytes[np.flatnonzero(events.phase == "reference")[3]] += 1
        return replace(events, kv_bytes=kv_bytes)

    table = changed(more)
    num_ops = int(table["num_ops"].iloc[1])
    assert table["kv_ops_equal"].tolist() == [1.0, 1 - 1 / num_ops, 1.0]
    assert table["kv_largest_difference_bytes"].tolist() == [0, 1, 0]
    assert any("K/V bytes differ" in text for text in disagreements(table, 1.0))


def test_peak_memory_is_compared_without_what_always_stays(
    changed: Callable[[Change], pd.DataFrame],
) -> None:
    def more(events: Events) -> Events:
        update = events.phase == "update"
        return replace(
            events,
            static_bytes=events.static_bytes // 2,
            activation_bytes=np.where(update, 2 * events.activation_bytes, 0),
        )

    table = changed(more)
    assert table["memory_error"].tolist()[:2] == [0.0, 0.0]
    assert table["memory_error"].iloc[2] < -0.4


def test_runs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no events"):
        agreement(tmp_path, SIMULATED)
    with pytest.raises(ConfigError, match="kind 'simulated', expected 'executed'"):
        agreement(SIMULATED, MEASURED)
    other = tmp_path / "other"
    shutil.copytree(SIMULATED, other)
    manifest = json.loads((other / "manifest.json").read_text("utf-8"))
    (other / "manifest.json").write_text(json.dumps(manifest | {"trace_hash": "0" * 64}))
    with pytest.raises(ConfigError, match="ran trace"):
        agreement(MEASURED, other)
    (other / "manifest.json").unlink()  # as in a comparison's folder of a policy
    assert len(agreement(MEASURED, other)) == 3
    events = Events.load(other / "events.parquet")
    events.where(events.micro_batch != 1).save(other / "events.parquet")
    with pytest.raises(ConfigError, match="they are not the same"):
        agreement(MEASURED, other)
    events.where(events.phase == "update").save(other / "events.parquet")
    with pytest.raises(ConfigError, match=r"ran log_old_prob, reference, update, .* ran update"):
        agreement(MEASURED, other)


def test_curves_hold_every_op_of_the_fullest_device() -> None:
    curves = kv_curves(MEASURED, SIMULATED)
    assert (curves["measured_bytes"] == curves["simulated_bytes"]).all()
    for _, mine in curves.groupby("phase"):
        assert mine["position"].tolist() == list(range(len(mine)))
    titles = [ax.get_title("right") for ax in kv_curve_figure(curves).axes]
    assert titles == ["equal, byte by byte"] * 3


@pytest.mark.slow
def test_the_command_and_its_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["compare", "--measured", str(MEASURED), "--simulated", str(SIMULATED)]
    run = tmp_path / "run"
    assert main([*pair, "--tolerance", "0.3", "--run-dir", str(run), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((run / "metrics.json").read_text("utf-8"))
    assert found["disagreements"] == []
    assert [row["phase"] for row in found["phases"]] == ["log_old_prob", "reference", "update"]
    written = sorted(p.relative_to(run).as_posix() for p in run.rglob("*.*"))
    assert written == [
        "agreement.csv",
        "manifest.json",
        "metrics.json",
        *(f"plots/kv_curve.{kind}" for kind in ("csv", "png", "svg")),
    ]
    assert main(pair) == ExitCode.OUTSIDE_TOLERANCE
    shown = capsys.readouterr()
    assert "K/V equal" in shown.out
    assert "update: time is off by -28.7 %" in shown.err
    for wrong in (pair[:3], [*pair, "--trace", "x"], [*pair, "--tolerance", "-1"], ["compare"]):
        assert main(wrong) == ExitCode.BAD_INPUT
