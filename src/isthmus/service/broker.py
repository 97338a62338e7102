"""The broker: sends a search to all silos at once, with one deadline, and merges the hits by probability or
score.

    broker = Broker(read_broker("broker.toml"))
    await broker.start()
    answer = await broker.search(Search(query="tidal power"))

A silo that is late, refuses, is down or sends an invalid answer is named in the answer to the search,
which is complete otherwise.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from isthmus import __version__
from isthmus.errors import ConfigError, DataError, IsthmusError, Refused, SiloUnavailable
from isthmus.learning import SearchModel
from isthmus.service import wire
from isthmus.service.audit_log import BrokerAudit, keys_in, policies_in
from isthmus.service.breaker import Breaker
from isthmus.service.certificates import (
    ENDING,
    Credentials,
    LiveTls,
    client_context,
    ending,
    machine_of,
    server_name,
)
from isthmus.service.document_routing import DocumentRouter
from isthmus.service.encoding import another_encoder, prevailing
from isthmus.service.http_client import BrokenReply, HttpClient, HttpReply
from isthmus.service.judgement_routing import JudgementRouter
from isthmus.service.limits import MESSAGE, HttpProblem, message_header
from isthmus.service.logs import ABOUT
from isthmus.service.merging import Merger, ModelExchange
from isthmus.service.metrics import DISK, INFO, Labels, Metrics, disk_free
from isthmus.service.people import HEADER, Person, Sign, Statement, digest_of, signer, token_signer
from isthmus.service.query_language import ParsedQuery, judged_query, parse, unknown_silos
from isthmus.service.reliability import learned_curve
from isthmus.service.results import (
    facets_of,
    folded,
    group_copies,
    has_more,
    in_order,
    narrowing_of,
    suggestion_of,
    understood_query,
)
from isthmus.service.scale import ScaleExchange
from isthmus.service.security import LiveSecret, pseudonym
from isthmus.service.settings import BrokerSettings, SiloAddress, secret
from isthmus.service.statistics import StatisticsExchange, SumExchange, keep_exchanging
from isthmus.service.tracing import Attributes, trace_headers, traced
from isthmus.service.training import training_of
from isthmus.service.versions import ModelVersions
from isthmus.tables import Unpacker

JSON = "application/json"
ENGINE = "engine"
"""Name of the scorer of silos whose scores are their engine's own."""
WITHOUT_STATISTICS = (ENGINE, "date")
"""Scorers that do not use the statistics of all silos."""
LAG = 0.25
"""Seconds by which a deadline may be noticed late. If it is more, this process was overloaded, not
the silo."""
MOST_UNPACKED = 64 << 20
"""Bytes that the JSON of a silo's answer may take in memory."""
MOST_UNCOUNTED = MOST_UNPACKED // 128
"""Bytes of JSON that fit into this limit whatever they contain, so that they need not be weighed."""
INSTANT = 0.01
"""Seconds by which a timer may fire early."""
GRACE = 0.05
"""Least seconds that a search waits for silos on trial after all others have answered."""
TRIED = 8
"""Most requests to a silo on trial that are followed to their deadline after their search was answered."""
START_SECONDS = 0.5
"""Seconds that the start waits for the silos' encoders. Those that come later are used all the same."""
GROWTH = 1.25
"""Factor by which the number of answered silos grows before a stream merges their hits again."""
VIEW_SECONDS, FRESH_SECONDS = 2.0, 2.0
"""Seconds that a view waits for the silos, and seconds for which it is cached."""

M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger("isthmus.service")


@dataclass
class SiloClient:
    """One silo as the broker sees it: its connections, its breaker and how many documents it has."""

    name: str
    url: str
    http: HttpClient
    breaker: Breaker
    headers: Mapping[str, str] = field(repr=False)
    documents: int | None = None
    """How many documents it has: as its answers say, or as it states itself (`learn_size`) if its answers
    count only what one person may see."""
    encoder: str = ""
    """Fingerprint of its encoder, as it stated last."""
    search_level: int = 0
    """The level of `wire.NodeSearch` that it supports, as it stated last."""
    trials: set[asyncio.Task[None]] = field(default_factory=set, repr=False)
    """Requests of searches that were answered without it, because it is on trial, before their deadline."""
    signer: Callable[[Credentials | None], Sign] | None = field(default=None, repr=False)
    """Returns what signs statements of who asks, given a connection's credentials; None for a silo that does
    not receive such statements."""
    naming: Callable[[str], str] = str
    """Returns a person's name towards this silo."""

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = JSON,
        *,
        unless: str = "",
        headers: Mapping[str, str] | None = None,
        person: Person | None = None,
    ) -> HttpReply:
        """Send one message to the silo, with a header that protects against replays; see `Talks`.

        Headers without a value are left out. If `person` is given and the silo receives statements of who
        asks, a signed one is added.
        """
        sent = {**self.headers, **message_header()}
        if body:
            sent["content-type"] = kind
        if unless:
            sent["if-none-match"] = unless
        if headers:
            sent |= {name: text for name, text in headers.items() if text}
        over = self.http.credentials
        if person is not None and self.signer is not None:
            called = Person(self.naming(person.id), person.groups)
            request = f"{method} {wire.PREFIX}{path}"
            statement = Statement(called, self.name, request, sent[MESSAGE], digest_of(body))
            sent[HEADER] = statement.signed(self.signer(over))
        return await self.http.ask(method, wire.PREFIX + path, headers=sent, body=body, over=over)

    async def read(self, path: str, model: type[M]) -> M:
        """GET a path of the silo as a message; raises SiloUnavailable or Refused."""
        return understood(await self.ask("GET", path), model)

    async def send(self, path: str, message: BaseModel, model: type[M]) -> M:
        """POST a message to the silo and return its reply; raises SiloUnavailable or Refused."""
        return understood(await self.ask("POST", path, message.model_dump_json().encode()), model)

    def learn_size(self, state: wire.Ready) -> None:
        """Store how many documents the silo states, if its answers count only what one person may see."""
        if self.signer is not None and state.indexed:
            self.documents = state.indexed

    def status(
        self,
        status: wire.Status,
        detail: str = "",
        took: float | None = None,
        answer: wire.NodeAnswer | None = None,
    ) -> wire.SiloStatus:
        """The status of this silo in the answer to a search; `took` in seconds."""
        return wire.SiloStatus(
            silo=self.name,
            status=status,
            detail=detail,
            took_ms=None if took is None else round(took * 1000, 1),
            documents=self.documents if answer is None else answer.documents,
            scorer="" if answer is None else answer.scorer,
            model="" if answer is None else answer.model,
            matches=None if answer is None or answer.matches is None else answer.matches.count,
        )


@dataclass(frozen=True)
class _Question:
    """A search as it is sent to the silos: its JSON body and its deadline in seconds."""

    request: wire.Search
    query: ParsedQuery
    model: SearchModel | None
    version: str
    """Version of the model in use when the search began. Silos are asked for it, and answers are merged by
    it."""
    body: bytes
    extended: bytes
    """The body for silos that support the fields of this release."""
    headers: Mapping[str, str]
    """The encoder that silos agree on, and the version of the model."""
    seconds: float
    patient: bool
    """Whether the deadline is at least the broker's own. A caller in a hurry must not open a silo's breaker
    for all other callers."""
    person: Person | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.began + self.seconds - time.monotonic()


_Outcome = tuple[wire.SiloStatus, wire.NodeAnswer | None]
_Asking = asyncio.Task[_Outcome]


async def _wait(trusted: set[_Asking], trials: set[_Asking], question: _Question) -> None:
    """Wait until the deadline, or until all trusted silos have answered and then as long again for silos on
    trial."""
    if trusted:
        await asyncio.wait(trusted, timeout=question.left)
        limit = max(GRACE, question.seconds - question.left)
    else:
        limit = question.left  # only silos on trial: nobody waits longer for them
    if trials and question.left > 0:
        await asyncio.wait(trials, timeout=min(limit, question.left))


def _is_answered(task: _Asking) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _give_up(silo: SiloClient, task: _Asking, question: _Question, *, others: bool) -> None:
    """Stop asking a silo that has not answered in time. `others` says whether other silos have."""
    task.cancel()
    if not question.patient or not -LAG < question.left <= INSTANT:
        silo.breaker.dropped()
        return
    if others:
        silo.breaker.held_up(question.began)
    silo.breaker.late(question.began)


def _log_change(silo: str, seconds: float | None, reason: str) -> None:
    """Log that a silo is down, or back after so many seconds."""
    event = "silo down" if seconds is None else "silo back"
    about: dict[str, str | float] = {"silo": silo, "event": event, "reason": reason}
    if seconds is None:
        _log.warning("silo %s is down: %s", silo, reason, extra={ABOUT: about})
    else:
        about["seconds"] = round(seconds, 1)
        _log.info("silo %s is back after %.1f s", silo, seconds, extra={ABOUT: about})


def _skipped(silo: SiloClient) -> _Outcome:
    reason, wait = silo.breaker.reason, silo.breaker.wait
    detail = f"not asked after failing repeatedly ({reason}); next try in {max(wait, 1):.0f} s"
    return silo.status(silo.breaker.last, detail), None


def _unanswered(silo: SiloClient, task: _Asking, question: _Question, *, others: bool) -> wire.SiloStatus:
    """Return the status of a silo that the search no longer waits for."""
    if question.left <= INSTANT:
        _give_up(silo, task, question, others=others)
        return silo.status("late", f"no answer within {1000 * question.seconds:.0f} ms")
    follow = asyncio.create_task(_follow(silo, task, question))
    silo.trials.add(follow)
    follow.add_done_callback(silo.trials.discard)
    return silo.status("late", "slow or failing lately, not waited for")


async def _follow(silo: SiloClient, task: _Asking, question: _Question) -> None:
    """Wait for an answer after its search has been answered, to see whether it comes before the deadline."""
    try:
        if len(silo.trials) <= TRIED:
            await asyncio.wait([task], timeout=question.left)
    finally:
        if not task.done():
            _give_up(silo, task, question, others=True)


class Busy(SiloUnavailable):
    """The silo is up, but answered that it is overloaded or out of time."""


def understood(reply: HttpReply, model: type[M]) -> M:
    """Parse a reply into a message; raises SiloUnavailable or Refused for anything else."""
    if reply.status != 200:
        raise failure_of(reply)
    if reply.kind != JSON:
        raise BrokenReply("its answer is not JSON")
    try:
        if len(reply.body) > MOST_UNCOUNTED:
            Unpacker(MOST_UNPACKED).weigh_json(reply.body)
        return model.model_validate_json(reply.body)
    except (DataError, ValidationError):
        raise BrokenReply("its answer is not of the documented form") from None


def failure_of(reply: HttpReply) -> IsthmusError:
    """Return the exception for an unsuccessful reply, in the broker's own words: the silo's text is not
    trusted."""
    if reply.status == 429 and wire.SEEN.encode() in reply.body:
        return Refused("you have seen as much of it as its policy shows: its owner may allow more")
    failures = {
        401: Refused("it does not know this broker, or not its signature of who asks"),
        403: Refused("its policy does not allow this"),
        428: Refused("it answers known persons only: people = true for it here, and callers who sign in"),
        409: Refused("it took the message for a replay: compare the clocks"),
        429: Refused("it takes no more requests for the moment"),
        503: SiloUnavailable("it is not ready"),
        504: Busy("it had no time before the deadline"),
    }
    return failures.get(reply.status) or BrokenReply(f"it answered with status {reply.status}")


def _answer_attributes(answer: wire.Answer) -> Attributes:
    answered = sum(silo.status == "answered" for silo in answer.silos)
    counts = {"silos": len(answer.silos), "answered": answered, "hits": len(answer.hits)}
    return {f"isthmus.{name}": count for name, count in counts.items()}


def _outcome_attributes(outcome: _Outcome) -> Attributes:
    status, answer = outcome
    about: dict[str, str | int | float] = {"isthmus.state": status.status}
    if answer is not None:
        about |= {"isthmus.hits": len(answer.hits), "isthmus.ms": status.took_ms or 0.0}
    return about


class Broker:
    """Sends searches, feedback and views to all silos and merges their answers."""

    def __init__(self, settings: BrokerSettings, *, most: int = 8 << 20) -> None:
        """`most` is the largest reply of a silo in bytes."""
        if not settings.silos:
            raise ConfigError(
                "a broker needs at least one silo", key="silos", expected="[silos.NAME] url = …"
            )
        self.settings = settings
        tls = None if settings.tls is None else LiveTls(settings.tls, client_context)
        key = secret(settings.node_key, "node_key")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.silos: dict[str, SiloClient] = {}
        for name, silo in settings.silos.items():
            over = tls if silo.url.startswith("https:") else None
            http = HttpClient(silo.url, tls=over, name=server_name(name), most=most)
            breaker = Breaker(settings.breaker, changed=partial(_log_change, name))
            client = SiloClient(name, silo.url, http, breaker, headers)
            if silo.people:
                client.signer = self._signer(silo, key)
                client.naming = str if silo.identities else partial(self._pseudonym, name)
            self.silos[name] = client
        self.exchange = StatisticsExchange(
            list(self.silos.values()), documents=lambda name: self.silos[name].documents
        )
        self.scale = ScaleExchange(list(self.silos.values()))
        self.judgements = JudgementRouter(self.silos, self._pseudonym)
        self.documents = DocumentRouter(self.silos, self._pseudonym, understood)
        self.models = ModelExchange(list(self.silos.values()), ModelVersions(settings.folder / "learned"))
        self._views: dict[str, tuple[float, asyncio.Future[Any]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._agreed: str | None = None
        self.audit = BrokerAudit(
            settings.folder,
            settings.audit,
            watched={
                "keys": lambda: keys_in(
                    settings.keys, settings.tls, settings.folder / "persons.key", owner=self.audit.owner
                ),
                "policy": lambda: policies_in(settings.silos) | _rights_of_groups(settings),
            },
        )
        self._count()

    def _signer(self, silo: SiloAddress, key: str) -> Callable[[Credentials | None], Sign]:
        """Return what makes signatures that the silo accepts: by the key of the certificate, or by the API
        key."""
        if silo.url.startswith("https:") and self.settings.tls is not None:
            return lambda over: signer(over.key if over is not None else b"")
        if not key:
            raise ConfigError(
                "people = true needs something to sign with",
                key="silos",
                expected="https:// with [tls], or node_key",
            )
        return lambda over: token_signer(key)

    def _count(self) -> None:
        self.metrics = Metrics()
        counter, histogram = self.metrics.counter, self.metrics.histogram
        meaning = "Searches, by whether they found anything."
        self._searches = counter("isthmus_searches_total", meaning, "found")
        self._answers = counter("isthmus_silo_answers_total", "What silos did.", "silo", "status")
        self._seconds = histogram("isthmus_silo_seconds", "Times of silos that answered.", "silo")
        self.metrics.gauge(
            "isthmus_silo_open",
            "1 for a silo that is left alone for now.",
            lambda: {(silo.name,): float(silo.breaker.state == "open") for silo in self.silos.values()},
            "silo",
        )
        gauge = self.metrics.gauge
        gauge(*ENDING, lambda: ending(self.settings.tls))
        gauge(*INFO, lambda: {(__version__,): 1}, "version")
        gauge(*DISK, lambda: disk_free(self.settings.folder))
        meaning = "1 for a silo whose last search was without the model in use."
        gauge("isthmus_model_lacking", meaning, self.models.lackers, "silo")
        meaning = "Calibration error of what is learned on queries held out: as measured, of a perfect model."
        gauge("isthmus_calibration_error", meaning, self._calibration_error, "of")

    def _calibration_error(self) -> dict[Labels, float]:
        version = self.models.versions.in_use()
        honest = ((version and version.record) or {}).get("calibration", {}).get("after", {})
        measured = {("measured",): honest.get("ece"), ("perfect",): honest.get("floor")}
        return {of: error for of, error in measured.items() if error is not None}

    async def start(self) -> None:
        """Start the exchange of statistics and score sums, and ask silos which encoders they have."""
        self.audit.record("started", what=f"isthmus {__version__}")
        self._tasks.append(asyncio.create_task(self._ask_encoders()))
        await asyncio.wait(self._tasks, timeout=START_SECONDS)
        shared: list[SumExchange] = [self.exchange, self.scale] if self.settings.share_statistics else []
        self._tasks.append(asyncio.create_task(keep_exchanging(*shared, self.models)))

    async def stop(self) -> None:
        """Cancel all running tasks, and close the connections."""
        trials = [task for silo in self.silos.values() for task in silo.trials]
        for task in [*self._tasks, *trials, *(task for _, task in self._views.values())]:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        for silo in self.silos.values():
            silo.http.close()
        await asyncio.to_thread(self.audit.close)

    @traced("search", lambda *arguments, **named: {}, _answer_attributes)
    async def search(
        self,
        request: wire.Search,
        person: Person | None = None,
        *,
        progress: Callable[[wire.SiloProgress], None] | None = None,
    ) -> wire.Answer:
        """Ask the silos, wait for all of them or the deadline, and merge their hits by probability.

        `progress` is called at once for silos that are not asked, and for each other silo when it answers.
        If the search is cancelled, its requests are too, so that nodes can skip them.
        """
        query = parse(request.query)
        wanted = set(query.silos(list(self.silos)))
        silos = [silo for silo in self._named(request.silos) if silo.name in wanted]
        deadline = request.deadline_ms or self.settings.deadline_ms
        self.models.refresh()
        question = _Question(
            request,
            query,
            self.models.model,
            self.models.version,
            *_questions(request, query, deadline, several=len(silos) > 1),
            {wire.ENCODER: self.encoder, wire.MODEL: self.models.version},
            deadline / 1000,
            patient=deadline >= self.settings.deadline_ms,
            person=person,
        )
        admitted = [silo for silo in silos if silo.breaker.admits()]
        tasks = {silo.name: asyncio.create_task(self._ask(silo, question)) for silo in admitted}
        if progress is not None:
            skipped = [_skipped(silo)[0] for silo in silos if silo.name not in tasks]
            self._report(progress, skipped, tasks, question)
        try:
            trials = {tasks[silo.name] for silo in admitted if not silo.breaker.trusted}
            await _wait(set(tasks.values()) - trials, trials, question)
        except asyncio.CancelledError:
            for silo in admitted:
                tasks[silo.name].cancel()
                silo.breaker.dropped()
            raise
        statuses, answers = self._outcomes(silos, tasks, question)
        answer, likely = self._merged(question, statuses, answers)
        self._searches.add(found="yes" if likely else "no")
        return answer

    def _merged(
        self,
        question: _Question,
        statuses: list[wire.SiloStatus],
        answers: Mapping[str, wire.NodeAnswer],
    ) -> tuple[wire.Answer, int]:
        """Merge the hits of these answers. Returns the answer, and how many hits of all pages reach the
        threshold."""
        request, query, model = question.request, question.query, question.model
        merger = None if model is None else Merger.of(model, question.version, answers)
        lists = [answer.hits if merger is None else merger.hits(answer) for answer in answers.values()]
        apart = {status.silo for status in statuses if status.scorer == ENGINE}
        merged = group_copies(in_order(lists, last=_odd_ones(statuses), apart=apart))
        threshold = max(request.threshold, self.settings.threshold)
        rated = merger is not None and any(group[0].probability for group in merged)
        likely = [group for group in merged if (group[0].probability or 0.0) >= threshold]
        uncalibrated = sum(first.probability is None for first, *_ in merged) if threshold > 0 else 0
        end = min(request.offset + request.k, wire.MOST_HITS)
        answer = wire.Answer.model_construct(
            hits=[folded(group) for group in likely[request.offset : end]],
            silos=statuses,
            threshold=threshold,
            below=len(merged) - len(likely),
            without_probability=uncalibrated,
            model="" if merger is None else merger.version,
            unlike=merger is not None and rated and merger.unlike,
            overrated=merger is not None and rated and merger.overrated(len(self.silos)),
            understood=understood_query(query, unknown_silos(query, self.silos)),
            offset=request.offset,
            more=end < wire.MOST_HITS and (len(likely) > end or has_more(lists, end, threshold)),
            facets=facets_of(answers) if request.facets else None,
            suggestion=suggestion_of(request.query, answers, query.misread) if request.suggest else None,
            took_ms=round((time.monotonic() - question.began) * 1000, 1),
        )
        return answer, len(likely)

    def _report(
        self,
        progress: Callable[[wire.SiloProgress], None],
        skipped: Iterable[wire.SiloStatus],
        tasks: Mapping[str, _Asking],
        question: _Question,
    ) -> None:
        """Call `progress` for silos that are not asked, and for the others when they answer, with the best
        hits so far; the last one has no hits, since the whole answer follows. With many silos, hits are
        merged again only when a quarter more have answered, so that a stream costs a few merges and not
        one a silo."""
        merged = 0

        def answered(task: _Asking) -> None:
            nonlocal merged
            if not _is_answered(task):
                return
            (status, answer), hits = task.result(), None
            done = [each.result() for each in tasks.values() if _is_answered(each)]
            waiting = not all(each.done() for each in tasks.values())
            if answer is not None and waiting and len(done) >= GROWTH * merged:
                merged = len(done)
                answers = {each.silo: each for _, each in done if each is not None}
                hits = self._merged(question, [each for each, _ in done], answers)[0].hits
            count = 0 if answer is None else len(answer.hits)
            progress(wire.SiloProgress(**status.model_dump(), count=count, hits=hits))

        for status in skipped:
            progress(wire.SiloProgress(**status.model_dump()))
        for task in tasks.values():
            task.add_done_callback(answered)

    def _outcomes(
        self, silos: Iterable[SiloClient], tasks: Mapping[str, asyncio.Task[_Outcome]], question: _Question
    ) -> tuple[list[wire.SiloStatus], dict[str, wire.NodeAnswer]]:
        """Return the status of every silo at the deadline, and the answers that have arrived."""
        statuses, answers = [], dict[str, wire.NodeAnswer]()
        others = any(task.done() for task in tasks.values())
        for silo in silos:
            task = tasks.get(silo.name)
            if task is None or task.done():
                status, answer = _skipped(silo) if task is None else task.result()
            else:
                status, answer = _unanswered(silo, task, question, others=others), None
            statuses.append(status)
            if answer is not None:
                answers[silo.name] = answer
            self._answers.add(silo=silo.name, status=status.status)
        return statuses, answers

    def _named(self, names: Iterable[str] | None) -> list[SiloClient]:
        if names is None:
            return list(self.silos.values())
        wanted = dict.fromkeys(names)
        if not wanted or not wanted.keys() <= self.silos.keys():
            raise HttpProblem(404, f"silos: only names that there are: {', '.join(self.silos)}")
        return [self.silos[name] for name in wanted]

    @traced("silo", lambda broker, silo, question: {"isthmus.silo": silo.name}, _outcome_attributes)
    async def _ask(self, silo: SiloClient, question: _Question) -> _Outcome:
        """Ask one silo and record the outcome in its breaker. Returns its status, and its answer if there is
        one."""
        breaker, began = silo.breaker, time.monotonic()
        try:
            body = question.extended if silo.search_level else question.body
            headers = {**question.headers, **trace_headers()}
            reply = await silo.ask("POST", "/search", body, headers=headers, person=question.person)
            if reply.status == 422:
                raise Refused(
                    "it takes no such search: its version knows no filters, or its limits are others"
                )
            answer = understood(reply, wire.NodeAnswer)
            breaker.responded(began)
            if answer.silo != silo.name or any(hit.silo != silo.name for hit in answer.hits):
                raise BrokenReply("its answer names another silo")
        except Refused as error:
            breaker.succeeded()
            return silo.status("refused", str(error)), None
        except Busy as error:
            breaker.dropped()
            return silo.status("late", str(error)), None
        except (SiloUnavailable, OSError) as error:
            status: wire.Status = "broken" if isinstance(error, BrokenReply) else "down"
            if question.left < question.seconds / 2:
                breaker.delayed()
            breaker.failed(status, str(error))
            return silo.status(status, str(error)), None
        breaker.succeeded()
        took = time.monotonic() - began
        known = math.inf if silo.documents is None else silo.documents
        stated = silo.encoder, silo.documents
        if silo.signer is None or answer.documents > known:  # with a signer, one person's documents
            silo.documents = answer.documents
        silo.encoder = answer.encoder
        silo.search_level = answer.search_level
        if (silo.encoder, silo.documents) != stated:
            self._agreed = None
        self._seconds.observe(took, silo=silo.name)
        remark = self._remark(silo, answer)
        return silo.status("answered", remark, took, answer), answer

    def _remark(self, silo: SiloClient, answer: wire.NodeAnswer) -> str:
        if not answer.documents:
            return "it has no document in its index yet"
        remarks = (
            "" if answer.scorer in WITHOUT_STATISTICS else self.exchange.remark(answer.statistics),
            self.scale.remark(silo.name, answer.scorer, answer.scale),
            another_encoder(silo.encoder, self.encoder),
            self.models.remark(silo.name, answer),
            answer.detail,
        )
        return "; ".join(filter(None, remarks))

    @property
    def encoder(self) -> str:
        """Fingerprint of the encoder that silos agree on: "none" where all differ, empty before any has
        stated one."""
        if self._agreed is None:  # cached, since every silo's answer is compared with it
            stated = [(silo.encoder, silo.documents or 0) for silo in self.silos.values()]
            self._agreed = prevailing(stated)
        return self._agreed

    async def _ask_encoders(self) -> None:
        """Ask every silo for its encoder before the first search."""

        async def one(silo: SiloClient) -> None:
            with suppress(TimeoutError, Refused, SiloUnavailable, OSError):
                async with asyncio.timeout(VIEW_SECONDS):
                    state = await silo.read("/ready", wire.Ready)
                    silo.encoder, silo.search_level = state.encoder, state.search_level
                    silo.learn_size(state)
                    self._agreed = None

        await asyncio.gather(*map(one, self.silos.values()))

    async def feedback(self, feedback: wire.Feedback, person: Person) -> None:
        """Send a person's judgement to the silo that showed the hit. The broker stores nothing of it."""
        silo = self.silos.get(feedback.silo)
        if silo is None:
            raise HttpProblem(404, "no such silo")
        named = self._pseudonym(silo.name, person.id)
        named_query = {**feedback.model_dump(), "query": judged_query(feedback.query)}
        body = wire.AttributedFeedback(**named_query, person=named).model_dump_json().encode()
        try:
            async with asyncio.timeout(self.settings.deadline_ms / 1000):
                reply = await silo.ask("POST", "/feedback", body, person=person)
        except (TimeoutError, SiloUnavailable, OSError):
            raise HttpProblem(503, "the silo does not answer; try again later", Retry_After="5") from None
        if reply.status in (404, 422):
            raise HttpProblem(reply.status, "the silo did not show this hit within a day: search again")
        if reply.status not in (200, 204):
            error = failure_of(reply)
            raise HttpProblem(
                403 if isinstance(error, Refused) else 502, f"the silo did not take it: {error}"
            )

    def _pseudonym(self, silo: str, person: str) -> str:
        return pseudonym(self._persons(), silo, person)

    @cached_property
    def _persons(self) -> LiveSecret:
        """The key of the pseudonyms under which people's judgements reach silos."""
        return LiveSecret(self.settings.folder / "persons.key")

    async def view_silos(self) -> wire.SiloList:
        """Return every silo's health and releases."""
        views = await asyncio.gather(*(self._view(silo) for silo in self.silos.values()))
        page = self.settings.page
        return wire.SiloList(
            silos=views,
            statistics=self.exchange.version,
            encoder=self.encoder,
            about=page.about,
            queries=list(page.queries),
            machine=machine_of(self.settings.folder, self.settings.tls),
        )

    async def _view(self, silo: SiloClient) -> wire.SiloState:
        problem = self.exchange.problems.get(silo.name, "")
        fields: dict[str, Any] = {"silo": silo.name, "url": silo.url, "status": "answered"}
        fields["about"] = self.settings.silos[silo.name].about
        fields["detail"] = f"its statistics are left out of the sum: {problem}" if problem else ""
        try:
            async with asyncio.timeout(VIEW_SECONDS):
                sent = time.time()
                reply = await silo.ask("GET", "/ready")
                middle = (sent + time.time()) / 2
                if reply.status == 503:  # the body of a 503 states the reason
                    reply = HttpReply(200, reply.kind, reply.body)
                fields["ready"] = ready = understood(reply, wire.Ready)
                silo.encoder = ready.encoder or silo.encoder
                silo.learn_size(ready)
                self._agreed = None
                if ready.machine is not None and ready.machine.time is not None:
                    fields["skew"] = ready.machine.time - middle
                fields["detail"] = (
                    fields["detail"]
                    or another_encoder(silo.encoder, self.encoder)
                    or self.models.lacking(silo.name, ready.model)
                )
                fields["release"] = await silo.read("/release", wire.SiloRelease)
                fields["sources"] = await self.documents.sources(silo.name)
        except Refused as error:
            fields |= {"status": "refused", "detail": str(error)}
        except TimeoutError:
            fields |= {"status": "late", "detail": "no answer in time"}
        except (SiloUnavailable, OSError) as error:
            fields |= {"status": "broken" if isinstance(error, BrokenReply) else "down", "detail": str(error)}
        return wire.SiloState(**fields)

    async def view_calibration(self) -> wire.Calibration:
        """Return the reliability curve of the learned model, and those that silos publish."""

        async def curves(silo: SiloClient) -> list[wire.ReliabilityCurve]:
            try:
                async with asyncio.timeout(VIEW_SECONDS):
                    calibration_curves = (await silo.read("/calibration", wire.Calibration)).curves
            except (TimeoutError, Refused, SiloUnavailable, OSError):
                return []
            return [curve for curve in calibration_curves if curve.silo == silo.name]

        every = await asyncio.gather(*(curves(silo) for silo in self.silos.values()))
        history = await asyncio.to_thread(self.models.versions.history)
        record = next((each.record for each in history if each.current), None)
        learned = None if record is None else learned_curve(record)
        together = [] if learned is None else [learned]
        return wire.Calibration(
            curves=[*together, *(curve for silo_curves in every for curve in silo_curves)]
        )

    async def view_training(self) -> wire.TrainingView:
        """Return the progress of the training run whose folder the settings name."""
        folder = self.settings.training
        if folder is None:
            return wire.TrainingView(run="")
        return await asyncio.to_thread(training_of, folder)

    async def cached_view(self, name: str, make: Callable[[], Awaitable[M]]) -> M:
        """A view, computed at most once in `FRESH_SECONDS` for all callers."""
        now = time.monotonic()
        if name not in self._views or now - self._views[name][0] > FRESH_SECONDS:
            self._views[name] = (now, asyncio.ensure_future(make()))
        view: M = await asyncio.shield(self._views[name][1])
        return view

    def ready(self) -> wire.Ready:
        """Return whether at least one silo is thought to answer: one whose breaker is not open."""
        usable = [silo for silo in self.silos.values() if silo.breaker.state != "open"]
        closed = sorted(set(self.silos) - {silo.name for silo in usable})
        return wire.Ready(
            ready=bool(usable),
            detail=f"left alone for now: {', '.join(closed)}" if closed else "",
            documents=sum(silo.documents or 0 for silo in self.silos.values()),
            statistics=self.exchange.version,
            encoder=self.encoder,
            model=self.models.version,
        )


def _rights_of_groups(settings: BrokerSettings) -> dict[str, str]:
    """Return the scopes of the identity provider's groups, by name."""
    groups = {} if settings.oidc is None else settings.oidc.groups
    return {f"group:{name}": " ".join(scopes) for name, scopes in groups.items()}


def _odd_ones(statuses: Iterable[wire.SiloStatus]) -> set[str]:
    """Return the silos whose scorer is not the most frequent one; of two equally frequent scorers, the hybrid
    wins."""
    scorers = {
        status.silo: status.scorer or "bm25"
        for status in statuses
        if status.status == "answered" and status.scorer != ENGINE
    }
    counts = Counter(scorers.values())
    usual = max(counts, key=lambda scorer: (counts[scorer], scorer == "hybrid"), default="")
    return {silo for silo, scorer in scorers.items() if scorer != usual}


def _questions(
    request: wire.Search, query: ParsedQuery, deadline: int, *, several: bool
) -> tuple[bytes, bytes]:
    """Return the search as JSON for all nodes, and the same with the fields that only nodes of this release
    know.

    Neither has the threshold: the broker applies it, to count the hits below. Constraints that narrow a
    search are in both, since hits that do not meet them are no answer; other new fields only in the
    second.
    """
    depth = min(request.offset + request.k, wire.MOST_HITS)  # pages beyond MOST_HITS are empty
    payload: dict[str, Any] = {
        "query": query.words,
        "k": depth,
        "deadline_ms": deadline,
        "explain": request.explain,
    }
    if query.narrows or not query.words.strip():
        payload["only"] = narrowing_of(query)
    extras = {"matches": request.facets, "suggest": request.suggest, "fold": several}
    extended = {**payload, **{name: True for name, is_wanted in extras.items() if is_wanted}}
    return json.dumps(payload).encode(), json.dumps(extended).encode()


def silo_pseudonym(folder: Path, silo: str, person: str) -> str:
    """Return a person's pseudonym in a silo, for the broker with this folder. Raises a DataError if the
    broker has made no pseudonyms yet."""
    file = folder / "persons.key"
    if not file.exists():
        raise DataError("this broker has named nobody to a silo yet", file=file, cure="check the folder")
    return pseudonym(LiveSecret(file)(), silo, person)
