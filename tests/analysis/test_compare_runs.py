import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from psrl.analysis.compare_runs import exactness
from psrl.core.errors import PsrlError
from tests.analysis.conftest import write_json

GRADIENTS = {"a.weight": np.full((2, 3), 2.0, np.float32), "b.bias": np.array([3.0, 4.0])}


def make_run(
    path: Path,
    *,
    logprob: tuple[float, ...] = (-0.5, -4.0, -1.0),
    old_logprob: tuple[float, ...] = (math.nan, -4.0, -1.0),
    token: tuple[int, ...] = (1, 2, 1),
    loss: Any = (0.25, -0.5),
    gradients: dict[str, np.ndarray] = GRADIENTS,
    trace_hash: str = "abc",
    order: tuple[int, ...] = (0, 1, 2),
) -> Path:
    path.mkdir()
    table = pa.table(
        {
            "sample": [0, 0, 1],
            "token": token,
            "old_logprob": old_logprob,
            "ref_logprob": [math.nan] * 3,
            "logprob": logprob,
        }
    )
    pq.write_table(table.take(list(order)), path / "logprobs.parquet")
    write_json(path / "metrics.json", {"loss": loss})
    write_json(path / "manifest.json", {"schema_version": 1, "trace_hash": trace_hash})
    save_file(gradients, path / "gradients.safetensors")
    return path


def differences(a: Path, b: Path) -> dict[str, float]:
    return {row["quantity"]: row["largest_relative_difference"] for row in exactness(a, b)}


def test_equal_runs_differ_by_zero_in_any_row_order(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", order=(2, 0, 1))
    rows = exactness(a, b, tolerance=1e-10)
    found = differences(a, b)
    assert set(found.values()) == {0.0}
    assert {row["tolerance"] for row in rows if row["quantity"] != rows[-1]["quantity"]} == {1e-10}
    # A single parameter is shown, not judged.
    assert rows[-1]["quantity"].startswith("gradient of ")
    assert rows[-1]["tolerance"] == float("inf")
    assert list(found)[:4] == ["old_logprob", "logprob", "loss", "gradients"]


def test_differences_have_their_documented_scale(tmp_path: Path) -> None:
    reference = make_run(tmp_path / "reference")
    changed = {"a.weight": GRADIENTS["a.weight"], "b.bias": np.array([3.0, 4.5])}
    a = make_run(
        tmp_path / "a", logprob=(-0.75, -4.4, -1.0), loss=[0.25, -0.625], gradients=changed
    )
    found = differences(a, reference)
    assert found["logprob"] == pytest.approx(0.25)  # over 1, not over 0.5; 0.4 / 4 is less
    assert found["loss"] == pytest.approx(0.125)
    assert found["gradients"] == pytest.approx(0.5 / 7)  # sqrt(6 * 4 + 25)
    assert found["gradient of b.bias"] == pytest.approx(0.1)


def test_one_step_may_give_its_loss_as_a_number(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", loss=4.0), make_run(tmp_path / "b", loss=[2.0])
    assert differences(a, b)["loss"] == 1.0


@pytest.mark.parametrize("rounded", [0.0, 1e-7])
def test_a_gradient_that_is_all_rounding_is_measured_against_the_models(
    tmp_path: Path, rounded: float
) -> None:
    """Zero on one CPU, 1e-7 on another; twice the rounding of the model's float32 is an error."""
    gradients = {"large": np.full(100, 1.0, np.float32), "none": np.array([rounded], np.float32)}
    b = make_run(tmp_path / "b", gradients=gradients)
    for value, limits in ((1e-6, (0.8e-7, 1e-7)), (2.4e-6, (1.0, math.inf))):
        changed = gradients | {"none": np.array([value], np.float32)}
        found = differences(make_run(tmp_path / str(value), gradients=changed), b)
        assert limits[0] <= found["gradient of none"] <= limits[1]


@pytest.mark.parametrize(
    ("quantity", "change"),
    [
        ("logprob", {"logprob": (math.nan, -4.0, -1.0)}),
        ("old_logprob", {"old_logprob": (-1.0, -4.0, -1.0)}),
        ("loss", {"loss": [math.nan, -0.5]}),
        ("gradients", {"gradients": GRADIENTS | {"b.bias": np.array([3.0, math.inf])}}),
    ],
)
def test_what_is_not_finite_differs_by_infinity(
    tmp_path: Path, quantity: str, change: dict[str, Any]
) -> None:
    a, b = make_run(tmp_path / "a", **change), make_run(tmp_path / "b")
    assert differences(a, b)[quantity] == math.inf
    assert differences(b, a)[quantity] == math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace_hash": "xyz"}, r"different traces \(xyz, abc\)"),
        ({"token": (1, 2, 5)}, "row 2 has token 5 and 1"),
        ({"loss": [0.25]}, "1 optimizer steps"),
        ({"gradients": {"a.weight": GRADIENTS["a.weight"]}}, "only in one of them, e.g. b.bias"),
        ({"gradients": GRADIENTS | {"b.bias": np.zeros(3)}}, r"b.bias has shape \(3,\)"),
    ],
)
def test_runs_of_different_things_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    a, b = make_run(tmp_path / "a", **change), make_run(tmp_path / "b")
    with pytest.raises(PsrlError, match=message):
        exactness(a, b)


@pytest.mark.parametrize(
    "name", ["manifest.json", "metrics.json", "logprobs.parquet", "gradients.safetensors"]
)
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (a / name).write_bytes(b"{ damaged")
    with pytest.raises(PsrlError, match=name):
        exactness(a, b)
    (a / name).unlink()
    with pytest.raises(PsrlError, match=f"{name} is missing"):
        exactness(a, b)
