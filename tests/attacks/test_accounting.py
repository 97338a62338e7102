"""Ways around the ledger: new names for old texts, copies, a ledger that forgets, words that stand twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import BudgetExhausted
from isthmus.private.cost import Cost, Covered
from isthmus.private.counts import fetch_catalogue, fetch_published, in_memory
from isthmus.private.ledger import Budget, Ledger, fingerprint, schema
from isthmus.private.store import SiloFolder
from isthmus.service.figures import TEXT, family_of
from isthmus.service.settings import NodeSettings
from isthmus.service.stores import Draft
from isthmus.tables import Documents
from isthmus.tables.ids import frozen
from private_node import PEER, node, private_settings, released, texts

SECRET = (
    "the contract with the harbour of Esbjerg ends in May unless both sides sign again before the tide turns"
)
OTHERS = [
    f"a note of its own about matter number {number} and nothing that stands anywhere else"
    for number in range(6)
]


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    return private_settings(tmp_path / "north")


def documents(**bodies: str) -> Documents:
    """Documents by name, whose title is the name, as with files that have no heading."""
    names = tuple(bodies)
    return Documents(names, names, tuple(bodies.values()), frozen(np.zeros(len(names), dtype=np.int64)))


def shared(epsilon: float, release: str) -> Cost:
    return Cost("one_shot", ("body",), epsilon, 2.0, 2 / epsilon, release)


# ---------------------------------------------------------------- a new name for an old text


def test_a_renamed_document_gets_no_new_budget(tmp_path: Path, soak_count) -> None:
    """The attack: name a file anew, have it sketched and published, average over the noise."""
    folder, seen = SiloFolder.at(tmp_path / "south", create=True), []
    for name in range(soak_count(6, 40)):
        folder.build(
            documents(**{f"name{name}": SECRET}), ("body",), budget=Budget(4.0) if not name else None
        )
        with folder.ledger() as ledger:
            carrier = in_memory(folder.desk(1.0, ledger, ("body",)), "north")
            try:
                catalogue = fetch_catalogue(carrier, "body")
                family = folder.keys.group_key().family("body", width=catalogue.terms.width)
                seen.append(fetch_published(carrier, catalogue, family).dense())
            except BudgetExhausted:
                continue
    assert len(seen) == 4, "ε = 1 a name, of one budget of 4"
    with folder.ledger() as ledger:
        assert {ledger.spent(f"name{name}") for name in range(6)} == {4.0}
        ledger.audit()


@pytest.mark.parametrize(
    ("title", "body"),
    [
        ("another title", SECRET),
        ("name", "  " + SECRET.replace(" ", "\n\n")),
        ("name", SECRET.upper()),
        ("name", "> *" + SECRET.replace(" ", " *") + "!"),
    ],
    ids=["title", "spaces", "case", "markup"],
)
def test_a_text_is_known_whatever_is_done_to_its_looks(tmp_path: Path, title: str, body: str) -> None:
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        ledger.charge(shared(3.0, "first"), ledger.versions(["old"], [fingerprint("name", SECRET)]), "north")
        again = ledger.versions(["new"], [fingerprint(title, body)])
        with pytest.raises(BudgetExhausted):
            ledger.charge(shared(3.0, "second"), again, "north")
        ledger.charge(shared(1.0, "second"), again, "north")
        assert ledger.left("old") == ledger.left("new") == 0
        assert again.versions != ledger.versions(["old"], [fingerprint("name", SECRET)]).versions
        ledger.audit()


def test_a_renamed_document_that_is_then_edited_stays_in_its_lineage(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        ledger.charge(shared(4.0, "first"), ledger.versions(["old"], [fingerprint("", SECRET)]), "north")
        ledger.versions(["new"], [fingerprint("", SECRET)])
        edited = ledger.versions(["new"], [fingerprint("", SECRET + " and then some")])
        with pytest.raises(BudgetExhausted):
            ledger.charge(shared(1.0, "second"), edited, "north")


def test_a_text_under_the_name_of_another_document_is_paid_by_both(tmp_path: Path) -> None:
    """Copied over a file that has all of its budget left."""
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        both = ledger.versions(["old", "free"], [fingerprint("", SECRET), fingerprint("", OTHERS[0])])
        ledger.charge(shared(3.0, "first"), Covered(*zip(("old", both.versions[0]))), "north")
        over = ledger.versions(["free"], [fingerprint("", SECRET)])
        with pytest.raises(BudgetExhausted):
            ledger.charge(shared(2.0, "second"), over, "north")
        ledger.charge(shared(1.0, "second"), over, "north")
        assert (ledger.spent("old"), ledger.spent("free")) == (4.0, 1.0)
        assert ledger.copies(ledger.versions(["old", "free"], [fingerprint("", SECRET)] * 2)).tolist() == [
            False,
            True,
        ]
        ledger.audit()


def test_texts_that_many_documents_have_are_not_one_document(tmp_path: Path) -> None:
    """Neither no words at all nor a few of them under different titles."""
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        contents = [("", ""), ("", " "), ("one", "see above"), ("two", "see above")]
        covered = ledger.versions(["a", "b", "c", "d"], [fingerprint(*each) for each in contents])
        assert not ledger.copies(covered).any()


def test_names_of_an_older_ledger_are_followed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has digests of whole documents; what is still there under its name is then known by its words."""
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        store = schema.Store(tmp_path / "ledger", create=True)
        with store.writing() as db:
            db.execute("INSERT INTO setting VALUES ('budget', ?)", (Budget(4.0).to_json(),))
            db.execute("INSERT INTO document VALUES (1, 'old', 1), (2, 'gone', 2)")
            for number, body in ((1, SECRET), (2, OTHERS[0])):
                digest = fingerprint("name", body)[:16]
                db.execute(
                    "INSERT INTO version VALUES (?, ?, ?, ?)", (number, number, f"{number:032x}", digest)
                )
        store.close()
    with Ledger(tmp_path / "ledger") as ledger:
        kept = ledger.versions(["old"], [fingerprint("name", SECRET)])
        assert kept.versions == (f"{1:032x}",), "its noise is still its noise"
        ledger.charge(shared(3.0, "first"), Covered(("old", "gone"), (f"{1:032x}", f"{2:032x}")), "north")
        for name, title, body in (("new", "other", SECRET), ("back", "name", OTHERS[0])):
            with pytest.raises(BudgetExhausted):
                ledger.charge(
                    shared(2.0, "second"), ledger.versions([name], [fingerprint(title, body)]), "north"
                )


# ---------------------------------------------------------------- copies


def test_copies_are_no_further_draws(tmp_path: Path) -> None:
    """The attack: many copies, each with noise of its own, in one release."""
    folder = SiloFolder.at(tmp_path / "south", create=True)
    copies = {f"copy{number}": SECRET for number in range(40)}
    folder.build(documents(**copies, other=OTHERS[0]), ("body",), budget=Budget(4.0))
    with folder.ledger() as ledger:
        carrier = in_memory(folder.desk(4.0, ledger, ("body",)), "north")
        catalogue = fetch_catalogue(carrier, "body")
        assert catalogue.documents == ("copy0", "other")
        family = folder.keys.group_key().family("body", width=catalogue.terms.width)
        fetch_published(carrier, catalogue, family)
        assert ledger.spent("copy39") == ledger.spent("other") == 4.0


def test_copies_count_once_in_statistics_and_cost_once(settings: NodeSettings) -> None:
    copies = [Draft(f"copy{number}", f"copy {number}", f"esbjerg {SECRET}") for number in range(40)]
    with node(settings, *texts(60), *copies) as opened:
        figures = released(opened)
        family = family_of(settings.statistics.hash_key, settings.statistics.width)
        assert figures.counts(TEXT, ["esbjerg"], family)[0] < 20
        assert figures.documents == 100, "how many documents there are is public"
        assert opened.ledger.spent("copy0") == opened.ledger.spent("copy39") == opened.ledger.spent("d1") == 1
        opened.ledger.audit()
    for name in range(3):
        with node(settings, Draft(f"new{name}", "", f"esbjerg {SECRET}")) as opened:
            opened.store.remove([f"copy{number}" for number in range(40)])
            while opened.index.update():
                pass
            opened.statistics(PEER)
    with node(settings) as opened:
        assert opened.ledger.spent("new0") == opened.ledger.spent("copy0") == 2
