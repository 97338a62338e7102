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
from isthmus.private.ledger.schema import SQL


def load(db: sqlite3.Connection, covered: Covered) -> None:
    """Put documents on the workbench, with the numbers of those the ledger has met."""
    db.execute("DELETE FROM batch")
    db.executemany(SQL["load"], zip(covered.documents, covered.versions, strict=True))
    if db.execute("SELECT 1 FROM batch WHERE fits = 0 LIMIT 1").fetchone():
        raise PrivacyError("a version belongs to one document: its noise may not be used for another")


def admit(db: sqlite3.Connection) -> None:
    """Enter those documents and versions on the workbench that the ledger has not met."""
    if not db.execute("SELECT 1 FROM batch WHERE version IS NULL LIMIT 1").fetchone():
        return
    db.execute("INSERT OR IGNORE INTO document (name) SELECT document FROM batch WHERE version IS NULL")
    try:
        db.execute(SQL["admit"])
    except sqlite3.IntegrityError:
        raise PrivacyError("two documents of one release share a version, hence their noise") from None
    db.execute(SQL["resolve"])


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
    rows = db.execute(SQL["current"])
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
    known = db.execute(SQL["adopt"], values).fetchall()
    for (name,) in known:
        return str(name)
    row = db.execute(SQL["first with a text"], values).fetchone() if content.text else None
    values["first"] = None if row is None else row[0]
    db.execute("INSERT OR IGNORE INTO document (name, lineage) VALUES (:document, :first)", values)
    number = db.execute(SQL["enter"], values).lastrowid
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
