"""An external search engine as a node's engine: it supplies candidates and texts; terms are counted here.

    AttachedReader    candidates from the engine's own search; their terms counted exactly, in their texts;
                      statistics of all documents as of the last count (`tally`)
    AttachedEngine    counts the documents again when they have changed, as slow work; never writes

After a server failed to answer, it is not contacted for `REST` seconds; requests in that time fail at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Span, Vectors
from isthmus.engines.access import may_see
from isthmus.engines.engine import (
    ANY,
    FIELDS,
    CannotNarrow,
    Change,
    Constraints,
    Counted,
    Encoded,
    Matches,
    WordCounts,
)
from isthmus.engines.exact import ExactReader
from isthmus.engines.remote import (
    BATCH,
    TOO_SLOW,
    CountedEngine,
    RemoteDocument,
    RemoteEngine,
    RemoteProblem,
    rarest,
    sees_unruled,
    well_formed,
)
from isthmus.engines.tally import Counting, DocumentTally, Interrupted, batch_of, count_all, word_counts
from isthmus.engines.terms import STOP
from isthmus.errors import ConfigError, DataError, ServiceError

OVERFETCH = 2
"""Candidates requested for each one wanted, so that exact scores decide."""
REST = 2.0
"""Seconds for which a server is not contacted after it failed to answer."""
LOOK = 10.0
"""Seconds between two checks whether documents have changed."""
SHARE = 20.0
"""Documents are counted again at the earliest after this many times the duration of the last count."""
DAY = 86_400.0
"""Seconds after which they are counted again in any case: not every engine reports a changed text."""
RECENT, FRESH = 1_000, 5.0
"""Maximum number of cached texts, and seconds for which they are used: a search reads each text twice."""
LONGEST_ID = 1_000
"""Characters of an id; documents with longer ids are skipped."""
LISTED = 60.0
"""Seconds for which a list of all ids is reused."""
MOST_COUNTS = 64
"""Maximum number of cached document counts, one for each set of constraints and principals."""
NAMED = 100_000
"""Maximum number of documents that have a handle but are not counted yet; the oldest lose theirs."""

_log = logging.getLogger("isthmus.engines")

T = TypeVar("T")


class Remote:
    """A guarded connection to a server, with its last failure, recently read texts and handles of new
    documents."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine = engine
        self.problem = ""
        """Why the server did not answer last; empty if it did."""
        self.is_hidden: Callable[[str], bool] = lambda id: False
        """Whether the document with an id is hidden although the server may have it, because it was erased
        here."""
        self.hidden = 0
        """Number of hidden documents, whether or not the server still has them."""
        self._rests_until = 0.0
        self._recent: OrderedDict[str, tuple[float, RemoteDocument]] = OrderedDict()
        self._handle_of: OrderedDict[str, int] = OrderedDict()
        self._id_of: dict[int, str] = {}
        self._next = 1
        self._listed: tuple[float, list[str]] = (-LISTED, [])
        self._is_checked = False
        self._counts: dict[Constraints, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def ask(self, work: Callable[[], T]) -> T:
        """Run a request to the server and return its answer. Raises a ServiceError at once during the `REST`
        seconds after a failure.

        A RemoteProblem does not start such a pause: the server answers, and may accept another query.
        """
        if self.problem and time.monotonic() < self._rests_until:
            raise ServiceError(self.problem)
        try:
            with well_formed(self.engine.noun):
                answer = work()
        except RemoteProblem:
            raise
        except ServiceError as error:
            if not self.problem:
                _log.warning("%s", error)
            self.problem, self._rests_until = str(error), time.monotonic() + REST
            raise
        if self.problem:
            _log.info("%s answers again", self.engine.noun)
            self.problem = ""
        return answer

    def find(self, work: Callable[[], T], only: Constraints = ANY) -> T:
        """`ask` for a search: error messages contain no word of the query. Raises CannotNarrow if the server
        refuses the query and there are constraints."""
        try:
            return self.ask(work)
        except RemoteProblem as problem:
            if only != ANY and problem.code != TOO_SLOW:
                reason = f"{self.engine.noun} does not filter by this type or date, or by who may see it"
                raise CannotNarrow(reason) from None
            raise problem.of_query() from None

    def texts(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """Documents by id; unknown ids are left out."""
        since = time.monotonic() - FRESH
        ids = [id for id in ids if not self.is_hidden(id)]
        with self._lock:
            known = {id: self._recent[id] for id in ids if id in self._recent}
        texts = {id: document for id, (at, document) in known.items() if at > since}
        missing = [id for id in dict.fromkeys(ids) if id not in texts]
        if missing:
            read = self.find(lambda: self.engine.get(missing))
            # drop ids that were not requested: an engine may return 7 for 007, and 7 may be hidden
            read = {id: read[id] for id in missing if id in read}
            now = time.monotonic()
            with self._lock:
                self._recent |= {id: (now, document) for id, document in read.items()}
                while len(self._recent) > RECENT:
                    self._recent.popitem(last=False)
            texts |= read
        return texts

    def shows(self, id: str) -> bool:
        """Whether the document with this id may be shown."""
        return is_name(id) and not self.is_hidden(id)

    def forget(self, ids: Iterable[str]) -> None:
        """Drop these documents from the caches."""
        gone = set(ids)
        with self._lock:
            for id in gone & self._recent.keys():
                del self._recent[id]
            self._listed = (-LISTED, [])

    def scan(self) -> Iterator[list[RemoteDocument]]:
        """All documents that may be shown, in batches."""
        for batch in self.engine.scan():
            yield [each for each in batch if self.shows(each.id)]

    def all_ids(self) -> list[str]:
        """The ids of all documents, at most a minute old."""
        if time.monotonic() - self._listed[0] > LISTED:
            ids = self.ask(lambda: [each.id for batch in self.scan() for each in batch])
            self._listed = (time.monotonic(), ids)
        return self._listed[1]

    def check_rules(self) -> None:
        """Raise a ConfigError unless documents can be filtered by who may see them; checked until it succeeds
        once."""
        if not self._is_checked:
            self.ask(self.engine.check_rules)
            self._is_checked = True

    def seen_count(self, only: Constraints) -> int:
        """How many documents meet constraints; the number is up to `LOOK` seconds old."""
        now = time.monotonic()
        at, count = self._counts.get(only, (-LOOK, 0))
        if now - at >= LOOK:
            count = self.find(lambda: self.engine.documents(only), only)
            if len(self._counts) > MOST_COUNTS:
                self._counts.clear()
            self._counts[only] = now, count
        return count

    def reserve(self, first: int) -> int:
        """Reserve all numbers below `first` for counted documents. Returns the first number that no document
        has."""
        with self._lock:
            self._next = max(self._next, first)
            return self._next

    def handles(self, ids: Iterable[str]) -> list[int]:
        """The handles of documents that are not counted yet; new ones are assigned."""
        with self._lock:
            for id in ids:
                if id not in self._handle_of:
                    self._handle_of[id] = self._next
                    self._id_of[self._next] = id
                    self._next += 1
            numbers = [self._handle_of[id] for id in ids]
            while len(self._handle_of) > NAMED:
                self._id_of.pop(self._handle_of.popitem(last=False)[1])
        return numbers

    def id_of(self, handle: int) -> str:
        """The id of the uncounted document with this handle."""
        return self._id_of[handle]


def is_name(id: str) -> bool:
    """Whether a document with this id can be shown: not empty, not too long, no control characters."""
    return 0 < len(id) <= LONGEST_ID and not any(ord(sign) < 32 or ord(sign) == 127 for sign in id)


@dataclass(frozen=True, eq=False)
class AttachedReader:
    """See `EngineReader`. Statistics are those of the last count; texts and candidates are the server's
    current ones."""

    remote: Remote
    tally: DocumentTally
    documents: int
    language: str
    readers: frozenset[str] | None = None
    """The searcher's principals, if documents say who may see them; None for the owner."""
    is_closed: bool = False
    """Whether the searcher may see no document at all."""

    def __len__(self) -> int:
        if self.readers is None or self.is_closed:
            return 0 if self.is_closed else self.documents
        return self.remote.seen_count(self._pushed(None))

    @property
    def has_rules(self) -> bool:
        """Whether documents, or the silo as a whole, restrict who may see them."""
        return bool(self.remote.engine.location.allow or self.remote.engine.location.allowed)

    @property
    def is_own(self) -> bool:
        """False if some documents are hidden from the searcher: terms are counted over all of them."""
        return self.readers is None

    def seen_by(self, principals: frozenset[str]) -> AttachedReader:
        """The documents that these principals may see; statistics stay those of all documents."""
        at = self.remote.engine.location
        if not at.allow and sees_unruled(principals, at):
            return self
        if at.allow:
            try:
                self.remote.check_rules()
            except ConfigError as error:
                raise ServiceError(str(error)) from None
        return replace(self, readers=principals, is_closed=not at.allow)

    @property
    def change(self) -> int:
        """The last change that was counted."""
        return self.tally.last

    @property
    def lengths(self) -> dict[str, int]:
        """Content terms of all documents, by field."""
        return dict(zip(FIELDS, self.tally.lengths, strict=True))

    @property
    def vocabulary(self) -> object:
        """The tally, which assigns codes to words: the same object for readers with the same codes."""
        return self.tally

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints | None = None) -> IntArray:
        """The server's candidates, by the `MOST_TERMS` rarest words if there are more."""
        pushed = self._pushed(only)
        if depth < 1 or not weights or self.is_closed:
            return np.empty(0, dtype=np.int64)
        engine, some = cast(CountedEngine, self.remote.engine), rarest(weights, self.tally.code_of)
        most = OVERFETCH * depth
        ids = self.remote.find(lambda: engine.matching(some, most, pushed), pushed)[:most]
        handles = self.named(self._visible(ids))
        return handles if only is None else self.meeting(handles, only)

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints | None = None
    ) -> tuple[IntArray, FloatArray]:
        """The best documents by the server's own scores, ascending by handle, and the scores. Constraints
        that the server cannot apply are checked in the documents' texts."""
        if self.is_closed:
            return np.empty(0, dtype=np.int64), np.empty(0)
        pushed, most = self._pushed(only), depth if only is None else OVERFETCH * depth
        hits = self.remote.find(lambda: self.remote.engine.search(text, vector, most, pushed), pushed)
        finite = {id: score for id, score in hits[:most] if np.isfinite(score)}
        visible = self._visible(list(finite))
        scores = dict(zip(self._numbers(visible), map(finite.__getitem__, visible), strict=True))
        handles = np.array(sorted(scores), dtype=np.int64)
        if only is not None:
            meeting = self.meeting(handles, only).tolist()
            handles = np.array(sorted(sorted(meeting, key=scores.__getitem__)[-depth:]), dtype=np.int64)
        return handles, np.array([scores[handle] for handle in handles.tolist()], dtype=np.float64)

    def _visible(self, ids: Sequence[str]) -> list[str]:
        """The ids that the searcher may see, by each document's own rule: some servers ignore case and
        accents in names."""
        present = [id for id in ids if self.remote.shows(id)]
        if self.readers is None:
            return present
        texts, readers = self.remote.texts(present), self.readers
        return [id for id in present if id in texts and may_see(texts[id].allow, readers)]

    def named(self, ids: Sequence[str]) -> IntArray:
        """The handles of documents, ascending."""
        return np.unique(np.array(self._numbers(ids), dtype=np.int64))

    def _numbers(self, ids: Sequence[str]) -> list[int]:
        rows = [self.tally.row_of.get(id, -1) for id in ids]
        others = iter(self.remote.handles([id for id, row in zip(ids, rows, strict=True) if row < 0]))
        return [int(self.tally.handles[row]) if row >= 0 else next(others) for row in rows]

    def ids(self, handles: IntArray) -> list[str]:
        """The ids of documents."""
        known, rows = self.tally.handles, np.searchsorted(self.tally.handles, handles)
        return [
            self.tally.ids[row] if row < len(known) and known[row] == handle else self.remote.id_of(handle)
            for handle, row in zip(handles.tolist(), rows.tolist(), strict=True)
        ]

    def _texts(self, handles: IntArray) -> list[RemoteDocument]:
        """Documents as they are now; those that are gone have empty texts."""
        ids = self.ids(handles)
        texts = self.remote.texts(ids)
        return [texts.get(id) or RemoteDocument(id, "", "") for id in ids]

    def counts(self, handles: IntArray, words: Sequence[str]) -> WordCounts:
        """Count how often each document has each word."""
        return word_counts(self._texts(handles), words, self.language)

    def meeting(self, handles: IntArray, only: Constraints) -> IntArray:
        """The documents whose texts meet the constraints, checked one by one."""
        return self._exact(handles).meeting(handles, only)

    def _exact(self, handles: IntArray) -> ExactReader:
        texts = zip(handles.tolist(), self._texts(handles), strict=True)
        return ExactReader(
            [
                Change(
                    each.id, at, False, each.title, each.body, self.language, each.type, each.date, each.allow
                )
                for at, each in texts
            ]
        )

    def tables(self, words: Sequence[str]) -> dict[str, FloatArray]:
        """The counts of words over all documents."""
        return self.tally.tables(words)

    def handles(self) -> IntArray:
        """All documents that are counted."""
        return self.tally.handles

    def changed_after(self, change: int) -> int:
        """How many documents were written after a change."""
        return int((self.tally.handles > change).sum())

    def statistics(
        self, names: Sequence[str], handles: IntArray | None = None
    ) -> tuple[Ids, Mapping[str, IntArray]]:
        """The sorted vocabulary and the named tables; for a selection of documents, counted again in their
        texts."""
        if handles is None or len(handles) == len(self.tally):
            return self.tally.statistics(names)
        counting = Counting(self.language)
        for some in np.array_split(handles, len(handles) // BATCH + 1):
            counting.add(self._texts(some))
        return DocumentTally(words=tuple(counting.code_of), totals=counting.counted).statistics(names)

    def terms(self, handles: IntArray) -> Counted:
        """All terms of documents except stop words and terms that the last count did not have."""
        batch = batch_of(self._texts(handles), self.language)
        words, place = batch.words()
        document, code, counts = batch.entries(place)
        known = [-1 if word.startswith(STOP) else self.tally.code_of.get(word, -1) for word in words]
        word = np.array(known, dtype=np.int64)[code] if len(words) else np.empty(0, np.int64)
        chosen = word >= 0
        times = counts["title"].astype(np.float64) + counts["body"]
        return Counted(
            len(handles), document[chosen], word[chosen], times[chosen], counts["lead"][chosen] > 0
        )

    def words(self, first: int = 0) -> list[str]:
        """The words with codes from `first` on."""
        return list(self.tally.words[first:])

    def nearest(self, vector: Vectors, depth: int, only: Constraints | None = None) -> IntArray:
        """Empty: vectors of an external engine are searched by the engine itself."""
        return np.empty(0, dtype=np.int64)

    def newest(self, depth: int, only: Constraints) -> IntArray:
        """The newest documents in the server's order; constraints that it cannot apply are checked in their
        texts."""
        if self.is_closed:
            return np.empty(0, dtype=np.int64)
        pushed = self._pushed(only)
        only = replace(only, readers=self.readers)
        most = depth if pushed == only else OVERFETCH * depth
        ids = self.remote.find(lambda: self.remote.engine.newest(most, pushed), pushed)[:most]
        handles = np.array(self._numbers(self._visible(ids)), dtype=np.int64)
        if pushed != only:
            handles = handles[np.isin(handles, self.meeting(np.unique(handles), only))]
        return handles[:depth]

    def matches(self, words: Iterable[str], only: Constraints | None = None) -> Matches:
        """The server's count of documents that have any of the words."""
        if self.is_closed:
            return Matches(0, {}, {})
        engine, pushed = cast(CountedEngine, self.remote.engine), self._counted(only)
        terms = list(rarest(dict.fromkeys(words, 1.0), self.tally.code_of))
        if not terms:
            return self._all_matches(pushed)
        return self.remote.find(lambda: engine.having(terms, pushed), pushed)

    def text_matches(self, text: str, only: Constraints | None = None) -> Matches:
        """The server's count of documents that its own search finds."""
        if self.is_closed:
            return Matches(0, {}, {})
        pushed = self._counted(only)
        if not text.strip():
            return self._all_matches(pushed)
        return self.remote.find(lambda: self.remote.engine.matches(text, pushed), pushed)

    def _all_matches(self, pushed: Constraints) -> Matches:
        """The count for a search without words: the documents that meet the constraints, without facets."""
        return Matches(self.remote.find(lambda: self.remote.engine.documents(pushed), pushed), {}, {})

    def _counted(self, only: Constraints | None) -> Constraints:
        pushed = self._pushed(only)
        if pushed != replace(only or ANY, readers=self.readers):
            raise CannotNarrow("its engine counts by words, types and dates alone")
        return pushed

    def beginning(self, prefix: str, limit: int | None = None) -> list[tuple[str, int]]:
        """Counted terms with this prefix; none if documents are hidden from the searcher, since those may
        have the terms."""
        if not self.is_own:
            return []
        terms, counts = self.tally.statistics(("text.having",))
        pairs = zip(terms.tolist(), counts["text.having"].tolist(), strict=True)
        return sorted(
            ((term, count) for term, count in pairs if term.startswith(prefix)), key=lambda each: -each[1]
        )[:limit]

    def _pushed(self, only: Constraints | None) -> Constraints:
        """The constraints that the server applies: types and dates, if it has fields for them, and who may
        see a document. The others are checked here, in texts."""
        if only is None:
            return replace(ANY, readers=self.readers)
        pushed = replace(only, phrases=(), prefixes=(), without=(), readers=self.readers)
        at = self.remote.engine.location
        if (pushed.types or pushed.other_types) and not at.type:
            raise CannotNarrow("its engine has no types of documents (type in [engine])")
        if (pushed.since, pushed.until) != (None, None) and not at.date:
            raise CannotNarrow("its engine has no dates of documents (date in [engine])")
        return pushed

    def cosines(self, handles: IntArray, vector: Vectors) -> FloatArray:
        """All −inf: no document has a vector here."""
        return np.full(len(handles), -np.inf)

    def vectors(self, handles: IntArray) -> Vectors:
        """Rows of width 0: no document has a vector here."""
        return np.zeros((len(handles), 0), dtype=np.float32)

    def best_span(self, handle: int, vector: Vectors) -> Span | None:
        """None: documents are not split into passages."""
        return None


class AttachedEngine:
    """See `Engine`; documents are never written. `counted` says whether terms of all documents are counted
    (level *full*)."""

    def __init__(self, folder: Path, engine: RemoteEngine, *, counted: bool, language: str = "") -> None:
        self.remote, self.is_counted = Remote(engine), counted
        self._file = folder / "tally"
        tally = self._saved() if counted else DocumentTally()
        self._counted_at, self._took = 0.0, 0.0
        self._looked = -LOOK
        self.encoder = ""
        self.wasted, self.wasted_since = 0, 0.0  # deleted documents take no space here
        self.reader = AttachedReader(self.remote, tally, len(tally), language)
        self.remote.reserve(tally.last + 1)
        self._next = self.reader
        self._lock = threading.Lock()
        self.renew_hidden: Callable[[], None] = lambda: None
        """Called before every check of the server; updates which documents `remote` hides."""

    def _saved(self) -> DocumentTally:
        try:
            return DocumentTally.load(self._file)
        except DataError:  # absent or damaged: documents are counted again
            return DocumentTally()

    @property
    def noun(self) -> str:
        """The engine's product name, for messages."""
        return self.remote.engine.noun

    @property
    def is_ready(self) -> bool:
        """Whether statistics of all documents are available, or will never be."""
        return not self.is_counted or bool(self.reader.tally.version)

    def maintain(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Count all documents if they have changed. Returns whether they had; False also if the server does
        not answer."""
        now = time.monotonic()
        if now - self._looked < (REST if self.remote.problem else LOOK):
            return False
        self._looked = now
        try:
            return self._look(now, stopped)
        except RemoteProblem as error:  # not about a query: the engine cannot be searched as configured
            if self.remote.problem != str(error):
                _log.warning("%s", error)
            self.remote.problem = str(error)
            return False
        except (ServiceError, Interrupted):
            return False

    def forget(self, ids: Iterable[str]) -> None:
        """Drop hidden documents from what is stored here, on disk too. Their words stay in the totals until
        the next count of all documents, which is made due."""
        self.remote.forget(ids)
        with self._lock:
            tally = self.reader.tally.without(self.remote.is_hidden)
            if self.is_counted and tally is not self.reader.tally:
                tally.save(self._file)
            self._took = 0.0
            self._next = self.reader = replace(self.reader, tally=tally, documents=len(tally))

    def _look(self, now: float, stopped: Callable[[], bool]) -> bool:
        self.renew_hidden()
        if not self.is_counted:
            documents = self.remote.ask(self.remote.engine.documents)
            self._next = replace(self.reader, documents=documents)
            return documents != len(self.reader)
        version = self.remote.ask(self.remote.engine.version)
        version += f", {self.remote.hidden} hidden" if self.remote.hidden else ""
        tally = self.reader.tally
        is_due = version != tally.version and now - self._counted_at > SHARE * self._took
        if not is_due and now - self._counted_at < DAY:
            return False
        tally = self._count(version, stopped)
        self._counted_at, self._took = time.monotonic(), time.monotonic() - now
        with self._lock:
            tally = tally.without(self.remote.is_hidden)  # documents erased during the count
            tally.save(self._file)
            self._next = replace(self.reader, tally=tally, documents=len(tally))
        _log.info("counted %s documents of %s", f"{len(tally):,}", self.noun)
        return True

    def _count(self, version: str, stopped: Callable[[], bool]) -> DocumentTally:
        first = self.remote.reserve(self.reader.tally.last + 1)
        language, before = self.reader.language, self.reader.tally
        batches = self.remote.scan()
        tally = self.remote.ask(
            lambda: count_all(
                batches, before, version=version, language=language, first=first, stopped=stopped
            )
        )
        self.remote.reserve(tally.last + 1)
        return tally

    def refresh(self) -> None:
        """Make the last count visible to new readers."""
        self.reader = self._next

    @property
    def encoded(self) -> int:
        """The number of all documents: vectors are the server's concern."""
        return len(self.reader)

    def unencoded(self, limit: int) -> IntArray:
        """Always empty."""
        return np.empty(0, dtype=np.int64)

    def unfinished(self) -> dict[int, set[Span]]:
        """Always empty."""
        return {}

    def recode(
        self, name: str, width: int, batches: Iterable[Encoded] | None = None, *, keep: bool = True
    ) -> None:
        """Use another encoder for queries from now on; width 0 for none."""
        self.encoder = name if width else ""

    def _refused(self, *arguments: Any, **named: Any) -> None:
        """Raise a ServiceError: the external engine is only read."""
        raise ServiceError(f"documents are in {self.noun}, which is only read")

    apply = encode = rebuild = _refused

    def close(self) -> None:
        """Close the connections."""
        self.remote.engine.close()
