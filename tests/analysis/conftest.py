"""A small comparison run, made by hand: two policies, two ranks of two stages, three phases."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psrl.core.cost.presets import DEVICES, MODELS
from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.run.events import EventLog, Events

GIB = 2**30

# (stage, op, micro_batch, start, end) in units that `make_events` scales to seconds.
FORWARDS = [
    (0, "forward", 0, 0, 1),
    (0, "forward", 1, 1, 2),
    (1, "forward", 0, 1, 2),
    (1, "forward", 1, 2, 3),
]
UPDATE = [
    (0, "forward", 0, 0, 1),
    (0, "forward", 1, 1, 2),
    (0, "backward", 0, 4, 6),
    (0, "backward", 1, 7, 9),
    (1, "forward", 0, 1, 2),
    (1, "backward", 0, 2, 4),
    (1, "forward", 1, 4, 5),
    (1, "backward", 1, 5, 7),
]


def make_events(scale_s: float, slow_rank: float, kv_gib: int) -> Events:
    """Rank 1 takes `slow_rank` times as long as rank 0; its stage 0 holds the most memory."""
    log = EventLog()
    for phase, ops in (("log_old_prob", FORWARDS), ("reference", FORWARDS), ("update", UPDATE)):
        for rank, slower in enumerate((1.0, slow_rank)):
            for stage, op, micro_batch, start, end in ops:
                held = 10 if (rank, stage, micro_batch) == (1, 0, 1) else 5
                memory = MemoryState(
                    static_bytes=40 * GIB,
                    activation_bytes=held * GIB,
                    logits_bytes=stage * GIB,
                    kv_bytes=kv_gib * GIB * micro_batch,
                    kv_gradient_bytes=kv_gib * GIB * (op == "backward"),
                )
                unit = scale_s * slower
                times = (start * unit, end * unit)
                log.add(phase, 0, rank, stage, op, micro_batch, 100, *times, memory)
        if phase == "update":
            end_s = 9 * scale_s * slow_rank
            for rank in range(2):
                idle = MemoryState(40 * GIB, 0, 0, 0, 0)
                log.add(phase, 0, rank, 0, "optimizer_step", -1, 0, end_s, end_s + scale_s, idle)
    return log.finish()


def phase(
    makespan_s: float, fastest_s: float, slowest_s: float, bubbles: float, tokens: int, kv_gib: int
) -> dict[str, Any]:
    return {
        "makespan_s": makespan_s,
        "worker_time_min_s": fastest_s,
        "worker_time_max_s": slowest_s,
        "worker_time_max_over_min": slowest_s / fastest_s,
        "bubble_fraction": bubbles,
        "executed_tokens": tokens,
        "peak_memory_bytes": (50 + kv_gib) * GIB,
        "peak_kv_bytes": kv_gib * GIB,
    }


def run_metrics(policy: str, phases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    makespan_s = sum(p["makespan_s"] for p in phases.values())
    return {
        "policy": policy,
        "num_samples": 8,
        "logical_tokens": 1_000_000,
        "unique_tokens": 250_000,
        "prefix_match_rate": 0.75,
        "executed_tokens": sum(p["executed_tokens"] for p in phases.values()),
        "makespan_s": makespan_s,
        "worker_time_min_s": sum(p["worker_time_min_s"] for p in phases.values()),
        "worker_time_max_s": sum(p["worker_time_max_s"] for p in phases.values()),
        "worker_time_max_over_min": 1.25,
        "bubble_fraction": 0.125,
        "logical_tokens_per_s": 3e6 / makespan_s,
        "unique_tokens_per_s": 7.5e5 / makespan_s,
        "peak_memory_bytes": max(p["peak_memory_bytes"] for p in phases.values()),
        "peak_kv_bytes": max(p["peak_kv_bytes"] for p in phases.values()),
        "lower_bound_s": None if policy == "verl" else 8.9,
        "gap": None if policy == "verl" else 0.0112,
        "phases": phases,
        "arithmetic": VERL_WORK if policy == "verl" else PSRL_WORK,
    }


# What the phases must compute: a quarter of the FLOPs, at rates that leave a third of the time.
VERL_WORK = {
    phase: {"flops": 4e15 * passes, "least_s": 3.0 * passes}
    for phase, passes in (("log_old_prob", 1), ("reference", 1), ("update", 3))
}
PSRL_WORK = {
    phase: {"flops": work["flops"] / 4, "least_s": work["least_s"] / 3}
    for phase, work in VERL_WORK.items()
}
VERL = {
    "log_old_prob": phase(4.0, 3.0, 4.0, 0.25, 1_000_000, 0),
    "reference": phase(4.0, 3.0, 4.0, 0.25, 1_000_000, 0),
    "update": phase(12.0, 9.0, 11.0, 0.2, 1_000_000, 0),
}
PSRL = {
    "log_old_prob": phase(2.0, 1.9, 2.0, 0.1, 300_000, 2),
    "reference": phase(2.0, 1.9, 2.0, 0.1, 300_000, 2),
    "update": phase(5.0, 4.5, 4.5, 0.08, 320_000, 4),
}
FORWARD_FACTORS = {"speedup": 2.0, "cuts": 1.0, "placement": 0.8, "sharing": 2.5}
PSRL_FACTORS = {
    "log_old_prob": FORWARD_FACTORS,
    "reference": FORWARD_FACTORS,
    "update": {"speedup": 2.4, "cuts": 1.2, "placement": 1.0, "sharing": 2.0},
}
SETUP = {
    "model": MODELS["qwen2.5-7b"].model_dump(),
    "cluster": {
        "device": DEVICES["a100-80"].model_dump(),
        "num_hosts": 1,
        "devices_per_host": 8,
        "intra_host_bytes_per_s": 300e9,
        "inter_host_bytes_per_s": 25e9,
        "intra_host_latency_s": 1e-5,
        "inter_host_latency_s": 2e-5,
    },
    "parallel": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "planning": {},
}
SHARING = {
    "traj": {
        "num_samples": 4,
        "logical_tokens": 400_000,
        "unique_tokens": 300_000,
        "prefix_match_rate": 0.25,
    },
    "step": {
        "num_samples": 8,
        "logical_tokens": 1_000_000,
        "unique_tokens": 250_000,
        "prefix_match_rate": 0.75,
    },
    "trace": {
        "path": "traces/two words",
        "content_hash": "abc123",
        "source": "hand <made>",
        "licence": "CC0",
        "sampling_mode": "step",
    },
}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    write_json(path, value)


@pytest.fixture
def comparison_run(tmp_path: Path) -> Path:
    """A comparison of `verl` and `psrl` that was only simulated."""
    run = tmp_path / "demo"
    write_json(run / "setup.json", SETUP)
    write_json(run / "sharing.json", SHARING)
    for policy, phases in (("psrl", PSRL), ("verl", VERL)):
        write_json(run / "policies" / policy / "metrics.json", run_metrics(policy, phases))
    write_json(run / "policies" / "psrl" / "factors.json", PSRL_FACTORS)
    make_events(1.0, 11 / 9, 0).save(run / "policies" / "verl" / "events.parquet")
    make_events(0.5, 1.0, 2).save(run / "policies" / "psrl" / "events.parquet")
    return run


@pytest.fixture
def executed_run(comparison_run: Path) -> Path:
    """The same with both policies executed: verl a tenth slower than simulated."""
    for policy, phases, slower in (("verl", VERL, 1.1), ("psrl", PSRL, 1.0)):
        measured = {
            name: entry | {"makespan_s": entry["makespan_s"] * slower}
            for name, entry in phases.items()
        }
        folder = comparison_run / "executed" / policy
        write_json(folder / "metrics.json", run_metrics(policy, measured) | {"loss": [0.5]})
    write_json(
        comparison_run / "exactness.json",
        [
            {"quantity": "logprob", "largest_relative_difference": 3e-7, "tolerance": 5e-6},
            {"quantity": "gradients", "largest_relative_difference": 1e-6, "tolerance": 5e-6},
        ],
    )
    return comparison_run
