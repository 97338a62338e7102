"""Where a node's documents come from: folders of files, BEIR collections, SQL queries.

A file that cannot be read is one DataError, told to whoever asked, and the others go on.

    folder   .txt .md .rst .html .htm .pdf below the path; the id is the path from there, with '/' between
    beir     corpus.jsonl, with ids of its own
    sql      rows of a query: id, title, body, or id and body
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isthmus.errors import DataError, IsthmusError, MissingExtra
from isthmus.service.parser_process import Parser
from isthmus.service.parsing import READERS, Reading
from isthmus.service.settings import Source, secret
from isthmus.service.stores import Counts, Draft, Store
from isthmus.service.wire import LONGEST_ID
from isthmus.tables.beir import records

Tell = Callable[[DataError], None]


def read(source: Source, tell: Tell, limits: Reading | None = None) -> Iterator[Draft]:
    """The documents of a source; what is wrong with single ones is told."""
    if source.kind == "folder":
        yield from _folder(source, tell, limits)
    else:
        yield from (_beir if source.kind == "beir" else _sql)(source, tell)


def label(source: Source) -> str:
    """The name under which a store remembers what a source gave. No secret is in it."""
    where = source.path if source.kind != "sql" else " ".join(source.query.split())
    return f"{source.kind}:{where}" + (f"#{source.part}" if source.part else "")


def load(source: Source, store: Store, tell: Tell, limits: Reading | None = None) -> Counts:
    """Bring a store up to a source: new and changed documents are written, those gone from it removed.

    What a file that cannot be read gave before is kept.
    """
    seen: set[str] = set()
    unread: set[str] = set()
    name = label(source)

    def note(error: DataError) -> None:
        if error.file is not None and source.path is not None and source.kind == "folder":
            unread.add(_id(Path(error.file), source.path))
        else:
            unread.add("")  # of which document is not known: nothing is removed
        tell(error)

    def each() -> Iterator[Draft]:
        for draft in read(source, note, limits):
            seen.add(draft.id)
            yield draft

    done = store.put(each(), source=name)
    if "" in unread:
        return done
    return done + Counts(removed=store.retain(name, seen | unread))


def _folder(source: Source, tell: Tell, limits: Reading | None) -> Iterator[Draft]:
    root = _path(source)
    if not root.is_dir():
        raise DataError("is not a folder", file=root, cure="check the source's path")
    with Parser(limits) as parser:
        for path, parsed in parser.parse_all(_files(root)):
            try:
                if isinstance(parsed, DataError):
                    raise parsed
                yield _checked(Draft(_id(path, root), *parsed), path)
            except DataError as error:
                tell(error)


def _files(root: Path) -> Iterator[Path]:
    """Readable kinds of files below a folder, in order; hidden ones and links out of it are left alone."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            wanted = not name.startswith(".") and path.suffix.lower() in READERS and path.is_file()
            if wanted and path.resolve().is_relative_to(root.resolve()):
                yield path


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


def _beir(source: Source, tell: Tell) -> Iterator[Draft]:
    path = _path(source)
    file = next((at for name in ("corpus.jsonl", "corpus.jsonl.gz") if (at := path / name).exists()), path)
    for record in records(file):
        if source.part is None or record.silo == source.part:
            try:
                yield _checked(Draft(record.id, record.title, record.text), file)
            except DataError as error:
                tell(error)


def _sql(source: Source, tell: Tell) -> Iterator[Draft]:
    url = secret(source.url, "sources.url")
    rows = _sqlite_rows(url, source.query) if url.startswith("sqlite:") else _postgres_rows(url, source.query)
    for number, row in enumerate(rows, 1):
        if len(row) not in (2, 3) or row[0] is None:
            tell(DataError(f"row {number} is not id, title, body or id, body", cure="change the query"))
            continue
        *title, body = ("" if value is None else str(value) for value in row[1:])
        try:
            yield _checked(Draft(str(row[0]), title[0] if title else "", body), Path(f"row {number}"))
        except DataError as error:
            tell(error)


def _sqlite_rows(url: str, query: str) -> Iterator[tuple[Any, ...]]:
    path = url.removeprefix("sqlite:///")
    if not Path(path).is_file():
        raise DataError("there is no such database", file=path, cure="check sources.url")
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        yield from db.execute(query)
    except sqlite3.Error as error:
        raise DataError(f"the query failed: {error}", file=path, cure="check sources.query") from error
    finally:
        db.close()


def _postgres_rows(url: str, query: str) -> Iterator[tuple[Any, ...]]:
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtra("postgres", "a source in PostgreSQL") from error
    try:
        with psycopg.connect(url, connect_timeout=10) as db:
            db.read_only = True
            with db.cursor(name="isthmus") as cursor:
                cursor.execute(query.encode())
                yield from cursor
    except psycopg.Error as error:
        told = str(error).strip().split("\n")[0]
        raise DataError(f"the source's query failed: {told}", cure="check sources.url and query") from error


def load_all(sources: tuple[Source, ...], store: Store, tell: Tell, limits: Reading | None = None) -> Counts:
    """Every source, one after the other; one that cannot be read at all is told, and the next goes on."""
    done = Counts()
    for source in sources:
        try:
            done += load(source, store, tell, limits)
        except IsthmusError as error:
            tell(error if isinstance(error, DataError) else DataError(str(error)))
    return done
