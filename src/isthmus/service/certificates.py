"""A federation's certificates: an authority for development, one certificate a party, and TLS contexts.

    authority = Authority.at("keys")
    authority.issue("north", clients=False)                 # keys/north/{ca.crt, tls.crt, tls.key}
    authority.renew("north", days=14)                       # a new key and certificate, for the same names
    authority.revoke("north")                               # ca.crl in every party's folder

A party's name is the common name of its certificate and, with a suffix of our own, one of its DNS names,
so that TLS itself checks that the silo at an address is the intended one. Only a broker's certificate may
be used by a client: with a silo's key nobody can pose as a broker.

Servers and clients have a `LiveTls`, which notices that its files have changed: connections that begin
after that use the new certificate and the new list of revocations.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import os
import re
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus import __version__
from isthmus.errors import ConfigError, DataError
from isthmus.files import locked, private_file, write_private, write_whole
from isthmus.service.settings import Tls
from isthmus.service.wire import Machine

DAYS = 397
AUTHORITY_DAYS = 3650
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SUFFIX = ".isthmus.internal"
TRAINING = ".training"
"""Suffix of the name of a silo's certificate for training. It has a key of its own, which nodes do not
accept."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,38}[A-Za-z0-9])?")
RULE = "letters, digits, '-', '_' and '.', at most 40, a letter or digit at both ends"
CERTIFICATE, KEY, AUTHORITY, REVOKED, ISSUED = "tls.crt", "tls.key", "ca.crt", "ca.crl", "issued.jsonl"
LOOK = 1.0
"""Seconds between two checks whether files have changed."""

_log = logging.getLogger("isthmus.service")


def files(folder: str | os.PathLike[str]) -> Tls:
    """Return the paths of certificate, key and authority in a folder that `isthmus keys make` wrote."""
    at = Path(folder)
    return Tls(at / CERTIFICATE, at / KEY, at / AUTHORITY)


def server_context(tls: Tls, *, mutual: bool) -> ssl.SSLContext:
    """Return a TLS context for a server; with `mutual`, clients need a certificate of our authority."""
    context = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return a TLS context for calling a party of our authority by its `server_name`."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def _context(tls: Tls, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        context.load_cert_chain(tls.certificate, signing_key(tls))
        context.load_verify_locations(tls.authority)
        if tls.revoked.exists():
            context.load_verify_locations(tls.revoked)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except ssl.SSLError as error:
        raise DataError(
            f"not a certificate, its key, and what its authority revoked: {error.reason or error}",
            file=tls.certificate,
            cure="isthmus keys renew DIR NAME writes new ones",
        ) from error
    except FileNotFoundError as error:
        raise DataError(
            "the certificate or its authority is missing", file=tls.certificate, cure="isthmus keys make"
        ) from error
    return context


def signing_key(tls: Tls) -> Path:
    """Return the path of the certificate's key: the former key, if a renewal was interrupted after it had
    written the new one."""
    if tls.former_key.exists() and _is_of(tls.certificate, private_file(tls.former_key)):
        return tls.former_key
    return private_file(tls.key)


def _is_of(certificate: Path, key: Path) -> bool:
    try:
        public = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
        return public == serialization.load_pem_private_key(key.read_bytes(), None).public_key()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class Credentials:
    """What connections use until the files change: a TLS context, the key of its certificate, and the serial
    numbers of revoked certificates."""

    context: ssl.SSLContext
    key: bytes
    """PEM."""
    revoked: frozenset[int]


class LiveTls:
    """The credentials in files that may be replaced while they are used.

    Files that cannot be read, such as a certificate before its key is there, leave the former credentials
    in use.
    """

    def __init__(self, tls: Tls, context: Callable[[Tls], ssl.SSLContext]) -> None:
        self._tls, self._context = tls, context
        self._lock, self._looked, self._problem = threading.Lock(), time.monotonic(), ""
        self._stamps = self._seen()
        self._credentials = self._read()

    @property
    def current(self) -> Credentials:
        """The current credentials, at most a second old."""
        if time.monotonic() - self._looked >= LOOK:
            with self._lock:
                self._look()
        return self._credentials

    def _look(self) -> None:
        self._looked = time.monotonic()
        stamps = self._seen()
        if stamps == self._stamps:
            return
        try:
            self._credentials, self._stamps, self._problem = self._read(), stamps, ""
            _log.info("%s: new connections use what is there now", self._tls.certificate)
        except (DataError, OSError) as error:
            if str(error) != self._problem:
                _log.error("what was read before stays in use: %s", error)
            self._problem = str(error)

    def _seen(self) -> list[tuple[int, int, int] | None]:
        return [stamp(path) for path in (*vars(self._tls).values(), self._tls.revoked, self._tls.former_key)]

    def _read(self) -> Credentials:
        key, revoked = signing_key(self._tls).read_bytes(), _revocations(self._tls.revoked)
        context = self._context(self._tls)
        if signing_key(self._tls).read_bytes() != key:
            raise DataError("the key changes as it is read", file=self._tls.key, cure="it is read again")
        if self._stamps[-2] is not None and not self._tls.revoked.exists():
            raise DataError("it was here and is gone", file=self._tls.revoked, cure="restore it, or restart")
        return Credentials(context, key, frozenset(entry.serial_number for entry in revoked))


ENDING = ("isthmus_certificate_ends_seconds", "When the certificate ends, in seconds since 1970.")
"""A metric's name and meaning."""


def ending(tls: Tls | None) -> dict[tuple[str, ...], float]:
    """Return when the certificate ends, as a metric; nothing if there is none that can be read."""
    try:
        content = b"" if tls is None else tls.certificate.read_bytes()
        return {(): x509.load_pem_x509_certificate(content).not_valid_after_utc.timestamp()}
    except (OSError, ValueError):
        return {}


def machine_of(folder: Path, tls: Tls | None) -> Machine:
    """Return the state of a server's machine: version, time, certificate, list of revocations and free disk
    space."""
    disk = shutil.disk_usage(folder if folder.exists() else Path.cwd())
    return Machine(
        version=__version__,
        time=time.time(),
        certificate_ends=ending(tls).get(()),
        revocations=None if tls is None else _signed(tls.revoked),
        disk_free=disk.free / disk.total,
        disk_free_bytes=disk.free,
    )


def _signed(revoked: Path) -> float | None:
    """Return when a list of revocations was signed; None if there is none that can be read."""
    try:
        return x509.load_pem_x509_crl(revoked.read_bytes()).last_update_utc.timestamp()
    except (OSError, ValueError):
        return None


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that differs once a file is changed or replaced; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _revocations(path: Path) -> list[x509.RevokedCertificate]:
    if not path.exists():
        return []
    try:
        return list(x509.load_pem_x509_crl(path.read_bytes()))
    except ValueError as error:
        cure = "isthmus keys revoke writes a new one"
        raise DataError("not a list of revoked certificates", file=path, cure=cure) from error


def trusting(authority: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Return a TLS context for calling a broker without a client certificate; None trusts the system's
    authorities."""
    context = ssl.create_default_context(cafile=authority)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def server_name(party: str) -> str:
    """Return the DNS name in a party's certificate that is valid wherever the party listens."""
    return party + SUFFIX


def check_name(name: str) -> str:
    """Return a party's name if it is valid, else raise a ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"the name {name!r} cannot be that of a silo or broker", value=name, expected=RULE)
    return name


def private_folder(path: Path) -> Path:
    """Return a folder; if it does not exist, it is made with access for its owner only."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


class Authority:
    """A certificate authority in a folder, for development and small federations.

    Whoever has its key can pose as any party: keep `authority/` apart from machines that serve.
    """

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.folder, self.certificate, self._key = folder, certificate, key

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> Authority:
        """Return the authority in a folder, which is made if there is none."""
        root = Path(folder)
        own = root / "authority"
        if not (own / "ca.key").exists():
            own.mkdir(parents=True, exist_ok=True)
            os.chmod(own, 0o700)
            certificate, key = _new_authority()
            write_private(own / "ca.key", _pem(key))
            (own / AUTHORITY).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        try:
            key_bytes = private_file(own / "ca.key").read_bytes()
            loaded = serialization.load_pem_private_key(key_bytes, None)
            certificate = x509.load_pem_x509_certificate((own / AUTHORITY).read_bytes())
        except ValueError as error:
            raise DataError(
                "not a certificate authority", file=own, cure="remove the folder to make a new one"
            ) from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise DataError(
                "not a key of `isthmus keys make`", file=own / "ca.key", cure="use another folder"
            )
        return cls(root, certificate, loaded)

    def issue(
        self,
        name: str,
        *,
        clients: bool,
        hosts: Iterable[str] = LOOPBACK,
        start: datetime.datetime | None = None,
        days: float = DAYS,
    ) -> Tls:
        """Issue a certificate for a party, in a folder of its name; with `clients` the party may
        call others."""
        names = [x509.DNSName(server_name(check_name(name))), *(_host(host) for host in hosts)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if clients else [])]
        return self._issue(
            name, x509.SubjectAlternativeName(names), x509.ExtendedKeyUsage(usages), start, days
        )

    def renew(self, name: str, *, days: float = DAYS) -> Tls:
        """Issue a new key, and a certificate with the names and uses of the party's present one."""
        present = self.present(name).extensions
        names = present.get_extension_for_class(x509.SubjectAlternativeName).value
        usages = present.get_extension_for_class(x509.ExtendedKeyUsage).value
        return self._issue(name, names, usages, None, days)

    def present(self, name: str) -> x509.Certificate:
        """Return the certificate in a party's folder."""
        file = self.folder / check_name(name) / CERTIFICATE
        try:
            return x509.load_pem_x509_certificate(file.read_bytes())
        except (OSError, ValueError) as error:
            cure = "isthmus keys make DIR --silos NAME writes one"
            raise DataError("no certificate that can be read", file=file, cure=cure) from error

    def parties(self) -> list[str]:
        """Return the names of parties with a certificate in a folder beside the authority's."""
        return sorted(path.parent.name for path in self.folder.glob(f"*/{CERTIFICATE}"))

    def revoke(self, name: str, *, keep_newest: bool = False) -> list[int]:
        """Revoke every certificate that a party has had, or all but the newest, and write the list into the
        folder of the authority and of every party. Returns the serial numbers that are new on it."""
        own = self.folder / "authority"
        with locked(own / ".lock"):
            serials = [int(row["serial"], 16) for row in self._issued() if row["name"] == name]
            if (self.folder / check_name(name) / CERTIFICATE).exists():
                present = self.present(name).serial_number  # an older Isthmus did not list certificates
                serials = [*(serial for serial in serials if serial != present), present]
            if not serials:
                raise ConfigError(f"this authority knows no {name!r}", value=name, known=self.parties())
            before = _revocations(own / REVOKED)
            listed = {entry.serial_number for entry in before}
            new = [serial for serial in (serials[:-1] if keep_newest else serials) if serial not in listed]
            self._write_revoked([*before, *(_revoked(serial) for serial in new)])
        return new

    def _write_revoked(self, entries: Iterable[x509.RevokedCertificate]) -> None:
        now = datetime.datetime.now(datetime.UTC)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - datetime.timedelta(hours=1))
            # valid as long as the authority: an outdated list must not end all connections
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(issuer, critical=False)
            .add_extension(x509.CRLNumber(time.time_ns()), critical=False)
        )
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        signed = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        for folder in ("authority", *self.parties()):
            write_whole(self.folder / folder / REVOKED, signed)

    def _issued(self) -> list[dict[str, str]]:
        """Return name, serial number and end of every certificate that was ever issued."""
        file = self.folder / "authority" / ISSUED
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]

    def _issue(
        self,
        name: str,
        names: x509.SubjectAlternativeName,
        usages: x509.ExtendedKeyUsage,
        start: datetime.datetime | None,
        days: float,
    ) -> Tls:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(subject, self.certificate.subject, key, start, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(names, critical=False)
            .add_extension(issuer, critical=False)
        )
        signed = builder.sign(self._key, hashes.SHA256())
        self._note(name, signed)
        return self._written(private_folder(self.folder / name), _pem(key), signed)

    def _note(self, name: str, signed: x509.Certificate) -> None:
        """Record a certificate before it is handed out: one that is not on this list cannot be revoked."""
        row = {
            "name": name,
            "serial": f"{signed.serial_number:x}",
            "ends": signed.not_valid_after_utc.isoformat(),
        }
        with locked(self.folder / "authority" / ".lock"):
            rows = [*self._issued(), row]
            text = "".join(json.dumps(each) + "\n" for each in rows)
            write_private(self.folder / "authority" / ISSUED, text.encode())

    def _written(self, own: Path, key: bytes, signed: x509.Certificate) -> Tls:
        """Write a certificate and its key into a folder. Who reads them meanwhile finds the former pair."""
        os.chmod(own, 0o700)
        tls = files(own)
        if tls.key.exists():
            write_private(tls.former_key, signing_key(tls).read_bytes())
        write_private(tls.key, key)
        write_whole(tls.authority, self.certificate.public_bytes(serialization.Encoding.PEM))
        write_whole(tls.certificate, signed.public_bytes(serialization.Encoding.PEM))
        tls.former_key.unlink(missing_ok=True)
        list_of_revoked = self.folder / "authority" / REVOKED
        if list_of_revoked.exists():
            write_whole(tls.revoked, list_of_revoked.read_bytes())
        return tls


def _revoked(serial: int) -> x509.RevokedCertificate:
    now = datetime.datetime.now(datetime.UTC)
    return x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()


def _new_authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Isthmus development authority")])
    builder = (
        _builder(subject, subject, key, None, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    )
    return builder.sign(key, hashes.SHA256()), key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    start: datetime.datetime | None,
    days: float,
) -> x509.CertificateBuilder:
    # valid from an hour ago, since clocks differ a little
    since = start or datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


_USAGES = (
    *("digital_signature", "key_cert_sign", "crl_sign", "content_commitment", "key_encipherment"),
    *("data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
)


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
