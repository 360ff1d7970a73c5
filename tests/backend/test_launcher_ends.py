"""Ranks end with their launcher, whatever ends it, and leave what was complete before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from psrl.backend.io.new_directory import new_directory
from psrl.backend.launch import run_ranks
from psrl.core.files import write_file
from psrl.core.run.run_directory import RunDir

LIMIT_S = 120.0


def work(folder: Path, moment: str) -> None:
    """Reach a moment of an execution and stay there; rank 0 says that both have reached it."""
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    if moment == "checkpoint":
        with new_directory(folder / "checkpoints" / "iteration_2") as partial:
            (partial / f"rank{dist.get_rank()}").touch()
            stay(folder)
    elif moment == "reduction" and dist.get_rank() == 1:
        stay(folder)
    elif moment == "reduction":
        (folder / "reached").touch()
        dist.all_reduce(torch.ones(1))
    stay(folder)


def stay(folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "reached").touch()
    while True:
        torch.ones(8).sum()


def launch(folder: Path, moment: str) -> None:
    """What `psrl execute` does around its ranks."""
    with RunDir(folder / "run", "execute"):
        run_ranks(work, 2, folder, moment, timeout_s=600.0)


def wait_until(done: object, what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end_s, what
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


PROGRAM = """
import signal
import sys
from pathlib import Path
from psrl.cli.error_messages import prepare_process, report
from tests.backend.test_launcher_ends import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
prepare_process()
try:
    launch(Path(sys.argv[1]), sys.argv[2])
except BaseException as error:
    sys.exit(report(error))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("moment", ["forward", "reduction", "checkpoint"])
@pytest.mark.parametrize(
    ("sent", "to"),
    [
        (signal.SIGINT, "launcher"),
        (signal.SIGTERM, "launcher"),
        (signal.SIGKILL, "launcher"),
        (signal.SIGKILL, "rank"),
    ],
)
def test_nothing_outlives_the_launcher(
    tmp_path: Path, moment: str, sent: signal.Signals, to: str
) -> None:
    write_file(tmp_path / "checkpoints" / "iteration_1" / "checkpoint.json", "{}")
    root = Path(__file__).parents[2]
    program = f"import sys; sys.path.append({str(root)!r})\n{PROGRAM}"
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), moment],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        run_until_killed(launcher, tmp_path, sent, to)
    finally:
        launcher.kill()
        launcher.communicate()
    assert not (tmp_path / "run").exists()
    left = {p.name for p in (tmp_path / "checkpoints").iterdir() if not p.name.startswith(".")}
    assert left == {"iteration_1"}
    with RunDir(tmp_path / "run", "execute"):  # nothing holds the place, and leftovers go
        pass
    assert not list(tmp_path.glob(".psrl-*"))


def run_until_killed(
    launcher: subprocess.Popen[str], tmp_path: Path, sent: signal.Signals, to: str
) -> None:
    wait_until((tmp_path / "reached").exists, "ranks did not start")
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    assert all(is_alive(pid) for pid in pids)
    os.kill(launcher.pid if to == "launcher" else pids[1], sent)
    _, err = launcher.communicate(timeout=LIMIT_S)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "ranks outlive their launcher")
    if to == "rank":
        assert launcher.returncode == 1
        assert "rank 1 died without a message" in err
    else:
        assert launcher.returncode == {2: 130, 9: -9, 15: 143}[sent]
    assert "Traceback" not in err
