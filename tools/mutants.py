"""Proof by mutation: every row of docs/papers.md names a test that fails when the row's code is broken.

    python tools/mutants.py                every row
    python tools/mutants.py "eq. 1:" …     rows whose first column begins so

`mutants.toml` has one fault per row: a text of the row's function, or of another in the same module (`in`),
and its replacement. Each fault in turn is put into a scratch copy of the repository; the row's test must pass
without it and fail with it. The exit status is 1 if a fault survives.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "reproduce", "tests", "tools", "docs", "deploy", "pyproject.toml", "README.md")
SOURCES = ("src", "reproduce/src")
ROW = re.compile(r"^\| (?!in print)(?P<title>.+?) \| (?P<functions>`.+?`) \| (?P<tests>`.+?`) \|")
PASSED, FAILED = 0, 1
"""Exit statuses of pytest; others mean that a test could not run."""


@dataclass(frozen=True)
class Mutant:
    """One row with its fault: `old` becomes `new` inside the lines of `function` in `file`."""

    row: str
    function: str
    test: str
    old: str
    new: str

    @property
    def file(self) -> Path:
        """Path of the function's file, relative to the root."""
        return _located(self.function)[0]

    def mutated(self) -> str:
        """Return the file's text with the fault; ValueError unless `old` occurs once in the function."""
        where, thing = _located(self.function)
        text = (ROOT / where).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        first, last = _lines_of(text, thing)
        part = "".join(lines[first:last])
        if part.count(self.old) != 1 or self.old == self.new:
            times = part.count(self.old)
            raise ValueError(f"{self.row}: {self.old!r} stands {times} times in {self.function}")
        changed = "".join((*lines[:first], part.replace(self.old, self.new), *lines[last:]))
        ast.parse(changed)
        return changed


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield title, function and test node id of every row of the page."""
    for line in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines():
        if match := ROW.match(line):
            function = match["functions"].strip("`")
            yield match["title"], function, _node(match["tests"].strip("`"))


def mutants() -> list[Mutant]:
    """Return one mutant per row, in the page's order; ValueError if page and faults do not correspond."""
    faults: Mapping[str, Mapping[str, str]] = tomllib.loads(
        (ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8")
    )
    page = list(rows())
    titles = [title for title, _, _ in page]
    if sorted(titles) != sorted(faults):
        apart = sorted(set(titles) ^ set(faults))
        raise ValueError(f"rows without a fault, or faults without a row: {apart or 'a row stands twice'}")
    return [
        Mutant(title, faults[title].get("in", function), test, faults[title]["old"], faults[title]["new"])
        for title, function, test in page
    ]


def survivors(chosen: Sequence[Mutant], *, say: bool = True) -> list[str]:
    """Return the rows whose test does not fail with the fault, or fails without it too."""
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, scratch / name)
        tests = list(dict.fromkeys(mutant.test for mutant in chosen))
        status, output = _pytest(scratch, tests)
        if status != PASSED:
            return [f"tests fail without any fault:\n{output}"]
        for mutant in chosen:
            status, output = _with_fault(scratch, mutant)
            if status != FAILED:
                alive.append(f"{mutant.row}: {mutant.test} ended with status {status}")
            if say:
                print("killed  " if status == FAILED else "SURVIVED", mutant.row, flush=True)
                if status not in (PASSED, FAILED):
                    print(output[-2000:])
    return alive


def _with_fault(scratch: Path, mutant: Mutant) -> tuple[int, str]:
    target = scratch / mutant.file
    whole = target.read_text(encoding="utf-8")
    try:
        _write(target, mutant.mutated())
        return _pytest(scratch, [mutant.test])
    finally:
        _write(target, whole)


def _write(target: Path, text: str) -> None:
    """Write a file and delete its compiled one, which stays valid for a text of the same second and size."""
    target.write_text(text, encoding="utf-8")
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        compiled.unlink()


def _pytest(scratch: Path, tests: Sequence[str]) -> tuple[int, str]:
    path = os.pathsep.join(str(scratch / source) for source in SOURCES)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "ISTHMUS_SOAK"}
    done = subprocess.run(
        command, cwd=scratch, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def _located(function: str) -> tuple[Path, str]:
    """Return the file (from the root) and the name inside it of a dotted name, following re-exports."""
    full = function if function.startswith("isthmus_") else f"isthmus.{function}"
    *parts, thing = full.split(".")
    for source in SOURCES:
        module = ROOT / source / Path(*parts)
        if module.with_suffix(".py").exists():
            return module.with_suffix(".py").relative_to(ROOT), thing
        for file in sorted(module.glob("*.py")):
            if re.search(rf"^(def|class) {thing}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
                return file.relative_to(ROOT), thing
    raise ValueError(f"there is no {function}")


def _lines_of(text: str, thing: str) -> tuple[int, int]:
    """Return the first line (from 0) and the line after a top-level function, class or assignment."""
    for node in ast.parse(text).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [getattr(target, "id", None) for target in targets]
        if thing in names:
            return node.lineno - 1, node.end_lineno or node.lineno
    raise ValueError(f"there is no {thing}")


def _node(test: str) -> str:
    """Return a test's node id from the root, with its class."""
    file, _, name = test.partition("::")
    path = file if file.startswith("reproduce/") else f"tests/{file}"
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any(getattr(each, "name", "") == name for each in node.body):
            return f"{path}::{node.name}::{name}"
    return f"{path}::{name}"


def main(beginnings: Sequence[str]) -> int:
    """Run the chosen rows, or all, and print which survive. Returns 1 if one does."""
    chosen = [one for one in mutants() if not beginnings or one.row.startswith(tuple(beginnings))]
    if not chosen:
        print(f"no row of docs/papers.md begins with {' or '.join(beginnings)}", file=sys.stderr)
        return 1
    alive = survivors(chosen)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} faults are found by the tests of their rows")
    for problem in alive:
        print(f"  {problem}", file=sys.stderr)
    return int(bool(alive))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
