"""Keyed noise: the law it follows, and what must and must not change it."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
from scipy import stats

from isthmus.errors import PrivacyError
from isthmus.private.mechanisms import NONCE, Geometric, NoiseKey, fresh_nonces
from isthmus.randomness import Streams

DOMAIN = ("one_shot", 8.0, 1, 8192, 0, "body")


@pytest.mark.parametrize("rate", [0.05, 0.25, 1.0, 4.0])
def test_noise_follows_its_law(rate: float) -> None:
    law = Geometric(rate)
    drawn = law.draw(200_000, Streams(0)("noise", int(100 * rate)).bytes)
    reach = int(min(8 / rate, 12 / rate**0.5)) + 1
    values = np.arange(-reach, reach + 1)
    seen = np.array([(drawn == value).sum() for value in values])
    chances = law.probabilities(values)
    enough = chances * len(drawn) > 20
    rest = len(drawn) - seen[enough].sum()
    expected = np.append(chances[enough], 1 - chances[enough].sum()) * len(drawn)
    _, p = stats.chisquare(np.append(seen[enough], rest), expected)
    assert p > 1e-4
    assert drawn.var() == pytest.approx(law.variance, rel=0.05)
    assert abs(drawn.mean()) < 5 * (law.variance / len(drawn)) ** 0.5


def test_inversion_is_exact_at_every_cut() -> None:
    law = Geometric(1.0)
    ratio = (Decimal(-1)).exp()
    for value in range(-5, 5):
        below = ratio ** abs(value) / (1 + ratio) if value < 0 else 1 - ratio ** (value + 1) / (1 + ratio)
        cut = int(Decimal(2**64) * below)
        words = np.array([cut - 2**40, cut + 2**40], dtype=np.uint64)
        assert law.of(words).tolist() == [value, value + 1]


def test_extreme_words_are_the_far_tails() -> None:
    law = Geometric(4.0)
    ends = law.of(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert ends[0] == -ends[1]
    assert 9 <= ends[1] <= 12  # 64·ln 2/4 = 11.1


def test_no_noise_and_too_much() -> None:
    assert not Geometric(math.inf).draw(1000).any()
    assert Geometric(math.inf).probabilities(np.array([-1, 0, 1])).tolist() == [0, 1, 0]
    with pytest.raises(PrivacyError, match="drown"):
        Geometric(1e-6)
    with pytest.raises(PrivacyError):
        Geometric(float("nan"))


def test_neighbouring_counts_differ_by_the_rate_everywhere() -> None:
    law = Geometric(0.7)
    values = np.arange(-30, 31)
    ratio = np.log(law.probabilities(values) / law.probabilities(values - 1))
    np.testing.assert_allclose(np.abs(ratio), 0.7, rtol=1e-9)


class TestKeyedNoise:
    key = NoiseKey(bytes(range(32)))
    nonces = fresh_nonces(500, Streams(1)("nonces").bytes)

    def test_a_cell_always_answers_the_same(self) -> None:
        law = Geometric(0.5)
        alone = self.key.noise(law, DOMAIN, np.array([7]), self.nonces)
        among = self.key.noise(law, DOMAIN, np.array([3, 7, 6, 7]), self.nonces)
        np.testing.assert_array_equal(among[1], alone[0])
        np.testing.assert_array_equal(among[3], alone[0])
        some = self.key.noise(law, DOMAIN, np.array([7]), self.nonces[100:110])
        np.testing.assert_array_equal(some[0], alone[0, 100:110])

    def test_every_part_of_the_domain_changes_everything(self) -> None:
        others = [
            ("scalar", *DOMAIN[1:]),
            (*DOMAIN[:1], 8.5, *DOMAIN[2:]),
            (*DOMAIN[:2], 2, *DOMAIN[3:]),
            (*DOMAIN[:3], 4096, *DOMAIN[4:]),
            (*DOMAIN[:4], 1, *DOMAIN[5:]),
            (*DOMAIN[:5], "title"),
            ("one_shot", 8, 1, 8192, 0, "body"),  # 8 is not 8.0
            ("one_shot8.0", 1, 8192, 0, "body"),
        ]
        draws = [self.key.words(domain, 3, self.nonces) for domain in (DOMAIN, *others)]
        draws += [self.key.words(DOMAIN, 4, self.nonces), NoiseKey(b"\1" * 32).words(DOMAIN, 3, self.nonces)]
        for one, other in itertools.combinations(draws, 2):
            assert not np.intersect1d(one, other).size

    def test_two_rates_share_no_uniform(self) -> None:
        """Two ε from one uniform would reveal the count."""
        cells = np.arange(200)
        coarse = self.key.noise(Geometric(0.1), DOMAIN, cells, self.nonces).ravel()
        fine = self.key.noise(Geometric(0.2), DOMAIN, cells, self.nonces).ravel()
        assert abs(np.corrcoef(coarse, fine)[0, 1]) < 0.02

    def test_cells_and_documents_are_independent(self) -> None:
        drawn = self.key.noise(Geometric(0.3), DOMAIN, np.arange(60), self.nonces).astype(float)
        between = np.corrcoef(drawn)[np.triu_indices(60, 1)]
        assert abs(between).max() < 0.25
        assert between.std() == pytest.approx(500**-0.5, rel=0.1)

    def test_the_key_does_not_show(self) -> None:
        assert "0102" not in repr(self.key)
        assert repr(self.key) == "NoiseKey(…)"
        with pytest.raises(PrivacyError, match="32 bytes"):
            NoiseKey(b"short")

    def test_nonces_are_random_and_distinct(self) -> None:
        made = fresh_nonces(1000)
        assert made.shape == (1000, NONCE)
        assert len({nonce.tobytes() for nonce in made}) == 1000
