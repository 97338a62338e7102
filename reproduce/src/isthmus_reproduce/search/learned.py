"""Gains of learning across silos, and the calibration of its probabilities: nested, in process.

The rows of all queries come from the service's own candidates and columns. For every outer fold the learner
sees the other queries alone, cross-validates, chooses and calibrates among them as the product does, and the
resulting model ranks the fold's queries. The baseline is the score that the same federation would use without
learning, with the same statistics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.asking import Silos
from isthmus.corpora import load
from isthmus.errors import DataError
from isthmus.learning import (
    COLUMNS,
    LIST,
    OF_QUERY,
    BaselineScale,
    JudgedRows,
    LearningOptions,
    Record,
    SearchModel,
    Weights,
    learn,
    profile_of,
)
from isthmus.randomness import Streams
from isthmus.service import NodeSettings, candidate_columns, common_scale, eligible, measure
from isthmus.tables import Run
from isthmus.text import ENGLISH
from isthmus_reproduce.search.world import BUILT_IN, SHOWN, Federation, World, encoder_of, federation

PENALTY = 100.0
LEFT_OUT = {"npl": 300.0}
"""The penalty, of 100 and 300, with the best mean difference over cran, med, cisi, npl and pydocs, with and
without an encoder, with the reported collection left out; `PENALTY` for collections not named here."""
FOLDS, LEAST = (8, 4, 2), 10
"""Folds of queries within a learning run, as silos deal them: the most that have enough queries each."""
KNOWN, FOREIGN = 300, 60
OTHER = {"cran": "cisi", "cisi": "npl", "npl": "med", BUILT_IN: "cran"}
"""A collection whose queries have no answer in this one; cran for those not named."""
HIGH, LOW = 0.8, 0.2
_LN_WORDS = COLUMNS.index("ln words")


@dataclass(frozen=True, eq=False)
class Rows:
    """The candidates of many queries in one silo: columns, names and the query of each, in their order."""

    table: FloatArray
    names: NDArray[Any]
    query: IntArray

    def of(self, query: int) -> tuple[FloatArray, NDArray[Any]]:
        """Return columns and names of one query's candidates."""
        start, end = np.searchsorted(self.query, [query, query + 1])
        return self.table[start:end], self.names[start:end]


@dataclass(frozen=True, eq=False)
class Ranking:
    """One query's candidates of all silos, best first, and its profile."""

    names: list[str]
    margins: FloatArray
    table: FloatArray
    profile: FloatArray

    @classmethod
    def of(
        cls, parts: Sequence[tuple[FloatArray, NDArray[Any]]], by: Weights | SearchModel
    ) -> Ranking | None:
        """Rank by a score, or by the part of a model that is for such a query; None without a candidate."""
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        score = by if isinstance(by, Weights) else by.of_query(parts[0][0][0, _LN_WORDS]).score
        scored = [score(table) for table, _ in parts]
        margins, names = np.concatenate(scored), np.concatenate([names for _, names in parts])
        table = np.concatenate([table for table, _ in parts])
        keys = list(zip(margins.tolist(), names.tolist(), strict=True))
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
        profile = profile_of([-np.sort(-each)[:LIST] for each in scored], table[0, -len(OF_QUERY) :])
        return cls(names[order].tolist(), margins[order], table[order], profile)

    def probabilities(self, model: SearchModel, count: int) -> FloatArray:
        """Return the probabilities of the first `count` hits."""
        calibration = model.of_query(self.table[0, _LN_WORDS]).calibration
        assert calibration is not None
        return calibration(self.margins[:count], self.profile)


@dataclass(frozen=True, eq=False)
class Study:
    """One collection in silos, for searching and learning."""

    world: World
    silos: Federation
    encoder: str
    penalty: float = PENALTY

    def rows(self, texts: Sequence[str], own: Sequence[str | None]) -> list[Rows]:
        """Return the rows of these queries in every silo."""
        return [
            Rows(*map(np.concatenate, zip(*_rows(silo, texts, own, self.encoder), strict=True)))
            for silo in self.silos.silos
        ]

    def hiding(self, columns: Sequence[str]) -> Study:
        """Return the study with these columns hidden in its rows."""
        other, hidden = replace(self), np.isin(COLUMNS, columns)
        parts = [replace(part, table=np.where(hidden, np.nan, part.table)) for part in self.parts]
        vars(other).update(parts=parts, right=self.right, relevant=self.relevant, scale=self.scale)
        return other

    @cached_property
    def parts(self) -> list[Rows]:
        """The rows of all queries in every silo."""
        return self.rows(self.world.corpus.queries.texts, self.world.own)

    @cached_property
    def right(self) -> list[frozenset[str]]:
        """The relevant documents of every query."""
        texts, own = self.world.corpus.queries.texts, self.world.own
        return [
            frozenset(self.world.relevant.get(text, {})) - {itself}
            for text, itself in zip(texts, own, strict=True)
        ]

    @cached_property
    def relevant(self) -> list[FloatArray]:
        """The relevance of every row in every silo."""
        return [
            np.array([name in self.right[at] for name, at in zip(part.names, part.query, strict=True)], float)
            for part in self.parts
        ]

    @cached_property
    def scale(self) -> BaselineScale:
        """The scale of the baseline, from the silos' score sums."""
        if not self.encoder:
            return BaselineScale()
        scale = common_scale(
            [measure(silo.name, silo.index.snapshot, silo.store) for silo in self.silos.silos]
        )
        if scale is None:
            raise DataError("the collection has too few documents for a scale")
        bm25, dense = ((each.mean, each.deviation) for each in (scale.bm25, scale.dense))
        return BaselineScale(bm25, dense, self.encoder)

    @property
    def baseline(self) -> Weights:
        """The score that learning would replace."""
        centre, scale = np.zeros(len(COLUMNS)), np.ones(len(COLUMNS))
        for at, standard in enumerate((self.scale.bm25, self.scale.dense)):
            if standard is not None:
                centre[at], scale[at] = standard
        return Weights(centre, scale, self.scale.weights)

    def ranking(
        self, at: int, by: Weights | SearchModel, *, without_relevant: bool = False
    ) -> Ranking | None:
        """Rank one query's candidates by a score or a model."""
        parts = [part.of(at) for part in self.parts]
        if without_relevant:
            masks = [np.array([name not in self.right[at] for name in names], bool) for _, names in parts]
            parts = [(table[mask], names[mask]) for (table, names), mask in zip(parts, masks, strict=True)]
        return Ranking.of(parts, by)

    def rankings(self, score: Weights) -> dict[int, Ranking | None]:
        """Rank all queries' candidates by a score."""
        return {at: self.ranking(at, score) for at in range(len(self.right))}

    def learn(
        self,
        chosen: IntArray,
        *,
        judgements: Mapping[str, FloatArray] | None = None,
        options: LearningOptions | None = None,
    ) -> tuple[SearchModel, Record]:
        """Learn from some of the queries; `judgements` of every silo's rows replace its own."""
        place = np.full(len(self.right), -1)
        place[chosen] = np.arange(len(chosen))
        groups = np.unique(self.world.groups[chosen], return_inverse=True)[1]
        folds = next((each for each in FOLDS if len(chosen) >= LEAST * each), FOLDS[-1])
        members = sorted(judgements or (silo.name for silo in self.silos.silos))
        answers = {}
        for silo, part, own in zip(self.silos.silos, self.parts, self.relevant, strict=True):
            if judgements is not None and silo.name not in judgements:
                continue
            mine = place[part.query] >= 0
            right = (own if judgements is None else judgements[silo.name])[mine]
            query = place[part.query[mine]]
            targets = np.bincount(query, right, len(chosen)).astype(np.float64)
            if judgements is None:
                here = set(self.world.corpus.silo(silo.name).documents.ids)
                targets = np.array([len(here & self.right[at]) for at in chosen.tolist()], dtype=np.float64)
            rows = JudgedRows(
                part.table[mine],
                right,
                query,
                fold=groups % folds,
                targets=targets,
                place=members.index(silo.name),
            )
            answers[silo.name] = rows.answer
        texts = [self.world.corpus.queries.texts[at] for at in chosen.tolist()]
        options = options or LearningOptions(penalty=self.penalty)
        return learn(
            Silos.in_memory(answers), texts, folds=folds, baseline=self.scale, options=options, groups=groups
        )

    def values(self, rankings: Mapping[int, Ranking | None]) -> FloatArray:
        """Return the measure of every query."""
        ids = self.world.corpus.queries.ids
        lists = {
            ids[at]: {name: float(-place) for place, name in enumerate(each.names[:SHOWN])}
            for at, each in rankings.items()
            if each is not None
        }
        return self.world.values(Run.from_dict(lists))


def _rows(
    silo: Any, texts: Sequence[str], own: Sequence[str | None], encoder: str
) -> Iterator[tuple[FloatArray, NDArray[Any], IntArray]]:
    snapshot = silo.index.snapshot
    yield np.empty((0, len(COLUMNS))), np.empty(0, dtype=object), np.empty(0, dtype=np.int64)
    for at, (text, itself) in enumerate(zip(texts, own, strict=True)):
        candidates = snapshot.find(text, NodeSettings.depth)
        names = np.array(candidates.documents, dtype=object)
        chosen = np.flatnonzero(eligible(snapshot, candidates, encoder) & (names != itself))
        if len(chosen):
            table = candidate_columns(snapshot, candidates, encoder)[chosen]
            yield table, names[chosen], np.full(len(chosen), at)


def learned(world: World, data: str, encoder: str) -> dict[str, Any]:
    """Return, by name: measures of every query before and after, in every round; (query, probability, right,
    round) of shown hits; adopted models; the first hit's probability where nothing is right; known items."""
    used = encoder_of(world, encoder) if encoder else None
    with federation(world, encoder=used) as silos:
        silos.share("private")
        study = Study(world, silos, used.fingerprint if used else "", LEFT_OUT.get(data, PENALTY))
        before = study.rankings(study.baseline)
        result: dict[str, Any] = {
            "before": study.values(before).tolist(),
            "after": [],
            "hits": [],
            "missing": [],
        }
        records = []
        for number, turn in enumerate(world.turns):
            after: dict[int, Ranking | None] = {}
            for fold in np.unique(turn).tolist():
                model, record = study.learn(np.flatnonzero(turn != fold))
                records.append(record)
                for at in np.flatnonzero(turn == fold).tolist():
                    ranking = after[at] = study.ranking(at, model)
                    names = [] if ranking is None else ranking.names
                    hits = zip(first_hits(ranking, model, SHOWN), names, strict=False)
                    result["hits"] += [[at, chance, name in study.right[at], number] for chance, name in hits]
                    result["missing"] += first_hits(study.ranking(at, model, without_relevant=True), model)
            values = study.values(after)
            result["after"].append(values.tolist())
            result.setdefault("fallen", []).extend(
                _fallen(study, before, after, np.array(result["before"]), values)
            )
        model, record = study.learn(np.arange(len(world.groups)))
        result["kinds"] = [each.kind for each in records]
        result["record"] = json.loads(record.to_json())
        foreign = load(OTHER.get(data, "cran")).queries.texts[:FOREIGN]
        parts = study.rows(foreign, [None] * len(foreign))
        firsts = (Ranking.of([part.of(at) for part in parts], model) for at in range(len(foreign)))
        result["foreign"] = [chance for each in firsts for chance in first_hits(each, model)]
        result["known"] = _known_items(study, model)
    return result


def first_hits(ranking: Ranking | None, model: SearchModel, count: int = 1) -> list[float]:
    """Return the probabilities of the first hits."""
    return [] if ranking is None else ranking.probabilities(model, count).tolist()


def _fallen(
    study: Study,
    before: Mapping[int, Ranking | None],
    after: Mapping[int, Ranking | None],
    was: FloatArray,
    now: FloatArray,
) -> Iterator[list[Any]]:
    """Yield (query, before, after, cause) of queries that fell from above `HIGH` to below `LOW`."""
    for at in np.flatnonzero((was > HIGH) & (now < LOW)).tolist():
        old, new = before[at], after[at]
        assert old is not None
        assert new is not None
        best = next(name for name in old.names if name in study.right[at])
        place = new.names.index(best)
        moved = new.table[0] - new.table[place]
        raised = [COLUMNS[column] for column in np.argsort(-np.abs(moved))[:3].tolist()]
        cause = f"its relevant document is at {place + 1}; the first differs most in {', '.join(raised)}"
        yield [study.world.corpus.queries.texts[at], float(was[at]), float(now[at]), cause]


def _known_items(study: Study, model: SearchModel) -> list[list[int]]:
    """Return (queries, first before, first after) for documents searched by two of their rarest words: of
    all, and of those where no other document has both words."""
    documents = study.world.corpus.documents
    tokens = ENGLISH(documents.texts)
    having = tokens.counts().tocsc()
    column = {
        word: having.indices[slice(*having.indptr[at : at + 2])] for at, word in enumerate(tokens.terms.words)
    }
    chosen: dict[str, tuple[str, bool]] = {}
    for at in Streams(0)("search", "known items").permutation(len(documents))[:KNOWN].tolist():
        words = sorted(set(re.findall(r"\w+", documents.texts[at].lower())))
        stems = {word: ENGLISH.query(word).words(0) for word in words}
        rarest = sorted(
            {each[0]: word for word, each in stems.items() if len(each) == 1 and each[0] in column}.items(),
            key=lambda item: (len(column[item[0]]), item),
        )[:2]
        if len(rarest) == 2:
            both = np.intersect1d(*(column[stem] for stem, _ in rarest))
            chosen[" ".join(word for _, word in rarest)] = documents.ids[at], len(both) == 1
    parts = study.rows(list(chosen), [None] * len(chosen))
    targets, single = zip(*chosen.values(), strict=True)
    first = []
    for by in (study.baseline, model):
        rankings = [Ranking.of([part.of(at) for part in parts], by) for at in range(len(chosen))]
        first.append(
            [
                each is not None and each.names[0] == target
                for each, target in zip(rankings, targets, strict=True)
            ]
        )
    return [
        [int(np.sum(rows)), *(int(np.sum(np.array(each)[rows])) for each in first)]
        for rows in (np.ones(len(single), bool), np.array(single))
    ]


MANY, INVERTED = 8, 2


def inverted(world: World) -> dict[str, list[float]]:
    """Measure eight silos of which two have inverted judgements: their relevant candidates are marked as not
    relevant, all others as relevant. Returns the measure of every query without learning, learned from the
    six others, from all by plain sums, and from all in the mode that weighs silos."""
    with federation(world) as silos:
        silos.share("private")
        study = Study(world, silos, "")
        names = [silo.name for silo in silos.silos]
        honest = dict(zip(names, study.relevant, strict=True))
        mixed = {name: 1 - honest[name] if at < INVERTED else honest[name] for at, name in enumerate(names)}
        weighed = LearningOptions(penalty=study.penalty, mode="fedrisk")
        ways: dict[str, dict[str, Any]] = {
            "the six honest silos": {"judgements": {name: honest[name] for name in names[INVERTED:]}},
            "all eight, plain sums": {"judgements": mixed},
            "all eight, weighed by FedRisk": {"judgements": mixed, "options": weighed},
        }
        turn = world.turns[0]
        values = {"baseline": study.values(study.rankings(study.baseline)).tolist()}
        for way, how in ways.items():
            rankings: dict[int, Ranking | None] = {}
            for fold in np.unique(turn).tolist():
                model, _ = study.learn(np.flatnonzero(turn != fold), **how)
                rankings |= {at: study.ranking(at, model) for at in np.flatnonzero(turn == fold).tolist()}
            values[way] = study.values(rankings).tolist()
    return values
