"""Erasure of documents, or of all that is about a subject, from everything a silo has, with a receipt.

    receipt = erase(node, ["papers/a.md"])
    receipt = erase(node, subject="4711")     # a patient: documents, and people's texts that name it

A document that is removed leaves its id behind, and its words in the index until that is rewritten. One
that is erased leaves neither: store, index, vectors, judgements, requests, the set that was learned from,
releases, sketches, exports and the ledger are rewritten before the receipt is made. Only digests under
keys of the silo stay: in the store, so that no source brings the document back, nor new documents of the
subject, and in the ledger, so that a document that is readmitted has no new budget.

During an erasure, ids and subject are noted in the node's folder: if the process is killed, it is
completed at the next start, or by the next call. It is idempotent.

Documents in an engine elsewhere cannot be deleted by Isthmus: one that is erased is no longer shown, and
all that is stored about it here is deleted.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.errors import DataError, ServiceError
from isthmus.files import replacing, write_private
from isthmus.service import wire
from isthmus.service.node import Node
from isthmus.service.settings import NodeSettings
from isthmus.service.stores import LEAST_NAME, SUBJECT

REMAINS = (
    "digests of ids under a key of this silo, so that no source brings them back (isthmus documents readmit)",
    "in the ledger, digests of ids and texts under a key, so that one that comes back has no new budget",
    "in the audit log, digests of ids under a key (shown, to whom, erased); texts of queries if it has them",
)
NOT_UNDONE = (
    "hits, snippets and whole documents that were shown to peers; the ledger has how many",
    "statistics and sketches that have left, noise included",
    "models that were learned with judgements of it, here until they are learned anew, and elsewhere",
    "the source itself, logs of this node and of others, backups, and exports that were moved",
)
ELSEWHERE = (
    "the document itself, in {0}, which is only read: this silo shows it no more; to delete it there is for "
    "whoever runs that engine",
    "in numbers that {0} gives, of documents and of matches",
)
COUNTED = ("its words in this silo's counts of all documents, until they are counted anew: within minutes",)
LEAST = 12
"""Least bytes of a piece of text that is searched for in files: shorter ones occur anywhere."""
NOTED, EXPORTS, RECEIPTS = "erasing.json", "exports.json", "receipts"
"""Names in the node's folder: the erasure under way, the list of exported files, and receipts without ids."""
LISTED = 1_000
"""Most documents for which a receipt lists the releases that covered them."""
LARGEST = 1 << 30
"""Most bytes of an exported file that is rewritten."""

_log = logging.getLogger("isthmus.service")


@dataclass(frozen=True)
class _Erasure:
    """What is to be erased, why, and since when the erasure is under way."""

    ids: list[str]
    subject: str
    why: str
    at: float


def erase(
    node: Node, ids: Sequence[str] = (), *, subject: str = "", why: str = "withdrawn"
) -> wire.ErasureReceipt:
    """Erase documents by their ids, or all of a subject. Returns the receipt when nothing of them is left in
    the node's folder. `why` is recorded in the ledger."""
    with node.unread():
        _carry_on(node)
        of_subject = node.store.of_subject(subject) if subject else []
        every = list(dict.fromkeys([*ids, *of_subject]))
        _check_known(node, [id for id in ids if id not in node.store.present(ids)], subject, of_subject)
        erasure = _Erasure(every, subject, why, time.time())
        file = node.settings.folder / NOTED
        write_private(file, json.dumps(asdict(erasure)).encode())
        receipt = _erased(node, erasure, again=False)
        file.unlink()
        return receipt


def carry_on(node: Node) -> None:
    """Complete an erasure that a killed process had begun."""
    with node.unread():
        _carry_on(node)


def _carry_on(node: Node) -> None:
    file = node.settings.folder / NOTED
    if not file.exists():
        return
    erasure = _Erasure(**json.loads(file.read_bytes()))
    receipt = _erased(node, erasure, again=True)
    file.unlink()
    _log.warning("an erasure of %d documents that was broken off is done now", len(receipt.documents))


def _erased(node: Node, erasure: _Erasure, *, again: bool) -> wire.ErasureReceipt:
    """Carry out an erasure and return its receipt. Every step may be done a second time without harm."""
    ids, subject, folder = erasure.ids, erasure.subject, node.settings.folder
    drafts = node.store.get(ids)
    node.store.block([*ids, *([f"{SUBJECT}{subject}"] if subject else [])], at=erasure.at)
    pieces = [text.encode() for each in drafts.values() for text in (each.id, each.body[:60])]
    pieces += [subject.encode()] if subject else []
    rewritten, remains, released = list[str](), list(REMAINS), dict[str, list[dict[str, object]]]()
    if len(ids) <= LISTED:
        released = {id: [_charge(row) for row in node.ledger.charges(id)] for id in ids}
    else:
        remains.append("which releases covered each of so many documents is not listed; the ledger has it")
    if node.attached is None:
        node.store.remove(ids)
        node.index.catch_up()
        node.index.compact()
        rewritten += ["index", "vectors"]
    else:
        node.index.renew()
        lines = (*ELSEWHERE, *(COUNTED if node.attached.is_counted else ()))
        remains[:0] = [line.format(node.attached.noun) for line in lines]
    counts = node.store.erase(ids, subject)
    if again or _stands_in(folder, pieces):
        node.store.rewrite()
    if _stands_in(folder, [id.encode() for id in ids]):  # ids only: another document may have the same text
        raise ServiceError("somebody reads the store, whose log has the document still: erase it again")
    learned = node.learner.forget(ids, subject if len(subject) >= LEAST_NAME else "")
    rewritten += ["the set of judgements that was learned from"] if learned else []
    rewritten += ["list of the last release's documents"] if node.releases.forget(set(ids)) else []
    rewritten += ["sketches"] if node.sketch_again() else []
    exports = [str(path) for path in _exports(node.settings) if _without(path, ids, subject)]
    rewritten += ["ledger"] if node.ledger.erase(ids, why=erasure.why) else []
    node.audit.record("erased", documents=ids, why=erasure.why)
    mentioning = node.store.mentioning(subject) if len(subject) >= LEAST_NAME else 0
    if mentioning:
        remains.append(f"its id in the texts of {mentioning:,} documents that are not said to be about it")
    stored, hidden = (drafts, {}) if node.attached is None else ({}, drafts)
    receipt = wire.ErasureReceipt(
        silo=node.settings.silo,
        at=wire.moment(time.time()),
        why=erasure.why,
        subject=subject,
        documents=[
            wire.ErasedDocument(
                id=id, removed=id in stored, hidden=id in hidden, released=released.get(id, [])
            )
            for id in ids
        ],
        judgements=counts["judgements"],
        requests=counts["requests"],
        rewritten=rewritten,
        exports=exports,
        relearn=[*(node.outdate_models() if learned else []), *_trained(node.settings, exports)],
        remains=remains,
        not_undone=list(NOT_UNDONE),
    )
    _keep(node, receipt, erasure.at)
    return receipt


def _check_known(node: Node, ids: Sequence[str], subject: str, of_subject: Sequence[str]) -> None:
    """Check that the silo knows the documents that are not there, and the subject. Raises a DataError before
    anything is erased."""
    known = node.store.mentioned(ids)
    unknown = [id for id in ids if id not in known and not any(node.ledger.charges(id))]
    if unknown:
        named = ", ".join(unknown[:5]) + (", …" if len(unknown) > 5 else "")
        raise DataError(
            f"nothing was erased: this silo has no document {named}",
            cure="ids as isthmus documents list shows them, without the silo's name",
        )
    is_known = of_subject or node.store.blocked().subject(subject) or node.ledger.subject(subject)
    if subject and not is_known:
        raise DataError(
            "nothing was erased: no document of this silo is about this subject",
            cure="its id as the source has it; isthmus documents list shows subjects",
        )


def _charge(row: dict[str, object]) -> dict[str, object]:
    return {name: row[name] for name in ("peer", "mechanism", "epsilon", "at")}


def _keep(node: Node, receipt: wire.ErasureReceipt, at: float) -> None:
    """Store a receipt in the node's folder, with digests in place of ids."""
    folder, digest_of = node.settings.folder / RECEIPTS, node.store.digest_of
    folder.mkdir(mode=0o700, exist_ok=True)
    sealed = receipt.model_copy(
        update={
            "subject": digest_of(f"{SUBJECT}{receipt.subject}") if receipt.subject else "",
            "documents": [each.model_copy(update={"id": digest_of(each.id)}) for each in receipt.documents],
        }
    )
    write_private(folder / f"{int(1000 * at)}.json", sealed.model_dump_json(indent=1).encode())


# exports


def note_export(settings: NodeSettings, path: str | Path) -> None:
    """Record a file or a folder that judgements were exported to, so that an erasure covers it."""
    file = settings.folder / EXPORTS
    known = json.loads(file.read_bytes()) if file.exists() else []
    write_private(file, json.dumps(sorted({*known, str(Path(path).resolve())})).encode())


def _exports(settings: NodeSettings) -> Iterator[Path]:
    """Yield the files that were exported here, and those that training reads."""
    file = settings.folder / EXPORTS
    named = [Path(path) for path in json.loads(file.read_bytes())] if file.exists() else []
    if settings.training is not None:
        named += [settings.training.data, *filter(None, [settings.training.queries])]
    for path in dict.fromkeys(named):
        names = ("queries.jsonl", "qrels.txt", "bm25.run", "dense.run", "rows.txt")
        files = [path / name for name in names] if path.is_dir() else [path]
        yield from (each for each in files if each.is_file() and each.stat().st_size <= LARGEST)


def _without(path: Path, ids: Iterable[str], subject: str) -> bool:
    """Rewrite a file without the lines that name a document or the subject. Returns whether there
    were any."""
    if path.suffix not in (".csv", ".txt", ".run", ".jsonl", ".tsv", ".letor"):
        return False
    names = {id for each in ids for id in (each, "_".join(each.split()), json.dumps(each)[1:-1])}
    names |= {subject} if len(subject) >= LEAST_NAME else set()
    if not names:  # an empty pattern would match every line
        return False
    wanted = re.compile("|".join(rf"(?<![\w/.-]){re.escape(name)}(?![\w/.-])" for name in sorted(names)))
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
        if not any(wanted.search(line) for line in lines):
            return False
    with (
        path.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
        replacing(path) as stream,
    ):
        for line in lines:
            if not wanted.search(line):
                stream.write(line.encode("utf-8", "surrogateescape"))
    return True


def _trained(settings: NodeSettings, exports: Sequence[str]) -> list[str]:
    """Return the models of `[models]` that may have been trained on rows of an export with erased
    documents."""
    models = settings.models
    files = [path for path in (models.ranker, models.fuser, models.calibrator) if path is not None]
    return [f"{path}, if it was learned from rows that were exported" for path in files if exports]


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
