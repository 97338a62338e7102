"""Accounts of documents: budgets over all versions of a document, for all peers together and for each peer.

Documents and versions: to which lineage a document belongs, and which noise nonce is current.

A document that appears under a new name with words that the ledger already has continues the lineage of the
name that had them first: its budget, not a new one. A document that takes on another's words under a name of
its own is charged to both lineages. Words are recognised whatever the title, the markup and the spaces
between them are.

Charges: a batch of documents is charged in a handful of statements, whatever its size. Its documents are
written to a temporary table of the connection (the workbench), once; everything else is set-based SQL inside
the caller's transaction: which of them cost something, whether any would overspend, then the charges and the
running sums.

Queries: accounts of documents, what left, and whether the sums are right.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from heapq import merge
from itertools import groupby, islice
from typing import Any

from isthmus.errors import BudgetExhausted, ConfigError, DataError, PrivacyError
from isthmus.private.cost import RULES, Cost, Covered, PrivacyLoss, Rule, ceiling, explain, pure_to_zcdp, room
from isthmus.private.ledger import chain, erasing, subjects
from isthmus.private.ledger.store import EVERYBODY, INCIDENT, NO_GUARANTEE, SQL


@dataclass(frozen=True)
class Budget:
    """The budget of every document's lineage, and of all documents of a subject together (`subjects`).

    `epsilon` limits the sum over all peers, who may collude; `per_peer` and `peers` are lower limits of
    single peers. `rule` and `delta` say how releases compose; basic composition is exact and has δ = 0.

    The default suffices for word counts at 8, document frequencies at 0.5 and collection counts at 0.5, once.
    """

    epsilon: float = 9.0
    delta: float = 0.0
    rule: Rule = "basic"
    per_peer: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    subject: str = ""
    """The noun for a subject, such as patient or customer; if empty, subject."""
    forgotten: float = field(default=0.0, compare=False)
    """The ε that every document counts as having spent in addition, because a ledger was lost; set by the
    ledger only."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"no rule of composition {self.rule!r}", key=self.rule, known=RULES)
        if self.rule == "basic" and self.delta != 0:
            raise ConfigError("basic composition has δ = 0", key="delta", value=self.delta, expected="0")
        if self.rule != "basic" and not 0 < self.delta < 1:
            raise ConfigError(
                f"{self.rule} composition needs a δ", key="delta", expected="0 < δ < 1, say 1e-6"
            )
        if not self.subject.isprintable() or len(self.subject) > 40:
            raise ConfigError("a noun of at most 40 letters, say patient", key="subject", value=self.subject)
        for key, limit in self._limits():
            if not limit > 0:
                raise ConfigError(
                    f"{key} = {limit} allows nothing", key=key, value=limit, expected="ε above 0"
                )
            if limit > self.epsilon:
                why = f"{key} = {limit:g} lies above the budget of {self.epsilon:g}, which is for all peers"
                raise ConfigError(why, key=key, value=limit)

    def _limits(self) -> list[tuple[str, float]]:
        own = [] if self.per_peer is None else [("per_peer", self.per_peer)]
        return [("epsilon", self.epsilon), *own, *((f"peers.{name}", it) for name, it in self.peers.items())]

    @property
    def ceiling(self) -> PrivacyLoss:
        """The largest sums a document may reach."""
        return self._ceiling(self.epsilon)

    def _ceiling(self, epsilon: float) -> PrivacyLoss:
        whole, gone = ceiling(epsilon, delta=self.delta, rule=self.rule), PrivacyLoss.of(self.forgotten)
        return PrivacyLoss(whole.epsilon - gone.epsilon, whole.square - gone.square, whole.rho - gone.rho)

    def limit(self, peer: str) -> PrivacyLoss:
        """The largest sums a document may reach towards one peer."""
        epsilon = self.peers.get(peer, self.per_peer)
        return self.ceiling if epsilon is None else self._ceiling(epsilon)

    def most(self, peer: str | None = None) -> float:
        """The configured ε of all peers together or of one."""
        own = None if peer is None else self.peers.get(peer, self.per_peer)
        return self.epsilon if own is None else own

    def composed(self, loss: PrivacyLoss) -> float:
        """The ε of a loss together with `forgotten`, by this budget's rule."""
        return (loss + PrivacyLoss.of(self.forgotten)).at(delta=self.delta, rule=self.rule)

    def to_json(self) -> str:
        """The JSON that the ledger stores. It may contain ∞, which only Python's JSON allows."""
        fields = asdict(self) | {"peers": dict(self.peers)}
        del fields["forgotten"]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Budget:
        """Read a budget from the JSON of `to_json`."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        text = f"ε = {self.epsilon:g}"
        if self.rule != "basic":
            text += f" at δ = {self.delta:g} ({self.rule})"
        if self.per_peer is not None:
            text += f", {self.per_peer:g} for any one peer"
        text += "".join(f", {limit:g} for {peer}" for peer, limit in sorted(self.peers.items()))
        return text + (f", of which {self.forgotten:g} went with a lost ledger" if self.forgotten else "")


def load(db: sqlite3.Connection, covered: Covered) -> None:
    """Put documents on the workbench, with the numbers of those that the ledger has."""
    db.execute("DELETE FROM batch")
    db.executemany(SQL["load"], zip(covered.documents, covered.versions, strict=True))
    if db.execute("SELECT 1 FROM batch WHERE fits = 0 LIMIT 1").fetchone():
        raise PrivacyError("a version belongs to one document: its noise may not be used for another")


def admit(db: sqlite3.Connection) -> None:
    """Enter the documents and versions on the workbench that the ledger does not have."""
    if not db.execute("SELECT 1 FROM batch WHERE version IS NULL LIMIT 1").fetchone():
        return
    db.execute("INSERT OR IGNORE INTO document (name) SELECT document FROM batch WHERE version IS NULL")
    try:
        db.execute(SQL["admit"])
    except sqlite3.IntegrityError:
        raise PrivacyError("two documents of one release share a version, hence their noise") from None
    db.execute(SQL["resolve"])


@dataclass(frozen=True, slots=True)
class Content:
    """Digests of a document: `exact` shows whether it changed, `text` identifies its words and is empty
    without any."""

    exact: bytes
    text: bytes = b""


def current(
    db: sqlite3.Connection, documents: Sequence[str], contents: Sequence[Content]
) -> list[str | None]:
    """The name of each document's newest version, or None where that has other content."""
    db.execute("DELETE FROM batch")
    db.executemany("INSERT INTO batch (document) VALUES (?)", ((name,) for name in documents))
    rows = db.execute(SQL["current"])
    return [
        name if exact == content.exact and text is not None else None
        for (name, exact, text), content in zip(rows, contents, strict=True)
    ]


def enter(db: sqlite3.Connection, document: str, content: Content, nonce: str) -> str:
    """Make a version of this content the document's newest. Returns its name.

    It is a new version named by the nonce, unless an older Isthmus, which stored no digest of words, entered
    it.
    """
    values: dict[str, Any] = {
        "document": document,
        "content": content.exact,
        "text": content.text,
        "name": nonce,
    }
    known = db.execute(SQL["adopt"], values).fetchall()
    for (name,) in known:
        return str(name)
    row = db.execute(SQL["first with a text"], values).fetchone() if content.text else None
    values["first"] = erasing.lineage_of(db, document, content.text) if row is None else row[0]
    db.execute("INSERT OR IGNORE INTO document (name, lineage) VALUES (:document, :first)", values)
    number = db.execute(SQL["enter"], values).lastrowid
    db.execute("UPDATE document SET current = ? WHERE name = ?", (number, document))
    return nonce


def copies(db: sqlite3.Connection, per_subject: int | None = None) -> list[bool]:
    """Whether each document on the workbench shares a payer with an earlier one; with `per_subject`,
    documents beyond that many of a subject count too."""
    seen: set[int] = set()
    repeated = []
    for row in db.execute("SELECT owner, origin FROM batch ORDER BY row"):
        payers = {payer for payer in row if payer is not None}
        repeated.append(not seen.isdisjoint(payers))
        if not repeated[-1]:
            seen |= payers
    return repeated if per_subject is None else subjects.beyond(db, per_subject, repeated)


SLACK = 1e-9
"""Relative tolerance of comparisons of ε, so that ten tenths make one."""


def charge(db: sqlite3.Connection, cost: Cost, peer: str, *, budget: Budget, kind: str, at: float) -> None:
    """Charge the documents on the workbench for a release. A release that was charged before costs nothing.

    Raises BudgetExhausted if one of them would overspend; the caller then has to roll back its transaction.
    """
    release, who = release_of(db, cost), peer_of(db, peer)
    if not collect_fresh(db, release, who, shared=cost.shared):
        return
    # two limits: over all peers, where shared noise counts once, and for this peer alone
    purses = ((EVERYBODY, 1, budget.ceiling), (who, 0, budget.limit(peer)))
    loss, fields = asdict(PrivacyLoss.of(cost.epsilon)), sorted(set(cost.fields))
    bound: list[tuple[PrivacyLoss, dict[str, object]]] = []
    for purse, least, most in purses:
        limits = {f"most_{name}": sum_ * (1 + SLACK) for name, sum_ in asdict(most).items()}
        about = {"peer": purse, "least": least, **loss, **limits}
        bound += [(most, {**about, "field": field}) for field in fields]
    for most, parameters in bound:
        row = db.execute(SQL["overspent"], parameters).fetchone()
        if row is not None:
            _, times, *sums = row
            raise BudgetExhausted(peer, times * cost.epsilon, room(PrivacyLoss(*sums), most))
    _write(db, release, who, kind=kind, at=at)
    for _, parameters in bound:
        db.execute(SQL["add"], parameters)
    for purse, least, limit in ((EVERYBODY, 1, budget.most()), (who, 0, budget.most(peer))):
        over = subjects.overspent(
            db, purse, most=limit * (1 + SLACK), forgotten=budget.forgotten, least=least
        )
        if over is not None:  # the caller rolls back the transaction
            times, excess = over
            raise BudgetExhausted(peer, times * cost.epsilon, max(0.0, times * cost.epsilon - excess))


def collect_fresh(db: sqlite3.Connection, release: int, peer: int, *, shared: bool) -> bool:
    """Collect the documents on the workbench that this peer has not got under this release. Returns whether
    there are any."""
    db.execute("DELETE FROM fresh")
    cursor = db.execute(SQL["fresh"], {"shared": shared, "release": release, "peer": peer})
    if cursor.rowcount > 0:
        db.execute(SQL["fresh elsewhere"])
    return cursor.rowcount > 0


def release_of(db: sqlite3.Connection, cost: Cost) -> int:
    """The number of a release in the ledger, entered if it is new."""
    fields = asdict(cost) | {"fields": json.dumps(sorted(set(cost.fields)))}
    fields["name"] = fields.pop("release")
    same = " AND ".join(f"{key} = :{key}" for key in fields)
    for (number,) in db.execute(f"SELECT id FROM release WHERE {same}", fields):
        return int(number)
    columns, values = ", ".join(fields), ", ".join(f":{key}" for key in fields)
    return int(db.execute(f"INSERT INTO release ({columns}) VALUES ({values})", fields).lastrowid or 0)


def peer_of(db: sqlite3.Connection, name: str) -> int:
    """The number of a peer, entered if it is new."""
    number = peer_number(db, name)
    if number >= 0:
        return number
    if not name:
        raise PrivacyError("what leaves a silo goes to somebody: name the peer")
    return int(db.execute("INSERT INTO peer (name) VALUES (?)", (name,)).lastrowid or 0)


def peer_number(db: sqlite3.Connection, name: str) -> int:
    """The number of a peer; -1 for one that the ledger does not have."""
    row = db.execute("SELECT id FROM peer WHERE name = ?", (name,)).fetchone()
    return -1 if row is None else int(row[0])


def _write(db: sqlite3.Connection, release: int, peer: int, *, kind: str, at: float) -> None:
    departure = db.execute(SQL["charged departure"], (at, kind, peer, release)).lastrowid
    db.execute("INSERT INTO charge SELECT DISTINCT ?, version, ?, ? FROM fresh", (release, peer, departure))
    chain.link_departure(db, int(departure or 0), db.execute(SQL["fresh versions"]))


LINEAGE = "(SELECT coalesce(lineage, id) FROM document WHERE name = :document)"


@dataclass(frozen=True, slots=True)
class LedgerAccount:
    """The spending of a document over all its versions, or of all documents of a subject together."""

    document: str
    """The document's name; for a subject, the noun and the beginning of its digest."""
    versions: int
    spent: float
    left: float
    fields: Mapping[str, float]
    peers: Mapping[str, float]
    documents: int = 1
    """Number of documents that share the account."""


def losses(
    db: sqlite3.Connection, document: str, *, peer: str | None = None, field: str | None = None
) -> list[PrivacyLoss]:
    """The sums of a document's lineage, one for each field, over all peers or for one."""
    wanted = f"s.document = {LINEAGE} AND " + ("s.peer = 0" if peer is None else "p.name = :peer")
    rows = db.execute(f"{SQL['sums']} WHERE {wanted}", {"document": document, "peer": peer})
    return [PrivacyLoss(*sums) for _, _, about, *sums, _ in rows if field is None or about == field]


def spent(losses: Iterable[PrivacyLoss], budget: Budget) -> float:
    """The ε of the field that has spent most."""
    return max((budget.composed(loss) for loss in losses), default=budget.composed(PrivacyLoss()))


def left(losses: Iterable[PrivacyLoss], ceiling: PrivacyLoss) -> float:
    """The largest ε for which every field has room."""
    return min((room(loss, ceiling) for loss in losses), default=room(PrivacyLoss(), ceiling))


def left_of_subjects(db: sqlite3.Connection, document: str, budget: Budget, peer: str | None = None) -> float:
    """The largest ε for which the subjects of a document have room; ∞ if it has none."""
    number = EVERYBODY if peer is None else peer_number(db, peer)
    only = f"""WHERE b.subject IN (SELECT o.subject FROM belongs o JOIN document h ON h.id = o.document
        WHERE coalesce(h.lineage, h.id) = {LINEAGE.replace(":document", "?")})"""
    rooms = (
        budget.most(peer) - each.spent(budget.forgotten)
        for each in subjects.sums(db, only, (document,), peer=number)
    )
    return max(0.0, min(rooms, default=math.inf))


def accounts(db: sqlite3.Connection, budget: Budget, most: int | None = None) -> Iterator[LedgerAccount]:
    """The accounts that have spent most, in descending order, or all: subjects, and documents without a
    subject."""
    rows = db.execute(SQL["sums"] + SQL["dearest"], (-1 if most is None else most,))
    documents = (_account(name, list(sums), budget) for name, sums in groupby(rows, key=lambda row: row[0]))
    dearest = islice(subjects.sums(db, ""), most)
    together = (subject_account(db, each, budget) for each in dearest)
    yield from islice(merge(documents, together, key=lambda each: -each.spent), most)


def subject_account(db: sqlite3.Connection, total: subjects.SubjectSum, budget: Budget) -> LedgerAccount:
    """The account of all documents of a subject."""
    about = (total.subject,)
    fields, versions = (
        db.execute(SQL[part], about) for part in ("fields of a subject", "versions of a subject")
    )
    peers = {
        name: each.spent(budget.forgotten)
        for number, name in db.execute("SELECT id, name FROM peer").fetchall()
        for each in subjects.sums(db, "WHERE b.subject = ?", about, peer=number)
        if each.epsilon
    }
    ((name,),) = db.execute("SELECT name FROM subject WHERE id = ?", about)
    spent = total.spent(budget.forgotten)
    return LedgerAccount(
        f"{budget.subject or 'subject'} {name[:12]}…",
        versions.fetchone()[0],
        spent,
        max(0.0, budget.epsilon - spent),
        dict(fields.fetchall()),
        peers,
        total.documents,
    )


def _account(document: str, rows: list[tuple[Any, ...]], budget: Budget) -> LedgerAccount:
    fields = {field: PrivacyLoss(*sums) for _, peer, field, *sums, _ in rows if not peer}
    peers: dict[str, float] = {}
    for _, peer, _, *sums, _ in rows:
        if peer:
            peers[peer] = max(peers.get(peer, 0.0), budget.composed(PrivacyLoss(*sums)))
    return LedgerAccount(
        document,
        rows[0][-1],
        spent(fields.values(), budget),
        left(fields.values(), budget.ceiling),
        {field: budget.composed(loss) for field, loss in fields.items()},
        peers,
    )


def rows(db: sqlite3.Connection, statement: str, about: Mapping[str, Any] = {}) -> Iterator[dict[str, Any]]:
    """The rows of a named statement, ready for JSON; nonces and digests are left out."""
    decoders: dict[str, Callable[[dict[str, Any]], Any]] = {
        "at": lambda row: moment(row["at"]),
        "last": lambda row: moment(row["last"]),
        "fields": lambda row: json.loads(row["fields"]),
        "shared": lambda row: bool(row["shared"]),
        "guarantee": lambda row: guarantee(row["epsilon"], row["kind"]),
    }
    cursor = db.execute(SQL[statement], about)
    names = [column[0] for column in cursor.description]
    for values in cursor:
        row = dict(zip(names, values, strict=True))
        yield row | {name: decoders[name](row) for name in names if name in decoders}


def summary(db: sqlite3.Connection, budget: Budget) -> dict[str, Any]:
    """The whole ledger in a few numbers."""
    counted = {
        name: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for name, table in (("documents", "document"), ("versions", "version"), ("charges", "charge"))
    }
    sums = db.execute(f"SELECT DISTINCT epsilon, square, rho FROM spent WHERE peer = {EVERYBODY}")
    totals = [PrivacyLoss(*row) for row in sums]
    counted["subjects"] = db.execute("SELECT count(*) FROM subject").fetchone()[0]
    dearest = next((each.spent(budget.forgotten) for each in subjects.sums(db, "")), 0.0)
    most = max(spent(totals, budget), dearest)
    return {
        "budget": asdict(budget),
        "unit": (budget.subject or "subject") if counted["subjects"] else "document",
        **counted,
        "most_spent": most,
        "meaning": _meaning(db, most, (budget.subject or "subject") if dearest else ""),
        "least_left": min(left(totals, budget.ceiling), max(0.0, budget.epsilon - dearest)),
        "departures": list(rows(db, "departures by kind")),
        "incidents": [note for (note,) in db.execute(SQL["last incidents"])],
    }


def _meaning(db: sqlite3.Connection, epsilon: float, subject: str) -> str:
    """The meaning of a spent ε in plain words; empty if nothing was spent."""
    if not epsilon:
        return ""
    # only if every release has independent noise on the replaced word and on the word that replaces it
    (whole,) = db.execute("SELECT count(*) FROM release WHERE NOT halves").fetchone()
    return explain(epsilon, halves=not whole and not subject, subject=subject)


def check_readable(db: sqlite3.Connection, path: str) -> None:
    """Raise DataError if the file itself is damaged."""
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        raise DataError(f"the ledger is damaged: {state}", file=path)


def audit(db: sqlite3.Connection, path: str) -> None:
    """Compare the running sums with the charges. Raises DataError if they differ."""
    db.create_function("rho_of", 1, pure_to_zcdp, deterministic=True)
    counted, different = db.execute(SQL["worked out"]).fetchone()
    (stored,) = db.execute("SELECT count(*) FROM spent").fetchone()
    if different or counted != stored:
        raise DataError(
            f"{max(different, abs(counted - stored))} sums are not those of the charges",
            file=path,
            cure="it was written to by other means; go back to a copy",
        )


def guarantee(epsilon: float | None, kind: str = "") -> str:
    """A guarantee in words: the ε, that there is none, or that nothing left."""
    if kind == INCIDENT:
        return "nothing left"
    if epsilon is None:
        return NO_GUARANTEE
    return "ε = ∞" if epsilon == math.inf else f"ε = {epsilon:g}"


def moment(at: float) -> str:
    """A time as ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
