"""Run benchmarks, print their tables and keep the results.

    python -m benchmarks.run [NAME ...]

Each benchmark is a module of this package with a function `measure() -> list[Measurement]`.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from psrl.core.run.run_directory import environment_versions, finite

from .measurement import Measurement

BENCHMARKS = {
    "backend": "prefix-shared against dense execution on a CPU",
    "cost_model": "held-out errors on public measurements",
    "executed": "predicted against measured time of executed plans",
    "planner": "gaps to proven bounds, balance, and psRL against all policies",
    "policies": "psRL against all policies on many shapes, and token cuts against node cuts",
    "simulator": "speed and memory on 12,288 GPUs",
    "traces": "prefix trees and statistics of traces",
}
OTHER_ENVIRONMENT = {
    "verl": "micro-batching against veRL's; in the environment of `make test-verl`",
}
RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "versions": environment_versions(),
        "commit": commit.stdout.strip() or None,
    }


def table(measurements: list[Measurement]) -> str:
    """One line per measurement, with its bar and whether it is met."""
    lines = [f"{'what':<62}{'measured':>14}  {'unit':<12}{'bar':>12}  met"]
    for m in measurements:
        bar = "-" if m.bar is None else f"{'>=' if m.more_is_better else '<='} {m.bar:g}"
        met = {None: "-", True: "yes", False: "NO"}[m.met]
        lines.append(f"{m.what:<62}{m.value:>14,.4g}  {m.unit:<12}{bar:>12}  {met}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = BENCHMARKS | OTHER_ENVIRONMENT
    listed = "; ".join(f"{name}: {what}" for name, what in known.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all; {listed}")
    names = parser.parse_args(arguments).names or list(BENCHMARKS)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]}; known are {', '.join(known)}")
    failed = False
    for name in names:
        surroundings = environment()
        measurements = importlib.import_module(f"benchmarks.{name}").measure()
        print(f"{name}: {known[name]}\n{table(measurements)}\n", flush=True)
        result = {
            **surroundings,
            "measurements": [{**asdict(m), "met": m.met} for m in measurements],
        }
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(finite(result), indent=1, allow_nan=False)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        failed |= any(m.met is False for m in measurements)
    return 1 if failed else 0


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
