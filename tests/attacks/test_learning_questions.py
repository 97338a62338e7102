"""A peer that may learn asks for sums so that their difference is one judgement, or one silo's.

Each test plays a peer that reads what it can of one silo: `exposed` silos answer without masks, as if the
peer had the other silos' help. `recovered` is what it works out of a judgement that it may not have, None
where the silo refused or took no part.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest

from isthmus.errors import DataError, PrivacyError, ProtocolError, Refused
from isthmus.learning import (
    COLUMNS,
    HITS,
    LIST,
    BestMargins,
    ColumnMoments,
    FoldsOf,
    GainsOf,
    HitsByCell,
    LossSums,
    OwnHitsByCell,
    RelevantOf,
    Start,
    answer_of,
)
from isthmus.private import FixedPoint, MaskedMember, as_signed
from isthmus.service.judged import fold_of
from isthmus.service.node import Node
from isthmus.service.settings import Policy
from isthmus.service.silo_learner import COLLECTED
from isthmus.service.stores import Judgement
from isthmus.service.wire import LearningSession
from learning_silos import QUERIES, judged, nodes

PEER, OTHER = "curious", "anonymous"
LEARNING = Policy(search=True, counts=True, feedback=True, learning=True)
TARGET = QUERIES[7]
SIZE = len(COLUMNS)
ZEROS, ONES = np.zeros(SIZE), np.ones(SIZE)
BY_BM25 = np.eye(SIZE)[:1]


@contextmanager
def silos(tmp_path, **learning):
    """Three silos whose 18 queries somebody judged, and a peer that may learn from them."""
    with nodes(tmp_path, LEARNING, names=(PEER, OTHER), **{"least_queries": 4, **learning}) as opened:
        for node in opened:
            for query, right in judged().items():
                judge(node, query, {name: True for name in right if right[name]})
            node.share(node.statistics("broker"))
        yield opened


@contextmanager
def a_silo(tmp_path, monkeypatch, **learning):
    """The first of them, whose masks the peer has taken off."""
    with silos(tmp_path, **learning) as opened:
        expose(monkeypatch)
        yield opened[0]


def expose(monkeypatch):
    """Whatever is masked is 0 masks; members need not agree."""
    monkeypatch.setattr(MaskedMember, "place", 0)
    monkeypatch.setattr(MaskedMember, "adding", (True,) * 3)
    monkeypatch.setattr(MaskedMember, "mask", lambda self, number, question, vector: vector.astype(np.uint64))
    monkeypatch.setattr(MaskedMember, "claim", lambda self, number: None)


def judge(node, query, said, peer=OTHER, person=""):
    mine = node.store.get(list(said))
    node.store.judge(*(Judgement(query, name, said[name], peer, 1.0, person=person) for name in mine))


NUMBERS = count()


def begin(node, session=""):
    """A session, and the silo's key."""
    session = session or f"{next(NUMBERS):032x}"
    node.learner.begin(LearningSession(session=session), PEER)
    return session


def ask(node, question, session):
    answer = node.learner.answer(session, next(NUMBERS), question.to_bytes(), PEER)
    if isinstance(question, COLLECTED):
        return answer_of(answer)
    return FixedPoint(1).decode(np.frombuffer(answer, dtype="<u8").astype(np.uint64))


def prepare(node, queries, folds=2, session=""):
    """(rows, relevant rows, judged queries) of a new session, and the session."""
    session = begin(node, session)
    try:
        return ask(node, Start(tuple(queries), folds), session), session
    except PrivacyError:
        return None, session


def test_a_session_without_one_query(tmp_path, monkeypatch):
    with a_silo(tmp_path, monkeypatch) as node:
        assert prepare(node, QUERIES)[0] is not None
        recovered, _ = prepare(node, [query for query in QUERIES if query != TARGET])
        assert recovered is None


@pytest.mark.parametrize("queries", [(TARGET,), (TARGET, "pear plum"), (TARGET,) * 30, ()])
def test_a_session_of_few_queries(tmp_path, monkeypatch, queries):
    with a_silo(tmp_path, monkeypatch) as node:
        recovered, _ = prepare(node, queries)
        assert recovered is None


def gains(node, best, session=None):
    """What the silo's hits add to lists with these margins, by BM25, in the order of outcomes."""
    session = session or prepare(node, QUERIES)[1]
    return ask(node, GainsOf(ZEROS, ONES, BY_BM25, best), session)


def margins(node):
    _, session = prepare(node, QUERIES)
    return ask(node, BestMargins(ZEROS, ONES, BY_BM25), session).reshape(-1, LIST)


def test_bars_that_let_one_query_pass(tmp_path, monkeypatch):
    """Only the target's candidates are high enough: of fewer queries than every sum has nothing is told."""
    with a_silo(tmp_path, monkeypatch) as node:
        best = margins(node)
        assert gains(node, best).sum() > 0
        alone = np.where(np.array(QUERIES)[:, None] == TARGET, best, np.inf)
        assert not gains(node, alone).any()
        _, session = prepare(node, QUERIES)
        cells = np.zeros((len(QUERIES), HITS))
        assert not ask(node, HitsByCell(ZEROS, ONES, BY_BM25, alone, cells), session).any()


def test_groups_of_hits_are_of_many_queries(tmp_path, monkeypatch):
    """A group for the target's hits alone would be its judgements."""
    with a_silo(tmp_path, monkeypatch) as node:
        best = margins(node)
        _, session = prepare(node, QUERIES)
        cells = np.where(np.array(QUERIES)[:, None] == TARGET, 1.0, 0.0) * np.ones(HITS)
        with pytest.raises(ProtocolError):
            ask(node, HitsByCell(ZEROS, ONES, BY_BM25, best, cells), session)


def own_lists(hits=3):
    """Three silos' own lists, the first hits of each in one group."""
    cells = np.full((3 * len(QUERIES), HITS), -1.0)
    cells[:, :hits] = 0
    return cells


def of_own_lists(node, cells):
    _, session = prepare(node, QUERIES)
    return ask(node, OwnHitsByCell(ZEROS, ONES, BY_BM25, cells), session)


def test_lists_of_silos_that_are_not_there_are_refused(tmp_path, monkeypatch):
    """Groups filled with their places would be one silo's, and a short message could ask for very many."""
    with a_silo(tmp_path, monkeypatch) as node:
        assert of_own_lists(node, own_lists())[0] > 0
        size = len(QUERIES)
        for tables in (2, 4, 500):
            cells = np.full((tables * size, HITS), -1.0)
            cells[:size, 0] = np.arange(size)
            cells[-size:, 1:] = (np.arange(size)[:, None] + np.arange(1, HITS)) % size
            with pytest.raises(ProtocolError, match="other silos"):
                of_own_lists(node, cells)


def test_a_group_of_one_silos_own_hits_is_refused(tmp_path, monkeypatch):
    with a_silo(tmp_path, monkeypatch) as node:
        for alone in (slice(0, len(QUERIES)), slice(0, 2 * len(QUERIES))):
            cells = own_lists()
            cells[alone, 0] = 1
            with pytest.raises(ProtocolError, match="fewer than 3 silos"):
                of_own_lists(node, cells)


def test_gains_are_of_unnamed_queries(tmp_path, monkeypatch):
    """The order of outcomes is no order that the asker knows, and the same in every silo."""
    with silos(tmp_path) as opened:
        expose(monkeypatch)
        best, orders, name = margins(opened[0]), [], "f" * 32
        for node in opened[:2]:
            told = gains(node, best, prepare(node, QUERIES, session=name)[1])
            rows = node.learner._session.rows
            plain = np.empty(len(told))
            plain[rows.order] = told
            orders.append(rows.order.tolist())
            assert told.tolist() != plain.tolist()
        assert orders[0] == orders[1] != list(range(len(QUERIES)))


def test_what_a_session_tells_of_the_order_is_of_no_use_in_another(tmp_path, monkeypatch):
    """Lists of some queries are hidden, of others in the next session: who adds it up would know them all."""
    with a_silo(tmp_path, monkeypatch) as node:
        orders = []
        for _ in range(2):
            prepare(node, QUERIES)
            orders.append(node.learner._session.rows.order.tolist())
        assert orders[0] != orders[1]


def test_groups_of_ones_own_making_tell_single_hits(tmp_path, monkeypatch):
    """A limit that the threat model states: two ways to group hits differ by one hit, and so do totals."""
    with a_silo(tmp_path, monkeypatch) as node:
        best = margins(node)
        _, session = prepare(node, QUERIES)
        rows, totals = node.learner._session.rows, []
        one = np.zeros((len(QUERIES), HITS))
        other = one.copy()
        other[:9] = 1.0
        for moved in (0.0, 1.0):
            cells = other.copy()
            cells[0, 0] = moved
            question = HitsByCell(ZEROS, ONES, BY_BM25, best, cells)
            totals.append(ask(node, question, session)[3])
        placed, share = rows._placed(HitsByCell(ZEROS, ONES, BY_BM25, best, one))
        first = rows.query[placed] == 0
        assert totals[1] - totals[0] == pytest.approx(share[first, 0] @ rows.relevant[placed][first])


def test_rankings_in_turn_are_more_than_a_session_has(tmp_path, monkeypatch):
    """So that all candidates take turns at the top."""
    with a_silo(tmp_path, monkeypatch) as node:
        best = margins(node)
        _, session = prepare(node, QUERIES)
        for _ in range(20):
            gains(node, best, session)
        with pytest.raises(ProtocolError, match="more questions"):
            gains(node, best, session)


@pytest.mark.parametrize("weights", [[1.0, 0.0, 0.0], [1.0, 1.0, 0.01], [1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
def test_weights_that_leave_one_silo_in_the_sum(tmp_path, monkeypatch, weights):
    """Only sessions that owners let weigh silos have weights, of which three count."""
    with a_silo(tmp_path, monkeypatch) as node:
        best = margins(node)
        _, session = prepare(node, QUERIES)
        question = GainsOf(ZEROS, ONES, BY_BM25, best, np.array(weights))
        with pytest.raises(ProtocolError, match="fewer than three silos count"):
            ask(node, question, session)
        weigh(node)
        if min(weights) == 1.0:
            assert ask(node, question, session).any()
        else:
            with pytest.raises(ProtocolError, match="fewer than three silos count"):
                ask(node, question, session)


def weigh(node, adding=(True,) * 3):
    """As in a session whose owners let silos be weighed."""
    rows = node.learner._session.rows
    rows._weighed, rows._adding, rows._silo_weights = True, np.array(adding), None


def test_silos_that_are_not_there_or_add_nothing_hide_nobody(tmp_path, monkeypatch):
    """Weights of more silos than there are, and of those without judgements: one silo's sum is left."""
    with a_silo(tmp_path, monkeypatch) as node:
        best = margins(node)
        _, session = prepare(node, QUERIES)
        ranking = (ZEROS, ONES, BY_BM25, best)
        for adding, weights in (
            ((True,) * 3, [1.0, 0.0, 0.0, 1.0, 1.0]),
            ((True, True, True, False, False), [1.0, 0.0, 0.0, 1.0, 1.0]),
            ((True,) * 3, [1.0, 1.0]),
        ):
            weigh(node, adding)
            with pytest.raises(ProtocolError, match="fewer than three silos count"):
                ask(node, GainsOf(*ranking, np.array(weights)), session)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 0.5], []])
def test_weights_that_differ_by_one_silo(tmp_path, monkeypatch, weights):
    """The difference of two sums of one question would be what the third silo adds."""
    with a_silo(tmp_path, monkeypatch) as node:
        best = margins(node)
        _, session = prepare(node, QUERIES)
        weigh(node)
        ask(node, GainsOf(ZEROS, ONES, BY_BM25, best, np.ones(3)), session)
        with pytest.raises(ProtocolError, match="settled"):
            ask(node, GainsOf(ZEROS, ONES, BY_BM25, best, np.array(weights)), session)


def curves(node):
    return [curve.model_dump() for curve in node.calibration("anonymous").curves]


def judge_with_probabilities(node):
    for query, said in judged().items():
        known = {name: said[name] for name in node.store.get(list(said))}
        judgements = (Judgement(query, name, right, OTHER, 1.0, 0.5) for name, right in known.items())
        node.store.judge(*judgements)


def test_curves_before_and_after_a_judgement(tmp_path, monkeypatch):
    """What the Calibration view says of feedback before and after one judgement differs by that judgement."""
    with a_silo(tmp_path, monkeypatch) as node:
        judge_with_probabilities(node)
        before = curves(node)
        assert before
        node.store.judge(Judgement("tide iron", "1-0", True, OTHER, 2.0, 0.987))
        assert curves(node) == before
        assert min(bin["count"] for curve in before for bin in curve["bins"]) >= 10


def test_curves_before_and_after_judgements_of_ones_own(tmp_path, monkeypatch):
    """A person who judged enough hits to have new curves subtracts them, and has what another said."""
    with a_silo(tmp_path, monkeypatch) as node:
        judge_with_probabilities(node)
        before = curves(node)
        node.store.judge(Judgement("tide iron", "1-0", True, OTHER, 2.0, 0.987, person="ada"))
        for at in range(40):
            node.store.judge(Judgement(f"my own {at}", "1-1", False, OTHER, 2.0, 0.1, person="mallory"))
        assert curves(node) == before


def test_a_session_is_its_peers_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("isthmus.service.guarded_rows.MOST_QUESTIONS", 5)
    with a_silo(tmp_path, monkeypatch, sessions=3) as node:
        told, session = prepare(node, QUERIES)
        assert told is not None
        question = BestMargins(ZEROS, ONES, BY_BM25)
        with pytest.raises(ProtocolError, match="another session"):
            node.learner.answer(session, 9, question.to_bytes(), OTHER)
        for _ in range(4):
            ask(node, question, session)
        with pytest.raises(ProtocolError, match="more questions"):
            ask(node, question, session)
        with pytest.raises(ProtocolError, match="has begun"):
            ask(node, Start(QUERIES, 2), session)
        begin(node)
        begin(node)
        with pytest.raises(Refused, match="no more sessions today"):
            begin(node)
        again = Node(node.settings)
        with again.offline(), pytest.raises(Refused, match="no more sessions today"):
            begin(again)


def test_a_set_of_judgements_is_asked_about_so_often(tmp_path, monkeypatch):
    """However many days: after that the silo adds nothing until enough queries are judged anew."""
    monkeypatch.setattr("isthmus.service.judged.MOST_SESSIONS", 2)
    with a_silo(tmp_path, monkeypatch, sessions=100) as node:
        assert node.learner.queries(PEER).folds
        begin(node)
        begin(node)
        assert node.learner.queries(PEER).folds == 0
        words = sorted({word for query in QUERIES for word in query.split()})
        more = [f"{one} {other}" for one in words for other in words if f"{one} {other}" not in QUERIES]
        for query in more:
            judge(node, query, {"1-0": True, "1-1": True})
        assert node.learner.queries(PEER).folds


@pytest.mark.parametrize(
    "question",
    [
        LossSums(ZEROS, ZEROS, ZEROS, ONES, np.zeros((1, SIZE + 2)), -np.ones(1), np.ones(18)),
        LossSums(ZEROS, ONES, ZEROS, ONES, np.full((1, SIZE + 2), np.inf), -np.ones(1), np.ones(18)),
        LossSums(ZEROS[:3], ONES[:3], ZEROS[:3], ONES[:3], np.zeros((1, 5)), -np.ones(1), np.ones(18)),
        LossSums(ZEROS, ONES, ZEROS, ONES, np.full((1, SIZE + 2), 1e13), -np.ones(1), np.ones(18)),
        LossSums(ZEROS, ONES, ZEROS, ONES, np.zeros((65, SIZE + 2)), -np.ones(65), np.ones(18)),
        GainsOf(ZEROS, ONES, BY_BM25, np.zeros((3, LIST))),
        GainsOf(ZEROS, ONES, np.zeros((5, SIZE)), np.zeros((18, LIST))),
        BestMargins(ZEROS, ONES, np.full((1, SIZE), np.nan)),
    ],
)
def test_questions_that_no_honest_session_has(tmp_path, monkeypatch, question):
    """Coefficients beyond all bounds, sizes of another session, folds that there are not, no numbers."""
    with a_silo(tmp_path, monkeypatch) as node:
        _, session = prepare(node, QUERIES)
        with pytest.raises(PrivacyError):
            ask(node, question, session)


def test_what_came_since_the_last_session(tmp_path, monkeypatch):
    """One more query is judged between two sessions: their difference is what was said of its hits."""
    with a_silo(tmp_path, monkeypatch) as node:
        before, _ = prepare(node, [*QUERIES, "tide iron"])
        judge(node, "tide iron", {"1-0": True, "1-1": True})
        after, _ = prepare(node, [*QUERIES, "tide iron"])
        recovered = None if after is None else after[1] - before[1]
        assert not recovered


def test_what_came_since_in_one_fold(tmp_path, monkeypatch):
    """As many more queries as any sum must cover, but few of them in each fold: folds differ by few."""
    with a_silo(tmp_path, monkeypatch) as node:
        words = sorted({word for query in QUERIES for word in query.split()})
        more = [f"{one} {other}" for one in words for other in words if f"{one} {other}" not in QUERIES]
        folds = [
            [query for query in more if fold_of(query, 2, node.family.key) == fold][:2] for fold in (0, 1)
        ]
        every = [*QUERIES, *folds[0], *folds[1]]
        before, _ = prepare(node, every)
        for query in (*folds[0], *folds[1]):
            judge(node, query, {"1-0": True, "1-1": True, "1-2": True})
        after, _ = prepare(node, every)
        recovered = None if after is None else after[1] - before[1]
        assert not recovered


def test_a_crowd_of_ones_own(tmp_path, monkeypatch):
    """The peer judges many hits itself, so that what others said hides among what it knows: theirs waits, and
    answers are the same whatever it is."""
    expose(monkeypatch)
    answers = []
    for others in (True, False, None):
        with nodes(tmp_path / str(others), LEARNING, names=(PEER, OTHER), least_queries=4) as opened:
            node = opened[0]
            for query, right in judged().items():
                rights = [name for name in right if right[name]]
                if query != TARGET:
                    judge(node, query, dict.fromkeys(rights, True), PEER)
                elif others is not None:
                    judge(node, query, dict.fromkeys(rights, others), OTHER)
            node.share(node.statistics("broker"))
            told, _ = prepare(node, QUERIES)
            answers.append(None if told is None else told.tolist())
            assert TARGET not in node.learner.judged.current.grades
    assert answers[0] == answers[1] == answers[2]


def test_coefficients_do_not_pick_judgements(tmp_path, monkeypatch):
    """Coefficients may weigh rows as they like, so that one alone counts: what they change in an answer is
    the same whichever candidates of a query were right."""
    rng = np.random.default_rng(0)
    picked = [rng.normal(size=SIZE + 2) * scale for scale in (0.1, 1.0, 30.0)]

    def changes(node):
        _, session = prepare(node, QUERIES)
        count, total, _ = ask(node, ColumnMoments(), session).reshape(3, SIZE)
        centre = total / np.maximum(count, 1)

        by_query = np.full(len(QUERIES), 1 / 100)

        def gradient(theta):
            question = LossSums(centre, ONES, ZEROS, ONES, theta[None], -np.ones(1), by_query)
            return ask(node, question, session)[1 : SIZE + 3]

        plain = gradient(np.zeros(SIZE + 2))
        return [gradient(theta) - plain for theta in picked], plain

    with a_silo(tmp_path / "one", monkeypatch) as node:
        one, sums = changes(node)
    with a_silo(tmp_path / "other", monkeypatch) as node:
        for query in QUERIES:  # as many right ones among the candidates, and others
            listed = node.index.snapshot.find(query, node.settings.depth).documents
            grades = [judged()[query][name] for name in listed]
            turned = dict(zip(listed, grades[1:] + grades[:1], strict=True))
            for person in ("another", "a third"):
                judge(node, query, turned, person=person)
        other, others = changes(node)
    assert not np.allclose(sums, others), "judgements differ"
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("by_query", ["one", "zero", "negative", "fraction", "more"])
def test_what_queries_count_does_not_pick_judgements(tmp_path, monkeypatch, by_query):
    """By their number of relevant documents, and settled with the first fit: else one query alone counts."""
    with a_silo(tmp_path, monkeypatch) as node:
        _, session = prepare(node, QUERIES)
        rows = node.learner._session.rows
        honest = 1 / np.maximum(rows.targets[rows.order], 1.0)
        chosen = honest.copy()
        chosen[0] = {"one": honest[0] / 2, "zero": 0.0, "negative": -1.0, "fraction": 0.3, "more": 2.0}[
            by_query
        ]
        fit = (ZEROS, ONES, ZEROS, ONES, np.zeros((1, SIZE + 2)), -np.ones(1))
        if by_query != "one":
            with pytest.raises(ProtocolError, match="relevant documents"):
                ask(node, LossSums(*fit, chosen), session)
        ask(node, LossSums(*fit, honest), session)
        with pytest.raises(ProtocolError, match="settled"):
            ask(node, LossSums(*fit, chosen), session)


# one silo's sums


def agreed(opened, session=None):
    """A session of all silos, as an honest broker begins it."""
    session = session or f"{next(NUMBERS):032x}"
    keys = {
        node.settings.silo: node.learner.begin(LearningSession(session=session), PEER).advert
        for node in opened
    }
    for node in opened:
        node.learner.begin(LearningSession(session=session, adverts=keys), PEER)
    return session, keys


def test_the_sum_of_one_silo_is_noise_and_of_fewer_than_three_refused(tmp_path):
    with silos(tmp_path) as opened:
        session, _ = agreed(opened)
        data, number = Start(QUERIES, 2).to_bytes(), next(NUMBERS)
        words = [
            np.frombuffer(node.learner.answer(session, number, data, PEER), dtype="<u8").astype(np.uint64)
            for node in opened
        ]
        total = FixedPoint(3).decode(sum(words))
        assert total[2] == 3 * len(QUERIES)
        for each in words:
            assert (np.abs(as_signed(each) / 2.0**32) > 1e6).all()
        session = f"{next(NUMBERS):032x}"
        keys = {
            node.settings.silo: node.learner.begin(LearningSession(session=session), PEER).advert
            for node in opened
        }
        for few in (["silo1"], ["silo1", "silo2"]):
            adverts = {name: keys[name] for name in few}
            with pytest.raises(ProtocolError, match="add something"):
                opened[0].learner.begin(LearningSession(session=session, adverts=adverts), PEER)
        with pytest.raises(ProtocolError, match="before the members have agreed"):
            opened[0].learner.answer(session, next(NUMBERS), data, PEER)


def test_silos_without_judgements_hide_nobody(tmp_path):
    """Two silos that nobody judged hits of are members of the session, and add nothing."""
    with nodes(tmp_path, LEARNING, names=(PEER, OTHER), least_queries=4) as opened:
        for query, right in judged().items():
            judge(opened[0], query, {name: True for name in right if right[name]})
        with pytest.raises(ProtocolError, match="1 silos add something"):
            agreed(opened)


def test_a_number_is_answered_once_and_the_members_stay(tmp_path):
    with silos(tmp_path) as opened:
        session, keys = agreed(opened)
        node, number = opened[0], next(NUMBERS)
        node.learner.answer(session, number, Start(QUERIES, 2).to_bytes(), PEER)
        for question in (RelevantOf(), FoldsOf()):
            with pytest.raises(ProtocolError, match="used before"):
                node.learner.answer(session, number, question.to_bytes(), PEER)
        with pytest.raises(ProtocolError, match="settled"):
            node.learner.begin(LearningSession(session=session, adverts=keys), PEER)


def test_a_silo_without_cards_says_what_to_do(tmp_path):
    opened = nodes(tmp_path, LEARNING, names=(PEER, OTHER), least_queries=4, keys=None)
    with opened as (node, *_), pytest.raises(DataError, match="isthmus keys new keys silo1"):
        begin(node)


def test_reports_of_its_own_leave_where_the_owner_says_so(tmp_path):
    with silos(tmp_path) as opened, pytest.raises(Refused, match="reports = true"):
        opened[0].learner.begin(LearningSession(session="0" * 32, mode="fedrisk"), PEER)
