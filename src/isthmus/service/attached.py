"""A silo over an engine elsewhere (`isthmus attach`): documents stay there, judgements are stored here.

AttachedStore    documents by id from the engine, judgements in a file of the node's folder
ScoredSnapshot   candidates with the engine's own scores, level *scores*; level *full* is `Snapshot`
EngineScorer     orders by those scores; probabilities once the silo's own judgements have calibrated them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np

from isthmus.engines import (
    AttachedEngine,
    AttachedReader,
    CannotNarrow,
    Change,
    Constraints,
    Location,
    Matches,
    RemoteEngine,
    RemoteProblem,
    WordCounts,
    may_see,
    open_remote,
)
from isthmus.errors import ConfigError, Refused, ServiceError
from isthmus.languages import DEFAULT, query
from isthmus.learning import SearchModel
from isthmus.service.candidates import QueryCandidates, Snapshot, spelled_terms
from isthmus.service.columns import ModelScorer
from isthmus.service.postgres import secured
from isthmus.service.scoring import Bm25Scorer, Scored
from isthmus.service.settings import EngineSettings, secret
from isthmus.service.stores import Counts, Draft, Judgement, SqliteStore
from isthmus.service.wire import Evidence

OWN = "engine"
"""The name of the engine's own score in explanations."""
DEAREST = 1.0
"""The largest score that an engine gives."""


def remote_of(settings: EngineSettings) -> RemoteEngine:
    """Return the adapter of an engine, with the secrets that the settings name."""
    url = secret(settings.url, "engine.url")
    if url.startswith(("postgresql:", "postgres:")):
        url = secured(url, "engine.url")
    return open_remote(
        Location(
            url=url,
            source=settings.source,
            id=settings.id,
            title=settings.title,
            body=settings.body,
            type=settings.type,
            date=settings.date,
            allow=settings.allow_field,
            allowed=settings.allow,
            search_by=settings.search_by,
            filter=settings.filter,
            key=secret(settings.key, "engine.key"),
            seconds=settings.seconds,
        )
    )


def open_attached(settings: EngineSettings, folder: Path) -> AttachedEngine:
    """Open the engine. Its server is contacted only if documents have access rules, to check that it can
    filter by them; raises a ConfigError if it cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    is_counted, remote = settings.level == "full", remote_of(settings)
    engine = AttachedEngine(folder, remote, counted=is_counted, language=settings.language)
    if settings.allow_field:
        if not is_counted and not remote.ranks_alone:
            raise ConfigError(
                f"scores of {remote.noun} depend on documents that whoever asks may not see",
                key="engine.level",
                expected='"full" with engine.allow_field',
            )
        try:
            engine.remote.check_rules()
        except RemoteProblem as error:
            raise ConfigError(str(error), key="engine.allow_field") from None
        except ServiceError:  # no answer: the rules are checked again before the first search
            pass
    return engine


class AttachedStore(SqliteStore):
    """A store whose documents are in an engine elsewhere. Judgements of them are stored here."""

    judged_sql = """SELECT query, document, relevant, peer, at, probability, evidence, person
        FROM judgement ORDER BY at, query, document, peer, person"""

    def __init__(self, path: Path, engine: AttachedEngine) -> None:
        super().__init__(path)
        self._engine = engine
        engine.renew_hidden = self._renew_hidden
        self._renew_hidden()

    def _renew_hidden(self) -> None:
        """Hide documents that were erased, by this process or another, although the engine still has them."""
        erased = self.blocked()
        self._engine.remote.is_hidden, self._engine.remote.hidden = erased, len(erased)

    def block(self, ids: Iterable[str], *, at: float) -> None:
        """Hide these documents from now on."""
        ids = list(ids)
        super().block(ids, at=at)
        self._renew_hidden()
        self._engine.forget(ids)

    def readmit(self, ids: Iterable[str]) -> int:
        """Show erased documents again, if the engine has them. Returns how many had been erased."""
        count = super().readmit(ids)
        self._renew_hidden()
        return count

    def close(self) -> None:
        """Close all connections."""
        super().close()
        self._engine.close()

    def get(self, ids: Sequence[str]) -> dict[str, Draft]:
        """Return the documents with these ids, by id; unknown ids are left out."""
        texts = self._engine.remote.texts(list(ids))
        language = self._engine.reader.language
        return {
            id: Draft(id, each.title, each.body, language, each.type, each.date, allow=each.allow)
            for id, each in texts.items()
        }

    def present(self, ids: Iterable[str], principals: frozenset[str] | None = None) -> set[str]:
        """Return the ids of documents that exist and, if principals are given, that these may see."""
        texts = self.get(list(ids))
        return {id for id, each in texts.items() if principals is None or may_see(each.allow, principals)}

    def judgements(self) -> list[Judgement]:
        """Return all judgements of documents that still exist, in order of time."""
        every = super().judgements()
        present = self.present({each.document for each in every})
        return [each for each in every if each.document in present]

    def count(self) -> int:
        """Return how many documents there were when the engine was last checked."""
        return len(self._engine.reader)

    def latest(self) -> int:
        """Return the number of the last change that was counted, plus one while no count is available."""
        return self._engine.reader.change + (not self._engine.is_ready)

    def changes(self, after: int, limit: int) -> list[Change]:
        """Return no changes: nothing is indexed here."""
        return []

    def living(self) -> Iterator[Change]:
        """Yield all documents."""
        language = self._engine.reader.language
        for batch in self._engine.remote.scan():
            for each in batch:
                texts = (each.title, each.body, language, each.type, each.date, each.allow)
                yield Change(each.id, 0, False, *texts)

    def spread(self, count: int) -> Iterator[Change]:
        """Yield up to `count` documents at equal distances in the list of counted ones."""
        ids = self._engine.reader.tally.ids
        chosen = (
            [ids[at] for at in np.linspace(0, len(ids), count, endpoint=False).astype(int)] if ids else []
        )
        for id, each in self.get(list(dict.fromkeys(chosen))).items():
            yield Change(id, 0, False, each.title, each.body, each.language)

    def listed(self, *, source: str = "", words: str = "", most: int = 100) -> list[tuple[str, ...]]:
        """Return (id, title, source, language, allow, subject) of the first documents whose id or title has
        all these words."""
        if not self._engine.is_counted and self._engine.maintain():  # no node has counted the documents yet
            self._engine.refresh()
        wanted = words.lower().split()
        every = () if source else self.living()
        named = (each for each in every if all(word in f"{each.id}\n{each.title}".lower() for word in wanted))
        return [
            (each.id, each.title, "", each.language, "; ".join(each.allow), "")
            for each in islice(named, most)
        ]

    def languages(self, principals: frozenset[str] | None = None) -> dict[str, int]:
        """Return the number of documents by language; all of them are read in one."""
        return {self._engine.reader.language or DEFAULT: self.count()}

    def principals(self) -> frozenset[str]:
        """Return no principals: only the engine has them."""
        return frozenset()

    def put(self, documents: Iterable[Draft], *, source: str = "") -> Counts:
        """Raise Refused: documents are changed where they are."""
        raise Refused(self._elsewhere)

    def remove(self, ids: Iterable[str]) -> int:
        """Raise Refused: documents are removed where they are."""
        raise Refused(self._elsewhere)

    @cached_property
    def _elsewhere(self) -> str:
        return f"this silo's documents are in {self._engine.noun}, which is only read: change them there"


@dataclass(frozen=True, eq=False)
class ScoredSnapshot(Snapshot):
    """Candidates in the order of an engine elsewhere, with its scores in place of BM25's."""

    reader: AttachedReader

    def find(
        self, text: str, depth: int, only: Constraints | None = None, *, instead: Sequence[str] = ()
    ) -> QueryCandidates:
        """Return the best `depth` documents of the engine. Their words are not counted."""
        if not text.strip():
            raise CannotNarrow("its engine is searched by whole words")
        tokens = query(text, self.languages)
        terms = spelled_terms(tokens)
        words = tuple(terms[code] for code in tokens.terms.codes.tolist())
        vector = self.encoder.query(text, words)
        handles, scores = self.reader.search(text, vector, depth, only)
        none = np.zeros((len(handles), len(terms)), dtype=np.int32)
        sizes = np.zeros((len(handles), 2), dtype=np.int32)
        return QueryCandidates(
            words,
            tokens,
            tuple(terms),
            self.reader,
            handles,
            {"bm25": np.clip(scores, 0.0, DEAREST)},
            {"bm25": np.ones(len(handles), dtype=bool)},
            WordCounts(none, none, none, sizes, sizes),
            DEAREST,
            vector,
        )

    def matches(self, text: str, terms: Sequence[str], only: Constraints | None = None) -> Matches:
        """Return the matches that the engine counts. Raises CannotNarrow if it is searched by vectors, since
        every document is near to some degree."""
        if self.encoder.width and text.strip():
            raise CannotNarrow("its engine is searched by vectors")
        return self.reader.text_matches(text, only)

    def all_ids(self) -> list[str]:
        """Return the ids of all documents, as the engine lists them."""
        return self.reader.remote.all_ids()


@dataclass(frozen=True, eq=False)
class EngineScorer:
    """Orders candidates as the engine does.

    Scores of different engines do not compare. Hits have probabilities, by which the hits of silos are
    merged, only once the silo's own judgements have calibrated the scores (`model`).
    """

    name: ClassVar[str] = "engine"
    comparable: ClassVar[bool] = False

    model: SearchModel | None = None

    @property
    def _scorer(self) -> Bm25Scorer | ModelScorer:
        return Bm25Scorer() if self.model is None else ModelScorer(self.model)

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """Return the engine's order, with probabilities if the scores are calibrated."""
        return self._scorer.score(snapshot, candidates)

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """Return what the engine's score adds; with a calibration, also the start and the query's profile."""
        return [
            [
                part.model_copy(update={"retriever": OWN}) if part.retriever == "bm25" else part
                for part in parts
            ]
            for parts in self._scorer.explain(snapshot, candidates, scored, depth)
        ]
