"""A search interface of a third party: how to query it, and where hits, ids and scores are in its answer.

    endpoint = SearchEndpoint.of("https://search.example.org/papers/_search")
    answer = endpoint.search("tidal power")           # .hits: id, score, title, snippet; .content: its JSON

The query replaces {query} in the address or in a JSON body. Paths in an answer are names and numbers with
dots between them; of several paths with | between them, the first that exists counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self
from urllib.parse import quote, urlsplit

from isthmus.encoders import read_key
from isthmus.errors import ConfigError, DataError, ServiceError, SiloUnavailable
from isthmus.service.limits import too_deep
from isthmus.service.settings import is_loopback
from isthmus.tables import Unpacker

QUERY = "{query}"
MOST_BYTES, MOST_UNPACKED, DEEPEST = 8 << 20, 64 << 20, 32
"""Limits of an answer: bytes received, bytes in memory, and levels of nesting."""
MOST_HITS = 1_000
SECONDS = 30.0
"""Seconds that an answer may take."""
LONGEST = {"id": 1_000, "title": 300, "snippet": 2_000}
"""Most characters of a hit's texts; the rest is cut."""
SCORES = (
    "_score",
    "score",
    "_rankingScore",
    "text_match",
    "similarity",
    "relevance",
    "rank_score",
    "@search.score",
)
IDS = ("id", "_id", "uid", "docid", "doc_id", "document_id", "key", "url", "document.id", "_source.id")
INSIDE = ("", "_source.", "document.", "payload.", "fields.")
TITLES = ("title", "name", "headline", "subject")
TEXTS = ("snippet", "highlight", "text", "body", "description", "content", "abstract", "overview", "summary")


@dataclass(frozen=True)
class ResultMapping:
    """Paths to the parts of an answer: to the list of hits from the top, to the others from a hit."""

    hits: str = ""
    id: str = ""
    score: str = ""
    title: str = ""
    snippet: str = ""

    @classmethod
    def parsed(cls, text: str) -> ResultMapping:
        """Parse a mapping such as `hits=hits.hits,id=_id,score=_score`."""
        known = [each.name for each in fields(cls)]
        parts = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
        for name in parts:
            if name not in known:
                raise ConfigError(f"no part of an answer is called {name!r}", key=name, known=known)
        return cls(**parts)

    def over(self, other: ResultMapping) -> ResultMapping:
        """Return this mapping, completed with the paths of `other` where it has none."""
        return ResultMapping(**{name: path or getattr(other, name) for name, path in asdict(self).items()})


@dataclass(frozen=True)
class UsualForm:
    """Usual form of a search engine: the end of its addresses, the mapping of its answers, its body."""

    ending: str
    mapping: ResultMapping
    body: str = ""


PRESETS: Mapping[str, UsualForm] = {
    "opensearch": UsualForm(
        "/_search",
        ResultMapping(
            "hits.hits",
            "_id",
            "_score",
            "_source.title|_source.name",
            "_source.body|_source.text|_source.abstract|_source.content|_source.description",
        ),
        '{"size": 10, "query": {"simple_query_string": {"query": "{query}"}}}',
    ),
    "typesense": UsualForm(
        "/documents/search",
        ResultMapping(
            "hits",
            "document.id",
            "text_match",
            "document.title|document.name",
            "highlights.0.snippet|document.body|document.text|document.description",
        ),
    ),
    "meilisearch": UsualForm(
        "/search",
        ResultMapping(
            "hits", "id|uid", "_rankingScore", "title|name", "_formatted.body|body|text|overview|description"
        ),
        '{"q": "{query}", "limit": 10, "showRankingScore": true}',
    ),
    "qdrant": UsualForm(
        "/points/query",
        ResultMapping(
            "result.points|result",
            "id",
            "score",
            "payload.title|payload.name",
            "payload.body|payload.text|payload.content",
        ),
    ),
}
"""Usual forms of search engines by name."""
_TELLING = {
    "opensearch": ("/_search",),
    "typesense": ("/documents/search",),
    "qdrant": ("/points/query", "/points/search"),
}


@dataclass(frozen=True)
class EndpointHit:
    """One hit of an answer."""

    id: str
    score: float
    title: str = ""
    snippet: str = ""


@dataclass(frozen=True)
class EndpointAnswer:
    """A parsed answer: its whole content, its list of hits, and these hits read, in the same order."""

    content: Any
    rows: list[Any]
    hits: tuple[EndpointHit, ...]
    mapping: ResultMapping


@dataclass(frozen=True)
class RawReply:
    """Reply as received: status, content type and body."""

    status: int
    kind: str
    body: bytes


@dataclass(frozen=True)
class SearchEndpoint:
    """How to query an interface; `key` names the place of its API key, `env:NAME` or `file:PATH`."""

    url: str
    body: str = ""
    mapping: ResultMapping = field(default_factory=ResultMapping)
    key: str = ""
    key_header: str = "authorization"
    unencrypted: bool = False

    @classmethod
    def of(cls, url: str, *, preset: str = "auto", body: str = "", mapping: str = "", **more: Any) -> Self:
        """Make an endpoint of the usual form that the preset names, or that the address looks like."""
        if preset not in ("auto", *PRESETS):
            raise ConfigError(f"no preset {preset!r}", key=preset, known=("auto", *PRESETS))
        path = urlsplit(url).path.rstrip("/")
        if preset == "auto":
            preset = next((name for name, ends in _TELLING.items() if path.endswith(ends)), "auto")
            if preset == "auto" and "/indexes/" in path and path.endswith("/search"):
                preset = "meilisearch"
        usual = PRESETS.get(preset, UsualForm("", ResultMapping()))
        if QUERY not in url:
            body = body or usual.body
        return cls(url, body, ResultMapping.parsed(mapping).over(usual.mapping), **more)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{self.url!r} is no address", key="URL", expected="https://host/search?q={query}"
            )
        if parts.username or parts.password:
            raise ConfigError(
                "the address has a password in it", key="URL", expected="--key env:NAME or --key file:PATH"
            )
        if self.key and parts.scheme == "http" and not is_loopback(parts.hostname) and not self.unencrypted:
            raise ConfigError(
                f"the key would be sent to {parts.hostname} in the clear",
                key="URL",
                expected="https://…, or --unencrypted where the way there is protected otherwise",
            )
        if QUERY not in self.url + self.body:
            raise ConfigError(
                "nothing says where the query goes",
                key="URL",
                expected=f'{QUERY} in the address, as in ?q={QUERY}, or in --body, as in {{"q": "{QUERY}"}}',
            )
        self._template  # noqa: B018  # a body that is no JSON is told now

    @cached_property
    def _template(self) -> Any:
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise ConfigError(
                f"--body is no JSON: {error}", key="body", expected='{"q": "{query}"}'
            ) from None

    @property
    def place(self) -> str:
        """The address without its query, for messages."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def search(self, query: str) -> EndpointAnswer:
        """Return the answer to a query; a ServiceError names the problem and a cure."""
        url = self.url.replace(QUERY, quote(query, safe=""))
        body = None if self._template is None else json.dumps(_filled(self._template, query)).encode()
        reply = self.send("GET" if body is None else "POST", url, body)
        if reply.status != 200:
            raise ServiceError(
                f"{self.place} answered with status {reply.status}{_status_cure(reply.status, self.key)}"
            )
        return self.read(reply)

    def read(self, reply: RawReply) -> EndpointAnswer:
        """Parse an answer; raises ServiceError if it has no list of hits with scores."""
        content = _parsed(reply, self.place)
        mapping = detect(content, self.mapping)
        rows = _at(content, mapping.hits) if mapping.hits != "." else content
        if not mapping.hits and not any(True for _ in _lists(content)) and _has_empty_list(content):
            rows = []  # no hits, and no path to them is known yet
        if not isinstance(rows, list):
            raise ServiceError(_lacking(self.place, content, mapping))
        hits = tuple(_hit(row, at, mapping, self.place) for at, row in enumerate(rows[:MOST_HITS]))
        return EndpointAnswer(content, rows, hits, mapping)

    def send(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> RawReply:
        """Send one request with the key; redirects are not followed, and size and time are limited."""
        import httpx

        sent = {
            "accept": "application/json",
            "accept-encoding": "identity",
            **(headers or {}),
            **self._secret(),
        }
        if body is not None:
            sent.setdefault("content-type", "application/json")
        until = time.monotonic() + SECONDS
        try:
            with self._http.stream(method, url, content=body, headers=sent) as reply:
                if reply.is_redirect:
                    target = urlsplit(reply.headers.get("location", "")).netloc or "another path"
                    raise ServiceError(
                        f"{self.place} redirects to {target[:100]}; redirects are not followed, since the key"
                        " would go along (name the address it redirects to)"
                    )
                content = _bounded(reply.iter_raw(), self.place, until)
                return RawReply(reply.status_code, reply.headers.get("content-type", ""), content)
        except httpx.TimeoutException:
            raise SiloUnavailable(f"{self.place} does not answer within {SECONDS:.0f} s") from None
        except httpx.HTTPError as error:  # the message may quote headers and so the key
            raise SiloUnavailable(
                f"{self.place} cannot be reached: {type(error).__name__}"
                " (is it running, and is the address right?)"
            ) from None

    @cached_property
    def _http(self) -> Any:
        import httpx

        return httpx.Client(timeout=SECONDS, follow_redirects=False)

    def _secret(self) -> dict[str, str]:
        key = read_key(self.key)
        if not key:
            return {}
        return {self.key_header: f"Bearer {key}" if self.key_header.lower() == "authorization" else key}

    def described(self) -> dict[str, Any]:
        """Return the endpoint's description for a file, without secrets."""
        return {"url": self.url, "body": self.body, "mapping": asdict(self.mapping)}


def detect(content: Any, known: ResultMapping) -> ResultMapping:
    """Complete the mapping of an answer by detecting unknown paths: hits are a list of objects that all
    have a number of the same name, with the name that looks most like a score and, among those, the
    longest list."""
    if known.hits and known.score and known.id:
        return known
    best: tuple[tuple[int, int], ResultMapping] | None = None
    for path, rows in _lists(content):
        if known.hits and path not in known.hits.split("|"):
            continue
        score = known.score or _numeric(rows)
        if score:
            rank = (-_preference(score), len(rows))
            if best is None or rank > best[0]:
                best = rank, ResultMapping(path, "", score)
    if best is None:
        return known
    found_in = next(rows for path, rows in _lists(content) if path == best[1].hits)
    first = found_in[0]
    named = {
        "id": _first_of(first, IDS),
        "title": _first_of(first, [start + name for start in INSIDE for name in TITLES]),
        "snippet": _first_of(first, [start + name for start in INSIDE for name in TEXTS]),
    }
    return known.over(replace(best[1], **named))


def _lists(content: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, list[Any]]]:
    """Yield every list of objects in an answer, with its path."""
    if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
        yield path or ".", content
    elif isinstance(content, dict) and depth < 4:
        for name, value in content.items():
            yield from _lists(value, f"{path}.{name}" if path else str(name), depth + 1)


def _has_empty_list(content: Any) -> bool:
    return content == [] or (isinstance(content, dict) and any(map(_has_empty_list, content.values())))


def _numeric(rows: Sequence[Any]) -> str:
    """Return the name that looks most like a score, of numbers that all rows have; "" for none."""
    names = [name for name, value in rows[0].items() if _is_number(value)]
    names = [name for name in names if all(_is_number(row.get(name)) for row in rows)]
    telling = [name for name in names if _preference(name) < len(SCORES) + 1]
    return min(telling, key=_preference, default="")


def _preference(name: str) -> int:
    if name in SCORES:
        return SCORES.index(name)
    return len(SCORES) if "score" in name.lower() else len(SCORES) + 1


def _first_of(row: Mapping[str, Any], paths: Sequence[str]) -> str:
    return next((path for path in paths if isinstance(_at(row, path), (str, int))), "")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _at(content: Any, paths: str) -> Any:
    """Return the value at the first of the paths that exists; None if none does."""
    for path in filter(None, paths.split("|")):
        value = content
        for name in path.split("."):
            if isinstance(value, dict):
                value = value.get(name)
            elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = None
        if value is not None:
            return value
    return None


def _hit(row: Any, at: int, mapping: ResultMapping, place: str) -> EndpointHit:
    score, id = _at(row, mapping.score), _at(row, mapping.id)
    if not _is_number(score):
        raise ServiceError(
            f"hit {at + 1} of {place} has no number at {mapping.score!r}"
            " (name where scores stand: --mapping score=PATH; some engines send scores only when asked)"
        )
    texts = {name: str(_at(row, getattr(mapping, name)) or "") for name in ("title", "snippet")}
    if not isinstance(id, (str, int)):  # a hit without an id is identified by its text
        id = texts["title"] or texts["snippet"][:200] or json.dumps(row, sort_keys=True)
    return EndpointHit(
        str(id)[: LONGEST["id"]],
        float(score),
        texts["title"][: LONGEST["title"]],
        texts["snippet"][: LONGEST["snippet"]],
    )


def _lacking(place: str, content: Any, mapping: ResultMapping) -> str:
    """Describe what an answer without hits lacks, and the lists it has."""
    if mapping.hits and mapping.score:
        problem = f"{place} has no list at {mapping.hits!r}"
    else:
        problem = f"{place} answers without scores: no list of objects that all have a number called score"
    there = [f"{path} ({', '.join(list(rows[0])[:8])})" for path, rows in _lists(content)][:3]
    lists = f"; its lists: {'; '.join(there)[:400]}" if there else ""
    return f"{problem}{lists} (name the paths: --mapping hits=PATH,id=PATH,score=PATH)"


def _filled(template: Any, query: str) -> Any:
    """Return a body with {query} replaced inside its texts, so that no query changes its structure."""
    if isinstance(template, str):
        return template.replace(QUERY, query)
    if isinstance(template, dict):
        return {name: _filled(value, query) for name, value in template.items()}
    return [_filled(value, query) for value in template] if isinstance(template, list) else template


def _parsed(reply: RawReply, place: str) -> Any:
    if "html" in reply.kind.lower() or reply.body.lstrip()[:1] == b"<":
        raise ServiceError(
            f"{place} answers with a web page, not with JSON (name the address of its search interface)"
        )
    try:
        if too_deep(reply.body, DEEPEST):
            raise ValueError
        Unpacker(MOST_UNPACKED).weigh_json(reply.body)
        return json.loads(reply.body)
    except (ValueError, DataError, RecursionError):
        raise ServiceError(f"{place} answers with something that is no JSON, or too much of it") from None


def _status_cure(status: int, key: str) -> str:
    if status in (401, 403):
        return f", key from {key or 'nowhere'} (--key env:NAME, --key-header NAME)"
    return " (check the address and --body)" if status in (400, 404, 405, 415, 422) else ""


def _bounded(chunks: Iterator[bytes], place: str, until: float) -> bytes:
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if time.monotonic() > until:
            raise SiloUnavailable(f"{place} does not answer within {SECONDS:.0f} s")
        if len(content) > MOST_BYTES:
            raise ServiceError(f"{place} answers with more than {MOST_BYTES:,} bytes")
    return bytes(content)
