"""A silo's documents towards people: where they are shown, who may open them, who asks their owner.

    documents = SiloDocuments("north", store, tokens, note, lambda: settings.sources)
    documents.open("papers/a.md", wire.AttributedOpening(ticket=hit.ticket), peer="broker", name=str)

A document is opened, or asked for, with the ticket of a hit that the peer was shown: whoever has none learns
nothing, not even whether there is such a document. What the owner allows is opened once, by whom they allowed
it. An opening is in the ledger before the document leaves.
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
"""How long what the owner has allowed can be opened, and how long requests are kept."""
ASKED_A_DAY = 20
"""Requests of one person a day."""
NO_DOCUMENT = "no such document was shown to you within a day, or its owner has not allowed it: search again"


class Note(Protocol):
    """Writes down what is about to leave."""

    def __call__(self, kind: str, peer: str, items: int = 1, note: str = "") -> None:
        """In the ledger when this returns; raises where it cannot be."""


class SiloDocuments:
    """What peers may have of one silo's documents; `sources` are those of the moment."""

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
        """Where documents are shown to people, by id, of sources that say so and do not withhold it from
        these principals; or by the one template of an engine elsewhere, which has no sources."""
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
        """The sources of documents, of those that are chosen."""
        named = {
            name: each for each in self._sources() if chosen(each) for name in (each.label, each.unnamed)
        }
        owners = self._store.owners(ids) if named and ids else {}
        return {id: named[label] for id, label in owners.items() if label in named}

    def _whole(self, ids: Sequence[str], principals: frozenset[str] | None) -> dict[str, tuple[str, str]]:
        """Title and body, with what these principals see of what is withheld, of documents where that is
        anything; None is the owner, who sees all."""
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
        """Hits with what the peer's people may do with their documents, whose own ids are `ids`."""
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
        """A whole document, by the name that the peer knows it by; `NO_DOCUMENT` is the one DataError, also
        of a document that these principals may not see.

        `note` is called with its id before it leaves, and raises where it may not.
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
        """A document, if these principals may see it; None is its owner."""
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
        """The request by which somebody opens a document, if the owner has allowed it to them, lately."""
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
        """Keep a request for the owner to see; the same again is the one there is.

        Raises Refused where somebody asks too much, and `NO_DOCUMENT`.
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
        """What one person asked for through a peer, and the owner's answers."""
        own = self._store.requests(peer=peer, person=person)
        return wire.RequestList(requests=[self._message(each, name) for each in own[: wire.MOST_REQUESTS]])

    def requests(self, peer: str | None = None) -> wire.RequestList:
        """For the owner: all requests, or those through one peer; with who asks, and real ids."""
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
        """The owner's answer to a request that waits, of one peer's or any; else a DataError."""
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
    """A silo's documents for its owner, on its own machine: requests and their answers."""

    def nothing(kind: str, peer: str, items: int = 1, note: str = "") -> None:
        """Nothing leaves."""

    tokens = HitTokens(settings.silo, local_secret(settings.folder / "feedback.key"))
    link = "" if settings.engine is None else settings.engine.link
    return SiloDocuments(settings.silo, store, tokens, nothing, lambda: settings.sources, link=link)


def access_of(policy: Policy) -> list[wire.Access]:
    """What a peer's people may do with the documents of hits."""
    rights: tuple[tuple[wire.Access, bool], ...] = (
        ("open", policy.open),
        ("ask", bool(policy.ask)),
        ("name", policy.ask == "name"),
    )
    return [right for right, allowed in rights if allowed]
