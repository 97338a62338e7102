"""A search engine that an organisation runs already: the interface of its adapter. It is only read.

    RemoteEngine    finds documents by a query with scores of its own, and returns their texts: level *scores*
    CountedEngine   also finds documents by terms of our analysis: level *full*

Texts are analysed here, by the analysis that all silos share; an engine supplies candidates and documents.
Only documents are searched that the credentials in its address may see and that meet its `filter`.

Constraints on types and dates of documents are applied by the engine; the others are checked in the texts of
its candidates.

Adapters raise a ServiceError of one line, with the cure, if a server does not answer, and a ConfigError if
the settings are wrong; no message contains a password or a key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, ClassVar, Protocol, runtime_checkable
from unicodedata import category
from urllib.parse import urlsplit

from isthmus.encoders import Vectors
from isthmus.engines.access import EVERYONE, may_see, principals_of
from isthmus.engines.engine import ANY, CannotNarrow, Constraints, Matches
from isthmus.errors import ConfigError, DataError, ServiceError, plain

BATCH = 500
"""Documents that are read in one request."""
MOST_BYTES, PATIENCE = 256 << 20, 10
"""Limits of one answer: bytes, and duration as a multiple of `Location.seconds`."""
MOST_TERMS = 400
"""Terms of a query that are sent, the rarest: engines refuse a thousand clauses, and each field needs one a
term."""
LONGEST_LINE = 32 << 20
"""Maximum bytes of one document in an export."""
MOST_LISTED = 1_000
"""Maximum number of documents that are sorted by date here, for engines that cannot sort by it."""
LATEST = 253_402_300_800
"""Unix time of the year 10000: numbers from there on are not dates."""
TOO_SLOW = "too slow"
"""The code of a RemoteProblem for a request that took longer than `Location.seconds`."""
NOBODY = ("user:",)
"""The rule of a document whose own rule cannot be read: no person has this principal."""
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Location:
    """Where documents are: a server, a table, collection or index on it, and the fields to read."""

    url: str
    source: str = ""
    id: str = "id"
    title: str = ""
    """Field of the title; empty if documents have none."""
    body: str = "body"
    type: str = ""
    date: str = ""
    """Fields of a document's type and date; empty if it has none."""
    allow: str = ""
    """Field of the principals who may see a document; empty if there is none."""
    allowed: tuple[str, ...] = ()
    """Principals who may see a document that names none; everybody if empty."""
    search_by: str = ""
    """What is searched if not text fields: a tsvector, or the name of a vector."""
    filter: str = ""
    """A condition that documents must meet, in the engine's own language."""
    key: str = field(default="", repr=False)
    seconds: float = 5.0
    """Seconds within which the server has to answer."""


@dataclass(frozen=True, slots=True)
class RemoteDocument:
    """A document as an external engine returns it."""

    id: str
    title: str
    body: str
    type: str = ""
    """Its type in lower case."""
    date: int | None = None
    """Its Unix time."""
    allow: tuple[str, ...] = ()
    """The principals who may see it."""


@dataclass(frozen=True)
class RemoteSource:
    """A table, collection or index, with its number of documents and the kinds of its fields.

    A field's kind says what it can be in a `Location`: id, text, search (`search_by`) or other.
    """

    name: str
    documents: int
    fields: Mapping[str, str]
    remarks: tuple[str, ...] = ()


class RemoteEngine(Protocol):
    """Documents on a server, and the server's own search. Safe to use from any thread.

    Of the constraints, an engine applies types, dates and who may see a document, by the fields that its
    location names.
    """

    noun: ClassVar[str]
    """Product name, for messages."""
    ranks_alone: ClassVar[bool]
    """Whether its score of a document depends only on that document and the query."""
    location: Location

    def sources(self) -> list[RemoteSource]:
        """Tables, collections or indexes on the server that could be attached."""

    def check_rules(self) -> None:
        """Raise a ConfigError unless documents can be filtered, before they are ranked, by the field that
        says who may see them."""

    def documents(self, only: Constraints = ANY) -> int:
        """Count the documents that meet constraints."""

    def version(self) -> str:
        """A text that changes when documents have changed; cheap to get."""

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints = ANY
    ) -> list[tuple[str, float]]:
        """The best `depth` ids with scores between 0 and 1, best first, by the engine's own ranking."""

    def matches(self, text: str, only: Constraints = ANY) -> Matches:
        """Count the documents that the engine's own search by words finds."""

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """The documents with these ids, by id; unknown ids are left out."""

    def newest(self, depth: int, only: Constraints = ANY) -> list[str]:
        """Ids of the `depth` latest documents that meet constraints, latest first and those without a date
        last. Raises CannotNarrow if too many meet them."""

    def scan(self, only: Constraints = ANY) -> Iterator[list[RemoteDocument]]:
        """All documents that meet constraints, in batches of some hundred."""

    def close(self) -> None:
        """Close the connections."""


@runtime_checkable
class CountedEngine(RemoteEngine, Protocol):
    """An engine that can be searched by terms."""

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints = ANY) -> list[str]:
        """Ids of documents with any of the terms: `depth` of them, about the best by these weights."""

    def having(self, terms: Sequence[str], only: Constraints = ANY) -> Matches:
        """Count the documents that have any of the terms."""

    def agreement(self, terms: Mapping[str, Sequence[str]]) -> int:
        """How many of the documents' terms, given by id, find their document in the engine."""


@runtime_checkable
class VectorEngine(RemoteEngine, Protocol):
    """An engine that can be searched by vectors."""

    def vectors(self, ids: Sequence[str]) -> dict[str, Vectors]:
        """The vectors of documents that have one."""


class JsonServer:
    """A server with a JSON interface, over HTTPS, or over HTTP on this machine."""

    def __init__(self, location: Location, noun: str, headers: Mapping[str, str]) -> None:
        import httpx

        self.noun, self._httpx = noun, httpx
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise ConfigError(
                "engine.key has signs that no key has: a line's end, or beyond ASCII", key="engine.key"
            )
        self._client = httpx.Client(
            base_url=base_url(location.url),
            headers={**headers, "accept-encoding": "gzip"},
            timeout=location.seconds,
        )
        self._seconds = location.seconds

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Send a request and return the JSON of its answer. Raises a ServiceError of one line for anything
        but success."""
        reply = self._reply(lambda: self._whole(method, path, json=body, **options))
        try:
            return reply.json()
        except (ValueError, RecursionError):
            raise ServiceError(f"{self.noun} answers no JSON (check engine.url)") from None

    def _whole(self, method: str, path: str, **options: Any) -> Any:
        """Read a whole reply, of limited length and time: an endless one would occupy its thread for ever."""
        until, content = time.monotonic() + PATIENCE * self._seconds, bytearray()
        with self._client.stream(method, path, **options) as reply:
            for piece in self._pieces(reply):
                content += piece
                if len(content) > MOST_BYTES:
                    raise ServiceError(f"{self.noun} answers more than {MOST_BYTES >> 20} MB at once")
                if time.monotonic() > until:
                    raise ServiceError(
                        f"{self.noun} takes more than {PATIENCE * self._seconds:g} s for one answer"
                        " (check it, or engine.seconds)"
                    )
            return self._httpx.Response(reply.status_code, content=bytes(content))

    def _pieces(self, reply: Any) -> Iterator[bytes]:
        """The bytes of a reply that is plain or in gzip. Other encodings, or two of them, are refused: a
        single piece could decompress to thousands of megabytes."""
        if reply.headers.get("content-encoding", "identity") not in ("identity", "gzip"):
            raise ServiceError(f"{self.noun} answers in an encoding that is not known (check engine.url)")
        pieces: Iterator[bytes] = reply.iter_bytes()
        return pieces

    def lines(self, path: str, **options: Any) -> Iterator[Any]:
        """Read an answer line by line, each line as JSON; the length of a line and the time for it are
        limited."""
        with ExitStack() as stack:
            begun = self._client.stream("GET", path, **options)
            reply = self._reply(lambda: stack.enter_context(begun), whole=False)
            pieces, rest, until = self._pieces(reply), b"", time.monotonic() + PATIENCE * self._seconds
            while (piece := self._reply(lambda: next(pieces, None), whole=False)) is not None:
                *lines, rest = (rest + piece).split(b"\n")
                until = time.monotonic() + PATIENCE * self._seconds if lines else until
                if len(rest) > LONGEST_LINE or time.monotonic() > until:
                    raise ServiceError(f"{self.noun} sends a document without end (check engine.url)")
                yield from (self._parsed(line) for line in lines if line.strip())
            if rest.strip():
                yield self._parsed(rest)

    def _parsed(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ServiceError(f"{self.noun} answers no JSON (check engine.url)") from None

    def _reply(self, work: Callable[[], Any], *, whole: bool = True) -> Any:
        try:
            reply = work()
        except self._httpx.TimeoutException:
            raise ServiceError(
                f"{self.noun} does not answer within {self._seconds:g} s (check it, or engine.seconds)"
            ) from None
        except self._httpx.HTTPError as error:
            problem = str(error).partition("\n")[0] or type(error).__name__
            raise ServiceError(
                f"{self.noun} cannot be reached: {problem} (check engine.url, and that the server runs)"
            ) from None
        status = getattr(reply, "status_code", 200)
        if status in (401, 403):
            raise ServiceError(f"{self.noun} refuses these credentials (check engine.key, and its rights)")
        if status >= 400:
            text = reply.text if whole else self._beginning(reply)
            raise RemoteProblem(self.noun, f"{status}, {_message(text)}", code=str(status))
        return reply

    def _beginning(self, reply: Any) -> str:
        """The first piece of a reply that may be endless."""
        with suppress(self._httpx.HTTPError):
            return next(self._pieces(reply), b"").decode(errors="replace")
        return ""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class RemoteProblem(ServiceError):
    """A server answers, but refuses a request, with a message of its own."""

    def __init__(
        self,
        noun: str,
        message: str,
        cure: str = "check engine.source, its fields and filter",
        *,
        code: str = "",
    ) -> None:
        super().__init__(f"{noun} answers: {message} ({cure})")
        self.noun, self.code = noun, code

    def of_query(self) -> RemoteProblem:
        """The same refusal of a query, without the server's message: it may quote the query, which must not
        be logged."""
        reason = f"it refuses a query, {self.code}" if self.code else "it refuses a query"
        return RemoteProblem(self.noun, reason, "other queries may do", code=self.code)


@contextmanager
def well_formed(noun: str) -> Iterator[None]:
    """Raise a ServiceError if the code inside finds a server's answer in an undocumented form."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, (ConfigError, DataError)):
            raise
        raise ServiceError(
            f"{noun} answers in a form that is not known (check engine.url, and the server's release)"
        ) from error


def _message(text: str) -> str:
    return " ".join(plain(text).split())[:200]


def base_url(url: str) -> str:
    """The HTTP address for `scheme://host:port`: with TLS, except on this machine. Raises a ConfigError for
    other texts."""
    try:
        parts = urlsplit(url)
        host, is_address = parts.hostname or "", url.isprintable() and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError("engine.url is no address", key="engine.url", expected="scheme://host:port")
    if not host or parts.username or parts.password:
        raise ConfigError("engine.url needs a host, and no password", key="engine.url", expected="engine.key")
    is_local = host in LOCAL
    if parts.scheme == "http" and not is_local:
        raise ConfigError(
            "engine.url would send queries and the key in the clear", key="engine.url", expected="https://…"
        )
    scheme = "http" if parts.scheme == "http" or (is_local and parts.scheme != "https") else "https"
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def json_filter(location: Location) -> list[Any]:
    """The location's filter, parsed from JSON, in a list; an empty list without one."""
    if not location.filter:
        return []
    try:
        return [json.loads(location.filter)]
    except ValueError:
        raise ConfigError("engine.filter is not JSON", key="engine.filter", value=location.filter) from None


def document_of(id: object, fields: Any, location: Location, *, ticks: int = 1) -> RemoteDocument:
    """Build a document from the fields that a location names; `a.b` is field b of a. `ticks` is the number of
    units per second of a numeric date."""
    type, date = (next(iter(values_at(fields, name)), None) for name in (location.type, location.date))
    return RemoteDocument(
        str(id),
        text_at(fields, location.title),
        text_at(fields, location.body),
        "" if type is None else type_name(type),
        date_of(date, ticks=ticks),
        rule_of(values_at(fields, location.allow), location),
    )


def rule_of(stated: object, location: Location) -> tuple[str, ...]:
    """The principals who may see a document: its own, else the location's; `NOBODY` if its own cannot be
    read."""
    try:
        return principals_of(stated) or location.allowed
    except ValueError:
        return NOBODY


def names_of(readers: frozenset[str]) -> list[str]:
    """The names that documents may use for principals: groups also by their bare names, except names that
    would be read as another principal."""
    groups = (each.removeprefix("group:") for each in readers if each.startswith("group:"))
    return sorted({*readers, *(name for name in groups if ":" not in name and name != EVERYONE)})


def sees_unruled(readers: frozenset[str], location: Location) -> bool:
    """Whether these principals may see a document that names nobody."""
    return may_see(location.allowed, readers)


def type_name(value: object) -> str:
    """A type in the form that searches use: trimmed, lower case, at most 100 characters."""
    return str(value).strip().lower()[:100]


def date_of(value: object, *, ticks: int = 1) -> int | None:
    """The Unix time of a number or of an ISO 8601 text (UTC without a time zone); None for anything else."""
    try:
        if isinstance(value, (int, float)):
            date = int(value / ticks)
        else:
            moment = datetime.fromisoformat(str(value))
            date = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None
    return date if abs(date) < LATEST else None


def text_at(fields: Any, name: str) -> str:
    """The text of a field; several values are joined by blank lines."""
    return "\n\n".join(map(str, values_at(fields, name)))


def values_at(fields: Any, name: str) -> list[Any]:
    """The values of a field; `a.b` is field b of a."""
    for part in name.split(".") if name else ():
        fields = fields.get(part) if isinstance(fields, dict) else None
    values = fields if isinstance(fields, list) else [] if fields is None or not name else [fields]
    return [value for value in values if not isinstance(value, (dict, list))]


def kinds_of(documents: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, str]:
    """The fields of documents, nested ones as `a.b`, and whether they are texts."""
    kinds: dict[str, str] = {}
    for document in documents:
        for name, value in document.items():
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, dict):
                kinds |= kinds_of([first], f"{prefix}{name}.")
            elif kinds.get(prefix + name) != "text":
                kinds[prefix + name] = "text" if isinstance(first, str) else "other"
    return kinds


def latest(batches: Iterator[list[RemoteDocument]], depth: int) -> list[str]:
    """The ids of the `depth` latest documents, latest first. Raises CannotNarrow for more than `MOST_LISTED`
    documents."""
    every = list(islice((each for batch in batches for each in batch), MOST_LISTED + 1))
    if len(every) > MOST_LISTED:
        raise CannotNarrow(
            f"more than {MOST_LISTED:,} of its documents meet this: a word to look for is needed"
        )
    undated = float("-inf")
    every.sort(key=lambda each: undated if each.date is None else each.date, reverse=True)
    return [each.id for each in every[:depth]]


def words_of(text: str) -> list[str]:
    """The distinct words of a query as written, the first `MOST_TERMS` of them."""
    # combining marks belong to words: vowels of Hindi, accents that follow their letters
    is_part = {sign: sign.isalnum() or category(sign).startswith("M") for sign in set(text)}
    words = dict.fromkeys("".join(sign if is_part[sign] else " " for sign in text).split())
    return list(words)[:MOST_TERMS]


def rarest(weights: Mapping[str, float], known: Container[str] = ()) -> Mapping[str, float]:
    """At most `MOST_TERMS` terms, in their order: those with the largest weights, after preferring terms in
    `known`."""
    if len(weights) <= MOST_TERMS:
        return weights
    order = sorted(weights, key=lambda word: (word in known, weights[word]), reverse=True)
    chosen = set(order[:MOST_TERMS])
    return {word: weight for word, weight in weights.items() if word in chosen}
