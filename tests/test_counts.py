"""Private counts end to end: publish and ask, answers charged first, readers with honest error bars."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.errors import BudgetExhausted, ConfigError, PrivacyError, ProtocolError
from isthmus.features import ExactCounts, Pairs, compute
from isthmus.private import counts
from isthmus.private.cost import Cost, Covered, no_charge, together
from isthmus.private.counts import (
    AnsweredCells,
    Asker,
    Carrier,
    CountRelease,
    Desk,
    Owner,
    PrivateCounts,
    PublishedCells,
    assemble,
    fetch_catalogue,
    fetch_published,
    in_memory,
)
from isthmus.private.decoys import Decoys
from isthmus.private.ledger import Budget, Ledger, fingerprint
from isthmus.private.mechanisms import (
    MECHANISMS,
    Mechanism,
    NoiseKey,
    OneShot,
    PerCell,
    Scalar,
    SharedNoise,
    fresh_nonces,
    mechanism,
)
from isthmus.private.messages import CountsQuestion, Enquiry
from isthmus.private.reading import Cells, Lexicon, Shrink, ThresholdReader, Topics
from isthmus.private.sketch import CountMin, HashFamily
from isthmus.private.totals import Foreign, hashed, noised, read_totals, totals_costs, worked_out
from isthmus.randomness import Streams
from isthmus.retrieval import TEXT, TIMES, Statistics
from isthmus.text import Tokeniser, Tokens

PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())
SMALL = {"one_shot": OneShot(8.0), "scalar": Scalar(2.0, rows=5), "per_cell": PerCell(60.0)}


def texts(count: int = 40, length: int = 60, *, seed: int = 0, topics: int = 4) -> Tokens:
    """Documents on a few topics, each with words of its own."""
    rng = Streams(seed)("counts test")
    made = []
    for document in range(count):
        topic = document % topics
        common = np.minimum(rng.zipf(1.5, size=length // 2), 300)
        special = np.minimum(rng.zipf(1.4, size=length - length // 2), 60)
        made.append(" ".join([f"c{rank}" for rank in common] + [f"t{topic}x{rank}" for rank in special]))
    return PLAIN(made)


class Till:
    """A ledger that only remembers."""

    def __init__(self) -> None:
        self.charged: list[tuple[Cost, Covered, str]] = []

    def __call__(self, releases: Iterable[tuple[Cost, Covered, str]]) -> None:
        self.charged += releases


def versions(count: int, seed: int = 0) -> Covered:
    nonces = fresh_nonces(count, Streams(seed)("versions").bytes)
    return Covered(tuple(f"d{n}" for n in range(count)), tuple(nonce.tobytes().hex() for nonce in nonces))


def release(kind: Mechanism, *, width: int = 1024, charge: object = no_charge, key: int = 0) -> CountRelease:
    family = HashFamily(b"h" * 32, kind.rows, width)
    return CountRelease("body", family, kind, NoiseKey(bytes([key]) * 32), charge)  # type: ignore[arg-type]


def asker(of: CountRelease, tokens: Tokens, **settings: int) -> Asker:
    occurrences = np.bincount(tokens.terms.codes, minlength=len(tokens.terms.vocabulary))
    decoys = Decoys(tokens.terms, occurrences, b"s" * 16)
    return Asker(of.terms, of.family, of.mechanism, decoys, **settings)


def vocabulary(tokens: Tokens) -> Ids:
    return Ids(np.arange(len(tokens.terms.vocabulary)), tokens.terms.vocabulary)


# ---------------------------------------------------------------- publish and ask


def test_published_and_asked_cells_are_the_same() -> None:
    tokens = texts()
    of = release(OneShot(2.0))
    carrier = in_memory(Desk(Owner.of(tokens, versions(40), of)), "north")
    catalogue = fetch_catalogue(carrier, "body")
    published = PublishedCells(fetch_published(carrier, catalogue, of.family))
    words = Ids.of(["c1", "c2", "t0x1", "nowhere"])
    asked = AnsweredCells.through(carrier, asker(of, tokens), words, 40, at_once=3)
    pairs = np.tile(np.arange(40), 4), words[np.repeat(np.arange(4), 40)]
    np.testing.assert_array_equal(asked.values(*pairs), published.values(*pairs))
    exact = CountMin.of(tokens, of.family)
    noise = published.sketch.dense() - exact.dense()
    assert noise.var() == pytest.approx(OneShot(2.0).law.variance, rel=0.05)
    assert (noise[exact.dense() == 0] != 0).mean() == pytest.approx(1 - np.tanh(0.5), abs=0.01)


def test_publishing_in_batches_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    of = release(OneShot(4.0))
    carrier = in_memory(Desk(Owner.of(texts(), versions(40), of)), "north")
    catalogue = fetch_catalogue(carrier, "body")
    whole = fetch_published(carrier, catalogue, of.family).dense()
    monkeypatch.setattr("isthmus.private.counts._BATCH", 7 * 1024)
    np.testing.assert_array_equal(fetch_published(carrier, catalogue, of.family).dense(), whole)


def test_a_catalogue_is_what_is_public() -> None:
    tokens = texts()
    of = release(OneShot(4.0))
    catalogue = fetch_catalogue(in_memory(Desk(Owner.of(tokens, versions(40), of)), "north"), "body")
    assert catalogue.documents == versions(40).documents
    np.testing.assert_array_equal(catalogue.lengths, tokens.lengths)
    assert (catalogue.terms.mechanism, catalogue.terms.epsilon) == ("one_shot", 4.0)


def test_another_hash_key_has_other_noise_and_is_charged_anew() -> None:
    """Even at the same epoch: one noise on two families' cells would show the difference of their counts."""
    charged: list[Cost] = []

    def till(releases: Iterable[tuple[Cost, Covered, str]]) -> None:
        charged.extend(cost for cost, _, _ in releases)

    tables = []
    for key in (b"h" * 32, b"i" * 32):
        family = HashFamily(key, 1, 256)
        of = CountRelease("body", family, OneShot(1.0), NoiseKey(b"k" * 32), till)
        owner = Owner.of(PLAIN(["nothing"] * 40), versions(40), of)
        found = assemble(iter([owner.publish(0, "north")]), owner.catalogue(), family)
        tables.append(found.dense() - CountMin.of(PLAIN(["nothing"] * 40), family).dense())
    assert abs(np.corrcoef(tables[0].ravel(), tables[1].ravel())[0, 1]) < 0.05
    assert together(charged) == 2.0


def test_equal_texts_do_not_show_equal_noise_and_a_new_version_has_new_noise() -> None:
    tokens = PLAIN(["a b c"] * 2)
    of = release(OneShot(1.0))
    published = [
        fetch_published(carrier, fetch_catalogue(carrier, "body"), of.family).dense()
        for carrier in (in_memory(Desk(Owner.of(tokens, versions(2, seed), of)), "n") for seed in (0, 1))
    ]
    assert (published[0][0] != published[0][1]).mean() > 0.3
    assert (published[0] != published[1]).mean() > 0.3


@pytest.mark.parametrize("name", SMALL)
def test_every_mechanism_is_right_on_average(name: str) -> None:
    """Noise off: the estimates of wide sketches are the counts; noise on: they are centred on them."""
    tokens = texts(20)
    kind = type(SMALL[name])
    words = Ids.of(["c1", "c2", "t1x1", "t2x3"])
    exact = ExactCounts.of(tokens)
    pairs = np.tile(np.arange(20), 4), words[np.repeat(np.arange(4), 20)]
    for epsilon in (np.inf, SMALL[name].epsilon):
        of = release(kind(epsilon, SMALL[name].rows), width=4096)
        ask = asker(of, vocabulary_of(5000))
        carrier = in_memory(Desk(Owner.of(tokens, versions(20), of)), "north")
        found = AnsweredCells.through(carrier, ask, words, 20).values(*pairs)
        miss = found - exact.counts(*pairs)
        if epsilon == np.inf:
            assert np.abs(miss).max() <= 0.5
        else:
            spread = kind(epsilon, SMALL[name].rows).variance(np.full(1, 60.0), 4096, 10)[0]
            assert abs(miss.mean()) < 4 * (spread / len(miss)) ** 0.5 + 0.5
            assert miss.std() < 3 * spread**0.5 + 0.5
            if name == "scalar":
                assert miss.std() > 0.6 * spread**0.5, "not less noise than it says"


def vocabulary_of(count: int) -> Tokens:
    return PLAIN([" ".join(f"v{n}" for n in range(count))])


def test_several_rows_of_one_shot_read_their_median() -> None:
    tokens = texts(10)
    of = release(OneShot(30.0, rows=3), width=4096)
    carrier = in_memory(Desk(Owner.of(tokens, versions(10), of)), "north")
    published = PublishedCells(fetch_published(carrier, fetch_catalogue(carrier, "body"), of.family))
    words = Ids.of(["c1"])
    pairs = np.arange(10), words[np.zeros(10, np.int64)]
    asked = AnsweredCells.through(carrier, asker(of, tokens), words, 10)
    np.testing.assert_array_equal(asked.values(*pairs), published.values(*pairs))
    assert np.abs(published.values(*pairs) - ExactCounts.of(tokens).counts(*pairs)).max() <= 1


# ---------------------------------------------------------------- what it costs


def test_one_shot_costs_once_whatever_is_asked() -> None:
    till = Till()
    of = release(OneShot(8.0), charge=till)
    owner = Owner.of(texts(), versions(40), of)
    carrier = in_memory(Desk(owner), "north")
    AnsweredCells.through(carrier, asker(of, texts()), Ids.of(["c1", "c2"]), 40, at_once=1)
    fetch_published(carrier, fetch_catalogue(carrier, "body"), of.family)
    costs = {cost for cost, _, _ in till.charged}
    assert len(costs) == 1
    (cost,) = costs
    assert (cost.epsilon, cost.sensitivity, cost.scale, cost.shared) == (8.0, 2.0, 0.25, True)
    assert together(cost for cost, _, _ in till.charged) == 8.0
    assert "98.2 %" in cost.meaning
    assert all(len(covered) == 40 and peer == "north" for _, covered, peer in till.charged)


@pytest.mark.parametrize("name", ["scalar", "per_cell", "insecure_shared_noise"])
def test_others_cost_for_every_word_and_nothing_for_a_repeat(name: str) -> None:
    till = Till()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = mechanism(name, epsilon=0.5, rows=30)
    of = release(kind, width=120, charge=till)
    carrier = in_memory(Desk(Owner.of(texts(), versions(40), of)), "north")
    ask = asker(of, vocabulary_of(5000))
    first = AnsweredCells.through(carrier, ask, Ids.of(["c1", "c2"]), 40)
    names = {cost.release for cost, _, _ in till.charged}
    assert len(names) == (6 if name == "scalar" else 2)  # decoys are words of their own, or inside the vector
    again = AnsweredCells.through(carrier, ask, Ids.of(["c1", "c2"]), 40)
    assert {cost.release for cost, _, _ in till.charged} == names
    np.testing.assert_array_equal(first.table.toarray(), again.table.toarray())
    assert not any(cost.shared for cost, _, _ in till.charged)
    epsilons = {cost.epsilon for cost, _, _ in till.charged}
    assert epsilons == ({np.inf} if name == "insecure_shared_noise" else {0.5})


def test_another_peer_gets_other_noise_where_words_are_paid_for_and_the_same_where_cells_are() -> None:
    tokens = texts()
    for kind, same in ((OneShot(1.0), True), (Scalar(0.5, rows=5), False)):
        of = release(kind)
        desk = Desk(Owner.of(tokens, versions(40), of))
        answers = [
            AnsweredCells.through(
                in_memory(desk, peer), asker(of, tokens), Ids.of(["c1"]), 40
            ).table.toarray()
            for peer in ("north", "south")
        ]
        assert np.array_equal(*answers) == same


def test_nothing_leaves_that_the_ledger_refuses(tmp_path: object) -> None:
    tokens = texts(5)
    with Ledger(f"{tmp_path}/silo.ledger", Budget(epsilon=3.0)) as ledger:
        covered = ledger.versions([f"d{n}" for n in range(5)], [fingerprint(str(n)) for n in range(5)])
        of = release(Scalar(1.0, rows=5), charge=ledger.charge_all)
        carrier = in_memory(Desk(Owner.of(tokens, covered, of)), "north")
        occurrences = np.bincount(tokens.terms.codes, minlength=len(tokens.terms.vocabulary))
        ask = Asker(of.terms, of.family, of.mechanism, Decoys(tokens.terms, occurrences, b"s" * 16, count=0))
        for word in ("c1", "c2", "c3", "c1"):  # the last is a repeat and free
            AnsweredCells.through(carrier, ask, Ids.of([word]), 5)
        with pytest.raises(BudgetExhausted):
            AnsweredCells.through(carrier, ask, Ids.of(["c4"]), 5)
        assert ledger.spent("d0") == pytest.approx(3.0)


def test_publishing_is_for_cells_noised_once() -> None:
    of = release(Scalar(0.5, rows=5))
    carrier = in_memory(Desk(Owner.of(texts(), versions(40), of)), "north")
    catalogue = fetch_catalogue(carrier, "body")
    with pytest.raises(ProtocolError, match="not published"):
        fetch_published(carrier, catalogue, of.family)


# ---------------------------------------------------------------- protocol


def desk() -> tuple[Desk, CountRelease]:
    of = release(OneShot(8.0))
    return Desk(Owner.of(texts(), versions(40), of)), of


def test_a_question_received_before_is_refused() -> None:
    at, of = desk()
    asked = asker(of, texts()).ask(Ids.of(["c1"]))
    at.serve(asked.message, "north")
    with pytest.raises(ProtocolError, match="received before"):
        at.serve(asked.message, "north")
    at.serve(asked.message, "south")  # another peer has numbers of its own


def test_an_answer_to_another_question_is_refused() -> None:
    at, of = desk()
    ask = asker(of, texts())
    first, second = ask.ask(Ids.of(["c1"])), ask.ask(Ids.of(["c2"]))
    answer = at.serve(first.message, "north")
    assert ask.recover(first, answer, 40).shape == (1, 40)
    with pytest.raises(ProtocolError, match="another question"):
        ask.recover(second, answer, 40)
    with pytest.raises(ProtocolError, match="does not fit"):
        ask.recover(first, answer, 41)


def test_other_terms_fields_and_columns_are_refused() -> None:
    at, of = desk()
    other = release(OneShot(4.0))
    with pytest.raises(ProtocolError, match="terms"):
        at.serve(asker(other, texts()).ask(Ids.of(["c1"])).message, "north")
    with pytest.raises(ProtocolError, match="field"):
        at.serve(Enquiry("title").encode(), "north")
    with pytest.raises(ProtocolError, match="do not exist"):
        at.serve(Enquiry("body", first=40).encode(), "north")
    beyond = CountsQuestion(of.terms, 1, np.array([[1024]], dtype=np.uint32))
    with pytest.raises(ProtocolError, match="column"):
        at.serve(beyond.encode(), "north")


def test_a_question_about_too_much_at_once_is_refused_and_askers_ask_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = release(OneShot(8.0))
    desk = Desk(Owner.of(texts(), versions(40), of))
    own = texts(seed=1).terms
    words = Ids.of(own.words[:30])
    asker = Asker(
        of.terms, of.family, of.mechanism, Decoys(own, np.ones(len(own.vocabulary), int), b"s" * 16)
    )
    whole = AnsweredCells.through(in_memory(desk, "north"), asker, words, 40)
    monkeypatch.setattr(counts.messages, "MOST_VALUES", 40 * 3 * 4)
    with pytest.raises(ProtocolError, match="at once"):
        desk.serve(asker.ask(words).message, "north")
    parts = AnsweredCells.through(in_memory(desk, "north"), asker, words, 40)
    assert (whole.table != parts.table).nnz == 0


def test_a_release_under_another_family_is_refused() -> None:
    at, _ = desk()
    carrier = in_memory(at, "north")
    catalogue = fetch_catalogue(carrier, "body")
    with pytest.raises(ProtocolError, match="hash family"):
        fetch_published(carrier, catalogue, HashFamily(b"h" * 32, 1, 1024, epoch=1))


def test_batches_that_do_not_follow_on_are_refused() -> None:
    at, of = desk()
    catalogue = fetch_catalogue(in_memory(at, "north"), "body")

    def lost(message: bytes) -> bytes:
        return at.serve(Enquiry("body", first=Enquiry.decode(message).first + 1).encode(), "north")

    with pytest.raises(ProtocolError, match="follow"):
        fetch_published(lost, catalogue, of.family)


def test_values_nobody_asked_for_are_not_guessed() -> None:
    at, of = desk()
    found = AnsweredCells.through(in_memory(at, "north"), asker(of, texts()), Ids.of(["c1"]), 40)
    with pytest.raises(PrivacyError, match="not asked"):
        found.values(np.array([0]), Ids.of(["c2"]))


def test_versions_must_be_nonces() -> None:
    of = release(OneShot(8.0))
    for bad in (("xx",) * 2, ("00" * 16,) * 2, ("00" * 8, "11" * 8)):
        with pytest.raises(PrivacyError):
            Owner.of(PLAIN(["a", "b"]), Covered(("a", "b"), bad), of)
    with pytest.raises(PrivacyError, match="do not belong"):
        Owner.of(PLAIN(["a", "b", "c"]), versions(2), of)
    with pytest.raises(ConfigError, match="rows"):
        CountRelease("body", HashFamily(b"h" * 32, rows=2), OneShot(8.0), NoiseKey(b"k" * 32), no_charge)


# ---------------------------------------------------------------- decoys


def test_a_word_always_comes_with_the_same_decoys_and_hides_among_them() -> None:
    tokens = texts()
    of = release(OneShot(8.0))
    ask = asker(of, tokens)
    first, second = ask.ask(Ids.of(["c1"])), ask.ask(Ids.of(["c1", "c2"]))
    assert first.anonymity == 3
    assert len(first.question.columns) == 3
    assert {*first.question.columns.ravel()} <= {*second.question.columns.ravel()}
    assert (np.diff(first.question.columns[:, 0].astype(int)) > 0).all()  # the order tells nothing
    other = Decoys(tokens.terms, np.ones(len(tokens.terms.vocabulary), int), b"t" * 16)
    assert not np.array_equal(ask.decoys.beside(Ids.of(["c1"]))[0], other.beside(Ids.of(["c1"]))[0])


def test_decoys_are_about_as_frequent() -> None:
    words = Ids.of([f"w{n:04d}" for n in range(2000)])
    frequency = np.arange(2000)[::-1]
    decoys = Decoys(words, frequency, b"s" * 16, count=4)
    for at, beside in enumerate(decoys.beside(words[::97])):
        assert len(set(beside.tolist()) - {at}) == 4
        assert np.abs(frequency[beside] - frequency[at]).max() <= 100


def test_obfuscated_vectors_fit_word_and_decoys_alike() -> None:
    """Exactly z₁ rows are consistent with the word and with each decoy, b of them shared by all."""
    family = HashFamily(b"h" * 32, 30, 120)
    words = Ids.of([f"v{n}" for n in range(5000)])
    decoys = Decoys(words, np.arange(5000), b"s" * 16)
    asked = Ids.of([f"q{n}" for n in range(40)])
    base = np.arange(30)[:, None] * 120
    columns, mine = family.of_vocabulary(words).cells - base, family.of_vocabulary(asked).cells - base
    for at, vector in enumerate(decoys.vectors(asked, family, real_rows=10, shared_rows=1)):
        assert vector.anonymity == 3  # 1 + ⌊(30 − 10)/(10 − 1)⌋
        stands = mine[:, at] == vector.columns
        assert np.flatnonzero(stands).tolist() == vector.used.tolist()
        fits = columns == vector.columns[:, None]
        others = np.flatnonzero(fits.sum(axis=0) == 10)
        assert len(others) == 2
        assert fits.sum(axis=0).max() == 10
        everywhere = stands & fits[:, others].all(axis=1)
        assert everywhere.sum() == 1


def test_a_small_vocabulary_hides_less_and_says_so() -> None:
    family = HashFamily(b"h" * 32, 30, 120)
    decoys = Decoys(Ids.of(["one", "two"]), np.ones(2, int), b"s" * 16)
    (vector,) = decoys.vectors(Ids.of(["word"]), family)
    assert vector.anonymity == 1
    assert len(vector.used) == 10
    with pytest.raises(ConfigError, match="shared"):
        decoys.vectors(Ids.of(["word"]), family, real_rows=5, shared_rows=5)


# ---------------------------------------------------------------- mechanisms


def test_mechanisms_go_by_name_and_state_what_they_are() -> None:
    assert set(MECHANISMS) == {"one_shot", "scalar", "per_cell", "insecure_shared_noise"}
    with pytest.raises(ConfigError, match="one_shot"):
        mechanism("one_shoot")
    with pytest.raises(ConfigError, match="ε"):
        OneShot(0.0)
    with pytest.raises(ConfigError, match="rows"):
        Scalar(1.0, rows=0)
    with pytest.warns(UserWarning, match="no privacy"):
        SharedNoise(0.5)


# ---------------------------------------------------------------- reading


def silos() -> tuple[Tokens, Tokens, Statistics]:
    own, foreign = texts(200, seed=1), texts(200, seed=2)
    family = HashFamily(b"t" * 32, 1, 1 << 16)
    return own, foreign, hashed(Statistics.of(own), family) + hashed(Statistics.of(foreign), family)


def private(
    epsilon: float, *, topics: bool = False, width: int = 4096
) -> tuple[PrivateCounts, Tokens, Lexicon]:
    own, foreign, sums = silos()
    of = release(OneShot(epsilon), width=width)
    totals = noised(sums, {TEXT: 1.0, TIMES: 1.0}, Streams(0)("totals").bytes)
    lexicon = Lexicon(of.family, totals, own)
    carrier: Carrier = in_memory(Desk(Owner.of(foreign, versions(200), of)), "north")
    catalogue = fetch_catalogue(carrier, "body")
    sketch = fetch_published(carrier, catalogue, of.family)
    learned = Topics.learned(lexicon, of.mechanism.law, Streams(0)("topics")) if topics else None
    context = None if learned is None else learned.placed(sketch, catalogue.lengths)
    reader = Shrink(of.mechanism.law, lexicon, catalogue.lengths, context)
    return PrivateCounts(PublishedCells(sketch), reader, lexicon, catalogue.lengths), foreign, lexicon


def all_pairs(tokens: Tokens) -> tuple[np.ndarray, Ids]:
    words = vocabulary(tokens)
    size = len(words)
    return np.repeat(np.arange(len(tokens)), size), words[np.tile(np.arange(size), len(tokens))]


@pytest.mark.parametrize("topics", [False, True])
def test_shrinking_beats_the_plain_value_and_its_error_bars_are_honest(topics: bool) -> None:
    counts, foreign, _ = private(4.0, topics=topics)
    pairs = all_pairs(foreign)
    truth = ExactCounts.of(foreign).counts(*pairs)
    found = counts.reading(*pairs)
    values = counts.noisy.values(*pairs)
    plain = ThresholdReader(0.0, OneShot(4.0).law.variance).read(Cells(values, *pairs))
    believed = ThresholdReader(2.0, 1.0).read(Cells(values, *pairs))
    errors = [((mean - truth) ** 2).mean() for mean in (found.mean, believed.mean, plain.mean)]
    assert errors[0] < 0.7 * min(errors[1:])
    assert ((found.mean - truth) ** 2).sum() == pytest.approx((found.error**2).sum(), rel=0.3)
    assert (np.abs(found.mean - truth) <= 3 * found.error + 1e-3).mean() > 0.97
    assert abs(found.mean.sum() / truth.sum() - 1) < 0.15


def test_topics_know_more_than_frequencies() -> None:
    errors = []
    for topics in (False, True):
        counts, foreign, _ = private(3.0, topics=topics)
        pairs = all_pairs(foreign)
        errors.append(((counts.counts(*pairs) - ExactCounts.of(foreign).counts(*pairs)) ** 2).mean())
    assert errors[1] < 0.95 * errors[0]


def test_without_noise_private_counts_are_the_counts() -> None:
    counts, foreign, _ = private(np.inf, width=1 << 20)
    pairs = all_pairs(foreign)
    np.testing.assert_allclose(counts.counts(*pairs), ExactCounts.of(foreign).counts(*pairs), atol=1e-6)
    assert counts.reading(*pairs).error.max() < 1e-3


def test_large_counts_pass_through() -> None:
    counts, _, _ = private(8.0)
    words = Ids.of(["c1"])
    reading = counts.reader.read(Cells(np.array([200]), np.array([0]), words))
    assert reading.mean.tolist() == [200.0]
    assert reading.error[0] == pytest.approx(OneShot(8.0).law.variance ** 0.5)


def test_features_cannot_tell_exact_from_private() -> None:
    counts, foreign, _ = private(np.inf, width=1 << 20)
    own, _, _ = silos()
    queries = PLAIN(["c1 c2 t1x1", "t3x2", "nowhere"])
    pairs = Pairs.all(3, len(foreign))
    exact = ExactCounts.of(foreign, Statistics.of(own) + Statistics.of(foreign))
    truth = compute(queries, pairs, title=exact, body=exact)
    found = compute(queries, pairs, title=exact, body=counts)
    bm25 = 10
    assert np.corrcoef(found[:, bm25], truth[:, bm25])[0, 1] > 0.99
    np.testing.assert_allclose(found[:, 7], truth[:, 7], atol=1e-6)
    assert np.isfinite(found).all()


def test_totals_are_read_better_by_who_has_documents() -> None:
    own, foreign, sums = silos()
    words = vocabulary(PLAIN([" ".join(own.terms.words + foreign.terms.words)]))
    both = Statistics.of(own) + Statistics.of(foreign)
    truth = both.counts_of(words)
    totals = noised(sums, {TEXT: 0.5, TIMES: 0.5}, Streams(1)("totals").bytes)
    read = read_totals(totals, words, Statistics.of(own))
    raw = np.maximum(totals.counts_of(words), 0)
    off = [np.abs(np.log((found + 0.5) / (truth + 0.5))).mean() for found in (read.frequencies, raw)]
    assert off[0] < 0.6 * off[1]  # in logarithms, as idf reads frequencies
    assert ((read.frequencies - truth) ** 2).mean() < 0.75 * ((raw - truth) ** 2).mean()
    assert (read.frequencies >= Statistics.of(own).counts_of(words)).all()
    assert (read.occurrences >= read.frequencies - 1e-9).all()
    of = release(OneShot(8.0))
    costs = totals_costs("body", epsilon_df=0.5, epsilon_cf=0.5, draw="refresh 0")
    assert together([*costs, *of.mechanism.costs(of.terms, np.empty((0, 1), np.uint32))]) == 9.0


def test_a_topic_that_only_others_have_is_believed() -> None:
    own, foreign = PLAIN(["c1 c2"] * 100), PLAIN(["c1 elsewhere"] * 100)
    family = HashFamily(b"t" * 32, 1, 1 << 16)
    sums = hashed(Statistics.of(own), family) + hashed(Statistics.of(foreign), family)
    totals = noised(sums, {TEXT: 0.5, TIMES: 0.5}, Streams(2)("totals").bytes)
    read = read_totals(totals, Ids.of(["elsewhere", "nowhere"]), Statistics.of(own))
    assert read.frequencies[0] == pytest.approx(100, abs=15)
    assert read.frequencies[1] < 5


def test_totals_are_worked_out_from_the_values_themselves() -> None:
    """Where no totals were released, frequencies come out right on the average, and without noise exactly."""
    own, foreign, sums = silos()
    words, truth = vocabulary(foreign), Statistics.of(own) + Statistics.of(foreign)
    for epsilon, allowed in ((np.inf, 0.0), (6.0, 8.0)):
        of = release(OneShot(epsilon), width=1 << 16)
        owner = Owner.of(foreign, versions(200), of)
        values = owner.answer(
            CountsQuestion(of.terms, 0, of.family.of_vocabulary(words).cells.T), "north"
        ).table()
        seen = Foreign(foreign.lengths, words, (values[:, 0] > 0).sum(axis=1), values[:, 0].sum(axis=1))
        found = worked_out(hashed(Statistics.of(own), sums.family), seen, of.mechanism.law)
        at = found.family.of_vocabulary(words).cells[0]
        off = found.tables[TEXT][at] - truth.counts_of(words)
        assert np.median(np.abs(off)) <= allowed
        assert abs(np.median(off)) <= 1.0
        assert (found.documents, found.length) == (400, len(own.terms) + len(foreign.terms))


def test_distinct_words_are_guessed_from_own_documents() -> None:
    counts, foreign, lexicon = private(8.0)
    truth = np.diff(foreign.counts().indptr)
    assert np.abs(counts.distinct - truth).mean() < 0.15 * truth.mean()
    assert lexicon.distinct(np.array([0, 1])).tolist()[0] == 0.0
