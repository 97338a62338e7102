"""Access of people to a silo's documents: links, opening, and requests to the owner.

    documents = SiloDocuments("north", store, tokens, note, lambda: settings.sources)
    documents.open("papers/a.md", wire.AttributedOpening(ticket=hit.ticket), peer="broker", name=str)

A document is opened, or asked for, with the ticket of a hit that the peer was shown. A caller without one
learns nothing, not even whether there is such a document. A document that the owner has allowed can be opened
once, by the person for whom it was allowed. An opening is in the ledger before the document leaves.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from isthmus.engines import may_see
from isthmus.errors import DataError, Refused
from isthmus.service import wire
from isthmus.service.limits import Buckets
from isthmus.service.redaction import LINK, redacted
from isthmus.service.security import HitTokens, local_secret
from isthmus.service.settings import NodeSettings, Policy, Source, linked
from isthmus.service.stores import DocumentStore, StoredRequest

DAY = 86_400.0
ALLOWED_DAYS, KEPT_DAYS = 7, 90
"""Days for which an allowed document can be opened, and for which requests are stored."""
ASKED_A_DAY = 20
"""Most requests of one person a day."""
NO_DOCUMENT = "no such document was shown to you within a day, or its owner has not allowed it: search again"


class Note(Protocol):
    """Records data that are about to leave."""

    def __call__(self, kind: str, peer: str, items: int = 1, note: str = "") -> None:
        """Record it in the ledger before returning; raises if that is not possible."""


class SiloDocuments:
    """Access of peers to one silo's documents; `sources` returns the current sources."""

    def __init__(
        self,
        silo: str,
        store: DocumentStore,
        tokens: HitTokens,
        note: Note,
        sources: Callable[[], Iterable[Source]],
        *,
        link: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._silo, self._store, self._tokens, self._note = silo, store, tokens, note
        self._sources, self._link, self._clock = sources, link, clock
        self._people, self._peers = Buckets(0.5, 30), Buckets(10, 300)

    def links(self, ids: Sequence[str], principals: frozenset[str] | None = None) -> dict[str, str]:
        """Return the addresses at which people see documents, by id, for sources that have them and do not
        withhold them from these principals. An external engine, which has no sources, has one template for
        all."""
        if self._link:
            return {id: linked(self._link, id) for id in ids}
        owners = self._owners(ids, lambda source: bool(source.link))
        withheld = {
            id
            for id, source in owners.items()
            for rule in source.redact
            if principals is not None and rule.field == LINK and rule.hides_from(principals)
        }
        return {id: source.link_to(id) for id, source in owners.items() if id not in withheld}

    def _owners(self, ids: Sequence[str], chosen: Callable[[Source], bool]) -> dict[str, Source]:
        """Return the sources of documents, by id, for sources that `chosen` selects."""
        named = {
            name: each for each in self._sources() if chosen(each) for name in (each.label, each.unnamed)
        }
        owners = self._store.owners(ids) if named and ids else {}
        return {id: named[label] for id, label in owners.items() if label in named}

    def _whole(self, ids: Sequence[str], principals: frozenset[str] | None) -> dict[str, tuple[str, str]]:
        """Return title and body of documents with withheld parts, by id, as these principals may see them;
        None is the owner, who sees all."""
        owners = self._owners(ids, lambda source: bool(source.redact))
        originals = self._store.originals(list(owners)) if owners else {}
        if principals is None:
            return originals
        return {id: redacted(each, owners[id].redact, principals) for id, each in originals.items()}

    def with_access(
        self,
        hits: Sequence[wire.Hit],
        ids: Sequence[str],
        *,
        peer: str,
        policy: Policy,
        principals: frozenset[str] | None = None,
    ) -> list[wire.Hit]:
        """Return hits with the access that the peer's people have; `ids` are the documents' own ids."""
        access = access_of(policy)
        links = self.links(ids, principals) if policy.snippets else {}
        titles = self._whole(ids, principals) if policy.snippets else {}
        if not access and not links and not titles:
            return list(hits)
        return [
            hit.model_copy(
                update={
                    "access": access,
                    "ticket": self._tokens.ticket(id, peer=peer) if access else "",
                    "link": links.get(id, ""),
                    **({"title": titles[id][0][:300]} if id in titles else {}),
                }
            )
            for hit, id in zip(hits, ids, strict=True)
        ]

    def open(
        self,
        document: str,
        opening: wire.AttributedOpening,
        *,
        peer: str,
        name: Callable[[str], str],
        note: Callable[[str], None] = lambda id: None,
        principals: frozenset[str] | None = None,
    ) -> wire.OpenedDocument:
        """Open a whole document, by the name that the peer has for it. The only DataError is `NO_DOCUMENT`,
        also for a document that these principals may not see.

        `note` is called with the document's id before it leaves, and raises if it may not leave.
        """
        self._check_rate(peer, opening.person)
        request = self._allowed(opening, peer) if opening.request else None
        id = self._tokens.ticketed(opening.ticket, peer=peer) if request is None else request.document
        if id is None or name(id) != document or (opening.request and request is None):
            raise DataError(NO_DOCUMENT)
        opened = self.read(id, principals)
        if opened is None:
            raise DataError(NO_DOCUMENT)
        note(id)
        self._note(
            "documents", peer, 1, "whole documents of hits" if request is None else "allowed by the owner"
        )
        now = self._clock()
        if request is not None and not self._store.settle_request(
            request.number, "allowed", "opened", at=now
        ):
            raise DataError(NO_DOCUMENT)
        return opened.model_copy(update={"document": document})

    def read(self, id: str, principals: frozenset[str] | None = None) -> wire.OpenedDocument | None:
        """Return a document if these principals may see it, else None; principals None are its owner."""
        draft = self._store.get([id]).get(id)
        if draft is None or (principals is not None and not may_see(draft.allow, principals)):
            return None
        title, body = self._whole([id], principals).get(id, (draft.title, draft.body))
        return wire.OpenedDocument(
            silo=self._silo,
            document=id,
            title=title[:10_000],
            body=body[: wire.LONGEST_OPENED],
            characters=len(body),
            link=self.links([id], principals).get(id, ""),
        )

    def _allowed(self, opening: wire.AttributedOpening, peer: str) -> StoredRequest | None:
        """Return the request with which a person opens a document, if its owner allowed it recently."""
        own = self._store.requests(peer=peer, person=opening.person)
        request = next((each for each in own if each.number == opening.request), None)
        return request if request is not None and self._state(request) == "allowed" else None

    def _state(self, request: StoredRequest) -> str:
        ended = (request.answered or 0.0) + ALLOWED_DAYS * DAY < self._clock()
        return "expired" if request.state == "allowed" and ended else request.state

    def ask(
        self,
        ask: wire.AttributedAsk,
        *,
        peer: str,
        name: Callable[[str], str],
        principals: frozenset[str] | None = None,
    ) -> wire.DocumentRequest:
        """Store a request for the owner. If the same request is waiting already, that one is returned.

        Raises Refused if there are too many requests, and a DataError with `NO_DOCUMENT`.
        """
        document = self._tokens.ticketed(ask.ticket, peer=peer)
        if document is None or not self._store.present([document], principals):
            raise DataError(NO_DOCUMENT)
        now = self._clock()
        self._store.forget_requests(before=now - KEPT_DAYS * DAY)
        every = self._store.requests(peer=peer)
        own = [each for each in every if each.person == ask.person]
        waiting = next((each for each in own if each.document == document and each.state == "waiting"), None)
        if waiting is None:
            recent = sum(each.at > now - DAY for each in own)
            unanswered = sum(each.state == "waiting" for each in every)
            if recent >= ASKED_A_DAY or unanswered >= wire.MOST_REQUESTS:
                raise Refused("more requests than the owner takes; ask again tomorrow")
            texts = (ask.name.strip(), ask.query, ask.reason.strip())
            waiting = StoredRequest(secrets.token_hex(16), document, peer, ask.person, *texts, now)
            self._store.ask(waiting)
        return self._message(waiting, name)

    def requests_of(self, *, peer: str, person: str, name: Callable[[str], str]) -> wire.RequestList:
        """Return one person's requests through a peer, with the owner's answers."""
        own = self._store.requests(peer=peer, person=person)
        return wire.RequestList(requests=[self._message(each, name) for each in own[: wire.MOST_REQUESTS]])

    def requests(self, peer: str | None = None) -> wire.RequestList:
        """Return all requests, or those through one peer, for the owner: with persons and real ids."""
        every = self._store.requests(peer=peer)
        return wire.RequestList(
            requests=[
                self._message(each, str).model_copy(update={"person": each.name or each.person[:12]})
                for each in every[: wire.MOST_ROWS]
            ]
        )

    def answer(
        self, number: str, answer: wire.RequestAnswer, *, peer: str | None = None
    ) -> wire.DocumentRequest:
        """Answer a waiting request, of one peer or any, for the owner; raises DataError without one."""
        known = next((each for each in self._store.requests(peer=peer) if each.number == number), None)
        state, now = "allowed" if answer.allow else "denied", self._clock()
        if known is None or not self._store.settle_request(
            number, "waiting", state, word=answer.word, at=now
        ):
            raise DataError("no request of this number waits for an answer")
        return next(each for each in self.requests(peer).requests if each.number == number)

    def _message(self, request: StoredRequest, name: Callable[[str], str]) -> wire.DocumentRequest:
        return wire.DocumentRequest.model_validate(
            {
                "number": request.number,
                "silo": self._silo,
                "document": name(request.document),
                "query": request.query,
                "reason": request.reason,
                "state": self._state(request),
                "word": request.word,
                "at": wire.moment(request.at),
                "answered": None if request.answered is None else wire.moment(request.answered),
            }
        )

    def _check_rate(self, peer: str, person: str) -> None:
        if self._people.wait(f"{peer} {person}") or self._peers.wait(peer):
            raise Refused("more documents than may be opened at once; try again in a minute")


def owned_documents(settings: NodeSettings, store: DocumentStore) -> SiloDocuments:
    """Return a silo's documents for its owner on its own machine, with requests and their answers."""

    def nothing(kind: str, peer: str, items: int = 1, note: str = "") -> None:
        """Do nothing: no data leave."""

    tokens = HitTokens(settings.silo, local_secret(settings.folder / "feedback.key"))
    link = "" if settings.engine is None else settings.engine.link
    return SiloDocuments(settings.silo, store, tokens, nothing, lambda: settings.sources, link=link)


def access_of(policy: Policy) -> list[wire.Access]:
    """Return what a peer's people may do with the documents of hits."""
    rights: tuple[tuple[wire.Access, bool], ...] = (
        ("open", policy.open),
        ("ask", bool(policy.ask)),
        ("name", policy.ask == "name"),
    )
    return [right for right, allowed in rights if allowed]
