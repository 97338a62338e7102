"""A relay that breaks sessions off, or proposes less noise, and what that may cost the silos' budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from exchanges import exchange_in_memory
from isthmus.cli import main
from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private.exchange import Exchange, ExchangeRelay, Party, Turn
from isthmus.private.keys import GroupKey
from isthmus.private.ledger import Budget
from isthmus.private.store import SiloFolder
from isthmus_reproduce import synthetic_text

NAMES = ("east", "north", "south")
CORPUS = synthetic_text.text(30, 6, 3, seed=5, words=30)
WIDTH = 256


@pytest.fixture
def parties(tmp_path: Path) -> dict[str, Party]:
    """Three silos that trust each other, with the default budget: counts at 8, totals at 1, once."""
    key = GroupKey.fresh(epoch=1)
    folders = {name: SiloFolder.at(tmp_path / name, create=True) for name in NAMES}
    cards = [folder.keys.begin(name).card for name, folder in folders.items()]
    silos = {}
    for (name, folder), silo in zip(folders.items(), CORPUS.silos, strict=True):
        folder.keys.join(key)
        for card in cards:
            if card.name != name:
                folder.keys.trust(card)
        own = CORPUS.silo(silo)
        folder.build(own.documents, budget=Budget(), width=128)
        silos[name] = Party(folder, own.queries, k=3)
    return silos


def stopped(parties: dict[str, Party], after: int, relay: ExchangeRelay | None = None) -> ExchangeRelay:
    """A session that the relay breaks off when silos have done this step, letters withheld."""
    relay = relay or ExchangeRelay(3, WIDTH)
    turns = {name: relay.first() for name in parties}
    for _ in range(after + 1):
        replies = {name: Exchange(parties[name], turn).reply() for name, turn in turns.items()}
        turns = relay.next({name: replace(reply, letters=()) for name, reply in replies.items()})
    return relay


def spent(party: Party) -> float:
    with party.folder.ledger() as ledger:
        return max((account.spent for account in ledger.accounts()), default=0.0)


def incidents(party: Party) -> Sequence[str]:
    with party.folder.ledger() as ledger:
        return [row["note"] for row in ledger.departures() if row["kind"] == "incident"]


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_sessions_that_are_stopped_cost_nothing(parties: dict[str, Party], step: int) -> None:
    """However often: the sum cannot be opened without this silo's shares, which it has not given."""
    for _ in range(3):
        stopped(parties, step)
    assert [spent(party) for party in parties.values()] == [0.0] * 3
    relay = exchange_in_memory(parties, ExchangeRelay(3, WIDTH))
    assert relay.done == set(NAMES)
    assert all(parties["north"].features(peer).exists() for peer in ("east", "south"))
    assert [spent(party) for party in parties.values()] == [9.0] * 3


@pytest.mark.soak
def test_sums_that_are_opened_again_and_again_leave_the_counts_their_budget(
    parties: dict[str, Party], soak_count: Callable[[int, int], int]
) -> None:
    """A relay that has what it wanted, and withholds it, gets it once; then silos refuse, and say so."""
    stopped(parties, 4)
    for _ in range(soak_count(2, 20)):
        with pytest.raises(PrivacyError, match="no room for another sum"):
            stopped(parties, 4)
    for party in parties.values():
        assert spent(party) == 1.0
        with party.folder.ledger() as ledger:
            counts = party.folder.owner("body", 8.0, ledger.charge_all)
            ledger.charge_all(counts.charges(counts.no_columns, "anybody"))
    assert [spent(party) for party in parties.values()] == [9.0] * 3


@pytest.mark.parametrize("ending", ["over", "another session"])
def test_a_session_that_begins_again_under_its_name_costs_again(
    parties: dict[str, Party], ending: str
) -> None:
    """Its noise is fresh, and the relay could average it away: the name of a session is the relay's word."""
    opened = stopped(parties, 4, ExchangeRelay(3, WIDTH, session=bytes(16)))
    assert [spent(party) for party in parties.values()] == [1.0] * 3
    if ending == "over":
        for party in parties.values():
            Exchange(party, replace(opened.first(), step=5, over=True)).reply()
    else:
        stopped(parties, 0)
    for party in parties.values():
        assert "stopped after its sum was charged" in incidents(party)[0]
    with pytest.raises(PrivacyError, match="no room for another sum"):
        stopped(parties, 4, ExchangeRelay(3, WIDTH, session=bytes(16)))


def test_what_was_broken_off_or_refused_is_said_aloud(
    parties: dict[str, Party],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped(parties, 2)
    stopped(parties, 4)
    with pytest.raises(PrivacyError):
        stopped(parties, 4)
    first, second, third = incidents(parties["east"])
    assert "stopped before its sum was opened" in first
    assert "stopped after its sum was charged" in second
    assert "refused a sum of totals" in third
    assert "refused a sum of totals" in caplog.text
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "120")
    main(["ledger", "show", str(parties["east"].folder.path / "silo.ledger")])
    shown = capsys.readouterr().out
    assert "incident" in shown
    assert "nothing left" in shown


def test_the_keys_of_a_session_that_was_stopped_are_gone_with_the_next(parties: dict[str, Party]) -> None:
    before = stopped(parties, 2)
    path = parties["north"].folder.path / "exchange" / before.session.hex()
    assert list(path.glob("*.member"))
    stopped(parties, 0)
    assert not list(path.glob("*.member"))


@pytest.mark.parametrize(
    ("own", "said"), [({"least_colluding": 2}, "this silo's least is 2"), ({"most_width": 64}, "most is 64")]
)
def test_a_silo_has_its_own_least_noise_and_widest_sketch(
    parties: dict[str, Party], own: dict[str, int], said: str
) -> None:
    party = replace(parties["north"], **own)
    relay = ExchangeRelay(3, WIDTH)
    with pytest.raises(ProtocolError, match=said):
        Exchange(party, relay.first()).reply()
    turns = {name: relay.first() for name in parties}
    turns = relay.next({name: Exchange(parties[name], turn).reply() for name, turn in turns.items()})
    with pytest.raises(ProtocolError, match=said):  # not later either
        Exchange(party, turns["north"]).reply()


def test_silos_with_different_terms_sign_nothing_together(parties: dict[str, Party]) -> None:
    """North is told of two colluding silos and draws larger shares, the others of one."""
    relay = ExchangeRelay(3, WIDTH)
    turns = {name: relay.first() for name in parties}

    def lied(turns: dict[str, Turn]) -> dict[str, Turn]:
        north = turns["north"]
        return turns | {"north": replace(north, agreed=replace(north.agreed, colluding=2))}

    for _ in range(4):
        told = lied(turns) if relay.step == 2 else turns
        turns = relay.next({name: Exchange(parties[name], turn).reply() for name, turn in told.items()})
    with pytest.raises(ProtocolError, match="too few members have signed"):
        Exchange(parties["east"], turns["east"]).reply()
    assert spent(parties["east"]) in (0.0, 8.0)
