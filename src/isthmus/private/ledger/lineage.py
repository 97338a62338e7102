"""Documents and their versions: who belongs to whom, and which noise nonce is current."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from isthmus.errors import PrivacyError
from isthmus.private.cost import Covered

LOAD = """
    INSERT INTO batch (document, name, version, owner, fits)
    SELECT ?1, ?2, v.id, coalesce(v.document, (SELECT id FROM document WHERE name = ?1)), d.name = ?1
    FROM (SELECT 1) LEFT JOIN version v ON v.name = ?2 LEFT JOIN document d ON d.id = v.document
"""

RESOLVE = """
    UPDATE batch SET version = v.id, owner = v.document FROM version v
    WHERE v.name = batch.name AND batch.version IS NULL
"""


def load(db: sqlite3.Connection, covered: Covered) -> None:
    """Put documents on the workbench, with the numbers of those the ledger has met."""
    db.execute("DELETE FROM batch")
    db.executemany(LOAD, zip(covered.documents, covered.versions, strict=True))
    if db.execute("SELECT 1 FROM batch WHERE fits = 0 LIMIT 1").fetchone():
        raise PrivacyError("a version belongs to one document: its noise may not be used for another")


def admit(db: sqlite3.Connection) -> None:
    """Enter those documents and versions on the workbench that the ledger has not met."""
    if not db.execute("SELECT 1 FROM batch WHERE version IS NULL LIMIT 1").fetchone():
        return
    db.execute("INSERT OR IGNORE INTO document (name) SELECT document FROM batch WHERE version IS NULL")
    try:
        db.execute(
            """INSERT INTO version (document, name) SELECT DISTINCT d.id, b.name
            FROM batch b JOIN document d ON d.name = b.document WHERE b.version IS NULL"""
        )
    except sqlite3.IntegrityError:
        raise PrivacyError("two documents of one release share a version, hence their noise") from None
    db.execute(RESOLVE)


def current(db: sqlite3.Connection, documents: Sequence[str], contents: Sequence[bytes]) -> list[str | None]:
    """The name of each document's newest version where that has the given content."""
    db.execute("DELETE FROM batch")
    db.executemany("INSERT INTO batch (document) VALUES (?)", ((name,) for name in documents))
    found = db.execute(
        """SELECT v.name, v.content FROM batch b
        LEFT JOIN document d ON d.name = b.document LEFT JOIN version v ON v.id = d.current ORDER BY b.row"""
    )
    return [name if kept == given else None for (name, kept), given in zip(found, contents, strict=True)]


def enter(db: sqlite3.Connection, versions: Sequence[tuple[str, str, bytes]]) -> None:
    """New newest versions, each (document, name, content)."""
    db.executemany(
        "INSERT OR IGNORE INTO document (name) VALUES (?)", ((document,) for document, *_ in versions)
    )
    db.executemany(
        """INSERT INTO version (document, name, content)
        SELECT id, ?2, ?3 FROM document WHERE name = ?1""",
        versions,
    )
    db.executemany(
        """UPDATE document SET current = (SELECT id FROM version WHERE name = ?2) WHERE name = ?1""",
        ((document, name) for document, name, _ in versions),
    )
