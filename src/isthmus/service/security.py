"""Who is calling: certificates for brokers and silos, API keys for people and programs.

    keys = ApiKeys("api-keys.json")
    token = keys.add("ada", scopes=["search", "feedback"], days=90)    # shown once, stored hashed
    keys.find(token)                                                     # Caller(name='ada', …)

    tokens = HitTokens("north", local_secret(folder / "feedback.key"))
    token = tokens.seal("d7", query="tidal power", peer="broker")
    tokens.open(token, query="tidal power", peer="broker")      # "d7", for a day

A hit's token is the document's id under a key of the silo alone (AES-SIV, RFC 5297), bound to the silo, the
query and the peer. Whoever carries it learns nothing from it, and cannot make one. A person is known to a
silo by a pseudonym that the broker makes with a key of its own, another one for each silo.

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
"""How long a key holds unless somebody says otherwise, and how long before its end people are warned."""
PEER = "isthmus.peer"
"""Where in a scope's `extensions` the other side's certificate is."""
CONNECTION = "isthmus.connection"
"""Where in a scope the connection is that the request came over."""
STARTING = 1.0
"""Seconds that a process takes at least until it answers, in which none before it did."""
_DAY = 86400.0
KEY_BYTES = 64
LIFETIME = 26 * 3600.0
"""Seconds that a hit can be judged: a day, and who sleeps over it."""
BLOCK = 32
"""Ids are padded to multiples of this, so that a token does not tell how long a file's name is."""
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
    """When the key ends, in seconds since 1970."""
    person: Person | None = field(default=None, compare=False)
    """Who that is for silos; a stranger is nobody."""
    label: str = field(default="", compare=False)
    """What the page calls them, where that is not their name."""

    def may(self, scope: str) -> bool:
        """Whether this caller has the scope; an administrator has all but that of the audit log."""
        return scope in self.scopes or ("admin" in self.scopes and scope != "audit")


@dataclass(frozen=True)
class Peer:
    """The other side of a mutually authenticated connection."""

    name: str
    expires: float
    certificate: bytes = field(default=b"", repr=False)
    """As TLS has verified it, DER."""
    serial: int = 0


@dataclass(frozen=True)
class ApiKey:
    """What is stored of a key: everything but the key."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created: float
    expires: float | None
    salt: str
    digest: str = field(repr=False)
    groups: tuple[str, ...] = ()

    def opens(self, secret: str) -> bool:
        """Whether this is the secret, compared in constant time."""
        return hmac.compare_digest(self.digest, _digest(self.salt, secret))


class ApiKeys:
    """API keys in a JSON file, hashed: HMAC-SHA256 with a salt a key; each key has 256 random bits.

    The file is read again when it has changed, so a key revoked on the command line is refused at once.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = Path(path), clock
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, ApiKey] = {}

    def add(
        self, name: str, *, scopes: Iterable[str], days: float | None = DAYS, groups: Iterable[str] = ()
    ) -> str:
        """A new key for somebody, for ever if `days` is None; the token returned is not stored. Silos that
        ask for people see who its owner is, and the `groups`."""
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
        """Another key for the same owner with the same rights; this one holds `overlap` days more at most."""
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
        """Forget the key with this id."""
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
        """Whose token this is; None for one that is unknown, revoked or expired."""
        key = self.key_of(token)
        return None if key is None else self.caller(key.id)

    def caller(self, number: str) -> Caller[Any] | None:
        """Whose key has this id; None for one that is unknown, revoked or expired."""
        key = self._read().get(number)
        if key is None or not self._holds(key):
            return None
        person = Person(key.name, frozenset(key.groups))
        return Caller(key.name, frozenset(key.scopes), expires=key.expires, person=person)

    def key_of(self, token: str) -> ApiKey | None:
        """The key that a token is for; None for one that is unknown, revoked or expired."""
        parts = token.split("_", 2)
        if len(parts) != 3 or parts[0] != PREFIX or not token.isascii():
            return None
        key = self._read().get(parts[1])
        if key is None:
            _digest("", parts[2])  # so that an unknown id takes as long as a wrong secret
            return None
        return key if key.opens(parts[2]) and self._holds(key) else None

    def ending(self, days: float = WARN_DAYS) -> list[ApiKey]:
        """The keys that end within so many days."""
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
    """An unknown API key, which may be a guess."""


class Gate(Generic[P]):
    """Authentication: known certificates, API keys, sessions of the page, and rights without any.

    A peer's policy is found by the name in its certificate, or by that of its API key.
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
        """Have the provider asked again about a session's person, where it is time to."""
        if self.sessions is not None:
            await self.sessions.renew(scope)

    def caller(self, scope: Scope) -> Caller[P]:
        """The caller of a request; raises Refused if it is not authenticated."""
        peer: Peer | None = scope.get("extensions", {}).get(PEER)
        if peer is not None and peer.name in self.peers:
            if peer.expires <= self._clock():  # the connection may be older than the certificate's end
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
    """The API key that a request carries: `Authorization: Bearer …` or `X-API-Key`."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if kind.lower() == "bearer" else ""
        if name == b"x-api-key":
            return str(value.decode("latin-1").strip())
    return None


class Once:
    """Refuses replays: messages seen before, or whose time is too far from ours to know.

    Messages are remembered as long as their time stamp would be accepted, so memory is bounded by the
    traffic of two windows. What was sent before this began may have been seen by a process before it.
    """

    def __init__(self, *, window: float = 60.0, clock: Callable[[], float] = time.time) -> None:
        self.window, self._clock = window, clock
        self._new: set[tuple[str, str]] = set()
        self._old: set[tuple[str, str]] = set()
        self._began = self._turned = clock()

    def admit(self, caller: str, nonce: str, sent: float) -> None:
        """Note a message of this caller; Refused if it is a replay."""
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


# tokens of hits: a silo takes judgements of what it has shown and of nothing else


def local_secret(path: Path) -> bytes:
    """The key in this file, made if there is none; a DataError where others can read it."""
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
    """The key in this file, made if there is none, and read again when another has taken its place."""

    def __init__(self, path: Path) -> None:
        self._path, self._key = path, local_secret(path)
        self._seen = stamp(path)

    def __call__(self) -> bytes:
        """The key that holds now."""
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
        """The key, its cipher, and the key of names."""
        if not isinstance(self._source, bytes) and (key := self._source()) != self._derived[0]:
            self._derived = self._derive(key)
        return self._derived

    def seal(self, document: str, *, query: str, peer: str) -> str:
        """A token for this hit; the same within a minute."""
        return self._sealed(document, self._bound(query, peer))

    def open(self, token: str, *, query: str, peer: str) -> str | None:
        """The document; None if the token is not of this silo, query and peer, or is too old."""
        return self._unsealed(token, self._bound(query, peer))

    def ticket(self, document: str, *, peer: str) -> str:
        """A token by which this peer opens the document of a hit it was shown, or asks for it."""
        return self._sealed(document, [*self._bound("", peer), _OPENING])

    def ticketed(self, ticket: str, *, peer: str) -> str | None:
        """The document; None if the ticket is not of this silo and peer, or is too old."""
        return self._unsealed(ticket, [*self._bound("", peer), _OPENING])

    def _sealed(self, document: str, bound: list[bytes]) -> str:
        minute = int(self._clock() // 60).to_bytes(_STAMP, "big")
        plain = minute + document.encode("utf-8", "surrogatepass")
        plain += b"\0" * (-len(plain) % BLOCK)  # no id has a NUL
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
        """A document's pseudonym towards a peer that may not read it: its own id may reveal contents."""
        named = b"\0".join((self._silo, peer.encode(), document.encode("utf-8", "surrogatepass")))
        return hmac.new(self._keys[2], named, hashlib.sha256).hexdigest()[:24]

    def _bound(self, query: str, peer: str) -> list[bytes]:
        return [self._silo, peer.encode(), query.encode("utf-8", "surrogatepass")]


def id_digest(document: str, key: bytes) -> str:
    """A document id under a key, by which a silo recognises its own documents and no others."""
    name = document.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, key=key, digest_size=16).hexdigest()


def pseudonym(key: bytes, silo: str, person: str) -> str:
    """A person's pseudonym towards one silo: stable, and not linkable to that of another silo."""
    named = b"\0".join((silo.encode(), person.encode("utf-8", "surrogatepass")))
    return hmac.new(key, named, hashlib.sha256).hexdigest()[:32]
