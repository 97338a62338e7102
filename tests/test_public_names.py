"""The public interface: the names of `import isthmus`, pinned and documented, with examples that run."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest

import isthmus

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PUBLIC = [
    "AsyncClient",
    "BM25",
    "Beta",
    "Broker",
    "Client",
    "Config",
    "ConfigError",
    "Corpus",
    "CountMin",
    "CountSketch",
    "DataError",
    "Dense",
    "FedRisk",
    "Fold",
    "Isotonic",
    "IsthmusError",
    "Ledger",
    "Letor",
    "LogOdds",
    "MLP",
    "Measure",
    "MissingExtra",
    "Node",
    "Platt",
    "Qrels",
    "QueryFeature",
    "Run",
    "Stacked",
    "Streams",
    "Weighted",
    "calibrate",
    "compare",
    "evaluate",
    "fit_calibrator",
    "fuse",
    "load",
    "load_folds",
    "load_letor",
    "load_ranker",
    "rank",
    "read_letor",
    "read_qrels",
    "read_queries",
    "read_run",
    "threshold_for",
    "train",
    "write_letor",
    "write_qrels",
    "write_run",
]
"""To add a name is a promise, to remove one breaks programs: docs/api.md says how."""


def test_the_list_of_public_names_is_pinned() -> None:
    assert isthmus.__all__ == sorted(PUBLIC)
    assert len(PUBLIC) == int(re.search(r"offers (\d+) names", PAGE)[1])


def test_the_page_lists_them_all() -> None:
    rows = re.findall(r"^\| [^|]+ \| (`.+`) \|$", PAGE, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name: str) -> None:
    thing = getattr(isthmus, name)
    assert inspect.isclass(thing) or inspect.isfunction(thing)
    text = inspect.getdoc(thing) or ""
    assert len(text) > 20
    assert not text.startswith(f"{name}(")  # the words that dataclasses makes up


def test_every_public_name_has_an_example_that_runs() -> None:
    """`tests/test_docs.py` runs the blocks of the page and all docstrings."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    used = {
        node.id
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    without = [name for name in PUBLIC if name not in used and not _has_doctest(name)]
    assert not without


def _has_doctest(name: str) -> bool:
    thing = getattr(isthmus, name)
    texts = (thing.__doc__ or "", sys.modules[thing.__module__].__doc__ or "")
    return any(re.search(rf"^\s*>>> (?!.*SKIP).*\b{name}\b", text, re.MULTILINE) for text in texts)
