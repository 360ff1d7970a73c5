"""The visibility rule gives every query exactly the tokens on its path."""

import numpy as np
import pytest

from psrl.core.errors import PlanError
from psrl.core.plan.packing import LOCAL, Chain, KeyRun, PackedMicroBatch, pack_rank
from psrl.kernels import visibility
from tests.kernels.attention_cases import packed_tokens, random_case
from tests.random_plans import RandomProgram


def paths(case: RandomProgram) -> list[set[int]]:
    """[U] unique tokens on the path of each unique token, itself included."""
    tree, found = case.tree, []
    for node in range(tree.num_nodes):
        above = {
            t
            for v in tree.path(int(tree.parent[node]))
            for t in range(tree.token_start[v], tree.token_start[v + 1])
        }
        for token in range(tree.token_start[node], tree.token_start[node + 1]):
            above = above | {token}
            found.append(above)
    return found


def test_mask_is_the_path_of_every_query() -> None:
    num_cached = 0
    for seed in range(100):
        case = random_case(seed, num_share_keys=1 + seed % 2, granularity_tokens=1 + seed % 3)
        path = paths(case)
        for rank in range(case.num_ranks):
            block_tokens: dict[int, np.ndarray] = {}
            for packed in pack_rank(case.program.on_rank(rank), case.tree):
                tokens = packed_tokens(case, packed).numpy()
                for block, start, count in packed.cached:
                    block_tokens[block] = tokens[start : start + count]
                rule = visibility(packed)
                cached = [block_tokens[r.source][r.start : r.end] for r in rule.runs]
                slots = np.concatenate([*cached, tokens])
                mask = rule.mask(packed.total_tokens)
                assert mask.any(axis=0).all()  # rows that no query sees get no slot
                for query, visible in zip(tokens.tolist(), mask, strict=True):
                    assert sorted(slots[visible].tolist()) == sorted(path[query])
                num_cached += len(slots) - len(tokens)
    assert num_cached > 500


def test_packed_runs_are_not_empty() -> None:
    for seed in range(60):
        case = random_case(seed, num_ranks=1, max_block_tokens=2)
        for packed in pack_rank(case.program, case.tree):
            runs = [run for chain in packed.chains for run in chain.runs]
            assert all(run.start < run.end for run in runs)


def packed_of(*chains: Chain) -> PackedMicroBatch:
    """A micro-batch of one segment with the given chains."""
    total = chains[-1].end
    return PackedMicroBatch(0, *(np.array([x]) for x in (1, 0, total)), chains, ())


def test_example_by_hand() -> None:
    # Two branches below a cached prefix of five rows part after the first local token.
    rule = visibility(
        packed_of(
            Chain(0, 3, (KeyRun(7, 0, 5),)), Chain(3, 4, (KeyRun(7, 0, 5), KeyRun(LOCAL, 0, 1)))
        )
    )
    assert rule.runs == (KeyRun(7, 0, 5),)
    assert rule.query_start.tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert rule.query_end.tolist() == [4, 4, 4, 4, 4, 4, 3, 3, 4]


@pytest.mark.parametrize("source", [LOCAL, 7])
def test_broken_order_is_refused(source: int) -> None:
    # The third chain returns to a branch that the second has left.
    first = Chain(0, 2, () if source == LOCAL else (KeyRun(source, 0, 1),))
    chains = (first, Chain(2, 3, ()), Chain(3, 4, (KeyRun(source, 0, 1),)))
    with pytest.raises(PlanError, match="depth-first"):
        visibility(packed_of(*chains))


def test_rows_that_no_query_sees_get_no_slot() -> None:
    rule = visibility(packed_of(Chain(0, 2, (KeyRun(7, 1, 2), KeyRun(7, 4, 6), KeyRun(3, 2, 3)))))
    assert rule.runs == (KeyRun(3, 2, 3), KeyRun(7, 1, 2), KeyRun(7, 4, 6))
    assert rule.query_start.tolist() == [0, 0, 0, 0, 0, 1]
    assert rule.query_end.tolist() == [2, 2, 2, 2, 2, 2]
