"""No traceback for what the system does to a command, and nothing but results on stdout."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from psrl.cli import commands, main
from psrl.cli.error_messages import CLOSED_PIPE, INTERRUPTED, TERMINATED, Terminated
from psrl.cli.output import OutputOptions
from psrl.core.errors import ExitCode, PlanError
from psrl.core.samples.trace import open_trace

Capture = pytest.CaptureFixture[str]
TRACE = Path(__file__).parents[2] / "examples" / "traces" / "tau_bench_airline"
STATS = ["trace", "stats", str(TRACE)]


def run_cli(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    program = "import sys; from psrl.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "", "/x/y"), ExitCode.FAILED, ["cannot write /x/y", "MiB free"]),
        (OSError(errno.EDQUOT, "", "y"), ExitCode.FAILED, ["cannot write y", "quota"]),
        (OSError(errno.EROFS, "", "/x"), ExitCode.BAD_INPUT, ["/x", "read-only"]),
        (OSError(errno.EACCES, "", "/x"), ExitCode.BAD_INPUT, ["/x", "permission"]),
        (OSError(errno.ENAMETOOLONG, "", "/x"), ExitCode.BAD_INPUT, ["/x", "too long"]),
        (OSError(errno.EIO, "bad disk", "/x"), ExitCode.FAILED, ["/x: bad disk"]),
        (OSError("no number"), ExitCode.FAILED, ["no number"]),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ExitCode.FAILED, ["Broken pipe"]),
        (MemoryError("12 GiB"), ExitCode.FAILED, ["memory of this host", "12 GiB"]),
        (KeyboardInterrupt(), INTERRUPTED, ["interrupted; nothing half-written"]),
        (Terminated(), TERMINATED, ["terminated; nothing half-written"]),
        (SystemExit(0), ExitCode.FAILED, ["ended by a call of exit(0)"]),
        (PlanError("wrong", "right"), ExitCode.BAD_INPUT, ["wrong\n  -> right"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_stops_a_command_is_a_message(
    error: BaseException,
    code: int,
    words: list[str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: OutputOptions, *__: object) -> None:
        raise error

    monkeypatch.setattr(OutputOptions, "emit", fail)
    assert main(STATS) == code
    shown = capsys.readouterr()
    assert not shown.out
    assert all(word in shown.err for word in words), shown.err


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(commands, "_finish", fail)
    with pytest.raises(ZeroDivisionError):
        main(STATS)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [STATS, ["--help"], ["trace", "--help"], ["--version"]])
@pytest.mark.parametrize("kind", ["closed pipe", "full", "closed"])
def test_an_output_that_cannot_be_written(arguments: list[str], kind: str) -> None:
    if kind == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
        done = run_cli(*arguments, stdout=writer)
        os.close(writer)
        assert done.returncode == CLOSED_PIPE
    elif kind == "full":
        with open("/dev/full", "w") as full:
            done = run_cli(*arguments, stdout=full)
        assert done.returncode == ExitCode.FAILED
        assert "cannot write standard output: no space left" in done.stderr
    else:
        done = run_cli(*arguments, preexec_fn=lambda: os.close(1))
        assert done.returncode == ExitCode.OK
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_only_the_result_is_on_stdout(tmp_path: Path) -> None:
    """A policy prints, by Python and on the file descriptor, as compiled solvers do."""
    policy = tmp_path / "loud.py"
    policy.write_text(
        "import os\nimport numpy as np\ndef place(problem):\n    print('chatter')\n"
        "    os.write(1, b'more chatter')\n"
        "    return np.arange(problem.samples.num_samples) % problem.problem.num_ranks\n"
    )
    cluster = TRACE.parents[1] / "clusters" / "8xh100.toml"
    arguments = ["--trace", str(TRACE), "--cluster", str(cluster), "--out", str(tmp_path / "plan")]
    done = run_cli(
        "plan", *arguments, "--policy", f"{policy}:place", "--json", stdout=subprocess.PIPE
    )
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout.startswith("{")
    assert done.stdout.count("\n") == 1
    assert "chatter" in done.stderr
    policy.write_text("def place(problem):\n    raise SystemExit(0)\n")
    done = run_cli("plan", *arguments, "--if-exists", "overwrite", "--policy", f"{policy}:place")
    assert done.returncode == ExitCode.FAILED
    assert "ended by a call of exit(0)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)]
)
def test_signals_at_any_moment_leave_nothing(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    # A background job would have SIGINT ignored.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from psrl.cli import main; sys.exit(main())"
    )
    for tenths in range(1, 25, 2):
        out = tmp_path / f"run{tenths}"
        synth = ["trace", "synth", "--preset", "alfworld", "--mode", "step", "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *synth], stderr=subprocess.PIPE, text=True
        )
        time.sleep(tenths / 10)
        process.send_signal(sent)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (0, code, -sent), err
        assert out.exists() or process.returncode != 0
        if out.exists():  # the signal may come between its publication and the end
            assert open_trace(out).iteration(0).num_samples > 0
        assert "Traceback" not in err or process.returncode == -sent or "site.py" in err, err
        assert all(p.name.startswith("run") for p in tmp_path.iterdir())
