"""Judgements by document id in one silo: import of many from a peer, and export to the peer they came
through.

A peer names documents as it sees them in hits: by their ids, or by pseudonyms if its policy has no
snippets. It receives only judgements that came through it; the silo's operator, who has the store, may
have all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from isthmus.service import wire
from isthmus.service.security import HitTokens, id_digest
from isthmus.service.stores import DocumentStore, Judgement, majority

PAGE_BYTES = 1 << 20
"""Size of the texts on one page of judgements from which the page ends."""

Naming = Callable[[str], str]
"""Returns a document's id as a peer sees it."""


def import_judgements(
    store: DocumentStore,
    judgements: Sequence[wire.NamedJudgement],
    ids: Mapping[str, str],
    *,
    peer: str,
    person: str,
) -> wire.Imported:
    """Store judgements of the documents in `ids`, which gives the id of each name. Idempotent."""
    now = time.time()
    known = [each for each in judgements if each.document in ids]
    done = store.merge_judgements(
        [Judgement(each.query, ids[each.document], each.relevant, peer, now, person=person) for each in known]
    )
    return wire.Imported(
        added=done.added,
        changed=done.changed,
        unchanged=len(known) - done.added - done.changed,
        unknown=[at for at, each in enumerate(judgements) if each.document not in ids],
    )


def exported_judgements(judgements: Iterable[Judgement], silo: str) -> list[wire.NamedJudgement]:
    """Return the majority's judgement of every query and document, by query and id."""
    return [
        wire.NamedJudgement(query=query, document=document, relevant=relevant, silo=silo)
        for (query, document), relevant in sorted(majority(judgements).items())
    ]


class SiloJudgements:
    """A silo's judgements, as peers send and receive them; `ids` returns the ids of all its documents."""

    def __init__(
        self, silo: str, store: DocumentStore, tokens: HitTokens, ids: Callable[[], Iterable[str]]
    ) -> None:
        self._silo, self._store, self._tokens, self._ids = silo, store, tokens, ids

    def _seen(self, principals: frozenset[str] | None) -> Iterable[str]:
        ids = self._ids()
        return ids if principals is None else self._store.present(ids, principals)

    def present(
        self, question: wire.DocumentDigests, name: Naming, principals: frozenset[str] | None = None
    ) -> wire.PresentDocuments:
        """Return which of the digests are of this silo's documents, among those that these principals may
        see."""
        own = {id_digest(name(id), bytes.fromhex(question.key)) for id in self._seen(principals)}
        return wire.PresentDocuments(
            present=[at for at, digest in enumerate(question.digests) if digest in own]
        )

    def take(
        self,
        batch: wire.AttributedBatch,
        peer: str,
        name: Naming,
        principals: frozenset[str] | None = None,
    ) -> wire.Imported:
        """Store a peer's judgements of documents that exist and that these principals may see."""
        named = {each.document for each in batch.judgements if each.silo in (None, self._silo)}
        if name is str:
            ids = {id: id for id in self._store.present(named, principals)}
        else:
            ids = {pseudonym: id for id in self._seen(principals) if (pseudonym := name(id)) in named}
        return import_judgements(self._store, batch.judgements, ids, peer=peer, person=batch.person)

    def page(
        self, peer: str, after: str, name: Naming, principals: frozenset[str] | None = None
    ) -> wire.JudgementPage:
        """Return a page of the judgements that came through a peer, in the order of their digests and
        beginning after the digest `after`. Those of documents that these principals may not see are left
        out."""
        own = [each for each in self._store.judgements() if each.peer == peer]
        judged = {each.document for each in own}
        hidden = self._store.present(judged) - self._store.present(judged, principals)
        every = exported_judgements((each for each in own if each.document not in hidden), self._silo)
        selected: list[wire.NamedJudgement] = []
        size, last = 0, ""
        for place, each in _ordered(every):
            if place <= after:
                continue
            if selected and (size > PAGE_BYTES or len(selected) >= wire.MOST_ROWS):
                return wire.JudgementPage(judgements=selected, next=last)
            selected.append(each.model_copy(update={"document": name(each.document)}))
            size += len(each.query) + len(each.document)
            last = place
        return wire.JudgementPage(judgements=selected)

    def verdicts(self, question: wire.ShownTokens, peer: str) -> wire.Verdicts:
        """Return people's judgements of these hits through this peer; nothing for a token that is
        not valid."""
        opened = [self._tokens.open(token, query=question.query, peer=peer) for token in question.tokens]
        people: dict[str, dict[str, bool]] = {}
        documents = [document for document in dict.fromkeys(opened) if document is not None]
        for document, person, relevant in self._store.verdicts(question.query, documents, peer=peer):
            people.setdefault(document, {})[person] = relevant
        latest = {
            document: dict(list(each.items())[-wire.MOST_JUDGEMENTS :]) for document, each in people.items()
        }
        return wire.Verdicts(verdicts=[latest.get(document or "", {}) for document in opened])


def _ordered(judgements: Iterable[wire.NamedJudgement]) -> list[tuple[str, wire.NamedJudgement]]:
    """Sort judgements by digests, which do not contain their texts, so that a page's end may stand in an
    address."""
    named = (
        (hashlib.sha256(f"{each.query}\0{each.document}".encode("utf-8", "surrogatepass")).hexdigest(), each)
        for each in judgements
    )
    return sorted(named, key=lambda pair: pair[0])
