"""Ranks that share experts and have nothing to do in some steps: results of unshared execution.

The policies' plans are compared with dense execution in one process, random plans with every
sample by itself.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from psrl.backend.execution import Execution
from psrl.backend.launch import run_ranks
from psrl.backend.options import Dispatcher, ExecuteOptions, LossOptions, RouterOptions
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.plan.check_ops import check_op_patterns
from psrl.core.plan.plan import Program
from psrl.core.plan.tables import MicroBatches
from psrl.core.run.config import PlanningConfig
from psrl.core.samples.sample import make_batch
from psrl.core.samples.trace import Trace, write_trace
from tests.backend.cases import Case, make_case, relative_error, relative_l2
from tests.backend.test_execute import execute, policy_plan
from tests.backend.test_moe import EP2, MOE, ROUTER, one_pattern, run_alone, run_shared

pytestmark = pytest.mark.slow

ONE = ParallelConfig()
LAYOUTS: dict[str, tuple[ParallelConfig, Dispatcher]] = {
    "ep2": (EP2, "alltoall"),
    "ep2_allgather": (EP2, "allgather"),
    "ep2_pp2": (EP2.model_copy(update={"pipeline_model_parallel_size": 2}), "alltoall"),
    "tp2_ep4_sp": (
        ParallelConfig(
            tensor_model_parallel_size=2,
            data_parallel_size=2,
            expert_model_parallel_size=4,
            sequence_parallel=True,
        ),
        "alltoall",
    ),
}
BAR = 5e-6
PLANNING = PlanningConfig(max_tokens_per_micro_batch=32, search_iterations=20)


def make_trace(path: Path) -> Trace:
    """Mini-batches of three samples with a common prefix, of one sample, and of one token each."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(MOE.vocab_size, size=30)
    tokens = [np.concatenate([prompt, rng.integers(MOE.vocab_size, size=n)]) for n in (60, 9, 4)]
    tokens += [rng.integers(MOE.vocab_size, size=n) for n in (40, 2, 3)]
    batch = make_batch(
        tokens,
        [[(max(1, len(t) - 20), len(t))] for t in tokens],
        group_id=["a", "a", "a", "b", "c", "d"],
        advantage=rng.normal(size=len(tokens)),
    )
    batch = replace(batch, mini_batch=np.array([0, 0, 0, 1, 2, 2]))
    return write_trace(path, [batch], source="test", licence="CC0-1.0", sampling_mode="traj")


def options(dispatcher: Dispatcher) -> ExecuteOptions:
    return ExecuteOptions(
        init_std=0.1,
        loss=LossOptions(kl_coefficient=0.1),
        router=replace(ROUTER, dispatcher=dispatcher),
        keep_gradients=True,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_trace(tmp_path_factory.mktemp("empty_steps") / "trace")


@pytest.fixture(scope="module")
def dense(trace: Trace) -> Execution:
    """All samples unshared, in one process."""
    return execute(policy_plan(trace, ONE, MOE, "verl", PLANNING), trace, options("alltoall"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["verl", "sglang_ps", "first_fit", "psrl"])
def test_policies_with_empty_steps_train_like_dense_execution(
    trace: Trace, dense: Execution, layout: str, policy: str
) -> None:
    parallel, dispatcher = LAYOUTS[layout]
    plan = policy_plan(trace, parallel, MOE, policy, PLANNING)
    for step in (0, 1):
        (program,) = (p for p in plan.programs if p.mini_batch == step)
        assert (program.micro_batches.num_tokens == 0).any(), "no step is empty"
    found = execute(plan, trace, options(dispatcher))
    assert errors(found, dense) == {}


def errors(found: Execution, wanted: Execution) -> dict[str, float]:
    """Relative L2 errors above the bar, by what differs; losses absolute."""
    pairs = {
        name: (getattr(found, name), getattr(wanted, name))
        for name in ("old_logprob", "reference_logprob", "logprob")
    }
    prefixes = [f"mini_batch{step}." for step in range(len(wanted.loss))]
    for prefix in prefixes:
        names = [name for name in wanted.gradients if name.startswith(prefix)]
        one, two = (
            np.concatenate([run.gradients[name].double().numpy().ravel() for name in names])
            for run in (found, wanted)
        )
        pairs[prefix] = one, two
    error = {name: relative_l2(one, two) for name, (one, two) in pairs.items()}
    for name in ("loss", "router_loss"):
        difference = np.subtract(getattr(found, name), getattr(wanted, name))
        error[name] = float(np.abs(difference).max())
    loads = zip(found.expert_load, wanted.expert_load, strict=True)
    error["expert_load"] = float(sum(np.abs(one - two).sum() for one, two in loads))
    return {name: value for name, value in error.items() if not value <= BAR}


@dataclass(frozen=True)
class Steps:
    """Where in the steps of its group each rank's micro-batches are."""

    count: int
    of_rank: tuple[np.ndarray, ...]

    @classmethod
    def draw(cls, rng: np.random.Generator, sizes: list[int]) -> "Steps":
        count = max(sizes) + 2
        return cls(count, tuple(np.sort(rng.permutation(count)[:size]) for size in sizes))

    def number(self, rank: np.ndarray, micro_batch: np.ndarray) -> np.ndarray:
        """Steps of micro-batches; -1 stays."""
        found = [
            self.of_rank[r][m] if m >= 0 else -1 for r, m in zip(rank, micro_batch, strict=True)
        ]
        return np.array(found, np.int64)


def with_empty_steps(program: Program, rng: np.random.Generator, num_ranks: int) -> Program:
    """The program with empty micro-batches anywhere, and one op pattern."""
    table, segments, blocks = program.micro_batches, program.segments, program.blocks
    steps = Steps.draw(rng, np.bincount(table.rank, minlength=num_ranks).tolist())
    row = table.rank * steps.count + steps.number(table.rank, table.micro_batch)

    def column(name: str) -> np.ndarray:
        values = getattr(table, name)
        wide = np.zeros(num_ranks * steps.count, values.dtype)
        wide[row] = values
        return wide

    sized = {
        name: column(name)
        for name in ("num_tokens", "pairs", "head_tokens", "forward_s", "backward_s")
    }
    activation = rng.choice(["keep", "recompute", "drop"], steps.count)
    wide = MicroBatches(
        rank=np.repeat(np.arange(num_ranks), steps.count),
        micro_batch=np.tile(np.arange(steps.count), num_ranks),
        activation=np.tile(activation, num_ranks),
        **sized,
    )
    moved = replace(
        program,
        micro_batches=wide,
        segments=replace(segments, micro_batch=steps.number(segments.rank, segments.micro_batch)),
        blocks=replace(
            blocks,
            micro_batch=steps.number(blocks.rank, blocks.micro_batch),
            release_micro_batch=steps.number(blocks.rank, blocks.release_micro_batch),
        ),
    )
    return one_pattern(moved, num_ranks)


def random_case(seed: int, num_ranks: int) -> Case:
    case = replace(make_case(seed, num_ranks=num_ranks), spec=MOE, init_std=0.1)
    rng = np.random.default_rng(seed)
    program = with_empty_steps(case.planned.program, rng, num_ranks)
    return replace(case, planned=replace(case.planned, program=program))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_steps_anywhere_equal_samples_alone(layout: str) -> None:
    parallel, dispatcher = LAYOUTS[layout]
    router: RouterOptions = replace(ROUTER, dispatcher=dispatcher)
    cases = [random_case(seed, parallel.data_parallel_size) for seed in range(8)]
    for case in cases:
        check_op_patterns(0, case.planned.program, parallel)
    empty = [(c.planned.program.micro_batches.num_tokens == 0).mean() for c in cases]
    assert min(empty) > 0
    wanted = run_ranks(run_alone, 1, cases, torch.float32, router)[0]
    found = run_ranks(run_shared, parallel.world_size, cases, torch.float32, router, parallel)
    for outcomes in found:
        for f, w in zip(outcomes, wanted, strict=True):
            error = relative_error(f, w)
            assert error["gradient"] <= BAR, error
            assert error["loss"] <= BAR, error
            assert relative_l2(f.logprobs, w.logprobs) <= BAR
            assert torch.equal(f.expert_load, w.expert_load)
