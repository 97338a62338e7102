"""An encoder behind the organisation's own OpenAI-compatible `/v1/embeddings` interface.

Every document and query is sent there. The key is read from the environment or a file when it is needed, and
never appears in settings, messages or logs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from isthmus.encoders.folders import USUAL_LIMIT
from isthmus.encoders.vectors import Encoder, Vectors, unit
from isthmus.errors import ConfigError, DataError, ServiceError
from isthmus.files import private_file

USUAL_KEY = "env:ISTHMUS_ENCODER_KEY"
BATCH_TEXTS, BATCH_CHARACTERS = 64, 200_000
PAUSE, LONGEST_PAUSE = 0.5, 30.0
HURRIED_SECONDS = 2.0
"""Seconds that an answer may take while a search waits for it."""
MOST_BYTES = 64 << 20
"""Maximum size of an answer."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP status codes after which a request is sent again."""
UNACCEPTABLE = (400, 413, 422)
"""HTTP status codes that concern the texts, which are most often too long."""
LOCAL = ("localhost", "127.0.0.1", "::1")
PROBES = (
    "a cat sleeps on the mat",
    "kittens rest on carpets",
    "share prices fell sharply",
    "la pluie tombe sur la mer",
)


class Patience(NamedTuple):
    """Number of attempts at a request, and the seconds that each may take."""

    tries: int
    seconds: float


DOCUMENTS, QUERY = Patience(4, 60.0), Patience(1, HURRIED_SECONDS)

_log = logging.getLogger("isthmus.service")


class _UnacceptableTexts(ServiceError):
    """The endpoint refuses these texts, but may accept others."""


@dataclass(frozen=True, eq=False)
class Endpoint(Encoder):
    """An encoder at an address, `https://host/v1#model`.

    `key` says where the key is: `env:NAME` or `file:PATH`; empty for none. `probe` is the `probe_hash` when
    the encoder was added: an endpoint with another one is refused. `limit` is the number of words that are
    sent as one text, `stated_width` the width of its vectors when it was added, 0 if unknown.
    """

    url: str
    key: str = ""
    probe: str = ""
    stated_width: int = 0
    pauses: float = PAUSE
    limit: int = USUAL_LIMIT
    service: ClassVar[str] = "/embeddings"
    """The path of the service below the address."""
    verb: ClassVar[str] = "encodes"
    cure: ClassVar[str] = "isthmus encoder add URL#MODEL --key env:NAME"
    _state: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.stated_width:
            self._state["width"] = self.stated_width
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no address", key="encoder", expected="https://host/v1#model")
        if parts.username or parts.password or parts.query:
            problem = "the address of an encoder has a password or a query in it"
            raise ConfigError(problem, key="encoder", expected="a key in an environment variable or a file")
        if parts.scheme == "http" and parts.hostname not in LOCAL:
            problem = f"documents would be sent to {parts.hostname} unencrypted"
            raise ConfigError(problem, key="encoder", expected="https://…, or http:// on this machine")

    @property
    def model(self) -> str:
        """The model's name at the endpoint."""
        return urlsplit(self.url).fragment

    @cached_property
    def _address(self) -> str:
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/")
        path = path if path.endswith(self.service) else path + self.service
        return urlunsplit((parts.scheme, parts.netloc, path, "", ""))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model's name and of its vectors of some texts."""
        stated = json.dumps((self.model, self.probe or self.probe_hash))
        return f"endpoint-{hashlib.sha256(stated.encode()).hexdigest()[:16]}"

    @property
    def probe_hash(self) -> str:
        """A hash of the vectors' width and of the cosines between some vectors, rounded to twentieths so that
        two servers of the same model agree."""
        return self._probed(DOCUMENTS)

    def _probed(self, patience: Patience) -> str:
        if "probe" not in self._state:
            vectors = unit(np.array(self._ask(PROBES, patience), dtype=np.float32))
            cosines = np.rint(20 * (vectors @ vectors.T)[np.triu_indices(len(PROBES), 1)]).astype(int)
            stated = repr((vectors.shape[1], cosines.tolist())).encode()
            self._state["probe"] = hashlib.sha256(stated).hexdigest()
        return str(self._state["probe"])

    @property
    def width(self) -> int:
        """Numbers in a vector, asked from the endpoint if unknown."""
        if self.stated_width:
            return self.stated_width
        self._check(DOCUMENTS)
        return int(self._state["width"])

    def _check(self, patience: Patience) -> None:
        """Raise a DataError if the endpoint encodes otherwise than when it was added; called before the first
        vectors."""
        probed = self._probed(patience)
        if self.probe and probed != self.probe:
            cure = "if that is meant: isthmus encoder add it under another name, and encode again"
            raise DataError(f"{self._address} encodes otherwise than when it was added", cure=cure)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """One unit row a text; zeros for an empty text, or one that the endpoint refuses.

        Raises a ServiceError if the endpoint fails.
        """
        return self._encoded(texts, DOCUMENTS)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Like `encode`, but with a single short attempt, since a person is waiting."""
        return self._encoded(texts, QUERY)

    def _encoded(self, texts: Sequence[str], patience: Patience) -> Vectors:
        self._check(patience)
        vectors = np.zeros((len(texts), self._state["width"]), dtype=np.float32)
        rows = [row for row, text in enumerate(texts) if text.strip()]
        for batch in _batches(rows, [len(texts[row]) for row in rows]):
            vectors[batch] = self._ask_halving([texts[row] for row in batch], patience)
        return unit(vectors)

    def _ask_halving(self, texts: Sequence[str], patience: Patience) -> list[list[float]]:
        """Vectors of texts; refused batches are halved, and a single refused text gets zeros if others are
        accepted."""
        try:
            return self._ask(texts, patience)
        except _UnacceptableTexts as error:
            if len(texts) > 1:
                half = len(texts) // 2
                return self._ask_halving(texts[:half], patience) + self._ask_halving(texts[half:], patience)
            self._ask(PROBES[:1], patience)  # raises if the model or the account is at fault, not the text
            _log.warning("a passage of %s characters gets no vector: %s", len(texts[0]), error)
            return [[0.0] * self._state["width"]]

    def _ask(self, texts: Sequence[str], patience: Patience) -> list[list[float]]:
        body = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        rows = self._rows(self._post(json.dumps(body).encode(), patience), len(texts))
        width = self._state.setdefault("width", len(rows[0]))
        if strange := [len(row) for row in rows if len(row) != width]:
            raise ServiceError(f"{self._address} answered vectors of {strange[0]} numbers, not {width}")
        return rows

    def _rows(self, content: bytes, count: int) -> list[list[float]]:
        """Parse the vectors, in the order of the texts. Raises a ServiceError for any other form."""
        try:
            data: list[dict[str, Any]] = json.loads(content)["data"]
            rows = {int(item.get("index", at)): item["embedding"] for at, item in enumerate(data)}
            if sorted(rows) != list(range(count)) or len(data) != count:
                raise ValueError(f"{len(data)} vectors for {count} texts")
            for row in rows.values():
                array = np.array(row, dtype=np.float32)
                if array.ndim != 1 or not array.size or not np.isfinite(array).all():
                    raise ValueError("a vector that is not of finite numbers")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            problem = f"{self._address} answered no embeddings: {str(error)[:100]}"
            expected = "expected data[].embedding as of OpenAI's /v1/embeddings"
            raise ServiceError(f"{problem} ({expected})") from None
        return [rows[at] for at in range(count)]

    @cached_property
    def _http(self) -> Any:
        import httpx

        return httpx.Client()

    def _post(self, body: bytes, patience: Patience) -> bytes:
        """Send a request, again while that may help, and return the answer."""
        import httpx

        problem, kind = "", ServiceError
        for attempt in range(patience.tries):
            wait, until = self.pauses * 2**attempt, time.monotonic() + patience.seconds
            try:
                with self._http.stream(
                    "POST", self._address, content=body, headers=self._headers(), timeout=patience.seconds
                ) as reply:
                    if reply.status_code == 200:
                        return _bounded(reply.iter_raw(), self._address, until)
                    problem = f"status {reply.status_code}"
                    if reply.status_code in (401, 403):
                        problem += f", key from {self.key or 'nowhere'}"
                    if reply.status_code in UNACCEPTABLE:
                        kind = _UnacceptableTexts
                    if reply.status_code not in AGAIN:
                        break
                    asked_for = reply.headers.get("retry-after", "")
                    wait = max(wait, float(asked_for)) if asked_for.isdecimal() else wait
            except httpx.HTTPError as error:
                problem = type(error).__name__  # the message may quote headers and so the key
            if attempt + 1 < patience.tries:
                time.sleep(min(wait, LONGEST_PAUSE))
        cure = f"check address, model and key: {self.cure}"
        raise kind(f"{self._address} {self.verb} nothing: {problem} ({cure})")

    def _headers(self) -> dict[str, str]:
        key = read_key(self.key)
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        # identity: a compressed reply could expand far beyond its size
        return {"content-type": "application/json", "accept-encoding": "identity", **authorization}


@dataclass(frozen=True, eq=False)
class Chat(Endpoint):
    """A language model at an address, `https://host/v1#model`, used by its `/chat/completions`."""

    service: ClassVar[str] = "/chat/completions"
    verb: ClassVar[str] = "says"
    cure: ClassVar[str] = "--endpoint URL#MODEL --key env:NAME"

    def complete(self, prompt: str, *, tokens: int = 256) -> str:
        """The model's completion of a prompt (temperature 0.6, top-p 0.9), with white space normalised."""
        messages = [{"role": "user", "content": prompt}]
        body = {"model": self.model, "messages": messages, "max_tokens": tokens}
        content = self._post(json.dumps({**body, "temperature": 0.6, "top_p": 0.9}).encode(), DOCUMENTS)
        try:
            answer = json.loads(content)["choices"][0]["message"]["content"]
            if not isinstance(answer, str) or not answer.strip():
                raise ValueError("an empty answer")
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            problem = f"{self._address} answered no text: {str(error)[:100]}"
            raise ServiceError(f"{problem} (expected choices[0].message.content)") from None
        return " ".join(answer.split())


def read_key(place: str) -> str:
    """Read the key at `env:NAME` or `file:PATH`; empty for an empty place. Raises ConfigError or DataError if
    it is missing."""
    if not place:
        return ""
    kind, _, where = place.partition(":")
    if kind == "file":
        key = private_file(where).read_text(encoding="utf-8").strip()
    elif kind == "env" and where in os.environ:
        key = os.environ[where].strip()
    elif kind == "env":
        raise ConfigError(f"the environment variable {where} is not set", key="encoder.key")
    else:
        problem = "a key is not written where others read it"
        raise ConfigError(problem, key="key", expected="env:NAME or file:PATH")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{place} has more than one line, or letters that no key has", key="encoder.key")
    return key


def _batches(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split rows into batches that keep a request small."""
    batch: list[int] = []
    characters = 0
    for row, length in zip(rows, lengths, strict=True):
        if batch and (len(batch) == BATCH_TEXTS or characters + length > BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(row)
        characters += length
    if batch:
        yield batch


def _bounded(chunks: Iterator[bytes], address: str, until: float) -> bytes:
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if time.monotonic() > until:
            raise ServiceError(f"{address} did not answer in time")
        if len(content) > MOST_BYTES:
            raise ServiceError(f"{address} answered more than {MOST_BYTES:,} bytes")
    return bytes(content)
