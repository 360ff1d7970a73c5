"""The programs that other tests build on are complete, valid and varied."""

from dataclasses import fields

import numpy as np
import pytest

from psrl.core.plan.block_cache import BlockCache
from psrl.core.plan.packing import pack_rank
from psrl.core.plan.schedule import can_finish, stage_ops
from tests.random_plans import RandomProgram, random_batch, random_program


def cases(count: int = 60) -> list[RandomProgram]:
    return [
        random_program(
            np.random.default_rng(seed),
            num_ranks=1 + seed % 3,
            is_update=seed % 4 > 0,
            random_order=seed % 2 > 0,
            activations=("keep", "recompute", "drop"),
            max_block_tokens=(None, 2, 4)[seed % 3],
            num_share_keys=1 + seed % 2,
            granularity_tokens=1 + seed % 3,
        )
        for seed in range(count)
    ]


def test_same_seed_gives_the_same_program() -> None:
    first, second = (random_program(np.random.default_rng(7)).program for _ in range(2))
    for name in ("assignments", "segments", "micro_batches", "schedule", "blocks"):
        a, b = getattr(first, name), getattr(second, name)
        for f in fields(a):
            assert getattr(a, f.name).tolist() == getattr(b, f.name).tolist()


def test_every_rank_computes_the_tokens_of_its_samples_once() -> None:
    for case in cases():
        tree, assignments = case.tree, case.program.assignments
        assert sorted(assignments.sample.tolist()) == list(range(case.batch.num_samples))
        for rank in range(case.num_ranks):
            needed = {
                (v, d)
                for s in np.flatnonzero(assignments.rank == rank)
                for v in tree.path(int(tree.sample_node[s]))
                for d in range(tree.start_depth[v], tree.end_depth[v])
            }
            table = case.program.on_rank(rank).segments
            computed = [
                (v, d)
                for v, start, n in zip(
                    table.node.tolist(), table.start_depth, table.num_tokens, strict=True
                )
                for d in range(start, start + n)
            ]
            assert len(computed) == len(needed)
            assert set(computed) == needed


def test_micro_batch_sizes_match_the_packing() -> None:
    for case in cases():
        for rank in range(case.num_ranks):
            table = case.program.on_rank(rank).micro_batches
            packed = pack_rank(case.program.on_rank(rank), case.tree)
            edges = case.edges(rank)
            for i, p in enumerate(packed):
                assert table.num_tokens[i] == p.total_tokens
                assert table.pairs[i] == p.pairs
                assert table.head_tokens[i] == len(set(edges.of(i).row.tolist()))


def test_loss_edges_cover_all_trained_tokens() -> None:
    for case in cases():
        found = [len(case.edges(rank).sample) for rank in range(case.num_ranks)]
        assert sum(found) == case.batch.loss_tokens


def test_blocks_live_while_they_are_read() -> None:
    num_reads = 0
    for case in cases():
        for rank in range(case.num_ranks):
            program = case.program.on_rank(rank)
            packed = pack_rank(program, case.tree)
            cache = BlockCache(program.blocks)
            for op in program.ops():
                cache.begin(op)
                for block in packed[op.micro_batch].read_blocks:
                    cache.extent(block)
                    num_reads += 1
                cache.end(op)
            cache.end_program()
    assert num_reads > 300


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_schedules_do_not_deadlock(num_stages: int) -> None:
    for case in cases():
        for rank in range(case.num_ranks):
            program = case.program.on_rank(rank)
            ops = program.ops()
            count = len(program.micro_batches)
            for kind in ("forward", "backward")[: 1 + program.is_update]:
                done = [op.micro_batch for op in ops if op.kind == kind]
                assert sorted(done) == list(range(count))
            stages = [stage_ops(ops, num_stages, s) for s in range(num_stages)]
            assert can_finish(stages)


def test_batches_have_duplicates_samples_inside_others_and_one_token_nodes() -> None:
    duplicates = inside = one_token = 0
    for seed in range(20):
        case = random_program(np.random.default_rng(seed))
        texts = {tuple(case.batch.sample_symbols(s)) for s in range(case.batch.num_samples)}
        duplicates += case.batch.num_samples - len(texts)
        inner = set(case.tree.parent.tolist())
        inside += sum(node in inner for node in case.tree.sample_node.tolist())
        one_token += int((case.tree.num_tokens == 1).sum())
    assert min(duplicates, inside, one_token) > 10


def test_options_of_random_batch() -> None:
    batch = random_batch(
        np.random.default_rng(0), num_samples=40, vocab_size=500, duplicates=0, ending_inside=0
    )
    assert batch.num_samples == 40
    assert batch.symbols.max() > 3
    assert set(batch.group_id.tolist()) == {"task0", "task1"}
