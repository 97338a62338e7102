"""Charging a batch of documents in a handful of statements, whatever its size.

The documents at hand are written to a table of this connection, once; everything else is set-based SQL
inside the caller's transaction: which of them cost something, whether any would overspend, then the charges
and the running sums.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from isthmus.errors import BudgetExhausted, PrivacyError
from isthmus.private.composition import PrivacyLoss, room
from isthmus.private.cost import Cost
from isthmus.private.ledger.budget import Budget
from isthmus.private.ledger.schema import EVERYBODY, SQL

SLACK = 1e-9
"""Sums of ε are compared up to this share, so that ten tenths make one."""


@dataclass(frozen=True, slots=True)
class Purse:
    """Whose sums a charge adds to, the highest they may become, and which documents count there.

    `least` is 1 for all peers together, where a shared noise counts once, and 0 for the peer's own sums.
    """

    peer: int
    most: PrivacyLoss
    least: int


def charge(db: sqlite3.Connection, cost: Cost, peer: str, *, budget: Budget, kind: str, at: float) -> None:
    """Charge what is on the workbench, or raise BudgetExhausted. What was charged before costs nothing."""
    release, who = release_of(db, cost), peer_of(db, peer)
    if not collect_fresh(db, release, who, shared=cost.shared):
        return
    loss, fields = PrivacyLoss.of(cost.epsilon), sorted(set(cost.fields))
    bound = [
        (purse, _parameters(purse, field, loss)) for purse in purses(budget, who, peer) for field in fields
    ]
    for purse, parameters in bound:
        row = db.execute(SQL["overspent"], parameters).fetchone()
        if row is not None:
            _, times, *sums = row
            raise BudgetExhausted(peer, times * cost.epsilon, room(PrivacyLoss(*sums), purse.most))
    _write(db, release, who, kind=kind, at=at)
    for _, parameters in bound:
        db.execute(SQL["add"], parameters)


def collect_fresh(db: sqlite3.Connection, release: int, peer: int, *, shared: bool) -> bool:
    """Gather those on the workbench that this peer has not had under this name; whether there are any."""
    db.execute("DELETE FROM fresh")
    cursor = db.execute(SQL["fresh"], {"shared": shared, "release": release, "peer": peer})
    if cursor.rowcount > 0:
        db.execute(SQL["fresh elsewhere"])
    return cursor.rowcount > 0


def purses(budget: Budget, who: int, peer: str) -> list[Purse]:
    """The document's own, then what it gave to this peer alone."""
    return [Purse(EVERYBODY, budget.ceiling, 1), Purse(who, budget.limit(peer), 0)]


def release_of(db: sqlite3.Connection, cost: Cost) -> int:
    """The number of a noise, entered if it is new."""
    fields = {
        "name": cost.release,
        "mechanism": cost.mechanism,
        "fields": json.dumps(sorted(set(cost.fields))),
        "epsilon": cost.epsilon,
        "sensitivity": cost.sensitivity,
        "scale": cost.scale,
        "shared": cost.shared,
        "halves": cost.halves,
        "adjacency": cost.adjacency,
    }
    same = " AND ".join(f"{key} = :{key}" for key in fields)
    for (number,) in db.execute(f"SELECT id FROM release WHERE {same}", fields):
        return int(number)
    columns, values = ", ".join(fields), ", ".join(f":{key}" for key in fields)
    return int(db.execute(f"INSERT INTO release ({columns}) VALUES ({values})", fields).lastrowid or 0)


def peer_of(db: sqlite3.Connection, name: str) -> int:
    """The number of a peer, entered if it is new."""
    for (number,) in db.execute("SELECT id FROM peer WHERE name = ?", (name,)):
        return int(number)
    if not name:
        raise PrivacyError("what leaves a silo goes to somebody: name the peer")
    return int(db.execute("INSERT INTO peer (name) VALUES (?)", (name,)).lastrowid or 0)


def _parameters(purse: Purse, field: str, loss: PrivacyLoss) -> dict[str, object]:
    return {
        "peer": purse.peer,
        "least": purse.least,
        "field": field,
        "epsilon": loss.epsilon,
        "square": loss.square,
        "rho": loss.rho,
        "most_epsilon": purse.most.epsilon * (1 + SLACK),
        "most_square": purse.most.square * (1 + SLACK),
        "most_rho": purse.most.rho * (1 + SLACK),
    }


def _write(db: sqlite3.Connection, release: int, peer: int, *, kind: str, at: float) -> None:
    departure = db.execute(SQL["charged departure"], (at, kind, peer, release)).lastrowid
    db.execute("INSERT INTO charge SELECT DISTINCT ?, version, ?, ? FROM fresh", (release, peer, departure))
