"""The ledger against a model of it in a few lines of Python, under any sequence of events."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus.errors import BudgetExhausted
from isthmus.private.cost import Cost, Covered, PrivacyLoss
from isthmus.private.ledger import Budget, Ledger, fingerprint

DOCUMENTS = [f"doc{number}" for number in range(4)]
PEERS = ["north", "south", "west"]
FIELDS = [("body",), ("title",), ("title", "body")]
BUDGETS = [
    Budget(epsilon=4.0),
    Budget(epsilon=4.0, per_peer=2.0),
    Budget(epsilon=4.0, per_peer=3.0, peers={"south": 1.0}),
    Budget(epsilon=4.0, delta=1e-2, rule="advanced", per_peer=3.0),
    Budget(epsilon=4.0, delta=1e-2, rule="zcdp", peers={"south": 1.0}),
]
COSTS = st.builds(
    lambda name, epsilon, fields, shared: Cost("any", fields, epsilon, 2.0, 1.0, name, shared=shared),
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.sampled_from(FIELDS),
    st.booleans(),
)
SOME = st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=6)


class Model(RuleBasedStateMachine):
    """Every charge in a set; every sum worked out anew from it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.shown: set[tuple[str, str, Cost, str]] = set()  # document, version, cost, peer
        self.texts = {name: f"text {name}" for name in DOCUMENTS}
        self.recorded = self.edits = 0
        self.lineage: dict[str, str] = {}  # of a document, by the name that had its words first
        self.first: dict[str, str] = {}  # the lineage that had a text first
        self.payers: dict[str, set[str]] = {}  # lineages, of a version

    @initialize(budget=st.sampled_from(BUDGETS))
    def begin(self, budget: Budget) -> None:
        self.budget = budget
        self.ledger = Ledger(Path(self.folder.name) / "ledger", budget)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        self.folder.cleanup()

    def covering(self, documents: list[str]) -> Covered:
        """Through `versions`, with repetitions as they came."""
        once = list(dict.fromkeys(documents))
        found = self.ledger.versions(once, [fingerprint(self.texts[name]) for name in once])
        names = dict(zip(found.documents, found.versions, strict=True))
        for name, version in names.items():
            if version not in self.payers:
                own = self.lineage.setdefault(name, self.first.get(self.texts[name], name))
                self.payers[version] = {own, self.first.setdefault(self.texts[name], own)}
        return Covered(documents, [names[name] for name in documents])

    def loss(self, document: str, field: str, peer: str | None, shown=None) -> PrivacyLoss:
        counted = set()
        payer = self.lineage.get(document, document)
        for _, version, cost, seen_by in self.shown if shown is None else shown:
            if payer in self.payers[version] and field in cost.fields and peer in (None, seen_by):
                counted.add((version, cost, None if cost.shared and peer is None else seen_by))
        return sum((PrivacyLoss.of(cost.epsilon) for _, cost, _ in counted), PrivacyLoss())

    def fits(self, shown: set[tuple[str, str, Cost, str]], documents=DOCUMENTS) -> bool:
        everybody = all(
            self.loss(document, field, None, shown).within(self.budget.ceiling)
            for document in documents
            for field in ("title", "body")
        )
        return everybody and all(
            self.loss(document, field, peer, shown).within(self.budget.limit(peer))
            for document in documents
            for field in ("title", "body")
            for peer in PEERS
        )

    @rule(cost=COSTS, documents=SOME, peer=st.sampled_from(PEERS))
    def charge(self, cost: Cost, documents: list[str], peer: str) -> None:
        self.charge_all([cost], documents, peer)

    @rule(costs=st.lists(COSTS, min_size=2, max_size=3), documents=SOME, peer=st.sampled_from(PEERS))
    def charge_all(self, costs: list[Cost], documents: list[str], peer: str) -> None:
        covered = self.covering(documents)
        pairs = list(zip(covered.documents, covered.versions, strict=True))
        after = self.shown | {(name, version, cost, peer) for cost in costs for name, version in pairs}
        asked = [(cost, covered, peer) for cost in costs]
        if self.fits(after):
            self.ledger.charge_all(asked)
            self.shown = after
        else:
            with pytest.raises(BudgetExhausted):
                self.ledger.charge_all(asked)

    @rule(documents=SOME)
    def copies(self, documents: list[str]) -> None:
        covered = self.covering(list(dict.fromkeys(documents)))
        seen: set[str] = set()
        for told, version in zip(self.ledger.copies(covered).tolist(), covered.versions, strict=True):
            assert told == bool(seen & self.payers[version])
            seen |= set() if told else self.payers[version]

    @rule(document=st.sampled_from(DOCUMENTS))
    def change(self, document: str) -> None:
        self.edits += 1
        self.texts[document] = f"edition {self.edits}"

    @rule(document=st.sampled_from(DOCUMENTS), other=st.sampled_from(DOCUMENTS))
    def copy(self, document: str, other: str) -> None:
        self.texts[document] = self.texts[other]

    @rule(peer=st.sampled_from(PEERS))
    def record(self, peer: str) -> None:
        self.ledger.record("snippets", peer)
        self.recorded += 1

    @precondition(lambda self: hasattr(self, "ledger"))
    @rule()
    def open_again(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(Path(self.folder.name) / "ledger")

    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for document in DOCUMENTS:
            for peer in (None, *PEERS):
                spent = max(
                    self.budget.composed(self.loss(document, field, peer)) for field in ("title", "body")
                )
                assert self.ledger.spent(document, peer=peer) == pytest.approx(spent, abs=1e-9)
            assert self.ledger.spent(document) <= self.budget.epsilon + 1e-6

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.audit()
            assert len(list(self.ledger.charges())) == len(self.shown)
            told = [row for row in self.ledger.departures() if row["kind"] == "snippets"]
            assert len(told) == self.recorded


TestLedger = Model.TestCase
TestLedger.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
