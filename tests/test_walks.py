"""The walks of the documentation, hop by hop, against the code.

A hop is a call from one module into another. Every row of a walk names a file, a function in it, and the
earlier row it is called from: that function, or what it calls in its own file, must use its name. Where a
message or a file lies between the two, the row names the word that stands in both modules.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MOST_HOPS = {"A query": 9, "A model update": 9, "A judgement": 8, "A word count": 10, "A run file": 6}


class Step(NamedTuple):
    """A row: a file under src/isthmus, the dotted name of a function in it, and how one gets there."""

    file: str
    function: str
    caller: int
    word: str


_ROW = re.compile(r"^\| *\d+ *\| *`([^`]+)` *\| *`([^`]+)` *\| *(\d*)(?:, `([^`]+)`)? *\|", re.MULTILINE)


@cache
def walks() -> dict[str, list[Step]]:
    """The steps of every section of the page, in order."""
    text = (ROOT / "docs/walks.md").read_text(encoding="utf-8")
    sections = (section.partition("\n") for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:])
    return {
        title.strip(): [
            Step(file, name, int(caller or 0), word) for file, name, caller, word in _ROW.findall(rows)
        ]
        for title, _, rows in sections
    }


@cache
def source(file: str) -> str:
    return (ROOT / "src/isthmus" / file).read_text(encoding="utf-8")


@cache
def functions(file: str) -> dict[str, ast.AST]:
    """Every function, method and class of a file by dotted name."""
    named: dict[str, ast.AST] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                named[prefix + child.name] = child
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source(file)), "")
    return named


def imported(file: str) -> set[str]:
    """Names that a file imports, and modules, whose names it may use."""
    statements = [node for node in ast.walk(ast.parse(source(file))) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in statements for alias in node.names}
    modules = [ROOT / "src" / str(node.module).replace(".", "/") for node in statements]
    return names | {
        name
        for module in modules
        for alias in names
        if (module / f"{alias}.py").exists()
        for name in functions((module / f"{alias}.py").relative_to(ROOT / "src/isthmus").as_posix())
    }


def names_used(node: ast.AST) -> set[str]:
    inside = list(ast.walk(node))
    names = {part.id for part in inside if isinstance(part, ast.Name)}
    return names | {part.attr for part in inside if isinstance(part, ast.Attribute)}


def reached(file: str, name: str) -> set[str]:
    """Names that a function uses, and those that what it calls in the same file uses."""
    local = functions(file)
    by_last: dict[str, list[str]] = {}
    for dotted in (dotted for dotted, node in local.items() if not isinstance(node, ast.ClassDef)):
        by_last.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    seen: set[str] = set()
    names: set[str] = set()
    todo = [name]
    while todo:
        dotted = todo.pop()
        if dotted not in seen:
            seen.add(dotted)
            used = names_used(local[dotted])
            names |= used
            todo += [other for last in used for other in by_last.get(last, ())]
    return names


def test_the_page_has_the_four_walks() -> None:
    assert set(walks()) == set(MOST_HOPS)


@pytest.mark.parametrize("title", MOST_HOPS)
def test_a_walk_is_short_and_every_hop_changes_the_module(title: str) -> None:
    steps = walks()[title]
    assert len(steps) >= 4
    assert len(steps) - 1 <= MOST_HOPS[title]
    for at, step in enumerate(steps[1:], start=2):
        assert 1 <= step.caller < at
        assert step.file != steps[step.caller - 1].file or step.word


@pytest.mark.parametrize("title", MOST_HOPS)
def test_every_hop_is_in_the_code(title: str) -> None:
    steps = walks()[title]
    for step in steps:
        node = functions(step.file).get(step.function)
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), f"{step.file} has no {step.function}"
    for step in steps[1:]:
        caller = steps[step.caller - 1]
        if step.word:
            assert step.word in source(caller.file), f"{caller.file} does not name {step.word}"
            assert step.word in source(step.file), f"{step.file} does not name {step.word}"
        else:
            owner, _, called = step.function.rpartition(".")
            assert called in reached(caller.file, caller.function), f"{caller} does not call {called}"
            assert owner or called in imported(caller.file), f"{caller.file} does not import {called}"
