"""The recipes of docs/recipes, typed as they stand, each in an empty folder, on a terminal of 80 columns.

    console   a line `$ command` is run, `\\` at its end goes on. Below it stands what the terminal shows,
              stdout and stderr; numbers may differ a little, `…` is anything, in a line or as lines.
              Nothing below a command: whatever it prints. `command &` runs until the page ends, and what
              comes after it is typed again until it does as shown, as one does while servers start.
    python    a program; a `text` block right after it is what it prints.
    others    are saved if the paragraph before them ends in their name, as in "Save as `north/silo.toml`:"

What a recipe needs of this machine is in `SURROUNDINGS`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import engine_servers
from loopback_ports import free_base

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
BLOCK = re.compile(r"(?:`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])[-+−]?\d[\d,]*(?:\.\d+)?(?![\w])|(?<![\w.])[-+−]?\.\d+")
WIDTH, PATIENCE = 80, 240.0

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Surroundings:
    """What a page is read with: words of the page and what they are here, and more of the environment."""

    words: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def _hospitals(request: pytest.FixtureRequest) -> Surroundings:
    """A table of PostgreSQL's and a collection of Qdrant's, as the page says that two hospitals have."""
    psycopg = pytest.importorskip("psycopg", reason="the extra postgres is not installed")
    socket = request.getfixturevalue("_postgres_server")
    with psycopg.connect(f"host={socket} user=postgres dbname=postgres", autocommit=True) as db:
        db.execute("DROP DATABASE IF EXISTS hospitals")
        db.execute("CREATE DATABASE hospitals")
    url = f"host={socket} user=postgres dbname=hospitals"
    stack = ExitStack()
    request.addfinalizer(stack.close)
    folder = request.getfixturevalue("tmp_path_factory").mktemp("engines")
    table = stack.enter_context(engine_servers.running("postgresql", folder, url))
    vectors = stack.enter_context(engine_servers.running("qdrant", folder, url))
    others = [{"id": f"d{at}", "title": "Canteen", "body": f"Soup of day {at}."} for at in range(1, 41)]
    note = {"id": "d0", "title": "Note of St. Anne", "body": "Penicillin, then a rash.", "acl": ["doctors"]}
    table.fill("notes", [note, *others])
    vectors.fill(
        "findings", [{"id": "d0", "title": "Finding", "body": "Penicillin, rash of cells."}, *others]
    )
    return Surroundings(
        {
            "postgresql://reader@db.example.org/stanne": table.url,
            "qdrant://vectors.example.org:6333": vectors.url,
            "institutes-key": vectors.key,
            "8700": str(free_base(4)),
        }
    )


def _assistant(request: pytest.FixtureRequest) -> Surroundings:
    """Ports that are free, and the environment with LangChain."""
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    python = request.getfixturevalue("integrations_python")
    program = f"env PYTHONPATH={ROOT / 'src'} {python} rag.py"
    return Surroundings({"8100": str(free_base(4)), "$ python rag.py": f"$ {program}"})


SURROUNDINGS: dict[str, Callable[[pytest.FixtureRequest], Surroundings]] = {
    "hospitals": _hospitals,
    "assistant": _assistant,
}
"""By recipe, a function of the test's request, which may skip, and start servers as fixtures do."""


@dataclass
class Terminal:
    """A shell in a folder: what is exported stays, and what runs in the background ends with it."""

    folder: Path
    environment: dict[str, str]
    background: list[subprocess.Popen[bytes]] = field(default_factory=list)
    starting: bool = False

    def type(self, command: str, shown: str) -> None:
        """Run a command and compare what it shows."""
        if command.endswith("&"):
            self._start(command.rstrip("& "))
            return
        end = time.monotonic() + PATIENCE
        while complaint := self._complaint(command, shown):
            assert self.starting, complaint + self._logs()
            assert time.monotonic() < end, complaint + self._logs()
            time.sleep(0.5)
        self.starting = False

    def run(self, words: list[str], text: str | None = None) -> tuple[int, str]:
        """The exit status of a program and all it says; it ends in time or is ended, with all it started."""
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            said, _ = process.communicate(text, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return process.returncode, said

    def _start(self, command: str) -> None:
        with open(self.folder / f".{len(self.background)}.log", "wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", self._remembering(f"exec {command}")],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.background.append(process)
        self.starting = True

    def _complaint(self, command: str, shown: str) -> str:
        kept = "export -p > .exports"
        status, said = self.run(
            ["bash", "-c", f"{self._remembering(command)}\nstatus=$?\n{kept}\nexit $status"]
        )
        ended = [process.args for process in self.background if process.poll() is not None]
        wide = [line for line in said.splitlines() if len(line) > WIDTH]
        if not (status or ended or wide) and alike(shown, said):
            return ""
        return (
            f"$ {command}\nexit status {status}, ended {ended}, too wide {wide}; prints\n{said}\nnot\n{shown}"
        )

    def _remembering(self, command: str) -> str:
        return f"[ -f .exports ] && . ./.exports\n{command}"

    def _logs(self) -> str:
        return "".join(f"\n{log.name}:\n{log.read_text()}" for log in sorted(self.folder.glob(".*.log")))

    def end(self) -> None:
        for process in self.background:
            process.terminate()
        for process in self.background:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def alike(shown: str, said: str) -> bool:
    """Whether a terminal shows this, numbers aside that are about the same.

    >>> alike("nDCG@10  0.71\\n…\\nwrote a.run", "nDCG@10    0.70\\ntook long\\nand longer\\nwrote a.run\\n")
    True
    >>> alike("nDCG@10  0.71", "nDCG@10  0.60")
    False
    """
    wanted, lines = shown.strip("\n").splitlines(), [line for line in said.splitlines() if line.strip()]
    wanted = [line for line in wanted if line.strip()]
    if not wanted:
        return True
    at, anchored = 0, True
    for place, line in enumerate(wanted):
        if line.strip() == "…":
            anchored = False
            continue
        ahead = wanted[place : next((n for n in range(place, len(wanted)) if wanted[n].strip() == "…"), None)]
        starts = [at] if anchored else range(at, len(lines))
        found = next((start for start in starts if _lines_alike(ahead, lines[start:])), None)
        if found is None:
            return False
        at, anchored = found + 1, True
    return not anchored or at == len(lines)


def _lines_alike(shown: list[str], said: list[str]) -> bool:
    return len(said) >= len(shown) and all(map(_line_alike, shown, said))


def _line_alike(shown: str, said: str) -> bool:
    pattern = "".join(
        r"([-+−]?[\d.,]+)" if part.startswith("\0") else _loosely(part)
        for part in re.split(r"(\0)", NUMBER.sub("\0", " ".join(shown.split())))
    )
    match = re.fullmatch(pattern, " ".join(said.split()))
    return match is not None and all(map(_close, NUMBER.findall(shown), match.groups()))


def _loosely(text: str) -> str:
    return re.sub("─+", "─+", re.escape(text)).replace("…", ".*").replace(r"\ ", r"\s*")


def _close(shown: str, said: str) -> bool:
    one, other = (float(each.replace(",", "").replace("−", "-")) for each in (shown, said))
    return abs(one - other) <= 0.1 * abs(one) + (0.02 if "." in shown else 2)


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """What a page has one do: the kind of the step, its text, and what is shown then."""
    blocks = list(BLOCK.finditer(page))
    for at, block in enumerate(blocks):
        name, language, text = block.groups()
        if language == "console":
            for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command = re.match(r"(?:.*\\\n)*.*", step)
                assert command is not None
                yield "console", command[0], step[command.end() :]
        elif name:
            yield name, text, ""
        elif language == "python":
            after = blocks[at + 1] if at + 1 < len(blocks) else None
            prints = after is not None and after[2] == "text" and after[1] is None
            yield "python", text, after[3] if after is not None and prints else ""


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_does_as_it_says(recipe: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    around = SURROUNDINGS.get(recipe.stem, lambda request: Surroundings())(request)
    page = recipe.read_text(encoding="utf-8")
    for word, here in around.words.items():
        assert word in page, f"{word} is not in {recipe.name}"
        page = page.replace(word, here)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_DATA")}
    environment = {**quiet, "PATH": programs, "COLUMNS": str(WIDTH), "PYTHONUNBUFFERED": "1"}
    terminal, before = Terminal(tmp_path, {**environment, **around.environment}), os.times()
    try:
        for kind, text, shown in steps(page):
            if kind == "console":
                terminal.type(text, shown)
            elif kind == "python":
                status, said = terminal.run(["python", "-"], text)
                assert status == 0, f"{text}\nprints\n{said}"
                assert alike(shown, said), f"{text}\nprints\n{said}"
            else:
                (tmp_path / kind).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / kind).write_text(text, encoding="utf-8")
    finally:
        terminal.end()
    after = os.times()
    worked = after.children_user - before.children_user + after.children_system - before.children_system
    print(f"{recipe.stem}: {worked:.0f} s of processor")


def test_numbers_are_about_the_same_and_words_are_the_same() -> None:
    assert alike("a 1,000 b\n…\nwrote c", "a 1,010 b\nx\nwrote c\n")
    assert alike("…\nwrote c", "wrote c\n")
    assert alike("run  0.50\n──── ─\nbm25 at .2 s", "run 0.51\n── ──\nbm25 at .21 s")
    assert not alike("a 1,000 b", "a 1,010 c")
    assert not alike("a 0.5", "a 0.7")
    assert not alike("a\nb", "a\nb\nc")
    assert not alike("a\nb", "a\nx\nb")
