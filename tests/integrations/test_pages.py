"""The examples of docs/pipelines.md, line by line as they stand there but for the broker's address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.split("\n")[0])
def test_an_example_runs_and_is_short(example, url, capsys):
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    exec(compile(example.replace("http://127.0.0.1:8100", url), "pipelines.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip()


def test_every_library_has_one():
    assert len(EXAMPLES) >= 5
