"""Predictions outside a calibration's domain carry a warning in every output."""

import json
from pathlib import Path
from typing import Any

import pytest

from psrl.cli import main
from psrl.core.cost.calibration import Calibration, Coefficients, Domain
from psrl.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "examples" / "traces" / "tau_bench_airline"
GPUS = ROOT / "examples" / "clusters" / "8xh100.toml"

Capture = pytest.CaptureFixture[str]
PREFIX = "warning: outside the calibration's domain: "


def calibration(path: Path, device: str, ranges: dict[str, tuple[float, float]]) -> Path:
    Calibration(
        sources=("by hand",),
        coefficients=Coefficients(
            gemm_efficiency=0.7,
            attention_efficiency=0.5,
            host_layer_s=0.5e-3,
            accumulation_bytes_per_parameter=10.0,
        ),
        domain=Domain(device=device, dtype_bytes=2, attention="tree", ranges=ranges),
    ).save(path)
    return path


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A trace of one task; cluster files whose calibrations do not and do cover it."""
    folder = tmp_path_factory.mktemp("warnings")
    small = ("--groups", "1", "--trajectories", "2", "--steps", "3", "--quiet")
    assert main(["trace", "slice", str(TRACE), "--out", str(folder / "trace"), *small]) == 0
    calibration(folder / "narrow.json", "h20-96", {"num_tokens": (1.0, 2.0)})
    calibration(folder / "wide.json", "h100-80", {"num_tokens": (1.0, 1e9)})
    text = GPUS.read_text("utf-8")
    for name in ("narrow", "wide"):
        (folder / f"{name}.toml").write_text(f'calibration = "{name}.json"\n{text}', "utf-8")
    return folder / "trace", folder / "narrow.toml", folder / "wide.toml"


def run(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == ExitCode.OK
    return capsys.readouterr().out


def compared(capsys: Capture, trace: Path, cluster: Path, folder: Path, *more: str) -> str:
    policies = ("--policies", "verl", "psrl")
    command = ("compare", "--trace", trace, "--cluster", cluster, "--run-dir", folder)
    return run(capsys, *command, *policies, *more)


@pytest.mark.slow
def test_a_comparison_warns_in_table_json_metrics_and_report(
    setting: tuple[Path, Path, Path],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace, narrow, _ = setting
    text = compared(capsys, trace, narrow, tmp_path / "text", "--quiet")
    device = "device h100-80: the calibration was measured on h20-96"
    assert text.count(PREFIX + device) == 1
    assert f"{PREFIX}verl: " in text
    assert "have num_tokens from" in text
    report = (tmp_path / "text" / "report.html").read_text("utf-8")
    monkeypatch.setattr("psrl.analysis.report.report.write_report", lambda *_: None)
    found: dict[str, Any] = json.loads(compared(capsys, trace, narrow, tmp_path / "j", "--json"))
    assert found["warnings"][0] == device
    assert "where the stated error does not hold" in report
    for policy in ("verl", "psrl"):
        path = tmp_path / "j" / "policies" / policy / "metrics.json"
        warnings = json.loads(path.read_text("utf-8"))["warnings"]
        assert warnings[0] == device
        assert len(warnings) == 2
    for warning in found["warnings"]:
        assert warning.replace("'", "&#39;") in report


@pytest.mark.slow
def test_plan_and_simulation_warn(
    setting: tuple[Path, Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    trace, narrow, _ = setting
    plan = tmp_path / "plan"
    command = ("plan", "--trace", trace, "--cluster", narrow, "--out", plan)
    assert PREFIX + "device" in run(capsys, *command, "--quiet")
    simulate = ("simulate", plan, "--trace", trace, "--run-dir")
    assert run(capsys, *simulate, tmp_path / "text", "--quiet").count(PREFIX) == 2
    found = json.loads(run(capsys, *simulate, tmp_path / "json", "--json"))
    assert len(found["warnings"]) == 2
    stored = json.loads((tmp_path / "json" / "metrics.json").read_text("utf-8"))
    assert stored["warnings"] == found["warnings"]


@pytest.mark.slow
def test_nobody_warns_inside_the_domain_or_without_a_calibration(
    setting: tuple[Path, Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    trace, _, wide = setting
    assert "warning" not in compared(capsys, trace, wide, tmp_path / "wide", "--quiet")
    assert "does not hold" not in (tmp_path / "wide" / "report.html").read_text("utf-8")
    plan = ("plan", "--trace", trace, "--cluster", GPUS, "--out", tmp_path / "plan")
    assert json.loads(run(capsys, *plan, "--json"))["warnings"] == []


def test_another_calibration_changes_times_and_drops_the_plans_bound(
    setting: tuple[Path, Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    trace, narrow, _ = setting
    plan = tmp_path / "plan"
    run(capsys, "plan", "--trace", trace, "--cluster", GPUS, "--out", plan, "--quiet")
    simulate = ("simulate", plan, "--trace", trace, "--json", "--run-dir")
    before = json.loads(run(capsys, *simulate, tmp_path / "roofline"))
    other = ("--calibration", narrow.with_suffix(".json"))
    after = json.loads(run(capsys, *simulate, tmp_path / "calibrated", *other))
    assert before["warnings"] == []
    assert before["lower_bound_s"] is not None
    assert len(after["warnings"]) == 2
    assert after["lower_bound_s"] is None
    assert after["makespan_s"] != before["makespan_s"]
