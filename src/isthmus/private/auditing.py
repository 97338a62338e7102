"""Attacks on releases, to compare what a strong attacker achieves with what the mechanism claims.

`audit` bounds ε from below: noise two neighbouring documents many times, choose on one half of the draws the
event that best tells the two apart, count it on the other half, and take exact binomial bounds of both
counts: ε is at least ln(p_low/q_high). It also simulates an attacker who knows everything except which of two
words stands in the document. A sound mechanism keeps both results within its claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids
from isthmus.private.cost import Cost, Covered, certainty, explain, together
from isthmus.private.counts import Asker, CountRelease, Desk, OpenQuestion, Owner, fresh_versions, in_memory
from isthmus.private.decoys import Decoys
from isthmus.private.mechanisms import Mechanism, NoiseKey
from isthmus.private.messages import CountsAnswer
from isthmus.private.sketch import HashFamily
from isthmus.randomness import Streams
from isthmus.text import Tokeniser, Tokens

_PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())
_WORDS = ("before", "after")
_VOCABULARY = 4000


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit: what the attacker achieved, and what the mechanism claims.

    ε is at least `lowest` with this confidence; `claimed` is the ε that the mechanism states (for shared
    noise, that of its paper), `charged` the ε that Isthmus charges. `success` is how often the attacker named
    the right one of two words; `halves` says whether the two words meet independent noise, which bounds the
    success further.
    """

    mechanism: str
    claimed: float
    charged: float
    halves: bool
    trials: int
    confidence: float = 0.95
    lowest: float = 0.0
    success: float = 0.5

    @property
    def bound(self) -> float:
        """The highest success rate that the charged ε allows the attacker, averaged over the noise."""
        return certainty(self.charged, halves=self.halves)

    @property
    def success_interval(self) -> tuple[float, float]:
        """The confidence interval of the attacker's success rate: exact binomial bounds, with the error
        probability shared between the two directions that were tried."""
        draws, doubt = 2 * (self.trials - self.trials // 2), (1 - self.confidence) / 4
        right = round(self.success * draws)
        return _at_least(right, draws, doubt), 1 - _at_least(draws - right, draws, doubt)

    @property
    def holds(self) -> bool:
        """Whether the lower bound of ε agrees with the claim."""
        return self.lowest <= self.claimed

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "is refuted"
        meaning = explain(self.charged, halves=self.halves)
        chance = "{:.1%} to {:.1%}".format(*self.success_interval)
        return (
            f"{self.mechanism}: claimed ε = {self.claimed:g} {verdict}, audited ε ≥ {self.lowest:.2f}"
            f" ({self.confidence:.0%}, {self.trials:,} draws); the attacker named the right word"
            f" {self.success:.1%} of the time ({chance}), the bound is {self.bound:.1%}. {meaning}"
        )


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Many noisy draws of a document and of the same document with one word replaced.

    `draws` holds for each document the answers to a question about both words, of shape (words, parts,
    draws); `facing` (words, parts) has the sign of each value, 0 for a value of a decoy. The attacker is
    assumed to know both.
    """

    draws: tuple[NDArray[Any], NDArray[Any]]
    facing: NDArray[np.int8]
    costs: tuple[Cost, ...]

    @cached_property
    def without(self) -> FloatArray:
        """The true value of each part without its word, (words, parts): the median over draws of the document
        that lacks the word."""
        lacking = [np.median(draws[word], axis=-1) for word, draws in enumerate(reversed(self.draws))]
        return np.stack(lacking)


def neighbours(
    mechanism: Mechanism, *, trials: int, width: int = 1000, length: int = 100, seed: int = 0
) -> Neighbours:
    """Ask about the removed and the inserted word in `trials` versions of each document."""
    rng = Streams(seed)("audit", mechanism.name)
    filler = [f"w{rank}" for rank in np.minimum(rng.zipf(1.5, size=length - 1), 500).tolist()]
    family = HashFamily(rng.bytes(32), mechanism.rows, width)
    costs: list[Cost] = []

    def charge(releases: Iterable[tuple[Cost, Covered, str]]) -> None:
        costs[:] = [cost for cost, _, _ in releases]

    release = CountRelease("body", family, mechanism, NoiseKey.fresh(rng.bytes), charge)
    vocabulary = Ids.of([f"w{rank}" for rank in range(_VOCABULARY)])
    asker = Asker(release.terms, family, mechanism, Decoys(vocabulary, np.arange(_VOCABULARY), rng.bytes(16)))
    question = asker.ask(Ids.of(_WORDS))
    order = question.places[[question.words.words.index(word) for word in _WORDS]]
    draws = []
    for word in _WORDS:
        covered = fresh_versions(list(map(str, range(trials))), rng.bytes)
        owner = Owner.of(_copies(" ".join([word, *filler]), trials), covered, release)
        answer = CountsAnswer.decode(in_memory(Desk(owner), "attacker")(question.message))
        draws.append(answer.table()[order])
    return Neighbours((draws[0], draws[1]), _facing(question, mechanism), tuple(costs))


def _copies(text: str, count: int) -> Tokens:
    one = _PLAIN([text])
    codes = np.tile(one.terms.codes, count)
    return Tokens(Ids(codes, one.terms.vocabulary), np.arange(count + 1) * len(one.terms.codes))


def _facing(question: OpenQuestion, mechanism: Mechanism) -> NDArray[np.int8]:
    """The signs of the values that belong to each word, 0 elsewhere; 1 throughout unless cells are
    obfuscated."""
    if not mechanism.obfuscated:
        return np.ones((len(_WORDS), 1 if mechanism.signed else mechanism.rows), dtype=np.int8)
    facing = np.zeros((len(_WORDS), mechanism.rows), dtype=np.int8)
    for at, word in enumerate(_WORDS):
        row = question.words.words.index(word)
        facing[at, question.used[row]] = question.signs[question.used[row], row]
    return facing


Statistic = Callable[[Neighbours, NDArray[Any]], FloatArray]
"""An attacker's score for every draw of one document, larger where the first document is likelier."""


def likelihood(pair: Neighbours, draws: NDArray[Any]) -> FloatArray:
    """Score draws by likelihood, as an attacker does who knows everything else. With geometric noise only the
    excess of a cell over its value without the word counts, and no more of it than 1."""
    above = pair.facing[:, :, None] * (draws - pair.without[:, :, None])
    first, second = np.clip(above, 0, 1).sum(axis=1)
    difference: FloatArray = first - second
    return difference


def audit(
    mechanism: Mechanism,
    *,
    trials: int = 20_000,
    statistic: Statistic = likelihood,
    width: int = 1000,
    seed: int = 0,
) -> Audit:
    """Bound a mechanism's ε from below by how well a statistic tells two neighbouring documents apart."""
    pair = neighbours(mechanism, trials=trials, width=width, seed=seed)
    charged = together(pair.costs)
    halves = all(cost.halves for cost in pair.costs)
    claimed = charged if np.isfinite(charged) else mechanism.epsilon * len(pair.costs)
    first, second = (statistic(pair, draws) for draws in pair.draws)
    return audit_draws(first, second, Audit(mechanism.name, claimed, charged, halves, trials))


def audit_draws(first: FloatArray, second: FloatArray, about: Audit) -> Audit:
    """Audit from an attacker's scores for the draws of each document; `about` has the claim and the
    confidence.

    Both directions are tried and four counts bounded, so each bound gets a quarter of the error probability.
    """
    half, doubt = len(first) // 2, (1 - about.confidence) / 4
    lowest, success = 0.0, 0.5
    for one, other in ((first, second), (-second, -first)):
        for score, is_bound in ((_log_ratio, True), (_accuracy, False)):
            cut = _best_cut(one[:half], other[:half], lambda *counts, how=score: how(*counts, doubt))
            hits, false = int((one[half:] >= cut).sum()), int((other[half:] >= cut).sum())
            value = score(hits, false, len(one) - half, doubt)
            lowest, success = (max(lowest, value), success) if is_bound else (lowest, max(success, value))
    return replace(about, lowest=lowest, success=success, trials=len(first))


def _best_cut(one: FloatArray, other: FloatArray, score: Callable[[int, int, int], float]) -> float:
    """The threshold with the best score on these draws."""
    cuts = np.unique(np.concatenate([one, other]))
    cuts = cuts if len(cuts) <= 400 else np.quantile(cuts, np.linspace(0, 1, 400))
    hits = len(one) - np.searchsorted(np.sort(one), cuts)
    false = len(other) - np.searchsorted(np.sort(other), cuts)
    scores = [score(hit, miss, len(one)) for hit, miss in zip(hits.tolist(), false.tolist(), strict=True)]
    return float(cuts[int(np.argmax(scores))])


def _log_ratio(hits: int, false: int, trials: int, doubt: float) -> float:
    """ln of the lower bound of the hit rate over the upper bound of the false-positive rate; −∞
    without hits."""
    low, high = _at_least(hits, trials, doubt), 1 - _at_least(trials - false, trials, doubt)
    return float(np.log(low / high)) if low > 0 else -np.inf


def _accuracy(hits: int, false: int, trials: int, doubt: float) -> float:
    return (hits + trials - false) / (2 * trials)


def _at_least(hits: int, trials: int, doubt: float) -> float:
    """Clopper and Pearson's lower bound of a probability from `hits` in `trials`, at error probability
    `doubt`."""
    from scipy.special import betaincinv

    return float(betaincinv(hits, trials - hits + 1, doubt)) if hits else 0.0
