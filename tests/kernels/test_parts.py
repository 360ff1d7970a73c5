"""What only the parts implementation has: cut chains and private torch operators."""

import pytest
import torch

from psrl.core.errors import BackendError
from psrl.core.plan.packing import LOCAL, Chain, KeyRun, pack_rank
from psrl.kernels import tree_attention
from psrl.kernels.attention import parts
from psrl.kernels.attention.parts import split_chains
from tests.kernels.attention_cases import branching_case, random_case, random_rows


def keys_of_queries(chains: list[Chain]) -> list[tuple[int, set[tuple[int, int]]]]:
    """Every query with the (source, row) pairs that it sees."""
    return [
        (query, {(r.source, i) for r in runs for i in range(r.start, r.end)} | own)
        for start, end, runs in chains
        for query in range(start, end)
        for own in [{(LOCAL, i) for i in range(start, query + 1)}]
    ]


@pytest.mark.parametrize("max_queries", [1, 2, 3, 100])
def test_split_chains_keep_what_each_query_sees(max_queries: int) -> None:
    for seed in range(40):
        case = random_case(seed, num_ranks=1)
        for packed in pack_rank(case.program, case.tree):
            short = split_chains(packed.chains, max_queries)
            assert all(chain.end - chain.start <= max_queries for chain in short)
            assert keys_of_queries(short) == keys_of_queries(list(packed.chains))


def test_split_joins_neighbouring_local_runs() -> None:
    chain = Chain(4, 9, (KeyRun(3, 0, 2), KeyRun(LOCAL, 1, 4)))
    assert split_chains([chain], 3) == [
        Chain(4, 7, (KeyRun(3, 0, 2), KeyRun(LOCAL, 1, 4))),
        Chain(7, 9, (KeyRun(3, 0, 2), KeyRun(LOCAL, 1, 7))),
    ]
    assert split_chains([Chain(4, 9, (KeyRun(LOCAL, 0, 2),))], 3)[1].runs == (
        KeyRun(LOCAL, 0, 2),
        KeyRun(LOCAL, 4, 7),
    )


def test_missing_operator_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BACKWARD_OPERATOR", "no_such_operator")
    case = branching_case(4, max_micro_batches=1)
    (packed,) = pack_rank(case.program, case.tree)
    with pytest.raises(BackendError, match=r'(?s)torch \d.*implementation="reference"'):
        tree_attention(*random_rows(case, 0), packed, implementation="parts")


def test_other_devices_are_refused() -> None:
    case = branching_case(4, max_micro_batches=1)
    (packed,) = pack_rank(case.program, case.tree)
    rows = [x.to("meta") for x in random_rows(case, 0, dtype=torch.float32)]
    with pytest.raises(BackendError, match="runs on the CPU, the tensors are on meta"):
        tree_attention(*rows, packed, implementation="parts")
