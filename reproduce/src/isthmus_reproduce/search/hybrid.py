"""The hybrid without learning, measured: four silos by topic beside one index of everything, one encoder.

Documents are found, scored and merged by the service's own code; the scale of the hybrid comes from the
silos' score sums, as the broker adds them. Nothing is fitted to judgements, so that all queries are test
queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.evaluation import bootstrap
from isthmus.report import Estimate, Page, Section, Table
from isthmus.service import (
    Bm25Scorer,
    HybridScorer,
    Scored,
    Scorer,
    Search,
    Searcher,
    common_scale,
    measure,
    merge_hits,
)
from isthmus.tables import Run
from isthmus_reproduce.notebook import Cell
from isthmus_reproduce.prose import Prose
from isthmus_reproduce.search.world import MEASURE, SHOWN, Federation, World, encoder_of, federation

PROSE = Prose("search.j2")
BM25, CENTRAL = "BM25, one index", "hybrid, one index"
ROWS = (
    BM25,
    "BM25, silos, exact statistics",
    "BM25, silos, private statistics",
    "encoder alone, one index",
    CENTRAL,
    "hybrid, silos, exact statistics",
    "hybrid, silos, private statistics",
)
MUCH = 0.2
"""Of a query's measure: whoever loses more has noticed."""


class DenseScorer(Bm25Scorer):
    """Orders candidates by the encoder alone."""

    name: ClassVar[str] = "dense"

    def score(self, snapshot: Any, candidates: Any) -> Scored:
        """All candidates that have a vector, by cosine."""
        scores = candidates.scores["dense"]
        order = np.argsort(-scores, kind="stable")
        return Scored(order[np.isfinite(scores[order])], scores, None)


def values_of(world: World, encoder: str, draws: int) -> dict[str, list[list[float]]]:
    """By row, the measure of every query; several lists where statistics were drawn several times."""
    used = encoder_of(world, encoder)
    values: dict[str, list[list[float]]] = {row: [] for row in ROWS}
    with federation(world, encoder=used, whole=True) as central:
        scorers: dict[str, Scorer] = {
            BM25: Bm25Scorer(),
            "encoder alone, one index": DenseScorer(),
            CENTRAL: _hybrid(central),
        }
        for row, scorer in scorers.items():
            values[row].append(_values(central, scorer))
    with federation(world, encoder=used) as silos:
        for form in ("exact", *["private"] * draws):
            silos.share(form)
            values[f"BM25, silos, {form} statistics"].append(_values(silos, Bm25Scorer()))
            values[f"hybrid, silos, {form} statistics"].append(_values(silos, _hybrid(silos)))
    return values


def _hybrid(silos: Federation) -> HybridScorer:
    scale = common_scale([measure(silo.name, silo.index.snapshot, silo.store) for silo in silos.silos])
    if scale is None:
        raise ValueError("the collection has too few documents for a scale")
    return HybridScorer(scale)


def _values(silos: Federation, scorer: Scorer) -> list[float]:
    """The measure of every query, its own document left out where it was made from one."""
    world = silos.world
    searchers = [Searcher(silo.name, silo.index, silo.store, scorer) for silo in silos.silos]
    lists: dict[str, dict[str, float]] = {}
    for id, text, own in zip(world.corpus.queries.ids, world.corpus.queries.texts, world.own, strict=True):
        request = Search.model_construct(query=text, k=SHOWN + 1)  # some are longer than messages may be
        hits = (hit for searcher in searchers for hit in searcher.search(request, snippets=False).hits)
        merged, _ = merge_hits((hit for hit in hits if hit.document != own), k=SHOWN, threshold=0.0)
        lists[id] = {hit.document: float(-place) for place, hit in enumerate(merged)}
    values: list[float] = world.values(Run.from_dict(lists)).tolist()
    return values


@dataclass(frozen=True, eq=False)
class HybridOutcome:
    """Every row's measure of every query on one collection."""

    data: str
    values: Mapping[str, FloatArray]
    groups: IntArray
    documents: int
    seed: int

    @classmethod
    def of(cls, data: str, result: Mapping[str, Any], seed: int) -> HybridOutcome:
        """From what a unit kept."""
        values = {row: np.mean(lists, axis=0) for row, lists in result["values"].items()}
        return cls(data, values, np.array(result["groups"]), result["documents"], seed)

    def over(self, row: str, other: str) -> Estimate:
        """The mean difference with its interval; groups count once."""
        interval = bootstrap(self.values[row] - self.values[other], groups=self.groups, seed=self.seed)
        return Estimate(interval.value, interval.low, interval.high)

    def worse(self, row: str) -> tuple[int, int]:
        """How many queries are worse than with BM25 in one index, and how many have lost much."""
        difference = self.values[row] - self.values[BM25]
        return int((difference < -1e-9).sum()), int((difference < -MUCH).sum())

    def cells(self) -> Iterator[Cell]:
        """Every figure."""
        about: dict[str, Any] = {"table": "hybrid", "mode": "sound", "data": self.data, "n": len(self.groups)}
        for row, values in self.values.items():
            mean = bootstrap(values, groups=self.groups, seed=self.seed)
            figures = {MEASURE: Estimate(mean.value, mean.low, mean.high)}
            figures |= {
                f"{MEASURE} over {other}": self.over(row, other) for other in (BM25, CENTRAL) if other != row
            }
            for measure_name, estimate in figures.items():
                yield Cell(
                    row=row,
                    measure=measure_name,
                    value=estimate.value,
                    low=estimate.low,
                    high=estimate.high,
                    **about,
                )
            if row != BM25:
                worse, much = self.worse(row)
                yield Cell(row=row, measure="queries worse", value=worse, **about)
                yield Cell(row=row, measure=f"queries that lost more than {MUCH}", value=much, **about)


def page_of(outcomes: Sequence[HybridOutcome], encoder: str) -> Page:
    """The report."""
    rows = []
    for outcome in outcomes:
        for row, values in outcome.values.items():
            over, beside = (outcome.over(row, other) if row != other else None for other in (BM25, CENTRAL))
            worse = outcome.worse(row) if row != BM25 else (None, None)
            rows.append((outcome.data, row, float(values.mean()), over, beside, *worse))
    header = ("data", "row", MEASURE, f"over {BM25}", f"over {CENTRAL}", "worse", f"lost > {MUCH}")
    table = Table(header, tuple(rows), f"The encoder is {encoder}; no judgement was used", (), 4)
    sizes = ", ".join(f"{each.data} {each.documents:,} and {len(each.groups):,}" for each in outcomes)
    return Page(
        "The hybrid without learning",
        (Section("Quality", (table, PROSE("hybrid", sizes=sizes))),),
        PROSE("hybrid_lead"),
    )
