"""The four walks of the documentation, hop by hop, against the code.

A hop is a call from one module into another. Every row of a walk names a file and a function in it; the function,
or what it calls within its own file, must name the function of the next row.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/walks.md"
MOST_HOPS = {"A query": 9, "A model update": 9, "A word count": 10, "A run file": 6}

Step = tuple[str, str]
"""A file under src/isthmus and the dotted name of a function or method in it."""


def walks() -> dict[str, list[Step]]:
    """The steps of every section of the page, in order."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        section.partition("\n")[0].strip(): re.findall(
            r"^\| *\d+ *\| *`([^`]+)` *\| *`([^`]+)` *\|", section, re.MULTILINE
        )
        for section in sections
    }


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

    visit(ast.parse((ROOT / "src/isthmus" / file).read_text(encoding="utf-8")), "")
    return named


def mentioned(file: str, name: str) -> set[str]:
    """Names that a function uses, and those that what it calls in the same file uses."""
    local = functions(file)
    by_last = {dotted.rpartition(".")[2]: dotted for dotted in local}
    seen: set[str] = set()
    names: set[str] = set()
    todo = [name]
    while todo:
        dotted = todo.pop()
        if dotted in seen:
            continue
        seen.add(dotted)
        for node in ast.walk(local[dotted]):
            used = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if used is not None:
                names.add(used)
                if used in by_last:
                    todo.append(by_last[used])
    return names


def test_the_page_has_the_four_walks() -> None:
    assert set(walks()) == set(MOST_HOPS)


@pytest.mark.parametrize("title", MOST_HOPS)
def test_a_walk_is_short(title: str) -> None:
    steps = walks()[title]
    assert 3 <= len(steps)
    assert len(steps) - 1 <= MOST_HOPS[title]
    files = [file for file, _ in steps]
    assert all(first != second for first, second in zip(files, files[1:], strict=False)), "a hop changes the module"


@pytest.mark.parametrize("title", MOST_HOPS)
def test_every_hop_is_a_call_in_the_code(title: str) -> None:
    steps = walks()[title]
    for file, name in steps:
        assert name in functions(file), f"{file} has no {name}"
    for (file, name), (_, following) in zip(steps, steps[1:], strict=False):
        called = following.removesuffix(".__init__").rpartition(".")[2]
        assert called in mentioned(file, name), f"{name} of {file} does not call {following}"
