"""The lists of tiles visit every visible pair once, mask exactly where needed, and waste little."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import PlanError
from psrl.core.plan.packing import LOCAL, Chain, KeyRun, PackedMicroBatch, pack_rank
from psrl.kernels.attention.key_rows import (
    KeyRows,
    cached_rows,
    key_runs,
    local_rows,
    rows_of_parents,
)
from psrl.kernels.attention.visibility_rule import visibility
from psrl.kernels.benchmark.forests import (
    Segment,
    join_forests,
    level_tree,
    pack_forest,
    parents,
    random_forest,
)
from psrl.kernels.benchmark.table import plan_cost
from psrl.kernels.triton.block_index import key_index, query_index
from tests.kernels.attention_cases import random_case

STAR = [Segment(-1, 4096), *[Segment(0, 200 + 13 * i) for i in range(64)]]


def ancestor_mask(parent: np.ndarray) -> np.ndarray:
    """[T, T] whether a query sees a key, from the parents alone."""
    mask = np.eye(len(parent), dtype=bool)
    for token, above in enumerate(parent.tolist()):
        if above >= 0:
            mask[token] |= mask[above]
    return mask


@pytest.mark.slow
def test_runs_match_the_rule_row_by_row() -> None:
    num_cached = 0
    for seed in range(200):
        case = random_case(seed)
        for rank in range(case.num_ranks):
            for packed in pack_rank(case.program.on_rank(rank), case.tree):
                rule, runs = visibility(packed), key_runs(packed)
                cached, local = cached_rows(runs, None), local_rows(runs)
                start = np.concatenate([cached.query_start, local.query_start])
                end = np.concatenate([cached.query_end, local.query_end])
                assert start.tolist() == rule.query_start.tolist()
                assert end.tolist() == rule.query_end.tolist()
                num_cached += len(cached.row)
    assert num_cached > 1000


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(0, 150), st.integers(1, 30))
def test_parent_pointers_give_the_same_rows(seed: int, num_tokens: int, longest: int) -> None:
    segments = random_forest(np.random.default_rng(seed), num_tokens, longest)
    rows = rows_of_parents(parents(segments))
    query = np.arange(num_tokens)[:, None]
    visible = (rows.query_start <= query) & (query < rows.query_end)
    assert (visible == ancestor_mask(parents(segments))).all()
    if num_tokens:
        packed = local_rows(key_runs(pack_forest(segments)[0]))
        assert packed.query_end.tolist() == rows.query_end.tolist()


@pytest.mark.parametrize("parent", [[-1, 0, 0, 1], [-1, 0, -1, 1], [-1, 2, 1], [0]])
def test_parents_that_are_not_depth_first_are_refused(parent: list[int]) -> None:
    with pytest.raises(PlanError, match="not on the path"):
        rows_of_parents(np.array(parent))


def test_chains_that_are_not_depth_first_are_refused() -> None:
    chains = (
        Chain(0, 2, ()),
        Chain(2, 4, (KeyRun(LOCAL, 0, 2),)),
        Chain(4, 6, ()),
        Chain(6, 8, (KeyRun(LOCAL, 0, 2),)),
    )
    column = np.full(4, 2)
    packed = PackedMicroBatch(3, column, column, column, chains, ())
    with pytest.raises(PlanError, match=r"micro-batch 3: row 0 of source -1 is seen by 6"):
        key_runs(packed)


def scattered_rows(rng: np.random.Generator, num_queries: int) -> KeyRows:
    """Cached rows with gaps in their buffer, each visible to a random range of queries."""
    row = np.flatnonzero(rng.random(200) < 0.4)
    bounds = np.sort(rng.integers(0, num_queries + 1, (len(row), 2)), axis=1)
    live = bounds[:, 0] < bounds[:, 1]
    return KeyRows(row[live], bounds[live, 0], bounds[live, 1])


@given(st.integers(0, 10_000), st.integers(1, 150), st.sampled_from([8, 16, 24]))
def test_visits_cover_exactly_what_is_visible(seed: int, num_tokens: int, block_q: int) -> None:
    rng = np.random.default_rng(seed)
    local = rows_of_parents(parents(random_forest(rng, num_tokens, int(rng.integers(1, 30)))))
    cached, block_k = scattered_rows(rng, num_tokens), int(rng.choice([4, 16]))
    index = query_index(cached, local, num_tokens, block_q, block_k)
    query = np.arange(num_tokens)
    seen = np.zeros((2, num_tokens, 300), np.int64)
    for block, (first, *parts) in enumerate(index.offsets):
        queries = query[block * block_q : (block + 1) * block_q, None]
        for part, (begin, end) in enumerate(pairwise([first, *parts])):
            for visit in range(begin, end):
                slots = slice(index.slot[visit], index.slot[visit] + block_k)
                visible = (index.query_start[slots] <= queries) & (queries < index.query_end[slots])
                assert part % 2 or visible.all()
                assert not (part % 2 and visible.all())
                rows = index.row[visit] + np.arange(block_k)
                seen[part // 2, queries, rows] += visible
    for source, rows in enumerate((cached, local)):
        expected = np.zeros((num_tokens, 300), np.int64)
        expected[:, rows.row] = (rows.query_start <= query[:, None]) & (
            query[:, None] < rows.query_end
        )
        assert (seen[source] == expected).all()
    assert sorted(index.order) == list(range(len(index.offsets)))
    assert (np.diff(np.diff(index.offsets)[index.order].sum(1)) <= 0).all()


@given(st.integers(0, 10_000), st.integers(1, 150))
def test_local_ranges_hold_no_empty_block(seed: int, num_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rows_of_parents(parents(random_forest(rng, num_tokens)))
    index = key_index(rows, num_tokens, 8, 16)
    query = np.arange(-(-num_tokens // 8) * 8)
    for tile, (begin, free_begin, free_end, end) in enumerate(index.ranges):
        slots = slice(tile * 16, tile * 16 + 16)
        visible = (index.query_start[slots] <= query[:, None]) & (
            query[:, None] < index.query_end[slots]
        )
        blocks = visible.reshape(-1, 8, 16)
        some = blocks.any((1, 2))
        blocks = blocks | (query >= num_tokens).reshape(-1, 8, 1)
        assert np.flatnonzero(some).tolist() == list(range(begin, end))
        free = np.flatnonzero(some & blocks.all((1, 2))).tolist()
        assert free == list(range(free_begin, free_end))
    assert (np.diff(np.diff(index.ranges[:, ::3])[index.order, 0]) <= 0).all()


def forest_cases() -> dict[str, tuple[list[list[Segment]], float, float]]:
    """Trees, and bounds on computed area / visible pairs of the forward and the dK/dV tiles."""
    rng = np.random.default_rng(0)
    prompts = [
        [Segment(-1, int(rng.integers(512, 1537)))]
        + [Segment(0, int(n)) for n in rng.integers(200, 2001, 16)]
        for _ in range(8)
    ]
    return {
        "8 prompts x 16": (prompts, 1.14, 1.10),
        "1 prompt x 64": ([STAR], 1.04, 1.03),
        "wide tree": ([level_tree(rng, [(2048, 2048), *[(300, 1000)] * 2], 4)] * 2, 1.09, 1.06),
        "deep agent": ([level_tree(rng, [(1500, 3000), *[(100, 600)] * 6], 2)], 1.10, 1.08),
        "tiny nodes": ([level_tree(rng, [(200, 400), *[(5, 40)] * 7], 2)] * 12, 1.83, 1.66),
        "one path": ([[Segment(-1, 60_000)]], 1.01, 1.01),
    }


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", forest_cases())
def test_computed_area_is_close_to_the_visible_pairs(name: str, head_dim: int) -> None:
    trees, forward_bound, keys_bound = forest_cases()[name]
    (packed,) = pack_forest(join_forests(trees))
    cost = plan_cost(packed, head_dim)
    assert 1 < cost.forward_area <= forward_bound
    assert 1 < cost.dkv_area <= keys_bound
