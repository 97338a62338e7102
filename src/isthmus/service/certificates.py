"""A federation's certificates: an authority for development, one certificate a party, and TLS contexts.

    Authority.at("keys").issue("north", clients=False)      # keys/north/{ca.crt, tls.crt, tls.key}

A party's name is the common name of its certificate and, with a suffix of our own, one of its DNS names, so
that TLS itself checks that the silo at an address is the one that was meant. Only a broker's certificate may
be used by a client: with a silo's key nobody can pose as a broker.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.errors import ConfigError, DataError
from isthmus.files import private_file, write_private
from isthmus.service.settings import Tls

DAYS, AUTHORITY_DAYS = 397, 3650
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SUFFIX = ".isthmus.internal"
TRAINING = ".training"
"""What the name of a silo's certificate for training ends in: a key of its own, which no node listens to."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,38}[A-Za-z0-9])?")
RULE = "letters, digits, '-', '_' and '.', at most 40, a letter or digit at both ends"
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"


def files(folder: str | os.PathLike[str]) -> Tls:
    """The certificate, the key and the authority in a folder that `isthmus keys make` wrote."""
    at = Path(folder)
    return Tls(at / CERTIFICATE, at / KEY, at / AUTHORITY)


def server_context(tls: Tls, *, mutual: bool) -> ssl.SSLContext:
    """For listening; with `mutual`, only to clients with a certificate of our authority."""
    context = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """For calling a party of our authority, by its `server_name`."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def _context(tls: Tls, protocol: int) -> ssl.SSLContext:
    private_file(tls.key)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.authority)
    except ssl.SSLError as error:
        raise DataError(
            f"not a certificate and its key: {error.reason or error}",
            file=tls.certificate,
            cure="isthmus keys make DIR --silos NAME --renew writes new ones",
        ) from error
    except FileNotFoundError as error:
        raise DataError(
            "the certificate or its authority is missing", file=tls.certificate, cure="isthmus keys make"
        ) from error
    return context


def trusting(authority: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """For calling a broker without a certificate of one's own; None trusts what the system trusts."""
    context = ssl.create_default_context(cafile=authority)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def server_name(party: str) -> str:
    """The DNS name in a party's certificate that holds wherever it listens."""
    return party + SUFFIX


def check_name(name: str) -> str:
    """A party's name, or a ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"the name {name!r} cannot be that of a silo or broker", value=name, expected=RULE)
    return name


def private_folder(path: Path) -> Path:
    """A folder, made for its owner alone where it is not there yet."""
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
        """The authority in a folder, made if there is none."""
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
        """A certificate for a party, in a folder of its name; `clients` lets it call others."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(name))])
        names = [x509.DNSName(server_name(name)), *(_host(host) for host in hosts)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if clients else [])]
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(subject, self.certificate.subject, key, start, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer, critical=False)
        )
        own = self.folder / name
        own.mkdir(parents=True, exist_ok=True)
        os.chmod(own, 0o700)
        credentials = files(own)
        write_private(credentials.key, _pem(key))
        signed = builder.sign(self._key, hashes.SHA256())
        credentials.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        credentials.authority.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        return credentials


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
    # clocks differ a little: a certificate holds from an hour ago
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
