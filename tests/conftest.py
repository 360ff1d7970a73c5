"""Settings shared by all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Without a GPU, Triton kernels run in its interpreter: decided once, when Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Examples are the same on every run and have no deadline: cores are shared, and a test that
# fails must fail again.
settings.register_profile("psrl", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("psrl")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    if item.get_closest_marker("gpu") is None:
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
