"""Comparisons in memory: merged steps among the policies, bounds that nothing passes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import psrl
from psrl.analysis.report.sentences import merging_sentence
from psrl.core.errors import ConfigError, InfeasibleError
from psrl.core.plan.check_plan import check_plan
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import Trace, write_trace

ROOT = Path(__file__).resolve().parents[2]
SETUP = psrl.load_setup(ROOT / "examples" / "clusters" / "2cpu.toml")
POLICIES = ("verl", "sglang_ps", "sharing_agnostic", "dfs_cut", "psrl")


def steps(
    seed: int, rewrites: float = 0.0, num_tasks: int = 2, num_mini_batches: int = 1
) -> SampleBatch:
    """Episodes whose steps continue each other unless their history is rewritten."""
    rng = np.random.default_rng(seed)
    texts: list[list[int]] = []
    spans: list[list[tuple[int, int]]] = []
    columns: dict[str, list[object]] = {"group_id": [], "trajectory_id": [], "agent_step": []}
    for task in range(num_tasks):
        prompt = rng.integers(9, size=int(rng.integers(1, 400))).tolist()
        for rollout in range(int(rng.integers(1, 4))):
            history = list(prompt)
            for step in range(int(rng.integers(1, 5))):
                if rng.random() < rewrites:
                    history = [10, *history[1:]]
                response = rng.integers(9, size=int(rng.integers(1, 90))).tolist()
                texts.append(history + response)
                spans.append([(len(history), len(history) + len(response))])
                columns["group_id"].append(f"g{task}")
                columns["trajectory_id"].append(f"g{task}/{rollout}")
                columns["agent_step"].append(step)
                history = [*texts[-1], *rng.integers(9, size=int(rng.integers(0, 60))).tolist()]
    batch = psrl.make_batch(list(texts), spans, **columns)  # type: ignore[arg-type]
    return replace(batch, mini_batch=rng.integers(num_mini_batches, size=batch.num_samples))


def trace_of(path: Path, batch: SampleBatch, mode: str = "step") -> Trace:
    return write_trace(path, [batch], source="test", licence="CC0", sampling_mode=mode)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((1, 2, 3)))
def test_no_row_passes_its_bound(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_mini_batches: int
) -> None:
    batch = steps(seed, rewrites=0.1, num_mini_batches=num_mini_batches)
    closed_up = np.unique(batch.mini_batch, return_inverse=True)[1]
    trace = trace_of(
        tmp_path_factory.mktemp("trace") / "trace", replace(batch, mini_batch=closed_up)
    )
    compared = psrl.compare(trace, SETUP, POLICIES)
    table, rungs = compared.table(), compared.ladder()
    for rows in (table, rungs):
        assert (rows["speedup"] <= rows["speedup_bound"] * (1 + 1e-9)).all()
    assert rungs["factor"].iloc[1:].prod() == pytest.approx(rungs["speedup"].iloc[-1])
    summary = compared.summary()
    for phase in summary.phases:
        for policy in summary.policies:
            assert summary.speedup(policy, (phase,)) <= summary.bound(policy, (phase,)) * (1 + 1e-9)


def test_merged_steps_are_planned_like_whole_episodes(tmp_path: Path) -> None:
    batch = steps(1)
    compared = psrl.compare(trace_of(tmp_path / "steps", batch), SETUP, ["verl", "psrl"])
    assert compared.names == ("verl", "merged_dense", "psrl")
    assert compared.merging is not None
    episodes = psrl.make_plan(
        trace_of(tmp_path / "episodes", compared.merging.batch, "traj"), SETUP, "verl"
    )
    merged = compared.runs["merged_dense"]
    assert merged.makespan_s == pytest.approx(episodes.predicted["makespan_s"])
    assert merged.plan.trace_hash == episodes.trace_hash
    check_plan(merged.plan, merged.batch)
    assert merged.metrics["logical_tokens"] == batch.logical_tokens
    assert merged.metrics["policy"] == "merged_dense"


def test_the_saved_plan_of_merged_steps_has_its_trace(tmp_path: Path) -> None:
    batch = steps(1)
    unequal = replace(batch, advantage=np.linspace(-1.0, 1.0, batch.num_samples))
    compared = psrl.compare(trace_of(tmp_path / "steps", unequal), SETUP, ["verl", "psrl"])
    compared.save(tmp_path / "run")
    folder = tmp_path / "run" / "policies" / "merged_dense"
    run = psrl.simulate(psrl.load_plan(folder / "plan"), psrl.load_trace(folder / "trace"))
    assert run.makespan_s == compared.runs["merged_dense"].makespan_s
    assert (folder / "token_advantages.parquet").is_file()
    text = (tmp_path / "run" / "comparison.csv").read_text("utf-8")
    assert [line.split(",")[0] for line in text.splitlines()[1:]] == list(compared.names)


@pytest.mark.parametrize("mode", ["step_s", "step_rt"])
def test_rewritten_history_cannot_merge_and_says_why(tmp_path: Path, mode: str) -> None:
    batch = steps(2, rewrites=1.0)
    num_steps = batch.num_samples - len(np.unique(batch.trajectory_id))
    # Only the first symbol is rewritten, so a step after a rewritten one must not continue it.
    apart = replace(batch, symbols=np.arange(len(batch.symbols)))
    compared = psrl.compare(trace_of(tmp_path / "trace", apart, mode), SETUP, ["verl", "psrl"])
    assert compared.names == ("verl", "psrl")
    assert compared.ladder()["rung"].tolist() == ["dense, as recorded", "shared", "placed and cut"]
    assert merging_sentence(compared.summary()) == (
        f"Merging the steps is not possible: {num_steps} of {num_steps} steps do not continue the "
        "step before: their history was rewritten."
    )
    with pytest.raises(ConfigError, match="merged_dense: no step of this trace continues"):
        psrl.compare(compared.trace, SETUP, ["verl", "psrl"], baseline="merged_dense")


def test_whole_episodes_have_nothing_to_merge(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace", steps(3), "traj")
    compared = psrl.compare(trace, SETUP, ["verl", "psrl"])
    assert compared.merging is None
    assert compared.names == ("verl", "psrl")


def test_merged_steps_can_be_the_baseline(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace", steps(1))
    over_steps = psrl.compare(trace, SETUP, ["verl", "psrl"])
    over_merged = psrl.compare(trace, SETUP, ["verl", "psrl"], baseline="merged_dense")
    first, second = over_steps.table(), over_merged.table()
    assert second["policy"].tolist() == ["merged_dense", "verl", "psrl"]
    assert second.set_index("policy")["speedup"]["psrl"] == pytest.approx(
        first.set_index("policy")["merged_speedup"]["psrl"]
    )
    for ours, theirs in zip(
        over_steps.ladder().to_dict("records"), over_merged.ladder().to_dict("records"), strict=True
    ):
        assert ours == pytest.approx(theirs, nan_ok=True)


def test_what_does_not_fit_raises_or_is_listed(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace", steps(1))
    device = SETUP.cluster.device.model_copy(update={"memory_bytes": 10**7})
    tight = SETUP.model_copy(
        update={"cluster": SETUP.cluster.model_copy(update={"device": device})}
    )
    with pytest.raises(InfeasibleError, match="GiB at its peak"):
        psrl.compare(trace, tight, ["verl", "psrl"])
    compared = psrl.compare(trace, tight, ["verl", "psrl"], keep_infeasible=True)
    assert not compared.runs
    assert list(compared.infeasible) == ["verl", "merged_dense", "psrl"]
