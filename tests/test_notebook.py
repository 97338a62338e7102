"""`docs/first-steps.ipynb`: its cells run in order, show tables and plots in place, and store nothing."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the notebook trains: extra train")
pytest.importorskip("matplotlib", reason="the notebook draws: extra plots")

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "first-steps.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
MOST = 25
"""Lines of code in each walk, fewer than."""


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


def walks() -> dict[str, list[str]]:
    """The code cells below every second-level heading."""
    parts: dict[str, list[str]] = {}
    for cell in CELLS:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts[list(parts)[-1]].append(text)
        elif heading := re.search(r"^## (.+)$", text, re.MULTILINE):
            parts[heading[1]] = []
    return parts


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does: the value of its last line is what it shows."""
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), NOTEBOOK.name, "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), NOTEBOOK.name, "exec"), names)
        return None
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def shown(value: Any) -> str:
    """The form a notebook takes: HTML, an SVG, or else text."""
    for form in ("_repr_html_", "_repr_svg_"):
        if hasattr(value, form):
            return str(getattr(value, form)())
    return repr(value)


@pytest.mark.parametrize("walk", walks())
def test_a_walk_runs_and_shows_tables_and_plots(walk: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    outputs = [shown(run_cell(source, names)) for source in walks()[walk]]
    assert all(output.startswith(("<table>", "<svg")) for output in outputs)
    assert sum(output.startswith("<table>") for output in outputs) >= 3
    assert sum(output.startswith("<svg") for output in outputs) >= 2


def test_each_walk_is_short() -> None:
    assert len(walks()) == 2
    for cells in walks().values():
        assert sum(bool(line.strip()) for cell in cells for line in cell.splitlines()) < MOST


def test_nothing_is_stored_in_the_notebook() -> None:
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert not re.search(r"/(home|work|Users|tmp)/", NOTEBOOK.read_text(encoding="utf-8"))


def test_the_notebook_is_one() -> None:
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(set(cell) >= {"cell_type", "metadata", "source"} for cell in book["cells"])


def test_the_links_of_the_notebook_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([\w.-]+)\)", "\n".join(sources("markdown")))
    assert targets
    for target in targets:
        assert (NOTEBOOK.parent / target).exists()
