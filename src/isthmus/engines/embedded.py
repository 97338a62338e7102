"""The engine inside a node: tantivy proposes candidates, rows count their terms exactly, vectors beside them.

    manifest.json          which parts of the files below are valid; replaced whole once they are on disk
    generation-000001/     tantivy's index and the rows (`rows`)
    vectors-9f2c…/         vectors of one encoder (`vectors`)

Rows are forced to disk, then tantivy commits, then the manifest is replaced. After a kill at any point the
manifest is that of an earlier batch: rows beyond it are cut off, documents of tantivy without a row are
ignored, and the store is asked for the same changes again. A failed write is handled in the same way: the
engine reopens what the manifest names before it writes again. A document's handle is the number of the change
that wrote it.

tantivy scores with its own constants, rounded lengths and its own document frequencies; boosts of the terms
bring in the requested weights. Its result is a superset of the best documents, which exact scores then order.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Span, Vectors
from isthmus.engines.engine import (
    ANY,
    BY_FIELD,
    FIELDS,
    MOST_FACETS,
    Change,
    Constraints,
    Counted,
    Encoded,
    Matches,
    WordCounts,
    year_of,
)
from isthmus.engines.rows import Mask, Rows, RowsView, Texts
from isthmus.engines.terms import STOP
from isthmus.engines.vector_folders import VectorFolders
from isthmus.engines.vectors import EXACT, VectorReader
from isthmus.errors import DataError
from isthmus.files import replacing
from isthmus.languages import analysis_name

_log = logging.getLogger("isthmus.engines")

FORMAT = 7
HEAP = 64_000_000
"""Bytes that tantivy buffers before it writes a segment."""
OVERFETCH, LEAST_FETCHED, MOST_FETCHED = 3, 100, 1 << 14
"""Candidates fetched for each one wanted, with their minimum and maximum; beyond the factor only if scores
tie."""
MOST_COUNTED = 1 << 20
"""Maximum of candidates times terms of a query if more are fetched: terms are counted in each candidate."""
FACETS = {
    "count": {"value_count": {"field": "change"}},
    "type": {"terms": {"field": "type", "size": 20 * MOST_FACETS}},
    "year": {"terms": {"field": "year", "size": 20 * MOST_FACETS}},
}
MANIFEST = "manifest.json"
CURE = "the index is left as it is; see to the file system, its permissions and the limit of open files"
_SYSTEM_ERROR = re.compile(r"Os \{ code: (\d+)")
PARTS = ("terms", "terms", "stops", "stops")
"""The fields for content terms of title and body, then for their stop words; no phrase spans two texts of a
field."""
LAST = (1 << 63) - 1
"""The largest possible change number."""
EVERY = "1"
"""A term that every document has: its document frequency is the N that fits tantivy's other frequencies."""
OPEN = "*"
"""Stands for the principals of a document that names none."""
MOST_SEEN = 64
"""Maximum number of sets of principals whose readers are cached."""
COMPARED = 1 << 16
"""Documents whose vectors are compared in one step."""


@dataclass(frozen=True, eq=False)
class EmbeddedReader:
    """The documents of one commit: see `EngineReader`."""

    view: RowsView
    searcher: Any
    schema: Any
    dense: VectorReader | None
    change: int
    """The number of the last change, even if nothing of it is left."""
    seen: Any = None
    """tantivy's query for the documents that the searcher may see, which are those of `view`; None for all.
    With such a query, all matching documents are candidates and vectors are compared one by one, because a
    preselection by tantivy or by the vector graph would depend on the other documents too."""

    def __len__(self) -> int:
        return self.view.living

    @property
    def lengths(self) -> dict[str, int]:
        """Content terms of all documents, by field."""
        return dict(zip(FIELDS, self.view.field_lengths.tolist(), strict=True))

    @property
    def vocabulary(self) -> object:
        """The vocabulary that assigns codes to words: the same object for readers with the same codes."""
        return self.view.vocabulary

    @cached_property
    def _every(self) -> int:
        return int(self.searcher.doc_freq("every", EVERY))

    @property
    def has_rules(self) -> bool:
        return int(self.searcher.doc_freq("allow", OPEN)) < self._every

    is_own = True

    @cached_property
    def _seen_by(self) -> dict[frozenset[str], EmbeddedReader]:
        return {}

    def seen_by(self, principals: frozenset[str]) -> EmbeddedReader:
        from tantivy import Query

        known = self._seen_by.get(principals)
        if known is None:
            named = Query.term_set_query(self.schema, "allow", sorted({*principals, OPEN}))
            only = replace(self, seen=Query.const_score_query(named, 0.0))
            known = replace(only, view=self.view.limited(self.view.rows(only._all(named))))
            if len(self._seen_by) >= MOST_SEEN:
                self._seen_by.clear()
            self._seen_by[principals] = known
        return known

    def _all(self, query: Any, only: Constraints | None = None, most: int | None = None) -> IntArray:
        """At most `most` documents of a query that meet constraints and may be seen, ascending."""
        limit = self.searcher.num_docs if most is None else most
        constrained = self._constrained(query, only or ANY)
        return self._handles(self.searcher.search(constrained, max(limit, 1), count=False).hits)

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints | None = None) -> IntArray:
        query = self._query(weights)
        if query is None or depth < 1:
            return np.empty(0, dtype=np.int64)
        if self.seen is not None:
            return self._having(weights, only)
        if only is not None:
            query = self._constrained(query, only)
        limit = max(OVERFETCH * depth, LEAST_FETCHED)
        most = min(MOST_FETCHED, MOST_COUNTED // len(weights))
        while True:
            hits = self.searcher.search(query, limit, count=False).hits
            if len(hits) < limit or limit >= most or hits[-1][0] < hits[depth - 1][0]:
                break
            limit = min(4 * limit, most)
        return self._handles(hits)

    def _having(self, weights: Mapping[str, float], only: Constraints | None = None) -> IntArray:
        """All documents with any of the words. If that is too many to count, only the half of the words with
        the largest weights is used, and so on; for a single word, the latest documents."""
        most, words = MOST_COUNTED // len(weights), sorted(weights, key=lambda word: (-weights[word], word))
        while (query := self._query({word: weights[word] for word in words})) is not None:
            handles = self._all(query, only, most + 1 if len(words) > 1 else None)
            if len(handles) <= most or len(words) == 1:
                return handles[-most:]
            words = words[: len(words) // 2]
        return np.empty(0, dtype=np.int64)

    def _handles(self, hits: Sequence[tuple[float, Any]]) -> IntArray:
        """The documents of hits, ascending, without those of a batch that was never acknowledged."""
        values = self.searcher.fast_field_values("change", [address for _, address in hits])
        changes = np.array(values, dtype=np.int64)
        changes.sort()
        is_known = self.view.rows(changes) >= 0
        is_known[1:] &= changes[1:] != changes[:-1]
        return changes[is_known]

    def meeting(self, handles: IntArray, only: Constraints) -> IntArray:
        from tantivy import Query

        if not len(handles):
            return handles
        named = Query.term_set_query(self.schema, "change", handles.tolist())
        limit = 2 * len(handles)  # an unacknowledged change may be indexed twice
        return self._handles(self.searcher.search(self._constrained(named, only), limit, count=False).hits)

    def _constrained(self, query: Any, only: Constraints) -> Any:
        """Add constraints to a query; they do not change its scores."""
        from tantivy import Occur, Query

        wanted = [self._phrase(words) for words in only.phrases]
        wanted += [Query.regex_query(self.schema, "terms", re.escape(text) + ".*") for text in only.prefixes]
        parts = [(Occur.Must, query), *((Occur.Must, Query.const_score_query(each, 0.0)) for each in wanted)]
        parts += [(Occur.MustNot, self._phrase(words)) for words in only.without]
        if only.types:
            parts.append((Occur.Must, Query.const_score_query(self._of_types(only.types), 0.0)))
        if only.other_types:
            parts.append((Occur.MustNot, self._of_types(only.other_types)))
        if only.since is not None or only.until is not None:
            parts.append((Occur.Must, Query.const_score_query(self._dated(only), 0.0)))
        if self.seen is not None:
            parts.append((Occur.Must, self.seen))
        return Query.boolean_query(parts)

    def _of_types(self, types: Sequence[str]) -> Any:
        from tantivy import Query

        return Query.term_set_query(self.schema, "type", list(types))

    def _dated(self, only: Constraints) -> Any:
        from tantivy import FieldType, Query

        bounds = (only.since, only.until, True, only.until is None)
        return Query.range_query(self.schema, "date", FieldType.Integer, *bounds)

    def _phrase(self, words: Sequence[str]) -> Any:
        from tantivy import Query

        terms: list[Any] = [word for word in words if not word.startswith(STOP)]
        field = "terms" if terms else "stops"
        terms = terms or [word[len(STOP) :] for word in words]
        if len(terms) < 2:
            return Query.term_query(self.schema, field, terms[0], "basic") if terms else Query.empty_query()
        return Query.phrase_query(self.schema, field, terms)

    def _query(self, weights: Mapping[str, float]) -> Any:
        from tantivy import Occur, Query

        parts = []
        for word, weight in weights.items():
            field, text = ("stops", word[len(STOP) :]) if word.startswith(STOP) else ("terms", word)
            having = self.searcher.doc_freq(field, text)
            if having and weight > 0:
                own = math.log1p((self._every - having + 0.5) / (having + 0.5))
                term = Query.term_query(self.schema, field, text, "freq")
                parts.append((Occur.Should, Query.boost_query(term, weight / own)))
        return Query.boolean_query(parts) if parts else None

    def nearest(self, vector: Vectors, depth: int, only: Constraints | None = None) -> IntArray:
        from tantivy import Query

        if self.dense is None:
            return np.empty(0, dtype=np.int64)
        if self.seen is not None:
            meeting = self.handles() if only is None else self._all(Query.all_query(), only)
            return self._nearest_among(meeting, vector, depth)
        if only is not None:
            return self._nearest_of(vector, depth, only)
        changes = self.dense.search(vector, depth)[0].astype(np.int64)
        return changes[self.view.rows(changes) >= 0]

    def _nearest_of(self, vector: Vectors, depth: int, only: Constraints) -> IntArray:
        """The nearest documents under constraints. If few documents meet these, all of them are compared;
        otherwise the nearest of all documents are filtered, up to `MOST_FETCHED`."""
        assert self.dense is not None
        meeting = self.newest(EXACT + 1, only)
        if len(meeting) <= EXACT:
            return self._nearest_among(meeting, vector, depth)
        limit = OVERFETCH * depth
        while True:
            near = self.nearest(vector, limit)
            chosen = near[np.isin(near, self.meeting(near, only))]
            if len(chosen) >= depth or len(near) < limit or limit >= MOST_FETCHED:
                return chosen[:depth]
            limit = min(4 * limit, MOST_FETCHED)

    def _nearest_among(self, handles: IntArray, vector: Vectors, depth: int) -> IntArray:
        """The nearest of the given documents, all of which are compared; of equal cosines the later ones."""
        parts = np.array_split(handles, len(handles) // COMPARED + 1)
        cosines = np.concatenate([self.cosines(part, vector) for part in parts])
        order = np.lexsort((handles, cosines))[::-1]
        nearest: IntArray = handles[order[np.isfinite(cosines[order])][:depth]]
        return nearest

    def newest(self, depth: int, only: Constraints) -> IntArray:
        from tantivy import Query

        if depth < 1 or not len(self):
            return np.empty(0, dtype=np.int64)
        query = self._constrained(Query.all_query(), only)
        limit = depth if self.seen is None else self.searcher.num_docs  # tantivy orders equal dates by hidden
        hits = self.searcher.search(query, limit, count=False, order_by_field="date").hits  # documents too
        values = self.searcher.fast_field_values("change", [address for _, address in hits])
        if self.seen is not None:
            dates = [-math.inf if date is None else date for date, _ in hits]
            values = np.array(values, dtype=np.int64)[np.lexsort((values, dates))[::-1]][:depth].tolist()
        changes = np.array(list(dict.fromkeys(values)), dtype=np.int64)
        return changes[self.view.rows(changes) >= 0]

    def matches(self, words: Iterable[str], only: Constraints | None = None) -> Matches:
        from tantivy import Query

        weights = dict.fromkeys(words, 1.0)
        query = self._query(weights) if weights else Query.all_query()
        if query is None:
            return Matches(0, {}, {})
        if only is not None or self.seen is not None:
            query = self._constrained(query, only or ANY)
        counted = self.searcher.aggregate(query, FACETS)
        types, years = (
            sorted((-int(each["doc_count"]), each["key"]) for each in counted[name]["buckets"])[:MOST_FACETS]
            for name in ("type", "year")
        )
        by_type, by_year = {key: -n for n, key in types}, {int(key): -n for n, key in years}
        return Matches(int(counted["count"]["value"]), by_type, by_year)

    def beginning(self, prefix: str, limit: int | None = None) -> list[tuple[str, int]]:
        if self.seen is None:
            terms: list[tuple[str, int]] = self.searcher.terms_with_prefix("terms", prefix, limit=limit)
            return terms
        words = [word for word, _ in self.searcher.terms_with_prefix("terms", prefix)]
        having = self.view.tables(words, self._totals)[BY_FIELD[0]].astype(int).tolist()
        seen = sorted((-count, word) for word, count in zip(words, having, strict=True) if count)
        return [(word, -count) for count, word in seen[:limit]]

    @cached_property
    def _totals(self) -> IntArray:
        """Counts of words over the documents that may be seen."""
        return self.view.totals if self.seen is None else self.view.summed(np.flatnonzero(self.view.alive))

    def cosines(self, handles: IntArray, vector: Vectors) -> FloatArray:
        if self.dense is None:
            return np.full(len(handles), -np.inf)
        return self.dense.cosines(handles.astype(np.uint64), vector)

    def vectors(self, handles: IntArray) -> Vectors:
        if self.dense is None:
            return np.zeros((len(handles), 0), dtype=np.float32)
        return self.dense.first_vectors(handles.astype(np.uint64))

    def best_span(self, handle: int, vector: Vectors) -> Span | None:
        return None if self.dense is None else self.dense.best_span(handle, vector)

    def counts(self, handles: IntArray, words: Sequence[str]) -> WordCounts:
        return self.view.word_counts(self.view.rows(handles), words)

    def tables(self, words: Sequence[str]) -> dict[str, FloatArray]:
        if self.seen is None or "_totals" in vars(self):
            return self.view.tables(words, self._totals)
        query = self._query(dict.fromkeys(words, 1.0))
        handles = np.empty(0, dtype=np.int64) if query is None else self._all(query)
        if len(handles) * len(words) > MOST_COUNTED:
            return self.view.tables(words, self._totals)
        return self.counts(handles, words).totals()

    def ids(self, handles: IntArray) -> list[str]:
        return self.view.names(self.view.rows(handles))

    def handles(self) -> IntArray:
        return self.view.changes[self.view.alive]

    def changed_after(self, change: int) -> int:
        return int(self.view.alive[np.searchsorted(self.view.changes, change, side="right") :].sum())

    def terms(self, handles: IntArray) -> Counted:
        return self.view.counted(self.view.rows(handles))

    def words(self, first: int = 0) -> list[str]:
        words: list[str] = self.view.vocabulary.words(first, self.view.totals.shape[1]).to_pylist()
        return words

    def statistics(
        self, names: Sequence[str], handles: IntArray | None = None
    ) -> tuple[Ids, Mapping[str, IntArray]]:
        totals = self._totals if handles is None else self.view.summed(self.view.rows(handles))
        return self.view.statistics(names, totals)


class Generation:
    """tantivy's index and the rows of the same documents, in a folder of their own."""

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        import tantivy

        if not state["files"]:
            shutil.rmtree(folder, ignore_errors=True)
        (folder / "tantivy").mkdir(parents=True, exist_ok=True)
        self.rows = Rows(folder, bytes.fromhex(state["key"]), state["files"])
        self.schema = _schema()
        self.before: int = state["change"]
        self.commit: int = state["commit"]
        self._tantivy = tantivy.Index(self.schema, path=str(folder / "tantivy"))
        self._tantivy.config_reader("manual")
        self._writer: Any = None
        documents = self._tantivy.searcher().num_docs
        last = json.loads((folder / "tantivy" / "meta.json").read_text(encoding="utf-8"))["opstamp"]
        if last < self.commit or (last == self.commit and documents < self.rows.view.living):
            raise DataError("lacks documents that it had", file=folder / "tantivy")
        # whether there are documents of a batch that was never acknowledged
        self._orphans = last > self.commit or documents != self.rows.view.living

    @property
    def change(self) -> int:
        """The number of the last change. Removed documents have rows too, except those gone before this
        generation."""
        changes = self.rows.view.changes
        return max(self.before, int(changes[-1]) if len(changes) else 0)

    def append(self, changes: Sequence[Change]) -> IntArray:
        """Write changes to disk. Returns the handles of the versions that they remove or replace."""
        from tantivy import Query

        if self._writer is None:
            self._writer = self._tantivy.writer(HEAP, 1)
            # a killed process may have left files of a commit whose number, and so file names, will be reused
            self._writer.garbage_collect_files()
        if self._orphans:
            self._delete_later(self.change)
        before = self.rows.view
        gone = before.changes[self.rows.append(changes, self._index)]
        if len(gone):  # by query: a bare number would be read as signed and match no document
            named = Query.term_set_query(self.schema, "change", gone.tolist())
            self._writer.delete_documents_by_query(named)
        self.commit, self._orphans = self._writer.commit(), False
        return gone

    def _delete_later(self, change: int) -> None:
        """Delete documents of later changes from tantivy: those changes, or others in their place, are
        written again."""
        from tantivy import FieldType, Query

        later = Query.range_query(self.schema, "change", FieldType.Unsigned, change + 1, LAST)
        self._writer.delete_documents_by_query(later)

    def _index(self, changes: Sequence[Change], texts: Texts, living: Mask) -> None:
        """Add the living documents to tantivy's next commit."""
        from tantivy import Document

        for is_living, each, *parts in zip(living.tolist(), changes, *texts, strict=True):
            if is_living:
                document = Document()
                document.add_unsigned("change", each.change)
                document.add_text("every", EVERY)
                for principal in each.allow or (OPEN,):
                    document.add_text("allow", principal)
                if each.type:
                    document.add_text("type", each.type)
                if each.date is not None:
                    document.add_integer("date", each.date)
                    document.add_integer("year", year_of(each.date))
                for field, text in zip(PARTS, parts, strict=True):
                    if text:
                        document.add_text(field, text)
                self._writer.add_document(document)

    def reader(self, dense: VectorReader | None) -> EmbeddedReader:
        """A reader of everything that was committed."""
        self._tantivy.reload()
        return EmbeddedReader(self.rows.view, self._tantivy.searcher(), self.schema, dense, self.change)

    def abandon(self) -> None:
        """Close the files after a write that failed, without waiting for merges; readers stay usable."""
        self._writer = None
        self.rows.close()

    def close(self) -> None:
        """End merges and close the files; readers stay usable."""
        if self._writer is not None:
            self._writer.wait_merging_threads()
        self.abandon()


class EmbeddedEngine:
    """See `Engine`. Only one process may write at a time; readers can be used from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._vectors = VectorFolders(folder)
        self._reader: EmbeddedReader
        self._failed = False
        self._open_or_begin()
        self._forget_others()

    def _open_or_begin(self) -> None:
        """Open the files that the manifest names, or begin an empty index if they are damaged: the store has
        everything.

        Raises an OSError if files cannot be read for a reason other than damage.
        """
        try:
            self._open(self._manifest())
        except BaseException as error:  # a panic in tantivy is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise OSError(error.errno, f"{error.strerror} ({CURE})", error.filename) from error
            if (number := _SYSTEM_ERROR.search(str(error))) is not None:  # tantivy raises ValueErrors
                raise OSError(int(number[1]), f"{error} ({CURE})", str(self.folder)) from error
            _log.warning("index %s is built again from the store: %s", self.folder, error)
            self._open(_fresh(1))

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        if not path.exists():
            return _fresh(1)
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["analysis"] != analysis_name():
            raise DataError("has another format or analysis of texts", file=path)
        return manifest

    def _open(self, state: dict[str, Any]) -> None:
        """Open what a manifest names; errors of damaged files are passed on."""
        folder = self._generation_folder(state["generation"])
        self._state, self._generation = state, Generation(folder, state)
        self._show()

    def _generation_folder(self, number: int) -> Path:
        return self.folder / f"generation-{number:06d}"

    @property
    def reader(self) -> EmbeddedReader:
        """The documents as they are now."""
        return self._reader

    @property
    def wasted(self) -> int:
        """Number of stored document versions that were removed or replaced."""
        return len(self._reader.view.changes) - len(self._reader)

    @property
    def wasted_since(self) -> float:
        """Unix time of the first change that left such a version."""
        return float(self._state["wasted_since"])

    @property
    def encoder(self) -> str:
        """The encoder of the vectors; "" without vectors."""
        return self._vectors.encoder

    def apply(self, changes: Sequence[Change]) -> None:
        """Write changes in ascending order; on disk and searchable on return."""
        if self._failed:
            self._open_again()
        new = [each for each in changes if each.change > self._reader.change]
        if new:
            try:
                gone = self._generation.append(new)
                if len(gone):
                    self._vectors.remove(gone)
                self._commit(self._generation, self._state)
            except BaseException:
                self._failed = True
                self._generation.abandon()
                raise

    def _open_again(self) -> None:
        """Reopen what the manifest names after a write that failed."""
        before = self._reader
        self._open(self._manifest())
        if self._reader.change == before.change:  # tantivy may already have deleted what the batch replaces
            self._reader = before
        self._failed = False

    def _commit(self, generation: Generation, state: Mapping[str, Any]) -> None:
        """Write a manifest that names what is on disk, then show it to readers."""
        view = generation.rows.view
        now = {**state, "files": generation.rows.states, "commit": generation.commit}
        if len(view.changes) > view.living:
            now["wasted_since"] = state["wasted_since"] or time.time()
        with replacing(self.folder / MANIFEST) as stream:
            stream.write(json.dumps(now).encode())
        self._state, self._generation = now, generation
        generation.rows.save_totals()
        self._show()

    def _show(self) -> None:
        self._reader = self._generation.reader(self._vectors.reader)

    @property
    def encoded(self) -> int:
        """Number of documents that have a vector of the encoder whose vectors are being added."""
        return self._vectors.encoded

    def unencoded(self, limit: int) -> IntArray:
        """The first `limit` documents without a vector of the encoder whose vectors are being added."""
        return self._vectors.unencoded(self._reader.handles())[:limit]

    def unfinished(self) -> dict[int, set[Span]]:
        """Some documents of which only part of the passages have vectors, with the spans that do."""
        known = self._vectors.unfinished()
        handles = np.array(list(known), dtype=np.int64)
        return {handle: known[handle] for handle in handles[self._reader.view.rows(handles) >= 0].tolist()}

    def encode(
        self,
        handles: IntArray,
        vectors: Vectors,
        spans: Sequence[Span],
        passages: Sequence[int] | None = None,
    ) -> None:
        """Add vectors to documents, one for every span of the body; documents that are gone are skipped."""
        there = np.flatnonzero(self._reader.view.rows(handles) >= 0)
        counts = np.ones(len(handles), np.int64) if passages is None else np.asarray(passages)
        chosen = [spans[at] for at in there.tolist()]
        self._vectors.add(handles[there], vectors[there], chosen, counts[there].tolist())
        self.refresh()

    def recode(
        self, name: str, width: int, batches: Iterable[Encoded] | None = None, *, keep: bool = True
    ) -> None:
        """Change to the vectors of another encoder: see `Engine`."""
        self._vectors.recode(name, width, batches, keep=keep)
        self.refresh()

    def refresh(self) -> None:
        """Show the current vectors to new readers; those of a new encoder once every document has one."""
        if self._vectors.is_changing and self._vectors.is_grown and not len(self.unencoded(1)):
            self._vectors.swap()
        self._reader = replace(self._reader, dense=self._vectors.reader)

    def maintain(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Do one piece of slow work on vectors. Returns whether there was any."""
        reader = self._reader

        def gone(handles: IntArray) -> IntArray:
            return handles[(handles <= reader.change) & (reader.view.rows(handles) < 0)]

        return self._vectors.maintain(gone, stopped)

    def rebuild(self, batches: Iterable[Sequence[Change]]) -> None:
        """Write all documents to a new generation, so that nothing remains of those that are gone."""
        old, number = self._generation, self._state["generation"] + 1
        state = _fresh(number, self._reader.change)
        fresh = Generation(self._generation_folder(number), state)
        for batch in batches:
            fresh.append(batch)
        fresh.rows.save_totals(always=True)
        self._vectors.compact()
        self._commit(fresh, state)
        if not self._failed:
            old.close()
        self._failed = False
        self._forget_others()

    def _forget_others(self) -> None:
        """Remove generations that were replaced or left by a killed process; readers that mapped one can
        still read it."""
        named = self._generation_folder(self._state["generation"])
        for path in self.folder.glob("generation-*"):
            if path != named:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Save the totals, which speed up the next start, and close all files."""
        if not self._failed:
            self._generation.rows.save_totals(always=True)
            self._generation.close()
        self._vectors.close()


def _fresh(generation: int, change: int = 0) -> dict[str, Any]:
    """The manifest of an empty index; `change` is the last change that its first documents will include.

    The random key is kept secret, so that nobody can construct names that collide. `commit` is the number of
    tantivy's commit.
    """
    key = secrets.token_hex(16)
    return {
        "format": FORMAT,
        "analysis": analysis_name(),
        "generation": generation,
        "key": key,
        "change": change,
        "commit": 0,
        "wasted_since": 0.0,
        "files": {},
    }


def _schema() -> Any:
    from tantivy import SchemaBuilder

    builder = SchemaBuilder()
    builder.add_unsigned_field("change", fast=True, indexed=True)
    builder.add_text_field("every", tokenizer_name="raw", index_option="basic")
    builder.add_text_field("allow", tokenizer_name="raw", index_option="basic")
    builder.add_text_field("type", tokenizer_name="raw", index_option="basic", fast=True)
    builder.add_integer_field("date", fast=True, indexed=True)
    builder.add_integer_field("year", fast=True)
    builder.add_text_field("terms", tokenizer_name="whitespace", index_option="position")
    builder.add_text_field("stops", tokenizer_name="whitespace", index_option="position")
    return builder.build()
