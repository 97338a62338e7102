"""Authentication: certificates for brokers and silos, API keys for people and programs.

    keys = ApiKeys("api-keys.json")
    token = keys.add("ada", scopes=["search", "feedback"], days=90)    # shown once, stored hashed
    keys.find(token)                                                     # Caller(name='ada', …)

    tokens = HitTokens("north", local_secret(folder / "feedback.key"))
    token = tokens.seal("d7", query="tidal power", peer="broker")
    tokens.open(token, query="tidal power", peer="broker")      # "d7", for a day

A hit's token is the document's id, encrypted under a key that only the silo has (AES-SIV, RFC 5297), and
bound to the silo, the query and the peer. Its bearer learns nothing from it, and cannot make one. A silo
identifies a person by a pseudonym that the broker makes with its own key, a different one for each silo.

A server of `connections` puts the verified certificate of the other side into the ASGI scope. A `Gate` turns
a request into a `Caller`, or refuses it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from isthmus.errors import ConfigError, DataError, Refused
from isthmus.files import locked, private_file, write_private
from isthmus.service.certificates import private_folder, stamp
from isthmus.service.people import Person
from isthmus.service.settings import SCOPES

if TYPE_CHECKING:
    from starlette.types import Scope

    from isthmus.service.sessions import Sessions

PREFIX = "isk"
DAYS, WARN_DAYS = 90.0, 14.0
"""Days that a key is valid unless stated otherwise, and days before its end from which people are warned."""
PEER = "isthmus.peer"
"""Key in a scope's `extensions` for the certificate of the other side."""
CONNECTION = "isthmus.connection"
"""Key in a scope for the connection over which the request came."""
STARTING = 1.0
"""Least seconds from the start of a process to its first answer; no process before it answered then."""
_DAY = 86400.0
KEY_BYTES = 64
LIFETIME = 26 * 3600.0
"""Seconds for which a hit can be judged: a day, and two hours to spare."""
BLOCK = 32
"""Ids are padded to multiples of this many bytes, so that a token does not reveal a file name's length."""
_STAMP = 6
_OPENING = b"opening"

P = TypeVar("P")


@dataclass(frozen=True)
class Caller(Generic[P]):
    """An authenticated caller, with the scopes of their key or the policy for their certificate."""

    name: str
    scopes: frozenset[str] = frozenset()
    policy: P | None = None
    expires: float | None = field(default=None, compare=False)
    """When the key expires, in seconds since 1970."""
    person: Person | None = field(default=None, compare=False)
    """The person as silos see them; None for a caller without a key or a session."""
    label: str = field(default="", compare=False)
    """Name that the page shows, if it differs from `name`."""

    def may(self, scope: str) -> bool:
        """Whether this caller has the scope; an administrator has all but that of the audit log."""
        return scope in self.scopes or ("admin" in self.scopes and scope != "audit")


@dataclass(frozen=True)
class Peer:
    """The other side of a mutually authenticated connection."""

    name: str
    expires: float
    certificate: bytes = field(default=b"", repr=False)
    """The certificate as TLS has verified it, DER."""
    serial: int = 0


@dataclass(frozen=True)
class ApiKey:
    """Stored record of an API key, without the key itself."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created: float
    expires: float | None
    salt: str
    digest: str = field(repr=False)
    groups: tuple[str, ...] = ()

    def opens(self, secret: str) -> bool:
        """Whether this is the key's secret, compared in constant time."""
        return hmac.compare_digest(self.digest, _digest(self.salt, secret))


class ApiKeys:
    """API keys in a JSON file, hashed: HMAC-SHA256 with one salt per key; each key has 256 random bits.

    The file is read again when it has changed, so a key revoked on the command line is refused at once.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = Path(path), clock
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, ApiKey] = {}

    def add(
        self, name: str, *, scopes: Iterable[str], days: float | None = DAYS, groups: Iterable[str] = ()
    ) -> str:
        """Make a new key and return its token, which is not stored; it never expires if `days` is None. Silos
        that require the person who asks are told the owner's name and the `groups`."""
        wanted = tuple(dict.fromkeys(scopes))
        for scope in wanted:
            if scope not in SCOPES:
                raise ConfigError(f"unknown scope {scope!r}", key=scope, known=SCOPES)
        if not wanted:
            raise ConfigError("an API key needs at least one scope", expected=", ".join(SCOPES))
        if not name or len(name) > 80 or not name.isprintable():
            raise ConfigError("a key needs the name of its owner", value=name, expected="1 to 80 letters")
        if days is not None and not 0 < days <= 36_500:
            raise ConfigError(f"a key of {days:g} days", value=days, expected="above 0, or --forever")
        now = self._clock()
        number, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
        expires = None if days is None else now + days * _DAY
        person = Person(name, frozenset(groups)).check()
        digest = _digest(salt, secret)
        key = ApiKey(number, name, wanted, now, expires, salt, digest, tuple(sorted(person.groups)))
        with self._file_lock():
            self._write({**self._read(), number: key})
        return f"{PREFIX}_{number}_{secret}"

    def rotate(self, number: str, *, overlap: float, days: float | None = DAYS) -> str:
        """Make another key for the same owner with the same rights. Returns its token; the old key stays
        valid for at most `overlap` more days."""
        before = self._read().get(number)
        if before is None:
            raise ConfigError(f"no API key {number!r} in {self.path}", key=number, known=self._read())
        token = self.add(before.name, scopes=before.scopes, days=days, groups=before.groups)
        with self._file_lock():
            keys = dict(self._read())
            if number in keys:  # else it was revoked meanwhile
                ends = self._clock() + overlap * _DAY
                keys[number] = replace(keys[number], expires=min(ends, keys[number].expires or ends))
                self._write(keys)
        return token

    def revoke(self, number: str) -> ApiKey:
        """Delete the key with this id, and return its record."""
        with self._file_lock():
            keys = dict(self._read())
            if number not in keys:
                raise ConfigError(f"no API key {number!r} in {self.path}", key=number, known=keys)
            gone = keys.pop(number)
            self._write(keys)
        return gone

    def all(self) -> list[ApiKey]:
        """Every key, oldest first."""
        return sorted(self._read().values(), key=lambda key: key.created)

    def find(self, token: str) -> Caller[Any] | None:
        """Return the caller with this token; None if it is unknown, revoked or expired."""
        key = self.key_of(token)
        return None if key is None else self.caller(key.id)

    def caller(self, number: str) -> Caller[Any] | None:
        """Return the caller whose key has this id; None if it is unknown, revoked or expired."""
        key = self._read().get(number)
        if key is None or not self._holds(key):
            return None
        person = Person(key.name, frozenset(key.groups))
        return Caller(key.name, frozenset(key.scopes), expires=key.expires, person=person)

    def key_of(self, token: str) -> ApiKey | None:
        """Return the record of a token's key; None if it is unknown, revoked or expired."""
        parts = token.split("_", 2)
        if len(parts) != 3 or parts[0] != PREFIX or not token.isascii():
            return None
        key = self._read().get(parts[1])
        if key is None:
            _digest("", parts[2])  # so that an unknown id takes as long as a wrong secret
            return None
        return key if key.opens(parts[2]) and self._holds(key) else None

    def ending(self, days: float = WARN_DAYS) -> list[ApiKey]:
        """Return the keys that expire within `days` days."""
        now = self._clock()
        return [key for key in self.all() if key.expires and now < key.expires < now + days * _DAY]

    def _holds(self, key: ApiKey) -> bool:
        return key.expires is None or key.expires > self._clock()

    def _read(self) -> Mapping[str, ApiKey]:
        seen = stamp(self.path)
        if seen is None:
            return {}
        if seen != self._seen:
            self._keys, self._seen = _parsed(private_file(self.path)), seen
        return self._keys

    def _file_lock(self) -> AbstractContextManager[int]:
        return locked(private_folder(self.path.parent) / f".{self.path.name}.lock")

    def _write(self, keys: Mapping[str, ApiKey]) -> None:
        payload = {"format": 1, "keys": [asdict(key) for key in keys.values()]}
        write_private(self.path, json.dumps(payload, indent=2).encode() + b"\n")


def _parsed(path: Path) -> dict[str, ApiKey]:
    cure = "isthmus keys api add makes a new file once this one is gone"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["format"] != 1:
            raise DataError(f"format {saved['format']} of API keys", file=path, cure="upgrade isthmus")
        lists = ("scopes", "groups")
        keys = [
            ApiKey(**{**row, **{each: tuple(row.get(each, ())) for each in lists}}) for row in saved["keys"]
        ]
    except DataError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("not a file of API keys", file=path, cure=cure) from error
    return {key.id: key for key in keys}


def _digest(salt: str, secret: str) -> str:
    return hmac.new(salt.encode(), secret.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


class WrongKey(Refused):
    """The API key is not valid; it may be a guess."""


class Gate(Generic[P]):
    """Authenticates callers by certificate, API key or session of the page, or grants rights without any.

    A peer's policy is found by the name in its certificate, or by the name of its API key.
    """

    def __init__(
        self,
        *,
        peers: Mapping[str, P] | None = None,
        keys: ApiKeys | None = None,
        sessions: Sessions | None = None,
        strangers: Iterable[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.peers, self.keys, self.sessions = dict(peers or {}), keys, sessions
        self.strangers = Caller[P]("anonymous", frozenset(strangers))
        self._clock = clock

    async def renew(self, scope: Scope) -> None:
        """Ask the sign-in provider again about the person of a request's session, if that is due."""
        if self.sessions is not None:
            await self.sessions.renew(scope)

    def caller(self, scope: Scope) -> Caller[P]:
        """Return the caller of a request; raises Refused if it is not authenticated."""
        peer: Peer | None = scope.get("extensions", {}).get(PEER)
        if peer is not None and peer.name in self.peers:
            if peer.expires <= self._clock():  # the connection may outlive the certificate
                raise Refused("the certificate has expired")
            return Caller(peer.name, frozenset(), self.peers[peer.name])
        token = token_in(scope)
        if token is not None:
            key = None if self.keys is None else self.keys.find(token)
            if key is None:
                raise WrongKey("the API key is unknown, revoked or expired")
            return replace(key, policy=self.peers.get(key.name))
        if self.sessions is not None and (caller := self.sessions.caller_in(scope)) is not None:
            return caller
        if self.strangers.scopes:
            return self.strangers
        if self.sessions is not None and self.sessions.provider is not None:
            raise Refused("sign in, or send an API key")
        raise Refused("no certificate of a known peer" if self.peers else "an API key is needed")


def token_in(scope: Scope) -> str | None:
    """Return the API key in a request's headers: `Authorization: Bearer …` or `X-API-Key`."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if kind.lower() == "bearer" else ""
        if name == b"x-api-key":
            return str(value.decode("latin-1").strip())
    return None


class Once:
    """Refuses replays: messages seen before, or whose time differs too much from this machine's clock to
    tell.

    Messages are remembered as long as their time stamp would be accepted, so memory is bounded by the traffic
    of two windows. Messages sent before this began are refused: an earlier process may have seen them.
    """

    def __init__(self, *, window: float = 60.0, clock: Callable[[], float] = time.time) -> None:
        self.window, self._clock = window, clock
        self._new: set[tuple[str, str]] = set()
        self._old: set[tuple[str, str]] = set()
        self._began = self._turned = clock()

    def admit(self, caller: str, nonce: str, sent: float) -> None:
        """Record a message of this caller; raises Refused if it is a replay."""
        now = self._clock()
        if not abs(now - sent) <= self.window:
            raise Refused("the message is too old or from the future: compare the clocks")
        if sent < self._began - STARTING:
            raise Refused(
                "the message is from before this server started: send another, or compare the clocks"
            )
        if now - self._turned > 2 * self.window:
            self._new, self._old, self._turned = set(), self._new, now
        if (caller, nonce) in self._new or (caller, nonce) in self._old:
            raise Refused("the message was sent before")
        self._new.add((caller, nonce))


# tokens of hits: a silo takes judgements only of hits that it returned


def local_secret(path: Path) -> bytes:
    """Return the key in this file, made if there is none; raises DataError if others can read it."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secrets.token_hex(KEY_BYTES).encode() + b"\n")
    try:
        key = bytes.fromhex(private_file(path).read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise DataError("not a key file of Isthmus", file=path, cure="remove it: a new one is made")
    return key


class LiveSecret:
    """The key in a file, made if there is none, and read again when the file has been replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._key = path, local_secret(path)
        self._seen = stamp(path)

    def __call__(self) -> bytes:
        """Return the key that is valid now."""
        seen = stamp(self._path)
        if seen != self._seen and seen is not None:
            self._key, self._seen = local_secret(self._path), seen
        return self._key


class HitTokens:
    """Makes and opens the tokens of one silo's hits."""

    def __init__(self, silo: str, key: bytes | LiveSecret, *, clock: Callable[[], float] = time.time) -> None:
        self._silo, self._source, self._clock = silo.encode(), key, clock
        self._derived = self._derive(key if isinstance(key, bytes) else key())

    @staticmethod
    def _derive(key: bytes) -> tuple[bytes, AESSIV, bytes]:
        return key, AESSIV(key), hmac.new(key, b"names of hits", hashlib.sha256).digest()

    @property
    def _keys(self) -> tuple[bytes, AESSIV, bytes]:
        """The key, its cipher, and the key for pseudonyms of documents."""
        if not isinstance(self._source, bytes) and (key := self._source()) != self._derived[0]:
            self._derived = self._derive(key)
        return self._derived

    def seal(self, document: str, *, query: str, peer: str) -> str:
        """Return a token for this hit; it is the same within a minute."""
        return self._sealed(document, self._bound(query, peer))

    def open(self, token: str, *, query: str, peer: str) -> str | None:
        """Return the document; None if the token is not of this silo, query and peer, or is too old."""
        return self._unsealed(token, self._bound(query, peer))

    def ticket(self, document: str, *, peer: str) -> str:
        """Return a token with which this peer can open, or ask for, the document of a hit it was shown."""
        return self._sealed(document, [*self._bound("", peer), _OPENING])

    def ticketed(self, ticket: str, *, peer: str) -> str | None:
        """Return the document; None if the ticket is not of this silo and peer, or is too old."""
        return self._unsealed(ticket, [*self._bound("", peer), _OPENING])

    def _sealed(self, document: str, bound: list[bytes]) -> str:
        minute = int(self._clock() // 60).to_bytes(_STAMP, "big")
        plain = minute + document.encode("utf-8", "surrogatepass")
        plain += b"\0" * (-len(plain) % BLOCK)  # padding: no id contains NUL
        sealed = self._keys[1].encrypt(plain, bound)
        return base64.urlsafe_b64encode(sealed).decode("ascii").rstrip("=")

    def _unsealed(self, token: str, bound: list[bytes]) -> str | None:
        try:
            sealed = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
            plain = self._keys[1].decrypt(sealed, bound)
        except (InvalidTag, ValueError, binascii.Error):
            return None
        age = self._clock() - 60 * int.from_bytes(plain[:_STAMP], "big")
        if not 0 <= age <= LIFETIME:
            return None
        return plain[_STAMP:].rstrip(b"\0").decode("utf-8", "surrogatepass")

    def name(self, document: str, *, peer: str) -> str:
        """Return a document's pseudonym for a peer that may not read it: its id may reveal contents."""
        named = b"\0".join((self._silo, peer.encode(), document.encode("utf-8", "surrogatepass")))
        return hmac.new(self._keys[2], named, hashlib.sha256).hexdigest()[:24]

    def _bound(self, query: str, peer: str) -> list[bytes]:
        return [self._silo, peer.encode(), query.encode("utf-8", "surrogatepass")]


def id_digest(document: str, key: bytes) -> str:
    """Return a keyed digest of a document id, by which a silo recognises its own documents and no others."""
    name = document.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, key=key, digest_size=16).hexdigest()


def pseudonym(key: bytes, silo: str, person: str) -> str:
    """Return a person's pseudonym for one silo: stable, and not linkable to that of another silo."""
    named = b"\0".join((silo.encode(), person.encode("utf-8", "surrogatepass")))
    return hmac.new(key, named, hashlib.sha256).hexdigest()[:32]
