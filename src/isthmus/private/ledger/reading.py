"""What the ledger tells: accounts of documents, what left, and whether the sums are right."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from isthmus.errors import DataError
from isthmus.private.composition import PrivacyLoss, pure_to_zcdp, room
from isthmus.private.cost import explain
from isthmus.private.ledger.budget import Budget
from isthmus.private.ledger.schema import EVERYBODY, INCIDENT, NO_GUARANTEE, SQL

LINEAGE = "(SELECT coalesce(lineage, id) FROM document WHERE name = :document)"


@dataclass(frozen=True, slots=True)
class LedgerAccount:
    """What a document gave away over all its versions."""

    document: str
    versions: int
    spent: float
    left: float
    fields: Mapping[str, float]
    peers: Mapping[str, float]


def losses(
    db: sqlite3.Connection, document: str, *, peer: str | None = None, field: str | None = None
) -> list[PrivacyLoss]:
    """The sums of a document's lineage, one for each field, towards everybody or one peer."""
    wanted = f"s.document = {LINEAGE} AND " + ("s.peer = 0" if peer is None else "p.name = :peer")
    rows = db.execute(f"{SQL['sums']} WHERE {wanted}", {"document": document, "peer": peer})
    return [PrivacyLoss(*sums) for _, _, about, *sums, _ in rows if field is None or about == field]


def spent(losses: Iterable[PrivacyLoss], budget: Budget) -> float:
    """The field that spent most."""
    return max((budget.composed(loss) for loss in losses), default=budget.composed(PrivacyLoss()))


def left(losses: Iterable[PrivacyLoss], ceiling: PrivacyLoss) -> float:
    """What every field still has room for."""
    return min((room(loss, ceiling) for loss in losses), default=room(PrivacyLoss(), ceiling))


def accounts(db: sqlite3.Connection, budget: Budget, most: int | None = None) -> Iterator[LedgerAccount]:
    """The documents that spent most, dearest first, or all of them."""
    rows = db.execute(SQL["sums"] + SQL["dearest"], (-1 if most is None else most,))
    for name, sums in groupby(rows, key=lambda row: row[0]):
        yield _account(name, list(sums), budget)


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


def departures(db: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """Everything that left, in order."""
    return _rows(db, "departures")


def charges(db: sqlite3.Connection, document: str | None) -> Iterator[dict[str, Any]]:
    """Every charge. Nonces and digests stay inside."""
    if document is None:
        return _rows(db, "charges")
    return _rows(db, "charges of a document", {"document": document})


def _rows(db: sqlite3.Connection, statement: str, about: Mapping[str, Any] = {}) -> Iterator[dict[str, Any]]:
    """What a statement finds, ready for JSON."""
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
    """The whole ledger in a few figures."""
    counted = {
        name: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for name, table in (("documents", "document"), ("versions", "version"), ("charges", "charge"))
    }
    sums = db.execute(f"SELECT DISTINCT epsilon, square, rho FROM spent WHERE peer = {EVERYBODY}")
    totals = [PrivacyLoss(*row) for row in sums]
    return {
        "budget": asdict(budget),
        **counted,
        "most_spent": spent(totals, budget),
        "meaning": _meaning(db, spent(totals, budget)),
        "least_left": left(totals, budget.ceiling),
        "departures": list(_rows(db, "departures by kind")),
        "incidents": [note for (note,) in db.execute(SQL["last incidents"])],
    }


def _meaning(db: sqlite3.Connection, epsilon: float) -> str:
    """What an ε that was spent tells an attacker; nothing was spent, nothing is told."""
    if not epsilon:
        return ""
    # only if the word that goes and the word that comes met independent noise in every release
    (whole,) = db.execute("SELECT count(*) FROM release WHERE NOT halves").fetchone()
    return explain(epsilon, halves=not whole)


def audit(db: sqlite3.Connection, path: str) -> None:
    """Compare the running sums with the charges they stand for."""
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        raise DataError(f"the ledger is damaged: {state}", file=path)
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
    """An ε in words, with the words for none."""
    if kind == INCIDENT:
        return "nothing left"
    if epsilon is None:
        return NO_GUARANTEE
    return "ε = ∞" if epsilon == math.inf else f"ε = {epsilon:g}"


def moment(at: float) -> str:
    """A time as ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
