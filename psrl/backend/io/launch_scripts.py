"""Launch scripts that run a command on all processes of a plan: torchrun by hand, or Slurm."""

import shlex
from collections.abc import Sequence
from typing import Literal

from psrl.core.plan.plan import Plan

LaunchKind = Literal["torchrun", "sbatch"]

_ON_ONE_HOST = """\
#!/usr/bin/env bash
# {what}
set -euo pipefail
exec torchrun --standalone --nproc-per-node={per_host} --no-python \\
  {command}
"""

_ON_HOSTS = """\
#!/usr/bin/env bash
# {what}
# Start it on every host, with the same first host and numbers from 0 to {last_host}:
#   MASTER_ADDR=first-host NODE_RANK=0 bash {name}
set -euo pipefail
exec torchrun --nnodes={num_hosts} --nproc-per-node={per_host} \\
  --node-rank="${{NODE_RANK:?number of this host, 0 to {last_host}}}" \\
  --master-addr="${{MASTER_ADDR:?name of the first host}}" \\
  --master-port="${{MASTER_PORT:-29500}}" --no-python \\
  {command}
"""

_SBATCH = """\
#!/usr/bin/env bash
#SBATCH --job-name={job}
#SBATCH --nodes={num_hosts}
#SBATCH --ntasks-per-node=1
{resources}
# {what}
set -euo pipefail
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes={num_hosts} --nproc-per-node={per_host} \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_host:29500" \\
  --no-python \\
  {command}
"""


def launch_script(kind: LaunchKind, plan: Plan, command: Sequence[str], name: str) -> str:
    """Text of a bash script with one process per device of the plan's cluster.

    Devices of a host get consecutive ranks, so tensor-parallel groups stay inside a host.

    Args:
        command: program and arguments that every process runs.
        name: file name of the script.
    """
    cluster, parallel = plan.cluster, plan.parallel
    sizes = (
        f"tensor {parallel.tensor_model_parallel_size} x "
        f"pipeline {parallel.pipeline_model_parallel_size} x data {parallel.data_parallel_size}"
    )
    devices = f"{cluster.num_hosts} x {cluster.devices_per_host} {cluster.device.name}"
    values = {
        "what": f"psRL plan {plan.policy}, {plan.model.name}: {sizes} on {devices}.",
        "name": shlex.quote(name),
        "job": shlex.quote(f"psrl-{plan.policy}"),
        "num_hosts": cluster.num_hosts,
        "last_host": cluster.num_hosts - 1,
        "per_host": cluster.devices_per_host,
        "resources": _resources(plan),
        "command": shlex.join(command),
    }
    if kind == "sbatch":
        return _SBATCH.format(**values)
    return (_ON_ONE_HOST if cluster.num_hosts == 1 else _ON_HOSTS).format(**values)


def _resources(plan: Plan) -> str:
    count = plan.cluster.devices_per_host
    if plan.cluster.device.name.startswith("cpu"):
        return f"#SBATCH --cpus-per-task={count}"
    return f"#SBATCH --gpus-per-node={count}"
