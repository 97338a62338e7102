"""LETOR and SVMlight files: what is read, what is refused, folds, writing and the cache."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from isthmus.errors import DataError
from isthmus.tables import (
    Letor,
    files,
    letor_blocks,
    letor_files,
    read_letor,
    read_letor_fold,
    read_letor_folds,
    rotated_folds,
    write_letor,
)
from isthmus.tables.cache import Column, open_columns, remembered_checksum, write_columns

DENSE = b"2 qid:7 1:0.5 2:3\n0 qid:7 1:-1e-2 2:0\n1 qid:x 1:.25 2:4\n"
SPARSE = b"2 qid:7 2:3\n0 qid:7 1:1 5:2\n1 qid:x\n"
EXPECTED = Letor.of(["7", "7", "x"], [[0.5, 3], [-0.01, 0], [0.25, 4]], [2, 0, 1])


@pytest.fixture
def file(tmp_path):
    def write(content: bytes, name: str = "train.txt"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plain(path, **options) -> Letor:
    return read_letor(path, cache=False, **options)


def refused(path, file=None) -> DataError:
    with pytest.raises(DataError) as caught:
        plain(path)
    error = caught.value
    assert error.file == str(file or path)
    assert "\n" not in str(error)
    return error


# What is read


@pytest.mark.parametrize(
    "content",
    [
        DENSE,
        DENSE.replace(b"\n", b" \r\n"),
        DENSE.replace(b"\n", b"\r\n"),
        DENSE.replace(b" ", b"\t"),
        DENSE.replace(b" ", b"  "),
        DENSE.replace(b"\n", b"\n\n \n"),
        DENSE.rstrip(b"\n"),
        DENSE.replace(b"\n", b" # a comment\n"),
        b"# a heading\n\n" + DENSE.replace(b"\n", b"#c\n", 1),
        b"\xef\xbb\xbf" + DENSE,
        DENSE.replace(b"2 qid", b"2.0 qid"),
        DENSE.replace(b"2:3", b"2:+3"),
        DENSE.replace(b" 2:0\n", b"\n"),
        DENSE.replace(b"1:-", b"0000000000001:-"),
        gzip.compress(DENSE, mtime=0),
    ],
)
def test_every_spelling_is_read_alike(file, content):
    assert plain(file(content)) == EXPECTED


def test_missing_features(file):
    table = plain(file(SPARSE))
    assert table.features.tolist() == [[0, 3, 0, 0, 0], [1, 0, 0, 0, 2], [0] * 5]
    table = plain(file(SPARSE), missing=np.nan)
    assert np.isnan(table.features).tolist() == [
        [True, False, True, True, True],
        [False, True, True, True, False],
        [True] * 5,
    ]
    assert plain(file(SPARSE), width=6).width == 6
    with pytest.raises(DataError, match="5 features, more than 4"):
        plain(file(SPARSE), width=4)


def test_the_table_is_named_like_the_file(file):
    assert plain(file(DENSE)).name == "train.txt"
    assert plain(file(DENSE), name="mine").name == "mine"


def test_documents_come_from_comments(file):
    content = b"1 qid:1 1:1 #docid = D-1 inc = 1 prob = 0.5\n0 qid:1 1:2 # docid=D#2\n"
    assert plain(file(content)).ids.tolist() == ["D-1", "D#2"]
    # A row whose comment names none is called by its place in the query, before and after grouping.
    content += b"\n# nothing\n0 qid:2 1:1\n0 qid:1 1:3 # no name\n"
    assert plain(file(content)).ids.tolist() == ["D-1", "D#2", "1-2", "2-0"]
    assert plain(file(DENSE)).documents is None


def test_rows_of_a_query_are_brought_together(file):
    content = b"0 qid:a 1:1\n1 qid:b 1:2 2:9\n2 qid:a 1:3\n3 qid:b 1:4\n"
    table = plain(file(content))
    assert table.queries == ("a", "b")
    assert table.grades.tolist() == [0, 2, 1, 3]
    assert table.features.tolist() == [[1, 0], [3, 0], [2, 9], [4, 0]]


@pytest.mark.parametrize("sidecar", ["train.txt.query", "train.txt.group"])
def test_group_sizes_beside_the_file(file, sidecar):
    path = file(re.sub(rb" qid:\w", b"", DENSE))
    file(b"2\n1\n", sidecar)
    table = plain(path)
    assert table.queries == ("1", "2")
    assert np.diff(table.offsets).tolist() == [2, 1]
    assert np.array_equal(table.features, EXPECTED.features)
    packed = file(gzip.compress(re.sub(rb" qid:\w", b"", DENSE)), "train.txt.gz")
    assert plain(packed) == table


def test_queries_in_the_file_win_over_group_sizes(file):
    path = file(DENSE)
    file(b"nonsense", "train.txt.query")
    assert plain(path) == EXPECTED


@pytest.mark.parametrize("ending", [b"\n", b" \r\n"])
def test_a_query_with_colons_is_not_taken_for_features(file, ending):
    content = b"1 qid:1 1:5 2:6\n1 qid:1:1:5 2:6\n".replace(b"\n", ending)
    table = plain(file(content))
    assert table.queries == ("1", "1:1:5")
    assert table.features.tolist() == [[5, 6], [0, 6]]


def test_a_mark_of_byte_order_inside_a_file_is_text(file, monkeypatch):
    monkeypatch.setattr(letor_files, "BLOCK", 16)
    assert refused(file(DENSE + b"\xef\xbb\xbf0 qid:x 1:1 2:1\n")).line == 4


def test_the_three_ways_of_parsing_agree():
    rng = np.random.default_rng(1)
    rows = []
    for row in range(300):
        values = rng.normal(size=9).astype(np.float32)
        rows.append(f"{row % 3} qid:{row // 7} " + " ".join(f"{n}:{v:.7g}" for n, v in enumerate(values, 1)))
    block = files.Block("f", 1, "\n".join([*rows, ""]).encode())
    dense = letor_blocks._dense(block.data)
    sparse = letor_blocks._sparse(block.data, 0.0)
    slow, _ = letor_blocks._line_by_line(block, 0.0)
    for other in (sparse, slow):
        assert np.array_equal(dense.features, other.features)
        assert np.array_equal(dense.grades, other.grades)
        assert np.array_equal(dense.last, other.last)
        assert dense.queries == other.queries


def test_blocks_do_not_show(file, monkeypatch):
    features = [b" ".join(b"%d:%d" % (f, n + f) for f in range(1, 2 + n % 5)) for n in range(400)]
    lines = [b"%d qid:%d %s" % (n % 4, n // 9, told) for n, told in enumerate(features)]
    path = file(b"\n".join([*lines, b""]))
    whole = plain(path)
    monkeypatch.setattr(letor_files, "BLOCK", 256)
    assert plain(path) == whole
    assert read_letor(path) == whole
    shuffled = [lines[at] for at in np.random.default_rng(0).permutation(400)]
    path = file(b"\n".join([*shuffled, b""]))
    scattered = plain(path)
    monkeypatch.setattr(letor_files, "_GATHERED_AT_ONCE", 32)
    assert read_letor(path) == scattered == plain(path)
    assert sorted(scattered.features.tolist()) == sorted(whole.features.tolist())


# What is refused


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"", None, "empty"),
        (b"\n# only\n \n", None, "no rows"),
        (b"0 qid:1\n1 qid:1\n", None, "no line has a feature"),
        (DENSE + b"-1 qid:x 1:1 2:1\n", 4, "the grade is not a whole number from 0 up: '-1'"),
        (DENSE + b"0.5 qid:x 1:1 2:1\n", 4, "the grade is not a whole number from 0 up: '0.5'"),
        (DENSE + b"nan qid:x 1:1 2:1\n", 4, "the grade is not a whole number"),
        (DENSE + b"99999999999 qid:x 1:1 2:1\n", 4, "the grade is not a whole number"),
        (DENSE + b"x qid:x 1:1 2:1\n", 4, "the grade is not a whole number"),
        (DENSE + b"0 qid:x 0:1 1:1 2:1\n", 4, "feature index 0: '0:1'"),
        (DENSE + b"0 qid:x 2:1 1:1\n", 4, "feature index 1 after 2: '1:1'"),
        (DENSE + b"0 qid:x 1:1 1:1\n", 4, "feature index 1 after 1"),
        (DENSE + b"0 qid:x 1:1 999999:1\n", 4, "a very large feature index"),
        (DENSE + b"0 qid:x 1:1 99999999999999999999:1\n", 4, "this is not index:value"),
        (DENSE + b"0 qid:x -1:1 2:1\n", 4, "this is not index:value: '-1:1'"),
        (DENSE + b"0 qid:x 1.0:1 2:1\n", 4, "this is not index:value"),
        (DENSE + b"0 qid:x 0x1:1 2:1\n", 4, "this is not index:value: '0x1:1'"),
        (DENSE + b"0 qid:x 0X2:1\n", 4, "this is not index:value: '0X2:1'"),
        (DENSE + b"0 qid:x 1:1 2\n", 4, "this is not index:value: '2'"),
        (DENSE + b"0 qid:x 1:1 2:\n", 4, "the value is not a finite number: '2:'"),
        (DENSE + b"0 qid:x 1:1 2:nan\n", 4, "the value is not a finite number: '2:nan'"),
        (DENSE + b"0 qid:x 1:1 2:inf\n", 4, "the value is not a finite number"),
        (DENSE + b"0 qid:x 1:1 2:1e39\n", 4, "the value is not a finite number"),
        (DENSE + b"0 qid:x 1:1 2:1:1\n", 4, "the value is not a finite number"),
        (DENSE + b"0 qid:x 1:1 2:1 , 3\n", 4, "this is not index:value"),
        (DENSE + b"0 1:1 2:1\n", 4, "no query"),
        (DENSE + b"0 qid: 1:1 2:1\n", 4, "the query is empty"),
        (DENSE + b"0 qid:\x0bx 1:1 2:1\n", 4, "the query is empty"),
        (DENSE + b"0 qid:x\r1:1 2:1 2:1\n", 4, "feature index 2 after 2"),
        (DENSE + b"0 qid:x 1 1 2:1\n", 4, "this is not index:value: '1'"),
        (DENSE + b"0 qid:x 1 1:2:1\n", 4, "this is not index:value: '1'"),
        (DENSE + b"0 qid:x 1:1 2\t1\n", 4, "this is not index:value: '2'"),
        (DENSE + b"0 qid:x 1:\t1 2:1\n", 4, "the value is not a finite number: '1:'"),
        (DENSE + b"0 qid x 1:1 2:1\n", 4, "no query"),
        (DENSE + b"0:qid:x 1:1 2:1\n", 4, "the grade is not a whole number"),
        (DENSE + b"0 1:1 qid:x 2:1\n", 4, "no query"),
        (DENSE + b"0 qid:x 1:1 qid:x\n", 4, "this is not index:value: 'qid:x'"),
        (DENSE + b"0 qid:x 1:1 2", 4, "the file ends in the middle of a line"),
        (DENSE + b"0 qid:x 1:1 2:", 4, "the file ends in the middle of a line"),
        (DENSE + b"0 qid:x 1:1", 4, "the file ends in the middle of a line, after feature 1 of 2"),
        (DENSE + b"0 qid:x 1:\xff 2:1\n", 4, "is not UTF-8"),
        (b"0 1:1\n", 1, "no query"),
        (b"\n# c\n0 1:1\n", 3, "no query"),
        (b"0 1:1\n0 qid:1 1:1\n", 2, "a query where earlier lines have none"),
        (
            b"0 qid:1 1:1 # docid = d\n0 qid:2 1:1 # docid = d\n#\n1 qid:1 1:1 # docid = d\n",
            4,
            "document 'd' appears twice for query '1', first in line 1",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_line(file, content, line, words):
    path = file(content)
    error = refused(path)
    assert error.line == line
    assert words in str(error)
    assert error.cure
    with pytest.raises(DataError) as cached:
        read_letor(path)
    assert str(cached.value) == str(error)


@pytest.mark.parametrize("content", [DENSE, SPARSE])
def test_lines_are_counted_across_blocks(file, content, monkeypatch):
    monkeypatch.setattr(letor_files, "BLOCK", 64)
    path = file(content * 50 + b"0 qid:x 1:1 0:1\n")
    assert refused(path).line == 151
    path = file(content * 50 + b"0 1:1 2:1\n")
    assert refused(path).line == 151


def test_a_shorter_last_line_without_line_feed_is_fine_where_lengths_differ(file):
    assert plain(file(SPARSE.rstrip(b"\n"))) == plain(file(SPARSE))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (b"2\n2\n", "the group sizes add up to 4 rows, but train.txt has 3"),
        (b"3\n0\n", "this is not a group size: '0'"),
        (b"3\n-1\n", "this is not a group size: '-1'"),
        (b"1.5\n", "this is not a group size: '1.5'"),
        (b"0" * 5000 + b"3\n", "this is not a group size"),
        (b"", "empty"),
    ],
)
def test_group_sizes_that_do_not_fit(file, sizes, words):
    path = file(b"0 1:1\n1 1:1\n2 1:1\n")
    error = refused(path, file(sizes, "train.txt.query"))
    assert words in str(error)


def test_what_cannot_be_opened(tmp_path):
    for cached in (True, False):
        with pytest.raises(DataError, match="No such file"):
            read_letor(tmp_path / "absent", cache=cached)
    with pytest.raises(DataError, match="directory"):
        read_letor(tmp_path)


# Folds


def write_fold(folder, widths=(2, 2, 2), names=("train.txt", "vali.txt", "test.txt")):
    folder.mkdir(parents=True)
    for name, width in zip(names, widths, strict=True):
        row = b"1 qid:%s " % name.encode() + b" ".join(b"%d:1" % n for n in range(1, width + 1))
        content = row + b"\n"
        (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)


def test_folds_are_read_in_their_order_and_equally_wide(tmp_path):
    for number in (1, 2, 10):
        write_fold(tmp_path / f"Fold{number}", (1, 3, 2))
    (tmp_path / "Folder").mkdir()
    folds = read_letor_folds(tmp_path)
    assert [fold.name for fold in folds] == ["Fold1", "Fold2", "Fold10"]
    assert {part.width for fold in folds for part in (fold.train, fold.validation, fold.test)} == {3}
    assert folds[0].validation.queries == ("vali.txt",)


def test_a_fold_may_be_compressed_and_needs_a_training_and_a_test_part(tmp_path):
    write_fold(tmp_path / "a", names=("train.txt.gz", "valid.txt", "test.txt"))
    assert read_letor_fold(tmp_path / "a").train.queries == ("train.txt.gz",)
    (tmp_path / "a" / "valid.txt").unlink()
    assert len(read_letor_fold(tmp_path / "a").validation) == 0
    (tmp_path / "a" / "test.txt").unlink()
    with pytest.raises(DataError, match=r"no test part.*test\.txt"):
        read_letor_fold(tmp_path / "a")
    with pytest.raises(DataError, match="no fold here"):
        read_letor_folds(tmp_path)


def test_parts_rotate_as_in_letor_4():
    parts = [Letor.of([f"S{n}"], [[n]], [0]) for n in range(1, 6)]
    folds = rotated_folds(parts)
    told = [(fold.name, fold.train.queries, *fold.validation.queries, *fold.test.queries) for fold in folds]
    assert told == [
        ("Fold1", ("S1", "S2", "S3"), "S4", "S5"),
        ("Fold2", ("S2", "S3", "S4"), "S5", "S1"),
        ("Fold3", ("S3", "S4", "S5"), "S1", "S2"),
        ("Fold4", ("S4", "S5", "S1"), "S2", "S3"),
        ("Fold5", ("S5", "S1", "S2"), "S3", "S4"),
    ]
    with pytest.raises(DataError, match="2 parts"):
        rotated_folds(parts[:2])


# Writing


def test_what_was_written_is_read_again(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    features = (rng.normal(size=(50, 4)) * 10.0 ** rng.integers(-30, 30, (50, 4))).astype(np.float32)
    table = Letor.of([f"q{n // 6}" for n in range(50)], features, rng.integers(0, 5, 50))
    monkeypatch.setattr(letor_files, "_WRITTEN_AT_ONCE", 16)
    for name in ("out.txt", "out.txt.gz"):
        write_letor(table, tmp_path / name)
        assert plain(tmp_path / name) == table
    halves = (table[:4], table[4:])
    write_letor(iter(halves), tmp_path / "halves.txt")
    assert plain(tmp_path / "halves.txt") == table


def test_documents_and_missing_features_survive_writing(tmp_path):
    table = Letor.of(["a", "a"], [[1, np.nan], [np.nan, 2]], [1, 0], documents=["x", "y#"])
    write_letor(table, tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == "1 qid:a 1:1 #docid = x\n0 qid:a 2:2 #docid = y#\n"
    assert plain(tmp_path / "out.txt", missing=np.nan) == table


def test_what_the_format_cannot_hold_is_not_written(tmp_path):
    for table in (
        Letor.of(["a b"], [[1]], [0]),
        Letor.of(["a#b"], [[1]], [0]),
        Letor.of(["a"], [[np.inf]], [0]),
        Letor.of(["a"], [[1]], [0], documents=["d d"]),
    ):
        with pytest.raises(DataError):
            write_letor(table, tmp_path / "out.txt")
    assert list(tmp_path.iterdir()) == []


# The cache


def kept(cache):
    return sorted(cache.glob("letor/*/*.columns"))


def count_parsing(monkeypatch) -> list[int]:
    calls = []
    parse = letor_files._parse
    monkeypatch.setattr(letor_files, "_parse", lambda *given: calls.append(1) or parse(*given))
    return calls


@pytest.mark.parametrize("content", [DENSE, SPARSE, "1 qid:1 1:1 # docid = é\n0 qid:1 1:2\n".encode()])
def test_the_second_reading_maps_the_same_table(file, cache, content, monkeypatch):
    path = file(content)
    calls = count_parsing(monkeypatch)
    first, second = read_letor(path), read_letor(path)
    assert first == second == plain(path)
    assert len(calls) == 2, "parsed once for the cache, once without"
    assert not second.features.flags.writeable
    assert not second.grades.flags.writeable
    assert second.ids.tolist() == plain(path).ids.tolist()


def test_what_is_missing_is_part_of_the_cached_table(file, cache):
    path = file(SPARSE)
    assert read_letor(path).features[0, 0] == 0
    assert np.isnan(read_letor(path, missing=np.nan).features[0, 0])
    assert len(kept(cache)) == 2


def test_a_changed_file_is_parsed_again_and_the_old_columns_go(file, cache):
    path = file(DENSE)
    read_letor(path)
    old = kept(cache)
    file(DENSE.replace(b"0.5", b"0.6"))  # the same size, perhaps the same time
    assert read_letor(path).features[0, 0] == np.float32(0.6)
    assert len(kept(cache)) == 1
    assert kept(cache) != old


def test_a_touched_file_is_not_parsed_again(file, cache, monkeypatch):
    path = file(DENSE)
    calls = count_parsing(monkeypatch)
    read_letor(path)
    os.utime(path, (1, 1))
    assert read_letor(path) == EXPECTED
    assert len(calls) == 1


def test_the_checksum_is_computed_only_when_size_or_time_changed(tmp_path, monkeypatch):
    path, memory = tmp_path / "f", tmp_path / "memory.json"
    path.write_bytes(b"one")
    os.utime(path, (100, 100))
    first = remembered_checksum([path], memory)
    monkeypatch.setattr("isthmus.tables.cache._checksum", lambda files: pytest.fail("computed again"))
    assert remembered_checksum([path], memory) == first
    monkeypatch.undo()
    path.write_bytes(b"two")
    assert remembered_checksum([path], memory) != first
    # A time so young that a later change might not show in it is not relied on.
    assert json.loads(memory.read_bytes())["settled"] is False


def test_a_changed_file_of_group_sizes_is_seen(file, cache):
    path = file(b"0 1:1\n1 1:1\n2 1:1\n")
    file(b"1\n2\n", "train.txt.query")
    assert np.diff(read_letor(path).offsets).tolist() == [1, 2]
    file(b"2\n1\n", "train.txt.query")
    assert np.diff(read_letor(path).offsets).tolist() == [2, 1]


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "garbled head", "garbled tail", "flipped", "version", "memory"]
)
def test_a_damaged_cache_is_rebuilt(file, cache, damage):
    path = file(DENSE * 20)
    whole = read_letor(path)
    (columns,) = kept(cache)
    content = columns.read_bytes()
    if damage == "memory":
        (columns.parent / "checksum.json").write_text("{")
    spoilt = {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "garbled head": b"x" * 100 + content[100:],
        "garbled tail": content[:-40] + b"\xff" * 24 + content[-16:],
        "flipped": content[:100] + bytes([content[100] ^ 1]) + content[101:],
        "version": b"ISTHMUS0" + content[8:],
        "memory": content,
    }[damage]
    columns.unlink()
    columns.write_bytes(spoilt)
    assert read_letor(path) == whole == plain(path)
    assert kept(cache)[0].read_bytes() == content


def test_a_cache_that_cannot_be_written_is_done_without(file, tmp_path, monkeypatch):
    obstacle = tmp_path / "obstacle"
    obstacle.write_text("a file, not a folder")
    monkeypatch.setenv("ISTHMUS_CACHE", str(obstacle))
    assert read_letor(file(DENSE)) == EXPECTED


def test_columns_of_another_format_are_built_again(file, cache, monkeypatch):
    path = file(DENSE)
    monkeypatch.setattr(letor_files, "_FORMAT", 0)
    read_letor(path)
    monkeypatch.undo()
    monkeypatch.setenv("ISTHMUS_CACHE", str(cache))
    calls = count_parsing(monkeypatch)
    assert read_letor(path) == EXPECTED
    assert len(calls) == 1


def test_columns_hold_numbers_only(tmp_path):
    write_columns(tmp_path / "c", {"n": Column.of(np.arange(3))}, {})
    path = tmp_path / "c"
    path.write_bytes(path.read_bytes().replace(b"<i8", b"|O8"))
    assert open_columns(path) is None


def test_a_file_that_changes_while_it_is_read_is_not_kept(file, cache, monkeypatch):
    path = file(DENSE)
    parse = letor_files._parse

    def meddle(*given):
        frame = parse(*given)
        path.write_bytes(SPARSE)
        return frame

    monkeypatch.setattr(letor_files, "_parse", meddle)
    assert read_letor(path) == plain(path)
    assert kept(cache) == []


def test_stray_parts_of_killed_writers_are_cleared(tmp_path):
    old, young = tmp_path / "a.part", tmp_path / "b.part"
    for stray in (old, young):
        stray.write_bytes(b"x")
    os.utime(old, (1, 1))
    write_columns(tmp_path / "c", {"n": Column.of(np.arange(3))}, {"said": [1, "é"]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.part", "c"]
    about, columns = open_columns(tmp_path / "c")
    assert about == {"said": [1, "é"]}
    assert columns["n"].tolist() == [0, 1, 2]


def test_columns_without_rows_and_in_pieces(tmp_path):
    pieces = Column((4, 2), np.float32, iter([np.ones((1, 2)), np.zeros((3, 2))]))
    write_columns(tmp_path / "c", {"none": Column.of(np.empty((0, 3))), "some": pieces}, {})
    _, columns = open_columns(tmp_path / "c")
    assert columns["none"].shape == (0, 3)
    assert columns["some"].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


BUILDER = """
import sys, time
from isthmus.tables import letor_files, read_letor
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "slow":
    pieces = letor_files._Spool.pieces
    def slowly(self, *given):
        for piece in pieces(self, *given):
            yield piece
            print("writing", flush=True)
            time.sleep(60)
    letor_files._Spool.pieces = slowly
print(float(read_letor(sys.argv[1]).features.sum()), flush=True)
"""


def builder(path, mode="plain") -> subprocess.Popen:
    command = [sys.executable, "-c", BUILDER, str(path), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_may_build_at_once(file, cache):
    path = file(b"".join(b"%d qid:%d 1:%d 2:1\n" % (n % 3, n // 50, n) for n in range(20_000)))
    both = [builder(path), builder(path)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    told = []
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        told.append(process.communicate(timeout=240)[0])
        assert process.returncode == 0
    assert told[0] == told[1] == f"{float(plain(path).features.sum())}\n"
    assert len(kept(cache)) == 1
    assert not list(cache.rglob("*.part"))
    assert read_letor(path) == plain(path)


def test_a_builder_may_be_killed(file, cache):
    path = file(DENSE * 100)
    process = builder(path, "slow")
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=120)
    process.stdout.close()
    process.stdin.close()
    assert kept(cache) == []
    assert len(list(cache.rglob("*.part"))) == 1
    assert read_letor(path) == plain(path)
    assert len(kept(cache)) == 1


# Real data


@pytest.mark.realdata
def test_mq2008_and_its_official_folds(data_dir):
    parts = [read_letor(data_dir / "letor" / "mq2008" / f"S{n}.txt") for n in range(1, 6)]
    whole = Letor.concat(parts)
    assert (len(whole), whole.rows, whole.width) == (784, 15_211, 46)
    assert set(whole.grades.tolist()) == {0, 1, 2}
    assert whole.ids.tolist()[0] == "GX008-86-4444840"
    sizes = [(len(fold.train), len(fold.validation), len(fold.test)) for fold in rotated_folds(parts)]
    assert sizes == [(471, 157, 156), (471, 156, 157), (470, 157, 157), (470, 157, 157), (470, 157, 157)]


@pytest.mark.realdata
def test_real_files_agree_with_scikit_learn(data_dir):
    from sklearn.datasets import load_svmlight_file

    for name in ("mslr-fold1-sample/train.txt", "mq2008/S1.txt", "lightgbm-example/rank.test"):
        path = data_dir / "letor" / name
        features, grades, *_ = load_svmlight_file(str(path), query_id=True, zero_based=False)
        table = plain(path)
        assert np.array_equal(table.features, features.toarray().astype(np.float32))
        assert np.array_equal(table.grades, grades)


@pytest.mark.realdata
def test_lightgbms_example_has_its_groups(data_dir):
    train = read_letor(data_dir / "letor" / "lightgbm-example" / "rank.train")
    assert (len(train), train.rows, train.width) == (201, 3_005, 300)
    assert np.diff(train.offsets)[:3].tolist() == [1, 13, 5]
