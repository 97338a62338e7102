"""Sketches: exact where nothing collides, honest where something does, linear always."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.errors import ConfigError, PrivacyError
from isthmus.features import ExactCounts, Pairs, compute
from isthmus.private import sketch as module
from isthmus.private.sketch import CountMin, CountSketch, HashFamily
from isthmus.randomness import Streams
from isthmus.text import Tokeniser, Tokens
from isthmus_reproduce.csfltr.rtk import ReverseTopK

PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())
KEY = b"k" * 32


def zipf_texts(count: int, length: int, *, seed: int = 0, words: int = 3000) -> Tokens:
    rng = Streams(seed)("sketch test", length)
    ranks = np.minimum(rng.zipf(1.3, size=(count, length)), words)
    return PLAIN([" ".join(f"w{rank}" for rank in row) for row in ranks])


def every_word(tokens: Tokens) -> Ids:
    return Ids(np.arange(len(tokens.terms.vocabulary)), tokens.terms.vocabulary)


def exact(tokens: Tokens) -> np.ndarray:
    return tokens.counts().toarray().T


def test_cells_hold_what_the_words_add() -> None:
    tokens = zipf_texts(5, 50)
    family = HashFamily(KEY, rows=3, width=40)
    hashed = family.of_vocabulary(tokens.terms)
    counts = tokens.counts().toarray()
    for kind in (CountMin, CountSketch):
        dense = np.zeros((5, family.size), dtype=int)
        for row in range(3):
            signs = hashed.signs[row] if kind.signed else np.ones(counts.shape[1], dtype=int)
            for document in range(5):
                np.add.at(dense[document], hashed.cells[row], signs * counts[document])
        np.testing.assert_array_equal(kind.of(tokens, family).dense(), dense)


def test_count_min_never_underestimates_and_count_sketch_is_unbiased() -> None:
    tokens = zipf_texts(10, 100)
    truth = exact(tokens)
    words = every_word(tokens)
    misses = []
    for seed in range(20):
        family = HashFamily(bytes([seed]) * 32, rows=5, width=100)
        assert (CountMin.of(tokens, family).estimate(words) >= truth).all()
        row = HashFamily(bytes([seed]) * 32, rows=1, width=100)
        sketch = CountSketch.of(tokens, row)
        misses.append(sketch.estimate(words) - truth)
    errors = np.array(misses).mean(axis=(1, 2))
    assert abs(errors.mean()) < 4 * errors.std(ddof=1) / len(errors) ** 0.5 + 1e-3


def test_without_the_sign_a_count_sketch_means_nothing() -> None:
    tokens = zipf_texts(40, 400)
    family = HashFamily(KEY, rows=10, width=200)
    sketch, words, truth = CountSketch.of(tokens, family), every_word(tokens), exact(tokens)
    hashed = family.of(words)
    cells = sketch.columns(hashed.cells.ravel()).reshape(*hashed.cells.shape, -1)
    often = truth > 10
    signed = CountSketch.combine(cells, hashed.signs)[often] - truth[often]
    printed = np.median(cells, axis=0)[often] - truth[often]  # eq. (3) as printed
    assert (printed**2).mean() ** 0.5 > 5 * (signed**2).mean() ** 0.5


def test_one_row_has_the_variance_of_the_formula() -> None:
    """(F₂ − f²)/w, and F₂ is what the cells' squares estimate."""
    tokens = zipf_texts(1, 300)
    truth, words = exact(tokens)[:, 0].astype(float), every_word(tokens)
    moment = (truth**2).sum()
    errors, moments = [], []
    for seed in range(400):
        family = HashFamily(seed.to_bytes(32, "little"), rows=1, width=64)
        sketch = CountSketch.of(tokens, family)
        errors.append(sketch.estimate(words)[:, 0] - truth)
        moments.append((sketch.values.astype(float) ** 2).sum())
    rare = truth == 1
    assert np.var(np.array(errors)[:, rare]) == pytest.approx((moment - 1) / 64, rel=0.15)
    assert np.mean(moments) == pytest.approx(moment, rel=0.1)


@pytest.mark.parametrize("kind", [CountMin, CountSketch])
def test_sketches_of_parts_add_to_the_sketch_of_the_whole(kind: type[CountMin] | type[CountSketch]) -> None:
    texts = [["a b c a", "x"], ["c d", "x y z"]]
    family = HashFamily(KEY, rows=2, width=8)
    one, other = (kind.of(PLAIN(part), family) for part in texts)
    whole = kind.of(PLAIN([" ".join(pair) for pair in zip(*texts, strict=True)]), family)
    np.testing.assert_array_equal((one + other).dense(), whole.dense())
    assert not np.isin(0, (one + other).values)


def test_sketches_that_do_not_belong_together_do_not_add() -> None:
    tokens = PLAIN(["a b"])
    family = HashFamily(KEY, width=8)
    one = CountMin.of(tokens, family)
    for other in (
        CountSketch.of(tokens, family),
        CountMin.of(tokens, HashFamily(b"o" * 32, width=8)),
        CountMin.of(tokens, HashFamily(KEY, width=8, epoch=1)),
        CountMin.of(PLAIN(["a", "b"]), family),
    ):
        with pytest.raises(PrivacyError, match="do not add"):
            one + other


def test_totals_are_those_of_their_words() -> None:
    tokens = PLAIN(["a a b", "a c", ""])
    totals = CountMin.of_totals(tokens.terms, np.array([3, 1, 1]), HashFamily(KEY, width=1 << 14))
    assert totals.estimate(every_word(tokens))[:, 0].tolist() == [3, 1, 1]


@pytest.mark.parametrize("kind", [CountMin, CountSketch])
def test_pairs_and_tables_agree(kind: type[CountMin] | type[CountSketch]) -> None:
    tokens = zipf_texts(6, 80)
    sketch, words = kind.of(tokens, HashFamily(KEY, rows=3, width=50)), every_word(tokens)
    documents = np.tile(np.arange(6), len(words))
    pairs = sketch.at(documents, words[np.repeat(np.arange(len(words)), 6)])
    np.testing.assert_array_equal(pairs.reshape(len(words), 6), sketch.estimate(words))


def test_chunks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = zipf_texts(30, 40)
    family = HashFamily(KEY, rows=2, width=300)
    whole = CountSketch.of(tokens, family).dense()
    monkeypatch.setattr(module, "_CHUNK", 50)
    np.testing.assert_array_equal(CountSketch.of(tokens, family).dense(), whole)


def test_empty_documents_and_no_documents() -> None:
    family = HashFamily(KEY, width=16)
    sketch = CountMin.of(PLAIN(["", "a", ""]), family)
    assert len(sketch) == 3
    assert sketch.estimate(Ids.of(["a"])).tolist() == [[0, 1, 0]]
    assert len(CountMin.of(PLAIN([]), family)) == 0


def test_hashes_depend_on_key_row_and_epoch_and_spread_evenly() -> None:
    words = Ids.of([f"w{number}" for number in range(20_000)])
    family = HashFamily(KEY, rows=4, width=100)
    hashed = family.of(words)
    columns = hashed.cells - np.arange(4)[:, None] * 100
    for row in range(4):
        counts = np.bincount(columns[row], minlength=100)
        assert ((counts - 200) ** 2 / 200).sum() < 160  # χ² of 99 degrees of freedom
        assert abs(hashed.signs[row].mean()) < 0.03
    agree = [(columns[a] == columns[b]).mean() for a in range(4) for b in range(a)]
    for other in (HashFamily(b"o" * 32, rows=4, width=100), HashFamily(KEY, rows=4, width=100, epoch=1)):
        agree.append((other.of(words).cells == hashed.cells).mean())
    assert max(agree) < 0.015
    np.testing.assert_array_equal(family.of(words[::-1]).cells, hashed.cells[:, ::-1])
    assert "kkkk" not in repr(family)


def test_impossible_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="hash key"):
        HashFamily(b"short")
    with pytest.raises(ConfigError, match="cells"):
        HashFamily(KEY, rows=0)
    with pytest.raises(ConfigError, match="cells"):
        HashFamily(KEY, rows=200, width=1 << 20)


def test_features_from_noiseless_sketches_converge_to_exact_ones_as_they_widen() -> None:
    tokens, queries = zipf_texts(60, 80), zipf_texts(10, 4, seed=1)
    held = ExactCounts.of(tokens)
    pairs = Pairs.all(len(queries), len(tokens))
    truth = compute(queries, pairs, title=held, body=held)

    def error(width: int, key: int) -> float:
        class Sketched(ExactCounts):
            def counts(self, documents: np.ndarray, words: Ids) -> np.ndarray:
                sketch = CountMin.of(self.tokens, HashFamily(bytes([key]) * 32, width=width))
                return sketch.at(documents, words)

        body = Sketched(held.tokens, held.collection)
        return float(np.abs(compute(queries, pairs, title=held, body=body) - truth).mean())

    errors = [np.mean([error(width, key) for key in range(6)]) for width in (64, 512, 4096)]
    assert errors[0] > 2 * errors[1] > 6 * errors[2]
    assert error(1 << 20, 0) < 1e-9


class TestReverseTopK:
    tokens = zipf_texts(300, 60, words=400)
    sketch = CountMin.of(tokens, HashFamily(KEY, rows=3, width=2000))

    def test_finds_what_scoring_everything_finds(self) -> None:
        index = ReverseTopK.of(self.sketch, k=10)
        truth = exact(self.tokens)
        words = every_word(self.tokens)
        for word in np.flatnonzero((truth > 0).sum(axis=1) >= 20)[:30]:
            best = index.search(words[[word]], np.ones(len(words.vocabulary)), k=10, share=0.5)
            least = np.sort(truth[word])[-10]
            assert len(best) == 10
            assert (truth[word][best] >= least - 1).all()

    def test_keeps_no_more_than_it_should(self) -> None:
        index = ReverseTopK.of(self.sketch, k=4, factor=2)
        assert np.diff(index.offsets).max() == 8
        everything = ReverseTopK.of(self.sketch, k=1000)
        assert len(everything.documents) == len(self.sketch.cells)

    def test_several_words_add_up_by_weight(self) -> None:
        tokens = PLAIN(["a a a", "b b", "a b", "c"])
        index = ReverseTopK.of(CountMin.of(tokens, HashFamily(KEY, width=1 << 12)), k=5)
        words = Ids.of(["a", "b"])
        assert index.search(words, np.array([1.0, 1.0])).tolist() == [0, 1, 2]
        assert index.search(words, np.array([1.0, 5.0])).tolist() == [1, 2, 0]
        assert index.search(words, np.array([1.0, 5.0]), k=1).tolist() == [1]
        assert index.search(Ids.of(["nowhere"]), np.ones(1)).tolist() == []
