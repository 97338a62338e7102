"""A broker's API from Python.

with Client("http://127.0.0.1:8100") as broker:
    answer = broker.search("tidal power", threshold=0.7)
    for hit in answer.hits:
        print(hit.probability, hit.silo, hit.title)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from isthmus.errors import Refused, ServiceError, SiloUnavailable
from isthmus.files import private_file
from isthmus.service import wire
from isthmus.service.certificates import trusting
from isthmus.service.http_client import HttpReply

KEY_VARIABLE, AUTHORITY_VARIABLE = "ISTHMUS_API_KEY", "ISTHMUS_AUTHORITY"
MOST_BYTES = 8 << 20
"""Of an answer."""
LONGEST_KEY = 512
"""Characters of an API key; those that `isthmus keys` writes have fewer than 100."""
DEFAULT_URL = "http://127.0.0.1:8100"
PATIENCE, LEAST_WAIT = 60.0, 0.2
"""Seconds that a request waits in all where the broker says later (429), and at least each time."""
LOOK_EVERY = 1.0
"""Seconds between two questions about how far learning is."""
BATCH_BYTES = 256 << 10
"""Of the judgements in one request; a broker takes a megabyte unless it was told otherwise."""

M = TypeVar("M", bound=BaseModel)


class NotTaken(ServiceError):
    """The request is not of the form that the broker documents (422)."""


class Client:
    """One broker. A failure is a ServiceError that says what to do: Refused, SiloUnavailable or itself.

    The API key is given as text, as the path of a file that only its owner can read, or in the environment
    as ISTHMUS_API_KEY. `authority` (or ISTHMUS_AUTHORITY) is the certificate that the broker's own must come
    from, where the system does not know it. A request that comes too soon (429) is sent again when the broker
    says, for at most `patience` seconds.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | Path | None = None,
        authority: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        patience: float = PATIENCE,
    ) -> None:
        token = _token(key)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        trusted = authority or os.environ.get(AUTHORITY_VARIABLE)
        verify = trusting(trusted) if url.startswith("https:") else True
        self.url, self._seconds, self._patience = url.rstrip("/"), timeout, patience
        self.key_expires: str | None = None
        """When the API key ends, once an answer has said that it does soon."""
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, verify=verify, timeout=timeout)
            self._http.headers["accept-encoding"] = "identity"  # nothing that unpacks to more than it is
        except httpx.InvalidURL:
            raise ServiceError(f"{url!r} is not a URL") from None

    def search(
        self,
        query: str,
        *,
        k: int = 10,
        threshold: float = 0.0,
        silos: list[str] | None = None,
        explain: bool = False,
        deadline_ms: int | None = None,
        offset: int = 0,
        facets: bool = False,
        suggest: bool = False,
    ) -> wire.Answer:
        """Search all silos, or those named.

        `offset` passes over the hits of the pages before, `facets` counts what matches, `suggest` looks for
        other spellings of words that hardly any document has; a broker that knows neither does without.
        """
        payload = {"query": query, "k": k, "threshold": threshold, "explain": explain}
        payload |= {"silos": silos} if silos is not None else {}
        payload |= {"deadline_ms": deadline_ms} if deadline_ms is not None else {}
        payload |= {"offset": offset} if offset else {}
        extras = {name: True for name, is_wanted in (("facets", facets), ("suggest", suggest)) if is_wanted}
        try:
            reply = self._ask("POST", "/v1/search", payload | extras)
        except NotTaken:
            if not extras:
                raise
            reply = self._ask("POST", "/v1/search", payload)  # a broker of the release before
        return self._read(reply, wire.Answer)

    def count(
        self, query: str, *, threshold: float = wire.USUAL_LEVEL, silos: list[str] | None = None
    ) -> wire.CountAnswer:
        """How many documents answer a query, with noise, silo by silo; a new question costs budgets."""
        payload: dict[str, Any] = {"query": query, "threshold": threshold}
        payload |= {"silos": silos} if silos is not None else {}
        return self._read(self._ask("POST", "/v1/noised-counts", payload), wire.CountAnswer)

    def judge(self, query: str, hit: wire.Hit, *, relevant: bool | None) -> None:
        """Say whether a hit of this query's answer was right; None takes it back. Its silo alone keeps it."""
        payload = {"query": query, "silo": hit.silo, "token": hit.token, "relevant": relevant}
        self._ask("POST", "/v1/feedback", payload)

    def judgements(self, query: str, hits: Sequence[wire.Hit]) -> list[bool | None]:
        """What you judged of these hits of a query's answer, in their order; None for nothing."""
        tokens = [{"silo": hit.silo, "token": hit.token} for hit in hits if hit.token]
        reply = self._ask("POST", "/v1/judged", {"query": query, "hits": tokens})
        own = iter(self._read(reply, wire.OwnJudgements).relevant)
        return [next(own, None) if hit.token else None for hit in hits]

    def open(self, hit: wire.Hit | wire.HitCopy) -> wire.OpenedDocument:
        """The whole document of a hit, or of its copy in another silo (`Hit.also`), where that silo allows it
        and your key has the scope documents."""
        return self._open(hit.silo, hit.document, {"ticket": hit.ticket})

    def open_allowed(self, request: wire.DocumentRequest) -> wire.OpenedDocument:
        """The document that its owner has allowed you to open once."""
        return self._open(request.silo, request.document, {"request": request.number})

    def _open(self, silo: str, document: str, by: dict[str, str]) -> wire.OpenedDocument:
        path = f"/v1/documents/{quote(silo, safe='')}/{quote(document, safe='/')}?{urlencode(by)}"
        return self._read(self._ask("GET", path), wire.OpenedDocument)

    def ask(
        self, query: str, hit: wire.Hit | wire.HitCopy, *, reason: str = "", named: bool = False
    ) -> wire.DocumentRequest:
        """Ask the owner of a hit's document for it; with `named` they see the name of your key."""
        payload = {"silo": hit.silo, "ticket": hit.ticket, "query": query, "reason": reason, "named": named}
        return self._read(self._ask("POST", "/v1/requests", payload), wire.DocumentRequest)

    def requests(self, *, every: bool = False) -> wire.RequestList:
        """What you asked owners for, with their answers; for administrators `every` one they may answer."""
        path = "/v1/requests?all=true" if every else "/v1/requests"
        return self._read(self._ask("GET", path), wire.RequestList)

    def answer(self, request: wire.DocumentRequest, *, allow: bool, word: str = "") -> wire.DocumentRequest:
        """Allow that a document is opened once, or deny it: with an administrator's key."""
        path = f"/v1/requests/{quote(request.silo, safe='')}/{request.number}"
        return self._read(self._ask("POST", path, {"allow": allow, "word": word}), wire.DocumentRequest)

    def import_judgements(
        self,
        judgements: Sequence[wire.NamedJudgement],
        *,
        progress: Callable[[int], None] = lambda count: None,
    ) -> wire.Imported:
        """Bring judgements by document id, in batches, with an administrator's key.

        Those that are there already are not counted twice: after an interruption, send all again.
        """
        total, first = wire.Imported(), 0
        for batch in _batches(judgements):
            reply = self._ask("POST", "/v1/judgements", {"judgements": batch})
            done = self._read(reply, wire.Imported)
            total = wire.Imported(
                added=total.added + done.added,
                changed=total.changed + done.changed,
                unchanged=total.unchanged + done.unchanged,
                unknown=[*total.unknown, *(first + at for at in done.unknown)],
                ambiguous=total.ambiguous | {first + at: silos for at, silos in done.ambiguous.items()},
                unplaced=[*total.unplaced, *(first + at for at in done.unplaced)],
                unanswered=total.unanswered | done.unanswered,
            )
            first += len(batch)
            progress(len(batch))
        return total

    def export_judgements(self, silos: Sequence[str] | None = None) -> list[wire.NamedJudgement]:
        """The judgements that silos have through this broker, with an administrator's key."""
        names = [each.silo for each in self.silos().silos] if silos is None else silos
        judgements: list[wire.NamedJudgement] = []
        for name in names:
            after: str | None = ""
            while after is not None:
                path = str(httpx.URL("/v1/judgements", params={"silo": name, "after": after}))
                page = self._read(self._ask("GET", path), wire.JudgementPage)
                judgements += page.judgements
                after = page.next or None
        return sorted(judgements, key=lambda each: (each.query, each.document, each.silo or ""))

    def silos(self) -> wire.SiloList:
        """Every silo's state."""
        return self._read(self._ask("GET", "/v1/silos"), wire.SiloList)

    def training(self) -> wire.TrainingView:
        """The training run as far as it has come."""
        return self._read(self._ask("GET", "/v1/training"), wire.TrainingView)

    def learning(self) -> wire.LearningView:
        """How learning goes, and every version there is."""
        return self._read(self._ask("GET", "/v1/learning"), wire.LearningView)

    def learn(self, mode: str = "masked") -> wire.LearningView:
        """Let the silos learn; `learning` says how far they are. Needs an administrator's key."""
        return self._read(self._ask("POST", "/v1/learning", {"mode": mode}), wire.LearningView)

    def learn_to_end(
        self, mode: str = "masked", *, progress: Callable[[str], None] = lambda stage: None
    ) -> wire.LearnedVersion:
        """Let the silos learn and wait for the version that comes of it; `progress` hears every second of
        the stage it is in. A ServiceError says why where nothing could be learned."""
        view = self.learn(mode)
        known = {version.version for version in view.versions}
        while view.state == "running":
            progress(view.stage)
            time.sleep(LOOK_EVERY)
            view = self.learning()
        new = [version for version in view.versions if version.version not in known]
        if not new:
            raise ServiceError(view.problem or "the broker has stopped learning; its log says why")
        if new[0].problem and new[0].record is None:
            raise ServiceError(new[0].problem)
        return new[0]

    def rollback(self, version: str = "") -> wire.LearningView:
        """Search with the version before the current one again, with another, or with "none"."""
        return self._read(self._ask("POST", "/v1/learning/rollback", {"version": version}), wire.LearningView)

    def calibration(self) -> wire.Calibration:
        """The reliability curves of the probabilities, by silo and retriever."""
        return self._read(self._ask("GET", "/v1/calibration"), wire.Calibration)

    def sessions(self) -> wire.SessionList:
        """Who has a session of the page; needs an administrator's key."""
        return self._read(self._ask("GET", "/v1/sessions"), wire.SessionList)

    def end_sessions(self, person: str) -> int:
        """End all of a person's sessions, by the name of their key or their id; how many there were."""
        path = f"/v1/sessions?{urlencode({'person': person})}"
        return self._read(self._ask("DELETE", path), wire.EndedSessions).ended

    def health(self) -> wire.Health:
        """Whether the broker is there."""
        return self._read(self._ask("GET", "/v1/health"), wire.Health)

    def metrics(self) -> str:
        """The broker's metrics in Prometheus' text format."""
        return self._ask("GET", "/metrics").body.decode(errors="replace")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, method: str, path: str, payload: dict[str, Any] | None = None) -> HttpReply:
        left = self._patience
        while True:
            reply, later = self._once(method, path, payload)
            if 200 <= reply.status < 300:
                return reply
            if reply.status != 429 or later > left:
                raise self._failure(reply, later)
            time.sleep(later)
            left -= later

    def _once(self, method: str, path: str, payload: dict[str, Any] | None) -> tuple[HttpReply, float]:
        """The answer to one request, and in how many seconds to send it again if that was too soon."""
        try:
            with self._http.stream(method, path, json=payload) as response:
                self.key_expires = response.headers.get(wire.KEY_EXPIRES)
                later = response.headers.get("retry-after", "")
                seconds = max(LEAST_WAIT, float(later)) if later.isdecimal() else 1.0
                return HttpReply(response.status_code, "", self._body(response)), seconds
        except httpx.TimeoutException:
            raise SiloUnavailable(f"the broker at {self.url} does not answer in time") from None
        except httpx.LocalProtocolError:  # its text may quote headers, and with them the key
            raise ServiceError(f"the request to {self.url} is not HTTP, and was not sent") from None
        except httpx.TransportError as error:
            raise SiloUnavailable(f"no broker at {self.url}: {error} ({_cure(error)})") from error

    def _body(self, response: httpx.Response) -> bytes:
        """What the broker sends, as it is, up to a size and a time."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ServiceError(f"{self.url} answers in an encoding that it was not asked for")
        body, until = bytearray(), time.monotonic() + self._seconds
        for part in response.iter_raw():
            body += part
            if len(body) > MOST_BYTES:
                raise ServiceError(f"{self.url} answers with more than {MOST_BYTES:,} bytes")
            if time.monotonic() > until:
                raise SiloUnavailable(f"the broker at {self.url} does not answer in time")
        return bytes(body)

    def _failure(self, reply: HttpReply, later: float) -> ServiceError:
        try:
            problem = wire.Problem.model_validate_json(reply.body)
        except ValidationError:
            return ServiceError(f"{self.url} is no broker of ours: status {reply.status}")
        message = f"{problem.title}: {problem.detail}" if problem.detail else problem.title
        if reply.status == 401:
            return Refused(f"{message} (name a key's file with --key, or set {KEY_VARIABLE})")
        if reply.status == 429:
            return Refused(f"{message} (again in {later:g} s)")
        if reply.status == 403:
            return Refused(message)
        if reply.status == 422:
            return NotTaken(message)
        return SiloUnavailable(message) if reply.status >= 500 else ServiceError(message)

    def _read(self, reply: HttpReply, model: type[M]) -> M:
        try:
            return model.model_validate_json(reply.body)
        except ValidationError:
            raise ServiceError(f"{self.url} answers in a form that this Isthmus does not know") from None


def _batches(judgements: Sequence[wire.NamedJudgement]) -> Iterator[list[dict[str, Any]]]:
    """Judgements in batches that one request may have."""
    batch: list[dict[str, Any]] = []
    size = 0
    for each in judgements:
        row = each.model_dump(exclude_none=True)
        length = len(json.dumps(row)) + 1
        if batch and (len(batch) == wire.MOST_JUDGEMENTS or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += length
    if batch:
        yield batch


def _token(key: str | Path | None) -> str:
    """The API key, or "" for none. What is no key is refused before it is sent, and never repeated."""
    if isinstance(key, Path):
        with private_file(key).open("rb") as file:
            content, place = file.read(LONGEST_KEY + 3), str(key)  # with the end of its line
    elif key:
        content, place = key.encode(errors="replace"), "key"
    else:
        content, place = os.environ.get(KEY_VARIABLE, "").encode(errors="replace"), KEY_VARIABLE
    token = content.strip()
    if len(token) > LONGEST_KEY or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ServiceError(
            f"{place}: not an API key (expected one line of at most {LONGEST_KEY} ASCII characters without "
            "spaces: the file that isthmus keys wrote, or the broker's admin.key)"
        )
    if isinstance(key, Path) and not token:
        raise ServiceError(f"{place}: empty (expected an API key, as isthmus keys writes it)")
    return token.decode("ascii")


def _cure(error: httpx.TransportError) -> str:
    message = str(error)
    if isinstance(error, httpx.UnsupportedProtocol):
        return "begin it with http:// or https://"
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return f"name the broker's authority with --authority, or set {AUTHORITY_VARIABLE}"
    if "WRONG_VERSION_NUMBER" in message:
        return "it speaks no TLS: say http://, or set https = true in broker.toml"
    return "isthmus broker --config broker.toml starts one"
