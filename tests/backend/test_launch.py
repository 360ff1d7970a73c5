"""Ranks start, report, and end, also when one of them fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from psrl.backend.launch import run_ranks
from psrl.core.errors import BackendError, PlanError

LIMIT_S = 60.0


def add_up(value: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_rank_one(error: Exception) -> None:
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise SystemExit(3)
    dist.barrier()


def wait_for_each_other() -> None:
    dist.recv(torch.empty(1), src=1 - dist.get_rank())


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(add_up, 2, 5, timeout_s=LIMIT_S)
    assert [rank for rank, _ in results] == [0, 1]
    assert [int(total) for _, total in results] == [11, 11]


def test_a_users_error_arrives_as_it_is_and_stops_the_others() -> None:
    start_s = time.monotonic()
    with pytest.raises(PlanError, match="the plan is wrong") as caught:
        run_ranks(fail_on_rank_one, 2, PlanError("the plan is wrong", "fix it"), timeout_s=LIMIT_S)
    assert caught.value.hint == "fix it"
    assert time.monotonic() - start_s < LIMIT_S


def test_any_other_error_arrives_with_its_traceback() -> None:
    with pytest.raises(BackendError, match=r"(?s)rank 1 failed.*fail_on_rank_one.*ZeroDivision"):
        run_ranks(fail_on_rank_one, 2, ZeroDivisionError("no"), timeout_s=LIMIT_S)


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(BackendError, match="rank 1 died"):
        run_ranks(die_on_rank_one, 2, timeout_s=LIMIT_S)


def test_a_hang_ends_at_the_timeout() -> None:
    with pytest.raises(BackendError, match=r"ranks \[0, 1\] did not finish within 1 s"):
        run_ranks(wait_for_each_other, 2, timeout_s=1.0)


def test_torchrun_must_match_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BackendError, match="torchrun started 4 processes, the plan needs 2"):
        run_ranks(add_up, 2, 5)


TORCHRUN_SCRIPT = """
import torch, torch.distributed as dist
from psrl.backend.launch import is_first_process, run_ranks

def add_up(value):
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return int(total)

results = run_ranks(add_up, 2, 5, timeout_s=60)
if is_first_process():
    print("results", results)
"""


@pytest.mark.slow
def test_torchrun_ranks_are_joined(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = ["torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "results [11]", done.stderr
