"""Policies of the user: by file, module or entry point; mistakes name the policy and the rule."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psrl.core.errors import ConfigError, PlanError, PsrlError
from psrl.planner import POLICIES, Draft, find_policy, make_plan
from psrl.planner.micro_batching.all_ranks import token_cuts
from tests.planner.cases import make_setup, problem_of, update_of, workloads

DOCS = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are installed in."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, name: str, module: str, code: str, function: str = "place") -> None:
    (site / f"{module}.py").write_text(code)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = f"[psrl.policies]\n{name} = {module}:{function}\n"
    (info / "entry_points.txt").write_text(points)


def documented_example() -> str:
    """The function in the section on own policies."""
    section = DOCS.read_text(encoding="utf-8").partition("## Your own policy")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_documented_example_plans_by_file_module_and_entry_point(site: Path) -> None:
    install(site, "by_length", "documented_policy", documented_example(), "by_length")
    problem = problem_of(workloads()["stars"], make_setup(4, max_tokens=512))
    file = site / "documented_policy.py"
    plans = [
        make_plan(problem, name)
        for name in (f"{file}:by_length", "documented_policy:by_length", "by_length")
    ]
    assert [p.policy for p in plans][2] == "by_length"
    placed = [p.programs[0].assignments for p in plans]
    tokens = np.zeros(4)
    np.add.at(tokens, placed[0].rank, problem.batch.num_tokens[placed[0].sample])
    assert tokens.max() < 1.1 * tokens.min()
    for other in placed[1:]:
        assert np.array_equal(other.rank, placed[0].rank)
    assert plans[0].predicted == plans[1].predicted == plans[2].predicted


def test_a_draft_has_full_control() -> None:
    module = "tests.planner.test_find_policy"
    subproblem = update_of(workloads()["stars"], make_setup(2, max_tokens=512))
    draft = find_policy(f"{module}:plain_cuts")(subproblem)
    assert draft.build().program.unique_tokens == subproblem.tree.unique_tokens


def plain_cuts(subproblem: object) -> Draft:
    draft = POLICIES["dfs_cut"](subproblem)
    placement = replace(draft.placement, rank=np.zeros_like(draft.placement.rank))
    return Draft(placement, lambda: token_cuts(placement, single_unit=True))


def half_a_program(subproblem: object) -> Draft:
    """Breaks rule 2: the program computes less than its samples need."""
    draft = POLICIES["dfs_cut"](subproblem)

    def build() -> object:
        built = draft.build()
        segments = built.program.segments
        half = replace(built.program, segments=segments.rows(slice(1, None)))
        return replace(built, program=half)

    return Draft(draft.placement, build)


def fails_inside(subproblem: object) -> np.ndarray:
    return np.zeros(3) + np.zeros(4)


def no_ranks(subproblem: object) -> list[int]:
    return [0]


def too_few(subproblem: object) -> np.ndarray:
    return np.zeros(1, np.int64)


def real_numbers(subproblem: object) -> np.ndarray:
    return np.zeros(48)


def too_large(subproblem: object) -> np.ndarray:
    return np.full(48, 2)


NOT_A_FUNCTION = 3


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("half_a_program", PlanError, r"half_a_program' made a plan that breaks rule 2: program 0"),
        ("fails_inside", PlanError, r"fails_inside' raised ValueError: operands .*\n.*\.py:\d+ in"),
        ("no_ranks", PlanError, r"no_ranks' returned a list\n.* each of the 48 samples .* 0..1"),
        ("too_few", PlanError, r"too_few' returned an array of int64 of shape \(1,\)"),
        ("real_numbers", PlanError, r"returned an array of float64 of shape \(48,\)"),
        ("too_large", PlanError, r"too_large' returned ranks 2..2"),
        ("NOT_A_FUNCTION", ConfigError, r"NOT_A_FUNCTION' is of type int, not a function"),
        ("missing", ConfigError, r"tests.planner.test_find_policy has no 'missing'"),
    ],
)
def test_a_wrong_policy_is_named(function: str, error: type[PsrlError], message: str) -> None:
    problem = problem_of(workloads()["stars"], make_setup(2, max_tokens=512), ("update",))
    with pytest.raises(error) as caught:
        make_plan(problem, f"tests.planner.test_find_policy:{function}")
    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot import no_such_module .*ModuleNotFoundError"):
        find_policy("no_such_module:place")
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.py"):
        find_policy("nowhere.py:place")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        find_policy(f"{broken}:place")


def test_unknown_names_are_compared_with_installed_ones(site: Path) -> None:
    install(site, "by_length", "some_policy", "def place(subproblem): ...\n")
    with pytest.raises(ConfigError, match="Did you mean 'by_length'"):
        find_policy("by_lenght")


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("psrl", "def place(subproblem): ...\n", "psRL has a policy of that name"),
        ("mine", "1 / 0\n", "cannot be loaded .ZeroDivisionError"),
        ("mine", "place = 3\n", "'mine' is of type int, not a function"),
    ],
)
def test_a_wrong_entry_point_is_named(site: Path, name: str, code: str, message: str) -> None:
    module = f"policy_{abs(hash((name, code)))}"
    install(site, name, module, code)
    with pytest.raises(ConfigError, match=message):
        find_policy("mine")
