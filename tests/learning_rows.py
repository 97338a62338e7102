"""Rows of judged queries for tests of search models: what is right depends on BM25 and on a second column."""

from __future__ import annotations

import numpy as np

from isthmus.asking import Silos
from isthmus.learning import COLUMNS, JudgedRows

FOLDS = 4


def made_rows(seed=0, *, queries=60, candidates=60, column="title", strength=2.0, dense=False):
    """(table, relevant, query): the logit of relevance is that of BM25 and of one more column."""
    rng = np.random.default_rng(seed)
    query = np.repeat(np.arange(queries), candidates)
    table = np.abs(rng.normal(size=(len(query), len(COLUMNS))))
    table[:, COLUMNS.index("dense")] = rng.normal(size=len(query)) / 4 if dense else np.nan
    for name in ("ln words", "idf"):
        table[:, COLUMNS.index(name)] = rng.normal(size=queries)[query]
    logit = 2 * table[:, 0] + strength * table[:, COLUMNS.index(column)] - 6
    return table, (rng.random(len(query)) < 1 / (1 + np.exp(-logit))).astype(float), query


def dealt(rows, silos, seed=0):
    """The rows in so many silos, by name, each row in one of them at random."""
    table, relevant, query = rows
    at = np.random.default_rng(seed).integers(silos, size=len(query))
    fold = np.arange(query.max() + 1) % FOLDS
    return {
        f"silo{number}": JudgedRows(
            table[at == number],
            relevant[at == number],
            query[at == number],
            fold=fold,
            targets=np.bincount(query[at == number], relevant[at == number], len(fold)),
            place=number,
        )
        for number in range(silos)
    }


def in_memory(silos):
    """Silos that are asked within this process."""
    return Silos.in_memory({name: rows.answer for name, rows in silos.items()})
