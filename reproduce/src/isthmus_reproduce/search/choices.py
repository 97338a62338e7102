"""Columns of the learner and rules of its probabilities, chosen with the reported collection left out.

Alternatives are few and named below, the simplest first. For every collection one is chosen by the results on
the other collections, by words and with the encoder, and the collection is reported with that choice:

    learners    the highest mean difference to the baseline, in steps of .001
    rules       the fewest requirements missed: the calibration error within the 95 % quantile of a perfect
                model, and first hits where nothing is right below the base rate; then the lowest of the
                highest ratios to these limits, in steps of .05; then the most log-loss saved

Of equals the earlier one is chosen. `time` and `adi` are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from os import PathLike
from typing import Any

import numpy as np

from isthmus.corpora import load
from isthmus.errors import ConfigError
from isthmus.evaluation import log_loss
from isthmus.learning import (
    FEATURES,
    PROFILE,
    CalibrationRules,
    HitCalibration,
    LearningOptions,
    SearchModel,
    fit_calibration,
)
from isthmus.report import Page, Section, Table
from isthmus_reproduce.notebook import Cell, Notebook, Reproduction, Unit
from isthmus_reproduce.search.experiment import ALL, BEFORE, LEARNED, Config, Outcome, present
from isthmus_reproduce.search.learned import FOREIGN, OTHER, Ranking, Study, first_hits
from isthmus_reproduce.search.world import MEASURE, SHOWN, World, encoder_of, federation

COVERAGE = ("rare", "title", "lead")
SETS: Mapping[str, tuple[str, ...]] = {
    "without the sixteen features": FEATURES,
    "without coverage": COVERAGE,
    "without length": ("ln length",),
    "all columns": (),
}
LEARNERS = {
    f"{name}, penalty {penalty:g}": (columns, penalty)
    for (name, columns), penalty in product(SETS.items(), (300.0, 100.0))
}
"""Columns that a learner does not see, and its penalty."""
FEW, MANY = (0.15, 0.4, 0.65, 0.85, 0.95), (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
FORMS = {"level": (FEW, False), "bounded": (FEW, True), f"bounded, {len(MANY)} knots": (MANY, True)}
RULES = {
    f"caution {caution}, ends at {end}, {form}": CalibrationRules(caution, end, knots, bounded=bounded)
    for (caution, end), (form, (knots, bounded)) in product(
        ((inf, inf), *product((1.0, 0.95, 0.9), (inf, 1.5))), FORMS.items()
    )
}
CURVES = {
    f"steep {steep}, firm {firm:g}": CalibrationRules(steep=steep, firm=firm)
    for steep, firm in product((0.25, 0.5, 1.0), (1e6, 1e5, 1e4))
}
STEP, LEAST_GAIN = 0.05, 0.001
_NONE = (np.zeros(len(PROFILE)), np.ones(len(PROFILE)), np.zeros(len(PROFILE)))
_FLAT = HitCalibration(0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 1.0, *_NONE)
Results = Mapping[tuple[str, str], Mapping[str, Any]]
"""Results of every alternative, by collection and encoder."""


@dataclass(frozen=True)
class Part:
    """A unit of work: all alternatives of one kind on one collection."""

    kind: str
    data: str
    encoder: str


def reproduce(config: Config, out: str | PathLike[str], *, workers: int | None = None) -> Reproduction:
    """Compute what is missing in the folder, by words and with an encoder if one is named, and write the
    report; collections are separated by commas."""
    names = tuple(present()) if config.data == ALL else tuple(config.data.split(","))
    if len(names) < 2:
        raise ConfigError("no other collection to choose by", key="data", value=config.data, expected="two")
    notebook = Notebook(out, config)
    encoders = dict.fromkeys(("", config.encoder))
    parts = [Part(*each) for each in product(KINDS, names, encoders)]
    units = [Unit(part, {**vars(part), "seed": config.seed, "scale": config.scale}) for part in parts]
    done = notebook.compute(work, units, label="choosing", workers=workers)
    sections, cells = [], []
    for kind, (_, choose) in KINDS.items():
        results = {(part.data, part.encoder): each for part, each in done.items() if part.kind == kind}
        chosen = {name: choose(others(results, name)) for name in names}
        cells += list(_cells(kind, results, chosen))
        sections.append(Section(kind.capitalize(), (_table(results, chosen),)))
    return notebook.publish(cells, Page("Search: choices with collections left out", tuple(sections)))


def work(kind: str, data: str, encoder: str, seed: int, scale: str) -> dict[str, Any]:
    """Measure all alternatives of a kind on one collection."""
    world = World.of(data, seed=seed, smoke=scale == "smoke")
    used = encoder_of(world, encoder) if encoder else None
    with federation(world, encoder=used) as silos:
        silos.share("private")
        return dict(KINDS[kind][0](Study(world, silos, used.fingerprint if used else ""), data))


def learners(study: Study, data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every learner's mean difference to the baseline, share of adoptions, and worse queries."""
    before = study.values(study.rankings(study.baseline)).tolist()
    for name, (without, penalty) in LEARNERS.items():
        hidden, kinds, after = study.hiding(without), [], []
        options = LearningOptions(penalty=penalty, calibrate=lambda *arguments: (_FLAT, {}))
        for turn in study.world.turns:
            rankings: dict[int, Ranking | None] = {}
            for fold in np.unique(turn).tolist():
                model, record = hidden.learn(np.flatnonzero(turn != fold), options=options)
                kinds.append(record.kind)
                tested = np.flatnonzero(turn == fold).tolist()
                rankings |= {at: hidden.ranking(at, model) for at in tested}
            after.append(study.values(rankings).tolist())
        about = {"groups": study.world.groups.tolist(), "before": before, "after": after, "kinds": kinds}
        outcome = Outcome(data, {"values": {}}, about)
        gain, (worse, much) = outcome.over(LEARNED, BEFORE), outcome.worse(LEARNED, BEFORE)
        adopted, times = outcome.adopted
        figures = {"difference": gain.value, "low": gain.low, "high": gain.high, "adopted": adopted / times}
        yield name, {**figures, "worse": worse, "much": much}


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A model and the arguments of its calibrations, the baseline's last."""

    model: SearchModel
    fits: Sequence[tuple[Any, Any, int]]

    @classmethod
    def of(cls, study: Study, queries: Any) -> Calibrated:
        """Learn the model from some queries, and record the lists that its calibration was fitted on."""
        fits: list[tuple[Any, Any, int]] = []

        def remember(lists: Any, totals: Any, least: int) -> Any:
            fits.append((lists, totals, least))
            return _FLAT, {}

        return cls(study.learn(queries, options=LearningOptions(calibrate=remember))[0], fits)

    def by(self, rules: CalibrationRules) -> SearchModel:
        """Return the model with probabilities by these rules."""
        lines = [fit_calibration(*arguments, rules)[0] for arguments in self.fits]
        assert self.model.baseline is not None
        baseline = replace(self.model.baseline, calibration=lines[-1])
        return replace(self.model, calibration=lines[0], baseline=baseline)


def calibrations(
    alternatives: Mapping[str, CalibrationRules], study: Study, data: str
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield for every alternative the results on shown hits, by models that have not seen the query."""
    turns = [
        (number, np.flatnonzero(turn == fold), Calibrated.of(study, np.flatnonzero(turn != fold)))
        for number, turn in enumerate(study.world.turns)
        for fold in np.unique(turn).tolist()
    ]
    whole = Calibrated.of(study, np.arange(len(study.right)))
    foreign = load(OTHER.get(data, "cran")).queries.texts[:FOREIGN]
    parts = study.rows(foreign, [None] * len(foreign))
    strange = [Ranking.of([part.of(at) for part in parts], whole.model) for at in range(len(foreign))]
    for name, rules in alternatives.items():
        hits: list[list[Any]] = []
        missing: list[float] = []
        for number, tested, each in turns:
            model = each.by(rules)
            for at in tested.tolist():
                ranking, rest = (study.ranking(at, model, without_relevant=gone) for gone in (False, True))
                names = [] if ranking is None else ranking.names
                shown = zip(first_hits(ranking, model, SHOWN), names, strict=False)
                hits += [[at, chance, name in study.right[at], number] for chance, name in shown]
                missing += first_hits(rest, model)
        model = whole.by(rules)
        outside = [chance for each in strange for chance in first_hits(each, model)]
        outcome = Outcome(data, {}, {"hits": hits, "missing": missing, "foreign": outside})
        yield name, figures_of(outcome)


def figures_of(outcome: Outcome) -> dict[str, float]:
    """Return the calibration error and its limit, the probabilities of first hits where nothing is right, and
    the share of the base rate's log-loss that the probabilities save."""
    error, limit = outcome.honesty
    base, removed, foreign = outcome.probabilities.values()
    probability, right, _ = outcome.hits.T
    saved = 1 - log_loss(probability, right) / log_loss(np.full(len(right), base), right)
    figures = {"ECE": error, "95 %": limit, "base rate": base, "removed": removed, "foreign": foreign}
    return {**figures, "saved": float(saved)}


def others(results: Results, name: str) -> dict[str, list[Any]]:
    """Return, by alternative, the results of all collections but one."""
    rows = [each for (data, _), each in results.items() if data != name]
    return {alternative: [each[alternative] for each in rows] for alternative in rows[0]}


def best_learner(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the first alternative with the highest mean difference, in steps."""

    def gain(name: str) -> int:
        return round(float(np.mean([each["difference"] for each in figures[name]])) / LEAST_GAIN)

    return max(figures, key=gain)


def best_rules(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the first alternative with the fewest requirements missed, then the lowest of the highest
    ratios, in steps, then the most log-loss saved."""

    def order(name: str) -> tuple[int, int, float]:
        ratios = np.array([_ratios(each) for each in figures[name]])
        saved = float(np.mean([each["saved"] for each in figures[name]]))
        return int((ratios > 1).sum()), int(np.ceil(ratios.max() / STEP)), -saved

    return min(figures, key=order)


def _ratios(row: Mapping[str, float]) -> tuple[float, float, float]:
    """Return the ratios of the required figures to their limits."""
    return row["ECE"] / row["95 %"], row["removed"] / row["base rate"], row["foreign"] / row["base rate"]


_Work = Callable[[Study, str], Iterator[tuple[str, dict[str, Any]]]]
_Choose = Callable[[Mapping[str, Sequence[Mapping[str, float]]]], str]
KINDS: Mapping[str, tuple[_Work, _Choose]] = {
    "learners": (learners, best_learner),
    "rules": (partial(calibrations, RULES), best_rules),
    "curves": (partial(calibrations, CURVES), best_rules),
}


def _cells(kind: str, results: Results, chosen: Mapping[str, str]) -> Iterator[Cell]:
    about: dict[str, Any] = {"table": f"search: {kind}", "mode": "sound"}
    for (data, encoder), rows in results.items():
        for row, figures in rows.items():
            variant = f"{encoder or 'words'}{', chosen by the others' if row == chosen[data] else ''}"
            for measure, value in figures.items():
                yield Cell(row=row, data=data, variant=variant, measure=measure, value=value, **about)


def _table(results: Results, chosen: Mapping[str, str]) -> Table:
    """Build a table of every collection with the choice made on the others."""
    rows = [
        (data, encoder or "words", chosen[data], *each[chosen[data]].values())
        for (data, encoder), each in results.items()
    ]
    names = next(iter(next(iter(results.values())).values()))
    return Table(("left out", "", "chosen by the others", *names), tuple(rows), MEASURE, (), 4)
