"""Silos that learn together: directions that join, sums that equal pooled rows, explanations that add up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy.special import expit, logit

from isthmus.asking import Silos
from isthmus.engines import LEAD_WORDS, lead_end
from isthmus.errors import DataError, ProtocolError
from isthmus.logistic import likelihood_sums, newton
from isthmus.retrieval import TEXT, summed
from isthmus.service.evidence import FIRST, GROUPS, SECOND, Company, feedback, first_look
from isthmus.service.index import Index
from isthmus.service.learned import Learned, Line, Look
from isthmus.service.learning import (
    NOBODY,
    PENALTY,
    Best,
    Kept,
    Moments,
    Prepare,
    Show,
    Slopes,
    Think,
    answer_bytes,
    answer_of,
    fit_look,
    learn,
    question_of,
)
from isthmus.service.pupil import Lesson, Pupil, own_directions
from isthmus.service.searching import Searcher
from isthmus.service.settings import EncoderSettings
from isthmus.service.space import Space, joined
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Search
from learning_silos import FAMILY, QUERIES, judged, texts


@pytest.fixture
def silos(tmp_path):
    made = []
    for seed in (1, 2, 3):
        store = SqliteStore(tmp_path / f"{seed}.db")
        store.put(texts(seed))
        index = Index(tmp_path / str(seed), store, encoder=EncoderSettings("none"), family=FAMILY)
        index.catch_up()
        made.append((f"silo{seed}", store, index))
    total = summed(index.snapshot.exact_statistics(name, (TEXT,)) for name, _, index in made)
    for _, _, index in made:
        index.share(total)
    space = joined([own_directions(index.snapshot) for *_, index in made])
    for _, _, index in made:
        index.adopt(space)
    yield made
    for _, store, _ in made:
        store.close()


@pytest.fixture
def pupils(silos):
    return [Pupil(index.snapshot, judged(), depth=20) for *_, index in silos]


def lesson_of(queries, folds=5):
    return Lesson(tuple(queries), tuple(at % folds for at in range(len(queries))))


def asking(pupils, lesson):
    def answer(pupil, question):
        return pupil.prepare(lesson) if isinstance(question, Prepare) else pupil.answer(question)

    return Silos.in_memory({f"s{at}": partial(answer, pupil) for at, pupil in enumerate(pupils)})


def taught(silos, pupils):
    space = silos[0][2].snapshot.encoder.fingerprint
    return learn(asking(pupils, lesson_of(QUERIES)), QUERIES, folds=5, space=space)


class TestSpace:
    def test_joined_directions_are_those_of_one_place(self, silos):
        space = silos[0][2].snapshot.encoder.space
        parts = [own_directions(index.snapshot) for *_, index in silos]
        # with all directions kept, the joined ones span what the stacked documents do
        stacked = np.zeros((sum(part.width for part in parts), len(space.words)))
        first = 0
        for part in parts:
            stacked[first : first + part.width, np.searchsorted(space.words, part.words)] = part.components.T
            first += part.width
        _, strength, right = np.linalg.svd(stacked, full_matrices=False)
        strong = 5
        cosines = np.abs(np.sum(space.components[:, :strong] * right[:strong].T, axis=0))
        assert np.allclose(cosines[np.diff(strength[: strong + 1]) < -1e-3], 1, atol=1e-3)
        assert np.allclose(space.components.T @ space.components, np.eye(space.width), atol=1e-3)

    def test_survives_the_wire_and_the_disk(self, silos, tmp_path):
        space = silos[0][2].snapshot.encoder.space
        space.save(tmp_path / "space")
        assert Space.load(tmp_path / "space").fingerprint == space.fingerprint
        told = Space.from_bytes(space.to_bytes())
        assert np.allclose(told.components, space.components, atol=1e-3)
        with pytest.raises(ProtocolError):
            Space.from_bytes(b"nonsense")

    def test_other_keys_do_not_join(self, silos):
        part = own_directions(silos[0][2].snapshot)
        with pytest.raises(ProtocolError):
            joined([part, replace(part, hashing="another")])

    def test_a_word_of_one_document_stays(self, tmp_path):
        store = SqliteStore(tmp_path / "s.db")
        store.put([Draft("a", "", "tide wave secret"), Draft("b", "", "tide wave")])
        index = Index(tmp_path / "i", store, encoder=EncoderSettings("none"), family=FAMILY)
        index.catch_up()
        assert len(own_directions(index.snapshot).words) == 2
        store.close()

    def test_adopted_directions_survive_a_restart(self, silos, tmp_path):
        _, store, index = silos[0]
        again = Index(index.folder, store, encoder=EncoderSettings("lsa"), family=FAMILY)
        assert again.snapshot.encoder.fingerprint == index.snapshot.encoder.fingerprint
        assert not again._outgrown()


class TestEvidence:
    def test_the_same_every_time(self, silos):
        snapshot = silos[0][2].snapshot
        found = snapshot.find("tide wave", 20)
        one, other = (first_look(snapshot, found) for _ in range(2))
        assert one.shape == (len(found), len(FIRST)) == (len(found), len(SECOND) - 2)
        assert np.array_equal(one, other)
        assert np.isfinite(one).all()

    def test_the_cosine_is_that_of_the_vectors(self, silos):
        """With as many directions as there are words nothing is lost: the two cosines agree."""
        snapshot = silos[0][2].snapshot
        table = first_look(snapshot, found := snapshot.find("tide wave lamp", 20))
        near = table[:, FIRST.index("lsa")]
        assert len(found)
        assert np.allclose(table[:, FIRST.index("cosine")], near, atol=0.02)

    def test_without_shared_directions_it_is_refused(self, tmp_path):
        store = SqliteStore(tmp_path / "s.db")
        store.put(texts(1))
        index = Index(tmp_path / "i", store, encoder=EncoderSettings("none"))
        index.catch_up()
        with pytest.raises(DataError, match="directions"):
            first_look(index.snapshot, index.snapshot.find("tide", 5))
        store.close()

    def test_improbable_company_leads_nowhere(self):
        rng = np.random.default_rng(0)
        vectors = rng.normal(size=(8, 4)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        query = vectors[0]
        assert np.allclose(feedback(vectors, query, np.full(8, -40.0)), vectors @ query, atol=1e-6)

    def test_neighbours_average_others(self):
        vectors = np.eye(3, dtype=np.float32)
        mean = Company.of(vectors).mean(np.array([0.0, 3.0, 6.0]))
        assert np.allclose(mean, [4.5, 3.0, 1.5])
        assert Company.of(vectors[:1]).mean(np.array([2.0])).tolist() == [2.0]

    def test_a_lead_is_the_first_paragraph_and_short(self):
        for body, lead in (
            ("\n\nOne two.\n \nThree.", "\n\nOne two."),
            ("word " * 5000, "word " * LEAD_WORDS),
            ("x" * 5000, ""),
            ("潮汐能。" * 1000, "潮汐能。" * 500),
            ("short ", "short "),
            (" \t\n", " \t\n"),
        ):
            assert body[: lead_end(body)] == lead


class TestSums:
    def test_learning_from_sums_equals_all_rows_in_one_place(self, silos, pupils):
        lesson = lesson_of(QUERIES)
        for pupil in pupils:
            pupil.prepare(lesson)
        look = fit_look(asking(pupils, lesson), 1)
        tables = [pupil._table for pupil in pupils]
        rows, relevant, weights = (
            np.concatenate([getattr(table, name) for table in tables])
            for name in ("first", "relevant", "weights")
        )
        assert np.allclose(look.centre, rows.mean(axis=0))
        assert np.allclose(look.scale, rows.std(axis=0), atol=1e-6)
        features = np.vstack((((rows - look.centre) / look.scale).T, np.ones(len(rows))))
        pooled = newton(
            lambda theta: likelihood_sums(features, relevant, theta, weights=weights),
            np.zeros(len(features)),
            np.append(np.full(len(FIRST), PENALTY), 1e-6),
        )
        assert np.allclose(np.append(look.weights, look.start), pooled, atol=1e-5)

    def test_weights_are_repetitions(self):
        rng = np.random.default_rng(1)
        features, targets = rng.normal(size=(3, 20)), rng.integers(2, size=20).astype(float)
        times, theta = rng.integers(1, 4, 20), rng.normal(size=3)
        repeated = likelihood_sums(np.repeat(features, times, axis=1), np.repeat(targets, times), theta)
        assert np.allclose(likelihood_sums(features, targets, theta, weights=times.astype(float)), repeated)

    def test_ten_hits_of_every_query_are_kept(self, silos, pupils):
        taught(silos, pupils)
        assert sum(len(pupil.kept) for pupil in pupils) == 10 * len(QUERIES)

    def test_too_little_is_said(self, silos, pupils):
        with pytest.raises(DataError, match="too few"):
            learn(asking(pupils, lesson_of(QUERIES[:3])), QUERIES[:3], folds=2, space="x")

    def test_a_question_before_its_lesson(self, silos, pupils):
        with pytest.raises(ProtocolError):
            pupils[0].answer(Moments(1))

    def test_questions_survive_the_wire(self):
        look = Look(np.zeros(2), np.ones(2), np.array([1.0, -1.0]), 0.5)
        asked = (
            Prepare(("a", "b"), 2),
            Moments(2),
            Slopes(1, np.zeros(2), np.ones(2), np.arange(3.0), NOBODY),
            Think(look),
            Best(look, 3),
            Show(look, 3, np.array([-np.inf, 1.0])),
            Kept(1, np.array([1.0, 0.0])),
        )
        for question in asked:
            told = question_of(question.to_bytes())
            assert type(told) is type(question)
            assert told.to_bytes() == question.to_bytes()
        assert answer_of(answer_bytes(np.array([1.0, -np.inf]))).tolist() == [1.0, -np.inf]
        for nonsense in (b"", b"nonsense", answer_bytes(np.zeros(2))):
            with pytest.raises(ProtocolError):
                question_of(nonsense)
        with pytest.raises(ProtocolError):
            answer_of(answer_bytes(np.array([np.nan])))


class TestLearned:
    def test_it_learns(self, silos, pupils):
        learned = taught(silos, pupils)
        kept = np.concatenate([pupil.kept for pupil in pupils])
        chance = expit(learned.shown(kept[:, 1]))
        assert chance[kept[:, 0] > 0].mean() > chance[kept[:, 0] == 0].mean() + 0.03
        assert abs(chance.mean() - kept[:, 0].mean()) < 0.01

    def test_saved_it_says_the_same(self, silos, pupils, tmp_path):
        learned = taught(silos, pupils)
        learned.save(tmp_path / "learned")
        snapshot = silos[0][2].snapshot
        found = snapshot.find("tide wave", 20)
        for again in (Learned.load(tmp_path / "learned"), Learned.from_bytes(learned.to_bytes())):
            one, other = (each.score(snapshot, found) for each in (learned, again))
            assert np.array_equal(one.probabilities, other.probabilities)
        with pytest.raises(ProtocolError):
            Learned.from_bytes(b"nonsense")

    def test_explanations_add_up(self, silos, pupils):
        learned = pupils[0].bent(taught(silos, pupils))
        name, store, index = silos[0]
        hits = (
            Searcher(name, index, store, learned, 20)
            .search(Search(query="tide wave", explain=True), snippets=False)
            .hits
        )
        assert len(hits) == 10
        for hit in hits:
            assert [part.retriever for part in hit.explanation] == list(GROUPS)
            told = learned.base + sum(part.contribution for part in hit.explanation)
            assert told == pytest.approx(logit(hit.probability), abs=1e-6)
            for part in hit.explanation:
                if part.weight is not None:
                    assert part.contribution == pytest.approx(part.weight * logit(part.probability), abs=1e-6)

    def test_with_other_directions_it_says_nothing(self, silos, pupils):
        learned = replace(taught(silos, pupils), space="another")
        snapshot = silos[0][2].snapshot
        found = snapshot.find("tide wave", 20)
        scored = learned.score(snapshot, found)
        assert scored.probabilities is None
        assert learned.explain(snapshot, found, scored, 1)[0][0].retriever == "bm25"

    def test_a_silo_with_little_keeps_to_the_line_of_all(self, silos, pupils):
        learned = taught(silos, pupils)
        bent = pupils[0].bent(learned).shown
        free = pupils[0].bent(learned, shrinkage=1e-6).shown
        stiff = pupils[0].bent(learned, shrinkage=1e9).shown
        assert stiff == pytest.approx(learned.shown, abs=1e-4)
        assert abs(bent.start - stiff.start) <= abs(free.start - stiff.start) + 1e-6

    def test_curves_of_what_would_have_been_shown(self, silos, pupils):
        learned = taught(silos, pupils)
        curves = pupils[0].curves(learned, "silo1")
        assert {curve.retriever for curve in curves} == {"shown", *GROUPS}

    def test_a_line_is_a_line(self):
        assert Line(2.0, 1.0)(np.array([3.0])).tolist() == [7.0]
