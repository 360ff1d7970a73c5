"""`import psrl`: the names of docs/api.md, loaded when used, and the example that shows them."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import psrl

ROOT = Path(__file__).resolve().parents[2]


def test_every_name_is_there_typed_and_documented() -> None:
    documented = (ROOT / "docs" / "api.md").read_text("utf-8")
    typed = {
        alias.name
        for node in ast.walk(ast.parse(Path(psrl.__file__).read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("psrl.")
        for alias in node.names
    }
    assert typed == set(psrl.__all__)
    for name in psrl.__all__:
        assert getattr(psrl, name).__name__ == name
        assert re.search(rf"`{name}\b", documented), name
    assert set(psrl.__all__) <= set(dir(psrl))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'make_plans'"):
        psrl.make_plans  # noqa: B018


def test_names_load_no_more_than_they_need() -> None:
    code = (
        "import sys, psrl; psrl.load_trace, psrl.load_setup, psrl.check_plan.__doc__, psrl.compare"
    )
    check = f"{code}; assert not {{'torch', 'megatron'}} & sys.modules.keys()"
    light = "import sys, psrl; psrl.load_trace; assert 'ortools' not in sys.modules"
    for text in (check, light):
        done = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "examples" / "library.py")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for part in ("merged_dense", "placed and cut", "report.html", "gradients: differs by"):
        assert part in done.stdout
