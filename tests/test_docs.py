"""Documentation that cannot lie: its examples run, its command page is current, its links lead somewhere.

A `python` block is run; a `text` block right after it is what it prints. In a `console` block, lines that
start with `$ isthmus` are run and the lines below are their stdout; a line `…` stands for any lines. The
blocks of one page share a folder and their names. Examples in docstrings are doctests.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import fnmatch
import importlib
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
"""Run from outside, by tests/journeys/test_recipes.py."""
WIDTH = 80
SOURCE = ROOT / "src"
WITH_EXAMPLES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r">>> (?!.*[+]SKIP)", path.read_text(encoding="utf-8"))
]
GENERATED = "reference.md"
"""Made while the site is built."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def printed(work) -> str:
    """What `work` writes to stdout; what it says fits the terminal."""
    stream, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(talk):
        work()
    lines = talk.getvalue().splitlines()
    assert not [line for line in lines if len(line) > WIDTH and "Warning: " not in line]
    return stream.getvalue()


def matches(shown: str, got: str) -> bool:
    """Whether the output is the one shown, up to trailing blanks and lines left out with `…`."""
    wanted = [re.sub(r"([\[\]?*])", r"[\1]", line.rstrip()) for line in shown.strip().splitlines()]
    pattern = "\n".join("*" if line.strip() == "…" else line for line in wanted)
    return fnmatch.fnmatchcase("\n".join(line.rstrip() for line in got.strip().splitlines()), pattern)


def run_console(block: str) -> None:
    """Run the `$ isthmus …` lines of a console block and compare what they print."""
    from isthmus.cli import main

    for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, shown = step.partition("\n")
        program, *arguments = shlex.split(line, comments=True)
        if program == "isthmus":
            got = printed(lambda arguments=arguments: main(arguments))
            assert matches(shown, got), f"$ {line}\nprints\n{got}"
            assert "--json" in arguments or max(map(len, got.splitlines()), default=0) <= WIDTH, got


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    names: dict[str, object] = {"__name__": "example"}
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    for at, (language, code) in enumerate(blocks):
        if language == "python":
            got = printed(lambda code=code: exec(compile(code, page.name, "exec"), names))
            if blocks[at + 1 : at + 2] and blocks[at + 1][0] == "text":
                assert matches(blocks[at + 1][1], got), f"{code}\nprints\n{got}"
        elif language == "console":
            run_console(code)


ELSEWHERE = {
    "calibrate-endpoint": "test_endpoint_calibration.py",
    "coordinate": "journeys/test_deployment.py",
    "csfltr": "test_own_collections.py",
    "demo": "journeys/test_demo_story.py",
    "encoder add": "test_encoders.py",
    "features": "test_own_collections.py",
    "reproduce": "../reproduce/tests/test_command.py",
}
"""Commands that run neither on a page, nor in a recipe, nor in journeys/terminal.txt, and what runs them."""


def commands_in(text: str) -> set[str]:
    """The commands, with their verbs, that lines of a text have one type."""
    from isthmus.cli import parser

    top, found = parser(), set[str]()
    for line in re.findall(r"(?:^|[|;(&] *)(?:\$ )?isthmus ([^\n|;&]+)", text, re.MULTILINE):
        verbs, own = list[str](), top
        for word in line.split():
            actions = [each for each in own._actions if isinstance(each, argparse._SubParsersAction)]
            if not actions or word not in actions[0].choices:
                break
            verbs.append(word)
            own = actions[0].choices[word]
        found |= {" ".join(verbs)} if verbs else set()
    return found


def test_every_command_of_the_docs_is_run_on_a_terminal_of_80_columns() -> None:
    blocks = [
        block for page in (*PAGES, *RECIPES) for block in FENCE.findall(page.read_text(encoding="utf-8"))
    ]
    typed = commands_in("\n".join(code for language, code in blocks if language in ("sh", "console")))
    shown = commands_in("\n".join(code for language, code in blocks if language == "console"))
    shown |= commands_in((ROOT / "tests" / "journeys" / "terminal.txt").read_text(encoding="utf-8"))
    assert typed - shown == ELSEWHERE.keys()
    assert all((ROOT / "tests" / test).exists() for test in ELSEWHERE.values())


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_are_true(name: str) -> None:
    from isthmus.errors import MissingExtra

    try:
        done = doctest.testmod(importlib.import_module(name), raise_on_error=True)
    except doctest.DocTestFailure as failed:
        pytest.fail(f"{failed.test.name}: {failed.example.source}prints\n{failed.got}")
    except doctest.UnexpectedException as failed:
        if isinstance(failed.exc_info[1], MissingExtra):
            pytest.skip(str(failed.exc_info[1]))
        raise failed.exc_info[1] from None
    assert done.attempted > 0


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    for target in (a or b for a, b in targets):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        if name == GENERATED:
            continue
        found = page.parent / name if name else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_command_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "cli_page.py"))["page"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == page, "make docs writes it anew"


def test_readme_is_short_and_names_both_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    assert "make demo" in readme
    assert "make test" in readme


def test_pages_are_in_the_navigation() -> None:
    listed = set(
        re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages | {GENERATED}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is among the test tools: make test installs it")
    import subprocess
    import sys

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "cli.html").exists()
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    for name in ("NodeSettings", "Ledger", "query_characters", "evaluate(", "BudgetExhausted"):
        assert name in reference


def test_the_papers_page_names_what_there_is() -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "in print" not in line]
    functions = {name for row in rows for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", row)}
    tests = {name for row in rows for name in re.findall(r"`([\w/]+\.py::test_\w+)`", row)}
    assert len(functions) > 40
    for name in functions:
        module, _, thing = (name if name.startswith("isthmus_") else f"isthmus.{name}").rpartition(".")
        assert hasattr(importlib.import_module(module), thing), f"papers.md names {name}"
    for name in tests:
        file, _, test = name.partition("::")
        home = ROOT if file.startswith("reproduce/") else ROOT / "tests"
        source = (home / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {test}\b", source, re.MULTILINE), f"papers.md names {name}"
    for row in rows:
        assert re.search(r"::test_\w+`", row), f"no test in {row}"
