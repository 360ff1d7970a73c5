"""The kernels compile for GPUs that are not there: no spills, tensor cores, asynchronous copies."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from psrl.core.errors import BackendError
from psrl.kernels.triton.compile_report import KERNELS, report_in_own_process, shipped

SHARED_BYTES = {"sm_90a": 227 * 1024, "sm_90": 227 * 1024, "sm_80": 99 * 1024}
"""Limit of a program; sm_80 stands for all newer ones too, of which the smallest have 99 KiB."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("target", "dtype", "head_dim"), shipped())
def test_shipped_tiles_compile_well(target: str, dtype: str, head_dim: int) -> None:
    rows = report_in_own_process(target, dtype, head_dim)
    assert [row["kernel"] for row in rows] == list(KERNELS)
    for row in rows:
        assert row["local_bytes"] == 0, row
        assert not row.keys() & {"LDL", "STL"}, row
        assert row["shared_bytes"] <= SHARED_BYTES[target], row
        assert row["LDGSTS"] + row.get("UTMALDG", 0) > 0, row
        if dtype != "float32":
            assert row.get("HMMA", 0) + row.get("HGMMA", 0) > 0, row
        if target == "sm_90a":
            assert row["HGMMA"] > 0, row
            assert row["UTMALDG"] > 0, row
            # The interpreter cannot run a copy that adds: that it is one is all we can see.
            copy = {"dkv": "UTMASTG", "dkv_add": "UTMAREDG"}.get(row["kernel"])
            assert copy is None or row[copy] > 0, row


def test_a_failed_compilation_is_reported() -> None:
    with pytest.raises(BackendError, match="head dimension 512"):
        report_in_own_process("sm_90a", "bfloat16", 512)
