"""Somebody records every letter of an exchange and has all keys of all silos once it is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from exchanges import GuardInMemory
from isthmus.errors import ProtocolError
from isthmus.private.envelopes import ANSWER, Envelope, Post, SessionKey, accepted
from isthmus.private.exchange import LETTERS_KEY, Exchange, ExchangeRelay, Party, Turn
from isthmus.private.keys import GroupKey
from isthmus.private.ledger import Budget
from isthmus.private.store import SiloFolder
from isthmus_reproduce import synthetic_text

NAMES = ("east", "north")
CORPUS = synthetic_text.text(20, 4, 2, seed=5, words=30)


@pytest.fixture
def parties(tmp_path: Path) -> dict[str, Party]:
    key = GroupKey.fresh(epoch=1)
    folders = {name: SiloFolder.at(tmp_path / name, create=True) for name in NAMES}
    cards = {name: folder.keys.begin(name).card for name, folder in folders.items()}
    silos = {}
    for (name, folder), silo in zip(folders.items(), CORPUS.silos, strict=True):
        folder.keys.join(key)
        for other in set(NAMES) - {name}:
            folder.keys.trust(cards[other])
        own = CORPUS.silo(silo)
        folder.build(own.documents, budget=Budget(), width=128)
        silos[name] = Party(folder, own.queries, k=3)
    return silos


def begun(parties: dict[str, Party]) -> tuple[ExchangeRelay, dict[str, Turn]]:
    relay = ExchangeRelay(2, 256)
    turns = {name: relay.first() for name in parties}
    return relay, relay.next({name: Exchange(parties[name], turn).reply() for name, turn in turns.items()})


def test_recorded_envelopes_stay_closed_to_whoever_steals_all_keys_later(parties: dict[str, Party]) -> None:
    relay, turns = begun(parties)
    recorded: list[bytes] = []
    copied = SessionKey.in_file(
        parties["north"].folder.path / "exchange" / relay.session.hex() / LETTERS_KEY, relay.session
    )
    while turns:
        replies = {name: Exchange(parties[name], turn).reply() for name, turn in turns.items()}
        recorded += [letter for reply in replies.values() for letter in reply.letters]
        turns = relay.next(replies)
    letters = [data for data in recorded if Envelope.decode(data).receiver == "north"]
    assert len(letters) > 4

    keys = parties["north"].folder.keys
    announced = {"east": relay.keys["east"][:32]}
    stolen = keys.identity(), keys.group_key(), keys.trusted()
    assert not [file for party in parties.values() for file in party.folder.path.rglob(LETTERS_KEY)]
    for session_key in (X25519PrivateKey.generate(), stolen[0].opening):
        thief = Post(*stolen, SessionKey(relay.session, session_key), announced, GuardInMemory())
        for data in letters:
            with pytest.raises(ProtocolError, match="does not open"):
                opened(thief, data)
    there = Post(*stolen, copied, announced, GuardInMemory())  # who stole it in time can
    assert all(opened(there, data) for data in letters)


def opened(post: Post, data: bytes) -> bytes:
    letter = Envelope.decode(data)
    return post.open(data, letter.about) if letter.kind == ANSWER else post.receive(data).message


def test_keys_of_an_exchange_that_was_stopped_go_with_the_next(parties: dict[str, Party]) -> None:
    relay, _ = begun(parties)
    file = parties["north"].folder.path / "exchange" / relay.session.hex() / LETTERS_KEY
    assert file.stat().st_mode & 0o077 == 0
    begun(parties)
    assert not file.exists()
    with pytest.raises(ProtocolError, match="not begun, or is over"):
        SessionKey.in_file(file, relay.session)


def test_a_relay_cannot_bring_keys_of_its_own(parties: dict[str, Party]) -> None:
    relay, turns = begun(parties)
    own = SessionKey(relay.session, X25519PrivateKey.generate())
    signed, east = turns["north"].keys["east"], parties["east"].folder.keys.identity()
    mine = replace(east, signing=parties["north"].folder.keys.identity().signing)
    before = SessionKey(b"another session", own.secret).announced(east)
    for wrong in (own.public + signed[32:], own.announced(mine), before, b"", signed[:-1]):
        turn = replace(turns["north"], keys={**turns["north"].keys, "east": wrong})
        with pytest.raises(ProtocolError, match="has not signed"):
            Exchange(parties["north"], turn).reply()
    assert accepted(signed, relay.session, east.card) == signed[:32]


def test_letters_of_the_format_without_such_keys_are_refused(parties: dict[str, Party]) -> None:
    _, turns = begun(parties)
    letter = Exchange(parties["north"], turns["north"]).reply().letters[0]
    with pytest.raises(ProtocolError, match="another version"):
        Envelope.decode(letter[:4] + b"\x01" + letter[5:])
