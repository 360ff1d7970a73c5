"""What --explain says about the terms of the cost model: they add up, and what they decide."""

import numpy as np
import pytest

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.planner import cost_terms, format_cost_terms, make_plan
from psrl.planner.explanation.cost_terms import BUBBLES
from tests.planner.cases import make_moe_setup, make_setup, nasty_batch, problem_of, workloads


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("policy", ["verl", pytest.param("psrl", marks=pytest.mark.slow)])
def test_terms_add_up_to_the_prediction(num_stages: int, recompute: str, policy: str) -> None:
    batch = nasty_batch(3, 12, num_mini_batches=2)
    setup = make_setup(2, num_stages, max_tokens=64, recompute=recompute)
    plan = make_plan(problem_of(batch, setup), policy)
    terms = cost_terms(plan, batch)
    assert len(terms) == len(plan.programs)
    total_s = sum(len(p.phases) * p.time_s for p in terms)
    assert total_s == pytest.approx(plan.predicted["makespan_s"], rel=1e-12)
    for program in terms:
        assert all(seconds >= -1e-12 for seconds in program.seconds.values())
        assert ("optimizer_step" in program.seconds) == (program.phases == ("update",))
        assert ("accumulation" in program.seconds) == (program.phases == ("update",))
        if num_stages == 1:
            assert program.seconds["message"] == 0.0
            assert program.seconds[BUBBLES] == pytest.approx(0.0, abs=1e-12)
        else:
            assert program.seconds["message"] > 0.0
            assert program.seconds[BUBBLES] > 0.0


@pytest.mark.slow
def test_repeated_forwards_count() -> None:
    batch = workloads()["long_path"]
    roomy = problem_of(batch, make_setup(1, max_tokens=1024), ("update",))
    peak = make_plan(roomy, "sharing_agnostic").predicted["peak_memory_bytes"]
    tight = make_setup(1, max_tokens=1024, memory_bytes=int(peak))
    tight = tight.model_copy(
        update={"planning": tight.planning.model_copy(update={"memory_fraction": 0.9})}
    )
    plan = make_plan(problem_of(batch, tight, ("update",)), "sharing_agnostic")
    assert {"recompute", "drop"} & set(plan.programs[0].micro_batches.activation)
    (terms,) = cost_terms(plan, batch)
    assert terms.time_s == pytest.approx(plan.predicted["makespan_s"], rel=1e-12)


@pytest.mark.slow
def test_ranks_that_share_experts_pay_for_the_slowest_of_each_step() -> None:
    batch = workloads()["stars"]
    plan = make_plan(
        problem_of(batch, make_moe_setup(4, expert_model_parallel_size=2, max_tokens=512)), "psrl"
    )
    terms = cost_terms(plan, batch)
    total_s = sum(len(p.phases) * p.time_s for p in terms)
    assert total_s == pytest.approx(plan.predicted["makespan_s"], rel=1e-12)
    assert all(p.seconds["expert_exchange"] > 0.0 for p in terms)


def test_accumulation_is_what_every_backward_of_the_rank_pays() -> None:
    batch = workloads()["stars"]
    setup = make_setup(2, max_tokens=256)
    plan = make_plan(problem_of(batch, setup, ("update",)), "psrl")
    (terms,) = cost_terms(plan, batch)
    costs = choose_cost_model(setup.model, setup.cluster, setup.parallel, None)
    each_s = costs.op_parts(0, 1, 0, 1, is_backward=True)["accumulation"]
    assert terms.seconds["accumulation"] == pytest.approx(terms.num_micro_batches * each_s)


@pytest.mark.slow
def test_cheaper_micro_batches_are_cut_finer() -> None:
    """A pipeline gains from fine cuts what main gradients take from them."""
    batch = workloads()["stars"]
    setup = make_setup(1, 2, max_tokens=4096)
    slow = setup.cluster.device.model_copy(update={"memory_bandwidth_bytes_per_s": 5e10})
    cluster = setup.cluster.model_copy(update={"device": slow})
    setup = setup.model_copy(update={"cluster": cluster})
    plan = make_plan(problem_of(batch, setup, ("update",)), "psrl")
    (terms,) = cost_terms(plan, batch)
    assert terms.without["accumulation"] > terms.num_micro_batches
    text = format_cost_terms([terms])
    assert "accumulation" in text
    assert str(terms.without["accumulation"]) in text


def test_policies_that_do_not_cut_by_time_have_no_cuts_to_explain() -> None:
    batch = workloads()["stars"]
    plan = make_plan(problem_of(batch, make_setup(2, max_tokens=256), ("update",)), "verl")
    (terms,) = cost_terms(plan, batch)
    assert terms.without == {}
    assert terms.as_json()["num_micro_batches"] == terms.num_micro_batches
    assert np.isfinite(terms.time_s)
