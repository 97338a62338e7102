"""A node over HTTP. The silo's policy is looked up for every request, to decide what its peer may do."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import anyio.to_thread
from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel
from starlette.types import ASGIApp

from isthmus import __version__
from isthmus.engines import ANYBODY, principals_of
from isthmus.errors import BudgetExhausted, ConfigError, DataError, PrivacyError, Refused, ServiceError
from isthmus.service import wire
from isthmus.service.apps import METRICS, PROBLEMS, Answers, ShortWay, new_app, problems
from isthmus.service.audit_log import check_auditor, page_of
from isthmus.service.certificates import ENDING, ending, machine_of
from isthmus.service.display import Extras
from isthmus.service.encoding import another_encoder
from isthmus.service.erasure import erase
from isthmus.service.limits import (
    CALLER,
    DIGEST,
    GONE,
    MESSAGE,
    NOTE,
    Gone,
    HttpProblem,
    Protect,
    Surface,
    header_in,
    names_of,
)
from isthmus.service.metrics import CONTENT_TYPE, DISK, INFO, Labels, Metrics, disk_free
from isthmus.service.node import Node
from isthmus.service.people import HEADER, Person, Statement
from isthmus.service.processors import Processors
from isthmus.service.scoring import Bm25Scorer
from isthmus.service.security import PEER, ApiKeys, Gate, Once, token_in
from isthmus.service.settings import ANONYMOUS, NodeSettings, Policy
from isthmus.service.silo_documents import NO_DOCUMENT
from isthmus.service.statistics import etag
from isthmus.service.stores import Draft
from isthmus.service.tracing import PARENT, is_tracing, traced

OPEN = ("/v1/health", "/v1/ready")
ADMINISTRATOR = Policy(
    search=True,
    snippets=True,
    matches=True,
    suggestions=True,
    feedback=True,
    judgements=True,
    open=True,
    manage=True,
    operate=True,
)
"""Rights of a key of the node's own with the scope admin."""
UNKNOWN_HIT = "this hit was not shown to you within a day: search again"
THROUGH = "judgements that came through it"
SPELLINGS = "words spelled like those of a query"
LARGE = ("/v1/documents", "/v1/statistics")
OWN_PROBLEMS = problems(
    {
        428: "The silo answers persons only, and the peer did not say who asks.",
        409: "The message was sent before, its time stamp is off, or the silo cannot learn so.",
        504: "The deadline passed.",
    }
)
_STATISTICS = {"content": {wire.STATISTICS_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
_BUNDLE = {"content": {wire.BUNDLE_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
BODIES = {
    ("PUT", "/statistics"): _STATISTICS,
    ("POST", "/learning/{session}/{number}"): _BUNDLE,
    ("PUT", "/learning"): _BUNDLE,
}
"""Request bodies that are not JSON."""
ANSWERS: dict[tuple[str, str], Answers] = {
    ("GET", "/statistics"): {
        200: {"content": _STATISTICS["content"], "description": "The silo's statistics."},
        304: {"description": "They are those that If-None-Match names."},
    },
    ("POST", "/learning/{session}/{number}"): {200: {**_BUNDLE, "description": "Sums under masks."}},
    ("GET", "/audit"): {
        200: {
            "content": {wire.LINES_TYPE: {"schema": {"type": "string"}}},
            "description": "Entries, a line of JSON each.",
        }
    },
    ("GET", "/ready"): {503: {"model": wire.Ready, "description": "It is still indexing."}},
}
"""Responses that are not JSON of the documented model, or are not problems in spite of their status."""
AUDITED = {
    ("POST", "/noised-counts"): "counted",
    ("POST", "/judgements"): "judgements",
    ("GET", "/judgements"): "exported",
    ("GET", "/statistics"): "exported",
    ("POST", "/learning/session"): "learning",
    ("POST", "/learning/own"): "model",
    ("PUT", "/learning"): "model",
    ("DELETE", "/learning"): "model",
    ("PUT", "/documents"): "documents",
    ("DELETE", "/documents/{id:path}"): "documents",
    ("GET", "/documents"): "listed",
    ("POST", "/requests"): "requested",
    ("POST", "/requests/{number}"): "answered",
    ("POST", "/sources"): "sources",
}
"""The actions by which the audit log names paths; searches, openings, feedback and erasures have entries of
their own."""

_log = logging.getLogger("isthmus.service")

P = ParamSpec("P")
T = TypeVar("T")


class NodeApi:
    """The handlers of a node's paths."""

    def __init__(self, node: Node) -> None:
        self.node, self.settings = node, node.settings
        self._differing = ("", "")
        # as many searches at once as processors: more would only wait for each other
        self._processors = Processors(max(2, os.cpu_count() or 1), "search")
        self.metrics = Metrics()
        self._seconds = self.metrics.histogram("isthmus_search_seconds", "Times of searches.")
        self._hits = self.metrics.counter("isthmus_hits_total", "Hits that left, by peer.", "peer")
        self._requests = self.metrics.counter(
            "isthmus_requests_total", "Requests, by path.", "path", "status"
        )
        index, gauge = node.index, self.metrics.gauge
        gauge("isthmus_documents", "Documents in the index.", lambda: {(): len(index.snapshot)})
        gauge("isthmus_behind", "Changes not in the index.", lambda: {(): index.behind})
        gauge("isthmus_encoded", "Documents with a vector.", lambda: {(): index.engine.encoded})
        peers, audit = self.settings.peers, node.audit
        shares = "Share of the silo's documents that a peer has seen in a year."
        gauge("isthmus_seen_share", shares, lambda: {(each,): audit.share_of(each) for each in peers}, "peer")
        extraction = self.metrics.counter(
            "isthmus_extraction_total", "Alarms and refusals of callers who see much.", "peer", "outcome"
        )
        audit.on_outcome = lambda peer, outcome: extraction.add(peer=peer, outcome=outcome)
        gauge(*ENDING, lambda: ending(self.settings.tls))
        gauge(*INFO, lambda: {(__version__,): 1}, "version")
        gauge(*DISK, lambda: disk_free(self.settings.folder))
        gauge("isthmus_ready", "1 while searches can be answered.", lambda: {(): float(node.ready().ready)})
        meaning = "Of the document or subject that spent most, and what is left of the limit."
        gauge("isthmus_budget_epsilon", meaning, self._budget, "of")
        gauge("isthmus_dead_rows", "Versions in the index that are gone.", lambda: {(): index.engine.wasted})

    def _budget(self) -> dict[Labels, float]:
        spent, left = self.node.spent()
        return {("limit",): self.settings.budget, ("spent",): spent, ("left",): left}

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request in the metrics."""
        self._requests.add(path=path, status=str(status))

    def _allowed(self, request: Request, right: str) -> tuple[str, Policy]:
        """Return the peer and its policy if that has the right, else raise a 403."""
        caller = request.scope[CALLER]
        policy = caller.policy or self.settings.peers.get(caller.name)
        if policy is None and caller.may("admin"):
            policy = ADMINISTRATOR
        if policy is None or not (right == "known" or getattr(policy, right)):
            raise HttpProblem(403, "this silo's policy does not allow it")
        return caller.name, policy

    def _person(self, request: Request) -> Person | None:
        """Return the person who asks, as the peer has signed for this request, if its policy has `people`;
        else None, since what such a peer says of people is not trusted. Raises a 428 without a statement,
        a 401 for a wrong one."""
        _, policy = self._allowed(request, "known")
        if not policy.people:
            return None
        scope = request.scope
        text = header_in(scope, HEADER)
        if not text:
            raise HttpProblem(428, f"this silo answers persons only: the header {HEADER} says who asks")
        peer = scope.get("extensions", {}).get(PEER)
        certificate = b"" if peer is None else peer.certificate
        try:
            statement = Statement.read(text, certificate=certificate, token=token_in(scope) or "")
        except Refused as refused:
            raise HttpProblem(401, str(refused)) from None
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        call = f"{scope['method']} {target}"
        message = header_in(scope, MESSAGE)
        if statement != Statement(statement.person, self.settings.silo, call, message, scope[DIGEST]):
            raise HttpProblem(401, "the statement of who asks is for another request")
        return statement.person

    def _rights(
        self, policy: Policy, person: Person | None, right: str
    ) -> tuple[Policy, frozenset[str] | None]:
        """Return the peer's policy narrowed to a person, and the principals by which documents are shown;
        None for the silo's own administrator, who sees all. Raises a 403 without the right."""
        narrowed = policy if policy is ADMINISTRATOR else self.settings.narrowed(policy, person)
        if not getattr(narrowed, right):
            raise HttpProblem(403, "this silo's policy does not allow it")
        return narrowed, self._seen_by(policy, person)

    def _seen_by(self, policy: Policy, person: Person | None = None) -> frozenset[str] | None:
        """Return the principals by which documents are shown; None for the silo's own administrator. Raises a
        503 until documents are stored by the present rules."""
        if policy is ADMINISTRATOR:
            return None
        if not self.node.has_read_rules:
            raise HttpProblem(503, "it reads who may see its documents", Retry_After="5")
        return ANYBODY if person is None else person.principals

    async def _apart(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run work that uses the disk or waits for the index in a thread, outside the event loop."""
        return await _answered(anyio.to_thread.run_sync(lambda: work(*arguments, **named)))

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` on one of the processors. Cancelling gives up the place in the queue, or frees the
        processor once running work has ended."""
        return await _answered(self._processors.run(work))

    async def search(self, body: wire.NodeSearch, request: Request) -> Response:
        """Return the best hits of this silo, with matches and spellings if the policy allows them."""
        peer, policy = self._allowed(request, "search")
        person = self._person(request)
        policy, principals = self._rights(policy, person, "search")
        limits = self.settings.limits
        if body.k > limits.hits or len(body.query) > limits.query_characters:
            raise HttpProblem(422, "more than this silo's limits allow")
        if self.settings.log_queries:
            request.scope[NOTE]["query"] = body.query
        began = time.perf_counter()
        seal = partial(self.node.tokens.seal, query=body.query, peer=peer)
        token = seal if policy.feedback else None
        naming, ids = self._naming(peer, policy), dict[str, str]()
        gone: Gone = request.scope[GONE]
        encoder, model = (header_in(request.scope, name) for name in (wire.ENCODER, wire.MODEL))
        self._compare_encoder(encoder)
        extras = Extras(policy.matches, policy.suggestions, self.node.digest_key)

        def name(id: str) -> str:
            towards_peer = naming(id)
            ids[towards_peer] = id
            return towards_peer

        def check() -> None:
            waited = (time.perf_counter() - began) * 1000
            if gone.is_set or (body.deadline_ms is not None and waited > body.deadline_ms):
                raise HttpProblem(504, "the deadline passed before the search was done")

        def work() -> wire.NodeAnswer:
            answer = self.node.searcher.search(
                body,
                snippets=policy.snippets,
                token=token,
                name=name,
                check=check,
                encoder=encoder,
                model=model,
                extras=extras,
                principals=principals,
            )
            own = [ids[hit.document] for hit in answer.hits]
            self.node.audit.record_shown(person, peer, policy, own, body.query)
            self._note(peer, policy, answer)
            hits = self.node.documents.with_access(
                answer.hits, own, peer=peer, policy=policy, principals=principals
            )
            return answer.model_copy(update={"hits": hits})

        answer = await self._in_turn(work)
        self._seconds.observe(time.perf_counter() - began)
        self._hits.add(len(answer.hits), peer=peer)
        request.scope[NOTE]["hits"] = len(answer.hits)
        return _json(answer)

    async def traced_search(self, body: wire.NodeSearch, request: Request) -> Response:
        """Search in a span of the trace, which is a child of a known peer's span."""
        if not is_tracing():
            return await self.search(body, request)
        known = request.scope[CALLER].policy is not None
        span = traced(
            "node",
            lambda: {"isthmus.silo": self.settings.silo},
            lambda response: {"isthmus.state": "answered", "isthmus.hits": request.scope[NOTE]["hits"]},
            lambda: header_in(request.scope, PARENT) if known else "",
        )
        return await span(lambda: self.search(body, request))()

    async def count_matches(self, request: Request, body: wire.CountQuestion) -> Response:
        """Return how many documents answer a question, with noise, and nothing else of them."""
        peer, policy = self._allowed(request, "noised_counts")
        person = self._person(request)
        _, principals = self._rights(policy, person, "noised_counts")
        if len(body.query) > self.settings.limits.query_characters:
            raise HttpProblem(422, "more than this silo's limits allow")
        await self._check_indexed()
        if self.settings.log_queries:
            request.scope[NOTE]["query"] = body.query
        try:
            return _json(await self._in_turn(partial(self.node.count, body, peer, principals)))
        except BudgetExhausted:
            raise HttpProblem(403, wire.BUDGET_SPENT) from None

    def _note(self, peer: str, policy: Policy, answer: wire.NodeAnswer) -> None:
        """Record in the ledger all that an answer takes out of the silo."""
        self.node.note("scores", peer, len(answer.hits), "scores and explanations of hits")
        if policy.snippets:
            self.node.note("snippets", peer, len(answer.hits))
        if answer.matches is not None:
            self.node.note("sums", peer, 1, "numbers of documents that match a query")
        if answer.spellings:
            self.node.note("snippets", peer, sum(1 + len(each.like) for each in answer.spellings), SPELLINGS)

    def _compare_encoder(self, agreed: str) -> None:
        """Log, once for each change, that the silos of a broker agree on another encoder than this silo's."""
        own = self.node.index.snapshot.encoder.fingerprint
        if (own, agreed) != self._differing and another_encoder(own, agreed):
            words = "the silos agree on the encoder %.100s, this one has %s: merged without its dense score"
            _log.warning(words, agreed, own)
            self._differing = own, agreed

    async def feedback(self, request: Request, verdict: wire.AttributedFeedback) -> Response:
        """Store a judgement of a hit that this peer was shown."""
        peer, policy = self._allowed(request, "feedback")
        person = self._person(request)
        _, principals = self._rights(policy, person, "feedback")
        try:
            document = await self._apart(self.node.judge, verdict, peer, principals)
        except DataError:
            raise HttpProblem(404, UNKNOWN_HIT) from None
        self._audit("feedback", peer, verdict.person, documents=[document], query=verdict.query)
        return Response(status_code=204)

    def _audit(self, action: str, peer: str, person: str = "", **about: Any) -> None:
        """Write an entry to the audit log; `person` is the peer's name for somebody."""
        actor = self.node.audit.pseudonym(peer, person) if person else ""
        self.node.audit.record(action, peer=peer, actor=actor, **about)

    def _naming(self, peer: str, policy: Policy) -> Callable[[str], str]:
        """Return how a peer sees documents' ids: as they are, or as pseudonyms if its policy has
        no snippets."""
        return str if policy.snippets else partial(self.node.tokens.name, peer=peer)

    async def judged(self, request: Request, body: wire.ShownTokens) -> Response:
        """Return people's judgements of hits through this peer."""
        peer, _ = self._allowed(request, "feedback")

        def work() -> wire.Verdicts:
            verdicts = self.node.judgements.verdicts(body, peer)
            self.node.note("feedback", peer, sum(map(len, verdicts.verdicts)), THROUGH)
            return verdicts

        return _json(await self._apart(work))

    async def find_judged(self, request: Request, body: wire.DocumentDigests) -> Response:
        """Return which documents of a list this silo has."""
        peer, policy = self._allowed(request, "judgements")
        principals = self._seen_by(policy)
        await self._check_indexed()

        def work() -> wire.PresentDocuments:
            documents = self.node.judgements.present(body, self._naming(peer, policy), principals)
            self.node.note("feedback", peer, len(documents.present), "that it has documents of a list")
            return documents

        return _json(await self._apart(work))

    async def import_judgements(self, request: Request, body: wire.AttributedBatch) -> Response:
        """Store judgements by document id."""
        peer, policy = self._allowed(request, "judgements")
        naming, principals = self._naming(peer, policy), self._seen_by(policy)
        await self._check_indexed()
        return _json(await self._apart(self.node.judgements.take, body, peer, naming, principals))

    async def export_judgements(
        self, request: Request, query: Annotated[wire.JudgementsAfter, Query()]
    ) -> Response:
        """Return the judgements that came through this peer, of documents that everybody may see."""
        peer, policy = self._allowed(request, "judgements")
        principals = self._seen_by(policy)

        def work() -> wire.JudgementPage:
            page = self.node.judgements.page(peer, query.after, self._naming(peer, policy), principals)
            self.node.note("feedback", peer, len(page.judgements), THROUGH)
            return page

        return _json(await self._apart(work))

    async def statistics(self, request: Request) -> Response:
        """Return the silo's own statistics, exact or private; 503 until the whole collection is indexed."""
        peer, _ = self._allowed(request, "counts")
        await self._check_indexed()
        try:
            packed = await self._apart(self.node.statistics, peer)
        except BudgetExhausted:
            raise HttpProblem(403, "the budget for this peer is spent") from None
        tag = etag(packed)
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        return Response(packed, media_type=wire.STATISTICS_TYPE, headers={"etag": tag})

    async def share(self, request: Request) -> Response:
        """Accept the sum of all silos' statistics."""
        self._allowed(request, "counts")
        await self._accept(self.node.share, await request.body())
        return Response(status_code=204)

    async def scale(self, request: Request) -> Response:
        """Return the silo's score sums; 503 until it has measured them."""
        peer, _ = self._allowed(request, "counts")
        sums = await self._apart(self.node.score_sums, peer)
        if sums is None:
            raise HttpProblem(503, "scores are not measured yet", Retry_After="5")
        return _json(sums)

    async def adopt_scale(self, request: Request, body: wire.ScoreScale) -> Response:
        """Score on the scale of all silos."""
        self._allowed(request, "counts")
        await self._accept(self.node.adopt_scale, body)
        return Response(status_code=204)

    async def _check_indexed(self) -> None:
        if await self._apart(lambda: self.node.unindexed):
            raise HttpProblem(503, "still indexing", Retry_After="5")

    async def judged_queries(self, request: Request) -> Response:
        """Return the queries that were judged here."""
        peer, _ = self._allowed(request, "learning")
        await self._check_indexed()
        return _json(await self._apart(self.node.learner.queries, peer))

    async def learning_session(self, request: Request, body: wire.LearningSession) -> Response:
        """Begin a session of learning, or fix its members."""
        peer, _ = self._allowed(request, "learning")
        return _json(await self._possible(self.node.learner.begin, body, peer))

    async def learn(self, request: Request, session: wire.SessionName, number: wire.Count) -> Response:
        """Answer a question about the rows of judged queries with sums under masks."""
        peer, _ = self._allowed(request, "learning")
        question = await request.body()
        answer = await self._accept(self.node.learner.answer, session, number, question, peer)
        return Response(answer, media_type=wire.BUNDLE_TYPE)

    async def adopt(self, request: Request) -> Response:
        """Accept a learned model, and search with it."""
        peer, _ = self._allowed(request, "learning")
        await self._accept(self.node.adopt, await request.body(), peer)
        return Response(status_code=204)

    async def drop_model(self, request: Request) -> Response:
        """Search without the learned model."""
        self._allowed(request, "learning")
        await self._accept(self.node.drop_model)
        return Response(status_code=204)

    async def calibrate(self, request: Request) -> Response:
        """Calibrate the baseline by the silo's own judgements; nothing of them leaves."""
        self._allowed(request, "learning")
        await self._possible(self.node.calibrate_alone)
        return Response(status_code=204)

    async def _possible(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """As `_accept`, for messages that cannot be wrong themselves: its 400 becomes a 409, as the silo
        cannot do it now."""
        try:
            return await self._accept(work, *arguments, **named)
        except HttpProblem as problem:
            raise HttpProblem(409, problem.detail) if problem.status == 400 else problem from None

    async def _accept(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` on a message of a peer; errors in the message become 4xx problems."""
        try:
            return await self._apart(work, *arguments, **named)
        except Refused as error:
            raise HttpProblem(429, str(error), Retry_After="3600") from None
        except (PrivacyError, DataError) as error:
            if isinstance(error, DataError) and error.file is not None:
                _log.error("%s", error)  # the peer need not know which file
                raise HttpProblem(503, "the silo cannot use a file of its own; its log says which") from None
            raise HttpProblem(400, str(error)) from None

    async def put_documents(self, request: Request, body: wire.DocumentBatch) -> Response:
        """Add or change documents."""
        self._allowed(request, "operate")
        request.state.documents = [each.id for each in body.documents]
        drafts = [
            Draft(
                each.id, each.title, each.body, allow=principals_of(each.allow), subject=each.subject.strip()
            )
            for each in body.documents
        ]
        done = await self._apart(self.node.put, drafts)
        return _json(wire.Changed(added=done.added, changed=done.changed))

    async def remove_document(self, request: Request, id: str) -> Response:
        """Remove a document."""
        self._allowed(request, "operate")
        request.state.documents = [id]
        if not await self._apart(self.node.remove, id):
            raise HttpProblem(404, "this silo has no such document")
        return _json(wire.Changed(removed=1))

    async def erase_documents(self, request: Request, body: wire.Erase) -> Response:
        """Erase all that the silo has of documents or of a subject. Returns a receipt."""
        self._allowed(request, "operate")
        if not body.ids and not body.subject:
            raise HttpProblem(404, "no documents and no subject are named")
        try:
            return _json(await self._apart(erase, self.node, body.ids, subject=body.subject))
        except DataError as error:
            raise HttpProblem(404, str(error)) from None

    async def find_documents(self, request: Request, query: Annotated[wire.Find, Query()]) -> Response:
        """Return documents with any of the words, the best first, for the operator."""
        self._allowed(request, "operate")

        def work() -> wire.Listed:
            snapshot = self.node.index.snapshot
            candidates = snapshot.find(query.find, query.k)
            order = Bm25Scorer().score(snapshot, candidates).order
            ids = [candidates.documents[at] for at in order.tolist()]
            documents = self.node.store.get(ids)
            return wire.Listed(
                documents=[
                    wire.Titled(id=id, title=documents[id].title[:300]) for id in ids if id in documents
                ]
            )

        return _json(await self._apart(work))

    async def open_document(
        self, request: Request, id: wire.DocumentId, query: Annotated[wire.AttributedOpening, Query()]
    ) -> Response:
        """Return a whole document, by the ticket of a hit or by a request that its owner has allowed."""
        _, policy = self._allowed(request, "known")
        if policy.operate and not (query.ticket or query.request):
            opened = await self._apart(self.node.documents.read, id)
            if opened is None:
                raise HttpProblem(404, "this silo has no such document")
            self._audit("opened", request.scope[CALLER].name, documents=[id])
            return _json(opened)
        right = "ask" if query.request else "open"
        peer, policy = self._allowed(request, right)
        person = self._person(request)
        policy, principals = self._rights(policy, person, right)
        opener = person or (Person(query.person) if query.person else None)
        note = partial(self.node.audit.record_opened, opener, peer, policy, request=query.request)
        naming = self._naming(peer, policy)
        work = partial(self.node.documents.open, peer=peer, name=naming, note=note, principals=principals)
        return _json(await self._of_hit(work, id, query))

    async def ask(self, request: Request, body: wire.AttributedAsk) -> Response:
        """Ask the owner for the document of a hit."""
        peer, policy = self._allowed(request, "ask")
        person = self._person(request)
        policy, principals = self._rights(policy, person, "ask")
        if policy.ask == "name" and not body.name.strip():
            raise HttpProblem(403, "this silo wants to know by name who asks")
        naming = self._naming(peer, policy)
        work = partial(self.node.documents.ask, principals=principals)
        return _json(await self._of_hit(work, body, peer=peer, name=naming))

    async def requests(self, request: Request, query: Annotated[wire.RequestsOf, Query()]) -> Response:
        """Return one person's requests with the owner's answers; without a person, all that the caller may
        manage."""
        if query.person:
            peer, policy = self._allowed(request, "ask")
            policy, _ = self._rights(policy, self._person(request), "ask")
            naming = self._naming(peer, policy)
            return _json(
                await self._apart(
                    self.node.documents.requests_of, peer=peer, person=query.person, name=naming
                )
            )
        return _json(await self._apart(self.node.documents.requests, self._managed(request)))

    async def answer_request(
        self, request: Request, number: wire.RequestNumber, body: wire.RequestAnswer
    ) -> Response:
        """Store the owner's answer to a request."""
        peer = self._managed(request)
        try:
            return _json(await self._apart(self.node.documents.answer, number, body, peer=peer))
        except DataError as error:
            raise HttpProblem(409, error.problem) from None

    def _managed(self, request: Request) -> str | None:
        """Return the peer for whose requests the caller may answer as the owner: the caller itself, or None
        (all peers) for an operator."""
        _, policy = self._allowed(request, "known")
        return None if policy.operate else self._allowed(request, "manage")[0]

    async def _of_hit(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` on a hit that was shown. All hits that were not shown get the same answer."""
        try:
            return await self._apart(work, *arguments, **named)
        except Refused as error:
            raise HttpProblem(429, str(error), Retry_After="60") from None
        except DataError:
            raise HttpProblem(404, NO_DOCUMENT) from None

    async def sources(self, request: Request) -> Response:
        """Return the result of the last reading of every source, with the names of what could not be read."""
        self._managed(request)
        return _json(wire.SourceStates(sources=self.node.source_states()))

    async def read_sources(self, request: Request) -> Response:
        """Read silo.toml's sources again. Returns one line for every document that could not be read."""
        self._allowed(request, "operate")
        try:
            return _json(await self._apart(self.node.reloaded))
        except ConfigError as error:
            raise HttpProblem(400, str(error)) from None

    async def release(self, request: Request) -> Response:
        """Return what has left the silo, and what may still leave."""
        self._allowed(request, "known")
        return _json(await self._apart(self.node.release))

    async def calibration(self, request: Request) -> Response:
        """Return how reliable the probabilities are."""
        peer, _ = self._allowed(request, "known")
        return _json(await self._apart(self.node.calibration, peer))

    async def audit_entries(self, request: Request, query: Annotated[wire.EntriesAfter, Query()]) -> Response:
        """Return entries of the audit log as lines of JSON. Needs a key with the scope audit, which admin
        does not include."""
        peer = check_auditor(request.scope[CALLER])
        self._audit("read", peer, what=f"entries after {query.after}")
        text = await self._apart(page_of, self.settings.folder, query.after, query.k)
        return Response(text, media_type=wire.LINES_TYPE)

    async def health(self) -> Response:
        """Return the silo's name, role and version: the server is alive."""
        return _json(wire.Health(name=self.settings.silo, role="node", version=__version__))

    async def ready(self, request: Request) -> Response:
        """Whether the silo can answer. The numbers are shown only to callers that the policy knows."""
        state = await self._apart(self.node.ready)
        caller = request.scope[CALLER]
        known = caller.policy or self.settings.peers.get(caller.name) or caller.may("admin")
        if known:
            state = state.model_copy(update={"machine": machine_of(self.settings.folder, self.settings.tls)})
        return _json(state if known else wire.Ready(ready=state.ready), 200 if state.ready else 503)

    async def count(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        self._allowed(request, "known")
        return Response(await self._apart(self.metrics.text), media_type=CONTENT_TYPE)


async def _answered(work: Awaitable[T]) -> T:
    """Return the result of work; a failure of the store becomes a 503."""
    try:
        return await work
    except ServiceError as error:
        if isinstance(error, (HttpProblem, Refused)):
            raise
        _log.error("%s", error)
        raise HttpProblem(503, "the silo's store does not answer", Retry_After="5") from None


def _json(model: BaseModel, status: int = 200) -> Response:
    """Return a model as a JSON response, without FastAPI's second validation."""
    return Response(model.model_dump_json(), status, media_type="application/json")


def node_app(node: Node) -> ASGIApp:
    """Return the node's ASGI app behind `Protect`, its authentication and limits."""
    api, settings = NodeApi(node), node.settings
    app = new_app(f"Isthmus node {settings.silo}", OPEN)
    _routes(app, api)
    return Protect(
        ShortWay(app, "/v1/search", wire.NodeSearch, api.traced_search),
        gate=gate_of(settings),
        limits=settings.limits,
        surface=Surface(open=OPEN, large=LARGE, abandoned=("/v1/search",), hosts=hosts_of(settings)),
        once=Once(),
        observe=api.observe,
        refused=node.audit.refuse,
    )


def _routes(app: FastAPI, api: NodeApi) -> None:
    """Add every path, with its responses for the OpenAPI document."""
    paths: tuple[tuple[str, str, Callable[..., Any], type[BaseModel] | None], ...] = (
        ("POST", "/search", api.search, wire.NodeAnswer),
        ("POST", "/noised-counts", api.count_matches, wire.NoisedCount),
        ("POST", "/feedback", api.feedback, None),
        ("POST", "/judged", api.judged, wire.Verdicts),
        ("POST", "/judgements/places", api.find_judged, wire.PresentDocuments),
        ("POST", "/judgements", api.import_judgements, wire.Imported),
        ("GET", "/judgements", api.export_judgements, wire.JudgementPage),
        ("GET", "/statistics", api.statistics, None),
        ("PUT", "/statistics", api.share, None),
        ("GET", "/scale", api.scale, wire.SiloScores),
        ("PUT", "/scale", api.adopt_scale, None),
        ("GET", "/learning", api.judged_queries, wire.Judged),
        ("POST", "/learning/session", api.learning_session, wire.LearningKey),
        ("POST", "/learning/own", api.calibrate, None),
        ("POST", "/learning/{session}/{number}", api.learn, None),
        ("PUT", "/learning", api.adopt, None),
        ("DELETE", "/learning", api.drop_model, None),
        ("PUT", "/documents", api.put_documents, wire.Changed),
        ("GET", "/documents", api.find_documents, wire.Listed),
        ("GET", "/documents/{id:path}", api.open_document, wire.OpenedDocument),
        ("DELETE", "/documents/{id:path}", api.remove_document, wire.Changed),
        ("POST", "/documents/erase", api.erase_documents, wire.ErasureReceipt),
        ("POST", "/requests", api.ask, wire.DocumentRequest),
        ("GET", "/requests", api.requests, wire.RequestList),
        ("POST", "/requests/{number}", api.answer_request, wire.DocumentRequest),
        ("GET", "/sources", api.sources, wire.SourceStates),
        ("POST", "/sources", api.read_sources, wire.Reread),
        ("GET", "/release", api.release, wire.SiloRelease),
        ("GET", "/audit", api.audit_entries, None),
        ("GET", "/calibration", api.calibration, wire.Calibration),
        ("GET", "/health", api.health, wire.Health),
        ("GET", "/ready", api.ready, wire.Ready),
    )
    for method, path, handler, model in paths:
        app.add_api_route(
            wire.PREFIX + path,
            _audited(api, handler, AUDITED.get((method, path), ""), f"{method} {wire.PREFIX}{path}"),
            methods=[method],
            response_model=model,
            status_code=200 if model is not None or method == "GET" or handler == api.learn else 204,
            responses=PROBLEMS | OWN_PROBLEMS | ANSWERS.get((method, path), {}),
            openapi_extra={"requestBody": BODIES[method, path]} if (method, path) in BODIES else None,
        )
    app.add_api_route("/metrics", api.count, methods=["GET"], **METRICS)


def _audited(api: NodeApi, handler: Callable[..., Any], action: str, what: str) -> Callable[..., Any]:
    """Return the handler with an entry of its action in the audit log, written before its answer leaves."""
    if not action:
        return handler

    @wraps(handler)
    async def recorded(*arguments: Any, request: Request, **named: Any) -> Response:
        response: Response = await handler(*arguments, request=request, **named)
        if getattr(response, "status_code", 200) != 304:  # a 304 releases nothing
            peer, documents = request.scope[CALLER].name, getattr(request.state, "documents", ())
            api.node.audit.record(action, peer=peer, documents=documents, what=what)
        return response

    return recorded


def hosts_of(settings: NodeSettings) -> frozenset[str] | None:
    """Return the names accepted in the Host header; None (any name) with TLS, where a certificate is needed
    anyway, if the settings name none."""
    if settings.tls is not None and not settings.hosts:
        return None
    return names_of(settings.host, settings.hosts)


def gate_of(settings: NodeSettings) -> Gate[Policy]:
    """Return the gate for peers, by certificate or by keys with their names; on loopback without TLS also for
    anybody, if allowed."""
    keys = None if settings.keys is None else ApiKeys(settings.keys)
    anybody = settings.tls is None and ANONYMOUS in settings.peers
    return Gate(peers=settings.peers, keys=keys, strangers=("search",) if anybody else ())
