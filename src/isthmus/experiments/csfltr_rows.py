"""The rows of a cross-silo report: every way to train, and the controls it cannot be read without.

A row is a ranker trained on one world and used on one variant of its counts. Its validation figure chooses
the product's default; its test figures, query by query, are what is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.experiments.csfltr_world import MEASURES, Case, Tables, Variant, World
from isthmus.federation.rounds import State
from isthmus.federation.semisupervised.labelling import Labelling, SiloRows, guess, lesson_of
from isthmus.federation.semisupervised.training import (
    Anchor,
    CoTraining,
    Trained,
    averaged,
    cotrain,
    first_model,
    fitted_scaling,
    local_models,
    scaled,
    self_taught,
)
from isthmus.randomness import Streams
from isthmus.rankers import LambdaMART, Lesson, Parameters, Scaling, scores_of, train_epochs
from isthmus.tables import Letor

Kind = Literal["rtk", "random", "mixed"]
Scorer = Callable[[Letor], NDArray[Any]]
Rows = Iterator[tuple[str, str, Scorer]]
"""(row, part, how it scores)."""

PLAIN = CoTraining()
LISTS = CoTraining(model="lambdarank", rounds=10, epochs=2, local_epochs=20, learning_rate=0.02)
LABELLINGS: Mapping[str, Labelling] = {
    "CS-F-LTR": Labelling("soft"),
    "CS-F-LTR, ramp and refresh": Labelling("soft", rounds=3, refresh=0.15, ramp=(0.1, 0.3)),
    "CS-F-LTR, hard": Labelling("hard"),
    "calibrated soft": Labelling("soft", beta=1.0, calibrated=True),
    "calibrated negatives": Labelling("negatives", beta=1.0, calibrated=True, confidence=0.97),
    "calibrated confident": Labelling("confident", beta=1.0, calibrated=True),
    "calibrated, three labellings": Labelling("soft", beta=1.0, calibrated=True, rounds=3),
    "calibrated, weighed by noise": Labelling("soft", beta=1.0, calibrated=True, by_noise=True),
    "all-zero": Labelling("zero", beta=0.3),
    "all-zero, β = 1": Labelling("zero", beta=1.0),
    "oracle": Labelling("oracle", beta=0.3),
}
"""What labels the cross pairs, by row; all others are as the row says on the same judged pairs."""

FULL = tuple(LABELLINGS)
MAIN = ("CS-F-LTR", "calibrated soft", "all-zero", "oracle")
EXACT = ("CS-F-LTR", "all-zero", "oracle")
FEW = ("CS-F-LTR", "all-zero")
ANCHORED = "anchored Global"
DEFAULT_ROW = ANCHORED
"""The product's default.

On validation queries of the judged collections it and its noise-aware twin lead, within .001 of each other.
At smaller budgets noise-aware training loses much where counts are read by shrinking; it does not.
"""


class Bench:
    """One variant of a world to train on and to rank by."""

    def __init__(self, tables: Tables, *, labels: int | None = None) -> None:
        self.tables, self.labels = tables, labels
        self.grades = tables.world.grades
        self.seed = tables.world.case.seed

    def silos(self, inside: Mapping[str, Letor]) -> list[SiloRows]:
        """What the silos learn from, given their judged rows."""
        return self.tables.silos(inside, self.labels)

    def rows(self, labellings: tuple[str, ...], *, locals_too: bool = True, more: bool = False) -> Rows:
        """Every row on this variant."""
        silos = self.silos(self.tables.inside)
        config = replace(PLAIN, seed=self.seed)
        start, models = self._begun(silos, config)
        labeller, scaling = start.parameters, start.scaling
        if locals_too:
            yield from self._alone(models, silos, config, scaling)
        yield "averaged labeller", "all", _network(labeller, scaling)
        yield "Global", "all", self._trained(silos, config)
        for name in labellings:
            yield name, "all", self._trained(silos, replace(config, labelling=LABELLINGS[name]), start)
        if self.tables.variant != "clipped":
            yield ANCHORED, "all", self._trained(silos, replace(config, anchor=Anchor()))
        if self.tables.variant != "exact":
            yield from self._noise_aware(config, more=more)
        if more:
            yield from self._lists(silos)
            judged = self.silos(self.tables.judged)
            yield "Global, other sampling", "all", self._trained(judged, config)
            labelled = replace(config, labelling=LABELLINGS["CS-F-LTR"])
            other = self._trained(judged, labelled, self._start(judged, config))
            yield "CS-F-LTR, other sampling", "all", other
            yield from self._other_pairs(labelled, start)

    def _alone(
        self, models: list[Parameters], silos: list[SiloRows], config: CoTraining, scaling: Scaling
    ) -> Rows:
        """`Local` and `Local+`."""
        yield from self._each("Local", models, silos, scaling)
        taught = replace(config, labelling=Labelling("soft", beta=0.1))
        again = self_taught(models, silos, taught, scaling, grades=self.grades)
        yield from self._each("Local+", again, silos, scaling)

    def _paced(self, config: CoTraining) -> CoTraining:
        """Few judged rows are gone through more often: all rows of a point take as many steps."""
        some, every = (self.tables.silos(self.tables.inside, labels) for labels in (self.labels, None))
        rows = [sum(silo.labelled.rows for silo in silos) for silos in (some, every)]
        times = max(1, round(rows[1] / max(rows[0], 1)))
        return replace(config, epochs=config.epochs * times, local_epochs=config.local_epochs * times)

    def points(self, *, every_way: bool = False) -> Rows:
        """The few rows of a point of a figure or of the map; for a story, every way."""
        silos = self.silos(self.tables.inside)
        config = self._paced(replace(PLAIN, seed=self.seed))
        start, models = self._begun(silos, config)
        if every_way:
            yield from self._alone(models, silos, config, start.scaling)
            yield "averaged labeller", "all", _network(start.parameters, start.scaling)
        else:
            yield from self._each("Local", models, silos, start.scaling)
        yield "Global", "all", self._trained(silos, config)
        yield ANCHORED, "all", self._trained(silos, replace(config, anchor=Anchor()))
        yield "noise-aware Global", "all", self._trained(self.silos(self.tables.noised), config)
        for name in FEW:  # cross pairs are as many as ever
            labelled = replace(config, epochs=PLAIN.epochs, labelling=LABELLINGS[name])
            yield name, "all", self._trained(silos, labelled, start)

    def _other_pairs(self, config: CoTraining, start: State) -> Rows:
        """The paper's training on cross pairs that were chosen otherwise; what is ranked stays the same."""
        tables = self.tables
        kinds: tuple[Kind, ...] = ("rtk", "random", "mixed") if tables.variant == "private" else ()
        for kind in kinds:
            across = tables.across_by(replace(tables.selection, kind=kind))
            silos = tables.silos(tables.inside, self.labels, across)
            yield f"CS-F-LTR, pairs by {kind}", "all", self._trained(silos, config, start)

    def _each(self, row: str, models: list[Parameters], silos: list[SiloRows], scaling: Scaling) -> Rows:
        """One model a silo; a silo that has nothing to learn from has none."""
        for name, model, silo in zip(self.tables.inside, models, silos, strict=True):
            if silo.labelled.rows:
                yield row, name, _network(model, scaling)

    def _begun(self, silos: list[SiloRows], config: CoTraining) -> tuple[State, list[Parameters]]:
        """The silos' own models, and their average, which labels and is where CS-F-LTR starts."""
        scaling = fitted_scaling(silos, config.scaling)
        models = local_models(silos, config, scaling, grades=self.grades)
        return State(0, averaged(models), scaling), models

    def _start(self, silos: list[SiloRows], config: CoTraining) -> State:
        return self._begun(silos, config)[0]

    def _trained(self, silos: list[SiloRows], config: CoTraining, start: State | None = None) -> Scorer:
        made = self._model(silos, config, start)
        return _network(made.parameters, made.scaling)

    def _model(self, silos: list[SiloRows], config: CoTraining, start: State | None = None) -> Trained:
        if config.labelling is None:
            silos = [silo.without_cross() for silo in silos]
        return cotrain(silos, config, grades=self.grades, start=start or self._blank(silos, config))

    def _blank(self, silos: list[SiloRows], config: CoTraining) -> State:
        """Global training starts from nothing: from local models that have not trained."""
        scaling = fitted_scaling(silos, config.scaling)
        return State(0, first_model(config, scaling, self.grades), scaling)

    def _noise_aware(self, config: CoTraining, *, more: bool) -> Rows:
        """Judged pairs as others see them: alone, drawn to BM25, beside exact ones, with labelled pairs."""
        silos = self.silos(self.tables.noised)
        yield "noise-aware Global", "all", self._trained(silos, config)
        if self.tables.variant != "private":
            return
        drawn = self._model(silos, replace(config, anchor=Anchor()))
        yield "anchored noise-aware Global", "all", _network(drawn.parameters, drawn.scaling)
        taught, teacher = Labelling("soft", beta=3.0), State(0, drawn.parameters, drawn.scaling)
        yield "anchored labeller", "all", self._trained(silos, replace(config, labelling=taught), teacher)
        if more:
            both = [
                replace(silo, labelled=_beside(silo.labelled, exact.labelled))
                for silo, exact in zip(silos, self.silos(self.tables.inside), strict=True)
            ]
            yield "half noise-aware Global", "all", self._trained(both, config)
        for name in ("calibrated soft", "all-zero") if more else ("calibrated soft",):
            labelled = replace(config, labelling=LABELLINGS[name])
            yield f"noise-aware, {name}", "all", self._trained(silos, labelled, self._start(silos, config))

    def _lists(self, silos: list[SiloRows]) -> Rows:
        """LambdaRank and LambdaMART, without and with labelled cross pairs in the lists."""
        config = replace(LISTS, seed=self.seed)
        aware = self.silos(self.tables.noised) if self.tables.variant != "exact" else silos
        prefix = "noise-aware " if self.tables.variant != "exact" else ""
        yield "LambdaRank Global", "all", self._trained(silos, config)
        if prefix:
            yield "LambdaRank noise-aware Global", "all", self._trained(aware, config)
        classes = replace(PLAIN, seed=self.seed)
        start = self._start(aware, classes)
        rows = [scaled(silo, start.scaling) for silo in aware]
        labelling = Labelling("confident", beta=1.0, calibrated=True)
        lessons = [
            lesson_of(silo, guess(dict(start.parameters), silo, labelling, self.grades), labelling.beta)
            for silo in rows
        ]
        guessed = [replace(silo, labelled=lesson) for lesson, silo in zip(lessons, rows, strict=True)]
        made = self._trained(guessed, replace(config, scaling="none"))
        yield f"LambdaRank {prefix}calibrated confident", "all", lambda table: made(start.scaling(table))
        judged = [Lesson.of_letor(silo.labelled) for silo in rows]
        for name, parts in (("Global", judged), ("calibrated confident", lessons)):
            trees = LambdaMART(trees=60, depth=3).fit(Lesson.joined(parts))
            yield f"LambdaMART {prefix}{name}", "all", _trees(trees, start.scaling)


def _beside(one: Letor, other: Letor) -> Letor:
    """Both tables' rows; the second's queries under names of their own."""
    renamed = replace(other, queries=tuple(f"{query} exact" for query in other.queries))
    return Letor.concat([one, renamed])


def _network(parameters: Mapping[str, NDArray[Any]], scaling: Scaling) -> Scorer:
    return lambda table: scores_of(dict(parameters), scaling(table))


def _trees(trees: LambdaMART, scaling: Scaling) -> Scorer:
    return lambda table: trees.score(scaling(table))


def measured(world: World, variant: Variant, rows: Rows) -> dict[str, Any]:
    """Validation nDCG@10, test means, and test nDCG@10 of every query, by `row|part`."""
    tables = world.tables[variant]
    found: dict[str, Any] = {}
    bm25: Rows = iter([("BM25", "all", lambda table: np.zeros(0))])
    for source in (bm25, rows):
        for row, part, scorer in source:
            scores = {
                at: tables.bm25(at) if row == "BM25" else scorer(table) for at, table in tables.ranked.items()
            }
            chosen, tested = (world.evaluated(tables.ranked[at], scores[at], at) for at in (1, 2))
            found[f"{row}|{part}"] = {
                "validation": float(chosen["nDCG@10"]),
                "test": {measure: float(tested[measure]) for measure in MEASURES},
                "queries": {query: round(value, 5) for query, value in tested.per_query("nDCG@10").items()},
            }
    return found


def table_unit(*, case: Mapping[str, Any], more: bool = True) -> dict[str, Any]:
    """The rows of one seed, on every variant of the counts; with `more`, every option too."""
    began = time.process_time()
    world = World(Case(**case))
    found: dict[str, Any] = {"cross share": cross_share(world)}
    found["exact"] = measured(world, "exact", Bench(world.tables["exact"]).rows(EXACT))
    rows = Bench(world.tables["private"]).rows(FULL if more else MAIN, more=more)
    found["private"] = measured(world, "private", rows)
    clipped = Bench(world.tables["clipped"]).rows(FEW, locals_too=False)
    found["clipped"] = measured(world, "clipped", clipped)
    return {**found, "seconds": time.process_time() - began}


def point_unit(*, case: Mapping[str, Any], labels: list[int | None]) -> dict[str, Any]:
    """The few rows of a point of a figure or of the map, for every number of labelled queries a silo."""
    began = time.process_time()
    world = World(Case(**case))
    found: dict[str, Any] = {"cross share": cross_share(world)}
    for most in labels:
        bench = Bench(world.tables["private"], labels=most)
        key = "all" if most is None else str(most)
        found[key] = measured(world, "private", bench.points())
    return {
        **found,
        "seconds": time.process_time() - began,
        "pairs": world.case.silos * (world.case.silos - 1),
    }


STRIDE = 3
"""Epochs between two points of a curve, which is what a federated round has."""


def curve_unit(*, case: Mapping[str, Any]) -> dict[str, Any]:
    """Figure 6: nDCG@10 of every silo's test queries against the epochs trained, for the four ways."""
    world = World(Case(**case))
    tables = world.tables["private"]
    silos = tables.silos(tables.inside)
    config = replace(PLAIN, seed=world.case.seed)
    scaling = fitted_scaling(silos, config.scaling)
    models = local_models(silos, config, scaling, grades=world.grades)
    blank = State(0, first_model(config, scaling, world.grades), scaling)
    start = State(0, averaged(models), scaling)
    found: dict[str, Any] = {
        "epochs": [STRIDE * (at + 1) for at in range(config.rounds)],
        "Local": [],
        "Local+": [],
    }
    for at, name in enumerate(tables.inside):
        alone = list(_passes(blank.parameters, scaling(silos[at].labelled), config, at))
        rows = scaled(silos[at], scaling)
        guesses = guess(models[at], rows, Labelling("soft"), world.grades)
        again = list(_passes(models[at], lesson_of(rows, guesses, 0.1), config, at))
        for way, path in (("Local", alone), ("Local+", again)):
            found[way].append([_by_silo(world, model, scaling)[name] for model in path])
    labelled = replace(config, labelling=LABELLINGS["CS-F-LTR"])
    for way, using, first in (("Global", config, blank), ("CS-F-LTR", labelled, start)):
        states: list[State] = []
        cotrain(silos, using, grades=world.grades, start=first, remember=states.append)
        values = [_by_silo(world, state.parameters, scaling) for state in states]
        found[way] = [[value[name] for value in values] for name in tables.inside]
    return {**found, "silos": list(tables.inside)}


def _passes(
    start: Mapping[str, NDArray[Any]], data: Letor, config: CoTraining, silo: int
) -> Iterator[Parameters]:
    """The models of one silo alone, every few epochs."""
    model, local = dict(start), config.local(STRIDE)
    for at in range(config.rounds):
        model = train_epochs(model, data, local, Streams(config.seed)("curve", silo, at)).parameters
        yield model


def _by_silo(world: World, model: Mapping[str, NDArray[Any]], scaling: Scaling) -> dict[str, float]:
    """Test nDCG@10 of every silo's queries."""
    table = world.tables["private"].ranked[2]
    values = world.evaluated(table, scores_of(dict(model), scaling(table)), 2).per_query("nDCG@10")
    homes = dict(zip(world.corpus.queries.ids, world.corpus.queries.silos.tolist(), strict=True))
    found = {}
    for at, name in enumerate(world.names):
        own = [value for query, value in values.items() if homes[query] == at]
        found[name] = float(np.mean(own)) if own else float("nan")
    return found


def cross_share(world: World) -> float:
    """The share of relevant pairs whose document lies in another silo than the query."""
    relevant = world.truth > 0
    apart = world.corpus.queries.silos[:, None] != world.corpus.documents.silos
    return float((relevant & apart).sum() / max(relevant.sum(), 1))
