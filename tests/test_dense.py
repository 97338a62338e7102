"""Dense retrieval: cosines in order, and nothing comes from nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from isthmus.encoders import Encoder, Lsa
from isthmus.errors import ConfigError
from isthmus.retrieval import Dense
from isthmus.tables import Documents, Queries


def documents(texts: list[str]) -> Documents:
    ids = tuple(f"d{at:03d}" for at in range(len(texts)))
    return Documents(ids, ("",) * len(texts), tuple(texts), np.zeros(len(texts), dtype=np.int64))


def queries(texts: list[str], own: tuple[str | None, ...] = ()) -> Queries:
    ids = tuple(f"q{at}" for at in range(len(texts)))
    return Queries(ids, tuple(texts), np.zeros(len(texts), dtype=np.int64), ("test",) * len(texts), own)


def random_texts(count: int) -> list[str]:
    rng = np.random.default_rng(3)
    return [" ".join(f"w{word}" for word in rng.integers(0, 60, 12)) for _ in range(count)]


@pytest.fixture(scope="module")
def world() -> tuple[Documents, Lsa]:
    held = documents([*random_texts(300), ""])
    return held, Lsa.fit(held.texts, dimensions=40)


def test_scores_are_the_cosines_of_all_documents_in_order(world: tuple[Documents, Lsa]) -> None:
    held, encoder = world
    asked = queries(held.texts[:5])
    run = Dense(encoder).index(held).search(asked, k=20)
    near = encoder.encode(asked.texts) @ encoder.encode(held.texts).T
    for at, (_, found, scores) in enumerate(run.lists()):
        best = sorted(zip(near[at].tolist(), held.ids, strict=True), reverse=True)[:20]
        np.testing.assert_allclose(scores, [score for score, _ in best], atol=1e-5)
        assert found[0] == held.ids[at]


def test_the_own_document_and_texts_without_words_are_no_hits(world: tuple[Documents, Lsa]) -> None:
    held, encoder = world
    asked = queries([held.texts[7], "", "unheard of"], own=("d007", None, None))
    run = Dense(encoder).index(held).search(asked, k=1000)
    assert "d007" not in run.to_dict()["q0"]
    assert "d300" not in run.to_dict()["q0"]
    assert run.to_dict()["q1"] == run.to_dict()["q2"] == {}
    assert len(run.to_dict()["q0"]) == 299


def test_inverse_distance_keeps_the_order(world: tuple[Documents, Lsa]) -> None:
    held, encoder = world
    asked = queries(random_texts(310)[300:])
    cosine = Dense(encoder).index(held).search(asked, k=10)
    inverse = Dense(encoder, score="inverse_distance").index(held).search(asked, k=10)
    assert [found for _, found, _ in cosine.lists()] == [found for _, found, _ in inverse.lists()]
    np.testing.assert_allclose(inverse.scores, 1 / (2 - 2 * cosine.scores + 1e-9), rtol=1e-6)


class Rounded(Encoder):
    """Unit vectors but for rounding: the earlier in the alphabet, the longer."""

    fingerprint = "rounded"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        lengths = {"a": 1 + 4e-7, "b": 1 + 2e-7}
        return np.array([[lengths.get(text, 1.0), 0] for text in texts], dtype=np.float32)


@pytest.mark.parametrize("score", ["cosine", "inverse_distance"])
def test_cosines_that_rounding_put_above_one_tie(score: str) -> None:
    index = Dense(Rounded(), score=score).index(documents(["a", "b", "c"]))
    for k in (1, 2, 3):
        run = index.search(queries(["c"]), k)
        assert run.documents.tolist() == ["d002", "d001", "d000"][:k]
        assert len(set(run.scores.tolist())) == 1
        assert run.arrival is None


def test_bad_settings_are_errors(world: tuple[Documents, Lsa]) -> None:
    held, encoder = world
    with pytest.raises(ConfigError, match="cosine"):
        Dense(encoder, score="cosin")
    with pytest.raises(ConfigError, match="at least one"):
        Dense(encoder).index(held).search(queries(["w1"]), k=0)


def test_no_documents_and_no_queries() -> None:
    encoder = Lsa.fit(["one text"])
    assert Dense(encoder).index(documents([])).search(queries(["text"]), k=3).rows == 0
    assert len(Dense(encoder).index(documents(["one text"])).search(queries([]), k=3)) == 0
