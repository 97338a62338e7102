"""CS-F-LTR as printed by Shi et al., whole, on any collection with a ranked run; silos that answer questions.

    labels       by rank in the run: 1-10 are grade 2, 11-100 grade 1, all others 0 (fault C16: circular)
    counts       Count Sketches of 30 rows and 120 columns; a question is an obfuscated vector (eq. 4) whose
                 ten real rows share one with every decoy, its answer has one Laplace draw (eq. 5, fault C2),
                 and the median of the real rows is taken without their signs (eqs. 3 and 6, fault C1)
    features     N/df without a logarithm and BM25 of relative frequencies (eq. 1, faults C3 and C4)
    split        by pairs: a query may have pairs on both sides (fault C10)
    training     softmax over three grades, Adam at 0.01, batches of 200; 1000 steps alone, 2000 together, β
                 rising to 0.3 from step 100 to 300 (eq. 9)
    measures     as printed (faults C5 and C6), beside the usual ones

`AnswerViews` has a silo's views of silos that answer by any mechanism; sound experiments use it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus import private
from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.config import require
from isthmus.evaluation import evaluate
from isthmus.features import FIELDS, PROFILES, ExactCounts, Pairs, compute
from isthmus.federation.semisupervised.silos import CrossSilos, Releasing, Views, best
from isthmus.randomness import Streams
from isthmus.tables import Corpus, Letor, Qrels, Run
from isthmus.text import Tokens

MEASURES = ("err_printed", "ndcg_printed@10", "nDCG", "map_printed", "ERR", "nDCG@10", "MAP")
"""ERR, nDCG@10, nDCG and MAP as printed in the paper; then ERR, nDCG@10 and MAP as usually defined."""
FAULTS: Mapping[str, str] = {
    "C1": "eqs. (3) and (6) forget the sign of a row, so that a count has a random sign",
    "C2": "one Laplace draw for all cells cancels between rows: ε is infinite",
    "C3-C4": "IDF has no logarithm, BM25 reads relative frequencies",
    "C5-C6": "MAP and ERR are printed without what makes them so; nDCG@10's ideal is not cut",
    "C10": "pairs of one query are on both sides of the split",
    "C16": "grades are ranks of another ranker",
}
"""Known faults of the protocol, by number."""
UNIQUE = 0.8
"""Assumed share of distinct words in other silos' documents, which is not released; as the authors' code."""


@dataclass(frozen=True)
class Printed(private.SharedNoise):
    """Eqs. (5) and (6) as printed: one draw for all cells, and a median that ignores the signs of rows."""

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """Return median_{a ∈ used} v_a."""
        return np.asarray(np.median(np.take_along_axis(values, used[:, :, None], axis=1), axis=1))


MECHANISMS: Mapping[str, type[private.Mechanism]] = {
    "insecure_shared_noise": Printed,
    "per_cell": private.PerCell,
    "scalar": private.Scalar,
}
"""Mechanisms that answer questions, by name; `one_shot` publishes instead."""


@dataclass(frozen=True)
class Protocol:
    """Parameters of the paper, or of its authors' code if the paper has none; ε is that of one answer."""

    mechanism: str = "insecure_shared_noise"
    epsilon: float = 0.5
    signed: bool = False
    """Take the median with the signs that the paper omits; all mechanisms but shared noise always do."""
    rows: int = 30
    real_rows: int = 10
    shared_rows: int = 1
    width: int = 120
    depth: int = 100
    negatives: int = 20
    test: float = 7 / 24
    alone: int = 1000
    together: int = 2000
    batch: int = 200
    learning_rate: float = 0.01
    weight_decay: float = 1e-4
    beta: float = 0.3
    ramp: tuple[int, int] = (100, 300)

    def __post_init__(self) -> None:
        require(
            self.mechanism in MECHANISMS, f"mechanism = {self.mechanism!r}: one of {', '.join(MECHANISMS)}"
        )
        require(self.epsilon > 0, f"epsilon = {self.epsilon} (it must be positive)")

    @property
    def _sound_median(self) -> bool:
        return self.signed and self.mechanism == "insecure_shared_noise"

    @cached_property
    def kind(self) -> private.Mechanism:
        """The mechanism; an infinite ε becomes one with next to no noise."""
        kind = private.SharedNoise if self._sound_median else MECHANISMS[self.mechanism]
        rows = self.real_rows if self.mechanism == "scalar" else self.rows
        return kind(min(self.epsilon, 1e9), rows)


@dataclass(frozen=True, eq=False)
class AnsweredCounts:
    """Counts of a field in one silo's documents, with frequencies and occurrences summed over all silos."""

    lengths: IntArray
    distinct: FloatArray
    documents: float
    length: float
    cells: private.Noisy | ExactCounts
    totals: Mapping[str, Sequence[private.AnsweredCells]]

    def counts(self, documents: IntArray, words: Ids) -> FloatArray:
        """Return the counts; answered ones are at least 0, as in the authors' code."""
        if isinstance(self.cells, ExactCounts):
            return np.asarray(self.cells.counts(documents, words), dtype=np.float64)
        return np.asarray(np.maximum(self.cells.values(documents, words), 0.0), dtype=np.float64)

    def frequencies(self, words: Ids) -> FloatArray:
        """Return the document frequency of each word of the vocabulary, over all silos."""
        return self._summed("frequencies", words)

    def occurrences(self, words: Ids) -> FloatArray:
        """Return each word's collection count; not in the paper, a third sketch in the authors' code."""
        return self._summed("occurrences", words)

    def _summed(self, kind: str, words: Ids) -> FloatArray:
        every = Ids(np.arange(len(words.vocabulary)), words.vocabulary)
        nobody = np.zeros(len(every), dtype=np.int64)
        parts = [np.maximum(cells.values(nobody, every), 0.0) for cells in self.totals[kind]]
        return np.asarray(np.sum(parts, axis=0), dtype=np.float64)


@dataclass(eq=False)
class AnswerViews:
    """One silo's views of all silos' documents: its own exactly, others' by questions about its queries."""

    world: CrossSilos
    name: str
    protocol: Protocol
    _views: dict[tuple[str, bool], private.CountsView] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, holder: str, *, noised: bool = False) -> private.CountsView:
        """Return the view of a holder's documents; `noised` shows the silo's own as others see them too."""
        key = holder, holder == self.name and not noised
        if key not in self._views:
            fields = {name: self._field(holder, name, exact=key[1]) for name in FIELDS}
            self._views[key] = private.CountsView(self.world.documents[holder], fields)
        return self._views[key]

    def _field(self, holder: str, name: str, *, exact: bool) -> AnsweredCounts:
        tokens = self.world.tokens[holder][name]
        own = ExactCounts.of(tokens)
        cells = own if exact else self._question(holder, name, tokens, self.world.documents[holder])
        distinct = own.distinct if exact else np.minimum(UNIQUE * tokens.lengths, tokens.lengths)
        everybody = [parts[name] for parts in self.world.tokens.values()]
        return AnsweredCounts(
            tokens.lengths,
            np.asarray(distinct, dtype=np.float64),
            float(sum(len(part) for part in everybody)),
            float(sum(len(part.terms) for part in everybody)),
            cells,
            {kind: self._totals[name, kind] for kind in ("frequencies", "occurrences")},
        )

    @cached_property
    def _totals(self) -> dict[tuple[str, str], list[private.AnsweredCells]]:
        """Every silo's answers about two texts: all its words, and the distinct words of every document."""
        totals: dict[tuple[str, str], list[private.AnsweredCells]] = {}
        for name in FIELDS:
            for holder, parts in self.world.tokens.items():
                for kind, text in _collections(parts[name]).items():
                    cells = self._question(f"{holder} {kind}", name, text, (kind,))
                    totals.setdefault((name, kind), []).append(cells)
        return totals

    def _question(
        self, holder: str, name: str, tokens: Tokens, documents: Sequence[str]
    ) -> private.AnsweredCells:
        streams, kind, protocol = self.world.streams, self.protocol.kind, self.protocol
        family = private.HashFamily(streams("hashes").bytes(16) + name.encode(), kind.rows, protocol.width)
        entropy = streams("noise", holder, name).bytes
        key, covered = private.NoiseKey.fresh(entropy), private.fresh_versions(documents, entropy)
        release = private.CountRelease(name, family, kind, key, private.no_charge)
        desk = private.Desk(private.Owner.of(tokens, covered, release))
        asker = private.Asker(
            release.terms,
            family,
            kind,
            self._decoys,
            real_rows=protocol.real_rows,
            shared_rows=protocol.shared_rows,
        )
        carrier = private.in_memory(desk, self.name)
        return private.AnsweredCells.through(carrier, asker, self._words, len(documents))

    @cached_property
    def _words(self) -> Ids:
        return self.world.queries[self.name].terms

    @cached_property
    def _decoys(self) -> private.Decoys:
        words = self.world.tokens[self.name]["body"].terms
        occurrences = np.bincount(words.codes, minlength=len(words.vocabulary))
        return private.Decoys(words, occurrences, self.world.streams("decoys", self.name).bytes(16))


def _collections(tokens: Tokens) -> dict[str, Tokens]:
    """Return one text with all the words of these texts, and one with the distinct words of each."""
    distinct = tokens.counts().indices.astype(np.int64)
    ends = (np.array([0, len(tokens.terms)]), np.array([0, len(distinct)]))
    return {
        "occurrences": Tokens(tokens.terms, ends[0]),
        "frequencies": Tokens(Ids(distinct, tokens.terms.vocabulary), ends[1]),
    }


class AnsweringSilos(CrossSilos):
    """Silos that answer questions about words, each at its own ε, instead of publishing cells.

    Counts are used as answered, negative ones as 0.
    """

    def __init__(self, corpus: Corpus, streams: Streams, protocol: Protocol) -> None:
        super().__init__(corpus, streams, Releasing(epsilon=protocol.epsilon))
        self.protocol = protocol

    def views(self, name: str) -> tuple[Views, Views]:
        """Return the silo's views by questions, for features and for selection alike."""
        views = AnswerViews(self, name, self.protocol)
        return views, views

    @property
    def words(self) -> int:
        """The largest number of words about which one silo asks every other; each costs ε."""
        return max(len(queries.terms.vocabulary) for queries in self.queries.values())


def by_rank(corpus: Corpus, run: Run) -> Corpus:
    """Return the collection with grades from ranks in a run, without the queries that the run lacks."""
    ids = Ids.of(run.queries)[run.query_of_row]
    grades = np.where(run.ranks <= 10, 2, np.where(run.ranks <= 100, 1, 0))
    first = run.ranks <= 100
    qrels = Qrels.of(ids[first], run.documents[first], grades[first])
    there = np.array([query in qrels for query in corpus.queries.ids], dtype=bool)
    return replace(corpus, qrels=qrels, queries=corpus.queries.take(there))


class Learner(NamedTuple):
    """Scaled training data of one silo: its rows and their grades, and its cross rows."""

    features: FloatArray
    grades: IntArray
    cross: FloatArray


class PrintedWorld:
    """The paper's experiment on silos whose grades come from a run."""

    def __init__(self, corpus: Corpus, streams: Streams, protocol: Protocol | None = None) -> None:
        self.protocol = protocol or Protocol()
        self.streams = streams
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # paper mode warns once, of all its faults
            self.world = AnsweringSilos(corpus, streams, self.protocol)
            self.inside = {name: self._inside(name) for name, own in self._own.items() if len(own)}
            self.across = {name: self._across(name) for name in self.inside}
        self.tested = {name: self._split(name, rows.rows) for name, rows in self.inside.items()}

    @property
    def _own(self) -> Mapping[str, IntArray]:
        return self.world.query_rows

    @cached_property
    def _views(self) -> dict[str, Views]:
        return {name: self.world.views(name)[0] for name in self.world.names}

    def _inside(self, name: str) -> Letor:
        """Return a silo's own pairs with a grade from the run and random others; features by exact counts."""
        grades = self.world.truth[np.ix_(self._own[name], self.world.rows[name])]
        rng = self.streams("negatives", name)
        drawn = np.where(grades > 0, -1.0, rng.random(grades.shape))
        order = np.argsort(-drawn, axis=1)[:, : self.protocol.negatives]
        mask = grades > 0
        np.put_along_axis(mask, order, True, axis=1)
        queries, documents = np.nonzero(mask)
        return self._rows(name, name, Pairs(queries, documents), grades[mask])

    def _across(self, name: str) -> Letor | None:
        """Return pairs with the best documents of every other silo, by BM25 from its answers."""
        parts = []
        for holder in (other for other in self.world.names if other != name and len(self.world.rows[other])):
            scores = self._views[name](holder).scores(self.world.queries[name], FIELDS)
            chosen = best(scores, self.protocol.depth, None)
            queries = np.repeat(np.arange(len(chosen)), chosen.shape[1])
            pairs = Pairs(queries, chosen.ravel())
            parts.append(self._rows(name, holder, pairs, np.zeros(len(pairs), dtype=np.int64)))
        return Letor.concat(parts) if parts else None

    def _rows(self, name: str, holder: str, pairs: Pairs, grades: NDArray[Any]) -> Letor:
        counts = self._views[name](holder).counts
        table = compute(
            self.world.queries[name],
            pairs,
            title=counts["title"],
            body=counts["body"],
            settings=PROFILES["paper"],
        )
        ids = Ids.of([self.world.corpus.queries.ids[row] for row in self._own[name]])
        documents = Ids.of(self.world.documents[holder])
        return Letor.of(ids[pairs.queries], table, grades, documents=documents[pairs.documents])

    def _split(self, name: str, rows: int) -> NDArray[np.bool_]:
        """Draw the pairs of the test set; a query may have pairs on both sides."""
        return np.asarray(self.streams("pairs", name).random(rows) < self.protocol.test)

    @cached_property
    def test(self) -> Letor:
        """The common test set: the pairs of all silos that are not used for training."""
        return Letor.concat([rows.keep(self.tested[name]) for name, rows in self.inside.items()])

    @cached_property
    def _scale(self) -> tuple[FloatArray, FloatArray]:
        rows = np.concatenate([rows.features[~self.tested[name]] for name, rows in self.inside.items()])
        spread = rows.std(axis=0)
        return rows.mean(axis=0), np.where(spread > 0, spread, 1.0)

    def _scaled(self, features: NDArray[Any]) -> FloatArray:
        """Return z-scores by the training rows of all silos, and a column of ones."""
        centre, spread = self._scale
        unit = (features.astype(np.float64) - centre) / spread
        return np.column_stack((unit, np.ones(len(unit))))

    @cached_property
    def learners(self) -> dict[str, Learner]:
        """The training data of every silo."""
        learners = {}
        for name, rows in self.inside.items():
            own, across = rows.keep(~self.tested[name]), self.across[name]
            cross = np.empty((0, rows.width + 1)) if across is None else self._scaled(across.features)
            learners[name] = Learner(self._scaled(own.features), own.grades.astype(np.int64), cross)
        return learners

    def ways(self) -> Iterator[tuple[str, str, FloatArray]]:
        """Yield row, silo or "all", and weights (features × grades) of Local, Local+, Global, CS-F-LTR."""
        blank = np.zeros((next(iter(self.learners.values())).features.shape[1], 3))
        alone = {
            name: self.descended(blank, {name: one}, None, self.protocol.alone)
            for name, one in self.learners.items()
        }
        for name, weights in alone.items():
            yield "Local", name, weights
        for name, one in self.learners.items():
            yield "Local+", name, self.descended(alone[name], {name: one}, alone[name], self.protocol.alone)
        yield "Global", "all", self.descended(blank, self.learners, None, self.protocol.together)
        mean = np.mean(list(alone.values()), axis=0)
        yield "CS-F-LTR", "all", self.descended(mean, self.learners, mean, self.protocol.together)

    def descended(
        self, start: FloatArray, silos: Mapping[str, Learner], labeller: FloatArray | None, steps: int
    ) -> FloatArray:
        """Minimise the silos' mean of L + β·L_cross (eq. 9) + λ‖θ‖²/2 by Adam.

        Cross pairs have the labeller's most probable grade; without a labeller they are left out.
        """
        protocol = self.protocol
        rng = self.streams("training", *silos, steps, labeller is None)
        guessed = {
            name: (one.cross @ labeller).argmax(axis=1)
            for name, one in silos.items()
            if labeller is not None and len(one.cross)
        }
        theta, first, second = start.copy(), np.zeros_like(start), np.zeros_like(start)
        low, high = protocol.ramp
        for step in range(1, steps + 1):
            beta = protocol.beta * float(np.clip((step - low) / max(high - low, 1), 0, 1))
            gradient = protocol.weight_decay * theta
            for name, one in silos.items():
                gradient = gradient + _gradient(theta, one.features, one.grades, protocol.batch, rng) / len(
                    silos
                )
                if beta and name in guessed:
                    cross = _gradient(theta, one.cross, guessed[name], protocol.batch, rng)
                    gradient = gradient + beta * cross / len(silos)
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            hats = first / (1 - 0.9**step), second / (1 - 0.999**step)
            theta = theta - protocol.learning_rate * hats[0] / (np.sqrt(hats[1]) + 1e-8)
        return theta

    def measured(self, weights: FloatArray, measures: Sequence[str] = MEASURES) -> dict[str, float]:
        """Evaluate the ranking of the common test set by expected grades."""
        scores = _softmax(self._scaled(self.test.features) @ weights) @ np.arange(weights.shape[1])
        evaluation = evaluate(self.test.qrels(), self.test.run(scores), list(measures))
        return {measure: float(evaluation[measure]) for measure in measures}


def _gradient(
    theta: FloatArray, features: FloatArray, grades: IntArray, batch: int, rng: np.random.Generator
) -> FloatArray:
    """Return the gradient of the mean cross-entropy over a random batch."""
    rows = rng.integers(len(features), size=min(batch, len(features)))
    errors = _softmax(features[rows] @ theta)
    errors[np.arange(len(rows)), grades[rows]] -= 1.0
    return np.asarray(features[rows].T @ errors / len(rows))


def _softmax(outputs: FloatArray) -> FloatArray:
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
