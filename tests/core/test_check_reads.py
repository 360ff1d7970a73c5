"""Reads and needed nodes of all ranks at once against a rank at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.plan.check_reads import ProgramByRank, block_reads
from psrl.core.plan.packing import pack_rank
from psrl.core.tree.rank_nodes import nodes_of_ranks
from tests.core.cases import random_case


@given(st.integers(0, 100_000))
def test_block_reads_are_those_of_the_packed_micro_batches(seed: int) -> None:
    case = random_case(seed)
    ranked = ProgramByRank.of(0, case.program, case.tree, case.num_ranks)
    reads = block_reads(ranked)
    blocks, table = ranked.blocks, ranked.micro_batches
    found = {
        (int(table.rank[m]), int(table.micro_batch[m]), int(blocks.block[b]))
        for m, b in zip(reads.reader.tolist(), reads.block.tolist(), strict=True)
    }
    expected = {
        (rank, packed.index, block)
        for rank in range(case.num_ranks)
        for packed in pack_rank(case.program.on_rank(rank), case.tree)
        for block in packed.read_blocks
    }
    assert found == expected
    assert len(reads.reader) == len(expected)


@given(st.integers(0, 100_000), st.integers(1, 4))
def test_nodes_of_ranks_are_the_paths_of_their_samples(seed: int, num_ranks: int) -> None:
    tree = random_case(seed).tree
    rank = np.random.default_rng(seed).integers(num_ranks, size=len(tree.sample_node))
    expected = {
        (r, v)
        for r, end in zip(rank.tolist(), tree.sample_node.tolist(), strict=True)
        for v in tree.path(end)
    }
    ranks, nodes = nodes_of_ranks(tree, rank)
    assert list(zip(ranks.tolist(), nodes.tolist(), strict=True)) == sorted(expected)
