"""Judgements by document id in one silo: those that a peer brings many at a time, and those it has back.

A peer names documents as it sees them in hits: by their ids, or by pseudonyms where its policy has no
snippets. It has back what came through it alone; the silo's operator, who has the store, may have all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from isthmus.service import wire
from isthmus.service.security import HitTokens, id_digest
from isthmus.service.stores import DocumentStore, Judgement, majority

PAGE_BYTES = 1 << 20
"""Of the texts on one page of judgements."""

Naming = Callable[[str], str]
"""How a peer sees a document's id."""


def import_judgements(
    store: DocumentStore,
    judgements: Sequence[wire.NamedJudgement],
    ids: Mapping[str, str],
    *,
    peer: str,
    person: str,
) -> wire.Imported:
    """Store judgements of the documents in `ids`, which has the id of each name; idempotent."""
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
    """The majority's judgement of every query and document, by query and id."""
    return [
        wire.NamedJudgement(query=query, document=document, relevant=relevant, silo=silo)
        for (query, document), relevant in sorted(majority(judgements).items())
    ]


class SiloJudgements:
    """A silo's judgements as peers bring and have them; `ids` gives the ids of all documents it has."""

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
        """Which of the digests are of this silo's documents, of those that these principals may see."""
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
        """Store what a peer brings of documents there are, and that these principals may see."""
        named = {each.document for each in batch.judgements if each.silo in (None, self._silo)}
        if name is str:
            ids = {id: id for id in self._store.present(named, principals)}
        else:
            ids = {pseudonym: id for id in self._seen(principals) if (pseudonym := name(id)) in named}
        return import_judgements(self._store, batch.judgements, ids, peer=peer, person=batch.person)

    def page(
        self, peer: str, after: str, name: Naming, principals: frozenset[str] | None = None
    ) -> wire.JudgementPage:
        """Judgements that came through a peer, in the order of their digests, those after `after`; none of
        documents that these principals may not see."""
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
        """What people judged of these hits through this peer; nothing where a token does not open."""
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
    """Judgements under digests that say nothing of them, so that a page's end may stand in an address."""
    named = (
        (hashlib.sha256(f"{each.query}\0{each.document}".encode("utf-8", "surrogatepass")).hexdigest(), each)
        for each in judgements
    )
    return sorted(named, key=lambda pair: pair[0])
