"""Attacks on every way to release counts, beside the guarantee of each.

Differencing removes the paper's shared noise and reveals the cells themselves. An audit draws two
neighbouring documents many times and bounds ε from below by how well an attacker who knows all else can
distinguish them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.private import (
    Asker,
    CountRelease,
    CountsAnswer,
    CountSketch,
    Covered,
    Decoys,
    Desk,
    HashFamily,
    Mechanism,
    Neighbours,
    NoiseKey,
    Owner,
    audit,
    fresh_nonces,
    in_memory,
    likelihood,
    mechanism,
    no_charge,
)
from isthmus.randomness import Streams
from isthmus.report import Estimate, Section, Table
from isthmus.text import Tokeniser
from isthmus_reproduce.intervals import fold_interval
from isthmus_reproduce.notebook import Notebook, Unit
from isthmus_reproduce.prose import Prose

PROSE = Prose("private.j2")
SHARED = "insecure_shared_noise"
AUDITED: tuple[tuple[str, float, int], ...] = (
    ("one_shot", 1.0, 1),
    ("one_shot", 2.0, 3),
    ("one_shot", 8.0, 1),
    ("scalar", 1.0, 10),
    ("per_cell", 4.0, 12),
    (SHARED, 0.5, 30),
)
"""Mechanism, ε and rows."""
WIDTHS = (200, 1000)


def differencing(values: NDArray[Any]) -> IntArray:
    """Return the cells of an obfuscated vector without the noise they share: (rows, documents) in and out.

    Most cells of a wide sketch are empty, so the most frequent value is the noise itself.
    """
    ordered = np.sort(values, axis=0)
    # differences of cells are integers, so equal cells differ by rounding only: find their longest run
    same = np.diff(ordered, axis=0) < 1e-6
    run, longest, where = (np.zeros(values.shape[1], dtype=np.int64) for _ in range(3))
    for row, alike in enumerate(same, start=1):
        run = np.where(alike, run + 1, 0)
        where = np.where(run > longest, row, where)
        longest = np.maximum(run, longest)
    noise = ordered[where, np.arange(values.shape[1])]
    cells: IntArray = np.rint(values - noise).astype(np.int64)
    return cells


def contrast(neighbours: Neighbours, draws: NDArray[Any]) -> FloatArray:
    """Return the first word's cells minus the second's."""
    first, second = np.einsum("wp,wpd->wd", neighbours.facing.astype(np.float64), draws)
    difference: FloatArray = first - second
    return difference


def without_shared_noise(neighbours: Neighbours, draws: NDArray[Any]) -> FloatArray:
    """Return the same contrast after differencing."""
    return contrast(neighbours, np.stack([differencing(vector) for vector in draws]))


ATTACKS = (likelihood, contrast, without_shared_noise)
_DOCUMENTS, _WORDS = 60, ("w1", "w2", "w30", "w400")
_PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())


@dataclass(frozen=True)
class Differencing:
    """A unit of work: the cells of one mechanism at one width, attacked by differencing."""

    mechanism: str
    width: int
    attack: str = "differencing"


@dataclass(frozen=True)
class Audit:
    """A unit of work: an audit of one mechanism at one ε with a number of rows."""

    mechanism: str
    epsilon: float
    rows: int
    attack: str = "audit"


def compute(notebook: Notebook, *, seed: int, trials: int, workers: int | None) -> dict[Any, Any]:
    """Return the results of every attack."""
    units = [
        Unit(Differencing(name, width), {"name": name, "width": width, "seed": seed})
        for name in (SHARED, "per_cell")
        for width in WIDTHS
    ]
    results = notebook.compute(recovered, units, label="differencing", workers=workers)
    units = []
    for name, epsilon, rows in AUDITED:
        draws = trials // 5 if name == SHARED else trials  # 30 rows an answer; few trials suffice
        about = {"name": name, "epsilon": epsilon, "rows": rows, "trials": draws, "seed": seed}
        units.append(Unit(Audit(name, epsilon, rows), about))
    return results | notebook.compute(audited, units, label="audits", workers=workers)


def sections(results: Mapping[Any, Any]) -> tuple[Section, ...]:
    """Return the report's section on attacks."""
    differences = [
        {"mechanism": name, "cells a row": width}
        | {key: _displayed(value) for key, value in results[Differencing(name, width)].items()}
        for name in (SHARED, "per_cell")
        for width in WIDTHS
    ]
    audits = [
        {"mechanism": kind[0], "rows": kind[2]}
        | {key: _displayed(value) for key, value in results[Audit(*kind)].items()}
        for kind in AUDITED
    ]
    return (
        Section(
            "Attacks",
            (
                PROSE("differencing"),
                Table.of(differences, digits=3),
                PROSE("audits"),
                Table.of(audits, digits=3),
            ),
        ),
    )


def _displayed(value: Any) -> Any:
    """Format a value: None is ∞; three numbers are an estimate and its interval."""
    return "∞" if value is None else Estimate(*value) if isinstance(value, list | tuple) else value


def recovered(*, name: str, width: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Return how often differencing recovers the true cell, with 95 % intervals over documents: of all cells,
    and of those that are not empty."""
    kind = _mechanism(name, epsilon=0.5, rows=30)
    rng = Streams(seed)("attack", width)
    ranks = np.minimum(rng.zipf(1.35, size=(_DOCUMENTS, 1000)), 20_000)
    tokens = _PLAIN([" ".join(f"w{rank}" for rank in row) for row in ranks])
    family = HashFamily(rng.bytes(32), kind.rows, width)
    nonces = fresh_nonces(_DOCUMENTS, rng.bytes)
    covered = Covered(tuple(map(str, range(_DOCUMENTS))), tuple(nonce.tobytes().hex() for nonce in nonces))
    of = CountRelease("body", family, kind, NoiseKey.fresh(rng.bytes), no_charge)
    words = Ids.of([f"v{number}" for number in range(6000)])
    asker = Asker(of.terms, family, kind, Decoys(words, np.arange(6000), rng.bytes(16)))
    request = asker.ask(Ids.of(_WORDS))
    answer = in_memory(Desk(Owner.of(tokens, covered, of)), "attacker")(request.message)
    cells = request.question.columns + np.arange(kind.rows) * width
    truth = CountSketch.of(tokens, family).columns(cells.ravel()).reshape(*cells.shape, -1)
    right = np.stack([differencing(vector) for vector in CountsAnswer.decode(answer).table()]) == truth
    every, full = (np.where(cells, right, np.nan) for cells in (np.ones_like(right), truth != 0))
    return {"all cells": _over_documents(every), "not empty": _over_documents(full)}


def _over_documents(right: FloatArray) -> tuple[float, float, float]:
    """Return the mean share over the documents (the last axis) with its interval."""
    shares = np.nanmean(right.reshape(-1, right.shape[-1]), axis=0)
    interval = fold_interval(shares)
    return interval.value, max(interval.low, 0.0), min(interval.high, 1.0)


def audited(*, name: str, epsilon: float, rows: int, trials: int, seed: int) -> dict[str, Any]:
    """Return the best result of three attacks, with the interval of the counted successes; ∞ is None."""
    kind = _mechanism(name, epsilon=epsilon, rows=rows)
    tried = [audit(kind, trials=trials, statistic=attack, seed=seed) for attack in ATTACKS]
    first, best = tried[0], max(tried, key=lambda one: one.success)
    return {
        "claimed ε": first.claimed,
        "charged ε": first.charged if np.isfinite(first.charged) else None,
        "audited ε at least": max(one.lowest for one in tried),
        "attacker right": (best.success, *best.success_interval),
        "bound": first.bound,
        "draws": trials,
    }


def _mechanism(name: str, *, epsilon: float, rows: int) -> Mechanism:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report names the insecure mechanism
        return mechanism(name, epsilon=epsilon, rows=rows)
