"""Micro-batching of 8,192 samples: psRL's plan against veRL's `rearrange_micro_batches`.

Runs in the environment of `make test-verl`.
"""

import os
import time

import numpy as np
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "psrl.integrations.verl.cpu_platform")

from tensordict import TensorDict
from verl.utils.seqlen_balancing import rearrange_micro_batches

from psrl.backend.train.pipe import SINGLE_STAGE
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.cost.presets import MODELS
from psrl.integrations.verl.batch.planning import BatchPlanner
from psrl.integrations.verl.batch.samples import whole_samples
from psrl.integrations.verl.settings.options import make_setup, parse_options

from .measurement import Measurement

NUM_GROUPS, NUM_ROLLOUTS = 1024, 8
MAX_TOKENS = 16_384


def measure() -> list[Measurement]:
    batch = grouped()
    started_s = time.process_time()
    micro_batches, _ = rearrange_micro_batches(batch, MAX_TOKENS)
    verl_s = time.process_time() - started_s
    times_s = {}
    for phase in ("forward", "update"):
        started_s = time.process_time()
        samples = whole_samples(batch)
        planned, _ = planner().plan(samples, phase == "update", MAX_TOKENS)
        times_s[phase] = time.process_time() - started_s
    slowest_s = max(times_s.values())
    count = f"{len(batch):,} samples"
    return [
        Measurement(f"{count}, veRL's micro-batches", len(micro_batches), ""),
        Measurement(f"{count}, veRL's micro-batching: CPU time", verl_s, "s"),
        Measurement(f"{count}, psRL, forward only: CPU time", times_s["forward"], "s"),
        Measurement(f"{count}, psRL, update: CPU time", times_s["update"], "s"),
        Measurement(f"{count}, veRL's time / psRL's slowest", verl_s / slowest_s, "x", 50),
        Measurement(f"{count}, tokens that are shared", 100 * planned.prefix_match_rate, "%"),
    ]


def grouped() -> TensorDict:
    """Prompts of about 600 tokens with 8 answers each of about 500."""
    rng = np.random.default_rng(0)
    rows: dict[str, list[torch.Tensor]] = {"prompts": [], "responses": [], "input_ids": []}
    for _ in range(NUM_GROUPS):
        prompt = torch.from_numpy(rng.integers(0, 150_000, rng.integers(200, 1000)))
        for _ in range(NUM_ROLLOUTS):
            length = int(np.clip(rng.lognormal(6.0, 0.6), 2, 8000))
            response = torch.from_numpy(rng.integers(0, 150_000, length))
            rows["prompts"].append(prompt)
            rows["responses"].append(response)
            rows["input_ids"].append(torch.cat([prompt, response]))
    rows["response_mask"] = [torch.ones_like(row) for row in rows["responses"]]
    fields = {
        name: torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
        for name, tensors in rows.items()
    }
    return TensorDict(fields, batch_size=[NUM_GROUPS * NUM_ROLLOUTS])


def planner() -> BatchPlanner:
    """One rank, as veRL micro-batches the samples of one rank."""
    parallel = ParallelConfig(recompute="full")
    options = parse_options({"device": "h200-141"})
    setup = make_setup(options, MODELS["qwen2.5-1.5b"], parallel, torch.bfloat16)
    return BatchPlanner(setup, options.policy, 0, SINGLE_STAGE, torch.device("cpu"))
