"""The TLS files of a federation of trees: who may sit where."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Seat:
    """A silo's place at the exchange: the address, its number, and the paths of its TLS files."""

    address: str
    rank: int
    silos: int
    authority: str
    certificate: str
    key: str


@dataclass(frozen=True)
class Papers:
    """The TLS files of a federation, in one folder: an authority, a pair for the exchange and each seat."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate that all others are checked against."""
        return self.folder / "authority.pem"

    def certificate(self, name: str) -> Path:
        """The certificate of `exchange` or of a seat."""
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        """The private key that belongs to it."""
        return self.folder / f"{name}.key"

    def seat(self, rank: int, silos: int, address: str) -> Seat:
        """What the silo with that number is given: of the keys only its own."""
        name = seat_name(rank)
        paths = (self.authority, self.certificate(name), self.key(name))
        return Seat(address, rank, silos, *map(str, paths))


def make_papers(
    folder: Path, silos: int, *, hosts: Sequence[str] = ("127.0.0.1", "localhost"), days: int = 30
) -> Papers:
    """Keys and certificates for an exchange reachable under `hosts` and for so many silos.

    The authority's key is forgotten at once: nobody can add a silo later.
    """
    papers = Papers(folder)
    authority = _Authority(days)
    papers.authority.write_bytes(authority.pem)
    for name in ("exchange", *map(seat_name, range(silos))):
        certificate, key = authority.issue(name, hosts if name == "exchange" else ())
        papers.certificate(name).write_bytes(certificate)
        with open(papers.key(name), "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(key)
    return papers


def seat_name(rank: int) -> str:
    """How a seat is called in its certificate and its files."""
    return f"seat{rank}"


class _Authority:
    """Signs certificates with a key that lives as long as this object."""

    def __init__(self, days: int) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = "isthmus exchange authority"
        self.pem = self._sign(self._name, self._key.public_key(), (), authority=True)

    def issue(self, name: str, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """A certificate for that name, valid for those hosts, and its private key."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return self._sign(name, key.public_key(), hosts), pem

    def _sign(self, name: str, key: Any, hosts: Sequence[str], *, authority: bool = False) -> bytes:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        def named(text: str) -> Any:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self._name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1))
            .not_valid_after(self._until)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if hosts:
            known = x509.SubjectAlternativeName([_host_name(host) for host in hosts])
            builder = builder.add_extension(known, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _host_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
