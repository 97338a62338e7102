"""Run every benchmark beside its peer, print one table and write bench.json.

    python -m benchmarks                           all of them
    python -m benchmarks letor_parsing evaluation  those files only

A benchmark is a file here with a `main()` that returns rows `name, ours, peer, peer_name, ratio, goal`. A
ratio above 1 means that Isthmus is better; if the goal is a limit and there is no peer, `peer` is None,
`ratio` is limit/ours and `goal` is 1. Each file runs in a process of its own, so that no benchmark warms up
the next one and a crash does not affect the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS = ("name", "ours", "peer", "peer_name", "ratio", "goal")

Row = dict[str, Any]


def available() -> list[str]:
    """Return the names of all benchmark files."""
    return sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def measure(name: str, into: Path) -> None:
    """Run one benchmark in this process and write its rows, reduced to `COLUMNS`, as JSON."""
    rows: list[Row] = import_module(f"benchmarks.{name}").main()
    promised = [{column: row[column] for column in COLUMNS} for row in rows]
    into.write_text(json.dumps(promised), encoding="utf-8")


def measure_all(names: list[str]) -> tuple[list[Row], list[str]]:
    """Run each benchmark in a process of its own. Returns all rows, and the names of those that failed."""
    rows: list[Row] = []
    failed: list[str] = []
    child = "import sys, pathlib, benchmarks.__main__ as b; b.measure(sys.argv[1], pathlib.Path(sys.argv[2]))"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.perf_counter()
            into = Path(folder) / f"{name}.json"
            done = subprocess.run([sys.executable, "-c", child, name, str(into)], stdout=sys.stderr)
            if done.returncode == 0:
                rows += json.loads(into.read_text(encoding="utf-8"))
            else:
                failed.append(name)
            told = "failed" if done.returncode else "done"
            print(f"· {name} {told} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return rows, failed


def table(rows: list[Row]) -> str:
    """Format the rows as a text table; rows below their goal are marked."""
    lines = [("benchmark", "ours", "peer", "", "ratio", "goal", "")]
    for row in rows:
        peer = "–" if row["peer"] is None else _short(row["peer"])
        missed = "" if row["ratio"] >= row["goal"] else "below goal"
        ratio, goal = f"{row['ratio']:.2f}×", f"{row['goal']:g}×"
        lines.append((row["name"], _short(row["ours"]), peer, row["peer_name"] or "", ratio, goal, missed))
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    left = {0, 3, 6}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _short(value: float) -> str:
    return f"{value:.4g}"


def main() -> int:
    """Run the named benchmarks or all, print the table and write the rows. Returns 1 if one failed."""
    known = available()
    asked = argparse.ArgumentParser(prog="python -m benchmarks", description="Time every hot path.")
    asked.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(known)}")
    asked.add_argument("--out", type=Path, default=Path("bench.json"), help="where the rows go")
    options = asked.parse_args()
    if unknown := sorted(set(options.names) - set(known)):
        asked.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(known)}")
    rows, failed = measure_all(options.names or known)
    print(table(rows))
    options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"· wrote {options.out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
