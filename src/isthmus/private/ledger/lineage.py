"""Documents and their versions: who belongs to whom, and which noise nonce is current.

A document that comes under a new name with words that the ledger has met continues the lineage of the name
that had them first: its budget, not a new one. A document that takes on another's words under a name of
its own has both pay. Words are met again whatever the title, the markup and the spaces between them are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import PrivacyError
from isthmus.private.cost import Covered

LOAD = """
    INSERT INTO batch (document, name, version, owner, origin, fits)
    SELECT ?1, ?2, v.id,
        coalesce(d.lineage, d.id, (SELECT coalesce(lineage, id) FROM document WHERE name = ?1)),
        (SELECT coalesce(lineage, id) FROM document WHERE id = v.origin), d.name = ?1
    FROM (SELECT 1) LEFT JOIN version v ON v.name = ?2 LEFT JOIN document d ON d.id = v.document
"""

RESOLVE = """
    UPDATE batch SET version = v.id, owner = coalesce(d.lineage, d.id)
    FROM version v JOIN document d ON d.id = v.document
    WHERE v.name = batch.name AND batch.version IS NULL
"""

# the lineage that has had a text longest; versions of an older Isthmus are known by the whole content alone
FIRST = """
    SELECT coalesce(d.lineage, d.id) FROM version v JOIN document d ON d.id = v.document
    WHERE v.text = :text OR (v.text IS NULL AND v.content = :content) ORDER BY v.id LIMIT 1
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


@dataclass(frozen=True, slots=True)
class Content:
    """What tells whether a document changed, and what its words are known by; nothing where it has none."""

    exact: bytes
    text: bytes = b""


def current(
    db: sqlite3.Connection, documents: Sequence[str], contents: Sequence[Content]
) -> list[str | None]:
    """The name of each document's newest version where that has this content."""
    db.execute("DELETE FROM batch")
    db.executemany("INSERT INTO batch (document) VALUES (?)", ((name,) for name in documents))
    rows = db.execute(
        """SELECT v.name, v.content, v.text FROM batch b
        LEFT JOIN document d ON d.name = b.document LEFT JOIN version v ON v.id = d.current ORDER BY b.row"""
    )
    return [
        name if exact == content.exact and text is not None else None
        for (name, exact, text), content in zip(rows, contents, strict=True)
    ]


def enter(db: sqlite3.Connection, document: str, content: Content, nonce: str) -> str:
    """Make a version of this content the document's newest; its name.

    It is a new one under the nonce, unless an older Isthmus has entered it, which knew nothing of texts.
    """
    values: dict[str, Any] = {
        "document": document,
        "content": content.exact,
        "text": content.text,
        "name": nonce,
    }
    known = db.execute(
        """UPDATE version SET text = :text FROM document d
        WHERE d.name = :document AND version.id = d.current AND version.content = :content
            AND version.text IS NULL RETURNING version.name""",
        values,
    ).fetchall()
    for (name,) in known:
        return str(name)
    row = db.execute(FIRST, values).fetchone() if content.text else None
    values["first"] = None if row is None else row[0]
    db.execute("INSERT OR IGNORE INTO document (name, lineage) VALUES (:document, :first)", values)
    number = db.execute(
        """INSERT INTO version (document, name, content, text, origin)
        SELECT id, :name, :content, :text, nullif(:first, coalesce(lineage, id))
        FROM document WHERE name = :document""",
        values,
    ).lastrowid
    db.execute("UPDATE document SET current = ? WHERE name = ?", (number, document))
    return nonce


def copies(db: sqlite3.Connection) -> list[bool]:
    """Which of the documents on the workbench have a payer that one before them has, too."""
    seen: set[int] = set()
    repeated = []
    for row in db.execute("SELECT owner, origin FROM batch ORDER BY row"):
        payers = {payer for payer in row if payer is not None}
        repeated.append(not seen.isdisjoint(payers))
        if not repeated[-1]:
            seen |= payers
    return repeated
