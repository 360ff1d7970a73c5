"""The house rules that no other tool checks: links, slim imports, no shadowed package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

IMPORT_AND_REPORT = """
import importlib, pkgutil, sys

forbidden = {"torch", "triton", "megatron"}
for room in sys.argv[1:]:
    package = importlib.import_module(room)
    inner = pkgutil.walk_packages(getattr(package, "__path__", []), room + ".")
    for name in [room, *(info.name for info in inner)]:
        importlib.import_module(name)
        loaded = sorted(forbidden & sys.modules.keys())
        if loaded:
            sys.exit(f"importing {name} loads {loaded}")
"""


def run_python(*args: str, safe_path: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter at the repository root, with or without PYTHONSAFEPATH."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if safe_path:
        env["PYTHONSAFEPATH"] = "1"
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["analysis", "kernels", "planner", "sim", "traces"])
def test_root_link_points_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"psrl/{name}"
    assert (link / "__init__.py").is_file()


@pytest.mark.slow
def test_rooms_without_a_gpu_import_no_gpu_stack() -> None:
    rooms = ["core", "traces", "sim", "planner", "analysis", "api", "paper", "cli"]
    result = run_python("-c", IMPORT_AND_REPORT, *(f"psrl.{room}" for room in rooms))
    assert result.returncode == 0, result.stderr


def test_top_package_imports_no_dependency() -> None:
    code = "import sys, psrl; print(sorted({'numpy', 'pydantic', 'pyarrow'} & sys.modules.keys()))"
    result = run_python("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


def find_kernels(*, safe_path: bool) -> Path | None:
    """Return where `import kernels` would find its code, None where it would find nothing."""
    code = (
        "import importlib.util as util; spec = util.find_spec('kernels'); "
        "print(spec.origin if spec else '', end='')"
    )
    result = run_python("-c", code, safe_path=safe_path)
    assert result.returncode == 0, result.stderr
    return Path(result.stdout).resolve() if result.stdout else None


def test_kernels_link_hides_no_installed_package() -> None:
    ours = ROOT / "psrl" / "kernels" / "__init__.py"
    # Without the guard the link wins: this shows that the check below can fail.
    assert find_kernels(safe_path=False) == ours
    assert find_kernels(safe_path=True) != ours
