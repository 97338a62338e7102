"""The threat model claims only what a test proves: each row names its tests, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "threat-model.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def rows() -> list[tuple[str, str]]:
    """The attacks of "What is stopped, and by what", each with the cell that names its tests."""
    section = PAGE.read_text(encoding="utf-8").partition("## What is stopped, and by what\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert cells[0] == ["attack", "stopped by", "proved by"]
    return [(row[0], row[2] if len(row) == 3 else "") for row in cells[2:]]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Every test of a file as pytest names it: `test_name` or `TestClass::test_name`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = (each for each in inside if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
        names |= {prefix + each.name for each in functions if each.name.startswith("test_")}
    return frozenset(names)


def test_there_are_rows():
    assert len(rows()) >= 18


@pytest.mark.parametrize(("attack", "proof"), rows(), ids=lambda cell: cell[:60])
def test_every_row_names_tests_that_exist(attack, proof):
    named = NAMED.findall(proof)
    assert named, f"{attack!r} names no test: add `tests/…py::test_name` in its third column"
    for file, name in named:
        assert (ROOT / file).is_file(), f"{attack!r} names {file}, which is not there"
        known = names_in(ROOT / file)
        near = sorted(each for each in known if each.endswith(name.rpartition("::")[2]))
        assert name in known, f"{attack!r} names {file}::{name}, which is not there; near: {near}"
    left = re.sub(NAMED, "", proof).strip(", ")
    assert not left, f"{attack!r}: {left!r} is not of the form `tests/…py::test_name`"
