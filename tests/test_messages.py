"""Messages between silos: what they carry comes back, and nothing else is believed."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private import envelopes, messages
from isthmus.private.cost import Covered, no_charge
from isthmus.private.counts import Asker, CountRelease, Desk, Owner, fetch_catalogue, fetch_published
from isthmus.private.decoys import Decoys
from isthmus.private.keys import GroupKey, Identity, unwrap, wrap
from isthmus.private.mechanisms import NoiseKey, OneShot, Scalar, fresh_nonces
from isthmus.private.messages import (
    Catalogue,
    CountsAnswer,
    CountsMessage,
    CountsQuestion,
    Enquiry,
    Published,
    Refusal,
    Terms,
    kind_of,
)
from isthmus.private.sketch import HashFamily
from isthmus.randomness import Streams
from isthmus.text import Tokeniser

TERMS = Terms("one_shot", "body", 8.0, 1, 64, 3)
PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())
SECRETS = ("pangolin", "d17", "topsecret")


def samples() -> list[CountsMessage]:
    values = np.array([1, -1, 300, -70_000, 2], dtype=np.int32)
    places = np.array([0, 5, 6, 500, 639])
    return [
        Enquiry("body"),
        Enquiry("body", 7),
        Refusal("the message was refused"),
        Catalogue(TERMS, ("a", "bé", ""), np.array([1, 0, 4_000_000])),
        Published(TERMS, 5, 10, places, values),
        CountsQuestion(TERMS, 12, np.array([[3], [63]], dtype=np.uint32)),
        CountsAnswer.of(b"q" * 16, np.arange(-6, 6, dtype=np.int32).reshape(2, 1, 6)),
        CountsAnswer.of(b"q" * 16, np.linspace(0, 1, 6).reshape(2, 1, 3)),
    ]


@pytest.mark.parametrize("message", samples(), ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: CountsMessage) -> None:
    told = message.encode()
    back = type(message).decode(told)
    assert back.encode() == told
    assert kind_of(told) == type(message).kind
    for name in vars(message):
        mine, theirs = getattr(message, name), getattr(back, name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.9, 1.0])
def test_packed_values_come_back_at_any_density(density: float) -> None:
    rng = Streams(0)("packing", int(100 * density))
    flat = np.where(rng.random(5000) < density, rng.integers(-100, 100, size=5000), 0)
    places = np.flatnonzero(flat)
    message = Published(TERMS, 0, 5000 // 64 + 1, places, flat[places].astype(np.int32))
    back = Published.decode(message.encode())
    found = np.zeros(5000, dtype=int)
    found[back.places] = back.values
    np.testing.assert_array_equal(found, flat)
    assert len(message.encode()) < (2.2 * len(places) if density < 0.5 else 5000) + 200


def test_a_sparse_release_is_small() -> None:
    """At ε = 8 a document of 100 words takes a few hundred bytes for its 8,192 cells."""
    of = CountRelease("body", HashFamily(b"h" * 32), OneShot(8.0), NoiseKey(b"k" * 32), no_charge)
    tokens = PLAIN([" ".join(f"w{n}" for n in range(100))] * 20)
    owner = Owner.of(tokens, _covered(20), of)
    assert len(owner.publish(0, "north").encode()) / 20 < 900


def test_everything_but_the_message_is_refused() -> None:
    told = CountsQuestion(TERMS, 1, np.array([[3]], dtype=np.uint32)).encode()
    for wrong in (b"", b"ISTH", told[:-1], told[1:], told + b"\0", told[:20] + told[21:], b"\0" * len(told)):
        with pytest.raises(ProtocolError):
            CountsQuestion.decode(wrong)
    with pytest.raises(ProtocolError, match="kind"):
        CountsAnswer.decode(told)
    with pytest.raises(ProtocolError):
        CountsQuestion.decode("text")  # type: ignore[arg-type]


def forged(kind: type[CountsMessage], body: bytes) -> bytes:
    """A message with a right frame and checksum around any body."""

    class Forged(kind):  # type: ignore[misc, valid-type]
        def _body(self) -> bytes:
            return body

    return Forged.encode(Forged.__new__(Forged))


def test_bodies_that_lie_about_themselves_are_refused() -> None:
    good = CountsQuestion(TERMS, 1, np.array([[3]], dtype=np.uint32))._body()
    terms = good[: -(8 + 2 + 4)]
    for body in (
        b"",
        good + b"\0",
        good[:-1],
        terms + struct.pack("<QH", 1, 0),
        terms + struct.pack("<QHI", 1, 1, 128),  # a column beyond twice the width
        terms + struct.pack("<QH", 1, 65535),
        terms.replace(b"one_shot", b"\xff" * 8) + good[len(terms) :],
        terms[:14] + struct.pack("<dBII", float("nan"), 1, 64, 3) + good[len(terms) :],
        terms[:14] + struct.pack("<dBII", 8.0, 0, 64, 3) + good[len(terms) :],
    ):
        with pytest.raises(ProtocolError):
            CountsQuestion.decode(forged(CountsQuestion, body))


def test_a_small_answer_cannot_claim_to_be_huge() -> None:
    """A shape is checked before anything of its size is made."""
    body = b"q" * 16 + struct.pack("<?HBI", False, 16_000, 255, (1 << 24) - 1)
    body += struct.pack("<?III", False, 0, 0, 0)
    with pytest.raises(ProtocolError, match="more values"):
        CountsAnswer.decode(forged(CountsAnswer, body))
    body = body[:16] + struct.pack("<?HBI", False, 100, 1, 1_000) + body[-13:]
    assert CountsAnswer.decode(forged(CountsAnswer, body)).shape == (100, 1, 1_000)
    of = CountRelease("body", HashFamily(b"h" * 32, width=64), OneShot(8.0), NoiseKey(b"k" * 32), no_charge)
    asker = Asker(of.terms, of.family, of.mechanism, Decoys(Ids.of(["a"]), np.ones(1, int), b"s" * 16))
    asked = asker.ask(Ids.of(["a"]))
    lying = forged(CountsAnswer, asked.question.digest() + body[16:])
    with pytest.raises(ProtocolError, match="does not fit"):
        asker.recover(asked, lying, 20)


def _covered(count: int) -> Covered:
    nonces = fresh_nonces(count, Streams(0)("nonces").bytes)
    return Covered(tuple(f"d{n}" for n in range(count)), tuple(nonce.tobytes().hex() for nonce in nonces))


def _mutated(told: bytes, rng: np.random.Generator) -> bytes:
    """Flip, cut, stretch, repeat or mix."""
    data = bytearray(told)
    how = rng.integers(5)
    at = int(rng.integers(len(data)))
    if how == 0:
        for place in rng.integers(len(data), size=int(rng.integers(1, 6))).tolist():
            data[place] ^= 1 << int(rng.integers(8))
    elif how == 1:
        del data[at : at + int(rng.integers(1, 40))]
    elif how == 2:
        data[at:at] = rng.bytes(int(rng.integers(1, 40)))
    elif how == 3:
        data += data[at:]
    else:
        data[at : at + 8] = rng.bytes(8)
    return bytes(data)


@pytest.mark.soak
def test_fuzzed_messages_are_refused_and_nothing_leaks(soak_count: Callable[[int, int], int]) -> None:
    """Frames are mutated as they travel, bodies inside right frames, and answers on the way back."""
    rng = Streams(7)("fuzz")
    tokens = PLAIN([" ".join(SECRETS)] * 18)
    desks = []
    for kind in (OneShot(8.0), Scalar(1.0, rows=3)):
        family = HashFamily(b"h" * 32, kind.rows, 64)
        of = CountRelease("body", family, kind, NoiseKey(b"k" * 32), no_charge)
        asker = Asker(of.terms, family, kind, Decoys(tokens.terms, np.ones(3, int), b"s" * 16))
        desks.append((Desk(Owner.of(tokens, _covered(18), of)), asker))
    refused: list[str] = []
    for trial in range(soak_count(300, 10_000)):
        desk, asker = desks[trial % 2]
        asked = asker.ask(Ids.of([SECRETS[0]]))
        kind = rng.choice(np.array(["frame", "body", "answer", "enquiry"]))
        try:
            if kind == "frame":
                desk.serve(_mutated(asked.message, rng), "north")
            elif kind == "body":
                desk.serve(forged(CountsQuestion, _mutated(asked.question._body(), rng)), "north")
            elif kind == "enquiry":
                desk.serve(forged(Enquiry, _mutated(Enquiry("body", 0)._body(), rng)), "north")
            else:
                answer = CountsAnswer.decode(desk.serve(asked.message, "north"))
                told = forged(CountsAnswer, _mutated(answer._body(), rng)) if trial % 3 else answer.encode()
                asker.recover(asked, _mutated(told, rng) if trial % 3 == 1 else told, 18)
        except ProtocolError as error:
            refused.append(str(error))
    assert len(refused) > 0.5 * soak_count(300, 10_000)
    assert not any(secret in told for told in refused for secret in SECRETS)
    assert not any(character.isdigit() for told in refused for character in told)


@pytest.mark.soak
@pytest.mark.parametrize("message", samples(), ids=lambda message: type(message).__name__)
def test_every_kind_of_message_stands_fuzzing(
    message: CountsMessage, soak_count: Callable[[int, int], int]
) -> None:
    """A changed frame is refused; a changed body in a right frame is refused or is another message."""
    rng, kind, whole = Streams(8)("fuzz", type(message).__name__), type(message), message.encode()
    count = soak_count(100, 10_000)
    refused = 0
    for _ in range(count):
        changed = _mutated(whole, rng)
        if changed != whole:
            with pytest.raises(ProtocolError):
                kind.decode(changed)
        body = forged(kind, _mutated(message._body(), rng))
        try:
            assert kind.decode(body).encode()  # what is accepted can be said again
        except ProtocolError:
            refused += 1
    assert refused > 0.2 * count


@pytest.mark.soak
def test_what_an_owner_publishes_is_not_believed_either(soak_count: Callable[[int, int], int]) -> None:
    """Catalogues and batches changed in right frames: sketches of their shape, or a ProtocolError."""
    rng, family = Streams(9)("fuzz"), HashFamily(b"h" * 32, 1, 64)
    of = CountRelease("body", family, OneShot(8.0), NoiseKey(b"k" * 32), no_charge)
    desk = Desk(Owner.of(PLAIN([" ".join(SECRETS)] * 18), _covered(18), of))
    refused = 0
    for trial in range(soak_count(200, 10_000)):
        changed = (Catalogue, Published)[trial % 2]

        def carrier(message: bytes, changed: type[CountsMessage] = changed) -> bytes:
            told = desk.serve(message, "north")
            if kind_of(told) != changed.kind:
                return told
            return forged(changed, _mutated(changed.decode(told)._body(), rng))

        try:
            catalogue = fetch_catalogue(carrier, "body")
            assert len(fetch_published(carrier, catalogue, family)) == len(catalogue.documents)
        except ProtocolError:
            refused += 1
    assert refused > 0.3 * soak_count(200, 10_000)


def test_oversized_messages_are_neither_made_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Catalogue(TERMS, tuple(f"document {n}" for n in range(40)), np.arange(40))
    told = message.encode()
    monkeypatch.setattr(messages, "LARGEST", 200)
    with pytest.raises(ProtocolError, match="too large"):
        Catalogue.decode(told)
    with pytest.raises(ProtocolError, match="too large"):
        message.encode()
    monkeypatch.setattr(envelopes, "_LONGEST", 200)
    with pytest.raises(ProtocolError, match="too long"):
        envelopes.Envelope.decode(b"ISLE" + bytes(300))


# ---------------------------------------------------------------- group keys


class TestGroupKey:
    north, south, relay = (Identity.fresh(name) for name in ("north", "south", "relay"))
    key = GroupKey.fresh(epoch=3)

    def box(self) -> bytes:
        return wrap(self.key, self.north, [self.south.card])["south"]

    def test_arrives_whole(self) -> None:
        got = unwrap(self.box(), self.south, {"north": self.north.card})
        assert got == self.key
        words = Ids.of(["a", "b"])
        mine, theirs = (key.family("body") for key in (self.key, got))
        np.testing.assert_array_equal(mine.of(words).cells, theirs.of(words).cells)

    def test_is_for_the_receiver_alone(self) -> None:
        with pytest.raises(ProtocolError):
            unwrap(self.box(), self.relay, {"north": self.north.card})
        assert self.key.secret not in self.box()

    def test_cannot_come_from_the_relay(self) -> None:
        """The relay knows all public keys and wraps a key of its own."""
        fake = wrap(GroupKey.fresh(epoch=4), self.relay, [self.south.card])["south"]
        with pytest.raises(ProtocolError, match="signed"):
            unwrap(fake, self.south, {"north": self.north.card})
        renamed = Identity("north", self.relay.signing, self.relay.opening)
        fake = wrap(GroupKey.fresh(epoch=4), renamed, [self.south.card])["south"]
        with pytest.raises(ProtocolError, match="signed"):
            unwrap(fake, self.south, {"north": self.north.card})

    def test_can_be_asked_from_one_silo(self) -> None:
        trusted = {"north": self.north.card, "relay": self.relay.card}
        assert unwrap(self.box(), self.south, trusted, sender="north") == self.key
        with pytest.raises(ProtocolError):
            unwrap(self.box(), self.south, trusted, sender="relay")

    def test_does_not_come_back_from_the_past(self) -> None:
        with pytest.raises(ProtocolError, match="over"):
            unwrap(self.box(), self.south, {"north": self.north.card}, after=3)

    def test_damage_anywhere_is_noticed(self) -> None:
        box = self.box()
        for at in range(0, len(box), 3):
            wrong = box[:at] + bytes([box[at] ^ 1]) + box[at + 1 :]
            with pytest.raises(ProtocolError):
                unwrap(wrong, self.south, {"north": self.north.card})
        for wrong in (b"", box[:-1], box + b"\0"):
            with pytest.raises(ProtocolError):
                unwrap(wrong, self.south, {"north": self.north.card})

    @pytest.mark.soak
    def test_fuzzed_boxes_are_refused(self, soak_count: Callable[[int, int], int]) -> None:
        rng, box = Streams(10)("fuzz"), self.box()
        for _ in range(soak_count(100, 10_000)):
            wrong = _mutated(box, rng)
            if wrong != box:
                with pytest.raises(ProtocolError):
                    unwrap(wrong, self.south, {"north": self.north.card})

    def test_purposes_have_families_of_their_own(self) -> None:
        words = Ids.of([f"w{n}" for n in range(500)])
        body, totals = (self.key.family(name).of(words).cells for name in ("body", "totals"))
        assert (body == totals).mean() < 0.02
        assert self.key.family("body").epoch == 3
        assert self.key.secret.hex() not in repr(self.key)
        with pytest.raises(PrivacyError):
            GroupKey(b"short", 0)
