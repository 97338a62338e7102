"""The attacks: what breaks the paper's noise, and what all of them make of the sound mechanisms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.private.auditing import (
    Audit,
    audit,
    audit_draws,
    likelihood,
    neighbours,
)
from isthmus.private.cost import Cost, Covered, certainty, explain, no_charge, surest, together
from isthmus.private.counts import Asker, CountRelease, Desk, Owner, in_memory
from isthmus.private.decoys import Decoys
from isthmus.private.mechanisms import (
    Geometric,
    Mechanism,
    NoiseKey,
    OneShot,
    PerCell,
    Scalar,
    SharedNoise,
    fresh_nonces,
)
from isthmus.private.messages import CountsAnswer
from isthmus.private.sketch import CountSketch, HashFamily
from isthmus.private.sums import NoiseShares
from isthmus.randomness import Streams
from isthmus.text import Tokeniser
from isthmus_reproduce.private.attacks import contrast, differencing, without_shared_noise

PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())


def shared(epsilon: float = 0.5, rows: int = 30) -> SharedNoise:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SharedNoise(epsilon, rows)


def recovered(kind: Mechanism, width: int, length: int = 1000) -> tuple[float, float]:
    """How often differencing finds the true cell: of all cells, and of those that are not empty."""
    rng = Streams(0)("attack", width)
    ranks = np.minimum(rng.zipf(1.35, size=(60, length)), 20_000)
    tokens = PLAIN([" ".join(f"w{rank}" for rank in row) for row in ranks])
    family = HashFamily(rng.bytes(32), kind.rows, width)
    nonces = fresh_nonces(60, rng.bytes)
    covered = Covered(tuple(map(str, range(60))), tuple(nonce.tobytes().hex() for nonce in nonces))
    of = CountRelease("body", family, kind, NoiseKey.fresh(rng.bytes), no_charge)
    words = Ids.of([f"v{n}" for n in range(6000)])
    asker = Asker(of.terms, family, kind, Decoys(words, np.arange(6000), rng.bytes(16)))
    asked = asker.ask(Ids.of(["w1", "w2", "w30", "w400"]))
    answer = in_memory(Desk(Owner.of(tokens, covered, of)), "attacker")(asked.message)
    cells = asked.question.columns + np.arange(kind.rows) * width
    truth = CountSketch.of(tokens, family).columns(cells.ravel()).reshape(*cells.shape, -1)
    found = np.stack([differencing(vector) for vector in CountsAnswer.decode(answer).table()])
    right = found == truth
    return float(right.mean()), float(right[truth != 0].mean())


def test_differencing_undoes_shared_noise() -> None:
    everything, not_empty = recovered(shared(), 1000)
    assert everything >= 0.9
    assert not_empty >= 0.9


def test_differencing_does_nothing_to_noise_of_its_own() -> None:
    everything, not_empty = recovered(PerCell(0.5), 1000)
    assert everything < 0.1
    assert not_empty < 0.1


def test_shared_noise_cancels_exactly() -> None:
    """What two rows differ by does not depend on the draw (fault C2)."""
    found = neighbours(shared(), trials=50)
    for table in found.draws:
        differences = table[0] - table[0][0]
        assert np.abs(differences - np.rint(differences)).max() < 1e-9
        assert np.ptp(differences, axis=1).max() < 1e-9


SOUND = [OneShot(1.0), OneShot(8.0), OneShot(2.0, rows=3), Scalar(1.0), PerCell(4.0, rows=12)]


def named(kind: Mechanism) -> str:
    return f"{kind.name}-{kind.epsilon:g}-{kind.rows}"


@pytest.mark.soak
@pytest.mark.parametrize("kind", SOUND, ids=named)
@pytest.mark.parametrize("attack", [likelihood, contrast, without_shared_noise])
def test_sound_mechanisms_hold(
    kind: Mechanism, attack: Callable[..., np.ndarray], soak_count: Callable[[int, int], int]
) -> None:
    trials = soak_count(4000, 100_000)
    found = audit(kind, trials=trials, statistic=attack)
    assert found.holds
    assert found.lowest <= found.charged < math.inf
    assert found.success <= found.bound + 3 * (0.25 / trials) ** 0.5
    assert "holds" in str(found)


def test_the_audit_has_teeth() -> None:
    """It comes close to the true ε of a mechanism that is as good as it says and no better."""
    found = audit(OneShot(2.0), trials=40_000)
    assert 0.9 * found.charged < found.lowest <= found.charged
    assert found.success == pytest.approx(found.bound, abs=0.01)
    low, high = found.success_interval
    reach = 2.24 * (found.success * (1 - found.success) / 40_000) ** 0.5  # half of 5 % in either direction
    assert (found.success - low, high - found.success) == pytest.approx((reach, reach), rel=0.05)
    assert f"({low:.1%} to {high:.1%})" in str(found)


def test_the_audit_refutes_the_papers_claim() -> None:
    found = audit(shared(), trials=4000, statistic=without_shared_noise)
    assert found.claimed == 1.0  # two words at a nominal 0.5
    assert found.charged == math.inf
    assert not found.holds
    assert found.lowest > 5
    assert found.success > 0.99
    assert "refuted" in str(found)
    assert "∞" in str(found)


def test_the_audit_notices_noise_that_is_too_small() -> None:
    rng = Streams(3)("too small")
    claimed = Audit("half the noise", claimed=1.0, charged=1.0, halves=True, trials=0)
    law = Geometric(1.0)  # a replaced word is two cells: 2.0 in truth
    draws = [
        shift + law.draw(20_000, rng.bytes) - law.draw(20_000, rng.bytes) * 1.0 - shift_other
        for shift, shift_other in ((1, 0), (0, 1))
    ]
    assert not audit_draws(*draws, claimed).holds


def test_an_audit_of_equal_documents_finds_nothing() -> None:
    rng = Streams(4)("equal")
    same = [rng.normal(size=20_000) for _ in range(2)]
    found = audit_draws(*same, Audit("none", claimed=0.0, charged=0.1, halves=True, trials=0))
    assert found.lowest < 0.1
    assert found.success < 0.52


def seen_by_a_participant(shares: NoiseShares, trials: int) -> Audit:
    """What one of four silos, who takes its own share off, makes of a word replaced in another's document."""
    rng = Streams(5)("totals", shares.honest)
    draws = []
    for cells in ((1, 0), (0, 1)):
        noisy = [cell + sum(shares.draw(trials, rng.bytes) for _ in range(3)) for cell in cells]
        first, second = (np.clip(values, 0, 1) for values in noisy)
        draws.append((first - second).astype(float))
    return audit_draws(*draws, Audit("totals", claimed=1.0, charged=1.0, halves=True, trials=0))


def test_the_totals_hold_against_a_participant() -> None:
    """Shares for n − 1 silos keep the promise to each of them; shares for n, as it is often done, do not."""
    sound = seen_by_a_participant(NoiseShares(0.5, silos=4, colluding=1), 40_000)
    assert 0.8 < sound.lowest <= 1.0
    assert sound.success <= sound.bound + 0.01
    thin = seen_by_a_participant(NoiseShares(0.5, silos=5, colluding=1), 40_000)
    assert not thin.holds


# ---------------------------------------------------------------- what an ε means


def test_certainty_is_the_best_guess_for_geometric_noise() -> None:
    """P(right) of the best test of n against n + 1 under noise of rate ε₀ = ε/2, in one cell and in two."""
    for epsilon in (0.5, 2.0, 8.0):
        a = math.exp(-epsilon / 2)
        one_cell = 1 / (1 + a)
        values = np.arange(-80, 81)
        law = Geometric(epsilon / 2)
        here, there = law.probabilities(values), law.probabilities(values - 1)
        first, second = np.outer(there, here), np.outer(here, there)
        two_cells = 0.5 * np.maximum(first, second).sum()
        assert certainty(epsilon) == pytest.approx(one_cell)
        assert two_cells == pytest.approx(one_cell, abs=1e-6)


def test_after_a_single_draw_the_attacker_is_mostly_surer_than_on_average() -> None:
    """The posterior of two equally likely words in two cells, over all outcomes of the noise."""
    for epsilon in (0.5, 2.0, 8.0):
        values, law = np.arange(-80, 81), Geometric(epsilon / 2)
        here, there = law.probabilities(values), law.probabilities(values - 1)
        first, second = np.outer(there, here), np.outer(here, there)
        inner = (slice(1, -1), slice(1, -1))  # beside the edges, where outcomes are cut off
        sure = (np.maximum(first, second) / (first + second))[inner]
        chance = ((first + second) / 2)[inner]
        assert sure.max() == pytest.approx(surest(epsilon))
        assert (sure * chance).sum() == pytest.approx(certainty(epsilon), abs=1e-6)
        surer = chance[sure > certainty(epsilon) + 1e-9].sum()
        agree = certainty(epsilon) ** 2 + (1 - certainty(epsilon)) ** 2
        assert surer == pytest.approx(agree, abs=1e-6)
    assert surer == pytest.approx(0.965, abs=5e-4)
    assert surest(8.0) == pytest.approx(math.exp(8) / (1 + math.exp(8)))


def test_releases_together_give_no_more_than_their_sum() -> None:
    """The best test over counts, frequencies and totals at once stays below the bound of the summed ε."""
    values = np.arange(-40, 41)
    outcomes = np.ones(1), np.ones(1)
    for epsilon in (3.0, 0.5, 0.5):
        law = Geometric(epsilon / 2)
        here, there = law.probabilities(values), law.probabilities(values - 1)
        pair = np.outer(there, here).ravel(), np.outer(here, there).ravel()
        ratio = np.round(np.log(pair[0] / pair[1]), 9)
        levels, back = np.unique(ratio, return_inverse=True)
        reduced = [np.bincount(back, side, len(levels)) for side in pair]
        outcomes = tuple(np.outer(a, b).ravel() for a, b in zip(outcomes, reduced, strict=True))
    best = 0.5 * np.maximum(*outcomes).sum()
    assert certainty(3.0) < best < certainty(4.0)


def test_an_epsilon_is_explained() -> None:
    assert "98.2 % certainty on average" in explain(8.0)
    assert "99.97 % after a single draw" in explain(8.0)
    assert "62.2 % certainty on average over draws of the noise, and 73.1 % after" in explain(1.0)
    assert "99.97 %" in explain(8.0, halves=False)
    assert "more than 99.99" in explain(40.0)
    assert "no privacy" in explain(math.inf)


def test_fields_compose_in_parallel_and_everything_else_adds_up() -> None:
    def cost(field: str, epsilon: float, name: str, *, is_shared: bool = True) -> Cost:
        return Cost("m", (field,), epsilon, 2.0, 2 / epsilon, name, shared=is_shared)

    body, title = cost("body", 8.0, "cells"), cost("title", 8.0, "title cells")
    assert together([body, title]) == 8.0
    assert together([body, body, cost("body", 0.5, "df"), cost("body", 0.5, "cf"), title]) == 9.0
    word = cost("body", 1.0, "word", is_shared=False)
    assert together([word, word]) == 2.0
    assert together([]) == 0.0
