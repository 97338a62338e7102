"""Tokens of hits: a silo takes judgements of what it has shown and of nothing else.

    tokens = HitTokens("north", local_secret(folder / "feedback.key"))
    token = tokens.seal("d7", query="tidal power", peer="broker")
    tokens.open(token, query="tidal power", peer="broker")      # "d7", for a day

A token is the document's id under a key of the silo alone (AES-SIV, RFC 5297), bound to the silo, the query
and the peer. Whoever carries it learns nothing from it, and cannot make one. A person is known to a silo by a
pseudonym that the broker makes with a key of its own, another one for each silo.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from isthmus.errors import DataError
from isthmus.files import private_file, write_private

KEY_BYTES = 64
LIFETIME = 26 * 3600.0
"""Seconds that a hit can be judged: a day, and who sleeps over it."""
BLOCK = 32
"""Ids are padded to multiples of this, so that a token does not tell how long a file's name is."""
_STAMP = 6


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
        raise DataError("not a key of ours", file=path, cure="remove it: a new one is made")
    return key


class HitTokens:
    """Makes and opens the tokens of one silo's hits."""

    def __init__(self, silo: str, key: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._silo, self._cipher, self._clock = silo.encode(), AESSIV(key), clock
        self._names = hmac.new(key, b"names of hits", hashlib.sha256).digest()

    def seal(self, document: str, *, query: str, peer: str) -> str:
        """A token for this hit; the same within a minute."""
        minute = int(self._clock() // 60).to_bytes(_STAMP, "big")
        plain = minute + document.encode("utf-8", "surrogatepass")
        plain += b"\0" * (-len(plain) % BLOCK)  # no id has a NUL
        sealed = self._cipher.encrypt(plain, self._bound(query, peer))
        return base64.urlsafe_b64encode(sealed).decode("ascii").rstrip("=")

    def open(self, token: str, *, query: str, peer: str) -> str | None:
        """The document; None if the token is not of this silo, query and peer, or is too old."""
        try:
            sealed = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
            plain = self._cipher.decrypt(sealed, self._bound(query, peer))
        except (InvalidTag, ValueError, binascii.Error):
            return None
        age = self._clock() - 60 * int.from_bytes(plain[:_STAMP], "big")
        if not 0 <= age <= LIFETIME:
            return None
        return plain[_STAMP:].rstrip(b"\0").decode("utf-8", "surrogatepass")

    def name(self, document: str, *, peer: str) -> str:
        """What a document is called towards a peer that may not read it; a file's own name would tell."""
        named = b"\0".join((self._silo, peer.encode(), document.encode("utf-8", "surrogatepass")))
        return hmac.new(self._names, named, hashlib.sha256).hexdigest()[:24]

    def _bound(self, query: str, peer: str) -> list[bytes]:
        return [self._silo, peer.encode(), query.encode("utf-8", "surrogatepass")]


def pseudonym(key: bytes, silo: str, person: str) -> str:
    """Who somebody is to one silo: the same every time, and not to be joined with another silo's."""
    named = b"\0".join((silo.encode(), person.encode("utf-8", "surrogatepass")))
    return hmac.new(key, named, hashlib.sha256).hexdigest()[:32]
