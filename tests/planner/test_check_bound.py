"""Certificates of every kind are verified, and refused once anything in them is changed."""

from dataclasses import replace

import numpy as np
import pytest

from psrl.core.errors import PlanError
from psrl.core.plan.bound import Bound
from psrl.core.plan.check_bound import check_bounds, is_proven
from psrl.core.plan.plan import Plan
from psrl.planner import make_plan
from psrl.planner.bounds.forced_copies import rank_cost_bound
from psrl.planner.bounds.group_bound import raise_by_groups
from psrl.planner.bounds.leaf_bound import raise_by_leaves
from psrl.planner.problem import ProgramProblem
from tests.planner.cases import make_setup, tree_batch, update_of
from tests.planner.test_bounds import chains_with_nested_samples, claim_of


def of_groups() -> tuple[ProgramProblem, Bound]:
    """Three groups on two ranks: one must be split, and its large root is paid twice."""
    subproblem = update_of(tree_batch([(60, [(30, [])] * 4)] * 3), make_setup(2))
    copies = rank_cost_bound(subproblem.cost_tree, 2)
    return subproblem, raise_by_groups(subproblem.cost_tree, 2, copies)


def of_leaves() -> tuple[ProgramProblem, Bound]:
    rng = np.random.default_rng(1)
    groups = [
        (int(rng.integers(100, 400)), [(int(n), []) for n in rng.integers(50, 400, size=3)])
        for _ in range(4)
    ]
    subproblem = update_of(tree_batch(groups), make_setup(5))
    tree = subproblem.cost_tree
    return subproblem, raise_by_leaves(tree, 5, rank_cost_bound(tree, 5), tree.total_s, 30)


def simple(kind: str) -> tuple[ProgramProblem, Bound]:
    nested = {
        "average work": [(100, [])] * 14,
        "longest sample": [(900, []), (10, []), (10, [])],
        "forced copies": [(300, [(100, [])] * 14)],
        "enumeration": [(100, []), (100, []), (100, [])],
    }
    subproblem = update_of(tree_batch(nested[kind]), make_setup(2))
    return subproblem, subproblem.bound


KINDS = ["average work", "longest sample", "forced copies", "enumeration"]
KINDS += ["group configurations", "leaf configurations"]


def case_of(kind: str) -> tuple[ProgramProblem, Bound]:
    makers = {"group configurations": of_groups, "leaf configurations": of_leaves}
    subproblem, bound = makers[kind]() if kind in makers else simple(kind)
    assert bound.kind == kind
    return subproblem, bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_proves_its_limit_and_not_much_more(kind: str) -> None:
    subproblem, bound = case_of(kind)
    assert is_proven(claim_of(subproblem, bound))
    higher = bound.model_copy(update={"limit_s": bound.limit_s * 1.05})
    assert not is_proven(claim_of(subproblem, higher))
    for other in KINDS:
        claimed = claim_of(subproblem, Bound(kind=other, limit_s=2 * bound.limit_s))
        assert not is_proven(claimed), other
    assert is_proven(claim_of(subproblem, Bound(kind=kind, limit_s=0.0)))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("group configurations", {"prices": ()}),
        ("group configurations", {"prices": (1.0,)}),
        ("group configurations", {"prices": (1.0, 0.0, 0.0)}),
        ("group configurations", {"prices": (-1.0, -1.0, -1.0)}),
        ("leaf configurations", {"prices": ()}),
        ("leaf configurations", {"nodes": (), "prices": ()}),
        ("leaf configurations", {"nodes": (1, 1), "prices": (1.0, 1.0)}),
        ("leaf configurations", {"nodes": (-1,), "prices": (1.0,)}),
        ("leaf configurations", {"nodes": (10**6,), "prices": (1.0,)}),
        ("leaf configurations", {"nodes": (1,), "prices": (-1.0,)}),
        ("enumeration", {"samples": ()}),
        ("enumeration", {"samples": (0,)}),
        ("enumeration", {"samples": (0, 0, 0)}),
        ("enumeration", {"samples": (0, 1, 3)}),
        ("enumeration", {"samples": (-1, 0, 1)}),
        ("enumeration", {"samples": tuple(range(13))}),
    ],
)
def test_a_changed_certificate_proves_nothing(kind: str, change: dict[str, tuple]) -> None:
    subproblem, bound = case_of(kind)
    assert not is_proven(claim_of(subproblem, bound.model_copy(update=change)))


def test_numbers_of_a_certificate_are_finite() -> None:
    for value in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="limit_s"):
            Bound(kind="average work", limit_s=value)
    with pytest.raises(ValueError, match="prices"):
        Bound(kind="group configurations", limit_s=1.0, prices=(float("nan"),))


def test_a_plan_states_what_its_certificates_prove() -> None:
    subproblem = chains_with_nested_samples(3)
    problem = subproblem.problem
    plan, trees = make_plan(problem, "psrl"), [subproblem.tree]
    check_bounds(plan, problem.batch, trees)

    def refused(match: str, changed: Plan) -> None:
        with pytest.raises(PlanError, match=match):
            check_bounds(changed, problem.batch, trees)

    def stating(**predicted: float) -> Plan:
        return replace(plan, predicted={**plan.predicted, **predicted})

    low_s = plan.predicted["lower_bound_s"]
    refused(r"rule 14: predicted\.lower_bound_s", stating(lower_bound_s=low_s * 1.001))
    refused(r"rule 14: predicted\.lower_bound_s", stating(lower_bound_s=low_s * 0.999))
    refused(r"rule 14: predicted\.placement_gap", stating(placement_gap=0.5))
    refused("are below the proven", stating(makespan_s=low_s * 0.99))
    refused("are below the proven", stating(makespan_s=float("nan")))
    (program,) = plan.programs
    unproven = replace(plan, programs=(replace(program, bound=None),))
    refused("rule 14: program 0 has no bound", unproven)
    raised = Bound(kind="average work", limit_s=1e9)
    claimed = replace(plan, programs=(replace(program, bound=raised),))
    refused(r"certificate \(average work\) does not prove", claimed)
    # Less work than the bound proves is an error too, whatever is stated of it.
    table = program.micro_batches
    less = replace(table, num_tokens=table.num_tokens // 2, pairs=table.pairs // 2)
    gone = replace(plan, programs=(replace(program, micro_batches=less),))
    refused("placement_gap", gone)
