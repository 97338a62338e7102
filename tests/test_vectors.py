"""The vector index: exact scores, best passages, nothing lost to a kill, searches while it is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from isthmus.engines import VectorIndex, vectors
from isthmus.errors import DataError

WIDTH = 48
plain = vectors._int8


def directions(count: int, seed: int = 0, width: int = WIDTH) -> NDArray[np.float32]:
    """Unit vectors around a few centres, as texts of a few topics have them."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((20, width))
    rows = centres[rng.integers(0, 20, count)] + 0.8 * rng.standard_normal((count, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def half(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """As they are stored, of unit length again."""
    stored = rows.astype(np.float16).astype(np.float32)
    return stored / np.linalg.norm(stored, axis=1, keepdims=True)


def opened(folder: Path, width: int = WIDTH) -> VectorIndex:
    return VectorIndex.open(folder, width, "some-encoder")


def whole(index: VectorIndex, rows: NDArray[np.float32], first: int = 1) -> None:
    """One passage a document, committed."""
    index.add(range(first, first + len(rows)), rows, [(0, 9)] * len(rows))
    index.commit()


def test_a_search_has_the_nearest_documents_with_exact_cosines(tmp_path):
    rows, query = directions(500), directions(1, 7)[0]
    with opened(tmp_path) as index:
        whole(index, rows)
        changes, cosines = index.reader.search(query, 20)
        exact = half(rows) @ query
        order = np.argsort(-exact)[:20]
        assert changes.tolist() == (order + 1).tolist()
        np.testing.assert_allclose(cosines, exact[order], atol=1e-6)
        np.testing.assert_allclose(index.reader.cosines(changes, query), cosines, atol=1e-6)
        assert len(index.reader.search(query, 1000)[0]) == len(index.reader) == 500


def test_a_document_is_as_near_as_its_best_passage_and_that_is_the_one_to_show(tmp_path):
    rows, query = directions(90), directions(1, 7)[0]
    owners = np.repeat(np.arange(1, 31), 3)
    spans = [(100 * at, 100 * at + 80) for at in range(90)]
    with opened(tmp_path) as index:
        # first passages first, as a node adds them
        for at in range(3):
            index.add(owners[at::3], rows[at::3], spans[at::3], passages=[3] * 30)
            index.commit()
            assert len(index.reader.unfinished) == (0 if at == 2 else 30)
        best = (half(rows) @ query).reshape(30, 3)
        changes, cosines = index.reader.search(query, 30)
        assert changes.tolist() == (np.argsort(-best.max(axis=1)) + 1).tolist()
        np.testing.assert_allclose(cosines, np.sort(best.max(axis=1))[::-1], atol=1e-6)
        np.testing.assert_allclose(index.reader.cosines(changes, query), cosines, atol=1e-6)
        change = int(changes[0])
        assert index.reader.best_span(change, query) == spans[3 * (change - 1) + best[change - 1].argmax()]
        assert index.reader.spans(change) == spans[3 * (change - 1) : 3 * change]
        np.testing.assert_allclose(
            index.reader.first_vectors([change, 77])[0], rows[3 * (change - 1)], atol=1e-3
        )
        assert not index.reader.first_vectors([77]).any()


def test_one_document_with_very_many_passages_does_not_hide_the_others(tmp_path):
    query = directions(1, 7)[0]
    crowd = np.tile(query, (400, 1)) + 0.01 * directions(400, 3)
    others = directions(50, 4)
    with opened(tmp_path) as index:
        index.add([1] * 400, crowd, [(0, 1)] * 400, passages=[400] * 400)
        whole(index, others, first=2)
        changes, cosines = index.reader.search(query, 10)
        assert changes[0] == 1
        assert len(set(changes.tolist())) == 10
        np.testing.assert_allclose(cosines[1:], np.sort(half(others) @ query)[::-1][:9], atol=1e-6)


def test_what_has_no_vector_or_no_direction_is_no_candidate_and_minus_infinity(tmp_path):
    rows = directions(4)
    rows[2] = 0
    with opened(tmp_path) as index:
        assert len(index.reader.search(rows[0], 5)[0]) == 0
        whole(index, rows)
        assert 3 not in index.reader.search(-rows[0], 10)[0]
        assert index.reader.cosines([3, 50, 0], rows[0]).tolist() == [-np.inf] * 3
        assert index.reader.known([1, 3, 50]).tolist() == [True, True, False]
        assert len(index.reader.search(np.zeros(WIDTH, np.float32), 5)[0]) == 0
        assert index.reader.best_span(50, rows[0]) is None


@pytest.fixture
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph from a thousand rows on, in steps of two thousand."""
    monkeypatch.setattr(vectors, "EXACT", 1000)
    monkeypatch.setattr(vectors, "STEP", 2000)


@pytest.mark.usefixtures("small_graphs")
def test_the_graph_finds_nearly_all_and_its_scores_are_exact(tmp_path):
    rows, queries = directions(6000), directions(40, 7)
    with opened(tmp_path) as index:
        whole(index, rows[:5500])
        while index.maintain():
            pass
        assert index.reader.covered == 5500
        whole(index, rows[5500:], first=5501)  # compared one by one: too few for the graph to grow
        assert not index.maintain()
        assert index.reader.covered == 5500
    with opened(tmp_path) as index:
        assert index.reader.covered == 5500
        exact, recall = half(rows) @ queries.T, []
        for at, query in enumerate(queries):
            changes, cosines = index.reader.search(query, 50)
            np.testing.assert_allclose(cosines, exact[changes.astype(int) - 1, at], atol=1e-6)
            recall.append(np.isin(np.argsort(-exact[:, at])[:50] + 1, changes).mean())
        assert np.mean(recall) >= 0.98


@pytest.mark.usefixtures("small_graphs")
def test_removed_documents_are_gone_from_searches_at_once_and_from_the_disk(tmp_path):
    rows = directions(3000)
    with opened(tmp_path) as index:
        whole(index, rows)
        index.maintain()
        assert index.reader.covered == 2000
        index.add([5000], rows[:1], [(0, 1)])
        index.remove([1, 17, 2500, 5000, 9999])
        index.commit()
        for change in (1, 17, 2500, 5000):
            assert change not in index.reader.search(rows[(change - 1) % 3000], 10)[0]
        assert len(index.reader) == 2997
        stored = np.fromfile(tmp_path / "vectors-000001", np.float16).reshape(-1, WIDTH)
        assert not stored[[0, 16, 2499, 3000]].any()
        assert stored[1].any()
        index.remove(range(1, 1700))
        index.commit()
        assert index.maintain()  # half of the rows are dead
        assert len(index.reader.vectors) == 1300
        assert not list(tmp_path.glob("*-000001*"))
        assert index.reader.search(rows[2000], 1)[0].tolist() == [2001]
    with opened(tmp_path) as index:
        assert len(index.reader) == 1300


@pytest.mark.usefixtures("small_graphs")
def test_a_graph_that_is_lost_or_cut_is_built_again(tmp_path):
    with opened(tmp_path) as index:
        whole(index, directions(2000))
        index.maintain()
    graph = next(tmp_path.glob("graph-*"))
    graph.write_bytes(graph.read_bytes()[:-100])
    with opened(tmp_path) as index:
        assert index.reader.covered == 0
        assert len(index.reader) == 2000
        assert index.maintain()
        assert index.reader.covered == 2000


def test_what_was_not_committed_is_not_there_after_opening_again(tmp_path):
    with opened(tmp_path) as index:
        whole(index, directions(10))
        index.add([11], directions(1), [(0, 1)])
        index.remove([3])
        assert len(index.reader) == 10
    with opened(tmp_path) as index:
        assert index.reader.documents.tolist() == list(range(1, 11))
        whole(index, directions(1, 5), first=12)
        assert index.reader.search(directions(1, 5)[0], 1)[0].tolist() == [12]


def test_another_encoder_and_damaged_files_are_refused_in_words(tmp_path):
    with opened(tmp_path) as index:
        whole(index, directions(10))
        with pytest.raises(DataError, match=r"expected \(2, 48\)"):
            index.add([1, 2], directions(2, width=8), [(0, 1)] * 2)
        with pytest.raises(DataError, match="not finite"):
            index.add([1], np.full((1, WIDTH), np.nan), [(0, 1)])
    with pytest.raises(DataError, match="encoder 'some-encoder', expected 'another'"):
        VectorIndex.open(tmp_path, WIDTH, "another")
    os.truncate(tmp_path / "vectors-000001", 50)
    with pytest.raises(DataError, match="has 50 bytes, 960 were committed"):
        opened(tmp_path)
    (tmp_path / "state").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        opened(tmp_path)


@pytest.mark.usefixtures("small_graphs")
def test_searches_go_on_while_vectors_come_and_go(tmp_path):
    rows, ended, failures = directions(6000), threading.Event(), []

    def read(index: VectorIndex) -> None:
        while not ended.is_set():
            reader = index.reader
            changes, cosines = reader.search(rows[5], 10)
            # document 6 is never removed: once it is there it is its own nearest
            if len(reader) and (changes[0] != 6 or not np.all(np.diff(cosines) <= 0)):
                failures.append((changes, cosines))

    with opened(tmp_path) as index:
        readers = [threading.Thread(target=read, args=(index,)) for _ in range(3)]
        for thread in readers:
            thread.start()
        try:
            for start in range(0, 6000, 200):
                index.add(range(start + 1, start + 201), rows[start : start + 200], [(0, 1)] * 200)
                index.remove(range(max(start - 400, 6) + 1, start - 200))
                index.commit()
                index.maintain()
        finally:
            ended.set()
            for thread in readers:
                thread.join()
    assert not failures


WRITER = """
import sys, pathlib, numpy as np
from isthmus.engines import VectorIndex, vectors
vectors.EXACT, vectors.STEP = 300, 600
folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with VectorIndex.open(folder, 16, "some-encoder") as index:
    rng = np.random.default_rng(seed)
    change = int(index.reader.documents.max(initial=0)) + 1
    while True:
        count = int(rng.integers(1, 120))
        owners = np.arange(change, change + count)
        index.add(owners, np.sin(np.outer(owners, np.arange(1, 17))), [(0, 1)] * count)
        gone = owners[owners % 3 > 0]
        if rng.random() < 0.5:
            index.remove(gone)
        else:
            gone = gone[:0]
        index.commit()
        print(change, count, len(gone), flush=True)
        change += count
        index.maintain()
"""


@pytest.mark.soak
def test_killed_at_any_moment_it_opens_with_all_that_was_committed(
    tmp_path: Path, soak_count: Callable[[int, int], int]
) -> None:
    """SIGKILL at random moments of adding, removing, compacting and growing the graph."""
    rng, expected = np.random.default_rng(0), set[int]()
    for trial in range(soak_count(4, 60)):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(trial)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            committed = [writer.stdout.readline()]  # it has opened
            killer = threading.Timer(float(rng.uniform(0, 0.6)), writer.send_signal, (signal.SIGKILL,))
            killer.start()
            committed += [line for line in writer.stdout if line.endswith("\n")]
            killer.join()
        for line in committed:
            first, count, removed = map(int, line.split())
            added = range(first, first + count)
            expected |= {change for change in added if not removed or change % 3 == 0}
        with VectorIndex.open(tmp_path, 16, "some-encoder") as index:
            documents = set(index.reader.documents.tolist())
            assert expected <= documents
            # at most one commit that it had no time to report
            assert len(documents - expected) < 120
            for change in sorted(documents)[:: max(1, len(documents) // 20)]:
                vector = np.sin(change * np.arange(1, 17)).astype(np.float32)
                assert index.reader.cosines([change], vector)[0] == pytest.approx(1, abs=1e-3)
            expected = documents
        state = json.loads((tmp_path / "state").read_text())
        assert state["rows"] >= len(documents)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "commit", "compact", "open"]), st.integers(1, 9)),
        max_size=30,
    )
)
def test_it_has_what_a_dictionary_would_have(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    """A law: after any steps, the committed passages of the documents that are there, and no others."""
    folder = tmp_path_factory.mktemp("index")
    index, there, coming, gone = opened(folder, 4), dict[int, int](), dict[int, int](), set[int]()
    change = 0
    for step, number in steps:
        if step == "add":
            change += 1
            index.add([change] * number, np.eye(4)[[change % 4] * number], [(0, 1)] * number)
            coming[change] = number
        elif step == "remove":
            index.remove([number])
            gone.add(number)
        elif step == "open":
            index.close()
            index, coming, gone = opened(folder, 4), {}, set()
        else:
            index.commit() if step == "commit" else index.compact()
            there = {at: size for at, size in (there | coming).items() if at not in gone}
            coming, gone = {}, set()
        reader = index.reader
        assert {at: len(reader.spans(at)) for at in reader.documents.tolist()} == there
        hits, _ = reader.search(np.ones(4, np.float32), 100)
        assert sorted(hits.tolist()) == sorted(there)
    index.close()


@pytest.mark.usefixtures("small_graphs")
def test_compacting_does_not_wait_for_a_graph_that_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "_int8", lambda rows: (time.sleep(0.02), plain(rows))[1])
    with opened(tmp_path) as index:
        whole(index, directions(2000))  # ten seconds, of 500 pieces
        index.remove([1])
        index.commit()
        grower = threading.Thread(target=index.maintain)
        grower.start()
        time.sleep(0.1)
        began = time.monotonic()
        index.compact()
        assert time.monotonic() - began < 5
        grower.join()
        assert len(index.reader.vectors) == 1999
        assert index.reader.covered == 0


def test_what_comes_and_goes_while_files_are_compacted_is_there_and_gone(tmp_path, monkeypatch):
    rows, copied = directions(300), vectors._copy
    with opened(tmp_path) as index:
        whole(index, rows[:200])
        index.remove(range(1, 50))
        index.commit()

        def copy(*arguments):
            monkeypatch.setattr(vectors, "_copy", copied)
            copied(*arguments)
            whole(index, rows[200:], first=201)
            index.remove([60, 250])
            index.commit()

        monkeypatch.setattr(vectors, "_copy", copy)
        index.compact()
        expected = [at for at in range(50, 301) if at not in (60, 250)]
        assert index.reader.documents.tolist() == expected
        np.testing.assert_allclose(index.reader.first_vectors([299]), rows[298:299], atol=1e-3)
        gone = np.fromfile(tmp_path / "vectors-000002", np.float16).reshape(-1, WIDTH)[10]
        assert not gone.any()
    with opened(tmp_path) as index:
        assert index.reader.documents.tolist() == expected
        assert not list(tmp_path.glob("*-000001*"))


def test_large_removals_are_erased_whole(tmp_path, monkeypatch):
    plain_write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: plain_write(file, bytes(data)[:1000], at))
    with opened(tmp_path) as index:
        whole(index, directions(200))
        index.remove(range(1, 150))
        index.commit()
        stored = np.fromfile(tmp_path / "vectors-000001", np.float16).reshape(-1, WIDTH)
        assert not stored[:149].any()
        assert stored[149:].any(axis=1).all()
