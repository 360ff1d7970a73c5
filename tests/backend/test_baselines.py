"""Every policy's plan of one trace, executed: one result, and the KV curve that was simulated."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from psrl.backend.execution import Execution
from psrl.backend.options import ExecuteOptions, LossOptions
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.plan.plan import Plan
from psrl.core.run.config import PlanningConfig
from psrl.core.run.events import Events
from psrl.core.samples.sample import make_batch
from psrl.core.samples.trace import Trace, write_trace
from psrl.sim import simulate
from tests import gradient_errors
from tests.backend.cases import TINY, relative_l2
from tests.backend.test_execute import execute, policy_plan

pytestmark = pytest.mark.slow

POLICIES = (
    *("verl", "sglang_ps", "vllm_ps", "first_fit", "dfs_cut", "quick", "psrl"),
    *("sharing_agnostic", "prefix_match_first", "balance_first"),
)
LAYOUTS = {
    "dp1": ParallelConfig(),
    "dp2": ParallelConfig(data_parallel_size=2),
    "dp2_pp2": ParallelConfig(data_parallel_size=2, pipeline_model_parallel_size=2),
}
OPTIONS = ExecuteOptions(init_std=0.1, loss=LossOptions(kl_coefficient=0.1), keep_gradients=True)


def make_trace(path: Path) -> Trace:
    """Two tasks of five trajectories of four steps, each the history so far; two mini-batches."""
    rng = np.random.default_rng(7)
    samples, spans, groups = [], [], []
    for task in range(2):
        prompt = rng.integers(TINY.vocab_size, size=50)
        for _ in range(5):
            history = prompt
            for _ in range(4):
                begin = len(history)
                history = np.concatenate([history, rng.integers(TINY.vocab_size, size=25)])
                samples.append(history)
                spans.append([(begin, len(history) - 5)])
                groups.append(f"task{task}")
    batch = make_batch(samples, spans, group_id=groups, advantage=rng.normal(size=len(samples)))
    batch = replace(batch, mini_batch=np.arange(len(samples)) // 4 % 2)
    return write_trace(path, [batch], source="test", licence="CC0-1.0", sampling_mode="step")


def plan(trace: Trace, parallel: ParallelConfig, policy: str) -> Plan:
    """A policy's plan with several micro-batches per rank."""
    model = TINY.model_copy(update={"num_layers": 4})
    planning = PlanningConfig(max_tokens_per_micro_batch=256, search_iterations=50)
    return policy_plan(trace, parallel, model, policy, planning)


@dataclass(frozen=True)
class Run:
    """One policy's plan, executed and simulated."""

    plan: Plan
    execution: Execution
    simulated: Events


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_trace(tmp_path_factory.mktemp("baselines") / "trace")


@pytest.fixture(
    scope="module",
    params=LAYOUTS,
)
def runs(request: pytest.FixtureRequest, trace: Trace) -> dict[str, Run]:
    batch, found = trace.iteration(0), {}
    for policy in POLICIES:
        made = plan(trace, LAYOUTS[request.param], policy)
        found[policy] = Run(made, execute(made, trace, OPTIONS), simulate(made, batch))
    return found


def test_all_policies_train_alike(runs: dict[str, Run]) -> None:
    """Loss, gradient and logprobs of both mini-batches are those of dense execution."""
    dense = runs["verl"].execution
    assert len(dense.loss) == 2
    for policy, run in runs.items():
        found = run.execution
        np.testing.assert_allclose(found.loss, dense.loss, rtol=0, atol=5e-6, err_msg=policy)
        for index in range(2):
            prefix = f"mini_batch{index}."
            step = [
                {n: g for n, g in one.gradients.items() if n.startswith(prefix)}
                for one in (found, dense)
            ]
            assert gradient_errors.together(*step) <= 5e-6, (policy, index)
        for name in ("old_logprob", "reference_logprob", "logprob"):
            one, two = getattr(found, name), getattr(dense, name)
            assert relative_l2(one, two) <= 5e-6, (policy, name)


def test_ratios_before_the_first_step_are_one(trace: Trace, runs: dict[str, Run]) -> None:
    for policy, run in runs.items():
        found = run.execution
        is_first = trace.iteration(0).mini_batch[found.loss_tokens.sample] == 0
        shift = (found.logprob - found.old_logprob)[is_first]
        assert np.abs(np.expm1(shift)).max() <= 1e-6, policy


def test_simulated_and_measured_kv_curves_are_equal(runs: dict[str, Run]) -> None:
    """Cached keys and their gradients in bytes, op by op, on every rank and stage."""
    for policy, run in runs.items():
        measured, simulated = run.execution.events, run.simulated
        assert curve(measured) == curve(simulated), policy
        caches = measured.kv_bytes.max() > 0
        assert caches == (policy not in ("verl", "first_fit")), policy


def curve(events: Events) -> list[tuple[object, ...]]:
    """Ops of every phase, rank and stage in order, with bytes of cached keys and gradients."""
    columns = ("rank", "stage", "program", "op", "micro_batch", "kv_bytes", "kv_gradient_bytes")
    rows: list[tuple[object, ...]] = []
    for phase in ("log_old_prob", "reference", "update"):
        of_phase = events.where((events.phase == phase) & (events.micro_batch >= 0))
        order = np.lexsort((np.arange(len(of_phase)), of_phase.stage, of_phase.rank))
        lists = (getattr(of_phase, name)[order].tolist() for name in columns)
        rows += [(phase, *row) for row in zip(*lists, strict=True)]
    return rows


def test_the_plans_differ(runs: dict[str, Run]) -> None:
    """From all tokens to hardly more than the unique ones, in several micro-batches."""
    executed = {
        policy: sum(p.unique_tokens for p in run.plan.phase_programs("update"))
        for policy, run in runs.items()
    }
    assert executed["verl"] > 1.5 * executed["psrl"]
    assert executed["verl"] > executed["vllm_ps"] > executed["sglang_ps"]
    assert executed["verl"] > executed["first_fit"]
    for run in runs.values():
        for program in run.plan.programs:
            assert np.bincount(program.micro_batches.rank).max() >= 2
