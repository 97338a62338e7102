"""Erased documents: the ledger deletes their names and digests, and stores keyed digests in their place.

By these a document that comes back, under its name or with its words, continues its old budget. The key is in
the same file, so anyone who has the file can test a guess; nobody can read a name or a text from it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable

from isthmus.private.ledger.store import SQL

KEY = "erasure key"
"""The setting with the key, in hexadecimal; absent until it is needed."""
KEY_BYTES = 32


def erase(db: sqlite3.Connection, names: Iterable[str], key: bytes) -> int:
    """Replace names and digests of these documents by keyed digests. Returns how many there were. `key` is
    used if the ledger has none yet."""
    key = settled_key(db, key)
    known = 0
    for name in names:
        row = db.execute("SELECT id FROM document WHERE name = ?", (name,)).fetchone()
        if row is None:
            continue
        sealed = _sealed_name(key, name)
        if db.execute("SELECT 1 FROM document WHERE name = ?", (sealed,)).fetchone():
            sealed = f"{sealed} {row[0]}"  # a document of this name was erased before
        db.execute("UPDATE document SET name = ? WHERE id = ?", (sealed, row[0]))
        versions = db.execute("SELECT id, content, text FROM version WHERE document = ?", row).fetchall()
        db.executemany(
            "UPDATE version SET content = ?, text = ? WHERE id = ?",
            [(_sealed(key, content), _sealed(key, text), number) for number, content, text in versions],
        )
        known += 1
    return known


def lineage_of(db: sqlite3.Connection, name: str, text: bytes) -> int | None:
    """The lineage of an erased document that had this name or these words; None if there is none."""
    key = key_of(db)
    if key is None:
        return None
    row = db.execute(
        "SELECT coalesce(lineage, id) FROM document WHERE name = ?", (_sealed_name(key, name),)
    ).fetchone()
    if row is None and text:
        values = {"text": _sealed(key, text), "content": b""}
        row = db.execute(SQL["first with a text"], values).fetchone()
    return None if row is None else int(row[0])


def settled_key(db: sqlite3.Connection, new: bytes) -> bytes:
    """The ledger's key for digests; set to `new` if it has none."""
    db.execute("INSERT OR IGNORE INTO setting VALUES (?, ?)", (KEY, new.hex()))
    return key_of(db) or new


def key_of(db: sqlite3.Connection) -> bytes | None:
    """The ledger's key for digests; None if it has none yet."""
    row = db.execute("SELECT value FROM setting WHERE name = ?", (KEY,)).fetchone()
    return None if row is None else bytes.fromhex(row[0])


def _sealed_name(key: bytes, name: str) -> str:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=key, digest_size=16)
    return f"erased {digest.hexdigest()}"


def _sealed(key: bytes, digest: bytes | None) -> bytes | None:
    return None if digest is None else hashlib.blake2b(digest, key=key, digest_size=16).digest()
