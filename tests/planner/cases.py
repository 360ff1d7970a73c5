"""Set-ups and batches of the planner's tests."""

from dataclasses import replace

import numpy as np

from psrl.core.cost.cluster import ClusterSpec, DeviceSpec, ParallelConfig
from psrl.core.cost.presets import MODELS
from psrl.core.run.config import PlanningConfig, Setup
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.planner import PlanningProblem
from tests.random_plans import random_batch


def make_setup(
    data_parallel_size: int = 2,
    pipeline_model_parallel_size: int = 1,
    *,
    max_tokens: int = 16,
    memory_bytes: int = 2**40,
    recompute: str = "none",
    search_iterations: int = 40,
) -> Setup:
    """A tiny model on devices where tokens, pairs, predicted rows and launches all cost time."""
    device = DeviceSpec(
        name="toy",
        peak_flops_per_s=1e12,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=1e12,
        gemm_efficiency=0.5,
        attention_efficiency=0.05,
        host_layer_s=1e-6,
    )
    return Setup(
        model=MODELS["qwen2.5-tiny"],
        cluster=ClusterSpec(
            device=device,
            num_hosts=1,
            devices_per_host=data_parallel_size * pipeline_model_parallel_size,
            intra_host_bytes_per_s=1e11,
            inter_host_bytes_per_s=1e10,
            intra_host_latency_s=1e-6,
            inter_host_latency_s=1e-5,
        ),
        parallel=ParallelConfig(
            data_parallel_size=data_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            recompute=recompute,
        ),
        planning=PlanningConfig(
            max_tokens_per_micro_batch=max_tokens, search_iterations=search_iterations
        ),
    )


def problem_of(
    batch: SampleBatch, setup: Setup, phases: tuple[str, ...] = ("log_old_prob", "update")
) -> PlanningProblem:
    return PlanningProblem(batch, "0" * 64, 0, setup, phases)


def update_of(batch: SampleBatch, setup: Setup):
    """The only program of an update with one mini-batch."""
    (subproblem,) = problem_of(batch, setup, ("update",)).programs()
    return subproblem


def nasty_batch(
    seed: int, num_samples: int, num_mini_batches: int = 1, longest: int | None = None
) -> SampleBatch:
    """Random samples and an empty one, over several mini-batches.

    Samples repeat others, end inside others (in a segment or at a fork), continue or leave them;
    many have one token, some no rows.

    Args:
        longest: most tokens that one sample adds; None draws it, and sometimes one is a giant.
    """
    rng = np.random.default_rng(seed)
    has_giant = longest is None and rng.random() < 0.25
    longest = int(rng.choice([2, 8, 20])) if longest is None else longest
    batch = random_batch(
        rng, num_samples=num_samples, num_groups=3, max_new_tokens=longest, ending_inside=0.3
    )
    tokens = [batch.sample_symbols(s) for s in range(num_samples)]
    spans = [[tuple(span) for span in batch.sample_loss_spans(s)] for s in range(num_samples)]
    if has_giant:
        giant = int(rng.integers(num_samples))
        tokens[giant] = np.concatenate([tokens[giant], rng.integers(3, size=5 * longest)])
        spans[giant] = [(len(tokens[giant]) - longest, len(tokens[giant]))]
    at = int(rng.integers(num_samples + 1))
    tokens.insert(at, np.empty(0, np.int64))
    spans.insert(at, [])
    made = make_batch(tokens, spans)
    groups = rng.integers(3, size=num_samples + 1).astype(np.str_)
    mini_batch = rng.integers(num_mini_batches, size=num_samples + 1)
    return replace(made, group_id=groups, mini_batch=mini_batch)


def grouped_chains(rng: np.random.Generator, num_samples: int) -> SampleBatch:
    """Groups of similar size below one prompt: heads, their prefixes, continuations, duplicates."""
    longest = int(rng.choice([5, 12, 25]))
    common = [1] * int(rng.integers(0, longest))
    heads = [
        [*common, 100 + g, *[7] * int(rng.integers(1, longest + 1))]
        for g in range(rng.integers(2, 6))
    ]
    tokens: list[list[int]] = []
    for _ in range(num_samples):
        head, kind = heads[rng.integers(len(heads))], rng.random()
        if kind < 0.35:
            tokens.append(head)
        elif kind < 0.5:
            tokens.append(head[: rng.integers(1, len(head) + 1)])
        elif kind < 0.9 or not tokens:
            tokens.append([*head, *[int(rng.integers(20, 23))] * int(rng.integers(1, longest + 1))])
        else:
            tokens.append(tokens[rng.integers(len(tokens))])
    trained = [int(rng.integers(1, len(t) + 1)) if rng.random() < 0.5 else 1 for t in tokens]
    spans = [[(a, len(t))] if a < len(t) else [] for a, t in zip(trained, tokens, strict=True)]
    return make_batch(tokens, spans)


def tree_batch(nested: list) -> SampleBatch:
    """A batch of blocks from nested `(num_tokens, children)`; each leaf is a sample.

    The last node of a sample is trained, from its second token on.
    """
    lengths: list[int] = []
    samples: list[list[int]] = []
    spans: list[list[tuple[int, int]]] = []
    groups: list[str] = []

    def walk(nodes: list, path: list[int]) -> None:
        for num_tokens, children in nodes:
            lengths.append(num_tokens)
            here = [*path, len(lengths) - 1]
            if children:
                walk(children, here)
            else:
                depth = sum(lengths[b] for b in here)
                samples.append(here)
                spans.append([(depth - num_tokens + 1, depth)] if num_tokens > 1 else [])
                groups.append(str(here[0]))

    walk(nested, [])
    return make_batch(
        samples, spans, symbol_num_tokens=np.array(lengths, np.int64), group_id=groups
    )


def star(rng: np.random.Generator, num_groups: int, num_rollouts: int) -> list:
    """Prompts with independent answers."""
    return [
        (
            int(rng.integers(100, 300)),
            [(int(rng.integers(50, 400)), []) for _ in range(num_rollouts)],
        )
        for _ in range(num_groups)
    ]


def chains(rng: np.random.Generator, num_groups: int, num_rollouts: int, num_steps: int) -> list:
    """Prompts with rollouts of several turns; a side reply hangs off every turn."""

    def chain(steps: int) -> tuple[int, list]:
        side = (int(rng.integers(5, 40)), [])
        follow = [chain(steps - 1)] if steps > 1 else []
        return int(rng.integers(20, 120)), [side, *follow]

    return [
        (int(rng.integers(100, 300)), [chain(num_steps) for _ in range(num_rollouts)])
        for _ in range(num_groups)
    ]


def workloads() -> dict[str, SampleBatch]:
    """Seeded agentic workloads of different shape."""
    rng = np.random.default_rng(7)
    return {
        "stars": tree_batch(star(rng, 8, 6)),
        "chains": tree_batch(chains(rng, 4, 3, 5)),
        "singletons": tree_batch([(int(n), []) for n in rng.integers(20, 900, size=40)]),
        "one_group": tree_batch([(800, [(int(n), []) for n in rng.integers(50, 500, size=32)])]),
        "long_path": tree_batch([(5000, []), *star(rng, 5, 4)]),
    }


def make_moe_setup(
    data_parallel_size: int = 4,
    pipeline_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    **options: object,
) -> Setup:
    """As `make_setup`, with a mixture of experts spread over data-parallel ranks."""
    dense = make_setup(data_parallel_size, pipeline_model_parallel_size, **options)
    sizes = {"expert_model_parallel_size": expert_model_parallel_size}
    parallel = dense.parallel.model_copy(update=sizes)
    return dense.model_copy(update={"model": MODELS["qwen3-moe-tiny"], "parallel": parallel})
