"""Tables of a rank by hand: sizes, blocks, op order and times."""

import numpy as np
import pytest

from psrl.core.plan.schedule import Op
from psrl.core.samples.sample import SampleBatch, make_batch
from psrl.planner.micro_batching.assemble import build_rank
from psrl.planner.micro_batching.built import BuiltRank, GroupProgram
from psrl.planner.placement.placement import Placement, RankSegments
from psrl.planner.problem import PlanningProblem
from tests.planner.cases import make_setup, update_of


def prompt_and_answers() -> SampleBatch:
    """A prompt of 4 tokens and three answers of 4 that train their last 3 tokens."""
    samples = [[1, 2, 3, 4] + [10 * i] * 4 for i in (1, 2, 3)]
    return make_batch(samples, [[(5, 8)]] * 3)


def placement_of(phase: str, **setup: object) -> Placement:
    problem = PlanningProblem(prompt_and_answers(), "", 0, make_setup(1, **setup), (phase,))
    (subproblem,) = problem.programs()
    return Placement(subproblem, np.zeros(3, np.int64), np.zeros(3, np.int64))


def one_node_each(placement: Placement, **options: object) -> BuiltRank:
    """The prompt and each answer in a micro-batch of its own."""
    segments = RankSegments(np.arange(4), np.arange(1, 5), np.array([0, 4, 4, 4]), np.full(4, 4))
    return build_rank(placement, 0, segments, **options)


def time_s(rank: BuiltRank) -> float:
    return GroupProgram((rank,)).time_s


def test_sizes_of_micro_batches() -> None:
    table = one_node_each(placement_of("update")).program.micro_batches
    assert table.num_tokens.tolist() == [4, 4, 4, 4]
    assert table.pairs.tolist() == [10, 26, 26, 26]
    assert table.head_tokens.tolist() == [0, 3, 3, 3]


def test_forward_only_blocks_die_with_their_last_reader() -> None:
    blocks = one_node_each(placement_of("reference")).program.blocks
    assert (blocks.micro_batch.tolist(), blocks.num_tokens.tolist()) == ([0], [4])
    assert (blocks.release_op.tolist(), blocks.release_micro_batch.tolist()) == (["forward"], [3])


def test_update_blocks_die_with_their_owners_backward_which_comes_last() -> None:
    program = one_node_each(placement_of("update")).program
    assert program.blocks.release_op.tolist() == ["backward"]
    assert program.blocks.release_micro_batch.tolist() == [0]
    assert program.ops()[-1] == Op("backward", 0)


def test_rows_of_one_lifetime_are_one_block() -> None:
    placement = placement_of("reference")
    # Prompt and first answer together: only the prompt's rows are read later.
    segments = RankSegments(
        np.array([0, 0, 1, 2]), np.arange(1, 5), np.array([0, 4, 4, 4]), np.full(4, 4)
    )
    blocks = build_rank(placement, 0, segments).program.blocks
    assert (blocks.start_row.tolist(), blocks.num_tokens.tolist()) == ([0], [4])
    # A prompt cut in two inside one micro-batch is still one block.
    segments = RankSegments(
        np.array([0, 0, 1, 1, 2]),
        np.array([1, 1, 2, 3, 4]),
        np.array([0, 1, 4, 4, 4]),
        np.array([1, 3, 4, 4, 4]),
    )
    assert build_rank(placement, 0, segments).program.blocks.num_tokens.tolist() == [4]


def test_everything_is_cached_per_chain_in_whole_granules() -> None:
    program = one_node_each(placement_of("update"), caching="everything").program
    assert program.blocks.num_tokens.tolist() == [4, 4, 4, 4]
    assert set(program.blocks.release_op) == {"end"}
    coarse = placement_of("update")
    coarse = Placement(coarse.subproblem, coarse.rank, coarse.share_key, granularity_tokens=16)
    # No common block of 16 tokens: three whole samples of 8 tokens, each in one block of 16.
    segments = RankSegments(np.arange(3), np.arange(1, 4), np.zeros(3, np.int64), np.full(3, 8))
    blocks = build_rank(coarse, 0, segments, "everything").program.blocks
    assert blocks.num_tokens.tolist() == [8, 8, 8]
    assert blocks.allocated_tokens.tolist() == [16, 16, 16]


def test_time_without_a_pipeline_is_the_sum_of_the_ops() -> None:
    kept = one_node_each(placement_of("update"))
    table = kept.program.micro_batches
    assert time_s(kept) == pytest.approx(float((table.forward_s + table.backward_s).sum()))
    # Layer recompute adds the layers' forward, a dropped micro-batch its whole forward.
    recomputed = one_node_each(placement_of("update", recompute="full"))
    cost = kept.placement.problem.cost_model
    again = cost.forward_s(table.num_tokens.astype(float), table.pairs.astype(float), 0.0)
    assert time_s(recomputed) == pytest.approx(time_s(kept) + float(again.sum()))
    activation = np.array(["drop", "keep", "keep", "keep"])
    dropped = one_node_each(placement_of("update"), activation=activation)
    assert time_s(dropped) == pytest.approx(time_s(kept) + float(table.forward_s[0]))
    assert Op("recompute", 0) in dropped.program.ops()


def test_time_of_a_pipeline_has_its_fill() -> None:
    one = one_node_each(placement_of("reference"))
    two = one_node_each(placement_of("reference", pipeline_model_parallel_size=2))
    table = two.program.micro_batches
    assert time_s(two) > float(table.forward_s.sum())
    assert time_s(two) < time_s(one)


def test_work_is_a_lower_bound_on_time() -> None:
    for stages in (1, 2, 4):
        program = one_node_each(placement_of("update", pipeline_model_parallel_size=stages))
        assert 0.0 < program.work_s < time_s(program)


def test_unit_costs_add_up_over_phases() -> None:
    update = update_of(prompt_and_answers(), make_setup(1))
    forward = placement_of("reference").subproblem.unit_costs
    recompute = update_of(prompt_and_answers(), make_setup(1, recompute="full")).unit_costs
    assert update.unit_costs.token_s == pytest.approx(3 * forward.token_s)
    assert recompute.token_s == pytest.approx(4 * forward.token_s)
    assert recompute.head_s == pytest.approx(update.unit_costs.head_s)
