"""The tree against a brute-force token trie, and orders that `validate` must refuse."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import PlanError
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree

Token = tuple[int, int]  # symbol id and position inside the symbol

NARROW_IDS = (0, 1, 255, 256, 2**32 - 1)
WIDE_IDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1)


class Case(NamedTuple):
    """A batch, its share keys and granularity, and every sample spelled token by token."""

    batch: SampleBatch
    keys: list[int]
    granularity: int
    spelled: list[tuple[Token, ...]]

    def tree(self) -> PrefixTree:
        return build_prefix_tree(self.batch, self.keys, self.granularity)


@st.composite
def cases(draw: st.DrawFn, max_granularity: int = 4) -> Case:
    """Few symbols, so that samples repeat, extend and end inside each other."""
    samples = draw(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=9))
    keys = draw(st.lists(st.integers(-1, 1), min_size=len(samples), max_size=len(samples)))
    granularity = draw(st.integers(1, max_granularity))
    if draw(st.booleans()):
        lengths = np.array(draw(st.lists(st.integers(1, 5), min_size=3, max_size=3)), np.int64)
        symbols = samples
    else:
        lengths = None
        alphabet = draw(st.permutations(draw(st.sampled_from([NARROW_IDS, WIDE_IDS]))))
        symbols = [[alphabet[i] for i in sample] for sample in samples]
    batch = make_batch(list(symbols), [[] for _ in symbols], symbol_num_tokens=lengths)
    spelled = [
        tuple((i, j) for i in sample for j in range(1 if lengths is None else int(lengths[i])))
        for sample in symbols
    ]
    return Case(batch, keys, granularity, spelled)


def shared_identity(case: Case, sample: int, depth: int) -> tuple[object, ...]:
    """What two samples must agree on to share the token at `depth`."""
    tokens = case.spelled[sample]
    block_end = (depth // case.granularity + 1) * case.granularity
    if block_end > len(tokens):
        return ("own", sample, depth)
    return (case.keys[sample], tokens[:block_end], depth)


@given(cases())
def test_unique_tokens_equal_brute_force(case: Case) -> None:
    tree = case.tree()
    identities = {
        shared_identity(case, s, depth)
        for s, tokens in enumerate(case.spelled)
        for depth in range(len(tokens))
    }
    assert tree.unique_tokens == len(identities)
    assert tree.logical_tokens == sum(map(len, case.spelled))


@given(cases())
def test_paths_spell_the_samples(case: Case) -> None:
    tree = case.tree()
    for sample, tokens in enumerate(case.spelled):
        spelled: list[Token] = []
        for node in tree.path(int(tree.sample_node[sample])):
            start, end = int(tree.start_depth[node]), int(tree.end_depth[node])
            assert start == len(spelled)
            spelled += case.spelled[int(tree.representative[node])][start:end]
        assert tuple(spelled) == tokens


@given(cases())
def test_every_node_lists_its_samples(case: Case) -> None:
    tree = case.tree()
    through: list[set[int]] = [set() for _ in range(tree.num_nodes)]
    for sample in range(len(case.spelled)):
        for node in [0, *tree.path(int(tree.sample_node[sample]))]:
            through[node].add(sample)
    for node in range(tree.num_nodes):
        first, count = int(tree.first_sample[node]), int(tree.samples_through[node])
        assert set(tree.sample_order[first : first + count].tolist()) == through[node]
        assert count == len(through[node])
    assert sorted(tree.sample_order.tolist()) == list(range(len(case.spelled)))


@given(cases(max_granularity=1))
def test_nodes_are_as_long_as_possible(case: Case) -> None:
    tree = case.tree()
    num_children = np.bincount(tree.parent[1:], minlength=tree.num_nodes)
    ends_here = np.bincount(tree.sample_node, minlength=tree.num_nodes)
    inner = np.flatnonzero(num_children == 1)
    assert all(ends_here[v] for v in inner if v > 0)


@given(cases())
def test_built_trees_are_valid(case: Case) -> None:
    tree = case.tree()
    tree.validate()
    descendants = [0] * tree.num_nodes
    for node in range(tree.num_nodes):
        for ancestor in [0, *tree.path(node)]:
            descendants[ancestor] += node > 0 or ancestor == node
    assert (tree.subtree_end - np.arange(tree.num_nodes)).tolist() == descendants
    assert tree.token_start.tolist() == [0, *np.cumsum(tree.num_tokens)]


@given(cases(), st.data())
def test_one_changed_link_is_refused(case: Case, data: st.DataObject) -> None:
    tree = case.tree()
    name = data.draw(st.sampled_from(["parent", "subtree_end", "start_depth"]))
    changed = getattr(tree, name).copy()
    node = data.draw(st.integers(0, tree.num_nodes - 1))
    other = data.draw(st.integers(-3, tree.num_nodes + 3).filter(lambda v: v != changed[node]))
    changed[node] = other
    with pytest.raises(PlanError, match="prefix tree"):
        replace(tree, **{name: changed}).validate()


@given(cases(), st.randoms(use_true_random=False))
def test_parents_first_is_not_enough(case: Case, random: object) -> None:
    """Any other order in which parents precede children, subtree ends adapted as well as can be."""
    tree = case.tree()
    order, ready = [0], {v for v in range(1, tree.num_nodes) if tree.parent[v] == 0}
    while ready:
        node = random.choice(sorted(ready))  # type: ignore[attr-defined]
        ready.remove(node)
        order.append(node)
        ready |= {v for v in range(1, tree.num_nodes) if tree.parent[v] == node}
    new_number = np.argsort(order)
    last = [
        max(new_number[v] for v in range(node, int(tree.subtree_end[node]))) + 1 for node in order
    ]
    parent = tree.parent[order]
    moved = replace(
        tree,
        parent=np.where(parent < 0, -1, new_number[parent]),
        start_depth=tree.start_depth[order],
        num_tokens=tree.num_tokens[order],
        subtree_end=np.array(last),
    )
    sizes = np.array(last) - np.arange(len(order))
    if (sizes == (tree.subtree_end - np.arange(len(order)))[order]).all():
        moved.validate()
    else:
        with pytest.raises(PlanError, match="pre-order"):
            moved.validate()


def test_sibling_placed_too_early() -> None:
    tree = build_prefix_tree(make_batch([[1, 1], [1, 2], [3]], [[], [], []]))
    assert tree.parent.tolist() == [-1, 0, 1, 1, 0]
    early = replace(
        tree,
        parent=np.array([-1, 0, 1, 0, 1]),
        start_depth=np.array([0, 0, 1, 0, 1]),
        subtree_end=np.array([5, 5, 3, 4, 5]),
    )
    with pytest.raises(PlanError, match="node 3"):
        early.validate()


def test_subtree_that_swallows_its_neighbour() -> None:
    tree = build_prefix_tree(make_batch([[1, 1], [1, 2], [3]], [[], [], []]))
    with pytest.raises(PlanError, match="pre-order"):
        replace(tree, subtree_end=np.array([5, 5, 3, 4, 5])).validate()
    with pytest.raises(PlanError, match="root's subtree ends at 6"):
        replace(tree, subtree_end=np.array([6, 4, 3, 4, 5])).validate()


def test_hand_example() -> None:
    tree = build_prefix_tree(make_batch([[7, 8, 9], [7, 8], [7, 5], [], [7, 8]], [[]] * 5))
    assert tree.parent.tolist() == [-1, 0, 1, 1, 3]
    assert tree.num_tokens.tolist() == [0, 1, 1, 1, 1]
    assert tree.sample_order.tolist() == [3, 2, 1, 4, 0]
    assert tree.sample_node.tolist() == [4, 3, 2, 0, 3]
    assert tree.samples_through.tolist() == [5, 4, 1, 3, 1]
    assert tree.prefix_match_rate == 1 - 4 / 9


def test_ids_are_sorted_as_numbers_and_told_apart_beyond_32_bits() -> None:
    tree = build_prefix_tree(make_batch([[256], [1], [2]], [[]] * 3))
    assert tree.sample_order.tolist() == [1, 2, 0]
    tree = build_prefix_tree(make_batch([[0, 5], [2**32, 6], [0, 7]], [[]] * 3))
    assert tree.unique_tokens == 5


def test_share_key_per_sample_shares_nothing() -> None:
    tree = build_prefix_tree(make_batch([[1, 2], [1, 2], [1, 2, 3]], [[], [], []]), [0, 1, 2])
    assert (tree.unique_tokens, tree.num_nodes) == (7, 4)
    assert tree.prefix_match_rate == 0.0


def test_no_samples() -> None:
    tree = build_prefix_tree(make_batch([], []))
    tree.validate()
    assert (tree.num_nodes, tree.unique_tokens, tree.prefix_match_rate) == (1, 0, 0.0)
    assert tree.representative.tolist() == [-1]


def test_many_identical_samples() -> None:
    tree = build_prefix_tree(make_batch([np.arange(50)] * 20_000, [[]] * 20_000))
    assert tree.num_tokens.tolist() == [0, 50]
    assert tree.samples_through.tolist() == [20_000, 20_000]
    assert (tree.sample_node == 1).all()


def test_nested_prefixes_make_a_chain() -> None:
    tree = build_prefix_tree(make_batch([np.zeros(n) for n in range(1, 1001)], [[]] * 1000))
    assert tree.num_nodes == 1001
    assert tree.path(1000) == list(range(1, 1001))
    assert tree.sample_node.tolist() == list(range(1, 1001))


def test_one_very_long_sample() -> None:
    long = np.arange(300_000) % 977
    fork = long.copy()
    fork[-1] = 0
    tree = build_prefix_tree(make_batch([long, fork, long], [[], [], []]))
    assert tree.num_tokens.tolist() == [0, 299_999, 1, 1]
    assert tree.sample_node.tolist() == [3, 2, 3]
