"""What the ledger tells: accounts of documents, what left, and whether the sums are right."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from isthmus.errors import DataError
from isthmus.private.composition import Loss, pure_to_zcdp, room
from isthmus.private.cost import explain
from isthmus.private.ledger.budget import Budget
from isthmus.private.ledger.schema import EVERYBODY, INCIDENT, NO_GUARANTEE

SUMS = """
    SELECT d.name, coalesce(p.name, ''), s.field, s.epsilon, s.square, s.rho,
        (SELECT count(*) FROM version v JOIN document o ON o.id = v.document
            WHERE o.id = d.id OR o.lineage = d.id)
    FROM spent s JOIN document d ON d.id = s.document LEFT JOIN peer p ON p.id = s.peer
"""

LAST_INCIDENTS = f"SELECT note FROM departure WHERE kind = '{INCIDENT}' ORDER BY id DESC LIMIT 3"

DEPARTURES = """
    SELECT d.id, d.at, d.kind, p.name, coalesce(r.mechanism, ''), coalesce(r.name, ''),
        coalesce(r.fields, '[]'), d.epsilon, d.unit, d.items, d.charged, d.note
    FROM departure d JOIN peer p ON p.id = d.peer LEFT JOIN release r ON r.id = d.release ORDER BY d.id
"""

CHARGES = """
    SELECT d.name, (SELECT count(*) FROM version w WHERE w.document = d.id AND w.id <= v.id),
        p.name, r.mechanism, r.name, r.fields, r.epsilon, r.shared, gone.at, gone.kind
    FROM {joined} JOIN peer p ON p.id = c.peer JOIN departure gone ON gone.id = c.departure
"""

ALL_CHARGES = CHARGES.format(
    joined="""charge c JOIN version v ON v.id = c.version JOIN document d ON d.id = v.document
    JOIN release r ON r.id = c.release"""
)

LINEAGE = "(SELECT coalesce(lineage, id) FROM document WHERE name = :document)"

# the table is ordered by release: a document's charges are found by asking for each of them
CHARGES_OF = (
    CHARGES.format(
        joined="""document d JOIN version v ON v.document = d.id CROSS JOIN release r
    JOIN charge c ON c.release = r.id AND c.version = v.id"""
    )
    + f"WHERE d.id = {LINEAGE} OR d.lineage = {LINEAGE} ORDER BY v.id, c.departure"
)

WORKED_OUT = """
    WITH part AS (
        SELECT version, release, 0 AS peer, CASE WHEN r.shared THEN 1 ELSE count(*) END AS times
        FROM charge JOIN release r ON r.id = release GROUP BY version, release
        UNION ALL SELECT version, release, peer, 1 FROM charge
    ), total AS (
        SELECT w.document, part.peer, f.value AS field,
            sum(part.times * r.epsilon) AS epsilon, sum(part.times * r.epsilon * r.epsilon) AS square,
            sum(part.times * rho_of(r.epsilon)) AS rho
        FROM part JOIN payer w ON w.version = part.version
        JOIN release r ON r.id = part.release JOIN json_each(r.fields) f
        GROUP BY w.document, part.peer, f.value
    )
"""

DIFFERENT = (
    WORKED_OUT
    + """
    SELECT count(*) FROM total t LEFT JOIN spent s USING (document, peer, field)
    WHERE s.epsilon IS NULL OR abs(s.epsilon - t.epsilon) > 1e-6 * max(1, t.epsilon)
        OR abs(s.square - t.square) > 1e-6 * max(1, t.square)
        OR abs(s.rho - t.rho) > 1e-6 * max(1, t.rho)
"""
)


@dataclass(frozen=True, slots=True)
class Account:
    """What a document gave away over all its versions."""

    document: str
    versions: int
    spent: float
    left: float
    fields: Mapping[str, float]
    peers: Mapping[str, float]


def losses(
    db: sqlite3.Connection, document: str, *, peer: str | None = None, field: str | None = None
) -> list[Loss]:
    """The sums of a document's lineage, one for each field, towards everybody or one peer."""
    wanted = f"s.document = {LINEAGE} AND " + ("s.peer = 0" if peer is None else "p.name = :peer")
    found = db.execute(f"{SUMS} WHERE {wanted}", {"document": document, "peer": peer})
    return [Loss(*sums) for _, _, about, *sums, _ in found if field is None or about == field]


def spent(losses: Iterable[Loss], budget: Budget) -> float:
    """The field that spent most."""
    return max((budget.composed(loss) for loss in losses), default=budget.composed(Loss()))


def left(losses: Iterable[Loss], ceiling: Loss) -> float:
    """What every field still has room for."""
    return min((room(loss, ceiling) for loss in losses), default=room(Loss(), ceiling))


def accounts(db: sqlite3.Connection, budget: Budget, most: int | None = None) -> Iterator[Account]:
    """The documents that spent most, dearest first, or all of them."""
    order = f"""
        JOIN (SELECT document, max(epsilon) AS most FROM spent WHERE peer = {EVERYBODY}
            GROUP BY document ORDER BY 2 DESC LIMIT ?) dear USING (document)
        ORDER BY dear.most DESC, d.name
    """
    rows = db.execute(SUMS + order, (-1 if most is None else most,))
    for name, sums in groupby(rows, key=lambda row: row[0]):
        yield _account(name, list(sums), budget)


def _account(document: str, rows: list[tuple[Any, ...]], budget: Budget) -> Account:
    fields = {field: Loss(*sums) for _, peer, field, *sums, _ in rows if not peer}
    peers: dict[str, float] = {}
    for _, peer, _, *sums, _ in rows:
        if peer:
            peers[peer] = max(peers.get(peer, 0.0), budget.composed(Loss(*sums)))
    return Account(
        document,
        rows[0][-1],
        spent(fields.values(), budget),
        left(fields.values(), budget.ceiling),
        {field: budget.composed(loss) for field, loss in fields.items()},
        peers,
    )


def departures(db: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """Everything that left, in order."""
    for number, at, kind, peer, mechanism, release, fields, epsilon, unit, items, charged, note in db.execute(
        DEPARTURES
    ):
        yield {
            "number": number,
            "at": moment(at),
            "kind": kind,
            "peer": peer,
            "mechanism": mechanism,
            "release": release,
            "fields": json.loads(fields),
            "epsilon": epsilon,
            "guarantee": guarantee(epsilon, kind),
            "unit": unit,
            "items": items,
            "charged": charged,
            "note": note,
        }


def charges(db: sqlite3.Connection, document: str | None) -> Iterator[dict[str, Any]]:
    """Every charge. Nonces and digests stay inside."""
    rows = db.execute(ALL_CHARGES) if document is None else db.execute(CHARGES_OF, {"document": document})
    for name, version, peer, mechanism, release, fields, epsilon, shared, at, kind in rows:
        yield {
            "document": name,
            "version": version,
            "peer": peer,
            "kind": kind,
            "mechanism": mechanism,
            "release": release,
            "fields": json.loads(fields),
            "epsilon": epsilon,
            "shared": bool(shared),
            "at": moment(at),
        }


def summary(db: sqlite3.Connection, budget: Budget) -> dict[str, Any]:
    """The whole ledger in a few figures."""
    counted = {
        name: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for name, table in (("documents", "document"), ("versions", "version"), ("charges", "charge"))
    }
    sums = db.execute(f"SELECT DISTINCT epsilon, square, rho FROM spent WHERE peer = {EVERYBODY}")
    totals = [Loss(*row) for row in sums]
    return {
        "budget": {
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "rule": budget.rule,
            "per_peer": budget.per_peer,
            "peers": dict(budget.peers),
            "forgotten": budget.forgotten,
        },
        **counted,
        "most_spent": spent(totals, budget),
        "meaning": _meaning(db, spent(totals, budget)),
        "least_left": left(totals, budget.ceiling),
        "departures": list(_grouped(db)),
        "incidents": [note for (note,) in db.execute(LAST_INCIDENTS)],
    }


def _meaning(db: sqlite3.Connection, epsilon: float) -> str:
    """What an ε that was spent tells an attacker; nothing was spent, nothing is told."""
    if not epsilon:
        return ""
    # only if the word that goes and the word that comes met independent noise in every release
    (whole,) = db.execute("SELECT count(*) FROM release WHERE NOT halves").fetchone()
    return explain(epsilon, halves=not whole)


def _grouped(db: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    rows = db.execute(
        """SELECT d.kind, p.name, coalesce(r.mechanism, ''), coalesce(r.fields, '[]'), d.epsilon, d.unit,
            count(*), sum(d.items), sum(d.charged), max(d.at)
        FROM departure d JOIN peer p ON p.id = d.peer LEFT JOIN release r ON r.id = d.release
        GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY min(d.id)"""
    )
    for kind, peer, mechanism, fields, epsilon, unit, times, items, charged, last in rows:
        yield {
            "kind": kind,
            "peer": peer,
            "mechanism": mechanism,
            "fields": json.loads(fields),
            "epsilon": epsilon,
            "guarantee": guarantee(epsilon, kind),
            "unit": unit,
            "times": times,
            "items": items,
            "charged": charged,
            "last": moment(last),
        }


def audit(db: sqlite3.Connection, path: str) -> None:
    """Compare the running sums with the charges they stand for."""
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        raise DataError(f"the ledger is damaged: {state}", file=path)
    db.create_function("rho_of", 1, pure_to_zcdp, deterministic=True)
    (different,) = db.execute(DIFFERENT).fetchone()
    (counted,) = db.execute(WORKED_OUT + "SELECT count(*) FROM total").fetchone()
    (kept,) = db.execute("SELECT count(*) FROM spent").fetchone()
    if different or counted != kept:
        raise DataError(
            f"{max(different, abs(counted - kept))} sums are not those of the charges",
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
