"""Collection statistics of silos under noise: how they are released, what that costs, and how they are read.

Terms are counted in cells with two-sided geometric noise of rate ε/2 in total (one replaced word moves a
document from one cell to another: sensitivity 2). There are two kinds:

    totals      the sum over all silos of one field, noised (`noised`, or by shares in `sums`). A reader with
                documents of its own subtracts their exact share and shrinks the rest towards a prediction
    a release   one silo's statistics for a broker, noised and at once read without anybody's documents
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.private.cost import Cost
from isthmus.private.mechanisms import Entropy, Geometric
from isthmus.private.sketch import CountMin, HashFamily
from isthmus.retrieval import NO_TERMS, TEXT, TIMES, Statistics, posterior_means

WIDTH = 1 << 18
"""Cells of a sketch of totals: there is one for each field, so it can be wide enough to have few
collisions."""
UNIT = 16
"""Steps per unit in a release: values are given in sixteenths, since a posterior mean is no whole number."""
ABSENT, POWER = 0.2, 1.5
"""The prior of a release's count: 0 with probability `ABSENT`, else x with a probability ∝ x^−`POWER`."""

WORD_SHARES = Path(__file__).with_name("word_shares.txt")
"""Words of public English text by the share of its documents that have them, as −log2. The text is the
docstrings of the collection `pydocs`; words that are in at least ten of them are listed."""
FEW = 200
"""Most documents of a silo whose counts are read with `WORD_SHARES`: the noise is as large as such counts."""
SHAPE, RARE, EXPECTED = 0.5, 0.02, 0.7
"""The prior of a count that `WORD_SHARES` predicts: with probability `EXPECTED` a negative binomial of shape
`SHAPE` around the prediction, or around `RARE` documents for a word that is not listed; else the prior
above."""

_GRID = 512  # largest sum that is shrunk; beyond it the noise is relatively small
_FEW = 0.1  # documents assumed for a word that was never seen
_TRUST = 0.5  # weight of a silo's own documents as evidence about those of others


def hashed(statistics: Statistics, family: HashFamily) -> Statistics:
    """Statistics by cell instead of by word. They are still exact, and must not be released."""
    tables = {
        name: CountMin.of_totals(statistics.terms, counts, family).dense()[0]
        for name, counts in statistics.tables.items()
    }
    return replace(statistics, tables=tables, terms=NO_TERMS, hashing=family.public_name, family=family)


def noised(cells: Statistics, epsilons: Mapping[str, float], entropy: Entropy = os.urandom) -> Statistics:
    """Add to cells all the noise that they need, table by table; the ε of the result is that of all
    tables."""
    laws = {name: Geometric(epsilon / 2) for name, epsilon in epsilons.items()}
    tables = {
        name: cells.tables[name] + law.draw(len(cells.tables[name]), entropy) for name, law in laws.items()
    }
    rates = {name: law.rate for name, law in laws.items()}
    return replace(cells, tables=tables, epsilon=sum(epsilons.values()), rates=rates)


def released(exact: Statistics, family: HashFamily, epsilon: float) -> Statistics:
    """One silo's statistics with fresh noise, as a broker gets them: to be drawn once and stored."""
    drawn = noised(hashed(exact, family), {name: rate_of(name, epsilon) for name in exact.tables})
    is_small = exact.documents <= FEW
    expected = {TEXT: exact.documents * _shares(family)} if is_small else {}  # worse for single fields
    tables = {
        name: np.rint(UNIT * read_alone(cells, drawn.rates[name], expected.get(name))).astype(np.int64)
        for name, cells in drawn.tables.items()
    }
    return replace(drawn, tables=tables, epsilon=epsilon, unit=UNIT, family=None, rates={})


def _shares(family: HashFamily) -> FloatArray:
    """For every cell, the share of public documents that have its words, added up; 0 for a cell without such
    words."""
    levels = [line.split(" ") for line in WORD_SHARES.read_text(encoding="utf-8").splitlines()]
    share = {word: 2.0 ** -float(level) for level, *words in levels for word in words}
    words = Ids.of(tuple(sorted(share)))
    cells = family.of_vocabulary(words).cells[0]
    weights = np.array([share[word] for word in words.tolist()], dtype=np.float64)
    return np.bincount(cells, weights, family.size).astype(np.float64)


def read_alone(noisy: IntArray, rate: float, expected: FloatArray | None = None) -> FloatArray:
    """E[x | x + noise] under the prior; a large value, beside which the noise is small, stays as it is.

    `expected` is the prediction of every count before it is seen, from public text only, 0 for very little:
    where documents are few and the noise is as large as their counts, it reveals which words are frequent.
    """
    count = np.arange(_GRID)
    tail = np.where(count > 0, np.maximum(count, 1.0) ** -POWER, 0.0)
    anything = np.where(count == 0, ABSENT, (1 - ABSENT) * tail / tail.sum())
    prior = anything if expected is None else _around(np.array([RARE]), anything)[0]
    width = min(int(np.ceil(20 / rate)), _GRID // 2)  # below −width only noise; grid ends at _GRID − width
    seen = np.arange(-width, _GRID - width)
    means = posterior_means(seen, prior, rate)
    values = np.where(noisy < seen[-1], means[np.clip(noisy, seen[0], seen[-1]) + width], noisy)
    if expected is not None:
        some = np.flatnonzero((expected > RARE) & (noisy < seen[-1]))
        for rows in np.array_split(some, max(1, len(some) * _GRID // (1 << 22))):
            values[rows] = posterior_means(noisy[rows], _around(expected[rows], anything), rate)
    return values


def _around(expected: FloatArray, anything: FloatArray) -> FloatArray:
    """The prior of counts with these predictions, one row each."""
    shape = np.full(len(expected), SHAPE)
    return EXPECTED * _negative_binomial(expected, shape) + (1 - EXPECTED) * anything


def rate_of(table: str, epsilon: float) -> float:
    """The ε of one table of a release: all of it for the text, half of it for each table of a field."""
    return epsilon if table == TEXT else epsilon / 2


def totals_costs(field: str, *, epsilon_df: float, epsilon_cf: float, draw: str) -> list[Cost]:
    """The costs of a field's totals for every document they cover; every draw of noise is charged again."""
    parts = (("document frequencies", epsilon_df), ("collection counts", epsilon_cf))
    return [
        Cost("totals", (field,), epsilon, 2.0, 2 / epsilon, f"{field} {what}, {draw}")
        for what, epsilon in parts
    ]


def release_costs(tables: Iterable[str], epsilon: float, draw: str) -> list[Cost]:
    """The costs of a release for every document; `draw` names the noise, which is drawn once."""
    costs = [Cost("totals", ("title", "body"), epsilon, 2.0, 2 / epsilon, f"{TEXT}, {draw}")]
    if set(tables) > {TEXT}:
        for name in ("title", "body"):
            half = rate_of(f"{name}.having", epsilon)
            costs += totals_costs(name, epsilon_df=half, epsilon_cf=half, draw=draw)
    return costs


def family_of(key: str, width: int) -> HashFamily:
    """The hash family of silos that share this text."""
    digest = hashlib.blake2b(key.encode(), digest_size=32, person=b"isthmus figures").digest()
    return HashFamily(digest, 1, width)


@dataclass(frozen=True, eq=False)
class Foreign:
    """Observations of another silo's documents: their lengths; and for every word of some vocabulary, the
    number of documents in which its noisy value is positive, and the sum of its noisy values."""

    lengths: IntArray
    words: Ids
    positive: IntArray
    summed: IntArray


def worked_out(own: Statistics, foreign: Foreign, law: Geometric) -> Statistics:
    """Estimate totals from another silo's noisy values, where none were released. This is free, but its noise
    grows with the square root of the number of documents. Other words are assumed to be as in own documents
    (in cells).

    An empty cell shows 1 or more with probability q = a/(1 + a), any other with probability 1/(1 + a) or
    more.
    """
    ratio, count = law.ratio, len(foreign.lengths)
    false = ratio / (1 + ratio)
    more = 1 + count / max(own.documents, 1)
    scale = (1 + ratio) / (1 - ratio)
    estimated = np.rint((foreign.positive - count * false) * scale).astype(np.int64)
    assert own.family is not None
    cells = own.family.of_vocabulary(foreign.words).cells[0]
    tables = {}
    for name, more_of_it in ((TEXT, estimated), (TIMES, foreign.summed)):
        mine = own.tables[name]
        tables[name] = np.rint(mine * more).astype(np.int64)
        tables[name][cells] = mine[cells]
        np.add.at(tables[name], cells, more_of_it)  # words may share a cell
    noises = {TEXT: scale * (count * false * (1 - false)) ** 0.5, TIMES: (count * law.variance) ** 0.5}
    return replace(
        own,
        documents=own.documents + count,
        lengths={"text": own.length + int(foreign.lengths.sum())},
        tables=tables,
        rates={name: max(2**0.5 / noise, 1e-4) if noise else np.inf for name, noise in noises.items()},
    )


@dataclass(frozen=True, eq=False)
class TotalsRead:
    """For every word of a vocabulary: documents that have it, occurrences, and occurrences per document."""

    frequencies: FloatArray
    occurrences: FloatArray
    repeats: FloatArray


def read_totals(totals: Statistics, words: Ids, own: Statistics) -> TotalsRead:
    """Estimate frequencies and occurrences of the words of a vocabulary, for a reader with documents of its
    own."""
    mine, mine_all = (own.counts_of(words, table).astype(np.float64) for table in (TEXT, TIMES))
    laws = {name: Geometric(rate) for name, rate in totals.rates.items()}
    others = max(totals.documents - own.documents, 0)
    prior = (mine + _FEW) * others / (own.documents + 1)
    rest = _shrunk(totals.counts_of(words) - mine, prior, _FEW + _TRUST * mine, laws[TEXT].rate)
    having = mine + np.minimum(rest, others)
    repeats = (mine_all + 2 * _mean_repeat(own)) / (mine + 2)
    # predictions from frequency and repetition, and released values, each weighted by its precision
    foretold = having * np.maximum(repeats, 1.0)
    doubt, noise = (0.25 * foretold) ** 2 + 1.0, laws[TIMES].variance
    blended = (foretold * noise + totals.counts_of(words, TIMES) * doubt) / (doubt + noise)
    occurrences = np.maximum(blended, np.maximum(having, mine_all))
    return TotalsRead(having, occurrences, repeats)


def _mean_repeat(own: Statistics) -> float:
    having = float(own.tables[TEXT].sum())
    return own.tables[TIMES].sum() / having if having else 1.0


def _shrunk(noisy: NDArray[Any], mean: FloatArray, shape: FloatArray, rate: float) -> FloatArray:
    """E[x | x + noise], word by word, for x as own documents predict or, now and then, of any frequency.

    The prior is a negative binomial of this mean and shape and, with probability 0.1, 1/(x + 1)^1.5: silos on
    other topics have other words. Sums are over a grid; large ones, whose noise is small, are left alone.
    """
    values = np.maximum(noisy.astype(np.float64), 0.0)
    if np.isinf(rate):
        return values
    small = np.flatnonzero(noisy < _GRID - 20 / rate)
    for rows in np.array_split(small, max(1, len(small) * _GRID // (1 << 22))):
        values[rows] = posterior_means(noisy[rows], _foretold(mean[rows], shape[rows]), rate)
    return values


def _foretold(mean: FloatArray, shape: FloatArray) -> FloatArray:
    """The prior probability of every count of the grid, word by word."""
    anything = (np.arange(_GRID) + 1) ** -1.5
    probabilities: FloatArray = 0.9 * _negative_binomial(mean, shape) + 0.1 * anything / anything.sum()
    return probabilities


def _negative_binomial(mean: FloatArray, shape: FloatArray) -> FloatArray:
    """The probability of every count of the grid, one row for each mean and shape."""
    from scipy.special import gammaln

    x = np.arange(_GRID)
    size, odds = shape[:, None], (mean / (shape + mean))[:, None]
    logs = gammaln(x + size) - gammaln(x + 1) - gammaln(size) + size * np.log1p(-odds)
    probabilities: FloatArray = np.exp(logs + x * np.log(np.maximum(odds, 1e-12)))
    return probabilities
