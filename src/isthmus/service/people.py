"""Persons, and the signed statement by which a broker names a person to a silo.

    sign = signer(tls.key.read_bytes())                                   # the broker's own TLS key
    text = Statement(person, "north", "POST /v1/search", message, digest).signed(sign)
    Statement.read(text, certificate=peer.certificate).person            # Refused unless that key signed it

A statement names the silo, the request, its `isthmus-message` (time and nonce, which a silo accepts once) and
the SHA-256 of its body, so it cannot be used for another request or silo. If a silo identifies the broker by
an API key, which only loopback allows, that key is used in place of the certificate's (HMAC).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from isthmus.errors import ConfigError, DataError, Refused

HEADER = "isthmus-person"
"""Header that contains a statement."""
EVERYONE = "everyone"
"""Principal that every person has."""
LONGEST, MOST_BYTES = 200, 4096
"""Most characters of an id or a group, and bytes of a person's groups: they are in every request."""
_CONTEXT = b"isthmus person 1\0"
"""Prefix of the signed bytes; the key signs nothing else with this prefix."""

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Person:
    """A person who asks: their id, which for a silo is usually a pseudonym, and their groups."""

    id: str
    groups: frozenset[str] = frozenset()

    @property
    def principals(self) -> frozenset[str]:
        """Principals of the person in rules: `user:ID`, `group:NAME` for every group, and `everyone`."""
        return frozenset({f"user:{self.id}", EVERYONE, *(f"group:{name}" for name in self.groups)})

    def check(self) -> Person:
        """Return the person; raises ConfigError if an id or a group cannot be part of a statement."""
        for name in (self.id, *self.groups):
            if not (0 < len(name) <= LONGEST and name.isprintable()):
                raise ConfigError("a person or a group needs a name", expected=f"1 to {LONGEST} letters")
        if sum(len(name.encode()) + 3 for name in self.groups) > MOST_BYTES:
            raise ConfigError(
                f"{len(self.groups)} groups are more than fit a request",
                key="people.groups",
                expected="a list of those that the silos' rules name",
            )
        return self


@dataclass(frozen=True)
class Statement:
    """States that a person makes one request to one silo.

    `request` is its method and target, `message` its header against replays, `body` the SHA-256 of its body.
    """

    person: Person
    silo: str
    request: str
    message: str
    body: str

    def signed(self, sign: Sign) -> str:
        """Sign the statement and return it as the text of the header."""
        fields = {**vars(self), "person": self.person.id, "groups": sorted(self.person.groups)}
        payload = json.dumps(fields, separators=(",", ":")).encode()
        return f"{_base64(payload)}.{_base64(sign(_CONTEXT + payload))}"

    @classmethod
    def read(cls, text: str, *, certificate: bytes = b"", token: str = "") -> Statement:
        """Read the statement in a header. Raises Refused unless it was signed with the key of this
        certificate (DER) or, without a certificate, with this API key."""
        try:
            payload, signature = (
                base64.b64decode(part + "=" * (-len(part) % 4), b"-_", validate=True)
                for part in text.split(".")
            )
            _verify(certificate, token, signature, _CONTEXT + payload)
            fields = json.loads(payload)
            person = Person(str(fields.pop("person")), frozenset(map(str, fields.pop("groups"))))
            return cls(person.check(), **fields)
        except InvalidSignature:
            raise Refused("the statement of who asks is not signed by this peer") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Refused("the statement of who asks cannot be read") from None


def digest_of(body: bytes) -> str:
    """Digest of a request's body, as a statement has it."""
    return hashlib.sha256(body).hexdigest()


@lru_cache(4)
def signer(key: bytes) -> Sign:
    """Return a function that signs with a private key in PEM: elliptic curve, Ed25519 or RSA."""
    loaded: Any = serialization.load_pem_private_key(key, None)
    if isinstance(loaded, ed25519.Ed25519PrivateKey):
        return loaded.sign
    if isinstance(loaded, ec.EllipticCurvePrivateKey):
        return partial(loaded.sign, signature_algorithm=ec.ECDSA(hashes.SHA256()))
    if isinstance(loaded, rsa.RSAPrivateKey):
        return partial(loaded.sign, padding=_PSS, algorithm=hashes.SHA256())
    raise DataError("no key that can sign who asks", cure="isthmus keys make writes one")


def token_signer(token: str) -> Sign:
    """Return a function that signs with an API key, for a silo that identifies the broker by that key."""
    return partial(_hmac, token)


_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


def _verify(certificate: bytes, token: str, signature: bytes, data: bytes) -> None:
    """Raise InvalidSignature unless the key signed the data."""
    key = _public_key(certificate) if certificate else None
    if isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, data)
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, data, _PSS, hashes.SHA256())
    elif certificate or not token or not hmac.compare_digest(_hmac(token, data), signature):
        raise InvalidSignature


@lru_cache(64)
def _public_key(certificate: bytes) -> Any:
    return x509.load_der_x509_certificate(certificate).public_key()


def _hmac(token: str, data: bytes) -> bytes:
    return hmac.new(token.encode(), data, hashlib.sha256).digest()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
