"""Texts under labels: what is read, what is learned, and that probabilities hold on texts held out."""

from __future__ import annotations

import csv
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import isthmus
from isthmus.classification import (
    LabelDescription,
    LabelledTexts,
    TextClassifier,
    describe,
    from_lists,
    load_classifier,
    read_descriptions,
    read_labelled,
    read_texts,
    report_of,
    write_descriptions,
)
from isthmus.encoders import Chat
from isthmus.errors import DataError, ServiceError
from isthmus.tables import Qrels, Run

WORDS = {
    "sport": ["match", "goal", "team", "coach", "league", "referee", "pitch", "striker"],
    "food": ["bread", "soup", "kitchen", "oven", "butter", "recipe", "flour", "pan"],
    "law": ["court", "judge", "appeal", "statute", "verdict", "lawyer", "clause", "trial"],
    "weather": ["rain", "storm", "cloud", "forecast", "wind", "snow", "sun", "fog"],
}
SHARED = ["today", "people", "said", "that", "many", "things", "happened", "again", "here", "before"]


def labelled(count: int, seed: int = 0, mixing: float = 0.35) -> list[tuple[str, str]]:
    """Texts and labels; so large a share of a text's telling words belongs to another label."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        label = str(rng.choice(list(WORDS), p=[0.4, 0.3, 0.2, 0.1]))
        homes = [label if rng.random() > mixing else str(rng.choice(list(WORDS))) for _ in range(4)]
        words = [*(str(rng.choice(WORDS[home])) for home in homes), *map(str, rng.choice(SHARED, 5))]
        rows.append((" ".join(words), label))
    return rows


def as_csv(path: Path, rows: list[tuple[str, str]], header: tuple[str, str] = ("text", "label")) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> TextClassifier:
    path = as_csv(tmp_path_factory.mktemp("texts") / "train.csv", labelled(400))
    return TextClassifier(folds=3).fit(read_labelled(path))


def test_csv_json_lines_and_folders_say_the_same(tmp_path: Path) -> None:
    rows = [("a, b\nc", "x"), ("d", "y"), ("e", "x")]
    table = read_labelled(as_csv(tmp_path / "t.csv", rows, ("Sentence", "Category")))
    lines = tmp_path / "t.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in rows))
    for at, (text, label) in enumerate(rows):
        (tmp_path / "folder" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / label / f"{at}.txt").write_text(text)
    records, folder = read_labelled(lines), read_labelled(tmp_path / "folder")
    expected = {(text, (label,)) for text, label in rows}
    for each in (table, records, folder):
        names = [tuple(each.names[at] for at in np.flatnonzero(row)) for row in each.dense]
        assert set(zip(each.texts, names, strict=True)) == expected
        assert each.single
    assert folder.ids == ("x/0.txt", "x/2.txt", "y/1.txt")


def test_several_labels_folds_and_splits(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,text,labels,fold,split\np,one,a;b,0,train\nq,two,b,1,train\nr,three,,1,test\n")
    texts = read_labelled(path)
    assert texts.dense.tolist() == [[True, True], [False, True], [False, False]]
    assert texts.folds is not None
    assert texts.folds.tolist() == [0, 1, 1]
    assert not texts.single
    assert texts.split("train").ids == ("p", "q")
    assert texts.qrels.to_dict() == {"p": {"a": 1, "b": 1}, "q": {"b": 1}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("words,label\na,b\n", "no column for the text"),
        ("text;label\na, b;x\n", r"separated by semicolons \(text;label\), not by commas \(save it with"),
        ("text,label\na,b\n", "1 labels"),
        ("text,label\na,b,c\n", "not 2 columns"),
        ("text,label\n", "no rows"),
        ("\ufeff", "no rows"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(body)
    with pytest.raises(DataError, match=message):
        read_labelled(path)


def test_a_column_that_is_not_there_and_a_file_in_the_models_place_are_named(tmp_path: Path) -> None:
    train = as_csv(tmp_path / "train.csv", labelled(20))
    with pytest.raises(DataError, match=r"no column 'nope' \(name it with --text COLUMN; there are .*text"):
        read_labelled(train, text="nope")
    with pytest.raises(
        DataError, match=r"no label set and no path 'nowhere.csv' .*one of twitter, .*-also\)$"
    ):
        read_labelled("nowhere.csv")
    with pytest.raises(DataError, match="did you mean 'pydocs-labels'"):
        read_labelled("pydocs-lables")
    refused = isthmus("classify", "fit", "nowhere.csv", "-o", str(train), check=False)
    assert refused.returncode == 2
    assert "is a file" in refused.stderr


def test_held_out_probabilities_hold_and_new_texts_get_the_like(fitted: TextClassifier) -> None:
    data = fitted.data_
    report = report_of(fitted.held_out_, data.qrels, data.names)
    assert report.measures["P@1"] > 0.7
    limit = max(0.04, report.measures["ECE@1 floor"] + 0.015)
    assert report.measures["ECE@1"] < limit + 0.02  # 400 texts
    rows = labelled(400, seed=9)
    run = fitted.predict([text for text, _ in rows])
    truth = Qrels.from_dict({str(at): {label: 1} for at, (_, label) in enumerate(rows)})
    fresh = report_of(run, truth, data.names).measures
    assert fresh["P@1"] == pytest.approx(report.measures["P@1"], abs=0.07)
    assert fresh["ECE@1"] < fresh["ECE@1 floor"] + 0.04
    assert (np.diff(run.required_probabilities[:4]) <= 0).all()


def test_a_text_is_never_scored_by_rankers_that_saw_a_copy_of_it() -> None:
    """Labels at random: every text stands twice, and whoever remembers its copy is always right."""
    rng = np.random.default_rng(2)
    once = [" ".join(map(str, rng.integers(10_000, size=6))) for _ in range(60)]
    labels = rng.integers(2, size=60)
    both = from_lists(np.concatenate((labels, labels))[:, None], 2)
    names = tuple(str(at) for at in range(120))
    texts = LabelledTexts(names, tuple(once + [text.upper() for text in once]), both, ("a", "b"), ("", ""))
    classifier = TextClassifier(folds=3).fit(texts)
    assert report_of(classifier.held_out_, texts.qrels, texts.names).measures["P@1"] < 0.7


def test_reports_count_confusions_and_find_the_threshold() -> None:
    answers = {f"q{at}": {"a": 0.9 - at / 100, "b": 0.1} for at in range(40)}
    truth = {f"q{at}": {"a" if at < 20 or at % 2 else "b": 1} for at in range(40)}
    run = Run.from_dict(answers)
    run = run.with_probabilities(run.scores)
    report = report_of(run, Qrels.from_dict(truth), ("a", "b"))
    assert report.confusion.tolist() == [[30, 0], [10, 0]]
    assert report.measures["P@1"] == 0.75
    assert report.confusions() == [{"label": "b", "taken for": "a", "texts": 10}]
    decision = report.decision(1.0)
    assert decision["threshold"] == pytest.approx(0.9 - 0.19)
    assert (decision["rows"], decision["abstained"]) == (20, 0.5)
    with pytest.raises(DataError, match="no threshold reaches"):
        report_of(run, Qrels.from_dict({f"q{at}": {"b": 1} for at in range(40)}), ("a", "b")).decision(0.5)


def test_a_saved_classifier_answers_as_before(fitted: TextClassifier, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    loaded = load_classifier(tmp_path / "model")
    texts = [text for text, _ in labelled(20, seed=5)]
    before, after = fitted.predict(texts), loaded.predict(texts)
    assert before.documents.tolist() == after.documents.tolist()
    assert after.required_probabilities == pytest.approx(before.required_probabilities)
    assert loaded.threshold_for(0.8) == pytest.approx(fitted.threshold_for(0.8))
    with pytest.raises(DataError, match="no classifier"):
        load_classifier(tmp_path)


def test_a_loaded_classifier_is_saved_again(fitted: TextClassifier, tmp_path: Path) -> None:
    fitted.save(tmp_path / "one")
    load_classifier(tmp_path / "one").save(tmp_path / "two")
    for name in ("classifier.json", "texts.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    texts = [text for text, _ in labelled(5, seed=5)]
    assert load_classifier(tmp_path / "two").predict(texts) == load_classifier(tmp_path / "one").predict(
        texts
    )


def test_a_classifier_that_is_fitted_again_forgets_its_first_fit(tmp_path: Path) -> None:
    first, second = (
        read_labelled(as_csv(tmp_path / f"{seed}.csv", labelled(80, seed=seed))) for seed in (1, 2)
    )
    twice = TextClassifier(folds=2).fit(first)
    texts = [text for text, _ in labelled(5, seed=5)]
    twice.predict(texts)
    twice.save(tmp_path / "model")
    once = TextClassifier(folds=2).fit(second)
    assert twice.fit(second).predict(texts) == once.predict(texts)
    assert twice.curve_.kept.tolist() == once.curve_.kept.tolist()


def test_labels_without_a_training_text_are_saved_too(tmp_path: Path) -> None:
    data = read_labelled(as_csv(tmp_path / "train.csv", labelled(80)))
    about = {"travel": "a train, a ship and a hotel", **{name: " ".join(WORDS[name]) for name in data.names}}
    right = from_lists([[label + 1] for (label,) in data.label_lists], 5)
    wider = replace(data, labels=right, names=tuple(about), descriptions=tuple(about.values()))
    classifier = TextClassifier(folds=2).fit(wider)
    classifier.save(tmp_path / "model")
    loaded = load_classifier(tmp_path / "model")
    assert loaded.data_.names == ("travel", *data.names)
    assert loaded.data_.descriptions == tuple(about.values())
    texts = ["a hotel by the train", "the ship and the match"]
    before, after = classifier.predict(texts), loaded.predict(texts)
    assert len(before["0"].documents) == 5
    assert after.documents.tolist() == before.documents.tolist()
    assert after.required_probabilities == pytest.approx(before.required_probabilities)


def test_the_command_line_learns_predicts_and_evaluates(tmp_path: Path) -> None:
    train = as_csv(tmp_path / "train.csv", labelled(300))
    model, out = tmp_path / "model", tmp_path / "answers.csv"
    learned = json.loads(isthmus("classify", "fit", str(train), "-o", str(model), "--json").stdout)
    assert set(learned) == {"model", "measures", "labels", "confusion", "decision"}
    assert learned["measures"]["texts"] == 300
    assert sum(map(sum, learned["confusion"]["counts"])) == 300
    new = tmp_path / "new.txt"
    new.write_text("match goal team coach today people said\ntoday people said\n")
    isthmus("classify", "predict", str(model), str(new), "-o", str(out), "--precision", "0.93")
    answers = list(csv.DictReader(out.open()))
    assert [answer["id"] for answer in answers] == ["1", "2"]
    assert answers[0]["label"] == "sport"
    assert answers[1]["label"] == "", "nothing tells what it is about"
    shown = isthmus("classify", "evaluate", str(train), "--precision", "0.8").stdout
    assert "Top-1 ECE" in shown
    sentence = (
        r"For a precision of 0\.8: answer where the probability is at least 0\.\d{3}, and abstain from the "
        r"other [\d.]+ % of texts\. [\d.]+ % of these answers were right "
        r"\(95 % interval: [\d.]+ % to [\d.]+ %\)\."
    )
    assert re.search(sentence, " ".join(shown.split()))
    other = as_csv(tmp_path / "other.csv", labelled(100, seed=4))
    judged = json.loads(isthmus("classify", "evaluate", str(other), "--model", str(model), "--json").stdout)
    assert judged["measures"]["texts"] == 100
    assert read_texts(new) == (["1", "2"], ["match goal team coach today people said", "today people said"])


# what labels mean


@pytest.fixture
def chat_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address of an interface like OpenAI's, and what it was sent."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append({"path": self.path, "key": self.headers.get("authorization"), **body})
            label = re.search(r'"(\w+)"', body["messages"][0]["content"])
            said = f"Texts on {label[1] if label else '?'}\n in general."
            content = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1#small-model", requests
    server.shutdown()
    server.server_close()


def test_labels_are_described_by_their_own_sentences(tmp_path: Path) -> None:
    path = as_csv(tmp_path / "train.csv", labelled(200))
    found = describe(read_labelled(path))
    for label, one in found.items():
        own = sum(word in WORDS[label] for word in one.text.split())
        others = sum(word in words for word in one.text.split() for words in WORDS.values()) - own
        assert own > 3 * others, label
        assert (one.source, one.reviewed) == ("extractive", False)


def test_an_endpoint_describes_labels_once_and_what_was_corrected_stays(
    tmp_path: Path, chat_server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, requests = chat_server
    monkeypatch.setenv("CHAT_KEY", "secret-key")
    path, out = as_csv(tmp_path / "train.csv", labelled(120)), tmp_path / "labels.json"
    options = ("-o", out, "--endpoint", url, "--key", "env:CHAT_KEY")
    isthmus("classify", "describe", path, *options)
    assert {one["path"] for one in requests} == {"/v1/chat/completions"}
    assert (requests[0]["model"], requests[0]["key"]) == ("small-model", "Bearer secret-key")
    prompts = {one["messages"][0]["content"] for one in requests}
    assert len(prompts) == 4
    assert all(prompt.count("\n- ") == 5 + 3 for prompt in prompts), (
        "five of its own, one of each other label"
    )
    found = read_descriptions(out)
    assert found["law"].text == "Texts on law in general."
    corrected = {**found, "law": LabelDescription("Courts and statutes.", found["law"].source, reviewed=True)}
    write_descriptions({name: one for name, one in corrected.items() if name != "food"}, out)
    isthmus("classify", "describe", path, *options)
    assert len(requests) == 5, "only the label that was missing"
    again = read_descriptions(out)
    assert again == {**corrected, "food": found["food"]}
    assert "secret-key" not in out.read_text()
    model = tmp_path / "model"
    isthmus("classify", "fit", path, "-o", model, "--descriptions", out, "--folds", 2)
    assert load_classifier(model).data_.descriptions[1] == "Courts and statutes."
    assert "label text" in load_classifier(model)._panel(load_classifier(model).data_).rankers


def test_an_answer_without_text_and_a_file_without_descriptions_are_errors(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text('{"format": 1, "labels": {"a": {"words": "b"}}}')
    with pytest.raises(DataError, match="no descriptions"):
        read_descriptions(tmp_path / "labels.json")
    (tmp_path / "plain.json").write_text('{"a": "what a is"}')
    assert read_descriptions(tmp_path / "plain.json")["a"].text == "what a is"
    chat = Chat("http://127.0.0.1:9/v1#m", pauses=0.0)
    object.__setattr__(chat, "_post", lambda body, patience: b'{"choices": []}')
    with pytest.raises(ServiceError, match="answered no text"):
        chat.complete("say")


@pytest.mark.parametrize(
    ("name", "body", "told"),
    [
        ("new.csv", "id,text\n3,refund\n1,locked\n1,card\n", "the id '1' stands twice"),
        ("new.jsonl", '{"id": "a", "text": "x"}\n{"id": "b", "body": "y"}\n', "row 2 has no text"),
        ("new.jsonl", '{"id": "a", "text": "x"}\n{"id": "b", "text": null}\n', "row 2 has no text"),
    ],
)
def test_texts_keep_their_own_ids_or_are_refused(tmp_path, name, body, told):
    (tmp_path / name).write_text(body)
    with pytest.raises(DataError, match=told):
        read_texts(tmp_path / name)


def test_blank_lines_are_no_texts_and_lines_keep_their_numbers(tmp_path):
    (tmp_path / "new.txt").write_text("refund\n\nlocked account\n")
    assert read_texts(tmp_path / "new.txt") == (["1", "3"], ["refund", "locked account"])
