"""Silos that ask each other through a relay: the same as in memory, sealed, charged, and nothing replayed."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from exchanges import GuardInMemory, exchange_in_memory
from isthmus.arrays import Ids
from isthmus.errors import DataError, FederationError, ProtocolError
from isthmus.private import exchange, store, views
from isthmus.private.counts import Desk, in_memory
from isthmus.private.envelopes import Envelope, FileCounter, Post, ReplayGuard, SessionKey
from isthmus.private.exchange import Exchange, ExchangeRelay, ExchangeReply, Party, Turn
from isthmus.private.keys import GroupKey
from isthmus.private.ledger import Budget, Ledger
from isthmus.private.secure_sum import as_signed
from isthmus.private.store import SiloFolder
from isthmus.private.sums import TURNS, Adding, Agreed, Contribution, SumPlan
from isthmus.private.totals import hashed
from isthmus.private.views import Seeker, read_cross_rows, write_cross_rows
from isthmus.randomness import Streams
from isthmus.retrieval import Statistics
from isthmus.text import tokenise
from isthmus_reproduce import synthetic_text

NAMES = ("east", "north", "south")
CORPUS = synthetic_text.text(60, 9, 3, seed=5, words=40)
SILO = dict(zip(NAMES, CORPUS.silos, strict=True))
WIDTH = 1 << 12


def parties(path: Path, *, budget: float = 10.0, **more: object) -> dict[str, Party]:
    """Three silos that know and trust each other."""
    key = GroupKey.fresh(epoch=1, entropy=Streams(0)("group").bytes)
    folders = {name: SiloFolder.at(path / name, create=True) for name in NAMES}
    cards = [folder.keys.begin(name).card for name, folder in folders.items()]
    made = {}
    for name, folder in folders.items():
        folder.keys.join(key)
        for card in cards:
            if card.name != name:
                folder.keys.trust(card)
        own = CORPUS.silo(SILO[name])
        folder.build(own.documents, budget=Budget(budget), width=1 << 10)
        entropy = Streams(1)("entropy", name).bytes
        made[name] = Party(folder, own.queries, **{"k": 5, "entropy": entropy, **more})  # type: ignore[arg-type]
    return made


def no_contribution(name: str) -> Contribution:
    raise AssertionError(f"nothing of {name} is added in this step")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Party], ExchangeRelay]:
    made = parties(tmp_path_factory.mktemp("silos"))
    return made, exchange_in_memory(made, ExchangeRelay(3, WIDTH))


@pytest.mark.parametrize("form", ["ask", "publish"])
def test_what_comes_through_the_relay_is_what_a_call_would_bring(tmp_path: Path, form: str) -> None:
    made = parties(tmp_path, form=form)
    relay = exchange_in_memory(made, ExchangeRelay(3, WIDTH))
    north, south = made["north"], made["south"]
    agreed = Agreed(relay.session, relay.silos, 3, WIDTH)
    through = Exchange(north, Turn(agreed, 9)).looked_up("south")
    with south.folder.ledger() as ledger:
        desk = Desk(*(south.folder.owner(name, 8.0, ledger.charge_all) for name in ("title", "body")))
        keys = north.folder.keys
        own = {name: north.folder.words(name) for name in ("title", "body")}
        totals = Exchange(north, Turn(agreed, 9)).totals
        seeker = Seeker(keys.group_key(), own, keys.decoys(), totals)
        queries = tokenise(north.queries.texts)
        words, carrier = Ids.of(queries.terms.words), in_memory(desk, "north")
        fields = ["title", "body"]
        published = form == "publish"
        released = seeker.fetch(carrier, fields) if published else seeker.ask(carrier, fields, words)
        called = seeker.read(released, words)
    expected, found = (
        view.letor(north.queries, queries, view.candidates(queries, 5), name="south")
        for view in (called, through)
    )
    np.testing.assert_array_equal(found.features, expected.features)
    kept, errors = read_cross_rows(north.features("south"))
    np.testing.assert_allclose(kept.features, expected.features, rtol=1e-5)
    np.testing.assert_array_equal(errors, called.errors(queries, called.candidates(queries, 5)))
    assert (errors > 0).all()
    assert relay.done == set(NAMES)


def test_totals_are_the_sum_of_what_silos_added(done: tuple[dict[str, Party], ExchangeRelay]) -> None:
    """The sum under masks is that of contributions drawn from the same entropy, cell by cell."""
    made, relay = done
    plan = SumPlan("title", made["north"].folder.keys.group_key().family("totals title", width=WIDTH), NAMES)
    expected = np.zeros(2 * WIDTH + 2, dtype=np.int64)
    for name, party in made.items():
        with warnings.catch_warnings(), party.folder.ledger() as ledger:
            covered = party.folder.owner("title", 8.0, ledger.charge_all).covered
        sums = hashed(Statistics.of(party.folder.words("title")), plan.family)
        entropy = Streams(1)("entropy", name).bytes
        expected += plan.contribute(name, sums, covered, charge=lambda asked: None, entropy=entropy)
    np.testing.assert_array_equal(as_signed(relay.adding.totals["title"]), expected)
    agreed = Agreed(relay.session, relay.silos, 3, WIDTH)
    totals = Exchange(made["east"], Turn(agreed, 9)).totals["body"]
    truth = sum(
        (Statistics.of(made[name].folder.words("body")) for name in NAMES[1:]),
        Statistics.of(made["east"].folder.words("body")),
    )
    assert (totals.documents, totals.length) == (truth.documents, truth.length)


def test_contributions_are_built_in_the_steps_that_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the sum is checked in step 1, cells are masked in 2, the sum is charged in 4; totals are read
    when features are computed."""
    made, relay, steps = parties(tmp_path), ExchangeRelay(3, WIDTH), []
    build = exchange.Contribution

    def noted(*parts: Any) -> Contribution:
        steps.append(relay.step)
        return build(*parts)

    monkeypatch.setattr(exchange, "Contribution", noted)
    exchange_in_memory(made, relay)
    early = [step for step in steps if step < TURNS]
    assert sorted(set(early)) == [1, 2, 4]
    assert len(early) == 3 * len(NAMES) * 2
    assert len(steps) - len(early) == len(NAMES) * 2, "once for the features, in the turn that has them all"


def test_the_relay_says_who_spoiled_a_sum(tmp_path: Path) -> None:
    made, relay = parties(tmp_path), ExchangeRelay(3, WIDTH)
    replies = {name: Exchange(made[name], relay.first()).reply() for name in NAMES}
    spoiled = {**replies["north"].sums, "title/north": b"short"}
    with pytest.raises(ProtocolError, match="the silo north: public keys of the wrong length"):
        relay.next({**replies, "north": replace(replies["north"], sums=spoiled)})


def test_rows_are_never_beside_error_bars_of_others(
    done: tuple[dict[str, Party], ExchangeRelay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, errors = read_cross_rows(done[0]["north"].features("south"))
    path = tmp_path / "features" / "south.txt"
    write_cross_rows(rows, errors, path)

    def killed(*parts: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(views, "write_letor", killed)
    with pytest.raises(KeyboardInterrupt):
        write_cross_rows(rows, errors + 1, path)
    assert not path.exists(), "its error bars are those of other rows now"
    monkeypatch.undo()
    write_cross_rows(rows, errors + 1, path)
    np.testing.assert_array_equal(read_cross_rows(path)[1], errors + 1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -0.5])
def test_error_bars_are_finite_and_not_negative(
    done: tuple[dict[str, Party], ExchangeRelay], tmp_path: Path, wrong: float
) -> None:
    rows, errors = read_cross_rows(done[0]["north"].features("south"))
    errors[1] = wrong
    write_cross_rows(rows, errors, tmp_path / "features" / "south.txt")
    with pytest.raises(DataError, match="finite"):
        read_cross_rows(tmp_path / "features" / "south.txt")


def _released(folder: SiloFolder, path: Path) -> tuple[bytes, dict[str, list[bytes]]]:
    """What a silo publishes in a file: its head, and every field's messages, the catalogue first."""
    with folder.ledger() as ledger:
        store.write_released(folder.desk(8.0, ledger), folder.keys.group_key(), "north", path)
    data, fields = path.read_bytes(), iter(folder.fields())
    head, at, parts = data[: store._HEAD.size], store._HEAD.size, {}
    while at < len(data):
        end = at + 4 + struct.unpack_from("<I", data, at)[0]
        if store.kind_of(data[at + 4 : end]) == store.Catalogue.kind:
            parts[name := next(fields)] = []
        parts[name].append(data[at:end])
        at = end
    return head, parts


def test_a_released_file_has_every_catalogue_once_and_first(tmp_path: Path) -> None:
    folder = parties(tmp_path)["south"].folder
    head, parts = _released(folder, tmp_path / "released")
    (title, *titles), (body, *bodies) = parts["title"], parts["body"]
    key, path = folder.keys.group_key(), tmp_path / "forged"
    for messages, problem in (
        ([title, *titles, *bodies], "without its catalogue"),
        ([*bodies, body, *bodies], "without its catalogue"),
        ([title, *titles, body, *bodies, title, *titles], "two catalogues"),
    ):
        path.write_bytes(head + b"".join(messages))
        with pytest.raises(DataError, match=problem):
            store.read_released(path, key)
    path.write_bytes(head + b"".join([title, body, *bodies, *titles]))
    assert set(store.read_released(path, key)) == {"title", "body"}


def test_the_largest_message_that_is_released_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = parties(tmp_path)["south"].folder, tmp_path / "released"
    _, parts = _released(folder, path)
    largest = max(len(part) - 4 for part in (*parts["title"], *parts["body"]))
    for module in ("messages", "store"):
        monkeypatch.setattr(f"isthmus.private.{module}.LARGEST", largest)
    _released(folder, path)
    assert set(store.read_released(path, folder.keys.group_key())) == {"title", "body"}
    monkeypatch.setattr("isthmus.private.messages.LARGEST", largest - 1)
    with pytest.raises(ProtocolError, match="too large"):
        _released(folder, tmp_path / "refused")


def test_everything_is_charged_once_for_all(done: tuple[dict[str, Party], ExchangeRelay]) -> None:
    made, _ = done
    for name, party in made.items():
        with Ledger(party.folder.path / "silo.ledger") as ledger:
            assert ledger.spent(CORPUS.silo(SILO[name]).documents.ids[0]) == 9.0
            left = {(row["kind"], row["peer"]) for row in ledger.departures()}
            ledger.audit()
        others = set(NAMES) - {name}
        assert left >= {("counts", other) for other in others} | {("query text", other) for other in others}


def test_the_keys_of_masks_are_forgotten(done: tuple[dict[str, Party], ExchangeRelay]) -> None:
    made, relay = done
    for party in made.values():
        kept = {path.name for path in (party.folder.path / "exchange" / relay.session.hex()).iterdir()}
        assert kept >= {"title.total", "body.total"}
        assert not {name for name in kept if name.endswith((".member", ".key"))}


def test_numbers_grow_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FileCounter(tmp_path)()
    monkeypatch.setattr("time.time_ns", lambda: 5)
    assert FileCounter(tmp_path)() == first + 1


def test_the_relay_cannot_read_along(tmp_path: Path) -> None:
    made, relay, seen = parties(tmp_path), ExchangeRelay(3, WIDTH), []
    turns = {name: relay.first() for name in made}
    while turns:
        replies = {name: Exchange(made[name], turn).reply() for name, turn in turns.items()}
        seen += [letter for reply in replies.values() for letter in reply.letters]
        turns = relay.next(replies)
    assert len(seen) == relay.letters > 20
    for letter in seen:
        assert b"ISTH" not in letter  # the frame of every message inside
        assert b"one_shot" not in letter
        stranger = Post(
            replace(made["north"].folder.keys.identity(), name="relay"),
            GroupKey.fresh(epoch=1),
            made["north"].folder.keys.trusted(),
            SessionKey(relay.session, X25519PrivateKey.generate()),
            {name: key[:32] for name, key in relay.keys.items()},
            GuardInMemory(),
        )
        with pytest.raises(ProtocolError):
            stranger.receive(letter)


class Disturbed(ExchangeRelay):
    """A relay that does more than hand on: it repeats, damages, or sends back what it was given."""

    how = "repeat"

    def next(self, replies: dict[str, ExchangeReply]) -> dict[str, Turn]:  # type: ignore[override]
        turns = super().next(replies)
        return {name: replace(turn, letters=self._changed(turn.letters)) for name, turn in turns.items()}

    def _changed(self, letters: tuple[bytes, ...]) -> tuple[bytes, ...]:
        if self.how == "repeat":
            old = getattr(self, "old", ())
            self.old = (*old, *letters)
            return (*letters, *letters, *old)
        junk = [b"", b"ISLE", b"\0" * 90, *(letter[:-1] for letter in letters)]
        return (*junk, *letters, *(letter[:80] + b"\1" + letter[81:] for letter in letters))


@pytest.mark.parametrize("how", ["repeat", "damage"])
def test_a_relay_that_repeats_or_adds_changes_nothing(tmp_path: Path, how: str) -> None:
    made = parties(tmp_path)
    relay = Disturbed(3, WIDTH)
    relay.how = how
    refused = 0
    turns = {name: relay.first() for name in made}
    while turns:
        replies = {name: Exchange(made[name], turn).reply() for name, turn in turns.items()}
        refused += sum(reply.refused for reply in replies.values())
        turns = relay.next(replies)
    assert refused > 20
    assert relay.done == set(NAMES)
    with Ledger(made["south"].folder.path / "silo.ledger") as ledger:
        assert ledger.spent(CORPUS.silo(SILO["south"]).documents.ids[0]) == 9.0


def test_a_letter_that_is_lost_is_written_again(tmp_path: Path) -> None:
    class Forgetful(ExchangeRelay):
        lost = 0

        def _sorted(self, replies: dict[str, ExchangeReply]) -> dict[str, list[bytes]]:  # type: ignore[override]
            post = super()._sorted(replies)
            if self.step in (1, 3):
                self.lost += len(post["south"])
                post["south"] = []
            return post

    relay = Forgetful(3, WIDTH)
    assert exchange_in_memory(parties(tmp_path), relay) is relay
    assert relay.lost
    assert relay.done == set(NAMES)


def test_a_silo_without_budget_refuses_and_the_others_go_on(tmp_path: Path) -> None:
    made = parties(tmp_path)
    with made["south"].folder.ledger() as ledger:
        ledger.set_budget(Budget(2.0))
    turns, relay = {}, ExchangeRelay(3, WIDTH)
    turns = {name: relay.first() for name in made}
    failed: set[tuple[str, str]] = set()
    while turns:
        replies = {name: Exchange(made[name], turn).reply() for name, turn in turns.items()}
        failed |= {(name, peer) for name, reply in replies.items() for peer in reply.failed}
        turns = relay.next(replies)
    assert failed == {("north", "south"), ("east", "south")}
    assert made["north"].features("east").exists()
    assert not made["north"].features("south").exists()
    with made["south"].folder.ledger() as ledger:
        assert ledger.spent(CORPUS.silo(SILO["south"]).documents.ids[0]) == 1.0


def test_a_silo_that_leaves_after_the_sums_costs_its_own_features_alone(tmp_path: Path) -> None:
    class Slow(ExchangeRelay):
        def _sorted(self, replies: dict[str, ExchangeReply]) -> dict[str, list[bytes]]:  # type: ignore[override]
            return {
                **super()._sorted(replies),
                "south": [],
            }  # so that nothing of south's is there when it goes

    made, relay = parties(tmp_path), Slow(3, WIDTH)
    turns = {name: relay.first() for name in made}
    failed: set[tuple[str, str]] = set()
    while turns:
        present = [name for name in turns if name != "south" or relay.step < TURNS]
        replies = {name: Exchange(made[name], turns[name]).reply() for name in present}
        failed |= {(name, peer) for name, reply in replies.items() for peer in reply.failed}
        turns = relay.next(replies)
    assert relay.left == {"south"}
    assert relay.done == {"east", "north"}
    assert failed == {("east", "south"), ("north", "south")}
    assert made["north"].features("east").exists()
    assert made["east"].features("north").exists()
    assert not made["north"].features("south").exists()


def test_a_relay_cannot_shrink_the_noise(tmp_path: Path) -> None:
    """More silos than take part, or a lower threshold later on, would make every share of noise smaller."""
    made = parties(tmp_path)
    relay = ExchangeRelay(3, WIDTH)
    turns = {name: relay.first() for name in made}
    for _ in range(2):
        turns = relay.next({name: Exchange(made[name], turn).reply() for name, turn in turns.items()})
    turn = turns["north"]
    for lie in (
        replace(turn.agreed, silos=(*NAMES, "west")),
        replace(turn.agreed, silos=NAMES[:2], count=2),
    ):
        with pytest.raises(ProtocolError):
            Exchange(made["north"], replace(turn, agreed=lie)).reply()
    with pytest.raises(ProtocolError, match="begun before"):
        Exchange(made["north"], relay.first()).reply()
    with made["north"].folder.ledger() as ledger:
        assert ledger.summary()["charges"] == 0


def test_an_exchange_without_a_silo_cannot_go_on(tmp_path: Path) -> None:
    made = parties(tmp_path)
    relay = ExchangeRelay(3, WIDTH)
    replies = {name: Exchange(party, relay.first()).reply() for name, party in made.items()}
    relay.next(replies)
    with pytest.raises(FederationError, match="missing: south"):
        relay.next({name: reply for name, reply in replies.items() if name != "south"})


# ---------------------------------------------------------------- letters


def posts(path: Path) -> dict[str, Post]:
    made = parties(path)
    own = {name: SessionKey(b"session", X25519PrivateKey.generate()) for name in made}
    return {
        name: Post(
            party.folder.keys.identity(),
            party.folder.keys.group_key(),
            party.folder.keys.trusted(),
            own[name],
            {other: key.public for other, key in own.items() if other != name},
            ReplayGuard(path / "heard" / name),
        )
        for name, party in made.items()
    }


def test_letters_are_heard_once_by_whom_they_are_for(tmp_path: Path) -> None:
    post = posts(tmp_path)
    sent = post["north"].ask("south", b"what is it")
    for other in ("north", "east"):
        with pytest.raises(ProtocolError, match="another silo"):
            post[other].receive(sent.envelope)
    heard = post["south"].receive(sent.envelope)
    assert (heard.sender, heard.message) == ("north", b"what is it")
    again = replace(post["south"], replay_guard=ReplayGuard(tmp_path / "heard" / "south"))
    with pytest.raises(ProtocolError, match="received before"):
        again.receive(sent.envelope)
    answer = post["south"].answer(heard, b"this")
    assert post["north"].open(answer, sent.digest) == b"this"
    with pytest.raises(ProtocolError, match="another question"):
        post["north"].open(answer, b"0" * 16)
    with pytest.raises(ProtocolError, match="answer where"):
        post["north"].receive(answer)


def test_a_letter_does_not_come_from_somebody_else(tmp_path: Path) -> None:
    """East has the group key and all cards, and yet cannot write as north or send back what south wrote."""
    post = posts(tmp_path)
    forger = replace(post["east"], identity=replace(post["east"].identity, name="north"))
    with pytest.raises(ProtocolError, match="does not open"):
        post["south"].receive(forger.ask("south", b"x").envelope)
    letter = Envelope.decode(post["south"].ask("north", b"x").envelope)
    back = replace(letter, sender="north", receiver="south").encode()
    with pytest.raises(ProtocolError, match="does not open"):
        post["south"].receive(back)
    other = replace(post["north"], group=GroupKey.fresh(epoch=1))
    with pytest.raises(ProtocolError, match="does not open"):
        post["south"].receive(other.ask("south", b"x").envelope)
    with pytest.raises(ProtocolError, match="not trusted"):
        post["north"].ask("west", b"x")


def _mutated(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    at = int(rng.integers(len(changed))) if changed else 0
    how = rng.integers(4)
    if how == 0:
        changed[at] ^= 1 << int(rng.integers(8))
    elif how == 1:
        del changed[at : at + int(rng.integers(1, 30))]
    elif how == 2:
        changed[at:at] = rng.bytes(int(rng.integers(1, 30)))
    else:
        changed[at : at + 4] = rng.bytes(4)
    return bytes(changed)


@pytest.mark.soak
def test_fuzzed_letters_are_refused(tmp_path: Path, soak_count: Callable[[int, int], int]) -> None:
    post, rng = posts(tmp_path), Streams(3)("fuzz")
    heard = replace(post["south"], replay_guard=GuardInMemory())
    for _ in range(soak_count(300, 10_000)):
        sent = post["north"].ask("south", rng.bytes(int(rng.integers(60))))
        wrong = _mutated(sent.envelope, rng)
        with pytest.raises(ProtocolError):
            heard.receive(wrong)
        answer = heard.answer(heard.receive(sent.envelope), b"fine")
        with pytest.raises(ProtocolError):
            post["north"].open(_mutated(answer, rng), sent.digest)
        assert post["north"].open(answer, sent.digest) == b"fine"


@pytest.mark.soak
def test_fuzzed_steps_of_the_sum_are_refused(tmp_path: Path, soak_count: Callable[[int, int], int]) -> None:
    """Whatever a relay makes of adverts, boxes, lists and totals is a ProtocolError or does no harm."""
    made, relay = parties(tmp_path), ExchangeRelay(3, WIDTH)
    turns = {name: relay.first() for name in made}
    stages = [turns := relay.next({n: Exchange(made[n], t).reply() for n, t in turns.items()}) for _ in "1"]
    rng, refused, trials = Streams(4)("fuzz"), 0, soak_count(40, 2_000)
    turn = stages[0]["north"]
    kept = {file: file.read_bytes() for file in Exchange(made["north"], turn).path.glob("*.member")}
    for _ in range(trials):
        names = sorted(turn.sums)
        name = names[int(rng.integers(len(names)))]
        wrong = {**turn.sums, name: _mutated(turn.sums[name], rng)}
        if rng.random() < 0.2:
            del wrong[name]
        if rng.random() < 0.2:
            wrong[rng.bytes(4).hex() + "/" + name] = rng.bytes(128)
        try:
            Exchange(made["north"], replace(turn, sums=wrong)).summing.step(1, wrong, (), no_contribution)
        except ProtocolError:
            refused += 1
        for file, data in kept.items():
            file.write_bytes(data)
    assert refused == trials


@pytest.mark.soak
def test_a_relay_stands_what_silos_send(tmp_path: Path, soak_count: Callable[[int, int], int]) -> None:
    """Parts of the sum that were changed: a ProtocolError, or a total of the right shape."""
    made, relay = parties(tmp_path), ExchangeRelay(3, 64)
    turns, rng, seen = {name: relay.first() for name in made}, Streams(5)("fuzz"), []
    for _ in range(5):
        replies = {name: replace(Exchange(made[name], turns[name]).reply(), letters=()) for name in made}
        seen.append({name: dict(reply.sums) for name, reply in replies.items()})
        turns = relay.next(replies)
    refused = 0
    for _ in range(soak_count(60, 1_000)):
        adding = Adding(Agreed(relay.session, NAMES, 3, 64))
        wrong = int(rng.integers(5))
        try:
            for step, replies_of in enumerate(seen):
                sent = {name: dict(parts) for name, parts in replies_of.items()}
                if step == wrong:
                    liar = NAMES[int(rng.integers(3))]
                    label = sorted(sent[liar])[int(rng.integers(len(sent[liar])))]
                    sent[liar][label] = _mutated(sent[liar][label], rng)
                adding.after(step, sent)
            assert all(len(total) == 2 * 64 + 2 for total in adding.totals.values())
        except ProtocolError:
            refused += 1
    assert refused
