"""A search engine that an organisation runs already: what its adapter gives. It is read and never written.

    RemoteEngine    finds documents by a query with scores of its own, and shows them: level *scores*
    CountedEngine   finds documents by terms, as our analysis has them, too: level *full*

Texts are analysed here, by the analysis that all silos share; an engine proposes candidates and has the
documents. What may be seen is what the credentials in its address may see, and meets its `filter`.

Types and dates of documents are pushed into the engine; what else narrows a search is read in the texts of
its candidates.

Adapters raise a ServiceError of one line where a server does not answer, with the cure, and a ConfigError
where the settings are at fault; no message has a password or a key.
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
"""Documents that are read at once."""
MOST_BYTES, PATIENCE = 256 << 20, 10
"""Of one answer: bytes, and how many times `Location.seconds` it may take from its first byte to its last."""
MOST_TERMS = 400
"""Of a query, the rarest: engines refuse a thousand clauses, and every term is one in each field."""
LONGEST_LINE = 32 << 20
"""Bytes of one document, as an export has it."""
MOST_LISTED = 1_000
"""Documents that are put in the order of their dates here, of an engine that does not."""
LATEST = 253_402_300_800
"""The Unix time after which nothing is a date: the year 10000."""
TOO_SLOW = "too slow"
"""The code of a RemoteProblem: what was asked took longer than `Location.seconds`."""
NOBODY = ("user:",)
"""The rule of a document whose own cannot be read: no person has this principal."""
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Location:
    """Where documents are: a server, a table, collection or index of it, and the fields that are read."""

    url: str
    source: str = ""
    id: str = "id"
    title: str = ""
    """Empty where documents have none."""
    body: str = "body"
    type: str = ""
    date: str = ""
    """The fields that are a document's type and date; empty where it has none."""
    allow: str = ""
    """The field of the principals who may see a document; empty where it has none."""
    allowed: tuple[str, ...] = ()
    """Who may see a document that does not say so; all where it is empty."""
    search_by: str = ""
    """What is searched, where it is no field of text: a tsvector, the name of a vector."""
    filter: str = ""
    """Which documents there are, in the engine's own language."""
    key: str = field(default="", repr=False)
    seconds: float = 5.0
    """That a server has to answer."""


@dataclass(frozen=True, slots=True)
class RemoteDocument:
    """A document as an engine has it."""

    id: str
    title: str
    body: str
    type: str = ""
    """In lower case."""
    date: int | None = None
    """Its Unix time."""
    allow: tuple[str, ...] = ()
    """The principals who may see it."""


@dataclass(frozen=True)
class RemoteSource:
    """A table, collection or index: how many documents, and its fields with their kinds.

    Kinds are those of `Location`'s fields that they may be: id, text, search (`search_by`), other.
    """

    name: str
    documents: int
    fields: Mapping[str, str]
    remarks: tuple[str, ...] = ()


class RemoteEngine(Protocol):
    """Documents on a server, and its own way to search them. Safe to use from any thread.

    Of constraints an engine reads types, dates and who may see a document, in fields that its location names.
    """

    noun: ClassVar[str]
    """What people call it."""
    ranks_alone: ClassVar[bool]
    """Whether its score of a document depends on that document and the query alone."""
    location: Location

    def sources(self) -> list[RemoteSource]:
        """What could be attached there."""

    def check_rules(self) -> None:
        """That documents can be filtered by who may see them, in the field that the location names, before
        they are ranked; else a ConfigError."""

    def documents(self, only: Constraints = ANY) -> int:
        """How many documents there are, of those that meet constraints."""

    def version(self) -> str:
        """Another where documents have changed; cheap."""

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints = ANY
    ) -> list[tuple[str, float]]:
        """The best `depth` ids with scores between 0 and 1, best first, by the engine's own ranking."""

    def matches(self, text: str, only: Constraints = ANY) -> Matches:
        """How many documents its own search by words finds, as the engine counts them."""

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """The documents with these ids, by id; unknown ids are left out."""

    def newest(self, depth: int, only: Constraints = ANY) -> list[str]:
        """Ids of documents that meet constraints, the latest first, and those without a date last; raises
        CannotNarrow where too many do."""

    def scan(self, only: Constraints = ANY) -> Iterator[list[RemoteDocument]]:
        """All documents that meet constraints, some hundred at a time."""

    def close(self) -> None:
        """Close the connections."""


@runtime_checkable
class CountedEngine(RemoteEngine, Protocol):
    """An engine that finds documents by terms."""

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints = ANY) -> list[str]:
        """Ids of documents with any of the terms, `depth` of them that seem best by these weights."""

    def having(self, terms: Sequence[str], only: Constraints = ANY) -> Matches:
        """How many documents have any of the terms."""

    def agreement(self, terms: Mapping[str, Sequence[str]]) -> int:
        """How many of documents' terms, by id, the engine finds each document by."""


@runtime_checkable
class VectorEngine(RemoteEngine, Protocol):
    """An engine that finds documents by vectors."""

    def vectors(self, ids: Sequence[str]) -> dict[str, Vectors]:
        """The vectors of documents that have one."""


class JsonServer:
    """A server that answers JSON over HTTPS, or over HTTP on this machine."""

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
        """What the server answers; a ServiceError of one line for anything but success."""
        reply = self._reply(lambda: self._whole(method, path, json=body, **options))
        try:
            return reply.json()
        except (ValueError, RecursionError):
            raise ServiceError(f"{self.noun} answers no JSON (check engine.url)") from None

    def _whole(self, method: str, path: str, **options: Any) -> Any:
        """A reply of bounded length and time: one that goes on and on would keep its thread for ever."""
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
        """A reply's bytes. One that was compressed twice over, or otherwise than as was said, may have
        thousands of megabytes in a piece."""
        if reply.headers.get("content-encoding", "identity") not in ("identity", "gzip"):
            raise ServiceError(f"{self.noun} answers in an encoding that is not known (check engine.url)")
        pieces: Iterator[bytes] = reply.iter_bytes()
        return pieces

    def lines(self, path: str, **options: Any) -> Iterator[Any]:
        """What the server answers line by line, each as JSON, of bounded length and time."""
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
        """Of a reply that may have no end."""
        with suppress(self._httpx.HTTPError):
            return next(self._pieces(reply), b"").decode(errors="replace")
        return ""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class RemoteProblem(ServiceError):
    """A server that answers, in words of its own, that it does not do what it is asked."""

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
        """The same of a query, whose words the server's message may quote, and a log must not have."""
        reason = f"it refuses a query, {self.code}" if self.code else "it refuses a query"
        return RemoteProblem(self.noun, reason, "other queries may do", code=self.code)


@contextmanager
def well_formed(noun: str) -> Iterator[None]:
    """Reading a server's answers: one of another form than is documented is a ServiceError."""
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
    """The HTTP address of `scheme://host:port`: TLS but on this machine; a ConfigError for others."""
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
    """A filter that is JSON, as a list of one or none."""
    if not location.filter:
        return []
    try:
        return [json.loads(location.filter)]
    except ValueError:
        raise ConfigError("engine.filter is not JSON", key="engine.filter", value=location.filter) from None


def document_of(id: object, fields: Any, location: Location, *, ticks: int = 1) -> RemoteDocument:
    """A document of the fields that a location names; `a.b` is field b of a. A date that is a number is so
    many `ticks` of a second."""
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
    """Who may see a document, as it states it, or its location; nobody where it states what is none."""
    try:
        return principals_of(stated) or location.allowed
    except ValueError:
        return NOBODY


def names_of(readers: frozenset[str]) -> list[str]:
    """What documents may call principals: groups by their bare names too, but for those that would be taken
    for another principal."""
    groups = (each.removeprefix("group:") for each in readers if each.startswith("group:"))
    return sorted({*readers, *(name for name in groups if ":" not in name and name != EVERYONE)})


def sees_unruled(readers: frozenset[str], location: Location) -> bool:
    """Whether these principals see a document that does not say who may."""
    return may_see(location.allowed, readers)


def type_name(value: object) -> str:
    """A type as searches know it."""
    return str(value).strip().lower()[:100]


def date_of(value: object, *, ticks: int = 1) -> int | None:
    """The Unix time of a number, or of a text as ISO 8601 has it; None for what is neither."""
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
    """The text of a field; several are joined by blank lines."""
    return "\n\n".join(map(str, values_at(fields, name)))


def values_at(fields: Any, name: str) -> list[Any]:
    """The values of a field; `a.b` is field b of a."""
    for part in name.split(".") if name else ():
        fields = fields.get(part) if isinstance(fields, dict) else None
    values = fields if isinstance(fields, list) else [] if fields is None or not name else [fields]
    return [value for value in values if not isinstance(value, (dict, list))]


def kinds_of(documents: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, str]:
    """Fields of documents, those inside others too, and whether they are texts."""
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
    """The ids of documents by date, the latest first; a CannotNarrow of more than `MOST_LISTED`."""
    every = list(islice((each for batch in batches for each in batch), MOST_LISTED + 1))
    if len(every) > MOST_LISTED:
        raise CannotNarrow(
            f"more than {MOST_LISTED:,} of its documents meet this: a word to look for is needed"
        )
    undated = float("-inf")
    every.sort(key=lambda each: undated if each.date is None else each.date, reverse=True)
    return [each.id for each in every[:depth]]


def words_of(text: str) -> list[str]:
    """A query's words as they are written, each once, the first of very many."""
    # marks are parts of words: the vowels of Hindi, accents that follow their letters
    is_part = {sign: sign.isalnum() or category(sign).startswith("M") for sign in set(text)}
    words = dict.fromkeys("".join(sign if is_part[sign] else " " for sign in text).split())
    return list(words)[:MOST_TERMS]


def rarest(weights: Mapping[str, float], known: Container[str] = ()) -> Mapping[str, float]:
    """The terms that weigh most, in their order, where there are too many for an engine: of those that
    documents are known to have, first."""
    if len(weights) <= MOST_TERMS:
        return weights
    order = sorted(weights, key=lambda word: (word in known, weights[word]), reverse=True)
    chosen = set(order[:MOST_TERMS])
    return {word: weight for word, weight in weights.items() if word in chosen}
