"""TLS files of a federation of trees, with a certificate for each seat."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.service import Authority, files

EXCHANGE = "exchange"


@dataclass(frozen=True)
class Seat:
    """A silo's place at the exchange: its address, the silo's number, and the paths of its TLS files."""

    address: str
    rank: int
    silos: int
    authority: str
    certificate: str
    key: str


@dataclass(frozen=True)
class Papers:
    """TLS files of a federation in one folder, with a subfolder for the exchange and for each seat."""

    folder: Path

    @property
    def authority(self) -> Path:
        """Path of the certificate against which all others are checked."""
        return files(self.folder / EXCHANGE).authority

    def certificate(self, name: str) -> Path:
        """Return the path of the certificate of `exchange` or of a seat."""
        return files(self.folder / name).certificate

    def key(self, name: str) -> Path:
        """Return the path of the private key of `exchange` or of a seat."""
        return files(self.folder / name).key

    def seat(self, rank: int, silos: int, address: str) -> Seat:
        """Return the seat of the silo with this number; of the keys it has only its own."""
        name = seat_name(rank)
        paths = (self.authority, self.certificate(name), self.key(name))
        return Seat(address, rank, silos, *map(str, paths))


def make_papers(
    folder: Path, silos: int, *, hosts: Sequence[str] = ("127.0.0.1", "localhost"), days: int = 30
) -> Papers:
    """Make keys and certificates for an exchange reachable under `hosts` and for `silos` silos.

    The authority's key is deleted at once: nobody can add a silo later.
    """
    authority = Authority.at(folder)
    authority.issue(EXCHANGE, clients=False, hosts=hosts, days=days)
    for name in map(seat_name, range(silos)):
        authority.issue(name, clients=True, hosts=(), days=days)
    shutil.rmtree(folder / "authority")
    return Papers(folder)


def seat_name(rank: int) -> str:
    """Return the name of a seat in its certificate and its files."""
    return f"seat{rank}"
