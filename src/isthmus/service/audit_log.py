"""A tamper-evident audit log: who was shown what, and who changed what.

    log = AuditLog(folder, AuditSettings())
    log.record("opened", peer="broker", actor=log.pseudonym("broker", "ada"), documents=["d7"])
    verify_audit(folder, log, anchors)       # or a DataError that names the first broken entry

    audit/000000000001-2026-11-18.jsonl     an entry a line, a new file every day and every `rotate_mb`
    audit/head                              number and hash of the last entry that is on disk
    audit.key                               the key of seals, pseudonyms and digests

The line of an entry begins with the hash of the entry before it. It ends with the SHA-256 of the line up
to there, and with a seal over that hash (HMAC), which cannot be made without the key. Heads are sealed,
and anchored in the silo's ledger, so that a truncated log is noticed as well. The format is lines of JSON,
because an auditor can read them without Isthmus, and because one `write` makes an entry: when `record`
returns, the operating system has it, and kill -9 loses nothing. A thread flushes entries to disk, many at
a time, so that a power cut loses `PAUSE` seconds at most. Documents and queries are recorded as keyed
digests, so that the erasure of a document changes no entry.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any

from starlette.requests import Request

from isthmus.errors import DataError, IsthmusError, ServiceError
from isthmus.files import locked, write_private
from isthmus.service.limits import CALLER, Buckets, HttpProblem
from isthmus.service.logs import iso_time
from isthmus.service.security import ApiKeys, Caller, local_secret
from isthmus.service.settings import AuditSettings, Tls

FOLDER, KEY, HEAD, LOCK, STATE = "audit", "audit.key", "head", "lock", "state.json"
BEGINNING = "0" * 64
"""The previous hash in the first entry."""
PAUSE = 0.5
"""Seconds between two flushes to disk."""
ANCHOR_ENTRIES, ANCHOR_SECONDS = 1_000, 60.0
"""Number of entries, or seconds since the last anchor, after which the log is anchored in the ledger."""
MOST_DELETED = 31
"""Most files that are deleted at once, so that a clock that jumps for a day does not delete the whole log."""
WATCHED_SECONDS = 5.0
"""Seconds between two checks of what may change without passing through this process, such as
files of keys."""
CURE = "compare with a copy; what stands before this entry is as it was written"
_LINE = re.compile(
    rb'(\{"number":(\d{1,15}),"previous":"([0-9a-f]{64})",.*),"hash":"([0-9a-f]{64})","seal":"([0-9a-f]{32})"\}'
)
_NAME = re.compile(r"\d{12}-\d{4}-\d\d-\d\d\.jsonl")
LONGEST = 4 << 20
"""Most bytes of an entry."""

_log = logging.getLogger("isthmus.service")

Anchor = Callable[[int, str], Mapping[str, Any]]
"""Records number and hash of the last entry elsewhere. Returns the fields of the log's entry about that."""


@dataclass(frozen=True)
class AuditHead:
    """Number and hash of an entry. A copy kept elsewhere shows whether the log was changed up to
    this entry."""

    number: int = 0
    hash: str = BEGINNING

    def __str__(self) -> str:
        return f"{self.number} {self.hash}"


class Digests(list[str]):
    """The names of documents in a log: digests."""


class AuditKey:
    """The key of a log: its seals, pseudonyms and digests."""

    def __init__(self, folder: Path, settings: AuditSettings) -> None:
        self._file = settings.key or folder / KEY
        self._hashers: dict[bytes, hashlib.blake2b] = {}

    @cached_property
    def _keys(self) -> tuple[bytes, bytes]:
        """The key of seals and the key of names, created with the first entry."""
        key = local_secret(self._file)
        seals, names = (hmac.digest(key, use, "sha256") for use in (b"seals of entries", b"names in entries"))
        return seals, names

    def seal(self, content: str) -> str:
        """Return the seal (HMAC) that shows that an entry or a head was written by this node."""
        return hmac.digest(self._keys[0], content.encode(), "sha256").hex()[:32]

    def pseudonym(self, peer: str, person: str) -> str:
        """Return the log's pseudonym of a person who asks through a peer."""
        return self._digest(b"person", f"{peer}\0{person}", 16)

    def document(self, id: str) -> str:
        """Return the log's digest of a document's id."""
        return self._digest(b"document", id, 12)

    def query(self, text: str) -> str:
        """Return the log's digest of a query; equal queries have equal digests."""
        return self._digest(b"query", " ".join(text.split()), 12)

    def _digest(self, kind: bytes, text: str, size: int) -> str:
        hasher = self._hashers.get(kind)
        if hasher is None:
            hasher = hashlib.blake2b(key=self._keys[1], person=kind, digest_size=size)
            self._hashers[kind] = hasher
        digest = hasher.copy()  # already keyed
        digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


@dataclass(frozen=True)
class _End:
    """The position of the next entry; without a file if it is not known."""

    path: str = ""
    size: int = 0
    head: AuditHead = field(default_factory=AuditHead)

    @property
    def file(self) -> str:
        """The name of the file."""
        return os.path.basename(self.path)


def apart(seconds: float) -> float:
    """Return a random time of up to half an interval, so that processes that repeat something at the same
    interval do it at different times."""
    return seconds * os.urandom(1)[0] / 512


class AuditLog(AuditKey):
    """The log of one node or broker, for all its threads; other processes may write to it as well.

    `anchor` is called from time to time with the last entry. `beyond` returns the last entry that was
    anchored: numbers continue after it if the log itself was lost. The `watched` functions are called
    regularly, and every change of what they return is recorded as an entry.
    """

    def __init__(
        self,
        folder: Path,
        settings: AuditSettings,
        *,
        anchor: Anchor | None = None,
        beyond: Callable[[], AuditHead] = AuditHead,
        watched: Mapping[str, Callable[[], Mapping[str, str]]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(folder, settings)
        self.folder, self.settings, self._clock = folder / FOLDER, settings, clock
        self._lock_file = str(self.folder / LOCK)
        self._anchor, self._beyond, self._watched = anchor, beyond, dict(watched or {})
        self._turn, self._syncing = threading.RLock(), threading.Lock()
        self._stream, self._end, self._synced = -1, _End(), AuditHead()
        self._anchored, self._anchored_at, self._looked = -1, -math.inf, -math.inf
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._refusals, self._uncounted = Buckets(1.0, 30), 0

    def record(
        self,
        action: str,
        *,
        peer: str = "",
        actor: str = "",
        documents: Iterable[str] = (),
        query: str = "",
        **more: Any,
    ) -> int:
        """Write an entry. Returns its number, and then the action that it records may happen. Raises a
        ServiceError if the entry cannot be written, and then the action must not happen.

        `documents` are ids, or `Digests`. Empty values are left out.
        """
        digests = documents if isinstance(documents, Digests) else [self.document(id) for id in documents]
        about: dict[str, Any] = {
            "peer": peer,
            "actor": actor,
            "documents": digests,
            "query": query if self.settings.queries else query and self.query(query),
            **more,
        }
        number = self._recorded(action, {name: value for name, value in about.items() if value})
        if not self._wake.is_set():
            self._wake.set()
        return number

    def _recorded(self, action: str, about: Mapping[str, Any]) -> int:
        if self._problem:
            raise ServiceError(f"nothing may leave: {self._problem}")
        with self._turn:
            try:
                if self._thread is None:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._stopped.clear()
                    self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
                    self._thread.start()
                with locked(self._lock_file) as lock:
                    if self._is_behind(lock):
                        for name, what in self._resume(lock):
                            self._append(lock, name, {"what": what})
                    return self._append(lock, action, about)
            except OSError as error:
                self._end = _End()  # read the end again: an entry may be partly written
                why = error.strerror or type(error).__name__
                raise ServiceError(f"nothing may leave: the audit log cannot be written ({why})") from error

    def refuse(self, caller: str, path: str, status: int) -> None:
        """Record a refused request. A flood of them is recorded as one entry a second with their number."""
        self._uncounted += 1
        if self._refusals.wait("all"):
            return
        times, self._uncounted = self._uncounted, 0
        with suppress(ServiceError):  # a refusal releases nothing
            times = times if times > 1 else 0
            self.record("refused", **self.naming(caller), what=path, status=status, times=times)

    def naming(self, caller: str) -> dict[str, str]:
        """Return the fields of an entry that name the caller of a request; a node's callers are peers."""
        return {"peer": caller}

    def owner(self, person: str) -> str:
        """Return the name, in entries about rights and keys, of the person who has them."""
        return person if self.settings.names else self.pseudonym("", person)

    def _is_behind(self, lock: int) -> bool:
        """Whether the known end of the log is outdated, because another process has written to it or has
        replaced the newest file (whose name is in the lock's file), or because no end is known yet."""
        end = self._end
        if not end.path or os.pread(lock, 100, 0) != end.file.encode():
            return True
        try:
            there = os.stat(end.path)
        except FileNotFoundError:
            return True
        return (there.st_ino, there.st_size) != (os.fstat(self._stream).st_ino, end.size)

    def _append(self, lock: int, action: str, about: Mapping[str, Any]) -> int:
        if self._is_full():
            self._begin_file(lock)
        end = self._end
        number, at = end.head.number + 1, self._clock()
        entry = {"number": number, "previous": end.head.hash, "at": iso_time(at), "action": action, **about}
        content = json.dumps(entry, separators=(",", ":"))[:-1]
        hash = hashlib.sha256(content.encode()).hexdigest()
        line = f'{content},"hash":"{hash}","seal":"{self.seal(hash)}"}}\n'.encode()
        if os.write(self._stream, line) != len(line):
            os.ftruncate(self._stream, end.size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end = _End(end.path, end.size + len(line), AuditHead(number, hash))
        return number

    def _is_full(self) -> bool:
        end = self._end
        is_large = end.size >= self.settings.rotate_mb * (1 << 20)
        return is_large or not end.path.endswith(f"-{self._day()}.jsonl")

    def _day(self, days: float = 0.0) -> str:
        """Return the date of today, or of so many days ago."""
        return iso_time(self._clock() - 86_400 * days)[:10]

    def _begin_file(self, lock: int) -> None:
        """Continue in a new file, and delete files that are older than the retention period."""
        if self._stream >= 0:
            os.fsync(self._stream)
            os.close(self._stream)
        name = f"{self._end.head.number + 1:012d}-{self._day()}.jsonl"
        self._open(lock, name)
        self._end = _End(str(self.folder / name), os.fstat(self._stream).st_size, self._end.head)
        until = self._day(self.settings.keep_days)
        old = takewhile(lambda file: file.name[13:23] <= until, _files(self.folder))
        older = list(islice(old, MOST_DELETED + 1))
        if len(older) > 1:  # all entries of a file are old only if the next file is old, too
            first = next(_lines(older[-1]), None)
            if first is not None:
                self._append(lock, "retention", {"before": first.number, "last": first.previous})
                os.fsync(self._stream)
                for file in older[:-1]:
                    file.unlink()

    def _open(self, lock: int, name: str) -> None:
        flags = os.O_CREAT | os.O_APPEND | os.O_RDWR
        self._stream = os.open(self.folder / name, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
        os.pwrite(lock, name.encode(), 0)
        _sync_folder(self.folder)

    def _resume(self, lock: int) -> list[tuple[str, str]]:
        """Find the last entry. Returns action and text of the entries to write about damaged or
        missing ones."""
        remarks, last = list[tuple[str, str]](), None
        if self._stream >= 0:
            os.close(self._stream)
            self._stream = -1
        files = _files(self.folder)
        for file in reversed(files):
            with file.open("r+b") as stream:
                torn = _tear_off(stream)
                tail = stream.read()[-LONGEST:].rstrip(b"\n").rpartition(b"\n")[2]
            if torn:
                remarks.append(("repaired", f"{torn} bytes of an entry that was never finished"))
            if tail:
                last = Line.of(tail, file, 0)
                remarks += [] if last else [("resumed", f"the last entry of {file.name} cannot be read")]
                break
        expected = max(self._beyond(), read_head(self.folder, self), key=lambda each: each.number)
        head = AuditHead() if last is None else AuditHead(last.number, last.hash)
        if expected.number > head.number:
            if last or not files:
                remarks.append(("resumed", f"entries {head.number + 1} to {expected.number} are missing"))
            head, last = expected, None
        if files and last is not None:
            self._open(lock, files[-1].name)
            self._end = _End(str(files[-1]), os.fstat(self._stream).st_size, head)
        else:
            self._end = _End("", 0, head)
        for _, what in remarks:
            _log.error("audit log: %s; isthmus audit verify says more", what)
        return remarks

    # disk, ledger, and changes by other processes

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            if self._wake.wait(ANCHOR_SECONDS):
                self._stopped.wait(PAUSE)  # collect more entries; let the waiting request finish
            self._wake.clear()
            try:
                self._look()
                self.sync()
                failures = 0
            except OSError as error:  # a later fsync does not restore what a failed one lost
                self._problem = "the disk does not take the audit log; end the node and mend it"
                _log.error("nothing may leave: %s (%s)", self._problem, error)
            except Exception as error:
                failures += 1
                _log.error(
                    "the audit log could not be anchored or saved and will be tried again: %s",
                    error,
                    exc_info=failures == 1,
                )
                self._stopped.wait(min(PAUSE * 2**failures, ANCHOR_SECONDS))
                self._wake.set()

    def sync(self, *, closing: bool = False) -> None:
        """Flush what was written to disk, update the head, and anchor it if that is due."""
        with self._syncing:
            self._flush()
            head, now = self._synced, self._clock()
            entries = head.number - self._anchored - 1  # without the entry about the anchor itself
            is_due = closing or entries >= ANCHOR_ENTRIES or now - self._anchored_at >= ANCHOR_SECONDS
            if self._anchor is not None and is_due and entries > 0:
                self._recorded("anchored", self._anchor(head.number, head.hash))
                first = self._anchored < 0  # spread the anchors of nodes that start together
                self._anchored, self._anchored_at = head.number, now - first * apart(ANCHOR_SECONDS)
                self._flush()

    def _flush(self) -> None:
        with self._turn:
            if self._end.head == self._synced or self._stream < 0:
                return
            head, stream = self._end.head, os.dup(self._stream)
        try:
            os.fsync(stream)
        finally:
            os.close(stream)
        with locked(self.folder / f"{HEAD}.lock"):  # a separate lock: entries do not wait for the disk
            if read_head(self.folder, self).number < head.number:
                text = f"{head} {self.seal(f'head {head}')}\n"
                write_private(self.folder / HEAD, text.encode())
        self._synced = head

    def _look(self) -> None:
        """Record changes that did not pass through this process, such as of files of keys, but not
        too often."""
        if time.monotonic() > self._looked + WATCHED_SECONDS:
            self._looked = time.monotonic()
            for action, values in self._watched.items():
                try:
                    self.compare(action, values())
                except (IsthmusError, OSError, ValueError) as error:
                    _log.warning("audit log: %s", error)

    def compare(self, action: str, values: Mapping[str, str]) -> None:
        """Record every value that has changed since the last call, in whatever process that was."""
        file = self.folder / STATE
        state = json.loads(file.read_bytes()) if file.exists() else {}
        before, now = state.get(action), dict(values)
        if before == now:
            return
        for name in sorted({*(before or {}), *now}):
            was, becomes = (before or {}).get(name, ""), now.get(name, "")
            if was != becomes:
                self._recorded(action, {"what": name, "was": was, "becomes": becomes})
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(file, json.dumps(state | {action: now}).encode())

    def close(self) -> None:
        """Flush all entries to disk and anchor the last one."""
        self._stopped.set()
        self._wake.set()
        if self._thread is None:
            return
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=60)
        self.sync(closing=True)
        with self._turn:
            if self._stream >= 0:
                os.close(self._stream)
            self._stream, self._end, self._thread = -1, _End(), None


class BrokerAudit(AuditLog):
    """A broker's audit log, whose callers are people. It has their pseudonyms, and names if the settings say
    so."""

    def naming(self, caller: str) -> dict[str, str]:
        """Return the fields of an entry that name the caller of a request; none for an unknown caller."""
        if not caller:
            return {}
        return {"actor": self.pseudonym("", caller)} | ({"person": caller} if self.settings.names else {})


def keys_in(
    api_keys: Path | None, tls: Tls | None, *others: Path, owner: Callable[[str], str] = str
) -> dict[str, str]:
    """Return the watched state of keys: owners, rights and groups of API keys by their ids, digests of the
    certificate and of the list of revocations, and when other key files were last written."""
    known = {}
    if api_keys is not None:
        for key in ApiKeys(api_keys).all():
            groups = (f"group:{name}" for name in key.groups)
            known[key.id] = f"{owner(key.name)}: {' '.join((*key.scopes, *groups))}"
    if tls is not None:
        files = {"certificate": tls.certificate, "revocations": tls.revoked}
        present = {name: path.read_bytes() for name, path in files.items() if path.exists()}
        known |= {name: hashlib.sha256(content).hexdigest() for name, content in present.items()}
    return known | {path.name: iso_time(path.stat().st_mtime) for path in others if path.exists()}


def policies_in(peers: Mapping[str, Any]) -> dict[str, str]:
    """Return the rights and limits of every peer as text, by name; those that are not set are left out."""
    return {
        name: " ".join(
            f"{each.name}={getattr(peer, each.name)}" for each in fields(peer) if getattr(peer, each.name)
        )
        for name, peer in peers.items()
    }


def _files(folder: Path) -> list[Path]:
    """The files of a log, in the order of their entries."""
    return sorted(path for path in folder.glob("*.jsonl") if _NAME.fullmatch(path.name))


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _tear_off(stream: IO[bytes]) -> int:
    """Cut off an entry without its end, which a killed process was writing. Returns how many bytes were cut
    off.

    The stream stands before the last entries afterwards.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - LONGEST))
    tail = stream.read()
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        stream.truncate(size - torn)
    stream.seek(max(0, size - LONGEST))
    return torn


# reading


@dataclass(frozen=True)
class Line:
    """An entry as it stands in a file."""

    text: bytes
    number: int
    previous: str
    hash: str
    seal: str
    file: Path
    line: int

    @classmethod
    def of(cls, text: bytes, file: Path, line: int) -> Line | None:
        """Parse a line; None if it is not an entry."""
        match = _LINE.fullmatch(text)
        if match is None:
            return None
        previous, hash, seal = (part.decode() for part in match.groups()[2:])
        return cls(match[1], int(match[2]), previous, hash, seal, file, line)

    @property
    def whole(self) -> bytes:
        """The whole line, with its end."""
        return b'%s,"hash":"%s","seal":"%s"}\n' % (self.text, self.hash.encode(), self.seal.encode())

    @property
    def content(self) -> dict[str, Any]:
        """The fields of the entry."""
        content: dict[str, Any] = json.loads(self.text + b"}")
        return content


def _lines(file: Path, most: int | None = None) -> Iterator[Line]:
    """Yield the entries of a file, up to `most` bytes. Raises a DataError for a line that is not an entry."""
    size = 0
    with file.open("rb") as stream:
        for number, text in enumerate(stream, 1):
            size += len(text)
            if most is not None and size > most:
                return
            entry = Line.of(text[:-1], file, number) if text.endswith(b"\n") else None
            if entry is None:
                raise DataError("is no entry of an audit log", file=file, line=number, cure=CURE)
            yield entry


def audit_lines(folder: Path, *, after: int = 0) -> Iterator[Line]:
    """Yield the entries of the log in a node's or broker's folder, or those after a number. The log may grow
    meanwhile."""
    folder = folder / FOLDER
    if not folder.is_dir():
        return
    with locked(folder / LOCK):  # no entry is partly written
        sizes = {file: file.stat().st_size for file in _files(folder)}
    files = list(sizes)
    for file, following in zip(files, [*files[1:], None], strict=True):
        if following is None or int(following.name[:12]) > after + 1:
            yield from (line for line in _lines(file, sizes[file]) if line.number > after)


def audit(request: Request, action: str, *, name: str = "", **about: Any) -> None:
    """Write an entry to the broker's log, in the name of the request's caller unless another name
    is given."""
    log: BrokerAudit = request.app.state.broker.audit
    log.record(action, **log.naming(name or request.scope[CALLER].name), **about)


def check_auditor(caller: Caller[Any]) -> str:
    """Return the name of a caller with the scope audit, else raise a 403. No other scope includes it, since
    administrators are audited."""
    if not caller.may("audit"):
        raise HttpProblem(403, "this needs a key with the scope audit, which admin does not include")
    return caller.name


def page_of(folder: Path, after: int, most: int) -> bytes:
    """Return at most `most` entries after a number, as they stand in the log's files."""
    return b"".join(line.whole for line in islice(audit_lines(folder, after=after), most))


def read_head(folder: Path, key: AuditKey) -> AuditHead:
    """Read from the head file the last entry that is on disk; number 0 if there is no head sealed by this
    node."""
    try:
        number, hash, seal = (folder / HEAD).read_text("ascii").split()
        head = AuditHead(int(number), hash)
    except (FileNotFoundError, ValueError):
        return AuditHead()
    return head if hmac.compare_digest(seal, key.seal(f"head {head}")) else AuditHead()


@dataclass
class Verified:
    """The result of verifying an audit log."""

    entries: int = 0
    files: int = 0
    first: AuditHead = field(default_factory=AuditHead)
    last: AuditHead = field(default_factory=AuditHead)
    anchors: int = 0
    heads: dict[str, dict[int, str]] = field(default_factory=dict)
    """Hashes of ledger entries by their numbers, for each ledger (by name) in which the log was anchored."""


def verify_audit(folder: Path, key: AuditKey, anchors: Mapping[int, str] | None = None) -> Verified:
    """Check every entry, and that the log has the entries that `anchors` lists by number and hash.

    Raises a DataError that names the first broken entry: changed, missing, or not sealed with this key.
    """
    state, files = Verified(), set[Path]()
    waiting = dict(anchors or {})
    head = read_head(folder / FOLDER, key)
    if head.number:
        waiting.setdefault(head.number, head.hash)
    before, retained, line = AuditHead(), AuditHead(), None
    for line in audit_lines(folder):
        if line.previous != before.hash or line.number != before.number + 1:
            if state.entries or line.number <= 1:
                raise _out_of_order(line, before)
            state.first = AuditHead(line.number - 1, line.previous)
        _check(line, key, waiting)
        before = AuditHead(line.number, line.hash)
        state.anchors += waiting.pop(line.number, None) is not None
        state.entries += 1
        files.add(line.file)
        if b'"action":"retention"' in line.text and (entry := line.content)["action"] == "retention":
            retained = AuditHead(entry["before"] - 1, entry["last"])
        elif b'"action":"anchored"' in line.text and (entry := line.content)["action"] == "anchored":
            state.heads.setdefault(entry["ledger"], {})[entry["ledger_entry"]] = entry["ledger_hash"]
    if not head.number and (state.heads or (folder / FOLDER / HEAD).exists()):
        raise DataError("is missing, or not of this node", file=folder / FOLDER / HEAD, cure=CURE)
    if state.first.number and state.first != retained:
        problem = f"entries 1 to {state.first.number} are missing, and no entry says that they were too old"
        raise DataError(problem, file=folder / FOLDER, cure=CURE)
    missing = [number for number in waiting if number > before.number]
    if missing:
        problem = f"the log ends with entry {before.number}, and there was an entry {max(missing)}"
        where = {"file": folder / FOLDER} if line is None else {"file": line.file, "line": line.line}
        raise DataError(f"{problem}: what came after it was cut off", **where, cure=CURE)
    state.last, state.files = before, len(files)
    return state


def _out_of_order(line: Line, before: AuditHead) -> DataError:
    if line.number == before.number + 1:
        problem = (
            f"entry {line.number} was written after another entry {before.number} than the one before it"
        )
    elif line.number > before.number + 1:
        problem = f"entry {before.number + 1} is missing: entry {line.number} comes after {before.number}"
    else:
        problem = f"entry {line.number} comes after entry {before.number}"
    return DataError(problem, file=line.file, line=line.line, cure=CURE)


def _check(line: Line, key: AuditKey, anchors: Mapping[int, str]) -> None:
    problem = ""
    if hashlib.sha256(line.text).hexdigest() != line.hash:
        problem = "was changed: its hash is not that of its content"
    elif not hmac.compare_digest(key.seal(line.hash), line.seal):
        problem = "was not written by this node: its seal is not of this key"
    elif anchors.get(line.number, line.hash) != line.hash:
        problem = "is another than the one that was anchored"
    if problem:
        raise DataError(f"entry {line.number} {problem}", file=line.file, line=line.line, cure=CURE)
