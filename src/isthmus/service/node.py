"""A silo's node: its store, index, models, ledger and statistics, and the threads that keep these up to date.

    with Node(read_node("silo.toml")) as node:
        node.searcher.search(Search(query="tidal power"), snippets=True)

While it serves, documents come and go, sources are read, and model files that training has replaced are
loaded; a search uses what was there when it began.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from isthmus import __version__
from isthmus.arrays import frozen
from isthmus.engines import AttachedEngine
from isthmus.errors import (
    BudgetExhausted,
    ConfigError,
    DataError,
    IsthmusError,
    PrivacyError,
    ProtocolError,
    Refused,
    ServiceError,
)
from isthmus.files import write_private
from isthmus.learning import SearchModel
from isthmus.private import SiloFolder, family_of
from isthmus.private.ledger import Ahead, Budget, Ledger, lost
from isthmus.report import Progress
from isthmus.retrieval import TEXT, Statistics
from isthmus.service import wire
from isthmus.service.attached import AttachedStore, EngineScorer, ScoredSnapshot, open_attached
from isthmus.service.audit_log import keys_in, policies_in
from isthmus.service.candidates import Snapshot
from isthmus.service.columns import ModelScorer
from isthmus.service.extraction import NodeAudit
from isthmus.service.index import Index
from isthmus.service.judgements import SiloJudgements
from isthmus.service.noised_counts import CountReleases, counts_file
from isthmus.service.releases import Releases, released_file
from isthmus.service.reliability import validation_curves
from isthmus.service.scale import baseline_of, measure
from isthmus.service.scoring import Scorer, check_scores, try_on_query
from isthmus.service.searching import Searcher, load_scorer
from isthmus.service.security import HitTokens, LiveSecret, id_digest, local_secret
from isthmus.service.settings import OPERATOR, NodeSettings, SharedStatistics, Source, secret
from isthmus.service.silo_documents import SiloDocuments
from isthmus.service.silo_learner import SiloLearner
from isthmus.service.sources import SourceReport, Watch, check_sources, in_languages, load_all
from isthmus.service.stores import Counts, DocumentStore, Draft, Judgement, SqliteStore
from isthmus.tables import Documents, locked, replacing

TICK = 5.0
"""Seconds between two checks of model files."""
RENEWED = 0.5
"""Changes per document after which score sums are measured again."""
MINUTE = 60.0
"""Seconds between two lines of the log while documents are encoded."""
SETTLED = 3600.0
"""Seconds after which the ledger records how many of the departures written in advance have taken place."""
OWN = (
    "documents.db*",
    "ledger.db*",
    "index",
    "index/**/*",
    "flower",
    "*.statistics",
    "*.scale",
    "*.counts",
    "learned*",
    "audit*",
    "audit/*",
    "seen.db*",
)
"""Patterns of the files that a node writes into its folder."""
RELOADED = ("sources", "forget_sources", "reading")
"""Settings that a running node reads again."""
READABLE = 10.0
"""Seconds that the request for a change waits until it is searchable, before it is answered anyway."""
OUTDATED = "outdated.json"
"""File with the versions of models that were learned with documents erased since."""
DAY = 86_400.0
LATER = ("documents.db", "index", "feedback.key")
"""Files that a node's folder has only after it has a ledger."""

_log = logging.getLogger("isthmus.service")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a node's folder, so that one process at a time works on it: another would remove what this one is
    writing. Raises a ConfigError if it is in use.

    The lock is the system's and ends with the process, however that ends. Files that the process writes
    meanwhile are accessible to their owner only; so are, from now on, those that an older Isthmus has left
    there.
    """
    before = os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(os.umask, before)
        try:
            stack.enter_context(locked(folder / "lock", wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is in use by another isthmus node",
                key="folder",
                expected="a folder of its own for each node; end that one first",
            ) from None
        for path in (path for pattern in OWN for path in folder.glob(pattern)):
            os.chmod(path, path.stat().st_mode & 0o700)
        yield


def is_in_use(folder: Path) -> bool:
    """Whether a process works on a node's folder."""
    if not folder.is_dir():
        return False
    try:
        with locked(folder / "lock", wait=False):
            return False
    except BlockingIOError:
        return True


@dataclass(frozen=True)
class _Measured:
    """The state in which score sums were measured: encoder, whether without shared statistics, the last
    change, how many documents had a vector, and whether all had."""

    encoder: str
    unshared: bool
    change: int
    encoded: int
    is_complete: bool

    def is_outdated(self, now: _Measured, documents: int) -> bool:
        """Whether sums must be measured again: with another encoder, with the first shared statistics, after
        changes of half the documents, and if not all documents had a vector, when twice as many or all
        have one."""
        if (now.encoder, now.unshared) != (self.encoder, self.unshared):
            return True
        has_more = not self.is_complete and (now.is_complete or now.encoded > 2 * self.encoded)
        return has_more or now.change - self.change > RENEWED * documents


class Node:
    """Everything a silo has, behind methods that may be called from any thread."""

    _ruled: tuple[tuple[Source, ...], str] = ((), "")
    """The sources, and the digest of their rules."""

    def __init__(self, settings: NodeSettings, *, reread: Callable[[], NodeSettings] | None = None) -> None:
        """`reread` returns the settings as their file has them now, for `reload`."""
        self.settings, self._reread = settings, reread
        folder = settings.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ledger = open_ledger(settings)
        self.attached = None if settings.engine is None else open_attached(settings.engine, folder / "index")
        self.store = open_store(settings, self.attached)
        check_sources(settings, self.store)
        statistics = settings.statistics
        hash_key = secret(statistics.hash_key, "statistics.hash_key")
        self.family = family_of(hash_key, statistics.width)
        self.digest_key = b"" if hash_key == SharedStatistics.hash_key else self.family.key
        """Key of digests of texts: the one that silos share; empty if it is the public default."""
        self.index = Index(
            folder / "index",
            self.store,
            encoder=settings.encoder,
            family=self.family,
            engine=self.attached,
            kind=Snapshot if self._is_comparable else ScoredSnapshot,
        )
        self._models = self._stamps()
        self._scale = self._restored_scale()
        self._sums: wire.SiloScores | None = None
        self._measured: _Measured | None = None
        self._recorded: dict[str, wire.SiloScores] = {}
        self.learner = SiloLearner(
            settings, self.store, key=self.family.key, note=self.note, snapshot=lambda: self.index.snapshot
        )
        self._model = self._restored_model()
        self.searcher = Searcher(settings.silo, self.index, self.store, self._scorer(), settings.depth)
        self.tokens = HitTokens(settings.silo, LiveSecret(folder / "feedback.key"))
        self.judgements = SiloJudgements(settings.silo, self.store, self.tokens, self._ids)
        self.documents = SiloDocuments(
            settings.silo,
            self.store,
            self.tokens,
            self.note,
            lambda: self.settings.sources,
            link="" if settings.engine is None else settings.engine.link,
        )
        self._rules_read = self._restored_rules()
        self._sharing = threading.Lock()
        self._restore_shared()
        self._wake, self._stopped, self._read = threading.Event(), threading.Event(), threading.Event()
        self._again = threading.Event()
        self._reading, self._watch = threading.Lock(), Watch()
        self.source_reports: list[SourceReport] = []
        self._indexed = threading.Condition()
        self._ahead = Ahead(self.ledger)
        self.audit = self._opened_audit()
        self._sketched: int | None = None
        self._counts = CountReleases(settings, self.ledger, self.index)
        self.releases = Releases(settings, self.ledger, self.index, self.family)
        self.chores: list[Callable[[], object]] = []
        """Functions that run after the sources were read at the start, and once a day."""
        self._did_chores = -math.inf
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("indexer", self._run), ("encoder", self._encode))
        ]
        self.problem = self.encoding_problem = ""

    def _opened_audit(self) -> NodeAudit:
        settings = self.settings
        return NodeAudit(
            settings.folder,
            settings.audit,
            self.ledger,
            documents=lambda: len(self.index.snapshot),
            watched={
                "policy": self._policies,
                "keys": lambda: keys_in(settings.keys, settings.tls, settings.folder / "feedback.key"),
                "model": lambda: {path.name: str(stamp) for path, stamp in self._stamps().items()},
            },
        )

    def _policies(self) -> dict[str, str]:
        """Return the watched rights of peers, groups and persons, and a digest of the sources' rules."""
        settings = self.settings
        persons = {f"group:{name}": each for name, each in settings.groups.items()}
        persons |= {f"user:{self.audit.owner(id)}": each for id, each in settings.people.items()}
        rules = {"rules of sources": self._rules} if self._rules else {}
        return policies_in({**settings.peers, **persons}) | rules

    def __enter__(self) -> Node:
        self.audit.record("started", what=f"isthmus {__version__}")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=60)
        self._ahead.settle()
        self.audit.close()
        self.index.close()
        self.store.close()
        self.ledger.close()

    @contextmanager
    def offline(self) -> Iterator[Node]:
        """Use the node without its threads inside this block, for work that ends by itself, and close it."""
        try:
            yield self
        finally:
            self.__exit__()

    # background work

    def read_again(self) -> None:
        """Let the node's own thread read the settings' sources again soon."""
        self._again.set()
        self._wake.set()

    def _read_and_tell(self) -> None:
        self._again.clear()
        if self.settings.reading.watch:
            self._watch.begin(self.settings.sources)
        try:
            for error in self.reload() if self._read.is_set() else self.read_sources():
                _log.warning("%s", error)
        except ConfigError as error:
            _log.error("the sources stay as they were: %s", error)
        except Exception:
            _log.exception("the sources could not be read")
        finally:
            self._read.set()

    def _run(self) -> None:
        self._read_and_tell()
        while not self._stopped.is_set():
            try:
                every = self.settings.reading.watch
                if self._again.is_set() or self._watch.has_changed(self.settings.sources, every):
                    self._read_and_tell()
                self._catch_up()
                self._note_rules()
                self._sketch()
                self._load_new_models()
                self._ahead.settle(older=SETTLED)
                self._do_chores()
                self.problem = ""
            except BaseException as error:  # any failure, also a panic of tantivy: the node goes on
                self.problem = type(error).__name__
                _log.exception("indexing failed and will be tried again")
            try:
                self._measure_scores()
            except ServiceError as error:
                _log.info("score sums are measured later: %s", error)
            except Exception:  # searches work without score sums
                _log.exception("score sums could not be measured and will be tried again")
            self._wake.wait(min(TICK, self.settings.reading.watch or TICK))
            self._wake.clear()

    def _encode(self) -> None:
        """Encode documents in the background, and do the engine's maintenance, until the node stops."""
        logged = 0.0
        while not self._stopped.is_set():
            is_busy = self._encode_some()
            if is_busy and time.monotonic() > logged + MINUTE:
                _log.info("encoding: %s documents have no vector yet", self.index.unencoded)
                logged = time.monotonic()
            elif not is_busy:
                if logged and not self.encoding_problem:
                    _log.info("encoding: done")
                logged = 0.0
                self._stopped.wait(TICK)

    def _encode_some(self) -> bool:
        """Encode for a few seconds. Returns whether there was anything to do and it succeeded."""
        try:
            encoded = self.index.encode(self._stopped.is_set)
            self.encoding_problem = ""
            return self.index.maintain(self._stopped.is_set) or encoded > 0
        except BaseException as error:  # any failure: the node goes on with existing vectors
            self.encoding_problem = type(error).__name__
            if isinstance(error, IsthmusError):
                _log.warning("encoding failed and will be tried again: %s", error)
            else:
                _log.exception("encoding failed and will be tried again")
            return False

    def _do_chores(self) -> None:
        if time.monotonic() < self._did_chores + DAY:
            return
        self._did_chores = time.monotonic()
        for chore in self.chores:
            try:
                chore()
            except Exception:
                _log.exception("a daily chore failed; it is tried again tomorrow")

    def reload(self) -> list[DataError]:
        """Read the settings' sources again, then the sources. Returns what was wrong with single documents; a
        ConfigError leaves all as it was."""
        if self._reread is not None:
            new = self._reread()
            check_sources(new, self.store)
            fresh = {name: getattr(new, name) for name in RELOADED}
            if replace(new, **{name: getattr(self.settings, name) for name in RELOADED}) != self.settings:
                _log.warning(
                    "of the settings only %s are read again: restart for others", ", ".join(RELOADED)
                )
            self.settings = replace(self.settings, **fresh)
        return self.read_sources()

    def reloaded(self) -> wire.Reread:
        """Do as `reload`. Returns what could not be read, and the state of the sources."""
        errors = [str(error) for error in self.reload()[:1_000]]
        return wire.Reread(errors=errors, sources=self.source_states())

    def read_sources(self) -> list[DataError]:
        """Update the store from the sources. Returns what was wrong with single documents."""
        errors: list[DataError] = []
        with self._reading:
            done = load_all(
                self.settings.sources,
                self.store,
                errors.append,
                self.settings.reading,
                reports=self.source_reports,
                keep=self.has_read_rules,
            )
        _log.info("sources: %s added, %s changed, %s removed", done.added, done.changed, done.removed)
        for report in self.source_reports:
            if report.unread or report.failed or report.skipped:
                _log.warning("%s", report)
        self._wake.set()
        return errors

    @property
    def _rules(self) -> str:
        """A digest of the rules by which sources, as they are set now, allow or redact documents; empty
        without rules."""
        sources = self.settings.sources
        if self._ruled[0] is not sources:  # cached, since every search needs it
            rules = [(each.label, (each.allow, each.rules, each.redact)) for each in sources]
            has_any = any(any(each) for _, each in rules)
            self._ruled = sources, hashlib.sha256(repr(rules).encode()).hexdigest() if has_any else ""
        return self._ruled[1]

    @property
    def has_read_rules(self) -> bool:
        """Whether documents are stored and indexed by the present rules of their sources, not by
        former ones."""
        return self._rules_read == self._rules

    def _note_rules(self) -> None:
        """Record the rules as read, once all sources have been read and all changes indexed."""
        is_whole = self._read.is_set() and not any(report.failed for report in self.source_reports)
        if not self.has_read_rules and is_whole and not self.index.behind:
            self._rules_read = self._rules
            with replacing(self.settings.folder / "rules.read") as stream:
                stream.write(self._rules_read.encode())

    def _restored_rules(self) -> str:
        try:
            return (self.settings.folder / "rules.read").read_text(encoding="ascii")
        except OSError:
            return ""

    def _catch_up(self) -> None:
        behind = self.index.behind
        if not behind:
            return
        with Progress("indexing", behind) as bar:
            while not self._stopped.is_set() and (done := self.index.update()):
                bar.advance(done)
                with self._indexed:
                    self._indexed.notify_all()

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Keep sources from being read inside this block."""
        with self._reading:
            yield

    def sketch_again(self) -> bool:
        """Sketch all documents anew, if private counts are answered. Returns whether they are."""
        self._sketched = None
        self._sketch()
        return self._sketched is not None

    def _sketch(self) -> None:
        """Renew the sketches from which private counts are answered, if documents have changed enough."""
        wanted, snapshot = self.settings.training, self.index.snapshot
        if wanted is None or wanted.private is None or self._stopped.is_set():
            return
        allowed = self.settings.statistics.renew * len(snapshot)
        if self._sketched is None or snapshot.change - self._sketched > allowed:
            subjects = self.store.subjects() if self.settings.unit == "subject" else {}
            SiloFolder.at(wanted.private, create=True).build(all_documents(self.store), subjects=subjects)
            self._sketched = snapshot.change

    def _stamps(self) -> dict[Path, int]:
        models = self.settings.models
        named = (models.ranker, models.fuser, models.calibrator, self._model_file)
        files = [path for path in named if path is not None]
        return {path: path.stat().st_mtime_ns for path in files if path.exists()}

    def _load_new_models(self) -> None:
        """Load model files that training or calibration has replaced; a damaged one changes nothing."""
        stamps = self._stamps()
        if stamps == self._models:
            return
        try:
            self.searcher = replace(self.searcher, scorer=self._scorer())
            _log.info("new models are in use")
        except IsthmusError as error:
            _log.warning("the models stay as they were: %s", error)
        self._models = stamps

    # documents

    def put(self, drafts: Sequence[Draft]) -> Counts:
        """Add or change documents. They can be found when this returns, unless indexing is far behind."""
        erased = self.store.blocked()
        if any(erased.subject(draft.subject) for draft in drafts):
            cure = "isthmus documents readmit --subject lets its documents come back"
            raise DataError("a document is about a subject that was erased", cure=cure)
        done = self.store.put(in_languages(drafts), source=OPERATOR)
        self._await_indexed()
        return done

    def remove(self, id: str) -> bool:
        """Remove a document. Returns whether there was one."""
        gone = self.store.remove([id]) > 0
        if gone:
            self._await_indexed()
        return gone

    def _await_indexed(self) -> None:
        wanted, until = self.store.latest(), time.monotonic() + READABLE
        self._wake.set()
        with self._indexed:
            while self.index.snapshot.change < wanted and not self._stopped.is_set():
                if not self._indexed.wait(max(0.0, min(0.2, until - time.monotonic()))):
                    if time.monotonic() >= until:
                        return
                    self._wake.set()

    @property
    def unindexed(self) -> str:
        """What is missing in the index, in words; empty if everything can be found by its words."""
        if self.problem:
            return f"indexing failed: {self.problem}"
        if self.attached is not None and self.attached.remote.problem:
            return f"{self.attached.noun} does not answer"
        if not self._read.is_set():
            return "reading its sources"
        behind = self.index.behind
        return f"indexing {behind} changes" if behind else ""

    def ready(self) -> wire.Ready:
        """Return whether searches can be answered, and what is still missing."""
        snapshot = self.index.snapshot
        documents, behind = self.store.count(), self.index.behind
        detail = self.unindexed
        if not detail and self.encoding_problem:
            detail = f"encoding failed: {self.encoding_problem}"
        elif not detail and (waiting := self.index.unencoded):
            detail = f"encoding {waiting} documents"
        usable = self._read.is_set() and (not behind or len(snapshot) > 0) and not self.problem
        if self.attached is not None:
            usable = usable and not self.attached.remote.problem
        version = "" if snapshot.shared is None else snapshot.shared.version
        return wire.Ready(
            ready=usable,
            detail=detail,
            documents=documents,
            indexed=len(snapshot),
            statistics=version,
            encoder=snapshot.encoder.fingerprint,
            encoder_name=self.index.encoder_name,
            model=self.model_version,
            engine="" if self.attached is None else self.attached.noun,
            level="" if self.settings.engine is None else self.settings.engine.level,
            search_level=wire.SEARCH_LEVEL,
            unread=sum(report.unread for report in self.source_reports),
        )

    def source_states(self) -> list[wire.SourceState]:
        """Return the result of the last reading of every source."""
        return [wire.SourceState.model_validate(asdict(report)) for report in self.source_reports]

    # data that leave the silo

    def note(self, kind: str, peer: str, items: int = 1, note: str = "") -> None:
        """Record in the ledger that something without a DP guarantee is about to leave. Raises a ServiceError
        if that fails, and then it may not leave."""
        try:
            self._ahead.note(kind, peer, items, note)
        except (PrivacyError, DataError) as error:
            raise ServiceError(f"nothing may leave: {error}") from error

    def statistics(self, peer: str) -> bytes:
        """Return the silo's statistics in the form that it allows, charged before they leave."""
        return self.releases.to(peer)

    def count(
        self, question: wire.CountQuestion, peer: str, principals: frozenset[str] | None = None
    ) -> wire.NoisedCount:
        """Return how many documents answer a question, with noise, among those that these principals may see.
        Charged before it leaves; raises BudgetExhausted."""
        try:
            return self._counts.answer(question, peer, self.searcher.scorer, principals)
        except BudgetExhausted:
            raise
        except (PrivacyError, DataError) as error:
            raise ServiceError(f"nothing may leave: {error}") from error

    # statistics of all silos

    @property
    def _shared_file(self) -> Path:
        return self.settings.folder / "shared.statistics"

    def _restore_shared(self) -> None:
        """Score with the last sum again. One that cannot be used is set aside for the operator."""
        file = self._shared_file
        if not file.exists() or not self._is_comparable:
            return
        try:
            self.index.share(self._checked(file.read_bytes()))
        except ProtocolError as error:
            aside = file.with_name(f"{file.name}.refused")
            file.replace(aside)
            _log.warning("%s was set aside as %s: %s; the broker brings another", file, aside.name, error)

    def share(self, data: bytes) -> str:
        """Score with the sum of all silos' statistics from now on. Returns its version.

        Raises a ProtocolError for a sum that is out of bounds or makes a search fail; the former one
        stays. A silo whose engine has scores of its own needs none, and ignores it.
        """
        if not self._is_comparable:
            return ""
        with self._sharing:  # one message is unpacked at a time
            statistics = self._checked(data)
            with replacing(self._shared_file) as stream:
                stream.write(data)
            self.index.share(statistics)
        self._wake.set()
        return statistics.version

    def _checked(self, data: bytes) -> Statistics:
        statistics = Statistics.from_bytes(data)
        if statistics.documents < 1:
            raise ProtocolError("statistics of no documents")
        statistics.counts(TEXT, ["a"], self.family)  # raises if hashed under another silo's key
        try_on_query(statistics, self.family)
        snapshot = replace(self.index.snapshot, shared=statistics)
        check_scores(snapshot, self._some_text(snapshot), self.searcher.scorer)
        return statistics

    def _some_text(self, snapshot: Snapshot) -> str:
        """Return the beginning of one of the silo's documents, as a query to try statistics on."""
        names = snapshot.reader.ids(snapshot.reader.handles()[:1])
        return " ".join(f"{text.title} {text.body[:200]}" for text in self.store.get(names).values())

    # one scale for scores

    @property
    def _scale_file(self) -> Path:
        return self.settings.folder / "shared.scale"

    def _restored_scale(self) -> wire.ScoreScale | None:
        """Return the last scale that was received; None if it cannot be used, since the broker
        sends another."""
        try:
            return wire.ScoreScale.model_validate_json(self._scale_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def _measure_scores(self) -> None:
        """Sum scores for queries made of the silo's own documents, if `_Measured` says that this is due."""
        snapshot, encoded = self.index.snapshot, self.index.engine.encoded
        is_complete = encoded >= len(snapshot) > 0
        state = _Measured(
            snapshot.encoder.fingerprint, snapshot.shared is None, snapshot.change, encoded, is_complete
        )
        if self.settings.statistics.form == "none":
            return
        if self._measured is None or self._measured.is_outdated(state, len(snapshot)):
            began = time.monotonic()
            sums = measure(self.settings.silo, snapshot, self.store)
            if snapshot.encoder.rests_until <= began:  # else some queries had no vector: measure again
                self._sums, self._measured = sums, state

    def score_sums(self, peer: str) -> wire.SiloScores | None:
        """The silo's score sums, recorded before they leave; None until they are measured.

        Raises Refused where the silo shares no statistics.
        """
        if self.settings.statistics.form == "none":
            raise Refused("this silo does not share statistics")
        sums = self._sums
        if sums is not None and self._recorded.get(peer) != sums:
            self.ledger.record("sums", peer, note="score sums of queries made of the silo's documents")
            self._recorded[peer] = sums
        return sums

    def adopt_scale(self, scale: wire.ScoreScale) -> None:
        """Score on the scale of all silos, unless a learned model is used."""
        with self._sharing:
            with replacing(self._scale_file) as stream:
                stream.write(scale.model_dump_json().encode())
            self._scale = scale
            self.searcher = replace(self.searcher, scorer=self._scorer())

    # learning with others

    @property
    def _model_file(self) -> Path:
        return self.settings.folder / "learned.model"

    @property
    def _own_file(self) -> Path:
        return self.settings.folder / "learned.own"

    def _restored_model(self) -> SearchModel | None:
        """Return the model that was learned with others last, else the silo's own, else None. A file that
        cannot be used is set aside, since the broker sends another."""
        for file in (self._model_file, self._own_file):
            try:
                if file.exists():
                    return SearchModel.load(file)
            except DataError as error:
                aside = file.with_name(f"{file.name}.refused")
                file.replace(aside)
                _log.warning("%s was set aside as %s: %s; the broker brings another", file, aside.name, error)
        return None

    @property
    def _is_comparable(self) -> bool:
        """Whether terms are counted here, so that scores compare with other silos'."""
        return self.settings.engine is None or self.settings.engine.level == "full"

    def _scorer(self) -> Scorer:
        if self._is_comparable:
            return load_scorer(self.settings.models, self._model, self._scale)
        return EngineScorer(SearchModel.load(self._own_file) if self._own_file.exists() else None)

    @property
    def model_version(self) -> str:
        """Version of the model learned with others; empty for none. Files that the settings name take
        precedence over it."""
        return "" if self._model is None else ModelScorer(self._model).version

    def adopt(self, data: bytes, peer: str) -> None:
        """Search with a model that was learned with others, from the next search on.

        Raises a ProtocolError for a model that makes a search fail; the former one stays. Raises Refused
        for one that was learned with judgements erased since, if the settings withdraw such models.
        """
        model = SearchModel.from_bytes(data)
        if not re.fullmatch(wire.MODEL_VERSION, ModelScorer(model).version):
            raise ProtocolError("a model whose version is no name that answers can have")
        snapshot = self.index.snapshot
        check_scores(snapshot, self._some_text(snapshot), ModelScorer(model))
        is_outdated = ModelScorer(model).version in self._outdated
        if is_outdated and self.settings.erased_models == "withdraw":
            raise Refused("this model was learned with judgements that were erased since: learn again")
        self.learner.finish(peer)
        with self._sharing:
            model.save(self._model_file)
            self._use(model)
            if not is_outdated:
                (self.settings.folder / OUTDATED).unlink(missing_ok=True)

    @property
    def _outdated(self) -> list[str]:
        """Versions of models that were learned with judgements of documents that were erased since."""
        file = self.settings.folder / OUTDATED
        return list(json.loads(file.read_bytes())) if file.exists() else []

    def outdate_models(self) -> list[str]:
        """Handle models that were learned with documents erased since. Returns what becomes of each, in
        words.

        A model of this silo's own judgements is learned anew at once. One that was learned with others is
        marked until another one comes; or, if the settings say `withdraw`, dropped and not accepted again.
        """
        lines, own = list[str](), self._own_file.exists()
        if self._model_file.exists() and self.model_version:
            version, is_withdrawn = self.model_version, self.settings.erased_models == "withdraw"
            write_private(
                self.settings.folder / OUTDATED, json.dumps(sorted({*self._outdated, version})).encode()
            )
            done = "not used any more" if is_withdrawn else "used until the silos learn again"
            lines.append(f"{version}, learned with other silos: {done}")
            if is_withdrawn:
                self.drop_model()
        if own:
            self._own_file.unlink(missing_ok=True)
            try:
                self.calibrate_alone()
                lines.append("the calibration by this silo's own judgements: learned anew")
            except IsthmusError as error:
                self._use(self._restored_model())
                lines.append(f"the calibration by this silo's own judgements: dropped ({error})")
        return lines

    def drop_model(self) -> None:
        """Search without the model learned with others."""
        with self._sharing:
            self._model_file.unlink(missing_ok=True)
            self._use(self._restored_model())

    def calibrate_alone(self) -> None:
        """Calibrate the baseline by the silo's own judgements, none of which leave."""
        scale = self._scale if self._is_comparable else None
        usable = scale is not None and scale.encoder == self.index.snapshot.encoder.fingerprint
        model = self.learner.alone(baseline_of(scale if usable else None))
        with self._sharing:
            model.save(self._own_file)
            self._use(self._restored_model())

    def _use(self, model: SearchModel | None) -> None:
        self._model = model
        self.searcher = replace(self.searcher, scorer=self._scorer())

    # people

    def _ids(self) -> list[str]:
        return self.index.snapshot.all_ids()

    def judge(
        self, verdict: wire.AttributedFeedback, peer: str, principals: frozenset[str] | None = None
    ) -> str:
        """Store a judgement with the hit's present probability and evidence, or withdraw it. Returns the
        document's id.

        Raises the same DataError for a token that is wrong or too old, for a document that is gone since,
        and for one that these principals may not see.
        """
        document = self.tokens.open(verdict.token, query=verdict.query, peer=peer)
        is_own = document is not None and verdict.silo == self.settings.silo
        if document is None or not is_own or not self.store.present([document], principals):
            raise DataError("no such hit")
        if verdict.relevant is None:
            self.store.withdraw(verdict.query, document, peer=peer, person=verdict.person)
            return document
        probability, evidence = self.searcher.evidence(verdict.query, document, principals)
        self.store.judge(
            Judgement(
                verdict.query,
                document,
                verdict.relevant,
                peer,
                time.time(),
                probability,
                evidence,
                verdict.person,
            )
        )
        return document

    def calibration(self, peer: str) -> wire.Calibration:
        """Return how reliable the probabilities are: on validation, and by people's judgements."""
        files = (self.settings.models.reliability, self.learner.feedback_curves())
        curves = [curve for file in files for curve in validation_curves(file, self.settings.silo)]
        self.note("sums", peer, len(curves), "reliability curves of judged hits")
        return wire.Calibration(curves=curves)

    def release(self) -> wire.SiloRelease:
        """Return what has left the silo, and what may still leave."""
        self._ahead.settle()
        summary = self.ledger.summary()
        stamps = self._models.values()
        trained = max(stamps) / 1e9 if stamps else None
        return wire.SiloRelease(
            silo=self.settings.silo,
            documents=len(self.index.snapshot),
            budget=str(self.ledger.budget),
            **{name: summary[name] for name in ("unit", "most_spent", "least_left", "meaning")},
            departures=[wire.Departure(**row) for row in summary["departures"]],
            peers=list(self._peers()),
            last_training=None if trained is None else wire.moment(trained),
            outdated_model=self.model_version in self._outdated,
        )

    def spent(self) -> tuple[float, float]:
        """Return the largest ε that any document or subject has spent, and the least that is left."""
        summary = self.ledger.summary()
        return float(summary["most_spent"]), float(summary["least_left"])

    def _peers(self) -> Iterator[wire.PeerBudget]:
        dearest = next(iter(self.ledger.accounts(1)), None)
        for name, policy in sorted(self.settings.peers.items()):
            limit = policy.budget if policy.budget is not None else self.settings.budget
            left = limit if dearest is None else min(dearest.left, limit - dearest.peers.get(name, 0.0))
            rights = {right: getattr(policy, right) for right in wire.RIGHTS}
            seen = self.audit.share_of(name)
            yield wire.PeerBudget(peer=name, budget=limit, left=left, seen=seen, **rights)


def open_store(settings: NodeSettings, engine: AttachedEngine | None = None) -> DocumentStore:
    """Open the store that the settings name; for an engine elsewhere, one with that engine's documents."""
    if settings.engine is not None:
        engine = engine or open_attached(settings.engine, settings.folder / "index")
        store: DocumentStore = AttachedStore(settings.folder / "documents.db", engine)
    elif settings.store.kind == "sqlite":
        store = SqliteStore(settings.folder / "documents.db")
    else:
        from isthmus.service.postgres import PostgresStore

        store = PostgresStore(secret(settings.store.url, "store.url"))

    erased_key = cache(lambda: local_secret(settings.folder / "erased.key"))

    store.digest_of = lambda id: id_digest(id, erased_key())
    return store


def all_documents(store: DocumentStore) -> Documents:
    """Return all documents of a store as a table."""
    documents = list(store.living())
    return Documents(
        tuple(each.id for each in documents),
        tuple(each.title for each in documents),
        tuple(each.body for each in documents),
        frozen(np.zeros(len(documents), dtype=np.int64)),
    )


def open_ledger(settings: NodeSettings) -> Ledger:
    """Open the silo's ledger. Its budget becomes that of the settings, which the operator changes on purpose.
    Raises an error if there is another ledger, or if this one was lost."""
    limits = {name: peer.budget for name, peer in settings.peers.items() if peer.budget is not None}
    budget = Budget(epsilon=settings.budget, peers=limits, subject=settings.subject_noun)
    path, usual = settings.ledger, settings.folder / "ledger.db"
    if path != usual and usual.exists():
        raise ConfigError(
            f"two ledgers would let a document spend twice: {usual} and {path}",
            key="training.private",
            expected=f"what was spent in one of them: move {usual} and {usual}.tally there",
        )
    if not path.exists():
        for file in (
            released_file(settings),
            counts_file(settings),
            *(settings.folder / name for name in LATER),
        ):
            if file.exists():
                raise lost(path, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _opened(settings, budget)
    ledger = _opened(settings)
    if ledger.budget != budget:
        ledger.set_budget(budget)
    return ledger


def _opened(settings: NodeSettings, budget: Budget | None = None) -> Ledger:
    private = None if settings.training is None else settings.training.private
    return Ledger(settings.ledger, budget) if private is None else SiloFolder(private).ledger(budget)
