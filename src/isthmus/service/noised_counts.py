"""Noised counts: how many documents of a silo answer a question, at a stated ε and without any title.

    count = Σ_d 1[d has a word of the query, and P(relevant | d, query) ≥ threshold] + noise
    count = Σ_d 1[d has all words of the query] + noise              where nothing is learned yet

Whether a document counts depends on that document, the query, and data published before: the statistics of
all silos, the learned model, and an encoder that was not fitted in this silo. The query is analysed in each
document's own language, so the first document in another language changes nothing for the others. A search
corrects probabilities by the shape of its list of hits; here the usual shape is assumed. So adding, removing
or replacing one document changes the sum by at most 1, and two-sided geometric noise of rate ε makes it
ε-private, for every question.

If documents have a subject (a patient), the count is of subjects with at least one document that counts. All
documents of one subject together change this sum by at most 1 too, and the ε is the subject's, charged once
for all of them.

A question is identified by its distinct terms as the index reads them, the threshold and the model. Its noise
is drawn once, from the operating system: the answer is charged to every document, stored, and only then
returned. A peer that has paid for the question gets the same answer when it asks again. Noise is drawn and
charged anew once enough documents have changed; the same noise on a changed count would show by how much it
changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from isthmus.arrays import IntArray
from isthmus.engines import EngineReader
from isthmus.errors import BudgetExhausted
from isthmus.languages import beyond_english, query
from isthmus.private import Cost, Covered, Geometric, release_costs
from isthmus.private.ledger import Ledger
from isthmus.retrieval import FIELD_TABLES, TEXT
from isthmus.service.candidates import Mask, Snapshot, spelled_terms
from isthmus.service.columns import ModelScorer
from isthmus.service.index import Index
from isthmus.service.limits import HttpProblem
from isthmus.service.releases import counted_documents, outdated
from isthmus.service.scoring import Scorer
from isthmus.service.settings import NodeSettings
from isthmus.service.wire import CountQuestion, NoisedCount
from isthmus.tables import replacing

ADJACENCY = "one {} more, less or replaced"
"""Neighbouring data for the ε of a count; {} is a document, or a subject with all its documents."""
COVERAGE = 0.95
"""Share of draws of the noise for which the interval around a count contains the true count."""
AT_ONCE = 1 << 14
"""Documents whose words are counted in one batch."""
MOST_ANSWERS = 10_000
"""Answers kept in the file; the oldest are dropped first, and their questions are charged again."""

Readings = Sequence[tuple[frozenset[str], IntArray, IntArray]]
"""Documents by language: the language in which they are read (the empty set for English), their handles, and
the number of the unit to which each belongs."""


@dataclass(frozen=True, eq=False)
class _Collection:
    """Documents to count. `units` has one document of every unit, to which a count is charged; `statistics`
    the documents that a release of statistics would count; `readings` all documents by language; `noun` is
    what a unit is called, and `documents` how many there are."""

    units: Covered
    statistics: Covered
    readings: Readings
    noun: str
    documents: int


_log = logging.getLogger("isthmus.service")


@dataclass(frozen=True)
class _CountAnswer:
    """A stored answer to a question: the noised count, the name of its draw of noise, the state of the
    collection that was counted, the peers that have paid for it, and the ledger's number when it was
    charged."""

    count: int
    epsilon: float
    draw: str
    change: int
    documents: int
    peers: tuple[str, ...]
    ledger: int
    unit: str = "document"


class CountReleases:
    """Answers questions with noised counts of one silo, the same for every peer and every request."""

    def __init__(self, settings: NodeSettings, ledger: Ledger, index: Index) -> None:
        self.silo, self.settings, self.statistics = settings.silo, settings.noised_counts, settings.statistics
        # an encoder that was fitted on the silo's own texts depends on every document
        self._dense = settings.encoder.kind != "lsa" or settings.encoder.path is not None
        self._is_elsewhere = settings.engine is not None and settings.engine.level == "scores"
        self.ledger, self.index = ledger, index
        self._file = counts_file(settings)
        self._lock = threading.Lock()
        self._answers = _read(self._file)
        self._counted: tuple[EngineReader, _Collection] | None = None
        self._by_subject, self._per_subject = settings.unit == "subject", settings.per_subject
        self._noun = settings.subject_noun or "subject"
        ledger.expect(max((each.ledger for each in self._answers.values()), default=0), self._file)

    def answer(
        self, question: CountQuestion, peer: str, scorer: Scorer, principals: frozenset[str] | None = None
    ) -> NoisedCount:
        """Return the stored count, or a new one, which is charged and stored before it is returned.

        Only documents that these principals may see are counted, with separate noise for every such set.
        Raises BudgetExhausted, and an HttpProblem for a query or a silo without anything to count.
        """
        snapshot, readers = self.index.snapshot, list[str]()
        if principals is not None and snapshot.reader.has_rules:
            readers = sorted(principals & self.index.store.principals())
            snapshot = snapshot.seen_by(principals, self.index.languages(principals))
        if self._is_elsewhere or not snapshot.reader.is_own:
            raise HttpProblem(422, "words of documents elsewhere are not counted")
        if not len(snapshot):
            raise HttpProblem(503, "it has no document in its index yet", Retry_After="5")
        words = sorted(set(query(question.query, snapshot.languages).terms.words))
        if not words:
            raise HttpProblem(422, "a query without words")
        model = _calibrated(scorer, snapshot)
        by = "words" if model is None else f"model {model.version} from {question.threshold}"
        question_of = [words, by, *([readers] if snapshot is not self.index.snapshot else [])]
        name = hashlib.blake2b(json.dumps(question_of).encode(), digest_size=16).hexdigest()
        with self._lock:
            before = self._answers.get(name)
            answer = self._known(before, peer, snapshot)
            if answer is None:
                try:
                    answer = self._answers[name] = self._paid(before, peer, question, snapshot, model)
                    self._save()
                except BudgetExhausted:
                    if before is None or peer not in before.peers:
                        raise
                    answer = before
        reached = reach(answer.epsilon)
        return NoisedCount(
            silo=self.silo,
            by="words" if model is None else "probability",
            count=max(answer.count, 0),  # a cap would show the number of documents
            low=max(answer.count - reached, 0),
            high=max(answer.count + reached, 0),
            epsilon=answer.epsilon,
            unit=answer.unit,
            repeated=answer is before,
        )

    def _known(self, before: _CountAnswer | None, peer: str, snapshot: Snapshot) -> _CountAnswer | None:
        """Return the stored answer if the peer has paid for it and it is not stale; else None."""
        if before is None or peer not in before.peers or self._is_stale(before, snapshot):
            return None
        return before

    def _is_stale(self, answer: _CountAnswer, snapshot: Snapshot) -> bool:
        renew = self.settings.renew
        return answer.epsilon != self.settings.epsilon or outdated(
            snapshot, answer.change, answer.documents, renew
        )

    def _paid(
        self,
        before: _CountAnswer | None,
        peer: str,
        question: CountQuestion,
        snapshot: Snapshot,
        model: ModelScorer | None,
    ) -> _CountAnswer:
        """Charge the peer for the answer that others got for the same documents, or draw a new one."""
        counted = self._documents(snapshot)
        if before is not None and before.change == snapshot.change and not self._is_stale(before, snapshot):
            self._charge(before.draw, counted, peer)
            return replace(before, peers=(*before.peers, peer), ledger=self.ledger.number)
        draw = secrets.token_hex(16)
        matching = [
            units[
                matching_documents(
                    replace(snapshot, languages=own), handles, question, model, dense=self._dense
                )
            ]
            for own, handles, units in counted.readings
        ]
        count = len(np.unique(np.concatenate(matching))) if matching else 0
        self._charge(draw, counted, peer)
        noise = int(Geometric(self.settings.epsilon).draw(1)[0])
        return _CountAnswer(
            count + noise,
            self.settings.epsilon,
            draw,
            snapshot.change,
            counted.documents,
            (peer,),
            self.ledger.number,
            counted.noun,
        )

    def _documents(self, snapshot: Snapshot) -> _Collection:
        """Return the documents to count, by language; computed once for every reader of the index."""
        if self._counted is None or self._counted[0] is not snapshot.reader:
            every = counted_documents(snapshot, self.index, self.ledger, by_subject=self._by_subject)
            keys = [subject or at for at, subject in enumerate(every.subjects)]
            number = {key: at for at, key in enumerate(dict.fromkeys(keys))}
            units = np.array([number[key] for key in keys], dtype=np.int64)
            first = np.unique(units, return_index=True)[1]
            counted = _Collection(
                every.covered.take(first.tolist()),
                every.bounded(self.ledger, self._per_subject).covered,
                self._by_language(snapshot, every.handles, units),
                self._noun if any(every.subjects) else "document",
                len(every.covered),
            )
            self._counted = snapshot.reader, counted
        return self._counted[1]

    def _by_language(self, snapshot: Snapshot, handles: IntArray, units: IntArray) -> Readings:
        if len(snapshot.languages) < 2:
            return [(snapshot.languages, handles, units)]
        ids = snapshot.reader.ids(handles)
        texts = self.index.store.get(ids)
        own = [beyond_english([texts[id].language if id in texts else ""]) for id in ids]
        rows = {each: [at for at, language in enumerate(own) if language == each] for each in set(own)}
        return [(each, handles[rows[each]], units[rows[each]]) for each in sorted(rows, key=sorted)]

    def _charge(self, draw: str, counted: _Collection, peer: str) -> None:
        """Charge a draw to all units; one more release of statistics must also fit into the budget."""
        charge = (_cost(self.settings.epsilon, draw, counted.noun), counted.units, peer)
        reserve: list[tuple[Cost, Covered, str]] = []
        if self.statistics.form == "private":
            tables = (TEXT, *FIELD_TABLES) if self.statistics.fields else (TEXT,)
            costs = release_costs(tables, self.statistics.epsilon, "the next draw")
            reserve = [(cost, counted.statistics, "the next release") for cost in costs]
        self.ledger.charge_all([charge], kind="counts", reserve=reserve)

    def _save(self) -> None:
        while len(self._answers) > MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]
        content = {"format": 1, "answers": {name: asdict(each) for name, each in self._answers.items()}}
        with replacing(self._file) as stream:
            stream.write(json.dumps(content).encode())


def counts_file(settings: NodeSettings) -> Path:
    """Path of the file with the noised counts that were released."""
    return settings.folder / "noised.counts"


def _read(file: Path) -> dict[str, _CountAnswer]:
    """Read the answers in a file, in the order in which they were drawn; {} if it cannot be read."""
    try:
        answers = json.loads(file.read_bytes())["answers"]
        return {
            name: _CountAnswer(**fields | {"peers": tuple(fields["peers"])})
            for name, fields in answers.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning(
            "%s cannot be read; its counts are drawn and charged anew: %s", file, type(error).__name__
        )
        return {}


def reach(epsilon: float) -> int:
    """Return the smallest k such that the noise lies within ±k in a share `COVERAGE` of draws.

    P(|noise| > k) = 2·a^(k+1)/(1 + a) with a = e^−ε.
    """
    ratio = math.exp(-epsilon)
    return max(0, math.ceil(math.log((1 - COVERAGE) * (1 + ratio) / 2) / -epsilon) - 1)


def _cost(epsilon: float, draw: str, unit: str) -> Cost:
    return Cost(
        "noised count",
        ("title", "body"),
        epsilon,
        sensitivity=1.0,
        scale=1 / epsilon,
        release=f"count, draw {draw}",
        halves=False,
        adjacency=ADJACENCY.format(unit),
    )


def _calibrated(scorer: Scorer, snapshot: Snapshot) -> ModelScorer | None:
    """Return the learned model if its probabilities differ and it uses published statistics; else None."""
    if not isinstance(scorer, ModelScorer) or snapshot.shared is None:
        return None
    calibration = scorer.model.calibration
    return scorer if calibration is not None and calibration.slope > 0 else None


def matching_documents(
    snapshot: Snapshot, handles: IntArray, question: CountQuestion, model: ModelScorer | None, *, dense: bool
) -> Mask:
    """Return a mask of the documents that count, each decided alone; all are in the snapshot's language."""
    blocks = [handles[first : first + AT_ONCE] for first in range(0, len(handles), AT_ONCE)]
    if model is None:
        words = spelled_terms(query(question.query, snapshot.languages))
        return np.concatenate([_having(snapshot, block, words) for block in blocks])
    parts = []
    for block in blocks:
        candidates = snapshot.every(question.query, block, dense=dense)
        probabilities = model.alone(snapshot, candidates)
        parts.append(candidates.listed["bm25"] & (probabilities >= question.threshold))
    return np.concatenate(parts)


def _having(snapshot: Snapshot, handles: IntArray, words: Sequence[str]) -> Mask:
    counts = snapshot.reader.counts(handles, words)
    return np.asarray((counts.title + counts.body > 0).all(axis=1))
