"""BM25 from private counts against BM25 from exact ones: quality by mechanism and lifetime ε.

Documents and queries are dealt into silos. The silo of a query scores all documents by the counts that the
documents' silos release (its own documents too, or, as a row of its own, those exactly). ε is the cost to a
document over its lifetime for one replaced word: once for `one_shot`, divided by all words that all peers
request for `scalar` and `per_cell`. The paper's shared noise gets its nominal ε for every answer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Literal

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.corpora import available, load
from isthmus.errors import DataError
from isthmus.private import (
    EPSILON_TOTALS,
    AnsweredCells,
    Asker,
    Decoys,
    Desk,
    Geometric,
    HashFamily,
    Mechanism,
    Noisy,
    PerCell,
    PrivateCounts,
    PublishedCounts,
    Scalar,
    SharedNoise,
    Shrink,
    explain,
    fetch_catalogue,
    in_memory,
)
from isthmus.randomness import Streams
from isthmus.report import Page, Plot, Section, Series, line_plot
from isthmus.tables import Corpus
from isthmus.text import Tokens
from isthmus_reproduce import synthetic_text
from isthmus_reproduce.deals import deal_corpus
from isthmus_reproduce.intervals import LEAST_FOLDS
from isthmus_reproduce.notebook import Cell, Notebook, Reproduction, Unit, cells_table
from isthmus_reproduce.private import attacks
from isthmus_reproduce.private import plots as pictures
from isthmus_reproduce.private.world import READERS, UnchargedSilos
from isthmus_reproduce.prose import Prose

PROSE = Prose("private.j2")
DATA = ("cran", "npl", "synthetic")
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, float("inf"))
MEASURES = ("nDCG@10", "share of exact", "Kendall tau")
EXACT = "exact"
SILOS = 4
NARROW = 1000
"""Cells per row for mechanisms with many rows."""


@dataclass(frozen=True)
class Config:
    """What to measure: `data` is a name, a path, or "all" for the available sets.

    `width` is that of one-shot sketches; by default it depends on the length of the documents.
    """

    data: str = "all"
    deal: Literal["topic", "random"] = "topic"
    width: int | None = None
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0

    @property
    def seeds(self) -> range:
        """Three seeds, or two at smoke scale."""
        return range(self.seed, self.seed + (3 if self.scale == "full" else 2))


@dataclass(frozen=True)
class Point:
    """A unit of work: all mechanisms and readers on one collection, with one seed at one ε."""

    data: str
    seed: int
    epsilon: float


def reproduce(config: Config, out: str | PathLike[str], *, workers: int | None = None) -> Reproduction:
    """Compute what is missing in the folder, and write the report."""
    notebook = Notebook(out, config)
    names = _names(config)
    units = [unit for seed in config.seeds for name in names for unit in _units(name, seed, config)]
    results = notebook.compute(measure, units, label="private BM25", workers=workers)
    drawn = pictures.compute(notebook, seed=config.seed, workers=workers)
    trials = 100_000 if config.scale == "full" else 4_000
    tried = attacks.compute(notebook, seed=config.seed, trials=trials, workers=workers)
    cells = tuple(_cells(names, results, config))
    page = _page(names, cells, (*pictures.sections(drawn), *attacks.sections(tried)), config)
    return notebook.publish(cells, page)


def _names(config: Config) -> tuple[str, ...]:
    if config.data != "all":
        return (config.data,)
    if config.scale == "smoke":
        return ("synthetic",)
    there = available()
    return tuple(name for name in DATA if name == "synthetic" or there.get(name))


def _units(name: str, seed: int, config: Config) -> Iterator[Unit]:
    about = {"data": name, "deal": config.deal, "width": config.width, "scale": config.scale, "seed": seed}
    for epsilon in EPSILONS:
        yield Unit(Point(name, seed, epsilon), {**about, "epsilon": epsilon})


def collection(name: str, scale: str, seed: int) -> Corpus:
    """Load a collection by name; `synthetic` has documents of 1,000 words."""
    if name != "synthetic":
        return load(name)
    documents, queries = (1000, 100) if scale == "full" else (300, 40)
    return synthetic_text.text(documents, queries, SILOS, seed=seed, words=1000 if scale == "full" else 200)


def measure(
    *, data: str, deal: Literal["topic", "random"], width: int | None, scale: str, seed: int, epsilon: float
) -> list[dict[str, Any]]:
    """Measure one seed at one ε: a record for every mechanism and reader, exact counts first."""
    streams = Streams(seed).under("private features", data)
    corpus = collection(data, scale, seed)
    if not corpus.qrels.rows:
        raise DataError(f"{data} has no judgements", cure="name a collection with judgements")
    world = UnchargedSilos(deal_corpus(corpus, SILOS, streams, by=deal), streams, width)
    records: list[dict[str, Any]] = [{"mechanism": EXACT, "reader": "", **world.judged(world.exact)}]
    for reader, scores in _one_shot(world, epsilon):
        records.append({"mechanism": "one_shot", "reader": reader, **world.judged(scores)})
    for kind, nominal in _per_query(world, epsilon):
        about = {"mechanism": kind.name, "reader": "ask", "an answer": nominal}
        records.append(about | world.judged(_answered(world, kind)))
    return records


def _one_shot(world: UnchargedSilos, epsilon: float) -> Iterator[tuple[str, FloatArray]]:
    """Yield scores from cells noised once, by every way to read them."""
    released = PublishedCounts(world, epsilon)
    scores = {name: world.scored(partial(released.counts, name)) for name in READERS}
    yield from scores.items()
    yield "publish, own exact", world.at_home(released.at_home, scores["publish"])


def _per_query(world: UnchargedSilos, epsilon: float) -> Iterator[tuple[Mechanism, float]]:
    """Yield the mechanisms that charge every answer, each with its share of a lifetime's ε."""
    words = sum(len(np.unique(queries.terms.codes)) for queries in world.queries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says that it is insecure
        yield SharedNoise(min(epsilon, 1e9), 10), epsilon  # the 10 of the paper's 30 rows that are read
    yield Scalar(epsilon / words, 10), epsilon / words  # no decoys: each would cost as much as a word
    yield PerCell(epsilon / words, 10), epsilon / words


def _answered(world: UnchargedSilos, kind: Mechanism) -> FloatArray:
    """Return scores from the counts that askers recover from answers."""
    family = HashFamily(world.streams("hashes", kind.name).bytes(32), kind.rows, NARROW)
    carriers = [in_memory(Desk(world.owner(holder, kind, family)), "peer") for holder in world.silos]
    catalogues = [fetch_catalogue(carrier, "body") for carrier in carriers]
    lexica = [world.lexicon(asker, family) for asker in world.silos]

    def counts(asker: int, holder: int) -> PrivateCounts:
        own, catalogue = world.bodies[asker], catalogues[holder]
        nobody = Ids.of([])  # no decoys: they hide words and do not change counts
        decoys = Decoys(nobody, np.empty(0, dtype=np.int64), bytes(16), count=0)
        real = 5 if isinstance(kind, PerCell) else kind.rows
        asking = Asker(catalogue.terms, family, kind, decoys, real_rows=real)
        words = world.queries[asker].terms
        cells: Noisy = AnsweredCells.through(carriers[holder], asking, words, len(catalogue.documents))
        variance = float(kind.variance(_moments(own, catalogue.lengths), NARROW, asking.real_rows).mean())
        law = Geometric(min(max((2 / variance) ** 0.5, 1e-4), 20.0))
        lexicon = lexica[asker]
        return PrivateCounts(cells, Shrink(law, lexicon, catalogue.lengths), lexicon, catalogue.lengths)

    return world.scored(counts)


def _moments(own: Tokens, lengths: IntArray) -> FloatArray:
    """Estimate F₂ of documents of these lengths, in proportion to F₂ per word of the silo's own."""
    squares = float((own.counts().data ** 2).sum())
    return lengths.astype(np.float64) * (squares / max(len(own.terms), 1))


def _cells(names: Sequence[str], results: Mapping[Point, Any], config: Config) -> Iterator[Cell]:
    """Yield means over seeds with their intervals, a row for each mechanism and ε."""
    for name in names:
        for epsilon in EPSILONS:
            units = [results[Point(name, seed, epsilon)] for seed in config.seeds]
            for records in zip(*units, strict=True):  # one record per seed
                row, reader = records[0]["mechanism"], records[0]["reader"]
                if row == EXACT and epsilon != EPSILONS[0]:
                    continue
                about = {
                    "table": "fig8a",
                    "row": row,
                    "variant": f"{reader}, ε = {epsilon:g}" if reader else "",
                    "mode": "paper" if row == "insecure_shared_noise" else "sound",
                    "data": name,
                }
                values = {measure: [record[measure] for record in records] for measure in MEASURES[::2]}
                exact = [unit[0]["nDCG@10"] for unit in units]
                values["share of exact"] = [
                    value / best for value, best in zip(values["nDCG@10"], exact, strict=True)
                ]
                for measure in MEASURES:
                    yield Cell.over_folds(values[measure], measure=measure, **about)


def _page(names: Sequence[str], cells: Sequence[Cell], more: Sequence[Section], config: Config) -> Page:
    meanings = [f"{explain(epsilon)}." for epsilon in EPSILONS]
    lead = PROSE("lead", epsilon_totals=EPSILON_TOTALS, meanings=meanings)
    sections = []
    for name in names:
        own = [cell for cell in cells if cell.data == name]
        table = cells_table(own, f"BM25 from private counts on {name}, dealt by {config.deal}")
        sections.append(Section(name, (_curves(own, len(config.seeds)), table)))
    return Page("Private features", (*sections, *more), lead)


def _curves(cells: Sequence[Cell], seeds: int) -> Plot:
    """Plot curves over ε by mechanism and reader: nDCG@10 relative to exact counts, and Kendall's τ."""

    def draw(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        panels = figure.subplots(1, 2)
        for own, measured in zip(panels, MEASURES[1:], strict=True):
            line_plot(_lines(cells, measured), x="lifetime ε", y=measured).draw(own)
            own.get_legend().remove()
            own.set_xticks(range(len(EPSILONS)), ["∞" if np.isinf(e) else f"{e:g}" for e in EPSILONS])
            for drawn in own.get_lines():
                drawn.set(marker="o", markersize=3, ls="--" if "insecure" in str(drawn.get_label()) else "-")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
        )

    caption = PROSE("curves_caption", seeds=seeds, intervals=seeds >= LEAST_FOLDS)
    return Plot(draw, caption, (9.6, 4.8))


def _lines(cells: Sequence[Cell], measured: str) -> dict[str, Series]:
    """Return means with their intervals by mechanism and reader, over the positions of ε in order."""
    by_name: dict[str, list[tuple[int, Cell]]] = {}
    for cell in cells:
        if cell.measure == measured and cell.row != EXACT:
            reader, _, epsilon = cell.variant.rpartition(", ε = ")
            by_name.setdefault(f"{cell.row} ({reader})", []).append((EPSILONS.index(float(epsilon)), cell))
    return {
        name: Series(
            [place for place, _ in points],
            [cell.value for _, cell in points],
            [cell.value if cell.low is None else cell.low for _, cell in points],
            [cell.value if cell.high is None else cell.high for _, cell in points],
        )
        for name, points in by_name.items()
    }
