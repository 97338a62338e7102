"""The sixteen features against a reference that follows the formulae pair by pair, word by word."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from isthmus import features
from isthmus.arrays import Ids
from isthmus.errors import ConfigError, DataError
from isthmus.features import NAMES, PROFILES, ExactCounts, Pairs, Settings, compute
from isthmus.randomness import Streams
from isthmus.retrieval import Statistics
from isthmus.tables import Corpus, Documents, Qrels, Queries, Run
from isthmus.text import tokenise

WORDS = [f"word{number}" for number in range(40)]


def world(seed: int = 0, documents: int = 30, queries: int = 8) -> tuple[list[str], list[str], list[str]]:
    """Titles (some empty), bodies (one empty) and queries; some query words are nowhere else."""
    rng = Streams(seed)("features test")

    def text(low: int, high: int) -> str:
        ranks = np.minimum(rng.geometric(0.08, size=int(rng.integers(low, high + 1))) - 1, len(WORDS) - 1)
        return " ".join(WORDS[rank] for rank in ranks)

    titles = [text(0, 4) for _ in range(documents)]
    bodies = ["", *(text(1, 60) for _ in range(documents - 1))]
    return titles, bodies, [f"{text(0, 6)} nowhere{number % 2}" for number in range(queries)]


def reference(
    query: list[str], texts: list[list[str]], at: int, settings: Settings
) -> tuple[list[float], int]:
    """The seven features of one field and its length, as §4.3 of the formulae reads."""
    total, collection = len(texts), [word for text in texts for word in text]
    text = texts[at]
    length, average = len(text), (len(collection) / total) or 1.0
    df = {word: sum(word in other for other in texts) for word in query}
    tc = Counter(text)

    def idf(word: str) -> float:
        if settings.idf == "log":
            return math.log(1 + (total - df[word] + 0.5) / (df[word] + 0.5))
        if settings.idf == "ratio":
            return total / max(df[word], 1)
        mean = sum(df[other] for other in query) / len(query)
        return max(0.0, math.log2((total - mean + 0.5) / (mean + 0.5)))

    values = dict.fromkeys(("tf", "tfidf", "bm25", "abs", "dir", "jm"), 0.0)
    for word in query:
        relative = tc[word] / length if length else 0.0
        x = relative if settings.relative else tc[word]
        share = collection.count(word) / max(len(collection), 1)
        spread = settings.k1 * (1 - settings.b + settings.b * length / average)
        values["tf"] += relative
        values["tfidf"] += relative * idf(word)
        values["bm25"] += idf(word) * x * (settings.k1 + 1) / (x + spread) if x else 0.0
        delta, mu, lam = settings.discount, settings.dirichlet, settings.jelinek
        models = {
            "abs": max(tc[word] - delta, 0) / length + delta * len(tc) / length * share if length else share,
            "dir": (tc[word] + mu * share) / (length + mu),
            "jm": (1 - lam) * relative + lam * share,
        }
        for name, p in models.items():
            values[name] += math.log(p) if p > 0 else 0.0
    whole = sum(map(idf, query)) if settings.idf != "code" else (idf(query[0]) if query else 0.0)
    tf, *rest = values.values()
    return [tf, whole, *rest], length


def test_the_papers_profile_is_equation_1_on_four_documents() -> None:
    """N/df of every term, summed over the query's words: 4/2 + 4/1; BM25 on relative frequencies."""
    bodies = tokenise(["red red pear plum", "red apple", "plum plum", "fig"])
    empty = ExactCounts.of(tokenise([""] * 4))
    table = compute(
        tokenise(["red pear"]),
        Pairs.all(1, 4),
        title=empty,
        body=ExactCounts.of(bodies),
        settings=PROFILES["paper"],
    )
    row = dict(zip(NAMES, table[0], strict=True))
    assert row["body.IDF"] == pytest.approx(4 / 2 + 4 / 1)
    assert row["body.TF·IDF"] == pytest.approx(2 / 4 * 2 + 1 / 4 * 4)
    spread = 1.2 * (0.25 + 0.75 * 4 / (9 / 4))
    red, pear = 0.5 * 2.2 / (0.5 + spread), 0.25 * 2.2 / (0.25 + spread)
    assert row["body.BM25"] == pytest.approx(2 * red + 4 * pear)


@pytest.mark.parametrize("profile", PROFILES)
def test_features_equal_the_reference(profile: str) -> None:
    titles, bodies, asked = world()
    settings = PROFILES[profile]
    queries, title, body = tokenise(asked), tokenise(titles), tokenise(bodies)
    pairs = Pairs.all(len(asked), len(bodies))
    table = compute(queries, pairs, title=ExactCounts.of(title), body=ExactCounts.of(body), settings=settings)
    fields = [[tokens.words(at) for at in range(len(tokens))] for tokens in (title, body)]
    for row, (query, document) in enumerate(zip(pairs.queries, pairs.documents, strict=True)):
        parts = [reference(queries.words(query), texts, document, settings) for texts in fields]
        expected = [*parts[0][0], *parts[1][0], parts[0][1], parts[1][1]]
        np.testing.assert_allclose(table[row], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_query_alone_has_the_features_it_has_among_others(profile: str) -> None:
    titles, bodies, queries = world()
    counts = {"title": ExactCounts.of(tokenise(titles)), "body": ExactCounts.of(tokenise(bodies))}
    together = compute(tokenise(queries), Pairs.all(8, 30), **counts, settings=PROFILES[profile])
    for at, query in enumerate(queries):
        alone = compute(tokenise([query]), Pairs.all(1, 30), **counts, settings=PROFILES[profile])
        np.testing.assert_allclose(alone, together[at * 30 : (at + 1) * 30], rtol=1e-13, atol=1e-13)


def test_blocks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    titles, bodies, asked = world(1)
    counts = {"title": ExactCounts.of(tokenise(titles)), "body": ExactCounts.of(tokenise(bodies))}
    pairs = Pairs.all(len(asked), len(bodies))
    whole = compute(tokenise(asked), pairs, **counts)
    monkeypatch.setattr(features, "_BLOCK", 7)
    np.testing.assert_array_equal(compute(tokenise(asked), pairs, **counts), whole)


def test_silos_with_summed_statistics_score_as_one_collection() -> None:
    titles, bodies, asked = world(2)
    whole = compute(
        tokenise(asked),
        Pairs.all(len(asked), len(bodies)),
        title=ExactCounts.of(tokenise(titles)),
        body=ExactCounts.of(tokenise(bodies)),
    ).reshape(len(asked), len(bodies), -1)
    halves = [slice(0, 11), slice(11, None)]
    parts = [[tokenise(texts[half]) for texts in (titles, bodies)] for half in halves]
    title, body = (Statistics.of(parts[0][at]) + Statistics.of(parts[1][at]) for at in (0, 1))
    for half, (headings, texts) in zip(halves, parts, strict=True):
        mine = compute(
            tokenise(asked),
            Pairs.all(len(asked), len(texts)),
            title=ExactCounts.of(headings, title),
            body=ExactCounts.of(texts, body),
        )
        np.testing.assert_allclose(mine.reshape(len(asked), len(texts), -1), whole[:, half], atol=1e-9)


def test_nothing_at_all_is_no_feature() -> None:
    empty = ExactCounts.of(tokenise(["", ""]))
    table = compute(tokenise(["", "apple"]), Pairs.all(2, 2), title=empty, body=empty)
    assert np.isfinite(table).all()
    assert not table[:2].any()
    assert compute(tokenise([]), Pairs.all(0, 2), title=empty, body=empty).shape == (0, 16)


def corpus() -> Corpus:
    titles, bodies, asked = world(3)
    names = tuple(f"d{number:02d}" for number in range(len(bodies)))
    queries = tuple(f"q{number}" for number in range(len(asked)))
    return Corpus(
        "small",
        Documents(names, tuple(titles), tuple(bodies), np.zeros(len(names), np.int64)),
        Queries(queries, tuple(asked), np.zeros(len(asked), np.int64), ("test",) * len(asked)),
        Qrels.from_dict({"q1": {"d03": 2, "d07": 1}, "q2": {"d00": -1}}),
    )


def test_candidates_become_feature_rows_under_their_names() -> None:
    small = corpus()
    run = Run.from_dict({"q2": {"d05": 3.0, "d00": 1.0}, "q1": {"d07": 1.0, "d03": 2.0, "d20": 5.0}})
    rows = features.letor(small, run)
    assert rows.width == len(NAMES) == 16
    assert rows.qrels().to_dict() == {"q1": {"d03": 2, "d07": 1, "d20": 0}, "q2": {"d00": 0, "d05": 0}}
    tokens = tokenise(small.documents.bodies)
    lengths = dict(zip(small.documents.ids, tokens.lengths.tolist(), strict=True))
    assert [lengths[name] for name in rows.ids.tolist()] == rows.features[:, -1].tolist()


def test_candidates_that_are_not_there_are_told() -> None:
    with pytest.raises(DataError, match="'q9'"):
        features.letor(corpus(), Run.from_dict({"q9": {"d01": 1.0}}))
    with pytest.raises(DataError, match="'d99'"):
        features.letor(corpus(), Run.from_dict({"q1": {"d99": 1.0}}))
    with pytest.raises(DataError, match="order"):
        Pairs(np.array([1, 0]), np.array([0, 0]))
    with pytest.raises(ConfigError, match="no idf"):
        Settings(idf="logg")  # type: ignore[arg-type]


def test_unknown_words_have_no_count() -> None:
    counts = ExactCounts.of(tokenise(["an apple", "a pear"]))
    words = Ids.of(["appl", "zebra", "pear"])
    assert counts.counts(np.array([0, 0, 1]), words).tolist() == [1, 0, 1]
    assert counts.frequencies(words).tolist() == [1, 1, 0]  # in the order of the vocabulary
