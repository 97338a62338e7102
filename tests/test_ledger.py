"""The ledger: what is charged when, what is refused, what is told, and what a file may be."""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import BudgetExhausted, ConfigError, DataError, PrivacyError
from isthmus.private.cost import Cost, Covered, PrivacyLoss
from isthmus.private.counts import CountRelease, Owner
from isthmus.private.ledger import KINDS, NO_GUARANTEE, Budget, Ledger, fingerprint
from isthmus.private.ledger import store as ledger_store
from isthmus.private.mechanisms import Mechanism, NoiseKey, OneShot, Scalar
from isthmus.private.messages import CountsQuestion
from isthmus.private.sketch import HashFamily
from isthmus.text import tokenise


def cost(epsilon: float = 1.0, release: str = "body", *, shared: bool = True, fields=("body",)) -> Cost:
    mechanism = "one_shot" if shared else "scalar"
    return Cost(
        mechanism, fields, epsilon, sensitivity=2.0, scale=2 / epsilon, release=release, shared=shared
    )


def covering(*documents: str) -> Covered:
    """One version for each, its name made from the document's for the reader's sake."""
    return Covered(documents, tuple(f"{name}#1" for name in documents))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "silo.ledger"


@pytest.fixture
def ledger(path: Path):
    with Ledger(path, Budget(epsilon=9.0)) as opened:
        yield opened


def test_a_charge_is_spent_and_the_rest_is_left(ledger: Ledger) -> None:
    ledger.charge(cost(8), covering("a", "b"), "north")
    assert ledger.spent("a") == ledger.spent("b") == 8
    assert ledger.left("a") == 1
    assert ledger.spent("elsewhere") == 0
    assert ledger.left("elsewhere") == 9


def test_a_release_that_would_overspend_is_refused_and_leaves_no_trace(ledger: Ledger) -> None:
    ledger.charge(cost(8), covering("a"), "north")
    before = list(ledger.departures()), list(ledger.charges()), ledger.summary()
    with pytest.raises(BudgetExhausted) as refused:
        ledger.charge(cost(2, "more"), covering("b", "a", "c"), "south")
    assert (refused.value.peer, refused.value.requested, refused.value.left) == ("south", 2, 1)
    assert (list(ledger.departures()), list(ledger.charges()), ledger.summary()) == before
    assert ledger.spent("b") == 0, "one document's refusal is the whole batch's"
    ledger.charge(cost(1, "more"), covering("a"), "south")
    assert ledger.left("a") == 0


def test_shared_noise_costs_once_for_all_peers_and_versions(ledger: Ledger) -> None:
    for peer in ("north", "south", "west", "south"):
        ledger.charge(cost(8), covering("a"), peer)
    assert ledger.spent("a") == 8
    assert [ledger.spent("a", peer=peer) for peer in ("north", "south", "east")] == [8, 8, 0]


def test_own_noise_adds_up_over_peers_but_a_repeated_answer_is_free(ledger: Ledger) -> None:
    for peer in ("north", "south", "north"):
        ledger.charge(cost(2, "word 17", shared=False), covering("a"), peer)
    assert ledger.spent("a") == 4
    assert ledger.spent("a", peer="north") == 2


def test_a_changed_document_is_charged_on_top(ledger: Ledger) -> None:
    first = ledger.versions(["a"], [fingerprint("title", "old")])
    ledger.charge(cost(5), first, "north")
    assert ledger.versions(["a"], [fingerprint("title", "old")]) == first
    second = ledger.versions(["a"], [fingerprint("title", "new")])
    assert second.versions != first.versions
    with pytest.raises(BudgetExhausted):
        ledger.charge(cost(5), second, "north")
    ledger.charge(cost(4), second, "north")
    assert ledger.left("a") == 0
    back = ledger.versions(["a"], [fingerprint("title", "old")])
    assert back.versions not in (first.versions, second.versions), "its noise is never used again"
    (account,) = ledger.accounts()
    assert (account.document, account.versions) == ("a", 3)


def test_fields_compose_in_parallel(ledger: Ledger) -> None:
    ledger.charge(cost(8, "body", fields=("body",)), covering("a"), "north")
    ledger.charge(cost(8, "title", fields=("title",)), covering("a"), "north")
    assert ledger.spent("a") == 8
    ledger.charge(cost(0.5, "df 1", fields=("title", "body")), covering("a"), "north")
    assert ledger.spent("a") == 8.5
    ledger.charge(cost(0.5, "title length", fields=("title",)), covering("a"), "north")
    assert (ledger.spent("a", field="title"), ledger.spent("a", field="body")) == (9, 8.5)
    assert (ledger.left("a", field="title"), ledger.left("a", field="body"), ledger.left("a")) == (0, 0.5, 0)


def test_a_refresh_charges_every_document_again(ledger: Ledger) -> None:
    for refresh in range(18):
        ledger.charge(cost(0.5, f"df refresh {refresh}"), covering("a", "b"), "the sum", kind="sums")
    with pytest.raises(BudgetExhausted):
        ledger.charge(cost(0.5, "df refresh 18"), covering("a", "b"), "the sum", kind="sums")


def test_peers_have_limits_below_the_budget(path: Path) -> None:
    with Ledger(path, Budget(epsilon=9, per_peer=4, peers={"friend": 8})) as ledger:
        ledger.charge(cost(4, "w1", shared=False), covering("a"), "north")
        with pytest.raises(BudgetExhausted) as refused:
            ledger.charge(cost(1, "w2", shared=False), covering("a"), "north")
        assert (refused.value.peer, refused.value.left) == ("north", 0)
        assert ledger.left("a", peer="north") == 0
        assert ledger.left("a", peer="friend") == 5, "the budget is for all peers together"
        ledger.charge(cost(5, "w2", shared=False), covering("a"), "friend")
        assert ledger.left("a") == 0


def test_shared_noise_counts_towards_every_peer_that_sees_it(path: Path) -> None:
    with Ledger(path, Budget(epsilon=9, per_peer=4)) as ledger:
        ledger.charge(cost(3), covering("a"), "north")
        ledger.charge(cost(3), covering("a"), "south")
        assert (ledger.spent("a"), ledger.spent("a", peer="south")) == (3, 3)
        with pytest.raises(BudgetExhausted):
            ledger.charge(cost(2, "more", shared=False), covering("a"), "south")


def test_another_epsilon_under_the_same_name_is_another_release(ledger: Ledger) -> None:
    ledger.charge(cost(2), covering("a"), "north")
    ledger.charge(cost(3), covering("a"), "north")
    assert ledger.spent("a") == 5


def test_several_releases_are_charged_together_or_not_at_all(ledger: Ledger) -> None:
    documents = covering("a", "b")
    ledger.charge(cost(3), covering("b"), "north")
    costs = [cost(4, "w1"), cost(4, "w2")]
    with pytest.raises(BudgetExhausted):
        ledger.charge_all((one, documents, "north") for one in costs)
    assert (ledger.spent("a"), ledger.spent("b")) == (0, 3)
    ledger.charge_all((one, covering("a"), peer) for one in costs for peer in ("north", "south"))
    assert ledger.spent("a") == 8


def test_a_document_named_twice_is_charged_once(ledger: Ledger) -> None:
    ledger.charge(cost(5), covering("a", "a"), "north")
    assert ledger.spent("a") == 5


def test_two_versions_in_one_batch_are_both_charged(ledger: Ledger) -> None:
    both = Covered(["a", "a"], ["a#1", "a#2"])
    with pytest.raises(BudgetExhausted) as refused:
        ledger.charge(cost(5), both, "north")
    assert refused.value.requested == 10
    ledger.charge(cost(4), both, "north")
    assert ledger.spent("a") == 8


def test_noise_of_one_document_may_not_serve_another(ledger: Ledger) -> None:
    with pytest.raises(PrivacyError, match="share a version"):
        ledger.charge(cost(), Covered(["a", "b"], ["same", "same"]), "north")
    ledger.charge(cost(), Covered(["a"], ["same"]), "north")
    with pytest.raises(PrivacyError, match="belongs to one document"):
        ledger.charge(cost(), Covered(["b"], ["same"]), "north")


def test_nothing_covered_costs_nothing(ledger: Ledger) -> None:
    ledger.charge(cost(100), Covered([], []), "north")
    assert list(ledger.departures()) == []


def test_no_privacy_needs_an_infinite_budget(tmp_path: Path) -> None:
    exposed = Cost("insecure_shared_noise", ("body",), math.inf, sensitivity=2, scale=1, release="paper")
    with Ledger(tmp_path / "a", Budget(epsilon=100)) as ledger, pytest.raises(BudgetExhausted):
        ledger.charge(exposed, covering("a"), "north")
    with Ledger(tmp_path / "b", Budget(epsilon=math.inf)) as ledger:
        ledger.charge(exposed, covering("a"), "north")
        ledger.charge(cost(1, "more"), covering("a"), "north")
        assert ledger.spent("a") == ledger.left("a") == math.inf
        ledger.audit()
        assert ledger.budget == Budget(epsilon=math.inf)


@pytest.mark.parametrize(("rule", "times"), [("basic", 16), ("advanced", 18), ("zcdp", 33)])
def test_composition_lets_many_small_releases_through(path: Path, rule, times: int) -> None:
    delta = 0.0 if rule == "basic" else 1e-3
    assert (PrivacyLoss.of(0.06) * times).at(delta=delta, rule=rule) <= 1
    assert (PrivacyLoss.of(0.06) * (times + 1)).at(delta=delta, rule=rule) > 1
    with Ledger(path, Budget(epsilon=1.0, delta=delta, rule=rule)) as ledger:
        for number in range(times):
            ledger.charge(cost(0.06, f"w{number}"), covering("a"), "north")
        with pytest.raises(BudgetExhausted) as refused:
            ledger.charge(cost(0.06, "one more"), covering("a"), "north")
        assert ledger.spent("a") == pytest.approx((PrivacyLoss.of(0.06) * times).at(delta=delta, rule=rule))
        assert ledger.left("a") == refused.value.left < refused.value.requested
        ledger.audit()


def test_ten_tenths_are_one(path: Path) -> None:
    with Ledger(path, Budget(epsilon=1.0)) as ledger:
        for number in range(10):
            ledger.charge(cost(0.1, f"w{number}"), covering("a"), "north")
        assert ledger.left("a") == pytest.approx(0, abs=1e-9)
        with pytest.raises(BudgetExhausted):
            ledger.charge(cost(1e-6, "w10"), covering("a"), "north")


def test_a_charge_leaves_room_for_what_is_reserved(ledger: Ledger) -> None:
    """Nine in all: eight are set aside, so of three charges of a half two are booked."""
    covered, counts = covering("a"), cost(8.0, "counts")
    for at in range(2):
        ledger.charge_all([(cost(0.5, f"sum {at}"), covered, "north")], reserve=[(counts, covered, "south")])
    with pytest.raises(BudgetExhausted):
        ledger.charge_all([(cost(0.5, "sum 2"), covered, "north")], reserve=[(counts, covered, "south")])
    assert ledger.spent("a") == 1.0
    ledger.charge(counts, covered, "south")
    assert ledger.spent("a") == 9.0
    ledger.charge_all([], reserve=[(counts, covered, "south")])  # paid, so nothing needs to be left
    with pytest.raises(BudgetExhausted):
        ledger.charge_all([], reserve=[(cost(0.5, "sum 3"), covered, "north")])
    ledger.audit()


def test_an_incident_is_nothing_that_left(ledger: Ledger) -> None:
    ledger.record("incident", "relay", note="session 0011 was stopped")
    (row,) = ledger.departures()
    assert (row["guarantee"], row["note"]) == ("nothing left", "session 0011 was stopped")
    assert ledger.summary()["incidents"] == ["session 0011 was stopped"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "incident"])
def test_everything_else_that_leaves_is_written_down(ledger: Ledger, kind: str) -> None:
    ledger.record(kind, "broker", items=3, note="round 2")
    ledger.record(kind, "broker", epsilon=0.5, unit="one judged query")
    bare, noised = ledger.departures()
    assert (bare["kind"], bare["peer"], bare["items"], bare["note"]) == (kind, "broker", 3, "round 2")
    assert (bare["epsilon"], bare["guarantee"]) == (None, NO_GUARANTEE)
    assert (noised["guarantee"], noised["unit"]) == ("ε = 0.5", "one judged query")


def test_what_is_written_down_must_be_known_and_meant(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="did you mean 'snippets'"):
        ledger.record("snippet", "broker")
    with pytest.raises(PrivacyError, match="name the unit"):
        ledger.record("feedback", "broker", epsilon=1.0)
    with pytest.raises(PrivacyError, match="name the peer"):
        ledger.record("feedback", "")
    with pytest.raises(PrivacyError, match="name the peer"):
        ledger.charge(cost(), covering("a"), "")


def test_accounts_and_summary(path: Path) -> None:
    moments = iter(range(1_700_000_000, 1_700_000_100))
    with Ledger(path, Budget(), clock=lambda: float(next(moments))) as ledger:
        ledger.charge(cost(8), covering("a", "b"), "north", kind="sketch")
        ledger.charge(cost(8), covering("a"), "south")
        ledger.charge(cost(0.5, "df", fields=("title", "body")), covering("b"), "north", kind="sums")
        ledger.record("snippets", "broker", items=10)
        dear, cheap = ledger.accounts()
        assert (dear.document, dear.spent, dear.left) == ("b", 8.5, 0.5)
        assert dear.fields == {"body": 8.5, "title": 0.5}
        assert cheap.peers == {"north": 8, "south": 8}
        assert [account.document for account in ledger.accounts(1)] == ["b"]
        told = ledger.summary()
        assert (told["documents"], told["versions"], told["charges"]) == (2, 2, 4)
        assert (told["most_spent"], told["least_left"]) == (8.5, 0.5)
        kinds = [(row["kind"], row["items"], row["charged"], row["guarantee"]) for row in told["departures"]]
        assert kinds == [
            ("sketch", 2, 2, "ε = 8"),
            ("counts", 1, 0, "ε = 8"),
            ("sums", 1, 1, "ε = 0.5"),
            ("snippets", 10, 0, NO_GUARANTEE),
        ]
        history = list(ledger.charges("b"))
        assert [row["release"] for row in history] == ["body", "df"]
        assert history[0]["at"] == "2023-11-14T22:13:20.000+00:00"
        assert len(list(ledger.charges())) == 4
        assert "b#1" not in str(history), "a version's name is its nonce, which stays inside"


def test_a_second_opening_keeps_the_budget(path: Path) -> None:
    with Ledger(path, Budget(epsilon=3)) as first:
        first.charge(cost(2), covering("a"), "north")
        with pytest.raises(ConfigError, match="has a budget of ε = 3, not ε = 9"):
            Ledger(path, Budget(epsilon=9))
        with Ledger(path) as second:
            assert second.budget == Budget(epsilon=3)
            assert second.spent("a") == 2
            second.set_budget(Budget(epsilon=4, per_peer=2.5))
        with pytest.raises(BudgetExhausted):
            first.charge(cost(1, "more"), covering("a"), "north")
        first.charge(cost(2, "more"), covering("a"), "south")
        assert first.left("a") == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epsilon": 0}, "allows nothing"),
        ({"epsilon": math.nan}, "allows nothing"),
        ({"rule": "advnced"}, "did you mean 'advanced'"),
        ({"rule": "zcdp"}, "needs a δ"),
        ({"delta": 1e-6}, "basic composition has δ = 0"),
        ({"per_peer": 10}, "lies above the budget of 9"),
        ({"peers": {"north": 11}}, "peers.north = 11 lies above"),
        ({"peers": {"north": -1}}, "allows nothing"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(settings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Budget(**settings)


def test_a_budget_says_itself() -> None:
    told = str(Budget(epsilon=9, rule="zcdp", delta=1e-6, per_peer=4, peers={"south": 2}))
    assert told == "ε = 9 at δ = 1e-06 (zcdp), 4 for any one peer, 2 for south"


def test_a_ledger_is_for_its_owner_only(ledger: Ledger, path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_missing_ledger_is_not_made_by_looking(path: Path) -> None:
    with pytest.raises(DataError, match="there is no ledger"):
        Ledger(path)
    assert not path.exists()


def test_who_was_killed_while_beginning_left_nothing_in_the_way(path: Path) -> None:
    path.touch()
    with pytest.raises(DataError, match="without a budget"):
        Ledger(path)
    with Ledger(path, Budget(epsilon=math.inf, per_peer=math.inf)) as ledger:
        assert ledger.left("a", peer="north") == math.inf


@pytest.mark.parametrize("written", ["not a database at all, but long enough to be one " * 20, "short"])
def test_a_file_that_is_no_ledger(path: Path, written: str) -> None:
    path.write_text(written)
    with pytest.raises(DataError, match=r"silo\.ledger: no readable ledger: file is not a database"):
        Ledger(path, Budget())
    assert path.read_text() == written


def test_a_database_that_is_no_ledger(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE cake (layers)")
    other.close()
    with pytest.raises(DataError, match="a database, but no ledger"):
        Ledger(path, Budget())


def test_a_newer_ledger_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(path, Budget()) as ledger:
        ledger.charge(cost(), covering("a"), "north")
    later = ("ALTER TABLE departure ADD COLUMN asked_by TEXT NOT NULL DEFAULT 'nobody'",)
    with monkeypatch.context() as patch:
        patch.setattr(ledger_store, "MIGRATIONS", (*ledger_store.MIGRATIONS, later))
        with Ledger(path) as migrated:
            assert migrated.spent("a") == 1, "what an older Isthmus wrote is carried over"
            migrated.charge(cost(1, "more"), covering("a"), "north")
        with Ledger(path) as again:
            assert again.spent("a") == 2
    known = len(ledger_store.MIGRATIONS)
    with pytest.raises(
        DataError, match=rf"format {known + 1}, this Isthmus knows {known} \(a newer Isthmus wrote it"
    ):
        Ledger(path)


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(path, Budget()).close()
    broken = ("CREATE TABLE half (done)", "CREATE TABLE half (done)")
    with monkeypatch.context() as patch:
        patch.setattr(ledger_store, "MIGRATIONS", (*ledger_store.MIGRATIONS, broken))
        with pytest.raises(PrivacyError, match="half already exists"):
            Ledger(path)
    with Ledger(path) as ledger:
        ledger.charge(cost(), covering("a"), "north")


def test_the_audit_finds_what_was_changed_by_hand(ledger: Ledger, path: Path) -> None:
    ledger.charge(cost(2), covering("a", "b"), "north")
    ledger.charge(cost(1, "w", shared=False), covering("a"), "south")
    ledger.audit()
    for tampering in (
        "UPDATE spent SET rho = rho / 2 WHERE peer = 0 AND document = 2",
        "UPDATE spent SET epsilon = 1 WHERE peer = 0 AND document = 1",
        "DELETE FROM spent WHERE document = 2 AND peer = 0",
    ):
        with sqlite3.connect(path) as other:
            other.execute(tampering)
        with pytest.raises(DataError, match="not those of the charges"):
            ledger.audit()


@pytest.mark.parametrize(
    ("tampering", "named"),
    [
        ("DELETE FROM charge WHERE version = 2", "departure 1 .* entry 2 .* its charges"),
        ("UPDATE departure SET epsilon = 0.1 WHERE id = 2", "departure 2 .* entry 3 of the ledger has it"),
        ("UPDATE departure SET items = 1 WHERE id = 3", "departure 3 .* entry 4"),
        ("DELETE FROM departure WHERE id = 3", "departure 3, entry 4 of the ledger, was taken out"),
        (
            "UPDATE link SET event = replace(event, 'south', 'north') WHERE number = 3",
            "entry 3 .* was changed",
        ),
        ("DELETE FROM link WHERE number = 4", "entry 4 of the ledger is missing"),
        (
            "INSERT INTO departure SELECT 9, at, kind, peer, release, items, charged, epsilon, unit, note"
            " FROM departure WHERE id = 3",
            "departure 9 .* no entry",
        ),
        ("DELETE FROM link WHERE number > 4; DELETE FROM departure WHERE id > 3", "ends with entry 4, .* 7"),
        ("UPDATE setting SET value = 'x' WHERE name = 'nothing'", ""),
    ],
)
def test_the_first_entry_that_was_changed_is_named(
    ledger: Ledger, path: Path, tampering: str, named: str
) -> None:
    ledger.charge(cost(2), covering("a", "b"), "north")
    ledger.charge(cost(1, "w", shared=False), covering("a"), "south")
    ahead = ledger.record("snippets", "south", items=64)
    ledger.lower({ahead: 10})
    ledger.erase(["a"])
    name, number, hash = ledger.anchor("audit", 17, "ab" * 32)
    assert (name, number) == (ledger.name, 7)
    assert ledger.anchors("audit") == {17: "ab" * 32}
    with sqlite3.connect(path) as other:
        other.executescript(tampering)
    if not named:
        assert ledger.audit({number: hash}) == 7
        return
    with pytest.raises(DataError, match=named):
        ledger.audit({number: hash})


def test_a_chain_that_was_built_anew_differs_from_the_head_that_the_log_has(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path / name, Budget(), clock=lambda: 1.0) for name in ("true.db", "false.db")]
    heads = []
    for ledger, items in zip(ledgers, (9, 1), strict=True):
        ledger.record("snippets", "north", items=items)
        _, number, hash = ledger.anchor("audit", 1, "ab" * 32)
        heads.append({number: hash})
    assert ledgers[1].audit(heads[1]) == 3
    with pytest.raises(DataError, match="entry 3 of the ledger is another than the one that the audit log"):
        ledgers[1].audit(heads[0])
    for ledger in ledgers:
        ledger.close()


def test_a_ledger_of_an_older_isthmus_begins_its_chain_where_it_is(path: Path, monkeypatch) -> None:
    with monkeypatch.context() as older:
        older.setattr("isthmus.private.ledger.chain.link", lambda db, event: (0, ""))
        with Ledger(path, Budget()) as ledger:
            ledger.record("snippets", "north", items=9)
    with Ledger(path) as ledger:
        ledger.audit()
        ledger.record("snippets", "north", items=3)
        assert ledger.audit() == 2


def test_a_ledger_held_by_another_process_lets_nothing_leave(path: Path) -> None:
    with Ledger(path, Budget(), patience=0.05) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(PrivacyError, match=r"held the ledger for 0\.05 s; nothing may leave") as refused:
            ledger.charge(cost(), covering("a"), "north")
        assert str(path.parent) not in str(refused.value), "peers read these words"
        assert ledger.spent("a") == 0, "readers do not wait"
        other.execute("ROLLBACK")
        ledger.charge(cost(), covering("a"), "north")


def test_a_full_disk_lets_nothing_leave(ledger: Ledger) -> None:
    ledger.charge(cost(), covering("a"), "north")
    db = ledger._store._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={pages}")
    many = covering(*(f"document {number}" for number in range(2000)))
    with pytest.raises(PrivacyError, match=r"full.*nothing may leave"):
        ledger.charge(cost(), many, "north")
    db.execute("PRAGMA max_page_count=1000000")
    assert ledger.spent("document 7") == 0
    ledger.audit()
    ledger.charge(cost(), many, "north")


def test_threads_share_a_ledger(ledger: Ledger) -> None:
    refused = []

    def ask(peer: str) -> None:
        for number in range(20):
            try:
                ledger.charge(cost(0.5, f"w{number}", shared=False), covering("a", "b"), peer)
            except BudgetExhausted:
                refused.append(peer)

    threads = [threading.Thread(target=ask, args=(f"peer {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.spent("a") == ledger.spent("b") == 9
    assert len(refused) == 4 * 20 - 18
    ledger.audit()


def test_two_processes_cannot_spend_the_same_budget_twice(path: Path) -> None:
    script = f"""
from isthmus.errors import BudgetExhausted
from isthmus.private.cost import Cost, Covered
from isthmus.private.ledger import Budget, Ledger
import sys
ledger = Ledger({str(path)!r}, Budget(epsilon=10))
print("open", flush=True)
sys.stdin.readline()
done = 0
for number in range(60):
    cost = Cost("scalar", ("body",), 0.25, 2.0, 8.0, f"w{{number}}", shared=False)
    try:
        ledger.charge(cost, Covered(["a"], ["a#1"]), sys.argv[1])
        done += 1
    except BudgetExhausted:
        pass
print(done)
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, f"peer {number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for child in children:
        assert child.stdout.readline() == "open\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    done = [int(child.communicate(timeout=240)[0]) for child in children]
    assert sum(done) == 40
    with Ledger(path) as ledger:
        assert ledger.spent("a") == 10
        ledger.audit()


def test_a_ledger_that_another_process_creates_meanwhile_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(sqlite3.Connection):
        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            cursor = super().execute(sql, *values)
            if sqlite3.connect is connect or "application_id" not in sql:
                return cursor
            (number,) = cursor.fetchone()
            cursor.close()
            monkeypatch.setattr(sqlite3, "connect", connect)
            Ledger(path, Budget(epsilon=10)).close()
            return super().execute(f"SELECT {number}")

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Interrupted, **k))
    with Ledger(path, Budget(epsilon=10)) as ledger:
        ledger.audit()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_ledger_does_not_survive_a_fork(ledger: Ledger) -> None:
    child = os.fork()
    if child == 0:
        try:
            ledger.spent("a")
        except PrivacyError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_reading_while_charging(ledger: Ledger) -> None:
    ledger.charge(cost(1), covering("a", "b"), "north")
    seen = []
    for row in ledger.charges():
        ledger.charge(cost(1, f"w{len(seen)}"), covering("c"), "north")
        seen.append(row["document"])
    assert sorted(seen) == ["a", "b"]


def test_nonces_come_from_the_entropy_and_never_from_the_text(path: Path) -> None:
    with Ledger(path, Budget(), entropy=lambda size: bytes(range(size))) as ledger:
        pair = ledger.versions(["a", "b"], [fingerprint("same")] * 2)
        assert pair.versions == (bytes(range(16)).hex(), bytes(range(16, 32)).hex())
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    with Ledger(path) as ledger:
        assert ledger.versions(["a", "b"], [fingerprint("same")] * 2) == pair
        with pytest.raises(PrivacyError, match="distinct documents"):
            ledger.versions(["a", "a"], [b"1", b"2"])


# with the counts that are released


def owner(ledger: Ledger, key: NoiseKey, texts: list[str], kind: Mechanism) -> Owner:
    names = [f"north/{number}" for number in range(len(texts))]
    covered = ledger.versions(names, [fingerprint(text) for text in texts])
    family = HashFamily(b"\x05" * 32, rows=kind.rows, width=64)
    return Owner.of(tokenise(texts), covered, CountRelease("body", family, kind, key, ledger.charge_all))


def test_published_counts_are_charged_once_until_text_or_key_change(ledger: Ledger) -> None:
    texts, key, kind = ["red apples", "a green pear"], NoiseKey.fresh(), OneShot(epsilon=4.0)
    first = owner(ledger, key, texts, kind)
    for peer in ("south", "west", "south"):
        first.publish(0, peer)
    assert ledger.spent("north/0") == ledger.spent("north/1") == 4
    again = owner(ledger, key, texts, kind)
    assert np.array_equal(again.publish(0, "south").values, first.publish(0, "south").values)
    assert ledger.spent("north/0") == 4, "after a restart the same values cost nothing"
    owner(ledger, key, ["red apples", "a ripe pear"], kind).publish(0, "south")
    assert (ledger.spent("north/0"), ledger.spent("north/1")) == (4, 8)
    with pytest.raises(BudgetExhausted):
        owner(ledger, NoiseKey.fresh(), texts, kind).publish(0, "south")


def test_a_question_that_is_refused_is_not_answered(ledger: Ledger) -> None:
    kind = Scalar(epsilon=4.0, rows=1)
    asked = owner(ledger, NoiseKey.fresh(), ["red apples"], kind)
    columns = np.arange(3, dtype=np.uint32)[:, None]
    asked.answer(CountsQuestion(asked.release.terms, 0, columns[:1]), "south")
    asked.answer(CountsQuestion(asked.release.terms, 0, columns[:1]), "west")
    assert ledger.spent("north/0") == 8, "each peer has noise of its own"
    with pytest.raises(BudgetExhausted) as refused:
        asked.answer(CountsQuestion(asked.release.terms, 1, columns), "west")
    assert refused.value.left == 1
    assert ledger.spent("north/0", peer="west") == 4
