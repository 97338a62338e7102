"""Sums under noise shares: the law of the total, what a participant still faces, and who pays when."""

from __future__ import annotations

import hashlib
from itertools import count

import numpy as np
import pytest
from scipy.stats import nbinom

from isthmus.errors import BudgetExhausted, ConfigError, PrivacyError, ProtocolError
from isthmus.private.cost import Covered, no_charge
from isthmus.private.ledger import Budget, Ledger, fingerprint
from isthmus.private.mechanisms import Geometric
from isthmus.private.sketch import HashFamily
from isthmus.private.sums import NoiseShares, SumPlan, totals_in_memory
from isthmus.private.totals import hashed
from isthmus.retrieval import TEXT, TIMES, Statistics
from isthmus.text import tokenise

FAMILY = HashFamily(b"\x07" * 32, rows=1, width=256)
SILOS = ("east", "north", "south", "west")
MOST = 400


def secret_stream(secret: bytes):
    """Entropy from an injected secret, so that a test draws the same noise every time."""
    blocks = count()

    def entropy(size: int) -> bytes:
        return hashlib.shake_256(secret + next(blocks).to_bytes(8, "little")).digest(size)

    return entropy


def geometric(rate: float) -> np.ndarray:
    return Geometric(rate).probabilities(np.arange(-MOST, MOST + 1))


def chances(noise: NoiseShares, shares: int, most: int) -> np.ndarray:
    """P(k) of the sum of so many shares, for k from −most to most, by convolution."""
    one_sided = nbinom.pmf(np.arange(2 * most + 1), shares / noise.honest, 1 - np.exp(-noise.rate))
    return np.convolve(one_sided, one_sided[::-1])[most : 3 * most + 1]


def steepest(chances: np.ndarray) -> float:
    """The largest |ln P(k) − ln P(k + 1)|: what one more count changes for who sees the sum."""
    inner = np.log(chances[MOST - 60 : MOST + 61])
    return float(np.abs(np.diff(inner)).max())


@pytest.mark.parametrize(("silos", "colluding", "dropped"), [(2, 1, 0), (4, 1, 0), (5, 1, 1), (7, 2, 2)])
@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_enough_shares_make_the_geometric_noise_exactly(rate, silos, colluding, dropped) -> None:
    shares = NoiseShares(rate, silos, colluding, dropped)
    np.testing.assert_allclose(chances(shares, shares.honest, MOST), geometric(rate), atol=1e-12)
    assert shares.law(shares.honest).rate == pytest.approx(rate)


@pytest.mark.parametrize(("silos", "dropped"), [(2, 0), (4, 0), (5, 1)])
def test_shares_are_drawn_from_their_law(silos: int, dropped: int) -> None:
    """The cut points are the distribution function; the draws follow it (χ² at a fixed secret)."""
    from scipy.stats import chisquare, nbinom

    shares = NoiseShares(0.25, silos, 1, dropped)
    points = np.arange(len(shares._cuts))
    exact = nbinom.cdf(points, 1 / shares.honest, 1 - np.exp(-0.25))
    np.testing.assert_allclose(shares._cuts / 2.0**64, exact, atol=1e-12)
    drawn = shares.draw(200_000, secret_stream(b"shares"))
    expected = chances(shares, 1, MOST) * len(drawn)
    near = np.abs(np.arange(-MOST, MOST + 1)) <= 8
    seen = np.bincount(np.clip(drawn, -MOST, MOST) + MOST, minlength=2 * MOST + 1)
    observed = np.append(seen[near], seen[~near].sum())
    foretold = np.append(expected[near], len(drawn) - expected[near].sum())
    assert chisquare(observed, foretold).pvalue > 1e-3
    assert drawn.var() == pytest.approx(shares.variance(1), rel=0.05)


def test_the_total_of_drawn_shares_is_geometric() -> None:
    from scipy.stats import chisquare

    shares, entropy = NoiseShares(0.5, 5, 1, 1), secret_stream(b"totals")
    total = sum(shares.draw(100_000, entropy) for _ in range(shares.honest))
    near = np.abs(np.arange(-MOST, MOST + 1)) <= 6
    seen = np.bincount(np.clip(total, -MOST, MOST) + MOST, minlength=2 * MOST + 1)
    expected = geometric(0.5) * 100_000
    observed = np.append(seen[near], seen[~near].sum())
    assert chisquare(observed, np.append(expected[near], 100_000 - expected[near].sum())).pvalue > 1e-3


@pytest.mark.parametrize("silos", [2, 3, 4, 10])
def test_a_participant_who_takes_its_own_share_off_still_faces_all_of_the_noise(silos: int) -> None:
    """The privacy loss of what is left stays at the rate; shares of 1/n would lose more."""
    rate = 0.25
    shares = NoiseShares(rate, silos)
    assert steepest(chances(shares, silos - 1, MOST)) <= rate * (1 + 1e-9)
    naive = NoiseShares(rate, silos + 1)  # whose shares are 1/n of the noise
    assert naive.honest == silos
    assert steepest(chances(naive, silos, MOST)) <= rate * (1 + 1e-9), "the relay alone is kept off"
    assert steepest(chances(naive, silos - 1, MOST)) > rate * 1.01, "a participant is not"


@pytest.mark.parametrize(("colluding", "dropped"), [(1, 0), (1, 2), (2, 1), (3, 2)])
def test_colluding_and_dropped_silos_leave_enough(colluding: int, dropped: int) -> None:
    shares = NoiseShares(0.5, 8, colluding, dropped)
    assert steepest(chances(shares, 8 - colluding - dropped, MOST)) == pytest.approx(0.5)
    assert steepest(chances(shares, 8 - colluding - dropped - 1, MOST)) > 0.5
    assert steepest(chances(shares, 8, MOST)) <= 0.5 * (1 + 1e-9), "more noise is never less privacy"


def test_draws_are_fresh_unless_a_secret_is_injected() -> None:
    shares = NoiseShares(0.25, 4)
    assert not np.array_equal(shares.draw(1000), shares.draw(1000))
    first, again = (shares.draw(1000, secret_stream(b"one")) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert not shares.draw(10, lambda size: b"\0" * size).any()
    assert not NoiseShares(np.inf, 4).draw(10).any()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((0.25, 1), "1 silos less 1"),
        ((0.25, 4, 0), "less 0 colluding"),
        ((0.25, 4, 2, 2), "less 2 colluding"),
    ],
)
def test_shares_that_protect_nobody_are_refused(settings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NoiseShares(*settings)


# the whole way: four silos, sketches of a field, a secure sum, the ledgers


def corpus(name: str) -> list[str]:
    return [f"{name} apple pear {'plum ' * number}" for number in range(5)]


@pytest.fixture
def silos() -> dict[str, tuple[Statistics, Covered]]:
    made = {}
    for name in SILOS:
        texts = corpus(name)
        names = [f"{name}/{number}" for number in range(len(texts))]
        made[name] = (
            hashed(Statistics.of(tokenise(texts)), FAMILY),
            Covered(names, [f"{one}#1" for one in names]),
        )
    return made


def exact(silos: dict[str, tuple[Statistics, Covered]], absent: tuple[str, ...] = ()) -> Statistics:
    first, *rest = (sums for name, (sums, _) in silos.items() if name not in absent)
    return sum(rest, first)


def test_without_noise_the_totals_are_the_sums(silos) -> None:
    plan = SumPlan("body", FAMILY, SILOS, epsilon_df=np.inf, epsilon_cf=np.inf)
    totals, sums = totals_in_memory(plan, silos), exact(silos)
    np.testing.assert_array_equal(totals.tables[TEXT], sums.tables[TEXT])
    np.testing.assert_array_equal(totals.tables[TIMES], sums.tables[TIMES])
    assert (totals.documents, totals.length) == (sums.documents, sums.length) == (20, sums.length)


def test_the_totals_carry_the_noise_they_say(silos) -> None:
    plan = SumPlan("body", FAMILY, SILOS)
    sums, entropy = exact(silos), secret_stream(b"sums")
    errors = np.stack(
        [totals_in_memory(plan, silos, entropy=entropy).tables[TEXT] - sums.tables[TEXT] for _ in range(12)]
    )
    law = Geometric(totals_in_memory(plan, silos).rates[TEXT])
    assert law.variance == pytest.approx(Geometric(0.25).variance * 4 / 3)
    assert errors.var() == pytest.approx(law.variance, rel=0.15)
    assert abs(errors.mean()) < 5 * np.sqrt(law.variance / errors.size)


def test_silos_may_drop_out_as_agreed_and_no_further(silos) -> None:
    plan = SumPlan("body", FAMILY, SILOS, epsilon_df=np.inf, epsilon_cf=np.inf, dropped=1)
    totals = totals_in_memory(plan, silos, absent=["west"])
    np.testing.assert_array_equal(totals.tables[TEXT], exact(silos, ("west",)).tables[TEXT])
    assert totals.documents == 15
    with pytest.raises(ProtocolError):
        totals_in_memory(plan, silos, absent=["west", "east"])
    with pytest.raises(PrivacyError, match="fewer silos"):
        plan.totals(np.zeros(2 * FAMILY.size + 2, dtype=np.uint64), answered=2)


def test_every_attempt_charges_every_document_before_noise_is_drawn(silos, tmp_path) -> None:
    plan = SumPlan("body", FAMILY, SILOS)
    sums, _ = silos["north"]
    with Ledger(tmp_path / "north.ledger", Budget(epsilon=2.5)) as ledger:
        names = [f"north/{number}" for number in range(5)]
        covered = ledger.versions(names, [fingerprint(text) for text in corpus("north")])

        def charge(releases) -> None:
            ledger.charge_all(releases, kind="sums")

        seen = [plan.contribute("north", sums, covered, charge=charge) for _ in range(2)]
        assert not np.array_equal(*seen), "noise is fresh"
        assert [ledger.spent(name) for name in names] == [2.0] * 5, "0.5 + 0.5 twice, once for all peers"
        assert ledger.spent(names[0], peer="south") == 2.0
        drawn = []

        def entropy(size: int) -> bytes:
            drawn.append(size)
            return bytes(size)

        with pytest.raises(BudgetExhausted):
            plan.contribute("north", sums, covered, charge=charge, entropy=entropy)
        assert drawn == [8], "only the attempt's name"
        assert {row["kind"] for row in ledger.departures()} == {"sums"}
        assert len({row["release"] for row in ledger.departures()}) == 4
        ledger.audit()


def test_a_summand_must_fit_the_plan(silos) -> None:
    plan = SumPlan("body", FAMILY, SILOS)
    sums, covered = silos["north"]
    other = hashed(Statistics.of(tokenise(["x"])), HashFamily(b"\x08" * 32, rows=1, width=256))
    with pytest.raises(PrivacyError, match="another silo"):
        plan.contribute("centre", sums, covered, charge=no_charge)
    with pytest.raises(PrivacyError, match="hash family"):
        plan.contribute("north", other, covered, charge=no_charge)
    with pytest.raises(PrivacyError, match="5 documents, but 1"):
        plan.contribute("north", sums, Covered(["a"], ["b"]), charge=no_charge)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"silos": ("north", "north")}, "distinct silos"),
        ({"dropped": 2}, "2 silos may drop out of 4"),
        ({"colluding": 4}, "4 silos less 4"),
        ({"family": HashFamily(b"\x07" * 32, rows=2, width=256)}, "one row"),
    ],
)
def test_a_plan_that_cannot_be_kept_is_refused(changes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SumPlan(**{"field": "body", "family": FAMILY, "silos": SILOS, **changes})
