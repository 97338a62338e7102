"""Labels by the million, on few: sparse rows give what arrays would, and probabilities hold."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from command_line import isthmus
from isthmus.classification import (
    Bands,
    CandidateTable,
    LabelBm25,
    LabelFusion,
    LabelledTexts,
    LabelVectors,
    MultiLabelClassifier,
    Sparse,
    SparseLabelRanker,
    SparseNeighbours,
    TextClassifier,
    TextSpace,
    best_per_row,
    cross_fitted,
    describe,
    from_lists,
    label_counts,
    load_multilabel,
    plain_documents,
    plain_queries,
    read_labelled,
    stream_texts,
)
from isthmus.classification import sparse_rankers as rankers_module
from isthmus.classification.sparse import read_arrays, sparse_arrays, sparse_of, write_arrays
from isthmus.cli.classify_multi import suggest_links
from isthmus.corpora import SparseRows, write_xmc
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import Propensity, evaluate
from isthmus.retrieval import BM25
from isthmus.tables import Run

RANKERS: dict[str, SparseLabelRanker] = {
    "label text": LabelBm25(),
    "neighbours": SparseNeighbours(k=7),
    "best neighbour": SparseNeighbours(k=7, pool="max"),
    "latent neighbours": SparseNeighbours("vectors", k=7),
    "label vectors": LabelVectors(),
}
BATCHES = 1e-3
"""What a probability may differ by the size of a batch: matrices of other sizes are multiplied in another
order, and of two neighbours that are equally near another one may be the last."""


def world(texts: int, labels: int, seed: int = 0) -> tuple[list[str], Sparse, list[str]]:
    """Texts of their labels' words and of words that all share; labels by Zipf; names of labels."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, labels + 1)
    right, lines = [], []
    for _ in range(texts):
        own = rng.choice(labels, size=rng.integers(1, 4), replace=False, p=chances / chances.sum())
        words = [f"w{label}x{rng.integers(6)}" for label in own for _ in range(rng.integers(1, 4))]
        noise = [f"w{rng.integers(labels)}x{rng.integers(6)}" for _ in range(rng.integers(0, 4))]
        lines.append(" ".join([*words, *noise, *(f"common{rng.integers(30)}" for _ in range(6))]))
        right.append(own)
    return lines, from_lists(right, labels), [f"w{label}x0 w{label}x1" for label in range(labels)]


def test_the_best_of_every_row_are_kept_with_zeros_and_ties_to_the_lower_column() -> None:
    scores = csr_array(
        (np.array([3.0, 0.0, 3.0, 1.0, -1.0]), np.array([2, 0, 1, 3, 2]), np.array([0, 4, 4, 5])),
        shape=(3, 4),
    )
    best = best_per_row(scores, 2)
    assert best.dtype == np.float32
    assert best[[0]].indices.tolist() == [2, 1]
    assert best_per_row(scores, 1)[[0]].indices.tolist() == [1]
    assert best_per_row(scores, 3).nnz == 4
    assert np.diff(best_per_row(scores, 9).indptr).tolist() == [4, 0, 1], "a label with score 0 is listed"


def test_labels_from_lists_and_their_bands() -> None:
    labels = from_lists([[0, 2, 2], [], [2]], 4)
    assert labels.toarray().tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert label_counts(labels).tolist() == [1, 0, 2, 0]
    bands = Bands((1, 4, 16))
    assert bands.names == ("0", "1–3", "4–15", "16+")
    assert bands.of([0, 1, 3, 4, 15, 16, 999]).tolist() == [0, 1, 1, 2, 2, 3, 3]
    counts = np.array([9, 1, 5, 3, 2, 1, 1, 1, 1, 1])
    assert Bands.head_and_tail(counts).edges == (3,), "three of ten"


def test_sparse_arrays_come_back_from_disk(tmp_path: Path) -> None:
    labels = from_lists([[1], [0, 2]], 3)
    write_arrays(tmp_path / "a.npz", **sparse_arrays("labels", labels))
    again = sparse_of("labels", read_arrays(tmp_path / "a.npz"))
    assert again.dtype == bool
    assert (again.toarray() == labels.toarray()).all()


def test_arrays_that_are_cut_packed_or_point_beyond_themselves_are_refused(tmp_path: Path) -> None:
    file, arrays = tmp_path / "a.npz", sparse_arrays("labels", from_lists([[1], [0, 2]], 3))
    write_arrays(file, **arrays)
    for content in (b"half", file.read_bytes()[:-30], b""):
        file.write_bytes(content)
        with pytest.raises(DataError, match="no arrays"):
            read_arrays(file)
    np.savez_compressed(file, zeros=np.zeros(10**6))
    with pytest.raises(DataError, match="unpacks to more"):
        read_arrays(file)
    with pytest.raises(DataError, match="no sparse matrix"):
        sparse_of("labels", arrays | {"labels.indices": np.array([1, 0, 7], dtype=np.int32)})


def test_a_fit_of_other_folds_begins_anew() -> None:
    data = labelled(20, 5)
    folds = [replace(data, folds=np.arange(20) % 2), replace(data, folds=np.arange(20) % 4), data]
    assert len({MultiLabelClassifier()._fingerprint(each) for each in folds}) == 3


def listed(matrix: Sparse) -> list[dict[int, float]]:
    """Every text's labels with their scores."""
    return [
        dict(zip(matrix[[row]].indices.tolist(), matrix[[row]].data.tolist(), strict=True))
        for row in range(matrix.shape[0])
    ]


@pytest.mark.parametrize("name", RANKERS)
def test_labels_in_another_order_are_ranked_alike(name: str, tmp_path: Path) -> None:
    texts, labels, documents = world(150, 20)
    space = TextSpace.fit(texts, documents, dimensions=16)
    order = np.random.default_rng(1).permutation(20)
    new = space.rows(world(30, 20, seed=5)[0])
    ranker = RANKERS[name]
    rows = space.rows(texts)
    fitted = ranker.fit(rows, labels, space.rows(documents))
    other = ranker.fit(rows, labels[:, order], space.rows([documents[label] for label in order]))
    mine, theirs = listed(fitted.candidates(new, 20)), listed(other.candidates(new, 20))
    for one, two in zip(mine, theirs, strict=True):
        assert one == pytest.approx({int(order[label]): score for label, score in two.items()}, abs=1e-5)
    (tmp_path / name).mkdir()
    fitted.save(tmp_path / name)
    again = type(fitted).load(tmp_path / name)
    assert listed(again.candidates(new, 20)) == mine
    assert listed(again.candidates(new.take(slice(3, 4)), 20))[0] == pytest.approx(mine[3], abs=1e-5)


def test_rankers_give_what_arrays_would(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, labels, documents = world(120, 15)
    space = TextSpace.fit(texts, documents, dimensions=12)
    queries = world(25, 15, seed=3)[0]
    new, rows, own = space.rows(queries), space.rows(texts), space.rows(documents)
    run = BM25().index(plain_documents(texts)).search(plain_queries(queries), 9)
    neighbours = SparseNeighbours(k=9, power=1.0).fit(rows, labels, own)
    near = neighbours.nearest(new, 9)
    for at, (_, names, scores) in enumerate(run.lists()):
        mine = near[[at]]
        order = np.argsort(-mine.data)
        assert mine.data[order] / mine.data.max() == pytest.approx(np.array(scores) / max(scores), abs=1e-4)
        found = neighbours.candidates(new.take(slice(at, at + 1)), 15).toarray()[0]
        carried = labels.toarray()[[int(name) for name in names]]
        if len(set(np.round(scores, 6))) == 9:
            assert found == pytest.approx(scores @ carried / np.sum(scores), abs=1e-4)
    vectors = LabelVectors().fit(rows, labels, own)
    centres = labels.toarray().T.astype(float) @ rows.vectors + own.vectors
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    assert vectors.candidates(new, 15).toarray() == pytest.approx(new.vectors @ centres.T, abs=1e-5)
    exact = vectors.candidates(new, 4).toarray()
    monkeypatch.setattr(rankers_module, "EXACT", 3)
    many = LabelVectors(near=120).fit(rows, labels, own).candidates(new, 4).toarray()
    assert many == pytest.approx(exact, abs=1e-5), "all texts are near: the same labels are compared"


def test_weights_that_came_as_such_are_compared_by_cosine() -> None:
    texts, labels, _ = world(80, 12)
    counted = TextSpace.fit(texts, dimensions=8).rows(texts).terms
    space = TextSpace.fit(counted, dimensions=8)
    rows = space.rows(counted)
    near = SparseNeighbours(k=5).fit(rows, labels, rows).nearest(rows, 1)
    assert near.data == pytest.approx(np.ones(80), abs=1e-5), "nearest to every text is itself"
    with pytest.raises(DataError, match="texts, where rows of features"):
        space.rows(["a text"])


def labelled(texts: int, labels: int, seed: int = 0) -> LabelledTexts:
    lines, right, _ = world(texts, labels, seed)
    names = tuple(f"label {at}" for at in range(labels))
    return LabelledTexts(tuple(map(str, range(texts))), tuple(lines), right, names, ("",) * labels)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[MultiLabelClassifier, Path]:
    folder = tmp_path_factory.mktemp("multi") / "model"
    return MultiLabelClassifier(folds=3).fit(labelled(400, 30), folder), folder


def test_probabilities_hold_on_new_texts_and_rise_with_the_fused_score(
    model: tuple[MultiLabelClassifier, Path],
) -> None:
    classifier, folder = model
    fresh = labelled(400, 30, seed=8)
    probabilities = classifier.predict(fresh.texts)
    assert probabilities.data.min() >= 0
    assert probabilities.data.max() <= 1
    seen, new = classifier.report().measures, classifier.report(probabilities, fresh.labels).measures
    assert new["P@1"] == pytest.approx(seen["P@1"], abs=0.08)
    assert new["P@1"] > 0.6
    assert new["ECE"] < new["ECE floor"] + 0.03
    assert new["expected labels"] == pytest.approx(fresh.labels.nnz / 400, abs=0.25)
    last = classifier.fusion_.last
    assert last is not None
    for band in range(len(classifier.bands_)):
        rising = last.probabilities(np.linspace(0, 1, 50), parts=np.full(50, band))
        assert (np.diff(rising) >= 0).all()
    loaded = load_multilabel(folder)
    one_by_one = [loaded.predict(fresh.texts[at : at + 7]).toarray() for at in range(0, 70, 7)]
    assert np.concatenate(one_by_one) == pytest.approx(probabilities[:70].toarray(), abs=BATCHES)
    assert loaded.report().record() == classifier.report().record()


def test_labels_that_are_not_sure_enough_are_not_said(model: tuple[MultiLabelClassifier, Path]) -> None:
    classifier, _ = model
    held_out = classifier.held_out_
    fresh = labelled(400, 30, seed=9)
    sure = classifier.decided(classifier.predict(fresh.texts), 0.9)
    right = CandidateTable.rows_of(sure).hits(fresh.labels)
    assert len(right) > 100
    assert right.mean() > 0.85
    assert (np.diff(sure.indptr) == 0).any(), "some texts keep no label"
    thresholds = held_out.thresholds(0.9)
    for band in np.unique(held_out.bands):
        said = (held_out.bands == band) & (held_out.probabilities.data >= thresholds[band])
        assert not said.any() or held_out.hits[said].mean() >= 0.9 or held_out.hits[said].sum() < 10


def test_measures_are_those_of_the_evaluation(model: tuple[MultiLabelClassifier, Path]) -> None:
    classifier, _ = model
    data = labelled(60, 30, seed=4)
    probabilities = classifier.predict(data.texts)
    lists = listed(probabilities)
    named = [{data.names[label]: chance for label, chance in row.items()} for row in lists]
    run = Run.from_dict(dict(zip(data.ids, named, strict=True)))
    counts = dict(zip(data.names, classifier.counts_.tolist(), strict=True))
    propensity = Propensity.of_counts(counts, classifier.texts_)
    names = ["P@1", "P@5", "psP@5", "psnDCG@5"]
    wanted = evaluate(data.qrels, run, names, propensity=propensity)
    report = classifier.report(probabilities, data.labels).measures
    assert [report[name] for name in names] == pytest.approx([wanted[name] for name in names], abs=1e-6)


KILLED = """
import os, signal, sys
from isthmus.classification import LabelVectors, MultiLabelClassifier, read_labelled
calls, learn = [], LabelVectors.fit
def fit(self, *arguments):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return learn(self, *arguments)
LabelVectors.fit = fit
MultiLabelClassifier(folds=3).fit(read_labelled(sys.argv[1]), sys.argv[2])
"""


def as_json_lines(path: Path, data: LabelledTexts) -> Path:
    rows = zip(data.ids, data.texts, data.label_lists, strict=True)
    lines = ({"id": name, "text": text, "labels": [data.names[at] for at in row]} for name, text, row in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("begun", [False, True])
def test_a_classifier_of_another_kind_is_not_overwritten(begun: bool, tmp_path: Path) -> None:
    other = tmp_path / "classifier.json"
    other.write_text('{"format": 1, "encoder": "lsa"}')
    if begun:
        (tmp_path / "fit.json").write_text('{"fingerprint": "another"}')
    with pytest.raises(DataError, match="another kind"):
        MultiLabelClassifier(folds=2).fit(labelled(30, 4), tmp_path)
    assert json.loads(other.read_text())["encoder"] == "lsa"


def test_a_fit_that_was_killed_goes_on_behind_its_last_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = as_json_lines(tmp_path / "train.jsonl", labelled(150, 12))
    program = [sys.executable, "-c", KILLED, str(path), str(tmp_path / "model")]
    assert subprocess.run(program, check=False, capture_output=True).returncode == -signal.SIGKILL
    with pytest.raises(DataError, match="no classifier"):
        load_multilabel(tmp_path / "model")
    calls: list[str] = []
    learn = LabelVectors.fit

    def counted(self: LabelVectors, *arguments: Any) -> Any:
        calls.append("fit")
        return learn(self, *arguments)

    monkeypatch.setattr(LabelVectors, "fit", counted)
    data = read_labelled(path)
    resumed = MultiLabelClassifier(folds=3).fit(data, tmp_path / "model")
    assert len(calls) == 2, "two folds were there, the third and the whole were learned"
    whole = MultiLabelClassifier(folds=3).fit(data)
    fresh = labelled(20, 12, seed=2).texts
    assert resumed.predict(fresh).toarray() == pytest.approx(whole.predict(fresh).toarray(), abs=1e-6)
    assert not list((tmp_path / "model").glob("stage-*"))
    (tmp_path / "model" / "model-of-mine").mkdir()
    assert list(MultiLabelClassifier(folds=2).fit(data, tmp_path / "model").rankers_)
    assert (tmp_path / "model" / "model-of-mine").exists(), "only stages are dropped"
    assert load_multilabel(tmp_path / "model").predict(fresh).nnz


def test_the_command_line_sees_several_labels_and_writes_a_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = labelled(200, 12), labelled(60, 12, seed=3)
    path, other = (as_json_lines(tmp_path / f"{at}.jsonl", each) for at, each in enumerate((train, test)))
    fit = isthmus("classify", "fit", path, "-o", tmp_path / "model", "--folds", 3, "--links", "--json")
    assert "of 200 texts have several labels" in fit.stderr
    learned = json.loads(fit.stdout)
    assert set(learned) == {"model", "measures", "bands", "decision"}
    judged = isthmus("classify", "evaluate", other, "--model", tmp_path / "model")
    assert "psnDCG@5" in judged.stdout
    assert "say a label from this probability" in judged.stdout
    new = tmp_path / "new.csv"
    new.write_text("id,text\n" + "".join(f"n{at},{text}\n" for at, text in enumerate(test.texts)))
    isthmus("classify", "predict", tmp_path / "model", new, "--precision", 0.9, "-o", tmp_path / "out.jsonl")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [f"n{at}" for at in range(60)]
    model = load_multilabel(tmp_path / "model")
    assert model.links
    ids = [answer["id"] for answer in answers]
    sure = model.decided(model.predict(test.texts, ids), 0.9)
    assert [len(answer["labels"]) for answer in answers] == np.diff(sure.indptr).tolist()
    assert {one["probability"] for one in answers[0]["labels"]} == {
        round(float(p), 4) for p in sure[[0]].data
    }
    streamed = [model.predict(texts, names).toarray() for names, texts in stream_texts(new, batch=7)]
    assert np.concatenate(streamed) == pytest.approx(model.predict(test.texts, ids).toarray(), abs=BATCHES)


def test_sparse_rows_of_the_repository_are_learned_and_streamed(tmp_path: Path) -> None:
    data = labelled(200, 12)
    weights = TextSpace.fit(data.texts).rows(data.texts).terms
    train = tmp_path / "train.txt"
    write_xmc(train, [SparseRows(weights, data.labels)], rows=200)
    read = read_labelled(train)
    assert read.names[:2] == ("0", "1")
    assert (read.labels != data.labels).nnz == 0
    classifier = MultiLabelClassifier(folds=3).fit(read, tmp_path / "model")
    assert classifier.report().measures["P@1"] > 0.5
    parts = [classifier.predict(rows).toarray() for _, rows in stream_texts(train, batch=64)]
    assert np.concatenate(parts) == pytest.approx(classifier.predict(weights).toarray(), abs=BATCHES)
    with pytest.raises(DataError, match="texts, where rows of features were learned from"):
        load_multilabel(tmp_path / "model").predict(["words"])
    with pytest.raises(DataError, match="rows of features say nothing in words"):
        describe(read)


def test_options_without_use_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "single.csv"
    table.write_text("text,label\na red pear,fruit\nthe court ruled,law\n")
    options = ("classify", "fit", table, "-o", tmp_path / "model")
    refused = isthmus(*options, "--preset", "xcoretriev", check=False)
    assert refused.returncode == 1
    assert "every text has one label: add --multi" in refused.stderr
    assert "to use --links" in isthmus(*options, "--links", check=False).stderr
    assert (
        "names of labels are for sparse rows" in isthmus(*options, "--label-names", table, check=False).stderr
    )
    few = isthmus(*options, "--multi", check=False)
    assert "label more texts" in few.stderr


def test_a_page_is_no_answer_to_itself() -> None:
    texts, labels, _ = world(120, 12)
    names = tuple(f"page {at}" for at in range(12))
    ids = (*names, *(f"text {at}" for at in range(108)))  # a label's description is the text of its name
    free = from_lists(
        [sorted({*row.indices.tolist()} - {at}) or [(at + 1) % 12] for at, row in enumerate(labels)], 12
    )
    data = LabelledTexts(ids, tuple(texts), free, names, tuple(texts[:12]))
    model = MultiLabelClassifier(preset="xcoretriev", folds=2, links=True).fit(data)
    listed = model.predict(texts, ids).toarray()
    assert not listed[np.arange(12), np.arange(12)].any()
    assert listed[12:].any(axis=1).all()
    other = MultiLabelClassifier(preset="xcoretriev", folds=2).fit(data)
    assert other.predict(texts[:12]).toarray()[np.arange(12), np.arange(12)].any()
    with pytest.raises(DataError, match="links without the texts' ids"):
        model.predict(texts)


def test_labels_that_look_like_pages_are_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    data = labelled(60, 30)
    pages = replace(data, ids=(*data.names, *map(str, range(30))))
    rows = [[at for at in row if at != text] or [29 - text] for text, row in enumerate(data.label_lists[:30])]
    free = replace(pages, labels=from_lists([*rows, *data.label_lists[30:]], 30))
    suggest_links(free)
    assert (
        "30 texts have a label's name for their id, and none has that label: try --links"
        in capsys.readouterr().err
    )
    own = from_lists([[0], *rows[1:], *data.label_lists[30:]], 30)
    for other in (data, replace(free, labels=own), replace(free, ids=tuple(map(str, range(60))))):
        suggest_links(other)
    assert not capsys.readouterr().err


def test_the_papers_preset_has_two_rankers_and_splits_head_and_tail() -> None:
    classifier = MultiLabelClassifier(preset="xcoretriev", folds=2).fit(labelled(150, 12))
    assert list(classifier.rankers_) == ["sparse", "dense"]
    assert len(classifier.bands_) == 2
    head = classifier.counts_ >= np.sort(classifier.counts_)[-3]
    assert (classifier.label_bands_ == head).all(), "⌊0.2·12⌋ + 1 and whatever is as frequent"
    with pytest.raises(ConfigError, match="no preset"):
        MultiLabelClassifier(preset="nope").fit(labelled(30, 4))
    with pytest.raises(DataError, match="a text has several labels"):
        TextClassifier().fit(labelled(30, 4))


def judged_table(texts: int = 200) -> tuple[CandidateTable, Sparse]:
    """Ranker 0 has the right label first of eight; ranker 1 always a wrong one, then the right one."""
    rng = np.random.default_rng(4)
    right = rng.integers(0, 7, texts)
    sure, misled = rng.random((texts, 8)), rng.random((texts, 8))
    sure[np.arange(texts), right] += np.where(rng.random(texts) < 0.8, 1.0, 0.0)
    misled[np.arange(texts), right] += 1
    misled[:, 7] += 2
    labels = from_lists([[label] for label in right], 8)
    return CandidateTable.of([best_per_row(csr_array(scores), 8) for scores in (sure, misled)]), labels


def test_what_is_first_by_a_ranker_may_count_against_it() -> None:
    table, labels = judged_table()
    hits, parts, bands = table.hits(labels), table.text % 4, np.zeros(len(table), dtype=np.int64)
    fusion, probabilities = cross_fitted(table, labels, bands, 2, parts)
    assert hits[table.ranks(probabilities) == 1].mean() > 0.95
    assert hits[table.ranks(table.scores[0]) == 1].mean() < 0.9
    assert fusion.weights[2 * 3 + 1] < -1, "first by ranker 1"


def test_fusion_is_not_below_its_best_ranker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table, labels = judged_table()
    hits, parts, bands = table.hits(labels), table.text % 4, (table.label > 3).astype(np.int64)
    learn = LabelFusion.fit

    def misled(*arguments: Any) -> LabelFusion:
        fusion = learn(*arguments)
        return replace(fusion, weights=-fusion.weights)

    monkeypatch.setattr(LabelFusion, "fit", misled)
    fusion, probabilities = cross_fitted(table, labels, bands, 2, parts)
    scores = table.scores[0]
    assert table.gains(probabilities, labels).mean() == pytest.approx(
        table.gains(scores, labels).mean(), abs=0.02
    )
    said = fusion.probabilities(table, bands)
    assert (table.ranks(said) == table.ranks(scores)).mean() > 0.99, "ranker 0's order, in all bands"
    assert abs(probabilities.mean() - hits.mean()) < 0.01
    fusion.save(tmp_path)
    assert np.array_equal(LabelFusion.load(tmp_path).probabilities(table, bands), said)
    unlisted = replace(table, scores=np.where(np.arange(len(table)) % 8 == 3, np.nan, table.scores))
    low = cross_fitted(unlisted, labels, bands, 2, parts)[1]
    assert np.isfinite(low).all()
