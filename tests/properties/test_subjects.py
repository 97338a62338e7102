"""The documents of a subject share one budget: sums against every choice of what one subject may change."""

from __future__ import annotations

import random
import sqlite3
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import BudgetExhausted, DataError
from isthmus.private.cost import Cost, Covered
from isthmus.private.ledger import Budget, Ledger, fingerprint
from isthmus.private.mechanisms import Geometric

DOCUMENTS = [f"letter{number}" for number in range(5)]
FIELDS = (("title",), ("body",), ("title", "body"))
RELEASES = st.lists(
    st.tuples(
        st.sampled_from([0.25, 0.5, 1.0]),
        st.sampled_from(FIELDS),
        st.sets(st.sampled_from(DOCUMENTS), min_size=1),
        st.sampled_from(["north", "south"]),
        st.booleans(),
    ),
    max_size=6,
)
OWNERS = st.lists(st.sampled_from(["ada", "bo", ""]), min_size=5, max_size=5)


def cost_of(number, epsilon, fields, shared):
    return Cost("any", fields, epsilon, 2.0, 1.0, f"release {number}", shared=shared)


def covered(ledger, documents):
    return ledger.versions(list(documents), [fingerprint(f"text of {name}") for name in documents])


def lost_by(subject, owners, releases, peer=None):
    """The most that a change of one word in each document of a subject shows, over all choices of fields."""
    own = [name for name, owner in zip(DOCUMENTS, owners, strict=True) if owner == subject]
    return max(
        sum(
            epsilon
            for epsilon, fields, documents, to, _ in releases
            if peer in (None, to)
            for name, field in zip(own, choice, strict=True)
            if name in documents and field in fields
        )
        for choice in product(("title", "body"), repeat=len(own))
    )


@settings(max_examples=60, deadline=None)
@given(releases=RELEASES, owners=OWNERS, late=st.integers(0, 6), seed=st.integers(0, 99))
def test_a_subject_has_spent_what_its_worst_change_shows(tmp_path_factory, releases, owners, late, seed):
    """Whenever it is said whose documents they are, before or after releases, and in whichever order."""
    folder, spent = tmp_path_factory.mktemp("ledger"), []
    for order in (DOCUMENTS, random.Random(seed).sample(DOCUMENTS, len(DOCUMENTS))):
        with Ledger(folder / f"{len(spent)}", Budget(epsilon=1000.0, subject="patient")) as ledger:
            covered(ledger, order)
            about = dict(zip(DOCUMENTS, owners, strict=True))
            for number, (epsilon, fields, documents, peer, shared) in enumerate(releases):
                if number == late:
                    ledger.assign({name: about[name] for name in order})
                some = covered(ledger, [name for name in order if name in documents])
                ledger.charge(cost_of(number, epsilon, fields, shared), some, peer)
            ledger.assign({name: about[name] for name in order})
            ledger.audit()
            for subject in {"ada", "bo"} & set(owners):
                account = ledger.subject(subject)
                assert account.spent == pytest.approx(lost_by(subject, owners, releases))
                for peer in ("north", "south"):
                    expected = lost_by(subject, owners, releases, peer)
                    assert account.peers.get(peer, 0.0) == pytest.approx(expected)
                assert account.documents == owners.count(subject)
            spent.append([(each.document.split()[0], each.spent) for each in ledger.accounts()])
            assert ledger.summary()["most_spent"] == max((each for _, each in spent[-1]), default=0.0)
    assert sorted(spent[0]) == sorted(spent[1])


@settings(max_examples=60, deadline=None)
@given(releases=RELEASES, owners=OWNERS)
def test_no_release_takes_a_subject_above_its_budget(tmp_path_factory, releases, owners):
    budget = Budget(epsilon=2.0, peers={"south": 1.0}, subject="patient")
    made = []
    with Ledger(tmp_path_factory.mktemp("ledger") / "ledger", budget) as ledger:
        covered(ledger, DOCUMENTS)
        ledger.assign(dict(zip(DOCUMENTS, owners, strict=True)))
        for number, release in enumerate(releases):
            epsilon, fields, documents, peer, shared = release
            documents = sorted(documents)
            rows = before_and_after(ledger, documents)
            try:
                ledger.charge(cost_of(number, epsilon, fields, shared), covered(ledger, documents), peer)
                made.append(release)
            except BudgetExhausted:
                assert before_and_after(ledger, documents) == rows, "nothing is written of what is refused"
                tried = [*made, release]
                units = [["ada"], ["bo"], *([name] for name in DOCUMENTS)]
                assert any(is_above(unit, owners, tried) for (unit,) in units)
            for subject in ("ada", "bo"):
                assert lost_by(subject, owners, made) <= 2.0 + 1e-9
                assert lost_by(subject, owners, made, "south") <= 1.0 + 1e-9
        ledger.audit()


def before_and_after(ledger, documents):
    return [(ledger.spent(name), ledger.left(name)) for name in documents], len(list(ledger.charges()))


def is_above(unit, owners, releases):
    whose = [name if name == unit else owner for name, owner in zip(DOCUMENTS, owners, strict=True)]
    return lost_by(unit, whose, releases) > 2.0 or lost_by(unit, whose, releases, "south") > 1.0


@pytest.mark.parametrize("documents", [1, 2, 3, 7])
def test_a_sum_that_counts_m_documents_shows_m_times_epsilon_of_their_subject(documents):
    """The largest ratio of probabilities of the noisy sum, and what OpenDP says of the same distance."""
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    epsilon = 0.5
    ratio = Geometric(epsilon).ratio  # P(noise = k) is (1 - a)/(1 + a)·a^|k|, so ratios are powers of a
    largest = max(ratio ** abs(k) / ratio ** abs(k - documents) for k in range(-50, 51))
    assert largest == pytest.approx(2.718281828459045 ** (documents * epsilon))
    measurement = dp.m.make_geometric(dp.atom_domain(T=int), dp.absolute_distance(T=int), 1 / epsilon)
    assert measurement.map(documents) == pytest.approx(documents * epsilon)


def test_exact_figures_of_three_letters_in_two_releases(tmp_path):
    """3·1 + 2·0.5 = 4 of a budget of 9; the fourth release, 3·2 = 6, is refused with 5 left."""
    with Ledger(tmp_path / "ledger", Budget(epsilon=9.0, subject="patient")) as ledger:
        three = covered(ledger, DOCUMENTS[:3])
        alone = covered(ledger, DOCUMENTS[3:4])
        ledger.assign(dict.fromkeys(DOCUMENTS[:3], "patient-4711"))
        ledger.charge(cost_of(1, 1.0, ("body",), True), three, "north")
        ledger.charge(cost_of(2, 0.5, ("body",), True), three.take([0, 1]), "north")
        ledger.charge(cost_of(3, 1.0, ("body",), True), alone, "north")
        assert ledger.subject("patient-4711").spent == 4.0
        assert [ledger.spent(name) for name in DOCUMENTS[:4]] == [1.5, 1.5, 1.0, 1.0]
        assert [ledger.left(name) for name in DOCUMENTS[:4]] == [5.0, 5.0, 5.0, 8.0]
        with pytest.raises(BudgetExhausted, match="asks for ε = 6 but only 5 is left"):
            ledger.charge(cost_of(4, 2.0, ("body",), True), three, "south")
        ledger.charge(cost_of(4, 2.0, ("body",), True), three.take([0]), "south")
        assert ledger.subject("patient-4711").spent == 6.0
        assert ledger.subject("nobody") is None
        (first, second) = ledger.accounts()
        assert (first.spent, first.documents, second.document) == (6.0, 3, "letter3")
        assert first.document.startswith("patient ")
        assert ledger.summary()["least_left"] == 3.0
        assert ledger.summary()["unit"] == "patient"
        assert "of a patient" in ledger.summary()["meaning"]
    assert b"patient-4711" not in (tmp_path / "ledger").read_bytes()


def test_a_release_counts_so_many_documents_of_a_subject_and_the_same_ones_in_any_order(tmp_path):
    with Ledger(tmp_path / "ledger", Budget(epsilon=9.0, subject="patient")) as ledger:
        first = covered(ledger, DOCUMENTS)
        ledger.assign(dict.fromkeys(DOCUMENTS[:4], "ada"))
        back = Covered(first.documents[::-1], first.versions[::-1])
        for some in (first, back):
            out = ledger.copies(some, per_subject=2)
            left = [name for name, is_out in zip(some.documents, out, strict=True) if not is_out]
            assert sorted(left) == ["letter0", "letter1", "letter4"]
        assert not ledger.copies(first).any()


def test_who_gets_a_document_that_was_anothers_gets_what_that_one_has_spent(tmp_path):
    with Ledger(tmp_path / "ledger", Budget(epsilon=9.0, subject="patient")) as ledger:
        both = covered(ledger, DOCUMENTS[:2])
        ledger.assign(dict.fromkeys(DOCUMENTS[:2], "ada"))
        ledger.charge(cost_of(1, 1.0, ("body",), True), both.take([0]), "north")
        ledger.assign({DOCUMENTS[1]: "bo"})
        assert ledger.subject("bo").spent == 1.0
        assert ledger.subject("ada").spent == 1.0


def test_a_ledger_from_before_subjects_is_brought_up_in_place(tmp_path):
    """What its documents have spent counts for the subject that they turn out to be about."""
    path = tmp_path / "ledger"
    with Ledger(path, Budget(epsilon=9.0)) as ledger:
        ledger.charge(cost_of(1, 1.5, ("body",), True), covered(ledger, DOCUMENTS[:2]), "north")
    with sqlite3.connect(path) as db:
        db.executescript("DROP TABLE belongs; DROP TABLE subject; DROP TABLE link; PRAGMA user_version = 2")
    db.close()
    with Ledger(path) as ledger:
        ledger.set_budget(Budget(epsilon=9.0, subject="patient"))
        assert [each.spent for each in ledger.accounts()] == [1.5, 1.5]
        ledger.assign(dict.fromkeys(DOCUMENTS[:2], "ada"))
        assert [each.spent for each in ledger.accounts()] == [3.0]
        ledger.audit()


def test_a_document_that_somebody_took_from_its_subject_is_noticed(tmp_path):
    path = tmp_path / "ledger"
    with Ledger(path, Budget(epsilon=9.0, subject="patient")) as ledger:
        covered(ledger, DOCUMENTS)
        ledger.assign(dict.fromkeys(DOCUMENTS[:3], "ada"))
        ledger.audit()
        with sqlite3.connect(path) as db:
            db.execute("DELETE FROM belongs WHERE document = 2")
        db.close()
        with pytest.raises(DataError, match="whose documents are"):
            ledger.audit()


def test_a_lost_ledger_counts_for_every_document_of_a_subject(tmp_path):
    path = tmp_path / "ledger"
    with Ledger(path, Budget(epsilon=9.0, subject="patient")) as ledger:
        covered(ledger, DOCUMENTS)
        ledger.assign(dict.fromkeys(DOCUMENTS[:3], "ada"))
    with Ledger.after_loss(path, spent=2.0, budget=Budget(epsilon=9.0)) as ledger:
        assert ledger.subject("ada").spent == 6.0
        assert ledger.left(DOCUMENTS[0]) == 3.0
        assert ledger.left(DOCUMENTS[4]) == 7.0
