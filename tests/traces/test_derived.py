"""Modes, blocks, slices and statistics of random batches, against what the words mean."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import ConfigError, TraceError
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.core.tree.prefix_tree import build_prefix_tree
from psrl.traces.advantages import grpo_advantages
from psrl.traces.blocks import compact_symbols, to_blocks, to_blocks_all
from psrl.traces.grouping import codes_by_appearance, rank_within, trajectory_codes
from psrl.traces.modes import derive
from psrl.traces.slicing import slice_batch
from psrl.traces.stats import sharing_stats
from tests.traces.random_batches import step_batches


def token_paths(batch: SampleBatch) -> list[tuple[tuple[int, int], ...]]:
    """Tokens of each sample as (symbol, index in the symbol)."""
    size = batch.symbol_num_tokens
    return [
        tuple(
            (int(x), i)
            for x in batch.sample_symbols(s)
            for i in range(1 if size is None else int(size[x]))
        )
        for s in range(batch.num_samples)
    ]


def trained_tokens(batch: SampleBatch) -> Counter[object]:
    """Every trained token with all it depends on: its context, trajectory and weight."""
    paths = token_paths(batch)
    owner = trajectory_codes_by_name(batch)
    return Counter(
        (paths[s][: t + 1], owner[s], batch.advantage[s], batch.mini_batch[s])
        for s in range(batch.num_samples)
        for start, end in batch.sample_loss_spans(s)
        for t in range(start, end)
    )


def trajectory_codes_by_name(batch: SampleBatch) -> list[tuple[str, str]]:
    return list(zip(batch.group_id.tolist(), batch.trajectory_id.tolist(), strict=True))


def tree_shape(batch: SampleBatch, key: np.ndarray | None) -> set[object]:
    """Nodes of the prefix tree, whatever the order of siblings."""
    tree = build_prefix_tree(batch, key)
    nodes = set()
    for v in range(tree.num_nodes):
        first = tree.first_sample[v]
        samples = frozenset(tree.sample_order[first : first + tree.samples_through[v]].tolist())
        nodes.add((samples, int(tree.start_depth[v]), int(tree.num_tokens[v])))
    return nodes


@pytest.mark.slow
@given(step_batches())
def test_blocks_have_the_same_trees_and_one_symbol_per_node(batch: SampleBatch) -> None:
    blocks = to_blocks(batch)
    blocks.validate()
    for key in (
        None,
        codes_by_appearance(batch.group_id),
        trajectory_codes(batch),
        np.arange(batch.num_samples),
    ):
        assert tree_shape(blocks, key) == tree_shape(batch, key)
    assert blocks.symbol_num_tokens is not None
    assert len(blocks.symbol_num_tokens) == build_prefix_tree(batch).num_nodes - 1
    assert blocks.num_tokens.tolist() == batch.num_tokens.tolist()
    assert blocks.loss_spans.tolist() == batch.loss_spans.tolist()


@pytest.mark.slow
@given(step_batches())
def test_blocks_do_not_depend_on_token_ids(batch: SampleBatch) -> None:
    renamed = make_batch(
        [2 - batch.sample_symbols(s) for s in range(batch.num_samples)],
        [batch.sample_loss_spans(s).tolist() for s in range(batch.num_samples)],
        symbol_num_tokens=None
        if batch.symbol_num_tokens is None
        else batch.symbol_num_tokens[::-1],
    )
    assert to_blocks(renamed).symbols.tolist() == to_blocks(batch).symbols.tolist()
    first_uses = codes_by_appearance(to_blocks(batch).symbols)
    assert to_blocks(batch).symbols.tolist() == first_uses.tolist()


def test_blocks_of_iterations_share_a_table_but_no_symbol() -> None:
    batch = make_batch([[5, 6], [5, 7]], [[(1, 2)], [(1, 2)]])
    first, second = to_blocks_all([batch, batch])
    assert first.symbol_num_tokens is second.symbol_num_tokens
    assert first.symbols.tolist() == [0, 1, 0, 2]
    assert second.symbols.tolist() == [3, 4, 3, 5]


@pytest.mark.slow
@given(step_batches())
def test_traj_trains_exactly_the_tokens_of_step(batch: SampleBatch) -> None:
    try:
        merged = derive(batch, "traj")
    except TraceError:
        if batch.symbol_num_tokens is None:
            raise
        return
    merged.validate()
    assert trained_tokens(merged) == trained_tokens(batch)
    assert merged.generate_s.sum() == batch.generate_s.sum()


def test_traj_merges_until_the_history_is_rewritten() -> None:
    batch = make_batch(
        [[1, 2], [9, 9], [1, 2, 3, 4], [1, 5, 6]],
        [[(1, 2)], [(1, 2)], [(3, 4)], [(2, 3)]],
        trajectory_id=["a", "b", "a", "a"],
        group_id=["g"] * 4,
        agent_step=[0, 0, 1, 2],
        generate_s=[1.0, 2.0, 4.0, np.nan],
        arrival_s=[0.0, 1.0, 2.0, 3.0],
    )
    merged = derive(batch, "traj")
    assert [merged.sample_symbols(s).tolist() for s in range(3)] == [
        [1, 2, 3, 4],
        [9, 9],
        [1, 5, 6],
    ]
    assert merged.sample_loss_spans(0).tolist() == [[1, 2], [3, 4]]
    assert merged.agent_step.tolist() == [0, 0, 2]
    assert merged.arrival_s.tolist() == [0.0, 1.0, 3.0]
    np.testing.assert_equal(merged.generate_s, [5.0, 2.0, np.nan])


def test_traj_follows_agent_steps_not_the_order_of_samples() -> None:
    batch = make_batch(
        [[1, 2, 3], [1, 2]],
        [[(2, 3)], [(1, 2)]],
        trajectory_id=["a", "a"],
        group_id=["g", "g"],
        agent_step=[1, 0],
    )
    merged = derive(batch, "traj")
    assert merged.symbols.tolist() == [1, 2, 3]
    assert merged.loss_spans.tolist() == [[1, 2], [2, 3]]


def test_traj_keeps_other_weights_and_trained_spans_apart() -> None:
    rows = [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    spans = [[(1, 2)], [(2, 3)], [(3, 4)], [(1, 5)]]
    batch = make_batch(
        rows,
        spans,
        trajectory_id=["a"] * 4,
        group_id=["g"] * 4,
        agent_step=range(4),
        advantage=[1.0, 2.0, 2.0, 2.0],
        mini_batch=[0, 0, 1, 1],
    )
    assert derive(batch, "traj").num_samples == 4


def test_traj_refuses_block_hashes_that_never_continue() -> None:
    batch = make_batch(
        [[0, 1], [0, 2, 3]],
        [[(4, 5)], [(8, 9)]],
        symbol_num_tokens=np.array([4, 1, 4, 1]),
        trajectory_id=["a", "a"],
        group_id=["g", "g"],
        agent_step=[0, 1],
    )
    with pytest.raises(TraceError, match="none of 2 samples in 1 trajectories continues"):
        derive(batch, "traj")


def test_unknown_mode_is_named() -> None:
    batch = make_batch([[1, 2]], [[(1, 2)]])
    assert derive(batch, "step") is batch
    with pytest.raises(TraceError, match="Did you mean 'traj'"):
        derive(batch, "traje")


@pytest.mark.slow
@given(step_batches())
def test_stats_count_distinct_prefixes(batch: SampleBatch) -> None:
    stats = sharing_stats(batch)
    paths = token_paths(batch)
    keys = {
        "within_trajectory": trajectory_codes_by_name(batch),
        "within_group": batch.group_id.tolist(),
        "within_mini_batch": batch.mini_batch.tolist(),
        "overall": [0] * batch.num_samples,
    }
    dense_pairs = sum(len(path) * (len(path) + 1) // 2 for path in paths)
    for level, key in keys.items():
        prefixes = {(k, p[: t + 1]) for k, p in zip(key, paths, strict=True) for t in range(len(p))}
        pairs = sum(len(prefix) for _, prefix in prefixes)
        assert stats[level]["unique_tokens"] == len(prefixes)
        assert stats[level]["prefix_match_rate"] == pytest.approx(
            1 - len(prefixes) / stats["logical_tokens"]
        )
        assert stats[level]["speedup_bound_tokens"] == stats["logical_tokens"] / len(prefixes)
        assert stats[level]["speedup_bound_pairs"] == dense_pairs / pairs
    assert stats["num_trajectories"] == len(set(keys["within_trajectory"]))
    assert stats["num_groups"] == len(set(keys["within_group"]))
    assert stats["sample_tokens_max"] == max(map(len, paths))
    assert stats["loss_tokens"] == trained_tokens(batch).total()


def test_stats_of_nothing() -> None:
    stats = sharing_stats(make_batch([], []))
    assert stats["logical_tokens"] == 0
    assert stats["overall"]["speedup_bound_pairs"] == 1.0


@pytest.mark.slow
@given(
    step_batches(),
    *(st.none() | st.integers(1, 3) for _ in range(3)),
    st.none() | st.integers(1, 12),
)
def test_slice_keeps_the_first_of_each(
    batch: SampleBatch,
    num_groups: int | None,
    trajectories: int | None,
    steps: int | None,
    max_tokens: int | None,
) -> None:
    expected: list[int] = []
    seen: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for s, (group, trajectory) in enumerate(trajectory_codes_by_name(batch)):
        if max_tokens is not None and batch.num_tokens[s] > max_tokens:
            continue
        seen[group][trajectory] += 1
        keep = num_groups is None or list(seen).index(group) < num_groups
        keep &= trajectories is None or list(seen[group]).index(trajectory) < trajectories
        keep &= steps is None or seen[group][trajectory] <= steps
        if keep:
            expected.append(s)
    limits = {
        "num_groups": num_groups,
        "trajectories_per_group": trajectories,
        "steps_per_trajectory": steps,
        "max_sample_tokens": max_tokens,
    }
    if not expected:
        with pytest.raises(TraceError, match="no sample of"):
            slice_batch(batch, **limits)
        return
    sliced = slice_batch(batch, **limits)
    sliced.validate()
    chosen = batch.select(expected)
    assert sliced.num_tokens.tolist() == chosen.num_tokens.tolist()
    assert sliced.loss_spans.tolist() == chosen.loss_spans.tolist()
    assert sliced.agent_step.tolist() == chosen.agent_step.tolist()
    assert tree_shape(sliced, None) == tree_shape(chosen, None)
    assert set(sliced.mini_batch.tolist()) == set(range(sliced.mini_batch.max() + 1))
    if sliced.symbol_num_tokens is not None:
        assert set(sliced.symbols.tolist()) == set(range(len(sliced.symbol_num_tokens)))


def test_slice_says_what_to_raise() -> None:
    batch = make_batch([[1, 2, 3]], [[(1, 2)]])
    with pytest.raises(TraceError, match="raise max_sample_tokens to at least 3"):
        slice_batch(batch, max_sample_tokens=2)
    with pytest.raises(ConfigError, match="num_groups is 0"):
        slice_batch(batch, num_groups=0)


def test_compact_symbols_keeps_one_table_for_all_iterations() -> None:
    table = np.array([2, 3, 4, 5])
    first = make_batch([[3, 1]], [[(1, 2)]], symbol_num_tokens=table)
    second = make_batch([[1]], [[(1, 2)]], symbol_num_tokens=table)
    a, b = compact_symbols([first, second])
    assert a.symbol_num_tokens is b.symbol_num_tokens
    assert a.symbol_num_tokens is not None
    assert a.symbol_num_tokens.tolist() == [3, 5]
    assert (a.symbols.tolist(), b.symbols.tolist()) == ([1, 0], [0])


@given(st.lists(st.integers(0, 3)))
def test_codes_and_ranks(labels: list[int]) -> None:
    codes = codes_by_appearance(np.array(labels, np.int64))
    order = list(dict.fromkeys(labels))
    assert codes.tolist() == [order.index(x) for x in labels]
    assert rank_within(codes).tolist() == [labels[:i].count(x) for i, x in enumerate(labels)]


def test_grpo_advantages() -> None:
    groups = np.array(["a", "b", "a", "c", "b", "a", "d", "d"])
    reward = np.array([1.0, 2.0, 0.0, 5.0, 2.0, 2.0, 1.0, np.nan])
    # Group a: mean 1, sample deviation 1. Group b is constant, c alone, d has an unknown reward.
    expected = [0, 0, -1 / (1 + 1e-6), 0, 0, 1 / (1 + 1e-6), 1, 1]
    assert grpo_advantages(groups, reward).tolist() == pytest.approx(expected, abs=0)
