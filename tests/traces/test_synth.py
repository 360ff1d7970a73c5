"""Generators: published rates, mechanism of each mode, and dials that do what they say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import ConfigError
from psrl.core.samples.sample import SampleBatch
from psrl.traces.blocks import to_blocks
from psrl.traces.stats import sharing_stats
from psrl.traces.synth import PRESETS, SYNTH_MODES, Distribution, load_spec, synthesise
from tests.traces.test_modes import trained

TINY = ("tasks=2", "rollouts=3", "turns.quantiles=[2, 4]")


def one(preset: str, mode: str, *overrides: str, seed: int = 0) -> SampleBatch:
    (batch,) = synthesise(load_spec(preset, mode, overrides), mode, seed).batches
    return batch


@pytest.mark.parametrize(
    ("preset", "mode", "published", "spread"),
    [
        ("alfworld", "step", 0.9451, 0.003),
        ("webshop", "step", 0.9022, 0.003),
        ("dtn", "step", 0.8892, 0.003),
        # Few tasks, and where a rollout forks or rewrites decides much: single batches scatter.
        ("dtn", "tree_step", 0.6224, 0.02),
    ],
)
def test_presets_land_on_the_published_match_rates(
    preset: str, mode: str, published: float, spread: float
) -> None:
    rates = [sharing_stats(one(preset, mode, seed=seed))["prefix_match_rate"] for seed in range(6)]
    assert np.mean(rates) == pytest.approx(published, abs=0.003)
    assert max(rates) - min(rates) <= 2 * spread


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mode", SYNTH_MODES)
def test_every_preset_has_every_mode(preset: str, mode: str) -> None:
    recording = synthesise(load_spec(preset, mode, (*TINY, "iterations=2")), mode, seed=3)
    first, second = recording.batches
    assert recording.sampling_mode == mode
    assert first.symbol_num_tokens is second.symbol_num_tokens
    assert not set(first.symbols.tolist()) & set(second.symbols.tolist())
    for batch in recording.batches:
        batch.validate()
        assert len(np.unique(batch.group_id)) == 2
        # Every trained block is generated once, so its tokens train once in their context.
        assert set(trained(to_tokens(batch)).values()) == {1}
    again = synthesise(load_spec(preset, mode, (*TINY, "iterations=2")), mode, seed=3)
    assert again.batches[0].symbols.tolist() == first.symbols.tolist()
    other = synthesise(load_spec(preset, mode, TINY), mode, seed=4).batches[0]
    assert other.num_tokens.tolist() != first.num_tokens.tolist()


def to_tokens(batch: SampleBatch) -> SampleBatch:
    """The batch with the length of its blocks cut to one token each."""
    table = batch.symbol_num_tokens
    assert table is not None
    ends = np.cumsum(batch.occurrence_tokens)
    spans = []
    for s in range(batch.num_samples):
        first = batch.symbol_offsets[s]
        local = ends[first : batch.symbol_offsets[s + 1]] - (ends[first - 1] if first else 0)
        for start, end in batch.sample_loss_spans(s):
            a, z = np.searchsorted(local, [start, end])
            assert local[z] == end
            spans.append((a + 1, z + 1))
    return replace(batch, symbol_num_tokens=None, loss_spans=np.array(spans))


def test_steps_grow_and_each_mode_keeps_what_it_says() -> None:
    dials = (*TINY, "think.quantiles=[5]", "action.quantiles=[3]", "observation.quantiles=[7]")
    dials += ("summary.quantiles=[11]", "prompt.quantiles=[2]", "instructions_tokens=20")
    dials += ("turns.quantiles=[4]", "rollouts=1")
    lengths = {mode: one("webshop", mode, *dials).num_tokens.tolist()[:4] for mode in SYNTH_MODES}
    assert lengths["step"] == lengths["tree_step"] == [22 + 8 + 15 * i for i in range(4)]
    assert lengths["step_rt"] == [22 + 8 + 10 * i for i in range(4)]
    assert lengths["step_s"] == [22 + 19, *[22 + 11 + 7 + 19] * 3]
    assert lengths["traj"][0] == lengths["tree"][0] == 22 + 4 * 15 - 7


def test_rewriting_replaces_the_history_behind_the_prompt() -> None:
    dials = (*TINY, "rollouts=1", "turns.quantiles=[3]", "rewrite_rate=1.0", "rewrite_keep=0.5")
    dials += ("instructions_tokens=9", "prompt.quantiles=[1]", "think.quantiles=[4]")
    dials += ("action.quantiles=[2]", "observation.quantiles=[4]")
    batch = one("dtn", "step", *dials)
    # Histories of 10 and 5 + 10 tokens become 5 and 8 (7.5 rounds to even).
    assert batch.num_tokens.tolist()[:3] == [16, 21, 24]
    assert sharing_stats(batch)["within_trajectory"]["unique_tokens"] == 2 * (10 + 6 + 11 + 14)
    kept = one("dtn", "step", *dials, "rewrite_rate=0.0")
    assert kept.num_tokens.tolist()[:3] == [16, 26, 36]


def test_forks_leave_where_the_dials_allow() -> None:
    dials = ("tasks=3", "rollouts=5", "turns.quantiles=[6]")
    bushy = one("alfworld", "tree_step", *dials, "fork_depth=0.0")
    steps = bushy.agent_step.reshape(3, 5, 6)
    assert (steps == np.arange(6)).all()
    deep = one("alfworld", "tree_step", *dials)
    assert deep.num_samples < bushy.num_samples
    assert one("alfworld", "tree", *dials).num_samples == 15
    bundled = one("alfworld", "tree_step", *dials, "branches=4")
    starts = [
        bundled.agent_step[(bundled.group_id == "task0") & (bundled.trajectory_id == f"rollout{r}")]
        for r in range(1, 5)
    ]
    assert len({int(start[0]) for start in starts}) == 1


def test_episodes_end_before_prompts_get_too_long() -> None:
    batch = one("dtn", "step", "max_prompt_tokens=20000")
    prompts = batch.loss_spans[:, 0]
    assert prompts.max() <= 20_000
    assert prompts.max() < one("dtn", "step").loss_spans[:, 0].max()
    # The first call is made whatever its prompt.
    assert one("dtn", "step", "max_prompt_tokens=2").num_samples == 96


def test_streams_keep_other_draws_when_a_dial_changes() -> None:
    base = one("alfworld", "step", *TINY)
    longer = one("alfworld", "step", *TINY, "observation.scale=3")
    assert longer.agent_step.tolist() == base.agent_step.tolist()
    assert longer.advantage.tolist() == base.advantage.tolist()
    response = [np.diff(batch.loss_spans)[:, 0].tolist() for batch in (base, longer)]
    assert response[0] == response[1]


def test_blocks_are_as_few_as_the_tree_allows_or_more() -> None:
    batch = one("webshop", "step", *TINY)
    blocks = to_blocks(batch)
    assert sharing_stats(blocks)["unique_tokens"] == sharing_stats(batch)["unique_tokens"]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=5).map(sorted),
    st.lists(st.floats(0, 1), min_size=1, max_size=9),
)
def test_distribution_is_a_quantile_function(quantiles: list[int], at: list[float]) -> None:
    distribution = Distribution(quantiles=tuple(map(float, quantiles)))
    values = distribution.values(np.array(sorted(at)))
    assert (np.diff(values) >= 0).all()
    assert quantiles[0] <= values.min() <= values.max() <= quantiles[-1]
    knots = distribution.values(np.linspace(0, 1, len(quantiles)))
    assert knots.tolist() == (quantiles if len(quantiles) > 1 else [quantiles[0]])
    even = distribution.values((np.arange(4000) + 0.5) / 4000)
    assert even.mean() == pytest.approx(distribution.mean, abs=0.51)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("taks=3",), "unknown key 'taks'. Did you mean 'tasks'"),
        (("turns.quantile=[3]",), "unknown key 'turns.quantile'. Did you mean 'quantiles'"),
        (("tasks=0",), "tasks = 0: Input should be greater than or equal to 1"),
        (("tasks=2.5",), "tasks = 2.5"),
        (("turns.quantiles=[3, 2]",), "must not decrease"),
        (("turns.quantiles=[-1, 2]",), "must be finite and not negative"),
        (("turns.quantiles=[nan]",), "should be a finite number"),
        (("tasks",), "override 'tasks': not valid TOML"),
        (("rewrite_rate=1.5",), "less than or equal to 1"),
    ],
)
def test_wrong_dials_are_named(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec("webshop", "step", overrides)
    assert message in str(caught.value)
    assert "->" in str(caught.value)


def test_unknown_presets_modes_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'alfworld'"):
        load_spec("alfword", "step")
    with pytest.raises(ConfigError, match="Did you mean 'tree_step'"):
        load_spec("alfworld", "treestep")
    with pytest.raises(ConfigError, match="3 tasks cannot fill 4 mini-batches"):
        synthesise(load_spec("dtn", "step", ("tasks=3", "mini_batches=4")), "step", 0)
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[modes]\nstepp = 1\n')
    with pytest.raises(ConfigError, match="modes must be tables"):
        load_spec(str(file), "step")
    file.write_text('name = "mine"\n')
    with pytest.raises(ConfigError, match="key 'turns' is missing"):
        load_spec(str(file), "step")
