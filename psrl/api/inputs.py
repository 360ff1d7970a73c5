"""Traces and set-ups from files, and the planning problem that they pose."""

import math
from collections.abc import Sequence
from pathlib import Path

from psrl.core.cost.cluster import check_layout
from psrl.core.errors import ConfigError
from psrl.core.plan.plan import Plan
from psrl.core.run import config
from psrl.core.run.config import Setup
from psrl.core.samples.trace import Trace, open_trace


def load_trace(path: str | Path) -> Trace:
    """Open a trace directory; its iterations are read when asked for.

    Raises:
        TraceError: if it is not a trace of this schema.
    """
    return open_trace(Path(path))


def load_setup(path: str | Path, overrides: Sequence[str] = ()) -> Setup:
    """Read a cluster file: model, cluster, parallel layout and planning budgets.

    Args:
        overrides: `table.key=value` texts, e.g. "parallel.data_parallel_size=4".

    Raises:
        ConfigError: naming file, key and what is allowed.
    """
    return config.load_setup(Path(path), tuple(overrides))


def load_plan(path: str | Path) -> Plan:
    """Read a plan directory; `check_plan` says whether it is sound.

    Raises:
        PlanError: if it is not a plan of this schema.
    """
    return Plan.load(Path(path))


def on_hosts(setup: Setup, num_hosts: int) -> Setup:
    """The set-up on another number of hosts, with the data-parallel size in proportion.

    Raises:
        ConfigError: if that size is not whole.
    """
    before, data = setup.cluster.num_hosts, setup.parallel.data_parallel_size
    if num_hosts < 1 or data * num_hosts % before:
        raise ConfigError(
            f"{num_hosts} hosts: data_parallel_size {data} * {num_hosts} / {before} is not a "
            "positive whole number",
            f"choose multiples of {before // math.gcd(before, data)} hosts",
        )
    cluster = setup.cluster.model_copy(update={"num_hosts": num_hosts})
    size = {"data_parallel_size": data * num_hosts // before}
    parallel = setup.parallel.model_copy(update=size)
    check_layout(setup.model, cluster, parallel)
    return setup.model_copy(update={"cluster": cluster, "parallel": parallel})
