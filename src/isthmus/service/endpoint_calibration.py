"""Calibration of a search interface by one person, who judges some of its answers: its scores become
probabilities.

    answers = JudgedAnswers(Path("calibrated"), endpoint)
    answers.ask("tidal power"); answers.judge("tidal power", "d1", True) …
    report = calibrated(answers, precision=0.9, width=0.1)      # curve, threshold, judgements needed
    app = proxy_app(Path("calibrated"), endpoint)               # the same answers, hits with a probability

Everything is in one folder, and on disk before a request is answered, so that judging can be interrupted
at any time and continued there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from isthmus.arrays import FloatArray
from isthmus.calibration import (
    Calibrator,
    Judging,
    ThresholdCurve,
    cross_fit,
    load_calibrator,
    save_calibrator,
)
from isthmus.errors import ConfigError, DataError, ServiceError, several
from isthmus.service import pages, wire
from isthmus.service.apps import new_app
from isthmus.service.limits import HttpProblem, Protect, Surface, names_of
from isthmus.service.reliability import reliability_curve
from isthmus.service.search_endpoint import (
    QUERY,
    EndpointHit,
    RawReply,
    ResultMapping,
    SearchEndpoint,
)
from isthmus.service.security import Caller, Gate, WrongKey, token_in
from isthmus.service.settings import RequestLimits
from isthmus.tables import Qrels, Run, replacing

DESCRIPTION, JUDGEMENTS, CALIBRATOR, REPORT = (
    "endpoint.json",
    "judgements.db",
    "calibrator",
    "calibration.json",
)
"""Names of the files in a folder."""
LEAST_JUDGED, LEAST_QUERIES, LEAST_EACH = 20, 5, 5
"""Least number of judgements, of judged queries, and of right and of wrong hits each, for a calibration."""
DEPTH = 10
"""Hits of an answer that are to be judged."""
PROXIES = ("via", "forwarded", "x-forwarded-for", "x-real-ip")
"""Headers of requests that came through a proxy, which may have added its own credentials."""
NAME = "endpoint"

_TABLES = """
CREATE TABLE IF NOT EXISTS answer (
    number INTEGER PRIMARY KEY, query TEXT UNIQUE NOT NULL, hits TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS judgement (
    number INTEGER PRIMARY KEY, query TEXT NOT NULL, document TEXT NOT NULL,
    relevant INTEGER, at REAL NOT NULL, UNIQUE (query, document)
);
"""


class JudgedAnswers:
    """The answers to some queries and their judgements, in a folder.

    A skipped hit has a judgement that is neither right nor wrong, so that it is not shown again.
    """

    def __init__(self, folder: Path, endpoint: SearchEndpoint, *, depth: int = DEPTH) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.depth = folder, depth
        self.endpoint = _agreed(folder, endpoint)
        self._lock = threading.RLock()
        os.close(os.open(folder / JUDGEMENTS, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            self._db = sqlite3.connect(folder / JUDGEMENTS, isolation_level=None, check_same_thread=False)
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_TABLES}")
        except sqlite3.DatabaseError as error:
            raise DataError(f"no readable judgements: {error}", file=folder / JUDGEMENTS) from error

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def __enter__(self) -> JudgedAnswers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, query: str) -> list[EndpointHit]:
        """Return the hits of a query, as they were when it was first asked."""
        query = " ".join(query.split())
        with self._lock:
            known = self._hits(query)
            if known is not None:
                return known
            answer = self.endpoint.search(query)
            if answer.mapping != self.endpoint.mapping:
                self.endpoint = replace(self.endpoint, mapping=answer.mapping)
                _write_json(self.folder / DESCRIPTION, self.endpoint.described())
            hits = list({hit.id: hit for hit in reversed(answer.hits)}.values())[::-1]
            rows = json.dumps([asdict(hit) for hit in hits])
            self._db.execute("INSERT INTO answer (query, hits) VALUES (?, ?)", (query, rows))
            return hits

    def _hits(self, query: str) -> list[EndpointHit] | None:
        row = self._db.execute("SELECT hits FROM answer WHERE query = ?", (query,)).fetchone()
        return None if row is None else [EndpointHit(**hit) for hit in json.loads(row[0])]

    def judge(self, query: str, document: str, relevant: bool | None) -> None:
        """Store a judgement of a hit that was shown; None skips the hit. It is on disk when this returns."""
        with self._lock:
            hits = self._hits(query)
            if hits is None or document not in {hit.id for hit in hits}:
                raise DataError("no such hit", cure="ask the query first")
            values = (query, document, None if relevant is None else int(relevant), time.time())
            self._db.execute(
                "INSERT OR REPLACE INTO judgement (query, document, relevant, at) VALUES (?, ?, ?, ?)", values
            )

    def undo(self) -> None:
        """Remove the last judgement."""
        with self._lock:
            self._db.execute("DELETE FROM judgement WHERE number = (SELECT max(number) FROM judgement)")

    @property
    def lists(self) -> dict[str, list[EndpointHit]]:
        """The hits to judge of every query, in the order in which queries were asked."""
        with self._lock:
            rows = self._db.execute("SELECT query, hits FROM answer ORDER BY number").fetchall()
        return {query: [EndpointHit(**hit) for hit in json.loads(hits)][: self.depth] for query, hits in rows}

    @property
    def judgements(self) -> dict[tuple[str, str], bool | None]:
        """The judgements, by query and document; None for a skipped hit."""
        with self._lock:
            rows = self._db.execute("SELECT query, document, relevant FROM judgement ORDER BY number")
            return {(query, id): None if right is None else bool(right) for query, id, right in rows}

    def next(self) -> tuple[str, EndpointHit] | None:
        """Return a query and a hit to judge, or None. The order of a query's hits is independent of their
        scores, so that judgements are a fair sample at any time and are not influenced by the rank."""
        judgements = self.judgements
        for query, hits in self.lists.items():
            waiting = [hit for hit in hits if (query, hit.id) not in judgements]
            if waiting:
                return query, min(waiting, key=lambda hit: _digest(query, hit.id))
        return None

    @property
    def sign(self) -> float:
        """-1 if scores rise from the first hit to the last in most answers, as distances do; else 1."""
        ends = [(hits[0].score, hits[-1].score) for hits in self.lists.values() if len(hits) > 1]
        return -1.0 if sum(first < last for first, last in ends) > len(ends) / 2 else 1.0


def _agreed(folder: Path, endpoint: SearchEndpoint) -> SearchEndpoint:
    """Return the endpoint as the folder describes it, with the paths that were detected. Raises a ConfigError
    if it is another one."""
    try:
        known = json.loads((folder / DESCRIPTION).read_bytes())
        mapping = ResultMapping(**known["mapping"])
        same = (known["url"], known["body"]) == (endpoint.url, endpoint.body)
    except FileNotFoundError:
        _write_json(folder / DESCRIPTION, endpoint.described())
        return endpoint
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("is not the description of an endpoint", file=folder / DESCRIPTION) from error
    if not same or endpoint.mapping.over(mapping) != mapping:
        raise ConfigError(
            f"{folder} has judgements of {known['url']}, asked or read otherwise",
            key="--folder",
            expected="another folder, or the same address, body and mapping",
        )
    return replace(endpoint, mapping=mapping)


def _write_json(path: Path, content: object) -> None:
    with replacing(path) as stream:
        stream.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def _digest(query: str, document: str) -> bytes:
    return hashlib.blake2b(f"{query}\0{document}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


class Precision(BaseModel):
    """The precision of a threshold with its interval, and the rows and queries that it is measured on."""

    threshold: float
    precision: float
    low: float
    high: float
    rows: int
    queries: int


class EndpointReport(BaseModel):
    """The result of a calibration; `problem` says why there is none yet."""

    queries: int
    judged: int
    right: int
    skipped: int
    problem: str = ""
    method: str = ""
    sign: float = 1.0
    wanted_precision: float
    wanted_width: float
    curve: wire.ReliabilityCurve | None = None
    """The reliability curve, on hits of queries that the calibrator had not seen."""
    threshold: Precision | None = None
    threshold_problem: str = ""
    judgements_needed: int | None = None
    """Judgements in all, with which the interval of the threshold's precision would be as narrow as wanted,
    if queries vary as those judged do. None without a threshold, or if ten thousand times as many would
    not suffice."""


def calibrated(answers: JudgedAnswers, *, precision: float = 0.9, width: float = 0.1) -> EndpointReport:
    """Fit a calibrator, save it and a report in the folder, and return the report.

    It is cross-fitted over queries: every probability comes from a calibrator that has not seen the query.
    """
    lists, judgements = answers.lists, answers.judgements
    known = {pair: right for pair, right in judgements.items() if right is not None}
    report = EndpointReport(
        queries=len({query for query, _ in known}),
        judged=len(known),
        right=sum(known.values()),
        skipped=len(judgements) - len(known),
        sign=answers.sign,
        wanted_precision=precision,
        wanted_width=width,
    )
    if problem := _too_few(report):
        return report.model_copy(update={"problem": problem})
    run = Run.from_dict(
        {query: {hit.id: report.sign * hit.score for hit in hits} for query, hits in lists.items() if hits}
    )
    grades: dict[str, dict[str, int]] = {}
    for (query, document), right in known.items():
        grades.setdefault(query, {})[document] = int(right)
    qrels, judging = Qrels.from_dict(grades), Judging(unjudged="skip")
    try:
        calibrator, probabilities = cross_fit(run, qrels, "auto", judging=judging)
    except DataError as error:
        return report.model_copy(update={"problem": f"judge more queries: {error}"})
    relevant, judged = judging.of(run, qrels)
    save_calibrator(calibrator, answers.folder / CALIBRATOR)
    report = report.model_copy(
        update={
            "method": type(calibrator).__name__,
            "curve": reliability_curve(probabilities[judged], relevant[judged], silo=NAME),
            **_decided(probabilities[judged], relevant[judged], run.query_of_row[judged], precision, width),
        }
    )
    _write_json(answers.folder / REPORT, report.model_dump())
    return report


def _too_few(report: EndpointReport) -> str:
    """Return what is missing for a calibration; "" for nothing."""
    wanted = (
        (LEAST_JUDGED, report.judged, "judgement"),
        (LEAST_QUERIES, report.queries, "judged query"),
        (LEAST_EACH, report.right, "right hit"),
        (LEAST_EACH, report.judged - report.right, "wrong hit"),
    )
    plural = {"judged query": "judged queries"}
    missing = [several(least - have, one, plural.get(one, "")) for least, have, one in wanted if have < least]
    return f"too few to claim anything: {', '.join(missing)} more" if missing else ""


def _decided(
    probabilities: FloatArray, relevant: Any, queries: Any, precision: float, width: float
) -> dict[str, Any]:
    """Return the threshold for a precision, its interval, and how many judgements would narrow that."""
    curve = ThresholdCurve.of(probabilities, relevant, queries)
    try:
        threshold = curve.threshold_for(precision)
    except DataError as error:
        return {"threshold_problem": str(error)}
    support, times = curve.support(threshold), curve.times_for(threshold, width)
    return {
        "threshold": Precision(threshold=threshold, **asdict(support)),
        "judgements_needed": None if times is None else int(np.ceil(times * len(probabilities))),
    }


class TokenGate(Gate[Any]):
    """Admits callers with the token, which is in the page's address; everybody if there is no token."""

    def __init__(self, token: str) -> None:
        super().__init__(strangers=() if token else ("search",))
        self._token = token

    def caller(self, scope: Scope) -> Caller[Any]:
        """Return the owner for the right token; raises WrongKey for another."""
        if not self._token:
            return self.strangers
        if hmac.compare_digest((token_in(scope) or "").encode(), self._token.encode()):
            return Caller("owner", frozenset({"admin"}))
        raise WrongKey("open the address that isthmus calibrate-endpoint printed")


class TypedQuery(wire.RequestModel):
    """A query that was typed on the page."""

    query: wire.QueryText


class EndpointJudgement(wire.RequestModel):
    """Whether a hit is right; None skips it."""

    query: wire.QueryText
    document: wire.DocumentId
    relevant: bool | None


class _JudgingPage:
    """The handlers of the page's paths; only one thread computes a report at a time."""

    def __init__(self, answers: JudgedAnswers, precision: float, width: float) -> None:
        self.answers, self.precision, self.width = answers, precision, width
        self._lock = threading.Lock()
        self._report: tuple[object, EndpointReport] | None = None

    def state(self) -> dict[str, Any]:
        """Return the progress of every query, and the next hit to judge."""
        lists, judgements = self.answers.lists, self.answers.judgements
        waiting = self.answers.next()
        return {
            "endpoint": self.answers.endpoint.place,
            "queries": [
                {
                    "query": query,
                    "hits": len(hits),
                    "judged": sum((query, hit.id) in judgements for hit in hits),
                }
                for query, hits in lists.items()
            ],
            "judged": sum(right is not None for right in judgements.values()),
            "right": sum(right is True for right in judgements.values()),
            "next": None
            if waiting is None
            else {
                "query": waiting[0],
                **{key: getattr(waiting[1], key) for key in ("id", "title", "snippet")},
            },
        }

    def add(self, body: TypedQuery) -> dict[str, Any]:
        """Ask the endpoint one more query."""
        try:
            self.answers.ask(body.query)
        except ServiceError as error:
            raise HttpProblem(502, str(error)) from None
        return self.state()

    def judge(self, body: EndpointJudgement) -> dict[str, Any]:
        """Store a judgement."""
        try:
            self.answers.judge(body.query, body.document, body.relevant)
        except DataError as error:
            raise HttpProblem(404, str(error)) from None
        return self.state()

    def undo(self) -> dict[str, Any]:
        """Remove the last judgement."""
        self.answers.undo()
        return self.state()

    def report(self) -> EndpointReport:
        """Return the calibration's report, computed again if there are other judgements."""
        with self._lock:
            judged = self.answers.judgements
            if self._report is None or self._report[0] != judged:
                self._report = judged, calibrated(self.answers, precision=self.precision, width=self.width)
            return self._report[1]


def judging_app(answers: JudgedAnswers, token: str, *, precision: float = 0.9, width: float = 0.1) -> ASGIApp:
    """Return the app of the page on which hits are judged; callers need the token."""
    page = _JudgingPage(answers, precision, width)
    app = new_app("Isthmus calibrate-endpoint", ())
    app.add_api_route("/v1/state", page.state, methods=["GET"])
    app.add_api_route("/v1/queries", page.add, methods=["POST"])
    app.add_api_route("/v1/judgements", page.judge, methods=["POST"])
    app.add_api_route("/v1/judgements", page.undo, methods=["DELETE"])
    app.add_api_route("/v1/report", page.report, methods=["GET"])
    opened = pages.mount(app, endpoint=True)
    return _protected(app, token, opened)


def _protected(app: FastAPI, token: str, opened: Sequence[str] = ()) -> ASGIApp:
    surface = Surface(open=tuple(opened), hosts=names_of("127.0.0.1"))
    return Protect(app, gate=TokenGate(token), limits=RequestLimits(), surface=surface)


@dataclass
class _SavedCalibration:
    """The calibrator of a folder, read again when its file has changed."""

    folder: Path
    stamp: int = -1
    calibrator: Calibrator | None = None
    sign: float = 1.0

    def probabilities(self, hits: Sequence[EndpointHit]) -> FloatArray:
        """Return the probabilities of the hits of one answer. Raises a DataError if there is no calibration
        yet."""
        file = self.folder / CALIBRATOR
        try:
            stamp = file.stat().st_mtime_ns
            if self.calibrator is None or stamp != self.stamp:
                self.calibrator, self.stamp = load_calibrator(file), stamp
                self.sign = float(json.loads((self.folder / REPORT).read_bytes())["sign"])
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise DataError(
                "there is no calibration yet",
                file=self.folder,
                cure=f"judge at least {LEAST_JUDGED} hits of {LEAST_QUERIES} queries first",
            ) from error
        if not hits:
            return np.empty(0)
        scores = self.sign * np.array([hit.score for hit in hits])
        groups = np.zeros(len(hits), dtype=np.int64) if self.calibrator.needs_lists else None
        return np.clip(np.asarray(self.calibrator.probabilities(scores, groups=groups)), 0.0, 1.0)


def proxy_app(folder: Path, endpoint: SearchEndpoint, *, least: float = 0.0, token: str = "") -> ASGIApp:
    """Return an app with the endpoint's own path, GET and POST, which adds a probability to every hit and
    leaves out those below `least`. With a token, callers need it, since the app uses the endpoint's key
    for them."""
    with JudgedAnswers(folder, endpoint) as answers:
        endpoint = answers.endpoint
    saved = _SavedCalibration(folder)
    saved.probabilities(())  # raises at once if the folder has no calibration
    app = new_app("Isthmus calibrated endpoint", ())

    def answered(request: Request, body: bytes) -> Response:
        headers = {name: request.headers[name] for name in ("content-type",) if name in request.headers}
        is_direct = not any(name in request.headers for name in PROXIES)  # a proxy may send its own key
        if not endpoint.key and is_direct and "authorization" in request.headers:
            headers["authorization"] = request.headers["authorization"]
        try:
            url = _forwarded(endpoint.url, request.url.path, request.url.query)
            reply = endpoint.send(request.method, url, body or None, headers)
            if reply.status != 200:
                return Response(reply.body, reply.status, media_type=reply.kind or None)
            content = _with_probabilities(endpoint, reply, saved, least)
        except ServiceError as error:
            raise HttpProblem(502, str(error)) from None
        return Response(json.dumps(content, ensure_ascii=False), media_type="application/json")

    async def search(request: Request) -> Response:
        from anyio.to_thread import run_sync

        body = await request.body()
        return await run_sync(lambda: answered(request, body))

    app.add_api_route(urlsplit(endpoint.url).path or "/", search, methods=["GET", "POST"])
    return _protected(app, token)


def _forwarded(url: str, path: str, query: str) -> str:
    """Return the address at the endpoint. Its own parameters apply if the request has none of that name."""
    parts = urlsplit(url)
    own = [
        (name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if QUERY not in value
    ]
    parameters = parse_qsl(query, keep_blank_values=True)
    names = {name for name, _ in parameters}
    merged = [*((name, value) for name, value in own if name not in names), *parameters]
    return parts._replace(path=path, query=urlencode(merged)).geturl()


def _with_probabilities(
    endpoint: SearchEndpoint, reply: RawReply, saved: _SavedCalibration, least: float
) -> Any:
    """Return the content of an answer with a probability in every hit, without hits below `least`."""
    answer = endpoint.read(reply)
    probabilities = saved.probabilities(answer.hits).tolist()
    for row, probability in zip(answer.rows, probabilities, strict=False):
        row["probability"] = probability
    if least > 0:
        answer.rows[:] = [row for row in answer.rows if row.get("probability", 0.0) >= least]
    return answer.content
