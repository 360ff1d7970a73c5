"""Files of older psRLs, written by them: read, or refused with what makes them again.

`fixtures/v1` was written by the last psRL whose plans had schema version 1.
"""

import json
from pathlib import Path

import pytest

from psrl.core.cost.calibration import load_calibration
from psrl.core.errors import ConfigError, PlanError, PsrlError, TraceError
from psrl.core.plan.plan import Plan
from psrl.core.run.run_directory import read_manifest
from psrl.core.samples.trace import open_trace

V1 = Path(__file__).parent / "fixtures" / "v1"


def test_a_plan_of_version_1_is_refused_with_the_command_that_makes_it_again() -> None:
    with pytest.raises(
        PlanError, match=r"plan\.json: schema version 1, this psRL reads 2"
    ) as error:
        Plan.load(V1 / "plan")
    assert "psrl plan --trace TRACE --cluster CLUSTER.toml --out NEW_PLAN" in error.value.hint
    assert "--policy psrl --iteration 0" in error.value.hint


def test_a_trace_of_version_1_is_read() -> None:
    trace = open_trace(V1 / "trace")
    assert trace.content_hash.startswith("77430acb4c6a")
    batch = trace.iteration(0)
    assert (batch.num_samples, batch.logical_tokens) == (20, 13_177)


@pytest.mark.parametrize("version", ["0", "2", '"1"', "null", "[1]"])
def test_a_trace_of_another_version_is_refused(tmp_path: Path, version: str) -> None:
    text = (V1 / "trace" / "trace.json").read_text()
    assert '"schema_version": 1' in text
    changed = text.replace('"schema_version": 1', f'"schema_version": {version}')
    (tmp_path / "trace.json").write_text(changed)
    with pytest.raises(TraceError, match=r"schema version .*, this psRL reads 1") as error:
        open_trace(tmp_path)
    assert isinstance(error.value, PsrlError)
    assert "psrl trace import" in error.value.hint


@pytest.mark.parametrize("version", [0, 2, "1", True, None])
def test_a_run_of_another_version_is_refused_with_its_command(
    tmp_path: Path, version: object
) -> None:
    manifest = {
        "schema_version": version,
        "command_line": ["/old/psrl", "simulate", "my plan", "--trace", "t"],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"schema version .*, this psRL reads 1") as error:
        read_manifest(tmp_path)
    assert error.value.hint == "run it again: psrl simulate 'my plan' --trace t"
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 1, "kind": "executed"}))
    assert read_manifest(tmp_path)["kind"] == "executed"


def test_a_run_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        read_manifest(tmp_path)


def test_a_calibration_of_another_version_is_refused_with_its_command(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text('{"schema_version": 0}')
    with pytest.raises(ConfigError, match=r"not a calibration of schema \d") as error:
        load_calibration(path)
    assert "psrl calibrate" in error.value.hint
