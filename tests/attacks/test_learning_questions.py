"""A peer that may learn asks for sums so that their difference is one judgement.

Each test plays a peer that reads what it can. `recovered` is what it works out of a single judgement, None
where the silo refused or took no part.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from isthmus.errors import PrivacyError, Refused
from isthmus.service.evidence import FIRST, SECOND
from isthmus.service.judged import fold_of
from isthmus.service.learned import Learned, Line, Look
from isthmus.service.learning import Kept, Message, Moments, Show, Slopes, Think, answer_of
from isthmus.service.node import Node
from isthmus.service.settings import Policy
from isthmus.service.stores import Judgement
from learning_silos import QUERIES, judged, nodes

PEER, OTHER = "curious", "anonymous"
LEARNING = Policy(search=True, counts=True, feedback=True, learning=True)
TARGET = QUERIES[7]


@contextmanager
def a_silo(tmp_path, **learning):
    """A silo whose 18 queries somebody judged, and a peer that may learn from it."""
    with nodes(tmp_path, LEARNING, names=(PEER, OTHER), **{"least_queries": 4, **learning}) as held:
        node = held[0]
        for query, said in judged().items():
            judge(node, query, {name: right for name, right in said.items() if right})
        node.share(node.statistics("broker"))
        node.adopt_directions(node.directions(PEER))
        yield node


def judge(node, query, said, peer=OTHER, person=""):
    mine = node.store.get(list(said))
    node.store.judge(*(Judgement(query, name, said[name], peer, 1.0, person=person) for name in mine))


def prepare(node, queries, own=None):
    """(rows, relevant rows, judged queries) of a lesson; also in a form where the peer has a say in more."""
    forms = [{"folds": [0] * len(queries), "own": own or [None] * len(queries)}]
    forms += [] if own else [{"folds": 2}]
    for form in forms:
        asked = Message({"kind": "Prepare", "queries": list(queries), **form}, {})
        try:
            return answer_of(node.answer(asked.to_bytes(), PEER))
        except PrivacyError:
            continue
    return None


def ask(node, question):
    return answer_of(node.answer(question.to_bytes(), PEER))


def the_right_one(node):
    """A document that was judged right for the target, and is among its candidates."""
    listed = node.index.snapshot.find(TARGET, node.settings.depth).documents
    return next(name for name in listed if judged()[TARGET][name])


def test_a_lesson_without_one_document(tmp_path):
    """The same lesson with and without a document: the difference is what was said of it."""
    with a_silo(tmp_path) as node:
        document = the_right_one(node)
        whole = prepare(node, QUERIES)
        without = prepare(node, QUERIES, own=[document if query == TARGET else None for query in QUERIES])
        recovered = None if without is None else whole[1] - without[1]
        assert recovered is None


def test_a_lesson_without_one_query(tmp_path):
    with a_silo(tmp_path) as node:
        whole = prepare(node, QUERIES)
        without = prepare(node, [query for query in QUERIES if query != TARGET])
        recovered = None if without is None else whole[1] - without[1]
        assert recovered is None


@pytest.mark.parametrize("queries", [(TARGET,), (TARGET, "pear plum"), (TARGET,) * 30, ()])
def test_a_lesson_of_few_queries(tmp_path, queries):
    with a_silo(tmp_path) as node:
        told = prepare(node, queries)
        recovered = None if told is None or not told[0] else told[1]
        assert recovered is None


ZEROS, ONES = np.zeros(len(SECOND)), np.ones(len(SECOND))
BY_BM25 = Look(ZEROS, ONES, np.eye(len(SECOND))[0], 0.0)


def kept(node, bars):
    """(hits, right ones) that a lesson with these bars keeps, by BM25."""
    assert prepare(node, QUERIES) is not None
    ask(node, Think(Look(ZEROS[: len(FIRST)], ONES[: len(FIRST)], ZEROS[: len(FIRST)], 0.0)))
    for fold in (0, 1):
        ask(node, Show(BY_BM25, fold, bars))
    loss, *_, intercept = ask(node, Kept(0, np.zeros(2)))[:3]
    rows = round(loss / np.log(2))
    return rows, rows / 2 - intercept


def highest(node):
    find = node.index.snapshot.find
    return np.array([find(query, node.settings.depth).scores["bm25"].max() for query in QUERIES])


def test_bars_that_let_one_hit_pass(tmp_path):
    """Only the target's best candidate is kept: sums over what is kept are its judgement."""
    with a_silo(tmp_path) as node:
        rows, right = kept(node, np.where(np.array(QUERIES) == TARGET, highest(node), np.inf))
        recovered = right if rows else None
        assert recovered is None


def test_bars_that_differ_in_one_query(tmp_path):
    """Two lessons whose bars differ in the target alone: they differ by the judgement of its best hit."""
    with a_silo(tmp_path) as node:
        best = highest(node)
        whole = kept(node, best)
        assert whole[0] >= len(QUERIES)
        without = kept(node, np.where(np.array(QUERIES) == TARGET, np.inf, best))
        recovered = whole[1] - without[1] if whole[0] != without[0] else None
        assert recovered is None


def curves(node):
    return [curve.model_dump() for curve in node.calibration("anonymous").curves]


def test_curves_before_and_after_a_judgement(tmp_path):
    """What the Calibration view says of feedback before and after one judgement differs by that judgement."""
    with a_silo(tmp_path) as node:
        for query, said in judged().items():
            known = {name: said[name] for name in node.store.get(list(said))}
            told = (Judgement(query, name, right, OTHER, 1.0, 0.5) for name, right in known.items())
            node.store.judge(*told)
        before = curves(node)
        assert before
        node.store.judge(Judgement("tide iron", "1-0", True, OTHER, 2.0, 0.987))
        assert curves(node) == before
        assert min(bin["count"] for curve in before for bin in curve["bins"]) >= 10


def test_curves_before_and_after_judgements_of_ones_own(tmp_path):
    """A person who judged enough hits to have new curves subtracts them, and has what another said."""
    with a_silo(tmp_path) as node:
        for query, said in judged().items():
            known = {name: said[name] for name in node.store.get(list(said))}
            told = (Judgement(query, name, right, OTHER, 1.0, 0.5) for name, right in known.items())
            node.store.judge(*told)
        before = curves(node)
        node.store.judge(Judgement("tide iron", "1-0", True, OTHER, 2.0, 0.987, person="ada"))
        for at in range(40):
            node.store.judge(Judgement(f"my own {at}", "1-1", False, OTHER, 2.0, 0.1, person="mallory"))
        assert curves(node) == before


def test_curves_of_one_ranker_after_another(tmp_path):
    """Bins of two rankers that differ in one hit: what hits were right is told once."""
    with a_silo(tmp_path) as node:
        told = []
        for slope in (1.0, 1.7):
            kept(node, highest(node))
            look = Look(ZEROS[: len(FIRST)], ONES[: len(FIRST)], ZEROS[: len(FIRST)], 0.0)
            space = node.index.snapshot.encoder.fingerprint
            node.adopt(Learned(space, look, BY_BM25, Line(slope, -2.0)).to_bytes(), PEER)
            told.append([each for each in curves(node) if each["source"] == "validation"])
        assert told[0]
        assert told[0] == told[1]


def test_a_lesson_is_its_peers_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("isthmus.service.pupil.MOST_QUESTIONS", 5)
    with a_silo(tmp_path, sessions=3) as node:
        assert prepare(node, QUERIES) is not None
        with pytest.raises(PrivacyError, match="before its lesson"):
            node.answer(Moments(1).to_bytes(), OTHER)
        for _ in range(5):
            ask(node, Moments(1))
        with pytest.raises(PrivacyError, match="more questions"):
            ask(node, Moments(1))
        assert prepare(node, QUERIES) is not None
        assert prepare(node, QUERIES) is not None
        with pytest.raises(Refused, match="no more lessons today"):
            prepare(node, QUERIES)
        again = Node(node.settings)
        with again.offline(), pytest.raises(Refused, match="no more lessons today"):
            prepare(again, QUERIES)


def test_questions_that_no_honest_lesson_has(tmp_path):
    """Columns without a scale, folds and retrievers that there are not, numbers that are none."""
    with a_silo(tmp_path) as node:
        assert prepare(node, QUERIES) is not None
        size = len(FIRST)
        zeros, ones = np.zeros(size), np.ones(size)
        broken = (
            Moments(3),
            Slopes(1, zeros, zeros, np.zeros(size + 1), -1),
            Slopes(1, zeros, ones, np.full(size + 1, np.inf), -1),
            Slopes(1, zeros, ones, np.zeros(size + 1), 2),
            Slopes(1, zeros[:3], ones[:3], np.zeros(4), -1),
            Think(BY_BM25),
            Show(BY_BM25, 0, np.zeros(3)),
            Show(BY_BM25, 5, np.zeros(len(QUERIES))),
            Kept(9, np.zeros(2)),
        )
        for question in broken:
            with pytest.raises(PrivacyError, match="not of this lesson"):
                ask(node, question)


def test_what_came_since_the_last_lesson(tmp_path):
    """One more query is judged between two lessons: their difference is what was said of its hits."""
    with a_silo(tmp_path) as node:
        before = prepare(node, [*QUERIES, "tide iron"])
        judge(node, "tide iron", {"1-0": True, "1-1": True})
        after = prepare(node, [*QUERIES, "tide iron"])
        recovered = None if after is None else after[1] - before[1]
        assert not recovered


def test_what_came_since_in_one_fold(tmp_path):
    """As many more queries as any sum must cover, but few of them in each fold: folds differ by few."""
    with a_silo(tmp_path) as node:
        words = sorted({word for query in QUERIES for word in query.split()})
        more = [f"{one} {other}" for one in words for other in words if f"{one} {other}" not in QUERIES]
        folds = [
            [query for query in more if fold_of(query, 2, node.family.key) == fold][:2] for fold in (0, 1)
        ]
        every = [*QUERIES, *folds[0], *folds[1]]
        before = prepare(node, every)
        for query in (*folds[0], *folds[1]):
            judge(node, query, {"1-0": True, "1-1": True, "1-2": True})
        after = prepare(node, every)
        recovered = None if after is None else after[1] - before[1]
        assert not recovered


def test_a_crowd_of_ones_own(tmp_path):
    """The peer judges many hits itself, so that what others said hides among what it knows: theirs waits, and
    answers are the same whatever it is."""
    answers = []
    for others in (True, False, None):
        with nodes(tmp_path / str(others), LEARNING, names=(PEER, OTHER), least_queries=4) as held:
            node = held[0]
            for query, said in judged().items():
                rights = [name for name, right in said.items() if right]
                if query != TARGET:
                    judge(node, query, dict.fromkeys(rights, True), PEER)
                elif others is not None:
                    judge(node, query, dict.fromkeys(rights, others), OTHER)
            node.share(node.statistics("broker"))
            node.adopt_directions(node.directions(PEER))
            told = prepare(node, QUERIES)
            answers.append(None if told is None else [np.asarray(part).tolist() for part in told])
            assert TARGET not in node._judged.current.grades
    assert answers[0] == answers[1] == answers[2]


def test_coefficients_do_not_pick_judgements(tmp_path):
    """Coefficients may weigh rows as they like, so that one alone counts: what they change in an answer is
    the same whichever candidates of a query were right."""
    rng = np.random.default_rng(0)
    size = len(FIRST)
    picked = [rng.normal(size=size + 1) * scale for scale in (0.1, 1.0, 100.0)]

    def changes(node):
        assert prepare(node, QUERIES) is not None
        moments = ask(node, Moments(1))
        centre, scale = moments[1 : 1 + size] / moments[0], np.ones(size)
        slopes = [ask(node, Slopes(1, centre, scale, theta, -1)) for theta in (np.zeros(size + 1), *picked)]
        return [each[1 : 2 + size] - slopes[0][1 : 2 + size] for each in slopes[1:]], slopes[0]

    with a_silo(tmp_path / "one") as node:
        one, sums = changes(node)
    with a_silo(tmp_path / "other") as node:
        for query in QUERIES:  # as many right ones among the candidates, and others
            listed = node.index.snapshot.find(query, node.settings.depth).documents
            grades = [judged()[query][name] for name in listed]
            turned = dict(zip(listed, grades[1:] + grades[:1], strict=True))
            for person in ("another", "a third"):
                judge(node, query, turned, person=person)
        other, others = changes(node)
    assert not np.allclose(sums, others), "judgements differ"
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
