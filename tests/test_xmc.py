"""The sparse format of the extreme classification repository: what is read is what was written."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

from isthmus.corpora import SparseRows, read_xmc, stream_xmc, write_xmc
from isthmus.errors import DataError

SMALL = "3 4 5\n0,4 0:1.5 3:-2e-1\n 2:1\n1\n"


def rows(count: int, features: int = 30, labels: int = 12) -> SparseRows:
    rng = np.random.default_rng(0)
    values = csr_array(random_array((count, features), density=0.2, rng=rng, dtype=np.float32))
    right = csr_array(random_array((count, labels), density=0.2, rng=rng) > 0)
    return SparseRows(values, right)


def test_a_small_file(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text(SMALL)
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne, with a comma\n")
    data = read_xmc(tmp_path / "small.txt", label_names=tmp_path / "names.txt")
    assert data.features.toarray().tolist() == [
        [1.5, 0, 0, pytest.approx(-0.2)],
        [0, 0, 1, 0],
        [0, 0, 0, 0],
    ]
    assert data.labels.toarray().tolist() == [
        [True, False, False, False, True],
        [False] * 5,
        [False, True, False, False, False],
    ]
    assert data.names == ("a", "b", "c", "d", "e, with a comma")
    assert len(data) == 3


@pytest.mark.parametrize("name", ["rows.txt", "rows.txt.gz"])
def test_what_was_written_is_read_again(tmp_path: Path, name: str) -> None:
    data = rows(25)
    halves = (SparseRows(data.features[part], data.labels[part]) for part in (slice(10), slice(10, 25)))
    write_xmc(tmp_path / name, halves, rows=25)
    again = read_xmc(tmp_path / name)
    assert np.array_equal(again.features.toarray(), data.features.toarray())
    assert np.array_equal(again.labels.toarray(), data.labels.toarray())
    batches = list(stream_xmc(tmp_path / name, batch=10))
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert np.array_equal(batches[1].features.toarray(), data.features[10:20].toarray())


def test_repeats_blank_ends_and_line_ends_of_windows(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_bytes(b"2 3 3\r\n1,1 0:1 0:2\r\n2  1:1 \r\n\r\n")
    data = read_xmc(tmp_path / "data.txt")
    assert data.features.toarray().tolist() == [[3, 0, 0], [0, 1, 0]]
    assert data.labels.toarray().tolist() == [[False, True, False], [False, False, True]]


def test_a_file_of_another_length_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="5 rows were to be written as 6"):
        write_xmc(tmp_path / "data.txt", [rows(5)], rows=6)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3 4\n", r"data\.txt:1: not a header"),
        ("0 4 5\n", r"data\.txt:1: rows, features and labels go from 1"),
        ("1 4 99999999999\n", r"data\.txt:1: rows, features and labels go from 1"),
        ("1 4 5\n0,5 0:1\n", r"data\.txt:2: label 5, but the header says 5, counted from 0"),
        ("2 4 5\n0 0:1\n\n", None),
        ("2 4 5\n0 0:1\n1 2:1 4:1\n", r"data\.txt:3: feature 4, but the header says 4"),
        ("1 4 5\n0 99999999999999999999:1\n", r"data\.txt:2: feature 1\d+, but the header"),
        ("1 4 5\n0 1:2:3\n", r"data\.txt:2: not a row"),
        ("1 4 5\n0, 1:2\n", r"data\.txt:2: not a row"),
        ("1 4 5\n-1 1:2\n", r"data\.txt:2: not a row"),
        ("1 4 5\n0 1:nan\n", r"data\.txt:2: not a row"),
        ("1 4 5\n0 1:1e99\n", r"data\.txt:2: a value beyond 3.4e"),
        ("1 4 5\n0 1:1\n0 1:1\n", r"data\.txt:3: more than the header's 1 rows"),
        ("3 4 5\n0 1:1\n", r"data\.txt: 1 rows, but the header says 3"),
    ],
)
def test_malformed_files_name_the_line(tmp_path: Path, text: str, problem: str | None) -> None:
    (tmp_path / "data.txt").write_text(text)
    if problem is None:
        assert len(read_xmc(tmp_path / "data.txt")) == 2
        return
    with pytest.raises(DataError, match=problem):
        read_xmc(tmp_path / "data.txt")


def test_label_names_are_as_many_as_labels(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text(SMALL)
    (tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"names\.txt: 2 names, but there are 5 labels"):
        read_xmc(tmp_path / "small.txt", label_names=tmp_path / "names.txt")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(SMALL.encode() * 50)[:-20])
    with pytest.raises(DataError, match="cut or damaged"):
        read_xmc(tmp_path / "cut.gz")


def test_a_number_without_end_is_an_error_of_its_line(tmp_path):
    file = tmp_path / "rows.txt"
    for row in (b"0 " + b"1" * 100_000 + b":1", b"0 1:" + b"1" * 100_000, b"1" * 100_000 + b" 1:1"):
        file.write_bytes(b"1 5 5\n" + row + b"\n")
        with pytest.raises(DataError, match="a row is"):
            read_xmc(file)
