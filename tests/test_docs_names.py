"""Names and paths that the documentation mentions exist; nothing is imported for that."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*.md")))
NAME = re.compile(r"(?<![\w./-])psrl(?:\.\w+)+")
# A benchmark writes its results; not every one has run.
PATH = re.compile(
    r"(?<![\w./-])(?:psrl|tests|examples|benchmarks(?!/results)|docs)/[\w./*-]*[\w*/]"
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
TEST = re.compile(r"\btest_\w+\.py\b")
GROUP = re.compile(r'ENTRY_POINT_GROUP = "([\w.]+)"')


@cache
def entry_point_groups() -> frozenset[str]:
    """Names like psrl.policies, under which other packages announce what they offer."""
    modules = ROOT.glob("psrl/**/*.py")
    return frozenset(name for path in modules for name in GROUP.findall(path.read_text("utf-8")))


@cache
def names_in(module: Path) -> dict[str, ast.stmt]:
    """What a module defines or imports at its top, or only for type checkers."""
    return names_of(ast.parse(module.read_text("utf-8")).body)


def names_of(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If):
            found |= names_of(node.body)
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a package, a module, or a name in one or in a class of one."""
    place, parts = ROOT, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place, parts = place / parts[0], parts[1:]
    module = place / "__init__.py"
    if parts and (place / f"{parts[0]}.py").is_file():
        module, parts = place / f"{parts[0]}.py", parts[1:]
    if not module.is_file():
        return False
    known = names_in(module)
    for part in parts:
        if part not in known:
            return False
        node = known[part]
        known = names_of(node.body) if isinstance(node, ast.ClassDef) else {}
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    names = set(NAME.findall(text)) - entry_point_groups()
    missing = {name for name in names if not exists(name)}
    missing |= {path for path in PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))}
    missing |= {link for link in LINK.findall(text) if not (page.parent / link).exists()}
    missing |= {name for name in TEST.findall(text) if not any(ROOT.glob(f"tests/**/{name}"))}
    assert not missing


def test_what_does_not_exist_is_noticed() -> None:
    for name in ("psrl.sim", "psrl.make_plan", "psrl.__all__", "psrl.core.plan.plan.Program.tree"):
        assert exists(name), name
    for name in ("psrl.cost", "psrl.plan_it", "psrl.core.plan.plan.Program.leaf", "psrl.sim.{}"):
        assert not exists(name), name
