"""Errors of shared execution against every sample alone: the table of docs/exactness.md.

Every layout runs with every recompute mode and every kind of cut, on random batches with forks,
duplicates and cached prefixes. Write the page again with

    PYTHONSAFEPATH= python -m tests.backend.exactness_table docs/exactness.md
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import count, product
from pathlib import Path

import numpy as np
import torch

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.train.inputs import LossTokens
from psrl.backend.train.stage import PhaseInputs
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.plan.check_ops import check_op_patterns
from psrl.core.plan.plan import Program
from tests.backend.cases import (
    ACTIVATIONS,
    PPO,
    TINY,
    VARIANTS,
    Case,
    Outcome,
    relative_error,
    relative_l2,
    run_case,
    run_samples_alone,
)
from tests.backend.test_execute import OPTIONS, execute, make_plan, make_trace
from tests.backend.test_moe import MOE, ROUTER, one_pattern
from tests.backend.test_moe import run_alone as run_experts_alone
from tests.random_plans import random_batch, random_program

ONE = ParallelConfig()
TP2 = ParallelConfig(tensor_model_parallel_size=2)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
DP2 = ParallelConfig(data_parallel_size=2)
EP2 = DP2.model_copy(update={"expert_model_parallel_size": 2})
SLICED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "TP2": TP2,
    "TP2 + SP": ONE.model_copy(update=SLICED),
    "PP2": PP2,
    "PP4": ParallelConfig(pipeline_model_parallel_size=4),
    "DP2": DP2,
    "DP2 x PP2": PP2.model_copy(update={"data_parallel_size": 2}),
    "TP2 x PP2": PP2.model_copy(update={"tensor_model_parallel_size": 2}),
    "EP2": EP2,
    "TP2 x EP2 + SP": EP2.model_copy(update=SLICED),
}
RECOMPUTE = ("off", "full", "ancestors", "ancestors dropped")
CUTS = {"1 token": (10**6, 10**6), "several": (3, 8), "whole batch": (1, 1)}
"""Fewest and most micro-batches of a rank."""
SEEDS = range(2)
INIT_STD = 0.1
"""Standard deviation of the random weights."""


def make_case(parallel: ParallelConfig, recompute: str, cut: str, seed: int) -> Case:
    """A case with shared prefixes; ranks that share experts run one op pattern."""
    num_ranks = parallel.data_parallel_size
    fewest, most = CUTS[cut]
    has_experts = parallel.expert_model_parallel_size > 1
    for attempt in count():
        # Recomputing repeats every bit, so each mode gets batches of its own.
        rng = np.random.default_rng([seed, RECOMPUTE.index(recompute), attempt])
        batch = random_batch(
            rng,
            num_samples=6 + 3 * num_ranks,
            max_new_tokens=6,
            num_groups=3,
            vocab_size=(3, 20)[seed % 2],
        )
        planned = random_program(
            rng, batch, num_ranks=num_ranks, min_micro_batches=fewest, max_micro_batches=most
        )
        table = planned.program.micro_batches
        sizes = np.bincount(table.rank, minlength=num_ranks)
        if batch.loss_tokens and (not has_experts or len(np.unique(sizes)) == 1):
            break
    program = with_recompute(planned.program, recompute, has_experts)
    program = one_pattern(program, num_ranks) if has_experts else with_drop_ops(program)
    check_op_patterns(0, program, parallel)
    known = len(LossTokens(batch))
    inputs = PhaseInputs(rng.uniform(-5, -3, known), rng.uniform(-5, -3, known))
    spec = MOE if has_experts else VARIANTS[seed % 2].model_copy(update={"num_layers": 4})
    return Case(replace(planned, program=program), spec, inputs, PPO, init_std=INIT_STD)


def with_recompute(program: Program, recompute: str, on_any_rank: bool) -> Program:
    """The program with an activation mode for all micro-batches, or for those that others read.

    Args:
        on_any_rank: a micro-batch counts as read if it is on any rank.
    """
    table = program.micro_batches
    is_read = np.zeros(len(table), np.bool_)
    for rank, owner in set(zip(program.blocks.rank, program.blocks.micro_batch, strict=True)):
        is_read |= (table.micro_batch == owner) & (on_any_rank | (table.rank == rank))
    activation = {
        "off": np.full(len(table), "keep"),
        "full": np.full(len(table), "recompute"),
        "ancestors": np.where(is_read, "recompute", "keep"),
        "ancestors dropped": np.where(is_read, "drop", "keep"),
    }[recompute]
    return replace(program, micro_batches=replace(table, activation=activation))


def with_drop_ops(program: Program) -> Program:
    """The program with a recompute op before the backward of every dropped micro-batch."""
    table, schedule = program.micro_batches, program.schedule
    dropped = {
        (rank, m)
        for rank, m, a in zip(table.rank, table.micro_batch, table.activation, strict=True)
        if a == "drop"
    }
    rows = []
    for rank, op, m in zip(schedule.rank, schedule.op, schedule.micro_batch, strict=True):
        if op == "backward" and (rank, m) in dropped:
            rows.append((rank, "recompute", m))
        rows.append((rank, op, m))
    rank, op, micro_batch = map(np.array, zip(*rows, strict=True))
    return replace(program, schedule=replace(schedule, rank=rank, op=op, micro_batch=micro_batch))


def alone(cases: Sequence[Case], dtype: torch.dtype) -> list[Outcome]:
    """Every sample of the cases by itself."""
    with model_parallel(ONE):
        return [run_samples_alone(case, dtype) for case in cases]


def shared(cases: Sequence[Case], dtype: torch.dtype, parallel: ParallelConfig) -> list[Outcome]:
    """The cases on this process group."""
    router = ROUTER if parallel.expert_model_parallel_size > 1 else None
    sliced = parallel.sequence_parallel
    with model_parallel(parallel) as pipeline:
        outcomes = [
            run_case(case, dtype, pipeline=pipeline, router=router, sequence_parallel=sliced)
            for case in cases
        ]
    return [replace(outcome, events=None) for outcome in outcomes]


@dataclass(frozen=True)
class Row:
    """Largest errors of one layout and recompute mode, over processes and seeds.

    Attributes:
        gradient: by cut, relative L2 error of all gradients together.
        worst_parameter: relative L2 error of the worst parameter's gradient.
        loss: relative, or absolute where the loss is less than 1.
        logprob: relative L2 error of the logprobs of all samples.
    """

    layout: str
    recompute: str
    gradient: dict[str, float]
    worst_parameter: float
    loss: float
    logprob: float

    @property
    def cells(self) -> tuple[str | float, ...]:
        errors = (*self.gradient.values(), self.worst_parameter, self.loss, self.logprob)
        return (self.layout, self.recompute, *errors)

    @property
    def largest(self) -> float:
        return max(*self.gradient.values(), self.worst_parameter, self.loss, self.logprob)


def measure(name: str, parallel: ParallelConfig, dtype: torch.dtype = torch.float32) -> list[Row]:
    """Rows of one layout; its processes are started once."""
    keys = list(product(RECOMPUTE, CUTS, SEEDS))
    cases = [make_case(parallel, *key) for key in keys]
    experts = parallel.expert_model_parallel_size > 1
    arguments = (
        (run_experts_alone, 1, cases, dtype, ROUTER) if experts else (alone, 1, cases, dtype)
    )
    wanted = run_ranks(*arguments)[0]
    found = run_ranks(shared, parallel.world_size, cases, dtype, parallel)
    rows = []
    for recompute in RECOMPUTE:
        errors: dict[str, list[dict[str, float]]] = {cut: [] for cut in CUTS}
        for outcomes in found:
            for (mode, cut, _), f, w in zip(keys, outcomes, wanted, strict=True):
                if mode == recompute:
                    logprob = relative_l2(f.logprobs, w.logprobs)
                    errors[cut].append(relative_error(f, w) | {"logprob": logprob})
        every = [error for cut in errors.values() for error in cut]
        rows.append(
            Row(
                name,
                recompute,
                {cut: max(e["gradient"] for e in errors[cut]) for cut in CUTS},
                max(e["worst_gradient"] for e in every),
                max(e["loss"] for e in every),
                max(e["logprob"] for e in every),
            )
        )
    return rows


def ten_cuts(parallel: ParallelConfig) -> tuple[float, float]:
    """Largest difference of loss and gradient norm between ten cuts of one batch, float32.

    The loss relative to 1 where it is less, because its terms cancel.
    """
    first = make_case(parallel, "off", "several", 1)
    num_ranks = parallel.data_parallel_size
    cases: list[Case] = []
    for seed in count():
        planned = random_program(
            np.random.default_rng(seed),
            first.planned.batch,
            num_ranks=num_ranks,
            activations=ACTIVATIONS,
        )
        if parallel.expert_model_parallel_size > 1:
            if len(set(np.bincount(planned.program.micro_batches.rank))) > 1:
                continue
            planned = replace(planned, program=one_pattern(planned.program, num_ranks))
        cases.append(replace(first, planned=planned))
        if len(cases) == 10:
            break
    world = parallel.world_size
    outcomes = run_ranks(shared, world, cases, torch.float32, parallel)[0]
    results = np.array([(o.loss, gradient_norm(o)) for o in outcomes])
    assert len(np.unique(results[:, 1])) > 1, "the cuts are all the same"
    loss, norm = np.ptp(results, axis=0) / np.maximum(np.abs(results[0]), (1.0, 0.0))
    return float(loss), float(norm)


def gradient_norm(outcome: Outcome) -> float:
    return sum(float(g.double().square().sum()) for g in outcome.gradients.values()) ** 0.5


def on_policy_deviation(parallel: ParallelConfig) -> float:
    """Largest |update probability / old probability - 1| before the first step, float32.

    Log-old-prob and update are cut into different micro-batches.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = make_trace(Path(folder) / "trace")
        model = TINY.model_copy(update={"num_layers": 4})
        options = replace(OPTIONS, init_std=INIT_STD)
        execution = execute(make_plan(trace, parallel, model), trace, options)
        is_first = trace.iteration(0).mini_batch[execution.loss_tokens.sample] == 0
    shift = (execution.logprob - execution.old_logprob)[is_first]
    return float(np.abs(np.expm1(shift)).max())


PAGE = """\
# Exactness

Shared execution beside every sample by itself: the same model, weights and batch through
Megatron-core {megatron} on CPU and gloo. Written by

    PYTHONSAFEPATH= python -m tests.backend.exactness_table docs/exactness.md

and held by `tests/backend/test_exactness_table.py`. Batches are random, with forks inside and
between samples, duplicates, samples that end inside others, and micro-batches cut at any token;
the loss is clipped PPO with a KL penalty, with EP also the router losses. The models have four
layers (two with experts) and random weights of standard deviation 0.1.

## Errors in float32

Relative L2 error of the gradient of all parameters together, for micro-batches of one token, for
three to eight micro-batches per rank, and for the whole batch in one. The last columns are the
worst over all cuts: of a single parameter's gradient (relative to that parameter, so the smallest
ones show their rounding), of the loss, and of the logprobs of all samples. The bar is 5e-6.

{table}

In one process in float64 the largest of all these errors is {wide:.0e}; the bar is 1e-10.

`recompute`: nothing, every layer of every micro-batch, or of those whose keys others read; these
last may also be dropped and run forward again.

## Ten cuts of one batch

Largest difference between ten random cuts with random recompute modes, float32; the bar is 1e-6.
Of 24 smaller batches one exceeds it, by cuts that are 1.15e-6 apart; a test holds all of its cuts
within 1e-6 of float64.

{cuts}

## Ratio before the first step

Largest |probability in the update / probability in log-old-prob - 1| of the first mini-batch,
whose two phases have different cuts, float32; the bar is 1e-6. Logprobs here lie around -4, where
neighbouring float32 numbers are 4.8e-7 apart, so psRL keeps them in float64. Larger weights amplify
the rounding of the layers: with a standard deviation of 0.2 the bar is missed, and a test holds the
ratio within 2e-6.

{ratios}

## On a GPU

One script, which starts nothing after 7 minutes, repeats the rows of one process in bfloat16 (bar
2.5e-2) and float32 beside the noise floor (dense beside dense in another cut), and times dense and
shared execution of a 1.5B model; `benchmarks/gpu_check.py` checks and times the
[kernels](kernels.md) alone:

    python -m benchmarks.gpu_backend --output benchmarks/results/gpu_backend.json

No figure of a GPU is claimed until its result is committed there.

## Numbers that are not finite

Before every optimizer step, in `psrl execute` and in veRL, loss and gradient norm must be finite
(squares add up in float64, so large finite gradients keep their norm). Otherwise the run stops
with phase, mini-batch, the first parameter and its rank, and the largest advantage and log ratio;
weights and checkpoints are as before the step. `--on-nonfinite skip` (veRL: `on_nonfinite`)
leaves such a step out and lists its mini-batch in `metrics.json`.

Importance ratios and the k3 estimate are computed as `exp(min(max(log r, -20), 20))`, the bound
of veRL's losses: beyond it the gradient of the ratio is zero, and no policy is so far from
another that a loss overflows.
"""


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; numbers have two digits."""
    lines = [header, ["---"] * len(header)]
    lines += [[f"{x:.1e}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """The text of docs/exactness.md, measured now."""
    rows = [row for name, parallel in LAYOUTS.items() for row in measure(name, parallel)]
    wide = measure("one process", ONE, torch.float64)
    header = ("layout", "recompute", *CUTS, "worst parameter", "loss", "logprobs")
    dense = {n: p for n, p in LAYOUTS.items() if p.expert_model_parallel_size == 1}
    return PAGE.format(
        megatron=metadata.version("megatron-core"),
        table=markdown(header, [row.cells for row in rows]),
        wide=max(row.largest for row in wide),
        cuts=markdown(
            ("layout", "loss", "gradient norm"),
            [(name, *ten_cuts(parallel)) for name, parallel in LAYOUTS.items()],
        ),
        ratios=markdown(
            ("layout", "largest deviation"),
            [(name, on_policy_deviation(parallel)) for name, parallel in dense.items()],
        ),
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
