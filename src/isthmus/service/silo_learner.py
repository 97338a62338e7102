"""A silo's part in joint learning: its rows of judged queries stay, and questions about them get sums.

    GET  /learning                      the queries that somebody judged here
    POST /learning/session              a session: masks are agreed with the other silos, by their cards
    POST /learning/{session}/{number}   a question; a sum leaves under the masks of its number

What a peer can infer from the answers is limited by the use of one set of judgements as a whole (`judged`),
by the choice of questions that are answered (`guarded_rows`), and by masks of at least three silos that add
something.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from isthmus.asking import Silos
from isthmus.errors import DataError, ProtocolError, Refused
from isthmus.learning import (
    BestMargins,
    CrossExamination,
    FoldsOf,
    JudgedRows,
    OwnModel,
    QueryColumns,
    SearchModel,
    Start,
    answer_bytes,
    question_of,
)
from isthmus.private import LEAST_MEMBERS, FixedPoint, Keyring, MaskedMember
from isthmus.service import wire
from isthmus.service.candidates import Snapshot
from isthmus.service.columns import silo_rows
from isthmus.service.guarded_rows import GuardedRows
from isthmus.service.judged import FOLDS, JudgedQueries
from isthmus.service.settings import NodeSettings
from isthmus.service.stores import DocumentStore

if TYPE_CHECKING:
    from isthmus.learning import BaselineScale

IDLE = 60.0
"""Seconds without a question after which a session may end."""
COLLECTED = (FoldsOf, QueryColumns, BestMargins)
"""Questions answered without masks: any search reveals the answers, or all silos have the same ones."""
REPORTS = (OwnModel, CrossExamination)
"""Questions by which silos are weighed; they are answered without masks, if the owner allows it."""

_LEAVING = {
    "scores": "best scores of judged queries, to learn together",
    "probe report": "a model of its judgements and errors on them, to weigh silos",
}

Note = Callable[[str, str, int, str], None]
"""Records in the ledger that data are about to leave: kind, peer, items, note."""


@dataclass(eq=False)
class _Session:
    """A session of one peer: its masks, and its rows once it has started."""

    name: str
    peer: str
    encoder: str
    member: MaskedMember
    weighed: bool
    """Whether silos send reports of their own errors, by which they are weighed."""
    rows: GuardedRows | None = field(default=None)
    asked_at: float = field(default_factory=time.monotonic)


class SiloLearner:
    """Learning sessions in one silo, one at a time; safe to use from any thread."""

    def __init__(
        self,
        settings: NodeSettings,
        store: DocumentStore,
        *,
        key: bytes,
        note: Note,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self.settings, self.judged = settings, JudgedQueries(settings, store, key=key)
        self._key, self._note, self._snapshot = key, note, snapshot
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def queries(self, peer: str) -> wire.Judged:
        """Return the queries with a judged hit, for all silos to learn from; none while there are too few."""
        with self._lock:
            judged, folds = self.judged.refresh(), self.judged.folds(peer)
        rules, engine = self.settings.learning, self.settings.engine
        if engine is not None and engine.level == "scores":
            return wire.Judged(queries=[], folds=folds, alone=True)
        queries = sorted(judged.grades)[: wire.MOST_JUDGED] if folds else []
        self._note("query text", peer, len(queries), "judged queries, to learn together")
        return wire.Judged(queries=queries, folds=folds, consent=rules.consent, least=rules.least_queries)

    def begin(self, request: wire.LearningSession, peer: str) -> wire.LearningKey:
        """Begin a session, or settle its members. Returns this silo's key for the masks.

        Raises Refused if the peer has begun too many sessions today, and DataError if the silo has no cards.
        """
        with self._lock:
            if request.adverts:
                member = self._of(request.session, peer).member
                member.agree({name: bytes.fromhex(advert) for name, advert in request.adverts.items()})
                return wire.LearningKey(advert=member.advertise().hex())
            if request.mode == "fedrisk" and not self.settings.learning.reports:
                raise Refused("its owner lets no errors of its own be seen (reports = true under [learning])")
            self.judged.refresh()
            member = self._member(bytes.fromhex(request.session), adds=self.judged.folds(peer) > 0)
            self.judged.begin(peer)
            weighed = request.mode == "fedrisk"
            self._session = _Session(request.session, peer, request.encoder, member, weighed)
            return wire.LearningKey(advert=member.advertise().hex())

    def _member(self, session: bytes, *, adds: bool) -> MaskedMember:
        folder, silo = self.settings.cards, self.settings.silo
        make = f"isthmus keys new keys {silo}, and isthmus keys trust keys CARD for every other silo's card"
        cure = f'{make}; then keys = "keys" under [learning] of its silo.toml'
        if folder is None:
            raise DataError("this silo has no keys to mask its sums with", cure=cure)
        keys = Keyring.at(folder)
        identity, trusted = keys.identity(), keys.trusted()
        if identity.name != silo:
            raise DataError(f"its keys are of {identity.name}, and its name is {silo}", cure=cure)
        known = {name: Ed25519PublicKey.from_public_bytes(card.verifying) for name, card in trusted.items()}
        least = 2 if self.settings.learning.consent == "two" else LEAST_MEMBERS
        return MaskedMember(silo, session, identity.signing, known, least, adds)

    def _of(self, name: str, peer: str) -> _Session:
        session = self._session
        if session is None or (session.name, session.peer) != (name, peer):
            raise ProtocolError("a question of another session than the one that has begun")
        return session

    def answer(self, name: str, number: int, data: bytes, peer: str) -> bytes:
        """Answer a question: with words under masks for a sum, else with plain numbers."""
        question = question_of(data)
        with self._lock:
            session = self._of(name, peer)
            session.asked_at = time.monotonic()
            if isinstance(question, Start):
                self._start(session, question)
            if session.rows is None:
                raise ProtocolError("a question before the session has begun")
            if isinstance(question, REPORTS) and not session.weighed:
                raise ProtocolError("reports of a silo's own, in a session without")
            answer = session.rows.answer(question)
            if isinstance(question, (*COLLECTED, *REPORTS)):
                session.member.claim(number)
                kind = "probe report" if isinstance(question, REPORTS) else "scores"
                self._note(kind, peer, 1, _LEAVING[kind])
                return answer_bytes(answer)
            members = session.member.members
            point = FixedPoint(max(len(members), 1))
            words = session.member.mask(number, data, point.encode(answer))
        self._note("sums", peer, 1, f"sums over judged queries, under masks of {len(members)} silos")
        return words.astype("<u8").tobytes()

    def _start(self, session: _Session, request: Start) -> None:
        """Build the session's rows from all judgements; without any for a silo that adds nothing."""
        if session.rows is not None:
            raise ProtocolError("a session that has begun")
        judged, most = self.judged.current, self.judged.folds(session.peer)
        distinct = set(request.queries)
        if request.folds not in FOLDS or len(distinct) < len(request.queries):
            raise ProtocolError(f"a session has distinct queries, in {', '.join(map(str, FOLDS))} folds")
        if session.member.adds and not judged.grades.keys() <= distinct:
            raise ProtocolError("a session must have every query that was judged here")
        if session.member.adds and not 0 < request.folds <= most:
            raise ProtocolError("more folds than this silo has judged queries for")
        session.rows = silo_rows(
            self._snapshot(),
            request.queries,
            judged.grades if session.member.adds else {},
            folds=self.judged.deal(request.queries, request.folds),
            encoder=session.encoder,
            depth=self.settings.depth,
            build=partial(
                GuardedRows,
                queries=request.queries,
                crowd=judged.crowd(session.peer) if session.member.adds else (),
                key=self._key,
                session=session.name,
                weighed=session.weighed,
                adding=session.member.adding,
                least=self.settings.learning.least_queries,
                place=session.member.place,
            ),
        )

    def feedback_curves(self) -> Path:
        """Return the file of reliability curves from feedback, for the current set of judgements."""
        with self._lock:
            self.judged.refresh()
        return self.judged.curves_file

    def forget(self, documents: Sequence[str], subject: str) -> bool:
        """Remove documents, and queries that name a subject, from the set of judgements. Returns whether any
        was in it.

        Erasing has priority over hiding: a peer that asks before and after may see the difference.
        """
        with self._lock:
            self._session = None
            return self.judged.forget(documents, subject)

    def finish(self, peer: str) -> None:
        """End the session of a peer that has installed a model, unless it asked just now: an earlier model is
        also handed out while silos learn."""
        with self._lock:
            session = self._session
            if session is not None and session.peer == peer and time.monotonic() > session.asked_at + IDLE:
                self._session = None

    def alone(self, baseline: BaselineScale) -> SearchModel:
        """Calibrate the baseline with this silo's own judgements; nothing leaves. Raises DataError if they
        are too few."""
        from isthmus.learning import LearningOptions, learn

        with self._lock:
            judged = self.judged.refresh()
        queries = sorted(judged.grades)
        folds = FOLDS[-1]
        rows: JudgedRows = silo_rows(
            self._snapshot(),
            queries,
            judged.grades,
            folds=self.judged.deal(queries, folds),
            encoder=baseline.encoder,
            depth=self.settings.depth,
        )
        silos = Silos.in_memory({self.settings.silo: rows.answer})
        model, _ = learn(silos, queries, folds=folds, baseline=baseline, options=LearningOptions(models=()))
        return model
