"""Full disks and lost files under a node's index: nothing is counted wrongly, nothing stays missing."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time

import numpy as np
import pytest

from isthmus.engines import BY_FIELD, Change, EmbeddedEngine, ExactReader, VectorIndex
from isthmus.engines import embedded as embedded_module
from isthmus.engines.embedded import Generation
from isthmus.engines.growing import GrowingFile
from isthmus.errors import DataError
from isthmus.service import Node
from isthmus.service import node as nodes
from isthmus.service.settings import EncoderSettings, NodeSettings
from isthmus.service.stores import Draft, SqliteStore

WORDS = ("moon", "tide", "first", "second", "third", "letter")


def documents(first, last):
    ordinals = ("first", "second", "third")
    return [
        Change(f"d{at}", at, False, f"letter {at}", f"moon and tide {ordinals[at % 3]} n{at}")
        for at in range(first, last)
    ]


def same(engine, changes):
    """The engine counts and finds what one that was given these changes at once does."""
    reader, exact = engine.reader, ExactReader(changes)
    handles = exact.handles()
    np.testing.assert_array_equal(reader.handles(), handles)
    np.testing.assert_array_equal(reader.counts(handles, WORDS).body, exact.counts(handles, WORDS).body)
    (terms, tables), (expected, counts) = reader.statistics(BY_FIELD), exact.statistics(BY_FIELD)
    assert terms.tolist() == expected.tolist()
    for name in BY_FIELD:
        np.testing.assert_array_equal(tables[name], counts[name])
    np.testing.assert_array_equal(reader.matching({"moon": 1.0}, 100), handles)


def full(*_arguments, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_at(write):
    """A disk that is full in the middle of the n-th write to the rows, and never after."""
    written, append = 0, GrowingFile.append

    def half_written(self, records):
        nonlocal written
        written += 1
        if written != write:
            return append(self, records)
        content = np.ascontiguousarray(records, dtype=self.dtype).tobytes()
        os.pwrite(self._stream.fileno(), content[: len(content) // 2], self.count * self.dtype.itemsize)
        return full()

    return half_written


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, "tantivy", "manifest"])
def test_a_disk_that_was_full_leaves_no_wrong_count(at, tmp_path, monkeypatch):
    engine = EmbeddedEngine(tmp_path / "engine")
    engine.apply(documents(1, 6))
    more = [*documents(6, 11), Change("d2", 11, True, "", "")]
    with monkeypatch.context() as patched:
        if at == "tantivy":
            patched.setattr(Generation, "_index", full)
        elif at == "manifest":
            patched.setattr(embedded_module, "replacing", full)
        else:
            patched.setattr(GrowingFile, "append", full_at(at))
        with pytest.raises(OSError, match="No space"):
            engine.apply(more)
    assert len(engine.reader) == 5
    engine.apply(more)
    same(engine, [*documents(1, 6), *more])
    engine.close()
    again = EmbeddedEngine(tmp_path / "engine")
    same(again, [*documents(1, 6), *more])
    again.close()


@pytest.mark.parametrize("lost", ["tantivy", "tantivy/meta.json"])
def test_documents_are_not_counted_that_cannot_be_found(lost, tmp_path):
    engine = EmbeddedEngine(tmp_path)
    engine.apply(documents(1, 6))
    engine.close()
    path = tmp_path / "generation-000001" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = EmbeddedEngine(tmp_path)
    assert again.reader.change == 0, "so that the store is asked for all of it"
    again.apply(documents(1, 6))
    same(again, documents(1, 6))
    again.close()


def test_a_long_query_among_equal_documents_is_answered_in_little_memory(tmp_path):
    """Of equal scores all are fetched, to be ordered by id: up to a number of documents times terms."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [one + other + "q" for one in letters for other in letters][:400]
    engine = EmbeddedEngine(tmp_path)
    engine.apply([Change(f"d{at}", at, False, "", " ".join(words)) for at in range(1, 4_001)])
    assert len(engine.reader.matching(dict.fromkeys(words[:4], 1.0), 10)) == 4_000
    assert len(engine.reader.matching(dict.fromkeys(words, 1.0), 10)) <= 2_700
    engine.close()


class PanicException(BaseException):
    """As of pyo3, which is no Exception."""


def test_tantivys_panics_end_no_thread_of_a_node(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "TICK", 0.05)
    with Node(NodeSettings("north", tmp_path / "north", encoder=EncoderSettings("none"))) as node:
        update, panics = node.index.update, threading.Event()

        def panicking():
            if not panics.is_set():
                panics.set()
                raise PanicException("index out of bounds")
            return update()

        node.index.update = panicking
        node.store.put([Draft("d1", "", "moon")])
        node._wake.set()
        until = time.monotonic() + 20
        while not len(node.index.snapshot) and time.monotonic() < until:
            time.sleep(0.05)
        assert panics.is_set()
        assert len(node.index.snapshot) == 1


def test_tantivys_panics_do_not_keep_a_node_from_starting(tmp_path, monkeypatch):
    engine = EmbeddedEngine(tmp_path)
    engine.apply(documents(1, 6))
    engine.close()
    opened = Generation.reader

    def panics(self, dense):
        if self.rows.view.living:
            raise PanicException("assertion failed: end <= orig_range.end")
        return opened(self, dense)

    monkeypatch.setattr(Generation, "reader", panics)
    again = EmbeddedEngine(tmp_path)
    assert len(again.reader) == 0
    again.close()


def flip(path, at):
    """One bit of a file."""
    with open(path, "r+b") as stream:
        stream.seek(at)
        (octet,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([octet ^ 4]))


@pytest.mark.parametrize("name", ["documents", "terms", "counts", "ids", "words", "spelling", "totals"])
def test_a_flipped_bit_of_the_rows_is_noticed_when_they_are_opened(name, tmp_path, caplog):
    changes = documents(1, 60)
    engine = EmbeddedEngine(tmp_path / "engine")
    for some in (changes[:20], changes[20:]):
        engine.apply(some)
    engine.close()
    path = tmp_path / "engine" / "generation-000001" / name
    content = path.read_bytes()
    for at in np.linspace(40, len(content) - 30, 5, dtype=int).tolist():
        path.write_bytes(content)
        flip(path, at)
        again = EmbeddedEngine(tmp_path / "engine")
        if name == "totals":  # counted again from the rows
            same(again, changes)
            again.close()
            continue
        assert len(again.reader) == 0
        assert again.reader.change == 0, "the store is asked for everything"
        assert "does not have its checksum" in caplog.text
        again.apply(changes)
        same(again, changes)
        again.close()
        content = path.read_bytes()
        caplog.clear()


@pytest.mark.parametrize("kind", ["vectors", "passages"])
def test_a_flipped_bit_of_vectors_is_noticed_and_they_are_made_again(kind, tmp_path, caplog):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(9_000, 8)).astype(np.float32)
    with VectorIndex.open(tmp_path, 8, "e") as index:
        for some in (range(5_000), range(5_000, 9_000)):
            index.add([at + 1 for at in some], rows[some.start : some.stop], [(0, 1)] * len(some))
            index.commit()
        index.remove([3, 4_200, 8_999])
        index.commit()
    VectorIndex.open(tmp_path, 8, "e").close()
    path = tmp_path / f"{kind}-000001"
    for part in (0.1, 0.6, 0.99):
        flip(path, int(part * path.stat().st_size))
        with pytest.raises(DataError, match="checksum"):
            VectorIndex.open(tmp_path, 8, "e")
        flip(path, int(part * path.stat().st_size))
    VectorIndex.open(tmp_path, 8, "e").close()


def test_vectors_that_were_being_erased_are_no_damage(tmp_path, monkeypatch):
    rows = np.eye(8, dtype=np.float32)
    index = VectorIndex.open(tmp_path, 8, "e")
    index.add(range(1, 9), rows, [(0, 1)] * 8)
    index.commit()
    index.remove([3])

    def killed(rows, blocks, known):
        raise KeyboardInterrupt

    monkeypatch.setattr(index, "_summed", killed)  # after the rows were overwritten
    with pytest.raises(KeyboardInterrupt):
        index.commit()
    index.close()
    with VectorIndex.open(tmp_path, 8, "e") as again:
        assert again.reader.documents.tolist() == [1, 2, 4, 5, 6, 7, 8]


def test_a_removed_text_leaves_the_database_and_its_log(tmp_path):
    store = SqliteStore(tmp_path / "documents.db")
    store.put([Draft(f"d{at}", f"title {at}", f"clandestine{at} " * 50) for at in range(40)])
    reading = store.count()
    assert reading == 40
    assert any(b"clandestine7 " in path.read_bytes() for path in tmp_path.iterdir())
    store.remove(["d7"])
    store.put([Draft("d8", "title 8", "replaced")])
    for word in (b"clandestine7 ", b"clandestine8 "):
        assert not [path.name for path in tmp_path.iterdir() if word in path.read_bytes()]
    assert any(b"clandestine9 " in path.read_bytes() for path in tmp_path.iterdir())
    store.close()
