"""Vectors that come by and by: words are searched at once, first passages come first, none twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isthmus.encoders.onnx import OnnxEncoder
from isthmus.errors import ConfigError, DataError
from isthmus.service import index as indexing
from isthmus.service.index import Index
from isthmus.service.node import Node
from isthmus.service.scoring import Bm25Scorer, Scored
from isthmus.service.settings import EncoderSettings, NodeSettings, Policy
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Search
from tiny_encoders import WORDS, lookup_encoder

RED, GREEN, MIXED = "red apple red apple red apple. ", "green pear green pear green pear. ", "red pear me. "


def encoder(folder: Path, scale: float = 1.0, **prompts: str) -> EncoderSettings:
    """Reads eight tokens; every word is a direction of its own, stretched by `scale` times its number."""
    if not folder.exists():
        table = np.eye(len(WORDS), dtype=np.float32) * (1 + scale * np.arange(len(WORDS)))[:, None]
        table[:4] = 0
        lookup_encoder(folder, table, pooling="mean_tokens", prompts=prompts)
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 10}')
    return EncoderSettings("encoder", path=folder)


def drafts(count: int = 12) -> list[Draft]:
    """Every third document is long, and green only at its end."""
    long, short = RED * 3 + GREEN, MIXED
    return [Draft(f"d{at:02d}", "", long if at % 3 == 0 else short) for at in range(count)]


@pytest.fixture
def store(tmp_path: Path):
    store = SqliteStore(tmp_path / "documents.db")
    store.put(drafts())
    yield store
    store.close()


def opened(tmp_path: Path, store: SqliteStore, wanted: EncoderSettings) -> Index:
    return Index(tmp_path / "index", store, encoder=wanted)


def dense(index: Index, query: str) -> dict[str, float]:
    """Cosines of all that were found by meaning."""
    candidates = index.snapshot.find(query, 100)
    if "dense" not in candidates.scores:
        return {}
    rows = zip(candidates.documents, candidates.scores["dense"], candidates.listed["dense"], strict=True)
    return {document: float(score) for document, score, is_listed in rows if is_listed}


def words(index: Index, query: str) -> set[str]:
    candidates = index.snapshot.find(query, 100)
    rows = zip(candidates.documents, candidates.listed["bm25"], strict=True)
    return {document for document, is_listed in rows if is_listed}


def test_words_are_found_before_any_vector_and_first_passages_come_first(tmp_path, store, monkeypatch):
    monkeypatch.setattr(indexing, "SECONDS", 0.0)
    monkeypatch.setattr(indexing, "AT_ONCE", 4)
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    assert words(index, "green") == {"d00", "d03", "d06", "d09"}
    assert dense(index, "green") == {}
    assert index.unencoded == 12
    waiting = []
    while index.encode():
        waiting.append(index.unencoded)
        reader = index.snapshot.reader.dense
        counts = [len(reader.spans(change)) for change in reader.documents.tolist()]
        assert max(counts) == 1 or index.unencoded == 0  # nobody has two before everybody has one
    assert waiting[:3] == [8, 4, 0]
    assert len(waiting) > 4
    # green is in the last passages of long documents alone
    assert min(dense(index, "green")[f"d{at:02d}"] for at in (0, 3, 6, 9)) > 0.5
    assert len(index.snapshot.reader.dense.unfinished) == 0
    index.close()


def test_what_is_encoded_is_not_encoded_again_after_opening(tmp_path, store, monkeypatch):
    monkeypatch.setattr(indexing, "SECONDS", 0.0)
    monkeypatch.setattr(indexing, "AT_ONCE", 4)
    encoded: list[str] = []
    plain = OnnxEncoder.encode
    monkeypatch.setattr(
        OnnxEncoder, "encode", lambda self, texts: (encoded.extend(texts), plain(self, texts))[1]
    )
    wanted, steps = encoder(tmp_path / "model"), 0
    while True:
        index = opened(tmp_path, store, wanted)
        index.catch_up()
        if not steps:
            encoded.clear()
        steps += 1
        done = index.encode()
        index.close()
        if not done:
            break
    index = opened(tmp_path, store, wanted)
    assert index.unencoded == 0
    passages = sum(len(index.snapshot.reader.dense.spans(change)) for change in range(1, 13))
    index.close()
    # opening asks for the width with "a"
    assert len([text for text in encoded if text != "a"]) == passages > 12


def test_documents_that_change_or_go_lose_their_vectors(tmp_path, store):
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    index.encode_all()
    store.put([Draft("d00", "", "me me me")])
    store.remove(["d03"])
    index.catch_up()
    assert set(dense(index, "green")) >= {"d06", "d09"}
    assert not {"d00", "d03"} & set(dense(index, "green"))
    index.encode_all()
    assert dense(index, "me")["d00"] == pytest.approx(1, abs=1e-3)
    assert index.engine.encoded == 11
    index.close()


def test_another_encoder_takes_over_when_all_are_encoded_and_the_old_one_serves_until_then(
    tmp_path, store, monkeypatch
):
    monkeypatch.setattr(indexing, "SECONDS", 0.0)
    monkeypatch.setattr(indexing, "AT_ONCE", 4)
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    index.encode_all()
    old, before = index.snapshot.encoder.fingerprint, dense(index, "red pear")
    index.close()
    other = encoder(tmp_path / "other", scale=7.0)
    for step in range(3):  # in three processes
        index = opened(tmp_path, store, other)
        index.catch_up()
        assert index.snapshot.encoder.fingerprint == old
        assert dense(index, "red pear") == before
        assert index.unencoded == 12 - 4 * step
        index.encode()
        if step < 2:
            index.close()
    assert index.snapshot.encoder.fingerprint not in (old, "none")
    index.encode_all()
    after = dense(index, "red pear")
    assert set(after) == set(before)
    assert after != before
    assert len(list((tmp_path / "index").glob("vectors-*"))) == 1
    index.close()


def test_vectors_outlive_an_index_that_is_lost_but_not_their_documents(tmp_path, store):
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    index.encode_all()
    index.close()
    store.remove(["d03"])
    (tmp_path / "index" / "manifest.json").write_text("{")
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    assert index.unencoded == 0
    assert "d06" in dense(index, "green")
    assert "d03" not in dense(index, "green")
    index.maintain()
    assert index.engine.encoded == 11
    index.close()


def node_settings(tmp_path: Path) -> NodeSettings:
    return NodeSettings(
        "north",
        folder=tmp_path / "node",
        encoder=encoder(tmp_path / "model"),
        peers={"local": Policy(search=True, snippets=True)},
    )


def wait_for(happened, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_node_encodes_behind_and_a_hit_by_meaning_shows_its_best_passage(tmp_path):
    encoder(tmp_path / "model", query="find me : ")
    with Node(node_settings(tmp_path)) as node:
        node.searcher = replace(node.searcher, scorer=ByMeaning())
        node.put([*drafts(), Draft("long", "", RED * 30 + "find me find me find. " + RED * 30)])
        wait_for(lambda: node.index.unencoded == 0 and not len(node.index.engine.unfinished()))
        assert node.ready().ready
        assert node.ready().detail == ""
        assert node.ready().encoder_name == "model"
        by_meaning = node.searcher.search(
            Search(query="bridges"), snippets=True
        ).hits  # a word of no document
        assert by_meaning[0].document == "long"
        assert by_meaning[0].snippet.startswith("find me find me find.")
        by_words = node.searcher.search(Search(query="pear"), snippets=True).hits
        assert by_words[0].document == "long"
        assert by_words[1].snippet.startswith("red pear me.")


class ByMeaning(Bm25Scorer):
    """Cosines alone."""

    def score(self, snapshot, candidates):
        scores = candidates.scores["dense"]
        order = np.flatnonzero(np.isfinite(scores))
        return Scored(order[np.argsort(-scores[order], kind="stable")], scores, None)


def test_an_encoder_that_fails_leaves_searches_by_words_and_is_tried_again(tmp_path, monkeypatch):
    failing = [True]
    plain = OnnxEncoder.encode

    def encode(self, texts):
        if failing and len(texts) > 1:
            raise DataError("the encoder is not there")
        return plain(self, texts)

    monkeypatch.setattr(OnnxEncoder, "encode", encode)
    monkeypatch.setattr("isthmus.service.node.TICK", 0.05)
    with Node(node_settings(tmp_path)) as node:
        node.put(drafts())
        wait_for(lambda: node.encoding_problem)
        assert node.ready().ready
        assert node.ready().detail == "encoding failed: DataError"
        assert node.searcher.search(Search(query="green"), snippets=False).hits
        failing.clear()
        wait_for(lambda: node.ready().detail == "")
        assert node.index.unencoded == 0


KILLED = """
import sys, pathlib
sys.path.insert(0, {tests!r})
from isthmus.service import index as indexing
from isthmus.service.index import Index
from isthmus.service.settings import EncoderSettings
from isthmus.service.stores import SqliteStore
indexing.SECONDS, indexing.AT_ONCE = 0.0, 2
folder = pathlib.Path({folder!r})
store = SqliteStore(folder / "documents.db")
index = Index(folder / "index", store, encoder=EncoderSettings("encoder", path=folder / "model"))
index.catch_up()
while index.encode():
    print(index.engine.encoded, flush=True)
print("done", flush=True)
"""


@pytest.mark.soak
def test_killed_while_it_encodes_it_goes_on_where_it_was(tmp_path, store, soak_count):
    encoder(tmp_path / "model")
    store.put([Draft(f"e{at}", "", RED * (at % 5) + GREEN) for at in range(400)])
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    rng, best = np.random.default_rng(0), 0
    for _ in range(soak_count(2, 30)):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(int(rng.integers(1, 15)))]
            process.send_signal(signal.SIGKILL)
            lines += [line for line in process.stdout if line.endswith("\n")]
        counts = [int(line) for line in lines if line.strip().isdigit()]
        assert all(count >= best for count in counts)
        best = max([best, *counts])
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    assert index.engine.encoded >= best
    index.catch_up()
    index.encode_all()
    assert index.unencoded == 0
    index.close()


def test_index_only_encodes_everything_before_it_ends(tmp_path):
    encoder(tmp_path / "model")
    lines = [json.dumps({"_id": each.id, "text": each.body}) for each in drafts()]
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "north.toml").write_text(
        'silo = "north"\nfolder = "node"\n\n[encoder]\nkind = "encoder"\npath = "model"\n\n'
        '[[sources]]\nkind = "beir"\npath = "documents"\n'
    )
    command = [sys.executable, "-m", "isthmus", "node", "--config", "north.toml", "--index-only", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["documents"] == 12
    store = SqliteStore(tmp_path / "node" / "documents.db")
    index = Index(tmp_path / "node" / "index", store, encoder=encoder(tmp_path / "model"))
    assert index.unencoded == 0
    assert not index.engine.unfinished()
    index.close()
    store.close()


def folders(tmp_path):
    return sorted((tmp_path / "index").glob("vectors-*"))


@pytest.mark.parametrize("kind", ["none", "lsa"])
def test_a_start_with_another_encoder_by_mistake_costs_no_vector(tmp_path, store, kind):
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    index.encode_all()
    before, kept = dense(index, "green"), folders(tmp_path)
    index.close()
    index = opened(tmp_path, store, EncoderSettings(kind))
    index.catch_up()
    assert dense(index, "green") != before
    assert set(kept) < set(folders(tmp_path)) or kept == folders(tmp_path)
    store.remove(["d03"])  # what is kept forgets too
    index.catch_up()
    index.close()
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    assert index.unencoded == 0
    index.catch_up()
    assert dense(index, "green") == {name: score for name, score in before.items() if name != "d03"}
    assert folders(tmp_path) == kept
    index.close()


def test_vectors_are_kept_until_another_costly_encoder_has_all(tmp_path, store):
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    index.encode_all()
    kept = folders(tmp_path)
    index.close()
    opened(tmp_path, store, EncoderSettings("none")).close()
    index = opened(tmp_path, store, encoder(tmp_path / "other", scale=7.0))
    assert len(folders(tmp_path)) == 2
    index.encode_all()
    assert len(folders(tmp_path)) == 1
    assert folders(tmp_path) != kept
    index.close()


def test_damage_costs_what_is_damaged_and_what_cannot_be_read_costs_nothing(tmp_path, store, caplog):
    wanted = encoder(tmp_path / "model")
    index = opened(tmp_path, store, wanted)
    index.catch_up()
    index.encode_all()
    before = dense(index, "green")
    index.close()
    (tmp_path / "index" / "encoder.json").write_text("{")
    index = opened(tmp_path, store, wanted)
    assert dense(index, "green") == before
    assert "encoder.json is damaged" in caplog.text
    index.close()
    (folder,) = folders(tmp_path)
    state = (folder / "state").read_bytes()
    (folder / "state").unlink()
    (folder / "state").mkdir()  # no process may read it, whoever runs this
    with pytest.raises(OSError, match="state"):
        opened(tmp_path, store, wanted)
    assert (folder / "vectors-000001").stat().st_size > 0
    (folder / "state").rmdir()
    (folder / "state").write_bytes(state[:-1])
    index = opened(tmp_path, store, wanted)
    assert index.unencoded == 12
    assert "are damaged and made again" in caplog.text
    index.close()


def test_a_coming_encoder_is_searched_when_its_graph_is_there(tmp_path, store, monkeypatch):
    index = opened(tmp_path, store, encoder(tmp_path / "model"))
    index.catch_up()
    index.encode_all()
    old = index.snapshot.encoder.fingerprint
    index.close()
    monkeypatch.setattr("isthmus.engines.vectors.EXACT", 5)
    index = opened(tmp_path, store, encoder(tmp_path / "other", scale=7.0))
    while index.encode():
        pass
    assert index.unencoded == 0
    assert index.snapshot.encoder.fingerprint == old
    while index.maintain():
        pass
    assert index.snapshot.encoder.fingerprint != old
    assert index.snapshot.reader.dense.covered > 5
    index.close()


def test_a_node_of_the_release_before_starts_by_words_until_its_encoder_is_added(
    tmp_path, store, monkeypatch, caplog
):
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    with pytest.warns(FutureWarning, match="transformer"):
        before = EncoderSettings("transformer")
    index = opened(tmp_path, store, before)
    index.catch_up()
    assert words(index, "green") == {"d00", "d03", "d06", "d09"}
    assert "isthmus encoder add minilm" in caplog.text
    index.close()
    with pytest.raises(ConfigError, match="no encoder 'unknown'"):
        opened(tmp_path, store, EncoderSettings("encoder", "unknown"))
