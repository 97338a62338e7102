"""The tables and the plot of docs/sizing.md: what a node was measured to take, and arithmetic over shards.

    python docs/sizing.py            write them into the page, and the plot into docs/images
    python docs/sizing.py measure    measure again, which takes minutes: python -m benchmarks.node growth

Between two sizes that were measured costs grow by a power of the number of documents; beyond the largest,
every further document costs what one cost between the two largest sizes.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "sizing.md"
IMAGE = Path(__file__).parent / "images" / "growth.svg"
MEASURED = Path(__file__).parent / "sizing.json"
"""At which commit, and of a node and of bare tantivy by number of documents: seconds of processor time to
index them, milliseconds of it a search; of a node the slowest search of a hundred too, seconds to open it
again (`open` by the clock, `opening` of the processor's), and gigabytes in memory while indexing and on
disk."""
WIDTH, LINKS = 384, 16
"""Numbers of a vector (bge-small), and links of a document in the graph that finds near ones."""
MERGE_MS = 1.15
"""Processor time of the broker a silo that answers: 4.6 ms for four, with twenty users over HTTPS."""
SHARDS = {10**7: (1, 4, 10), 10**8: (10, 100), 10**9: (100, 1000)}
"""By number of documents, over how many shards they are dealt."""

Costs = dict[str, float]


def measured(of: str = "node") -> dict[int, Costs]:
    """What was measured, by number of documents."""
    return {int(size): costs for size, costs in json.loads(MEASURED.read_text("utf-8"))[of].items()}


def costs_of(documents: float, sizes: dict[int, Costs]) -> Costs:
    """The costs of one node of so many documents."""
    known = sorted(sizes)
    upper = next((at for at, size in enumerate(known) if size >= documents), len(known) - 1)
    first, last = known[max(upper - 1, 0)], known[max(upper, 1)]
    before, after = sizes[first], sizes[last]
    if documents > last:
        more = (documents - last) / (last - first)
        return {name: after[name] + more * (after[name] - before[name]) for name in after}
    step = math.log(documents / first) / math.log(last / first)
    return {name: value * (after[name] / value) ** step for name, value in before.items()}


def over_shards(documents: float, shards: int, sizes: dict[int, Costs]) -> Costs:
    """What so many documents take, dealt evenly over shards of a core each: of one shard, and of all.

    All shards work on a search at once, and the broker merges what they say.
    """
    one = costs_of(documents / shards, sizes)
    return {
        "each": documents / shards,
        "memory": one["memory"],
        "disk": one["disk"] * shards,
        "search": one["search"] + MERGE_MS * shards,
        "processor": one["search"] * shards + MERGE_MS * shards,
        "index": one["index"] / 3600,
    }


def vectors_of(documents: float) -> tuple[float, float]:
    """Gigabytes of vectors in memory (a byte a number, and the graph) and on disk (two more a number)."""
    graph = WIDTH + 2 * 4 * LINKS
    return documents * graph / 1e9, documents * (graph + 2 * WIDTH) / 1e9


def tables() -> dict[str, str]:
    """The page's tables by name."""
    sizes, bare = measured(), measured("tantivy")
    rows = [
        "| documents | indexing, s | over tantivy's | a search, ms | over tantivy's | slowest of 100"
        " | opening, s | memory, GB | disk, GB |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for size, costs in sorted(sizes.items()):
        over = {f"{name} over": costs[name] / bare[size][name] for name in ("index", "search")}
        named = ("index", "index over", "search", "search over", "p99", "opening", "memory", "disk")
        values = [(costs | over)[name] for name in named]
        rows.append(f"| {size:,} | " + " | ".join(_short(value) for value in values) + " |")
    rows += ["", f"Commit {json.loads(MEASURED.read_text('utf-8'))['commit']}."]
    beyond = [
        "| documents | shards | documents each | memory each, GB | vectors each, GB | disk of all, GB"
        " | a search, ms | processor of all, ms | indexing each, h |"
    ]
    beyond.append("|---|---|---|---|---|---|---|---|---|")
    for size, counts in SHARDS.items():
        for shards in counts:
            cost = over_shards(size, shards, sizes)
            memory, disk = vectors_of(cost["each"])[0], cost["disk"] + vectors_of(size)[1]
            values = [cost["memory"], memory, disk, cost["search"], cost["processor"], cost["index"]]
            cells = " | ".join(_short(value) for value in values)
            beyond.append(f"| {_power(size)} | {shards:,} | {_power(cost['each'])} | {cells} |")
    return {"measured": "\n".join(rows), "beyond": "\n".join(beyond)}


def _power(value: float) -> str:
    """A number as in 2.5e6."""
    return f"{value:.1e}".replace("e+0", "e").replace(".0", "")


def _short(value: float) -> str:
    """Two digits that say something."""
    digits = 1 - math.floor(math.log10(value))
    rounded = round(value, digits)
    return f"{rounded:,.{max(digits, 0)}f}"


def page(text: str) -> str:
    """The page with its tables as they are now."""
    for name, table in tables().items():
        text = re.sub(
            rf"(<!-- {name} -->\n)[^<]*(\n<!-- end -->)",
            lambda found, new=table: found[1] + new + found[2],
            text,
            flags=re.S,
        )
    return text


def plot() -> None:
    """Draw how costs grow with the number of documents."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "isthmus"
    from matplotlib import pyplot

    names = {
        "index": "indexing, s",
        "search": "a search, ms",
        "opening": "opening, s",
        "memory": "memory, GB",
        "disk": "disk, GB",
    }
    figure, axes = pyplot.subplots(1, len(names), figsize=(3 * len(names), 3), layout="constrained")
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for who, style in (("node", "o-"), ("tantivy", "s--")):
            values = {size: costs[name] for size, costs in measured(who).items() if name in costs}
            axis.loglog(list(values), list(values.values()), style, label=who)
        axis.set(title=label, xlabel="documents")
    axes[0].legend()
    figure.savefig(IMAGE, metadata={"Date": None})


def measure() -> None:
    """Measure every size again, each in a process of its own."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, check=True)
    command = [sys.executable, "-m", "benchmarks.node", "growth"]
    costs = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    stated = {"commit": commit.stdout.decode().strip(), **costs}
    MEASURED.write_text(json.dumps(stated, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    plot()
