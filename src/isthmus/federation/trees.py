"""LambdaMART across silos (extra `trees`): XGBoost's federated communicator over mutual TLS.

LambdaMART's gradients need whole queries and its histograms add up, so silos that hold whole queries can grow
the very trees one table would give; only the quantile cuts of fine features differ a little. What leaves a
silo are quantile summaries of its features and, for every node of every tree, its histogram of gradients:
no row, but no DP guarantee either.

    exchange    the meeting point: takes one message from every silo, answers all alike
    silo        one process: its own rows, its own key, XGBoost in between

XGBoost brings a server of its own. The `Exchange` here speaks the same protocol and differs in four things:
sums are taken in the order of the silos, so the same data give the same trees; it listens where it is told
to and not on every interface; a silo's certificate must fit its seat; and when a silo falls silent it says so
and lets the others go, where XGBoost's would wait for ever.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, DataError, FederationError, MissingExtra
from isthmus.rankers.trees import LambdaMART, check_trainable, tree_library, xgboost_matrix
from isthmus.tables import Letor
from isthmus.tables.files import replacing

LARGEST_MESSAGE = 1 << 30
"""Bytes of one histogram or summary that the exchange accepts."""

_TYPES = ("f2", "f4", "f8", None, "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_REDUCE = (np.maximum, np.minimum, np.add, np.bitwise_and, np.bitwise_or, np.bitwise_xor)


@dataclass(frozen=True)
class Seat:
    """A silo's place at the exchange: the address, its number, and the paths of its TLS files."""

    address: str
    rank: int
    silos: int
    authority: str
    certificate: str
    key: str


def train_silos(silos: Mapping[str, Letor], model: LambdaMART, *, deadline: float = 600) -> LambdaMART:
    """Train one LambdaMART over silos simulated on this machine: a process each, TLS on the loopback.

    A silo that fails, dies or is not done by the deadline (seconds) is a FederationError, and no process
    is left behind. `model` gives the parameters and is left alone; its library must be XGBoost.
    """
    _check_ready(silos, model)
    with TemporaryDirectory(prefix="isthmus-trees-") as folder, ExitStack() as stack:
        papers = make_papers(Path(folder), len(silos))
        exchange = stack.enter_context(Exchange.open(list(silos), papers, patience=deadline))
        parts: dict[str, _Part] = {}
        for rank, (silo, letor) in enumerate(silos.items()):
            seat = papers.seat(rank, len(silos), exchange.address)
            parts[silo] = stack.enter_context(_Part.start(Path(folder) / f"part{rank}", letor, model, seat))
        _wait(parts, deadline)
        texts = [part.model_text() for part in parts.values()]
    if len(set(texts)) > 1:
        raise FederationError("the silos ended with different trees")
    return model.with_model(texts[0], next(iter(silos.values())).width)


def train_silo(letor: Letor, model: LambdaMART, seat: Seat, *, deadline: float = 600) -> LambdaMART:
    """One silo's part in a federation that meets at a remote exchange; returns the common model.

    XGBoost cannot be interrupted while it waits for the others, so it runs in a process of its own, which
    is ended at the deadline (seconds).
    """
    named = {f"silo {seat.rank}": letor}
    _check_ready(named, model)
    with TemporaryDirectory(prefix="isthmus-trees-") as folder, ExitStack() as stack:
        part = stack.enter_context(_Part.start(Path(folder) / "part", letor, model, seat))
        _wait(dict.fromkeys(named, part), deadline)
        return model.with_model(part.model_text(), letor.width)


class Exchange:
    """Where the silos meet: the server side of XGBoost's federated communicator."""

    def __init__(self, silos: Sequence[str], *, patience: float) -> None:
        self.address = ""
        self.received = dict.fromkeys(silos, 0)
        """Bytes that every silo has sent, for the ledger."""
        self._silos = list(silos)
        self._patience = patience
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._failure: str | None = None

    @classmethod
    @contextmanager
    def open(
        cls,
        silos: Sequence[str],
        papers: Papers,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        patience: float = 60,
    ) -> Iterator[Exchange]:
        """An exchange that listens while the context lasts; port 0 takes a free one.

        A silo that lets the others wait longer than `patience` seconds ends the training for all.
        """
        import grpc  # type: ignore[import-untyped]

        exchange = cls(silos, patience=patience)
        pool = ThreadPoolExecutor(len(silos) + 2, thread_name_prefix="exchange")
        sizes = [("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.max_send_message_length", -1)]
        server = grpc.server(pool, options=[*sizes, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((_service(exchange),))
        pair = (papers.key("exchange").read_bytes(), papers.certificate("exchange").read_bytes())
        credentials = grpc.ssl_server_credentials(
            [pair], root_certificates=papers.authority.read_bytes(), require_client_auth=True
        )
        exchange.address = f"{host}:{server.add_secure_port(f'{host}:{port}', credentials)}"
        server.start()
        try:
            yield exchange
        finally:
            exchange.fail("the exchange has closed")
            server.stop(grace=0.5).wait()
            pool.shutdown(wait=False, cancel_futures=True)

    def fail(self, reason: str) -> None:
        """End the training: whoever waits, and whoever comes, is told why. The first reason stands."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def meet(self, method: str, message: _Message) -> bytes:
        """Wait until every silo has brought its message of this number; the common answer."""
        with self._changed:
            if self._failure:
                raise FederationError(self._failure)
            meeting = self._meetings.setdefault(message.number, _Meeting(method))
            meeting.add(method, message)
            self.received[self._silos[message.rank]] += len(message.content)
            if len(meeting.messages) == len(self._silos):
                meeting.answer = meeting.combined()
                del self._meetings[message.number]
                self._changed.notify_all()
            arrived = self._changed.wait_for(
                lambda: meeting.answer is not None or self._failure, timeout=self._patience
            )
        if meeting.answer is not None:
            return meeting.answer
        if not arrived:
            missing = [name for rank, name in enumerate(self._silos) if rank not in meeting.messages]
            self.fail(f"no word from {', '.join(missing)} for {self._patience:g} s")
        raise FederationError(self._failure or "the training was ended")

    def check_seat(self, rank: int, names: Sequence[bytes]) -> None:
        """A silo may speak for itself only: its certificate must be that of the seat."""
        if not 0 <= rank < len(self._silos) or _seat_name(rank).encode() not in names:
            raise FederationError(f"another silo's certificate was shown for seat {rank}")

    def gone(self, rank: int, number: int) -> None:
        """A silo hung up: if it was still waiting for an answer, the training is over."""
        with self._changed:
            waiting = number in self._meetings
        if waiting:
            self.fail(f"{self._silos[rank]} went away")


@dataclass(frozen=True, slots=True)
class _Message:
    """XGBoost's request: number, rank, content, then (type, operation) or the root, as Protocol Buffers."""

    number: int
    rank: int
    content: bytes
    detail: int = 0
    operation: int = 0

    @classmethod
    def parse(cls, data: bytes) -> _Message:
        fields: dict[int, Any] = {}
        at = 0
        while at < len(data):
            tag, at = _varint(data, at)
            number, at = _varint(data, at)
            if tag & 7 not in (0, 2):
                raise FederationError("a message that is not XGBoost's")
            fields[tag >> 3] = data[at : at + number] if tag & 7 else number
            at += number if tag & 7 else 0
        return cls(fields.get(1, 0), fields.get(2, 0), fields.get(3, b""), fields.get(4, 0), fields.get(5, 0))


@dataclass
class _Meeting:
    """The messages of one number, by rank."""

    method: str
    messages: dict[int, _Message] = field(default_factory=dict)
    answer: bytes | None = None

    def add(self, method: str, message: _Message) -> None:
        if method != self.method or message.rank in self.messages:
            raise FederationError(f"silos are out of step: {method} where {self.method} was under way")
        self.messages[message.rank] = message

    def combined(self) -> bytes:
        """What everyone gets: a sum in the order of the ranks, all contents in that order, or the root's."""
        ordered = [self.messages[rank] for rank in sorted(self.messages)]
        if self.method == "Broadcast":
            return self.messages[ordered[0].detail].content
        if self.method in ("Allgather", "AllgatherV"):
            return b"".join(message.content for message in ordered)
        kinds = {(message.detail, message.operation, len(message.content)) for message in ordered}
        if len(kinds) > 1 or _TYPES[ordered[0].detail] is None:
            raise FederationError("silos are out of step: they would add different things")
        arrays = [np.frombuffer(message.content, _TYPES[message.detail]) for message in ordered]
        total: NDArray[Any] = arrays[0].copy()
        for array in arrays[1:]:
            _REDUCE[ordered[0].operation](total, array, out=total)
        return total.tobytes()


def _service(exchange: Exchange) -> Any:
    """The exchange as a gRPC service; messages stay bytes, so no generated code is needed."""
    import grpc

    def answer(method: str, data: bytes, context: Any) -> bytes:
        try:
            message = _Message.parse(data)
            exchange.check_seat(message.rank, context.auth_context().get("x509_common_name", []))
            context.add_callback(lambda: exchange.gone(message.rank, message.number))
            return _reply(exchange.meet(method, message))
        except Exception as error:
            exchange.fail(str(error))  # one silo's fault must not leave the others waiting
            context.abort(grpc.StatusCode.ABORTED, str(error))
            raise

    class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            service, _, method = details.method.rpartition("/")
            if service != "/xgboost.collective.federated.Federated":
                return None
            return grpc.unary_unary_rpc_method_handler(partial(answer, method))

    return Service()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Protocol Buffers' variable-length integer: seven bits a byte, the lowest first."""
    value, shift = 0, 0
    while True:
        if at >= len(data) or shift > 63:
            raise FederationError("a message that is not XGBoost's")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _reply(content: bytes) -> bytes:
    """XGBoost's reply: its one field is the content."""
    size, head = len(content), bytearray(b"\x0a")
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + content


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
        name = _seat_name(rank)
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
    for name in ("exchange", *map(_seat_name, range(silos))):
        certificate, key = authority.issue(name, hosts if name == "exchange" else ())
        papers.certificate(name).write_bytes(certificate)
        with open(papers.key(name), "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(key)
    return papers


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


def _seat_name(rank: int) -> str:
    return f"seat{rank}"


@dataclass(frozen=True)
class _Part:
    """One silo's process and its folder: rows and job in, model and last words out."""

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    @contextmanager
    def start(cls, folder: Path, letor: Letor, model: LambdaMART, seat: Seat) -> Iterator[_Part]:
        """The silo's process; it is ended when the context ends."""
        folder.mkdir()
        for name in ("features", "grades", "offsets"):
            np.save(folder / f"{name}.npy", getattr(letor, name), allow_pickle=False)
        job = {"seat": asdict(seat), "parameters": model.xgboost_parameters(), "trees": model.trees}
        (folder / "job.json").write_text(json.dumps(job))
        # The exchange is reached directly, whatever proxy the surroundings prefer.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "no_grpc_proxy": seat.address.rpartition(":")[0]}
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "isthmus.federation.trees", str(folder)],
                stdin=subprocess.PIPE,  # never written to: it closes when this process dies, however it dies
                stdout=log,
                stderr=log,
                env=environment,
            )
        try:
            yield cls(folder, process)
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def model_text(self) -> str:
        return (self.folder / "model.json").read_text()

    def last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it left no word")


def _wait(parts: Mapping[str, _Part], deadline: float) -> None:
    """Until every process is done; the first that fails, or the deadline, is a FederationError."""
    end = time.monotonic() + deadline
    waiting = dict(parts)
    while waiting:
        for silo, part in list(waiting.items()):
            status = part.process.poll()
            if status:
                raise FederationError(f"{silo} ended with status {status}: {part.last_words()}")
            if status == 0:
                del waiting[silo]
        if time.monotonic() > end:
            late = ", ".join(waiting)
            raise FederationError(f"not done after {deadline:g} s: {late} (give more time, or fewer trees)")
        time.sleep(0.02)


def _check_ready(silos: Mapping[str, Letor], model: LambdaMART) -> None:
    if model.library != "xgboost":
        raise ConfigError(
            f"federated LambdaMART runs on XGBoost, and the model says {model.library}", key="library"
        )
    if not tree_library("xgboost").build_info().get("USE_FEDERATED"):
        raise MissingExtra(
            "trees", "federated LambdaMART (this XGBoost was built without its federated part)"
        )
    widths = {letor.width for letor in silos.values()}
    if len(widths) != 1:
        raise DataError(f"the silos have {sorted(widths)} features", cure="all need the same features")
    for silo, letor in silos.items():
        if not letor.rows:
            raise DataError(f"{silo} has no rows", cure="leave it out")
        check_trainable(letor)


def _work(folder: Path) -> None:
    """A silo's process: train with the others, leave the model in the folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # XGBoost would load it, which takes seconds
    job = json.loads((folder / "job.json").read_text())
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("features", "grades", "offsets")}
    queries = tuple(map(str, range(len(arrays["offsets"]) - 1)))
    model = _grow(Letor(queries, **arrays), job["parameters"], job["trees"], Seat(**job["seat"]))
    with replacing(folder / "model.json") as stream:
        stream.write(bytes(model.save_raw(raw_format="json")))


def _grow(letor: Letor, parameters: dict[str, Any], trees: int, seat: Seat) -> Any:
    xgboost = tree_library("xgboost")
    seated = {
        "dmlc_communicator": "federated",
        "federated_server_address": seat.address,
        "federated_world_size": seat.silos,
        "federated_rank": seat.rank,
        "federated_server_cert_path": seat.authority,
        "federated_client_cert_path": seat.certificate,
        "federated_client_key_path": seat.key,
    }
    # Everything in this context may be a message to all others: what not every silo does in the same
    # order would leave them waiting for each other.
    with xgboost.config_context(verbosity=0), xgboost.collective.CommunicatorContext(**seated):
        return xgboost.train(parameters, xgboost_matrix(letor), num_boost_round=trees)


def _end_with_parent() -> None:
    """The parent holds the other end of stdin; when it is gone nobody waits for this process."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
