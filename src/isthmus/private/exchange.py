"""Exchange of counts between silos through a relay, in turns: the silo's part and the relay's part.

The relay begins. In every turn it hands each silo its envelopes and collects those that the silo sends, until
no silo has anything left to send. Envelopes are sealed (`envelopes`), so the relay learns who writes to whom
and how much. In the first turns the silos also add up how common words are (see `sums`). In the end every
silo has, in its own folder, the features of its queries over the others' documents; every release of a silo
is charged in its ledger before it leaves.

A silo keeps no state in memory: its state is in its folder, under the session's name, and every turn may run
in another process. Each turn asks its questions from the beginning: a `Transcript` repeats the answers that
have arrived and raises `AwaitingOthers` at the first that has not, so that the asking code is written like
any other user of a `Carrier`. No network code.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from isthmus.arrays import Ids
from isthmus.errors import BudgetExhausted, ConfigError, FederationError, PrivacyError, ProtocolError
from isthmus.private.cost import Cost, Covered, no_charge
from isthmus.private.envelopes import ANSWER, Envelope, FileCounter, Post, ReplayGuard, SessionKey, accepted
from isthmus.private.ledger import Ledger
from isthmus.private.mechanisms import Entropy
from isthmus.private.messages import CountsQuestion, Refusal, kind_of
from isthmus.private.secure_sum import Parts
from isthmus.private.store import SiloFolder
from isthmus.private.sums import TURNS, Adding, Agreed, Contribution, Summing
from isthmus.private.totals import WIDTH
from isthmus.private.views import CountsView, Released, Seeker, write_cross_rows
from isthmus.retrieval import Statistics
from isthmus.tables import Queries, write_whole
from isthmus.text import Tokens, tokenise

REFUSED = "the message was refused"
NO_BUDGET = "the release would exceed this silo's budget"
NO_ROOM = "this silo's budget has no room for another sum of totals beside what its counts need"
LETTERS_KEY = "letters.key"
RELAY = "relay"
"""The relay's name in a silo's ledger."""
AGAIN, PATIENCE = 4, 8
"""Turns after which a silo repeats a question, and turns without an envelope after which the relay
gives up."""

Form = Literal["publish", "ask"]

_log = logging.getLogger("isthmus.private")


@dataclass(frozen=True, eq=False)
class Party:
    """A silo in an exchange: its folder, its queries, and the terms under which it releases.

    The terms and all paths are the silo's own settings: no message can change them, and a proposal of the
    relay beyond `least_colluding` or `most_width` is refused. `entropy` is the source of the noise that the
    silo adds to the sums.
    """

    folder: SiloFolder
    queries: Queries
    form: Form = "ask"
    epsilon: float = 8.0
    epsilon_totals: float = 0.5
    k: int = 100
    entropy: Entropy = os.urandom
    least_colluding: int = 1
    """Least number of silos that are assumed to tell the relay their share of the noise: the other shares
    must suffice."""
    most_width: int = WIDTH
    """Largest number of cells of the sketches of totals."""

    def __post_init__(self) -> None:
        if self.least_colluding < 1 or self.most_width < 2:
            raise ConfigError(
                f"least_colluding = {self.least_colluding}, most_width = {self.most_width}",
                key="least_colluding",
                expected="at least one silo that colludes, and two cells",
            )

    def features(self, peer: str) -> Path:
        """The file with the features of this silo's queries over a peer's documents."""
        return self.folder.path / "features" / f"{peer}.txt"


@dataclass(frozen=True)
class Turn:
    """The relay's message to a silo."""

    agreed: Agreed
    step: int
    letters: tuple[bytes, ...] = ()
    sums: Mapping[str, bytes] = field(default_factory=dict)
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """The keys that silos announced for their envelopes; after the sums, a silo without a key has left."""
    over: bool = False
    """Whether the exchange is over, so that its keys can be deleted."""

    def __post_init__(self) -> None:
        if not 0 <= self.step <= 1 << 20:
            raise ProtocolError("a turn of no exchange")


@dataclass(frozen=True)
class ExchangeReply:
    """A silo's message to the relay: envelopes, its part of the sums, and whether it is done."""

    silo: str
    letters: tuple[bytes, ...] = ()
    sums: Mapping[str, bytes] = field(default_factory=dict)
    done: bool = False
    refused: int = 0
    """Envelopes and questions of this turn that were refused."""
    failed: tuple[str, ...] = ()
    """Silos whose counts this silo cannot get, because they refused or left."""
    key: bytes = b""
    """The silo's signed key for envelopes, in the first turn only."""

    def __post_init__(self) -> None:
        if not self.silo or self.refused < 0:
            raise ProtocolError("a reply of nobody, or one that refused fewer envelopes than none")


class AwaitingOthers(Exception):
    """The answer to a question has not come yet."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        super().__init__("an answer has not come yet")


class Transcript:
    """The questions to one silo about one field, and their answers so far, in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._at = 0

    def __call__(self, message: bytes) -> bytes:
        """Return the recorded answer to the next question, as a `Carrier`. Raises AwaitingOthers if there is
        none yet, and PrivacyError if the silo refused or another question was recorded."""
        question, answer = self._files(self._at)
        if not answer.exists():
            raise AwaitingOthers(message)
        if question.read_bytes() != message:
            raise PrivacyError("other questions than were asked before (begin a new exchange)")
        self._at += 1
        reply = answer.read_bytes()
        if kind_of(reply) == Refusal.kind:
            raise PrivacyError(Refusal.decode(reply).reason)
        return reply

    def clock(self) -> int:
        """The number of the next question: the recorded one if it has an answer, else a new one."""
        question, answer = self._files(self._at)
        known = answer.exists() and kind_of(question.read_bytes()) == CountsQuestion.kind
        return CountsQuestion.decode(question.read_bytes()).number if known else time.time_ns()

    @property
    def expected(self) -> bytes:
        """The digest of the question whose answer is awaited; empty if there is none."""
        return self._waiting.read_bytes()[:16] if self._waiting.exists() else b""

    def is_due(self, step: int) -> bool:
        """Whether to ask now: no question is on its way, or it has been for `AGAIN` turns."""
        sent = self._waiting.read_bytes()[16:24] if self._waiting.exists() else b""
        return not sent or step - int.from_bytes(sent, "little") >= AGAIN

    def sent(self, message: bytes, digest: bytes, step: int) -> None:
        """Record the question that is on its way, in place of the one before."""
        write_whole(self._waiting, digest + step.to_bytes(8, "little") + message)

    def received(self, answer: bytes) -> None:
        """Store the answer beside its question."""
        question, answer_file = self._files(len(list(self.path.glob("*.answer"))))
        write_whole(question, self._waiting.read_bytes()[24:])
        write_whole(answer_file, answer)  # last: if it exists, both files do
        self._waiting.unlink()

    @property
    def _waiting(self) -> Path:
        return self.path / "waiting"

    def _files(self, at: int) -> tuple[Path, Path]:
        return self.path / f"{at:05}.question", self.path / f"{at:05}.answer"


class Exchange:
    """One silo's part of one turn."""

    def __init__(self, party: Party, turn: Turn) -> None:
        self.party, self.turn, self.folder = party, turn, party.folder
        keys = self.folder.keys
        identity, trusted = keys.identity(), keys.trusted()
        self.name, self.fields = identity.name, self.folder.fields()
        self.peers = [name for name in turn.agreed.silos if name != self.name]
        if any(name not in trusted for name in self.peers):
            raise ProtocolError("an exchange with a silo that is not trusted")
        if self.peers and self.name not in turn.agreed.silos:
            raise ProtocolError("an exchange of other silos")
        self._check_terms()
        self.path = self.folder.path / "exchange" / turn.agreed.session.hex()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.summing = Summing(turn.agreed, keys, self.path)
        self.refused, self.waits = 0, False
        self.failed: list[str] = []
        self.left = set(self.peers) - set(turn.keys) if turn.step >= TURNS else set()

    def _check_terms(self) -> None:
        """Refuse less noise, or wider sketches, than the silo's own settings allow."""
        agreed, party = self.turn.agreed, self.party
        if agreed.colluding < party.least_colluding:
            raise ProtocolError(
                f"noise for {agreed.colluding} colluding silos, where this silo's least is"
                f" {party.least_colluding} (the relay's setting colluding)"
            )
        if agreed.width > party.most_width:
            raise ProtocolError(
                f"sketches of {agreed.width} cells, where this silo's most is {party.most_width}"
                " (the relay's setting width)"
            )

    @cached_property
    def post(self) -> Post:
        """Seals and opens the envelopes of this exchange."""
        keys, folder, session = self.folder.keys, self.folder.path / "heard", self.turn.agreed.session
        trusted, announced = keys.trusted(), self.turn.keys
        there = [peer for peer in self.peers if peer not in self.left]
        others = {peer: accepted(announced.get(peer, b""), session, trusted[peer]) for peer in there}
        return Post(
            keys.identity(),
            keys.group_key(),
            trusted,
            SessionKey.in_file(self.path / LETTERS_KEY, session),
            others,
            ReplayGuard(folder),
            FileCounter(folder / "own"),
        )

    def reply(self) -> ExchangeReply:
        """Carry out the turn. Returns the message to the relay."""
        if self.turn.over:
            with self.folder.ledger() as ledger:
                self._forget(self.path, ledger)
            return ExchangeReply(self.name, done=True)
        if self.turn.step:
            self.post  # noqa: B018  refuses keys that are missing or not their silos'
        with self.folder.ledger() as ledger:
            sums = self._summed(ledger)
            answers = list(self._answers(ledger))
            questions = list(self._questions(ledger))
        done = self.turn.step >= TURNS and not self.waits and self._finished()
        letters, failed = (*answers, *questions), tuple(sorted(set(self.failed)))
        return ExchangeReply(self.name, letters, sums, done, self.refused, failed, self._announced())

    def _announced(self) -> bytes:
        if self.turn.step:
            return b""
        key = SessionKey.in_file(self.path / LETTERS_KEY, self.turn.agreed.session, create=True)
        return key.announced(self.folder.keys.identity())

    def _forget(self, path: Path, ledger: Ledger) -> None:
        """Delete the keys of a session; if the relay did not finish it, record so in the ledger."""
        (path / LETTERS_KEY).unlink(missing_ok=True)
        revealed = Summing(self.turn.agreed, self.folder.keys, path).stopped()
        if revealed is not None:
            outcome = "after its sum was charged" if revealed else "before its sum was opened or charged"
            self._note(ledger, f"session {path.name[:8]} was stopped {outcome}")

    def _summed(self, ledger: Ledger) -> Parts:
        incoming, step = self.turn.sums, self.turn.step
        if step == 0:
            self._forget_stopped(ledger)
        if step >= TURNS - 1:
            self.summing.finish(incoming if step < TURNS else {})
            return {}
        parts = self.summing.step(step, incoming, self.fields, self._adding)
        if step in (1, 4):  # step 1 checks the budget; step 4 charges, before the sum is opened
            self._charge(ledger, book=step == 4)
        return parts

    def _charge(self, ledger: Ledger, *, book: bool) -> None:
        """Charge the sums of all fields or, without `book`, check that they fit the budget; the part of the
        budget that counts need is always left.

        So a relay that repeats the sums again and again can use up the budget for sums, and no more.
        """
        sums = [charge for name in self.fields for charge in self.summing.charges(name, self._adding(name))]
        counts = self._payable_counts(ledger)
        try:
            ledger.charge_all(sums if book else [], reserve=counts if book else [*sums, *counts])
        except BudgetExhausted:
            cure = "raise the budget, or exchange again when documents have changed"
            self._note(ledger, f"refused a sum of totals: no budget beside what counts need ({cure})")
            raise PrivacyError(NO_ROOM) from None

    def _forget_stopped(self, ledger: Ledger) -> None:
        """Delete the keys of earlier sessions, which are over even if the relay did not say so."""
        for path in sorted(self.path.parent.iterdir()):
            if path != self.path and path.is_dir():
                self._forget(path, ledger)

    def _note(self, ledger: Ledger, note: str) -> None:
        ledger.record("incident", RELAY, note=note)
        _log.error("%s: %s", self.name, note)

    def _payable_counts(self, ledger: Ledger) -> list[tuple[Cost, Covered, str]]:
        """The charges for releasing counts to the other silos; empty if they exceed the budget anyway."""
        owners = [self.folder.owner(name, self.party.epsilon, no_charge) for name in self.fields]
        counts = [
            charge
            for owner in owners
            for peer in self.peers
            for charge in owner.charges(owner.no_columns, peer)
        ]
        try:
            ledger.charge_all([], reserve=counts)
        except BudgetExhausted:
            return []
        return counts

    def _adding(self, name: str) -> Contribution:
        covered = self.folder.owner(name, self.party.epsilon, no_charge).covered
        return Contribution(self.words[name], covered, self.party.epsilon_totals, self.party.entropy)

    def _answers(self, ledger: Ledger) -> Iterator[bytes]:
        """Store answers and yield the answers to questions; any other envelope is counted as refused."""
        for data in self.turn.letters:
            try:
                if Envelope.decode(data).kind == ANSWER:
                    self._take(data)
                else:
                    yield self._served(data, ledger)
            except ProtocolError:
                self.refused += 1

    def _served(self, data: bytes, ledger: Ledger) -> bytes:
        question = self.post.receive(data)
        try:
            reply = self.folder.desk(self.party.epsilon, ledger).serve(question.message, question.sender)
        except BudgetExhausted:
            reply = Refusal(NO_BUDGET).encode()
        except ProtocolError:
            self.refused += 1
            reply = Refusal(REFUSED).encode()
        return self.post.answer(question, reply)

    def _take(self, data: bytes) -> None:
        envelope = Envelope.decode(data)
        if envelope.sender not in self.peers:
            raise ProtocolError("an envelope from a silo that takes no part")
        for transcript in self._transcripts(envelope.sender).values():
            if envelope.about == transcript.expected:
                transcript.received(self.post.open(data, envelope.about))
                return
        raise ProtocolError("an answer to no question")

    def _transcripts(self, peer: str) -> dict[str, Transcript]:
        return {name: Transcript(self.path / peer / name) for name in self.fields}

    def _questions(self, ledger: Ledger) -> Iterator[bytes]:
        """Yield the next question to every silo about every field, sealed."""
        for peer in self.peers:
            for name, transcript in self._transcripts(peer).items():
                try:
                    self._answered(transcript, name)
                except AwaitingOthers as waiting:
                    if peer in self.left:  # a peer that has left will not answer
                        self.failed.append(peer)
                        break
                    self.waits = True
                    if transcript.is_due(self.turn.step):
                        self._book(ledger, peer, waiting.message)
                        sent = self.post.ask(peer, waiting.message)
                        transcript.sent(waiting.message, sent.digest, self.turn.step)
                        yield sent.envelope
                except PrivacyError:
                    self.failed.append(peer)

    def _book(self, ledger: Ledger, peer: str, message: bytes) -> None:
        """Record in the ledger that words left: decoys hide them, but are no privacy guarantee."""
        if kind_of(message) == CountsQuestion.kind:
            words = len(CountsQuestion.decode(message).columns)
            ledger.record("query text", peer, items=words, note="cells of words and decoys")

    def _answered(self, carrier: Transcript, name: str) -> Released:
        """Everything that a silo releases of a field to this one. Raises AwaitingOthers while answers are
        missing."""
        if self.party.form == "publish":
            return self.seeker.fetch(carrier, [name])
        return self.seeker.ask(carrier, [name], self.query_words, clock=carrier.clock)

    def _finished(self) -> bool:
        """Compute the features over every silo's documents. Raises AwaitingOthers while answers are
        missing."""
        for peer in self.peers:
            if peer in self.failed or (marker := self.path / peer / "done").exists():
                continue
            view = self.looked_up(peer)
            pairs = view.candidates(self.tokens, self.party.k)
            letor = view.letor(self.party.queries, self.tokens, pairs, name=peer)
            write_cross_rows(letor, view.errors(self.tokens, pairs), self.party.features(peer))
            marker.touch()
        return True

    def looked_up(self, peer: str) -> CountsView:
        """The view of a silo's documents. Raises AwaitingOthers while answers are missing."""
        released: dict[str, Any] = {}
        for name, transcript in self._transcripts(peer).items():
            released |= self._answered(transcript, name)
        return replace(self.seeker, totals=self.totals).read(released, self.query_words)

    @cached_property
    def totals(self) -> dict[str, Statistics]:
        """Term statistics over all silos, by field."""
        sums = {name: self.summing.totals(name, self._adding) for name in self.fields}
        return {name: totals for name, totals in sums.items() if totals is not None}

    @cached_property
    def words(self) -> dict[str, Tokens]:
        return {name: self.folder.words(name) for name in self.fields}

    @cached_property
    def tokens(self) -> Tokens:
        return tokenise(self.party.queries.texts)

    @cached_property
    def query_words(self) -> Ids:
        return Ids.of(self.tokens.terms.words)

    @cached_property
    def seeker(self) -> Seeker:
        keys = self.folder.keys
        return Seeker(keys.group_key(), self.words, keys.decoys())


@dataclass(eq=False)
class ExchangeRelay:
    """The relay's side: passes envelopes on and adds up sums. It can open no envelope and sees no silo's
    cells."""

    count: int
    width: int = WIDTH
    colluding: int = 1
    session: bytes = field(default_factory=lambda: os.urandom(16))
    step: int = 0
    letters: int = 0
    carried: int = 0
    """Bytes of all envelopes that were passed on."""
    quiet: int = 0
    over: bool = False
    done: frozenset[str] = frozenset()
    keys: Mapping[str, bytes] = field(default_factory=dict)
    silos: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()
    """Silos that stopped answering after the sums; the others go on without features over their documents."""

    def __post_init__(self) -> None:
        self.adding = Adding(self._agreed())

    def _agreed(self) -> Agreed:
        return Agreed(self.session, self.silos, self.count, self.width, self.colluding)

    def first(self) -> Turn:
        """The first message to every silo."""
        return Turn(self._agreed(), 0)

    def next(self, replies: Mapping[str, ExchangeReply]) -> dict[str, Turn]:
        """The next message to each silo, from the replies to the last: finally that the exchange is over,
        then none. Raises FederationError if silos are missing or nothing more is sent."""
        if self.over:
            return {}
        if not self.silos:
            self.silos = tuple(sorted(replies))
            self.keys = {name: reply.key for name, reply in replies.items()}
        missing = sorted(set(self.silos) - self.left - set(replies))
        if missing and self.may_leave and len(replies) > 1:
            self.left |= frozenset(missing)
            self.keys = {name: key for name, key in self.keys.items() if name not in self.left}
            _log.warning("the exchange goes on without %s", ", ".join(missing))
            missing = []
        if missing or len(self.silos) != self.count:
            reason = f"missing: {', '.join(missing)}" if missing else f"{len(self.silos)} came"
            raise FederationError(f"an exchange of {self.count} silos cannot go on ({reason})")
        self.done = frozenset(name for name, reply in replies.items() if reply.done)
        post = self._sorted(replies)
        self.quiet = 0 if any(post.values()) or self.step < TURNS else self.quiet + 1
        there = [name for name in self.silos if name not in self.left]
        if self.done == set(there) and not any(post.values()):
            self.over = True
            return {name: Turn(self._agreed(), self.step, over=True) for name in there}
        if self.quiet > PATIENCE:
            waiting = ", ".join(sorted(set(there) - self.done))
            raise FederationError(f"nobody writes any more, and these silos are not done: {waiting}")
        sums = self.adding.after(self.step, {name: dict(reply.sums) for name, reply in replies.items()})
        self.step += 1
        return {
            name: Turn(self._agreed(), self.step, tuple(post[name]), sums[name], self.keys) for name in there
        }

    @property
    def may_leave(self) -> bool:
        """Whether the others can go on without a silo: not during the sums, which need all silos."""
        return self.step >= TURNS

    def _sorted(self, replies: Mapping[str, ExchangeReply]) -> dict[str, list[bytes]]:
        """The envelopes by receiver; those without a known receiver are dropped."""
        post: dict[str, list[bytes]] = {name: [] for name in self.silos if name not in self.left}
        for reply in replies.values():
            for data in reply.letters:
                try:
                    receiver = Envelope.decode(data).receiver
                except ProtocolError:
                    continue
                if receiver in post:
                    post[receiver].append(data)
                    self.letters += 1
                    self.carried += len(data)
        return post
