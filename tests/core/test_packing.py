"""Packed micro-batches against brute force: who sees whom, what is cached, where losses sit."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import PlanError
from psrl.core.plan.packing import LOCAL, loss_edges, pack_rank, visible_pairs
from psrl.core.plan.plan import Program
from psrl.core.tree.prefix_tree import PrefixTree
from tests.core.cases import random_case, with_values, without_row

TreeToken = tuple[int, int]  # node and depth

seeds = st.integers(0, 100_000)


def rows_of(program: Program) -> dict[int, list[TreeToken]]:
    """Tree token of each row of each micro-batch of one rank."""
    rows: dict[int, list[TreeToken]] = {m: [] for m in program.micro_batches.micro_batch.tolist()}
    table = program.segments
    for m, v, start, count in zip(
        table.micro_batch.tolist(),
        table.node.tolist(),
        table.start_depth.tolist(),
        table.num_tokens.tolist(),
        strict=True,
    ):
        rows[m] += [(v, start + i) for i in range(count)]
    return rows


def ancestors(tree: PrefixTree, token: TreeToken) -> set[TreeToken]:
    """The token itself and all before it on its path."""
    node, depth = token
    return {
        (v, d)
        for v in tree.path(node)
        for d in range(int(tree.start_depth[v]), min(int(tree.end_depth[v]), depth + 1))
    }


def cached_rows(program: Program, rows: dict[int, list[TreeToken]]) -> dict[int, list[TreeToken]]:
    """Tree tokens of each block."""
    table = program.blocks
    return {
        block: rows[owner][start : start + count]
        for block, owner, start, count in zip(
            table.block.tolist(),
            table.micro_batch.tolist(),
            table.start_row.tolist(),
            table.num_tokens.tolist(),
            strict=True,
        )
    }


@given(seeds)
def test_every_query_sees_exactly_its_ancestors(seed: int) -> None:
    case = random_case(seed)
    for rank in range(case.num_ranks):
        program = case.program.on_rank(rank)
        rows = rows_of(program)
        blocks = cached_rows(program, rows)
        for packed in pack_rank(program, case.tree):
            mine = rows[packed.index]
            assert packed.total_tokens == len(mine)
            next_query = 0
            for chain in packed.chains:
                assert chain.start == next_query < chain.end
                next_query = chain.end
                before: list[TreeToken] = []
                for run in chain.runs:
                    source = mine if run.source == LOCAL else blocks[run.source]
                    assert 0 <= run.start < run.end <= len(source)
                    before += source[run.start : run.end]
                for query in range(chain.start, chain.end):
                    seen = before + mine[chain.start : query + 1]
                    assert Counter(seen) == Counter(ancestors(case.tree, mine[query]))
                if chain.start:  # the chain before could not be continued
                    previous, own = mine[chain.start - 1], ancestors(case.tree, mine[chain.start])
                    assert previous not in own or previous[1] + 1 < mine[chain.start][1]
            assert next_query == len(mine)


@given(seeds)
def test_packed_arrays_describe_the_rows(seed: int) -> None:
    case = random_case(seed)
    program = case.program.on_rank(0)
    rows = rows_of(program)
    for packed in pack_rank(program, case.tree):
        mine = rows[packed.index]
        assert packed.position_ids.tolist() == [depth for _, depth in mine]
        assert packed.segment_start.tolist() == [0, *np.cumsum(packed.num_tokens)]
        assert packed.pairs == sum(depth + 1 for _, depth in mine)
        read = {r.source for c in packed.chains for r in c.runs if r.source != LOCAL}
        assert packed.read_blocks == read


@given(seeds)
def test_cached_rows_are_the_block_table(seed: int) -> None:
    case = random_case(seed)
    program = case.program.on_rank(0)
    table = program.blocks
    expected = zip(table.micro_batch, table.block, table.start_row, table.num_tokens, strict=True)
    found = [(p.index, *c) for p in pack_rank(program, case.tree) for c in p.cached]
    assert sorted(found) == sorted(tuple(map(int, row)) for row in expected)


@given(seeds)
def test_loss_edges_are_complete_and_at_the_right_rows(seed: int) -> None:
    case = random_case(seed)
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(case.num_ranks):
        rows = rows_of(case.program.on_rank(rank))
        edges = case.edges(rank)
        for sample, token, micro_batch, row in zip(
            edges.sample.tolist(),
            edges.token.tolist(),
            edges.micro_batch.tolist(),
            edges.row.tolist(),
            strict=True,
        ):
            assert case.program.assignments.rank[sample] == rank
            node, depth = rows[micro_batch][row]
            assert depth == token - 1
            assert node in case.tree.path(int(case.tree.sample_node[sample]))
            found[sample, token] += 1
        parts = [edges.of(m) for m in rows]
        assert sum(len(part.token) for part in parts) == len(edges.token)
        assert all((part.micro_batch == m).all() for m, part in zip(rows, parts, strict=True))
    expected = Counter(
        (sample, token)
        for sample in range(case.samples.num_samples)
        for start, end in case.samples.sample_loss_spans(sample).tolist()
        for token in range(start, end)
    )
    assert found == expected


@given(st.integers(0, 1000), st.integers(0, 60))
def test_visible_pairs_count_every_key_of_every_query(start: int, count: int) -> None:
    found = visible_pairs(np.array([start]), np.array([count]))
    assert found.tolist() == [sum(start + i + 1 for i in range(count))]


def case_with_cached_reads() -> tuple[Program, PrefixTree, int]:
    """One rank's program, its tree, and a block that another micro-batch reads."""
    for seed in range(100):
        case = random_case(seed)
        program = case.program.on_rank(0)
        for packed in pack_rank(program, case.tree):
            if packed.read_blocks:
                return program, case.tree, min(packed.read_blocks)
    raise AssertionError("no seed reads a block")


def test_missing_block_is_named() -> None:
    program, tree, block = case_with_cached_reads()
    row = program.blocks.block.tolist().index(block)
    lacking = replace(program, blocks=without_row(program.blocks, row))
    with pytest.raises(PlanError, match="no block caches them"):
        pack_rank(lacking, tree)


def test_block_that_begins_too_late_or_ends_too_early() -> None:
    program, tree, block = case_with_cached_reads()
    row = program.blocks.block.tolist().index(block)
    start, count = int(program.blocks.start_row[row]), int(program.blocks.num_tokens[row])
    for changed in (
        with_values(program.blocks, row, start_row=start + 1),
        with_values(program.blocks, row, num_tokens=count - 1),
    ):
        with pytest.raises(PlanError, match="no block caches them"):
            pack_rank(replace(program, blocks=changed), tree)


def test_rank_without_samples() -> None:
    case = random_case(0)
    program = case.program.on_rank(99)
    assert pack_rank(program, case.tree) == []
    assert len(loss_edges(case.program, 99, case.tree, case.samples).token) == 0
