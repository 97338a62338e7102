"""The rows of a cross-silo report: every way to train, and the controls needed to interpret it.

A row is a ranker trained on one world and used on one variant of its counts. Its validation value is used to
choose the product's default; its test values, query by query, are reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.federation import State
from isthmus.federation.semisupervised import (
    ANCHORED,
    PLAIN,
    Anchor,
    CoTraining,
    Labelling,
    PrintedWorld,
    Scorer,
    SiloRows,
    Way,
    Ways,
    averaged,
    cotrain,
    first_model,
    fitted_scaling,
    guess,
    joint_rows,
    local_models,
    network,
    scaled,
)
from isthmus.federation.semisupervised import LABELLINGS as WAYS_LABELLINGS
from isthmus.randomness import Streams
from isthmus.rankers import LambdaMART, Parameters, Scaling, TrainingRows, scores_of, train_epochs
from isthmus.tables import Letor
from isthmus_reproduce.csfltr.selection import PICKS
from isthmus_reproduce.csfltr.world import MEASURES, Case, DealtSilos, Variant, VariantTables, dealt_corpus

Rows = Iterator[Way]

LISTS = CoTraining(model="lambdarank", rounds=10, epochs=2, local_epochs=20, learning_rate=0.02)
LABELLINGS: Mapping[str, Labelling] = {
    "CS-F-LTR": WAYS_LABELLINGS["CS-F-LTR"],
    "CS-F-LTR, ramp and refresh": Labelling("soft", rounds=3, refresh=0.15, ramp=(0.1, 0.3)),
    "CS-F-LTR, hard": Labelling("hard"),
    "calibrated soft": Labelling("soft", beta=1.0, calibrated=True),
    "calibrated negatives": Labelling("negatives", beta=1.0, calibrated=True, confidence=0.97),
    "calibrated confident": Labelling("confident", beta=1.0, calibrated=True),
    "calibrated, three labellings": Labelling("soft", beta=1.0, calibrated=True, rounds=3),
    "calibrated, weighed by noise": Labelling("soft", beta=1.0, calibrated=True, by_noise=True),
    "all-zero": WAYS_LABELLINGS["all-zero"],
    "all-zero, β = 1": Labelling("zero", beta=1.0),
    "oracle": Labelling("oracle", beta=0.3),
}
"""Labelling of the cross pairs, by row; rows not listed train on judged pairs as their name says."""

FULL = tuple(LABELLINGS)
MAIN = ("CS-F-LTR", "calibrated soft", "all-zero", "oracle")
EXACT = ("CS-F-LTR", "all-zero", "oracle")
FEW = ("CS-F-LTR", "all-zero")


class Bench(Ways):
    """One variant of a world, for training and ranking."""

    tables: VariantTables

    def __init__(self, tables: VariantTables, *, labels: int | None = None) -> None:
        super().__init__(tables, seed=tables.world.case.seed, labels=labels)

    def rows(self, labellings: tuple[str, ...], *, locals_too: bool = True, more: bool = False) -> Rows:
        """Yield every row on this variant."""
        silos = self.silos(self.tables.inside)
        config = replace(PLAIN, seed=self.seed)
        start, models = self.begun(silos, config)
        if locals_too:
            yield from self.alone(models, silos, config, start.scaling)
        yield Way("averaged labeller", "all", network(start.parameters, start.scaling))
        yield Way("Global", "all", self.trained(silos, config))
        for name in labellings:
            labelled = replace(config, labelling=LABELLINGS[name])
            yield Way(name, "all", self.trained(silos, labelled, start))
        if self.tables.variant != "clipped":
            yield Way(ANCHORED, "all", self.trained(silos, replace(config, anchor=Anchor())))
        if self.tables.variant != "exact":
            yield from self._noise_aware(config, more=more)
        if more:
            yield from self._lists(silos)
            judged = self.silos(self.tables.judged)
            yield Way("Global, other sampling", "all", self.trained(judged, config))
            labelled = replace(config, labelling=LABELLINGS["CS-F-LTR"])
            other = self.trained(judged, labelled, self._start(judged, config))
            yield Way("CS-F-LTR, other sampling", "all", other)
            yield from self._other_pairs(labelled, start)

    def _start(self, silos: list[SiloRows], config: CoTraining) -> State:
        return self.begun(silos, config)[0]

    def _other_pairs(self, config: CoTraining, start: State) -> Rows:
        """Train as in the paper on cross pairs chosen by other rules; the ranked documents stay the same."""
        tables = self.tables
        for kind, pick in PICKS.items() if tables.variant == "private" else ():
            across = tables.across_by(pick)
            silos = tables.silos(tables.inside, self.labels, across)
            yield Way(f"CS-F-LTR, pairs by {kind}", "all", self.trained(silos, config, start))

    def _noise_aware(self, config: CoTraining, *, more: bool) -> Rows:
        """Train on judged pairs as others see them: alone, anchored to BM25, with exact or labelled ones."""
        silos = self.silos(self.tables.noised)
        yield Way("noise-aware Global", "all", self.trained(silos, config))
        if self.tables.variant != "private":
            return
        drawn = self.model(silos, replace(config, anchor=Anchor()))
        yield Way("anchored noise-aware Global", "all", network(drawn.parameters, drawn.scaling))
        taught, teacher = Labelling("soft", beta=3.0), State(0, drawn.parameters, drawn.scaling)
        yield Way("anchored labeller", "all", self.trained(silos, replace(config, labelling=taught), teacher))
        if more:
            both = [
                replace(silo, labelled=_beside(silo.labelled, exact.labelled))
                for silo, exact in zip(silos, self.silos(self.tables.inside), strict=True)
            ]
            yield Way("half noise-aware Global", "all", self.trained(both, config))
        for name in ("calibrated soft", "all-zero") if more else ("calibrated soft",):
            labelled = replace(config, labelling=LABELLINGS[name])
            yield Way(
                f"noise-aware, {name}", "all", self.trained(silos, labelled, self._start(silos, config))
            )

    def _lists(self, silos: list[SiloRows]) -> Rows:
        """Train LambdaRank and LambdaMART, without and with labelled cross pairs in the lists."""
        config = replace(LISTS, seed=self.seed)
        aware = self.silos(self.tables.noised) if self.tables.variant != "exact" else silos
        prefix = "noise-aware " if self.tables.variant != "exact" else ""
        yield Way("LambdaRank Global", "all", self.trained(silos, config))
        if prefix:
            yield Way("LambdaRank noise-aware Global", "all", self.trained(aware, config))
        classes = replace(PLAIN, seed=self.seed)
        start = self._start(aware, classes)
        rows = [scaled(silo, start.scaling) for silo in aware]
        labelling = Labelling("confident", beta=1.0, calibrated=True)
        lessons = [
            joint_rows(silo, guess(dict(start.parameters), silo, labelling, self.grades), labelling.beta)
            for silo in rows
        ]
        guessed = [replace(silo, labelled=lesson) for lesson, silo in zip(lessons, rows, strict=True)]
        scorer = self.trained(guessed, replace(config, scaling="none"))
        yield Way(
            f"LambdaRank {prefix}calibrated confident", "all", lambda table: scorer(start.scaling(table))
        )
        judged = [TrainingRows.of_letor(silo.labelled) for silo in rows]
        for name, parts in (("Global", judged), ("calibrated confident", lessons)):
            trees = LambdaMART(trees=60, depth=3).fit(TrainingRows.joined(parts))
            yield Way(f"LambdaMART {prefix}{name}", "all", _trees(trees, start.scaling))


def _beside(one: Letor, other: Letor) -> Letor:
    """Join the rows of both tables; the second's queries are renamed."""
    renamed = replace(other, queries=tuple(f"{query} exact" for query in other.queries))
    return Letor.concat([one, renamed])


def _trees(trees: LambdaMART, scaling: Scaling) -> Scorer:
    return lambda table: trees.score(scaling(table))


def measured(world: DealtSilos, variant: Variant, ways: Rows) -> list[dict[str, Any]]:
    """Return a record per ranker: validation nDCG@10, test means, and test nDCG@10 of every query."""
    tables = world.tables[variant]
    records = [_record(world, tables, "BM25", "all", {at: tables.bm25(at) for at in tables.ranked})]
    for row, part, score in ways:
        scores = {at: score(table) for at, table in tables.ranked.items()}
        records.append(_record(world, tables, row, part, scores))
    return records


def _record(
    world: DealtSilos, tables: VariantTables, row: str, part: str, scores: Mapping[int, NDArray[Any]]
) -> dict[str, Any]:
    chosen, tested = (world.evaluated(tables.ranked[at], scores[at], at) for at in (1, 2))
    return {
        "row": row,
        "part": part,
        "validation": float(chosen["nDCG@10"]),
        "test": {measure: float(tested[measure]) for measure in MEASURES},
        "queries": {query: round(value, 5) for query, value in tested.per_query("nDCG@10").items()},
    }


def table_unit(*, case: Mapping[str, Any], more: bool = True) -> dict[str, Any]:
    """Compute the rows of one seed, on every variant of the counts; with `more`, every option too."""
    began = time.process_time()
    world = DealtSilos(Case(**case))
    results: dict[str, Any] = {"cross share": world.cross_share}
    results["exact"] = measured(world, "exact", Bench(world.tables["exact"]).rows(EXACT))
    rows = Bench(world.tables["private"]).rows(FULL if more else MAIN, more=more)
    results["private"] = measured(world, "private", rows)
    clipped = Bench(world.tables["clipped"]).rows(FEW, locals_too=False)
    results["clipped"] = measured(world, "clipped", clipped)
    return {**results, "seconds": time.process_time() - began}


def printed_unit(*, case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the paper's own protocol on one seed: every row with printed and usual measures."""
    world = PrintedWorld(*dealt_corpus(Case(**case)))
    return [
        {"row": row, "part": part, "test": world.measured(weights)} for row, part, weights in world.ways()
    ]


def point_unit(*, case: Mapping[str, Any], labels: list[int | None]) -> dict[str, Any]:
    """Compute the rows of a point of a figure or the map, for each number of labelled queries per silo."""
    began = time.process_time()
    world = DealtSilos(Case(**case))
    points = []
    for most in labels:
        bench = Bench(world.tables["private"], labels=most)
        points.append({"labels": most, "rows": measured(world, "private", bench.rankers(every=False))})
    return {"points": points, "seconds": time.process_time() - began}


STRIDE = 3
"""Epochs between two points of a curve: those of a federated round."""


def curve_unit(*, case: Mapping[str, Any]) -> dict[str, Any]:
    """Compute Figure 6: nDCG@10 of every silo's test queries by number of epochs, for the four ways."""
    world = DealtSilos(Case(**case))
    tables = world.tables["private"]
    silos = tables.silos(tables.inside)
    config = replace(PLAIN, seed=world.case.seed)
    scaling = fitted_scaling(silos, config.scaling)
    models = local_models(silos, config, scaling, grades=world.grades)
    blank = State(0, first_model(config, scaling, world.grades), scaling)
    start = State(0, averaged(models), scaling)
    curves: dict[str, Any] = {
        "epochs": [STRIDE * (at + 1) for at in range(config.rounds)],
        "Local": [],
        "Local+": [],
    }
    for at, name in enumerate(tables.inside):
        alone = list(_passes(blank.parameters, scaling(silos[at].labelled), config, at))
        rows = scaled(silos[at], scaling)
        guesses = guess(models[at], rows, Labelling("soft"), world.grades)
        again = list(_passes(models[at], joint_rows(rows, guesses, 0.1), config, at))
        for way, path in (("Local", alone), ("Local+", again)):
            curves[way].append([_by_silo(world, model, scaling)[name] for model in path])
    labelled = replace(config, labelling=LABELLINGS["CS-F-LTR"])
    for way, using, first in (("Global", config, blank), ("CS-F-LTR", labelled, start)):
        states: list[State] = []
        cotrain(silos, using, grades=world.grades, start=first, remember=states.append)
        values = [_by_silo(world, state.parameters, scaling) for state in states]
        curves[way] = [[value[name] for value in values] for name in tables.inside]
    return {**curves, "silos": list(tables.inside)}


def _passes(
    start: Mapping[str, NDArray[Any]], data: Letor, config: CoTraining, silo: int
) -> Iterator[Parameters]:
    """Yield the models of one silo alone, every `STRIDE` epochs."""
    model, local = dict(start), config.local(STRIDE)
    for at in range(config.rounds):
        model = train_epochs(model, data, local, Streams(config.seed)("curve", silo, at)).parameters
        yield model


def _by_silo(world: DealtSilos, model: Mapping[str, NDArray[Any]], scaling: Scaling) -> dict[str, float]:
    """Return test nDCG@10 of every silo's queries."""
    table = world.tables["private"].ranked[2]
    values = world.evaluated(table, scores_of(dict(model), scaling(table)), 2).per_query("nDCG@10")
    homes = dict(zip(world.corpus.queries.ids, world.corpus.queries.silos.tolist(), strict=True))
    means = {}
    for at, name in enumerate(world.names):
        own = [value for query, value in values.items() if homes[query] == at]
        means[name] = float(np.mean(own)) if own else float("nan")
    return means
