"""Ranks start, report, and end, also when one of them fails."""

import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from psrl.backend.io.launch_scripts import LaunchKind, launch_script
from psrl.backend.launch import run_ranks
from psrl.cli import main
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError, PlanError
from tests.backend.test_execute import make_plan, make_trace


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
    results = run_ranks(add_up, 2, 5)
    assert [rank for rank, _ in results] == [0, 1]
    assert [int(total) for _, total in results] == [11, 11]


def test_a_users_error_arrives_as_it_is_and_stops_the_others() -> None:
    with pytest.raises(PlanError, match="the plan is wrong") as caught:
        run_ranks(fail_on_rank_one, 2, PlanError("the plan is wrong", "fix it"))
    assert caught.value.hint == "fix it"
    assert not multiprocessing.active_children()


def test_any_other_error_arrives_with_its_traceback() -> None:
    with pytest.raises(BackendError, match=r"(?s)rank 1 failed.*fail_on_rank_one.*ZeroDivision"):
        run_ranks(fail_on_rank_one, 2, ZeroDivisionError("no"))


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(BackendError, match="rank 1 died"):
        run_ranks(die_on_rank_one, 2)


@pytest.mark.slow
def test_a_hang_ends_at_the_timeout() -> None:
    with pytest.raises(BackendError, match=r"ranks \[0, 1\] did not finish within 1 s"):
        run_ranks(wait_for_each_other, 2, timeout_s=1.0)


def test_torchrun_must_match_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BackendError, match="torchrun started 4 processes, the plan needs 2"):
        run_ranks(add_up, 2, 5)


TORCHRUN_SCRIPT = """
import pytest, torch, torch.distributed as dist
from psrl.backend.launch import is_first_process, run_ranks
from psrl.core.errors import BackendError

def add_up(value):
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return int(total)

results = [run_ranks(add_up, 2, value)[0] for value in (5, 7, 7)]
with pytest.raises(BackendError, match="2 processes, the plan needs 3"):
    run_ranks(add_up, 3, 5)
if is_first_process():
    print("results", results)
"""


@pytest.mark.slow
def test_torchrun_ranks_are_joined_and_run_several_times(tmp_path: Path) -> None:
    done = torchrun(tmp_path, TORCHRUN_SCRIPT)
    assert done.stdout.strip() == "results [11, 15, 15]", done.stderr


def torchrun(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = directory / "ranks.py"
    path.write_text(script)
    command = ["torch.distributed.run", "--nproc_per_node=2", "--standalone", str(path)]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", *command], env=env, capture_output=True, text=True, check=False
    )


EXECUTIONS_SCRIPT = """
import sys
from pathlib import Path
from psrl.backend.launch import is_first_process
from psrl.backend.io.output import execute_to_directory
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.samples.trace import open_trace
from tests.backend.test_execute import OPTIONS, make_plan

trace = open_trace(Path(%r))
losses = []
for parallel in (
    ParallelConfig(data_parallel_size=2),
    ParallelConfig(tensor_model_parallel_size=2),
    ParallelConfig(data_parallel_size=2),
):
    directory = Path(%r) / str(len(losses))
    directory.mkdir(exist_ok=True)
    metrics = execute_to_directory(make_plan(trace, parallel), trace, OPTIONS, directory)
    losses.append(metrics.get("loss"))
if is_first_process():
    print(losses[0] == losses[2], max(abs(a - b) for a, b in zip(*losses[:2])) <= 2e-5)
"""


@pytest.mark.slow
def test_several_executions_share_one_torchrun(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace")
    done = torchrun(tmp_path, EXECUTIONS_SCRIPT % (str(trace.path), str(tmp_path)))
    assert done.stdout.strip().endswith("True True"), done.stderr


TORCHRUN = """\
#!/usr/bin/env bash
# psRL plan random, tiny: tensor 2 x pipeline 3 x data 1 on 1 x 6 test.
set -euo pipefail
exec torchrun --standalone --nproc-per-node=6 --no-python \\
  psrl execute 'my plan'
"""

TORCHRUN_ON_HOSTS = """\
#!/usr/bin/env bash
# psRL plan random, tiny: tensor 2 x pipeline 3 x data 1 on 3 x 2 test.
# Start it on every host, with the same first host and numbers from 0 to 2:
#   MASTER_ADDR=first-host NODE_RANK=0 bash run.sh
set -euo pipefail
exec torchrun --nnodes=3 --nproc-per-node=2 \\
  --node-rank="${NODE_RANK:?number of this host, 0 to 2}" \\
  --master-addr="${MASTER_ADDR:?name of the first host}" \\
  --master-port="${MASTER_PORT:-29500}" --no-python \\
  psrl execute 'my plan'
"""

SBATCH = """\
#!/usr/bin/env bash
#SBATCH --job-name=psrl-random
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
# psRL plan random, tiny: tensor 2 x pipeline 3 x data 1 on 3 x 2 test.
set -euo pipefail
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=3 --nproc-per-node=2 \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_host:29500" \\
  --no-python \\
  psrl execute 'my plan'
"""


@pytest.mark.parametrize(
    ("kind", "num_hosts", "expected"),
    [("torchrun", 1, TORCHRUN), ("torchrun", 3, TORCHRUN_ON_HOSTS), ("sbatch", 3, SBATCH)],
)
def test_launch_scripts(tmp_path: Path, kind: LaunchKind, num_hosts: int, expected: str) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    plan = make_plan(make_trace(tmp_path / "trace"), parallel)
    hosts = {"num_hosts": num_hosts, "devices_per_host": 6 // num_hosts}
    plan = replace(plan, cluster=plan.cluster.model_copy(update=hosts))
    script = launch_script(kind, plan, ["psrl", "execute", "my plan"], "run.sh")
    assert script == expected
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cpu_cluster_asks_slurm_for_no_gpus(tmp_path: Path) -> None:
    plan = make_plan(make_trace(tmp_path / "trace"))
    device = plan.cluster.device.model_copy(update={"name": "cpu-core"})
    plan = replace(plan, cluster=plan.cluster.model_copy(update={"device": device}))
    script = launch_script("sbatch", plan, ["psrl"], "run.sh")
    assert "#SBATCH --cpus-per-task=1\n" in script
    assert "gpu" not in script


def test_the_command_writes_a_script_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = make_trace(tmp_path / "trace")
    make_plan(trace).save(tmp_path / "plan")
    arguments = ["execute", str(tmp_path / "plan"), "--trace", str(trace.path)]
    arguments += ["--run-dir", str(tmp_path / "runs" / "one"), "--emit", "torchrun"]
    arguments += ["--kl-coefficient", "0.5", "--keep-gradients"]
    assert main(arguments) == 0
    assert "one.sh" in capsys.readouterr().out
    script = (tmp_path / "runs" / "one.sh").read_text()
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["one.sh"]
    assert f"psrl execute {tmp_path}/plan --trace {trace.path}" in script
    assert f"--run-dir {tmp_path}/runs/one --kl-coefficient 0.5 --keep-gradients\n" in script
    assert main(arguments) == 2
    assert "one.sh exists already" in capsys.readouterr().err
    assert main([*arguments, "--if-exists", "overwrite"]) == 0
