"""Erasing documents from store, index, vectors, judgements, requests, releases and ledger, with a receipt.

    receipt = erase(node, ["papers/a.md"])

A document that is removed leaves its id behind and its words in an index that is written anew some day. One
that is erased leaves neither: everything that had something of it is written anew before the receipt is made.
What stays are digests under keys of the silo: in the store, so that no source brings it back, and in the
ledger, so that it has the budget it had if it comes back all the same. Done twice, it is done once.

Documents in an engine elsewhere are not Isthmus's to delete: one that is erased is shown no more, and all
that is known of it here goes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from isthmus.errors import DataError, ServiceError
from isthmus.service import wire
from isthmus.service.node import Node

REMAINS = (
    "digests of ids under a key of this silo, so that no source brings them back (isthmus documents readmit)",
    "in the ledger, digests of ids and texts under a key, so that one that comes back has no new budget",
    "in the audit log, digests of ids under a key: that it was shown, to whom, and that it was erased",
)
NOT_UNDONE = (
    "hits, snippets and whole documents that were shown to peers; the ledger has how many",
    "statistics and sketches that have left, noise included",
    "models that were learned with judgements of it, here and elsewhere",
    "the source itself, logs of this node and of others, and backups",
)
ELSEWHERE = (
    "the document itself, in {0}, which is only read: this silo shows it no more; to delete it there is for "
    "whoever runs that engine",
    "in numbers that {0} gives, of documents and of matches",
)
COUNTED = ("its words in this silo's counts of all documents, until they are counted anew: within minutes",)
LEAST = 12
"""Bytes of a piece of text that is looked for: shorter ones stand anywhere."""


def erase(node: Node, ids: Sequence[str]) -> wire.ErasureReceipt:
    """Erase documents by their ids; returns when nothing of them is left in the node's folder."""
    ids = list(dict.fromkeys(ids))
    with node.unread():
        drafts = node.store.get(ids)
        _check_known(node, [id for id in ids if id not in drafts])
        node.store.block(ids, at=time.time())
        pieces = [text.encode() for each in drafts.values() for text in (each.id, each.body[:60])]
        released = {id: [_charge(row) for row in node.ledger.charges(id)] for id in ids}
        rewritten, remains = list[str](), list(REMAINS)
        if node.attached is None:
            node.store.remove(ids)
            node.index.catch_up()
            node.index.compact()
            rewritten += ["index", "vectors"]
        else:
            node.index.renew()
            lines = (*ELSEWHERE, *(COUNTED if node.attached.is_counted else ()))
            remains[:0] = [line.format(node.attached.noun) for line in lines]
        counts = node.store.erase(ids)
        if _stands_in(node.settings.folder, pieces):
            node.store.rewrite()
        if _stands_in(node.settings.folder, [id.encode() for id in ids]):  # a text may be another's as well
            raise ServiceError("somebody reads the store, whose log has the document still: erase it again")
        if node.releases.forget(set(ids)):
            rewritten.append("list of the last release's documents")
        if node.sketch_again():
            rewritten.append("sketches")
        if node.ledger.erase(ids):
            rewritten.append("ledger")
        node.audit.record("erased", documents=ids)
    stored, hidden = (drafts, {}) if node.attached is None else ({}, drafts)
    return wire.ErasureReceipt(
        silo=node.settings.silo,
        at=wire.moment(time.time()),
        documents=[
            wire.ErasedDocument(id=id, removed=id in stored, hidden=id in hidden, released=released[id])
            for id in ids
        ],
        judgements=counts["judgements"],
        requests=counts["requests"],
        rewritten=rewritten,
        remains=remains,
        not_undone=list(NOT_UNDONE),
    )


def _check_known(node: Node, ids: Sequence[str]) -> None:
    """That something is known of documents that are not there; a DataError before anything is done."""
    known = node.store.mentioned(ids)
    unknown = [id for id in ids if id not in known and not any(node.ledger.charges(id))]
    if unknown:
        named = ", ".join(unknown[:5]) + (", …" if len(unknown) > 5 else "")
        raise DataError(
            f"nothing was erased: this silo has no document {named}",
            cure="ids as isthmus documents list shows them, without the silo's name",
        )


def _charge(row: dict[str, object]) -> dict[str, object]:
    return {name: row[name] for name in ("peer", "mechanism", "epsilon", "at")}


def _stands_in(folder: Path, pieces: Sequence[bytes]) -> bool:
    """Whether one of the pieces stands in the store's file or its log."""
    wanted = [piece for piece in pieces if len(piece) >= LEAST]
    return bool(wanted) and any(_has(file, wanted) for file in folder.glob("documents.db*"))


def _has(file: Path, wanted: Sequence[bytes]) -> bool:
    overlap, before = max(map(len, wanted)), b""
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            if any(piece in before + block for piece in wanted):
                return True
            before = block[-overlap:]
    return False
