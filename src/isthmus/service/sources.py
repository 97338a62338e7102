"""Read a node's documents from folders of files, tables, BEIR collections and SQL queries.

A file that cannot be read is one DataError, which is passed to the caller, and reading goes on with the next.
A `SourceReport` counts these files, and files of kinds that are not read.

    folder   .txt .md .rst .html .pdf .docx .pptx .xlsx .eml below the path; the id is the path from there,
             with '/' between. Rows of a .csv, .tsv or .parquet are documents `path#id`
    table    one .csv, .tsv or .parquet, with ids of its own
    beir     corpus.jsonl, with ids of its own
    sql      rows of a query: id, title, body, or id and body

Fields `allow` and `subject` (`columns` names others) state who may see a document and the person it is about:
in a row, a line, a column of the query, the front matter of a .md, or `report.pdf.meta.json` beside a file. A
document without them follows the source's rules.

If another source already has an id, the id gets the name of its own source as prefix: `name:id`. Which source
has it without a prefix is decided once, by which one came first, and the store remembers it.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from isthmus.engines import principals_of, subject_of
from isthmus.errors import ConfigError, DataError, IsthmusError, MissingExtra, several
from isthmus.languages import AUTO, code_of, detect, usual
from isthmus.service.parsing import READERS, TABLES, FileText, Parser, ParsingLimits
from isthmus.service.redaction import redacted
from isthmus.service.row_files import Row
from isthmus.service.settings import OPERATOR, NodeSettings, Source, secret
from isthmus.service.stores import BATCH, Counts, DocumentStore, Draft, type_of
from isthmus.service.wire import LONGEST_ID
from isthmus.tables import records

Tell = Callable[[DataError], None]
Beside = dict[str, Any] | DataError
"""Fields in the file beside another (`.meta.json`), or the error if it cannot be read."""
Read = tuple[Path, Draft | DataError]
"""The path of a document, and the document or the error with it."""


class UnknownRule(DataError):
    """The statement of who may see a document is invalid: the document's earlier version is removed too."""


NAMED = 20
"""Most errors of which a report has the text."""
SIDECAR, LARGEST_SIDECAR = ".meta.json", 1 << 16
"""End of the name of a file that states who may see the file beside it, and its largest size in bytes."""

_log = logging.getLogger("isthmus.service")


@dataclass
class SourceReport:
    """Result of the last reading of a source."""

    source: str
    documents: int = 0
    """Documents of the source in the store."""
    unread: int = 0
    """Documents, files or rows that could not be read."""
    errors: list[str] = field(default_factory=list)
    """The first of these errors, with the reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Files of kinds that are not read, by suffix."""
    erased: int = 0
    """Documents left out because they were erased, although the source still has them."""
    failed: str = ""
    """Why nothing of the source could be read."""

    def __str__(self) -> str:
        line = f"{self.source}: {several(self.documents, 'document')}"
        if self.unread:
            line += f", {self.unread:,} could not be read"
        if self.skipped:
            kinds = ", ".join(
                f"{count:,} {suffix or 'no suffix'}" for suffix, count in self.skipped.most_common(8)
            )
            line += f", files of other kinds left alone: {kinds}"
        if self.erased:
            line += f", {self.erased:,} erased and left out"
        return line + (f"; failed: {self.failed}" if self.failed else "")

    def note(self, error: DataError) -> None:
        """Count a document that could not be read."""
        self.unread += 1
        if len(self.errors) < NAMED:
            self.errors.append(_without_text(error))


def _without_text(error: IsthmusError) -> str:
    """Return the problem and its place without text of the document: reports are read elsewhere."""
    if not isinstance(error, DataError):
        return " ".join(str(error).split())[:500]
    where = "" if error.file is None else f"{error.file}{f':{error.line}' if error.line else ''}: "
    return " ".join(f"{where}{error.problem}{f' ({error.cure})' if error.cure else ''}".split())[:500]


def read(
    source: Source, tell: Tell, limits: ParsingLimits | None = None, skipped: Counter[str] | None = None
) -> Iterator[Draft]:
    """Yield the documents of a source; `tell` is called with an error for each that cannot be read.

    `skipped` counts the files that are ignored, by suffix.
    """
    kinds = {"folder": _folder, "table": _table, "beir": _beir, "sql": _sql}
    settled = _Reading(tell, limits or ParsingLimits(), Counter() if skipped is None else skipped)
    for file, document in kinds[source.kind](source, settled):
        try:
            if isinstance(document, DataError):
                raise document
            document = _checked(document, file)
            if not document.allow:
                document = replace(document, allow=source.allowed(document.id))
            whole = (document.title, document.body)
            title, body = redacted(whole, source.redact)
            if (title, body) != whole:
                document = replace(document, title=title, body=body, original=whole)
            yield document
        except DataError as error:
            tell(error)


@dataclass(frozen=True)
class _Reading:
    """The callback for errors, the limits for a file, and the count of ignored files."""

    tell: Tell
    limits: ParsingLimits
    skipped: Counter[str]
    beside: Callable[[Path], Beside] = field(default_factory=lambda: lru_cache(1)(_beside))
    """Reads the file beside another, once for all its rows."""


def load_all(
    sources: tuple[Source, ...],
    store: DocumentStore,
    tell: Tell,
    limits: ParsingLimits | None = None,
    *,
    reports: list[SourceReport] | None = None,
    keep: bool = True,
) -> Counts:
    """Load every source. If one cannot be read, `tell` is called with an error and the next is loaded.

    Then documents that belong to none of them are removed, unless an operator has put them. `reports` gets
    one report for each source.
    """
    done, failed, every = Counts(), list[Source](), list[SourceReport]()
    for source in sources:
        others = {name for other in sources if other != source for name in (other.label, other.unnamed)}
        report = SourceReport(source.label)
        every.append(report)
        try:
            done += load(source, store, tell, limits, others=others, report=report, keep=keep)
        except IsthmusError as error:
            failed.append(source)
            report.failed = _without_text(error)
            tell(error if isinstance(error, DataError) else DataError(str(error)))
    counts = store.by_source()
    for source, report in zip(sources, every, strict=True):
        report.documents = counts.get(report.source, 0)
        if report.unread and not report.documents and not report.failed:
            report.failed = (
                f"none of its {several(report.unread, 'document')} can be read: {report.errors[0]}"
            )
            failed.append(source)
    done += Counts(removed=_forget(sources, failed, store))
    if reports is not None:
        reports[:] = every
    return done


def load(
    source: Source,
    store: DocumentStore,
    tell: Tell,
    limits: ParsingLimits | None = None,
    *,
    others: Collection[str] = (),
    report: SourceReport | None = None,
    keep: bool = True,
) -> Counts:
    """Update a store from a source: new and changed documents are written, those gone from it removed.

    Documents of a file that can no longer be read stay, unless the statement of who may see them may have
    changed too, or `keep` is false. `others` are the labels of other sources, which keep their ids.
    """
    seen, unread, placed = set[str](), set[str](), set[str]()
    report = report or SourceReport(source.label)

    def note(error: DataError) -> None:
        is_kept = error.file is not None and not isinstance(error, UnknownRule)
        if is_kept and source.path is not None and source.kind in ("folder", "table"):
            unread.add(_id(Path(str(error.file)), source.path))
        report.note(error)
        tell(error)

    def each() -> Iterator[Draft]:
        for draft in read(source, note, limits, report.skipped):
            if draft.id in seen:
                problem = f"the id {draft.id!r} is there twice in {source.label}"
                note(DataError(problem, cure="the first is used"))
                continue
            seen.add(draft.id)
            yield draft

    is_erased = store.blocked()

    def own() -> Iterator[Draft]:
        for draft in in_languages(_placed(each(), source, store, others, note), source.language):
            if is_erased(draft.id) or is_erased.subject(draft.subject):
                report.erased += 1
                continue
            placed.add(draft.id)
            yield draft

    done = store.put(own(), source=source.label)
    unread = unread if keep else set()
    unreadable = {name for id in unread for name in _names(id, source)}
    below = tuple(f"{name}{mark}" for name in unreadable for mark in "/#")
    if source.kind == "table" and "." in unread:  # the table itself is unread: keep all its rows
        below = ("",)
    return done + Counts(removed=store.retain(source.label, placed | unreadable, below=below))


def in_languages(drafts: Iterable[Draft], language: str = AUTO) -> Iterator[Draft]:
    """Yield documents with the code of their language: the given one, or the one detected in each.

    A document without a detectable language gets that of most of the first five hundred, or English.
    """
    code, rest, majority = code_of(language), iter(drafts), ""
    while batch := list(islice(rest, BATCH)):
        codes = [code] * len(batch)
        if code == AUTO:
            codes = detect(f"{draft.title}\n{draft.body}" for draft in batch)
            majority = majority or usual(codes)
        for draft, each in zip(batch, codes, strict=True):
            yield replace(draft, language=each or majority)


def _names(id: str, source: Source) -> list[str]:
    """Return the ids that a source's document may have: its own, or with the name of its source as prefix."""
    return [id, *(f"{prefix}:{id}" for prefix in source.prefixes)]


def _placed(
    drafts: Iterator[Draft], source: Source, store: DocumentStore, others: Collection[str], tell: Tell
) -> Iterator[Draft]:
    """Yield the documents under ids that no other source has."""
    own, used = (source.label, source.unnamed), set[str]()
    while batch := list(islice(drafts, BATCH)):
        owners = store.owners(name for draft in batch for name in _names(draft.id, source))
        for draft in batch:
            bare, *behind = _names(draft.id, source)
            before = next((name for name in behind if owners.get(name) in own), None)
            free = (name for name in (bare, behind[0]) if owners.get(name) not in others)
            id = before or next((name for name in free if name not in used and len(name) <= LONGEST_ID), None)
            if id is None:
                other = owners.get(bare, source.label)
                problem = (
                    f"{draft.id!r} of {source.label} is an id of {other}, and {behind[0]!r} cannot be one"
                )
                tell(DataError(problem, cure="give the source another name"))
                continue
            used.add(id)
            yield draft if id == draft.id else replace(draft, id=id)


def _forget(sources: Collection[Source], failed: Collection[Source], store: DocumentStore) -> int:
    """Remove the documents of sources that the configuration no longer names; returns how many.

    Nothing is removed while a source without documents cannot be read: it may be the same source under
    another path.
    """
    counts = store.by_source()
    named = {source.label for source in sources} | {source.unnamed for source in failed}
    gone = _of_sources(counts, named)
    if not gone:
        return 0
    new = [source.label for source in failed if not {source.label, source.unnamed} & set(counts)]
    if new:
        _log.warning(
            "%s are kept, though not named, until %s can be read", _counts_text(gone), ", ".join(new)
        )
        return 0
    _log.warning("removed, because the configuration no longer names their source: %s", _counts_text(gone))
    return sum(store.retain(label, ()) for label in gone)


def _of_sources(counts: Mapping[str, int], named: Collection[str] = ()) -> dict[str, int]:
    """Count documents by source, for sources with other labels; an operator's have no source."""
    return {label: count for label, count in counts.items() if label not in (*named, OPERATOR, "")}


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{several(count, 'document')} of {label}" for label, count in counts.items())


def check_sources(settings: NodeSettings, store: DocumentStore) -> None:
    """Raise ConfigError if there is no source although there were some, unless the settings say so."""
    gone = _of_sources(store.by_source())
    if gone and not settings.sources and not settings.forget_sources:
        raise ConfigError(
            f"the configuration names no source, but the store has {_counts_text(gone)}",
            key="sources",
            expected="the source, or forget_sources = true to remove its documents",
        )


def _folder(source: Source, reading: _Reading) -> Iterator[Read]:
    root = _path(source)
    if not root.is_dir():
        raise DataError("is not a folder", file=root, cure="check the source's path")
    with Parser(reading.limits, within=root, columns=source.columns) as parser:
        for path, parsed in parser.parse_all(_files(root, reading)):
            if isinstance(parsed, DataError):
                yield path, _unruled(parsed, path)
            elif isinstance(parsed, Row):
                name = f"{_id(path, root)}#{parsed.id}"
                yield root / name, _ruled(_row(name, parsed, path), parsed, reading.beside(path), path)
            else:
                texts, id = (parsed.title, parsed.body), _id(path, root)
                type = "" if type_of(id) else path.suffix[1:].lower()  # a file's name may have many dots
                draft = Draft(id, *texts, type=type, date=parsed.date, modified=_modified(path))
                yield path, _ruled(draft, parsed, reading.beside(path), path)


def _table(source: Source, reading: _Reading) -> Iterator[Read]:
    path = _path(source)
    if path.suffix.lower() not in TABLES:
        raise DataError(
            "is not a table", file=path, cure=f"a source of kind table is one of {', '.join(TABLES)}"
        )
    if not path.is_file():
        raise DataError("there is no such file", file=path, cure="check the source's path")
    with Parser(reading.limits, within=path.parent, columns=source.columns) as parser:
        for _, parsed in parser.parse_all([path]):
            if isinstance(parsed, Row):
                draft = _row(parsed.id, parsed, path)
                yield path / parsed.id, _ruled(draft, parsed, reading.beside(path), path)
            elif isinstance(parsed, DataError):
                yield path, _unruled(parsed, path)


def _files(root: Path, reading: _Reading) -> Iterator[Path]:
    """Yield files of readable kinds below a folder, in order; hidden ones and links out of it are ignored."""

    def refused(error: OSError) -> None:
        problem = f"cannot be listed: {error.strerror or error}"
        reading.tell(DataError(problem, file=error.filename, cure="check who may read the folder"))

    for folder, folders, files in os.walk(root, onerror=refused):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if (
                name.startswith(".")
                or not path.is_file()
                or not path.resolve().is_relative_to(root.resolve())
            ):
                continue
            if (suffix := path.suffix.lower()) in READERS or suffix in TABLES:
                yield path
            elif not name.endswith(SIDECAR):
                reading.skipped[suffix] += 1


class Watch:
    """Detects that files of sources have changed since they were read and are no longer being written."""

    def __init__(self) -> None:
        self._read = self._seen = frozenset[tuple[str, int, int]]()
        self._next = 0.0

    def begin(self, sources: Collection[Source]) -> None:
        """Record the state of the files, just before they are read."""
        self._read = self._seen = _stamps(sources)

    def has_changed(self, sources: Collection[Source], every: float) -> bool:
        """Whether the files differ from those read, and were the same at two checks `every` seconds apart."""
        if not every or time.monotonic() < self._next:
            return False
        before, self._seen = self._seen, _stamps(sources)
        self._next = time.monotonic() + every
        return before == self._seen != self._read


def _stamps(sources: Collection[Source]) -> frozenset[tuple[str, int, int]]:
    """Return path, time and size of every file of the sources; a database has none."""
    stamps, reading = set(), _Reading(lambda error: None, ParsingLimits(), Counter())
    for source in sources:
        if source.path is None:
            continue
        is_folder = source.kind == "folder"
        for file in (
            _files(source.path, reading) if is_folder else (source.path / "corpus.jsonl", source.path)
        ):
            for path in (file, _sidecar(file)):
                with suppress(OSError):
                    status = path.stat()
                    stamps.add((str(path), status.st_mtime_ns, status.st_size))
    return frozenset(stamps)


def _row(id: str, row: Row, path: Path) -> Draft:
    """Convert a row to a document of the table's type, with the table's date if it has none of its own."""
    kind = path.suffix[1:].lower()
    return Draft(id, row.title, row.body, type=kind, date=row.date, modified=_modified(path))


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + SIDECAR)


def _beside(path: Path) -> Beside:
    """Read who may see a file, and the person it is about, from the file beside it; {} if there is none."""
    beside = _sidecar(path)
    if not os.path.lexists(beside):
        return {}
    try:
        if beside.is_symlink():
            raise ValueError("a link")
        with beside.open("rb") as stream:
            fields = json.loads(stream.read(LARGEST_SIDECAR))
        return {name: fields[name] for name in ("allow", "subject") if fields.get(name) not in (None, "", [])}
    except (OSError, ValueError, AttributeError, RecursionError):
        cure = 'it is JSON of at most 64 kB: {"allow": ["group:doctors"], "subject": "4711"}'
        return UnknownRule(f"{beside.name} beside it cannot be read", file=path, cure=cure)


def _ruled(draft: Draft, text: FileText | Row, beside: Beside, path: Path) -> Draft | DataError:
    """Add who may see a file or a row, and the person it is about. The file beside it takes precedence over a
    file's front matter, and a row's own fields over the file beside it."""
    if isinstance(beside, DataError):
        return beside
    own = {name: each for name, each in (("allow", text.allow), ("subject", text.subject)) if each}
    stated = beside | own if isinstance(text, Row) else own | beside
    return _accessible(draft, stated.get("allow"), stated.get("subject"), path)


def _unruled(error: DataError, path: Path) -> DataError:
    """Return the error for a file, as an UnknownRule if there is a file beside it: that may have changed who
    may see the documents read before."""
    if not os.path.lexists(_sidecar(path)):
        return error
    return UnknownRule(error.problem, file=error.file, line=error.line, text=error.text, cure=error.cure)


def _accessible(draft: Draft, allow: object, subject: object, path: Path) -> Draft | DataError:
    """Return a document with its principals and subject; an UnknownRule if the source's statement of them is
    invalid."""
    try:
        return replace(draft, allow=principals_of(allow), subject=subject_of(subject))
    except ValueError as error:
        return UnknownRule(f"{draft.id}: {error}", file=path, cure="correct it")


def _modified(path: Path) -> int | None:
    """Return the time at which a file was last written; None if it is gone since it was read."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return None


def _id(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _path(source: Source) -> Path:
    if source.path is None:
        raise DataError(f"a source of kind {source.kind} without a path")
    return source.path


def _checked(draft: Draft, file: Path) -> Draft:
    if len(draft.id) > LONGEST_ID:
        raise DataError(f"an id of {len(draft.id)} characters", file=file, cure=f"at most {LONGEST_ID}")
    if not draft.id or any(ord(sign) < 32 or ord(sign) == 127 for sign in draft.id):
        raise DataError("an id that is empty or has control characters", file=file, cure="rename it")
    if not draft.title.strip() and not draft.body.strip():
        raise DataError("has no text", file=file)
    return draft


def _beir(source: Source, reading: _Reading) -> Iterator[Read]:
    path = _path(source)
    file = next((at for name in ("corpus.jsonl", "corpus.jsonl.gz") if (at := path / name).exists()), path)
    for record in records(file):
        if source.part is None or record.silo == source.part:
            allow, subject = (record.metadata.get(name) for name in _access_fields(source))
            yield file, _accessible(Draft(record.id, record.title, record.text), allow, subject, file)


def _access_fields(source: Source) -> tuple[str, str]:
    """Return the names of the fields for who may see a document, and for the person it is about."""
    columns = source.columns
    return (columns and columns.allow) or "allow", (columns and columns.subject) or "subject"


def _sql(source: Source, reading: _Reading) -> Iterator[Read]:
    url = secret(source.url, "sources.url")
    rows = _sqlite_rows(url, source.query) if url.startswith("sqlite:") else _postgres_rows(url, source.query)
    names = [each.lower() for each in next(rows)]
    places = [names.index(name.lower()) if name.lower() in names else -1 for name in _access_fields(source)]
    for number, values in enumerate(rows, 1):
        where = Path(f"row {number}")
        allow, subject = (values[at] if at >= 0 else None for at in places)
        row = [value for at, value in enumerate(values) if at not in places]
        if len(row) not in (2, 3):
            raise DataError(
                "rows are not id, title, body or id, body (besides allow and subject)",
                cure="change sources.query",
            )
        if row[0] is None:
            yield where, DataError(f"row {number} has no id", cure="change sources.query")
            continue
        *title, body = ("" if value is None else str(value) for value in row[1:])
        draft = Draft(str(row[0]), title[0] if title else "", body)
        yield where, _accessible(draft, allow, subject, where)


def _sqlite_rows(url: str, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the names of the query's columns, then its rows."""
    path = url.removeprefix("sqlite:///")
    if not Path(path).is_file():
        raise DataError("there is no such database", file=path, cure="check sources.url")
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        cursor = db.execute(query)
        yield tuple(column[0] for column in cursor.description)
        yield from cursor
    except sqlite3.Error as error:
        raise DataError(f"the query failed: {error}", file=path, cure="check sources.query") from error
    finally:
        db.close()


def _postgres_rows(url: str, query: str) -> Iterator[tuple[Any, ...]]:
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtra("postgres", "a source in PostgreSQL") from error
    from isthmus.service.postgres import secured

    url = secured(url, "sources.url")
    try:
        with psycopg.connect(url, connect_timeout=10) as db:
            db.read_only = True
            with db.cursor(name="isthmus") as cursor:
                cursor.execute(query.encode())
                yield tuple(column.name for column in cursor.description or ())
                yield from cursor
    except psycopg.Error as error:
        message = str(error).strip().split("\n")[0]
        raise DataError(
            f"the source's query failed: {message}", cure="check sources.url and query"
        ) from error
