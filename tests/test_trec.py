"""TREC runs and judgements: what is read, what is written, and what is refused with which words."""

from __future__ import annotations

import gzip
import os
import threading

import numpy as np
import pytest

from isthmus.errors import DataError
from isthmus.tables import Qrels, Run, files, read_qrels, read_run, trec, write_qrels, write_run

RUN = b"q1 Q0 d1 1 2.5 tag\nq1 Q0 d2 2 1.5 tag\nq2 Q0 d1 1 -3e-1 tag\n"
QRELS = b"q1 0 d1 2\nq1 0 d2 -1\nq2 0 d1 0\n"
EXPECTED_RUN = {"q1": {"d1": 2.5, "d2": 1.5}, "q2": {"d1": -0.3}}
EXPECTED_QRELS = {"q1": {"d1": 2, "d2": -1}, "q2": {"d1": 0}}


@pytest.fixture
def file(tmp_path):
    def write(content: bytes, name: str = "file.txt"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def refused(read, path) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path)
    error = caught.value
    assert error.file == str(path)
    assert str(path) in str(error)
    assert "\n" not in str(error)
    return error


# Runs that are read


@pytest.mark.parametrize(
    "content",
    [
        RUN,
        RUN.replace(b" ", b"\t"),
        RUN.replace(b" ", b"  \t "),
        RUN.replace(b"\n", b"\r\n"),
        RUN.replace(b"\n", b" \t\r\n"),
        RUN.replace(b"\n", b"\n\n  \n"),
        b"  " + RUN.replace(b"\n", b"\n "),
        RUN.rstrip(b"\n"),
        b"\xef\xbb\xbf" + RUN,
        RUN.replace(b"Q0", b"0"),
        RUN.replace(b"Q0", b"iter").replace(b" 1 ", b" x "),
        RUN.replace(b" tag", b""),
        RUN.replace(b"2.5", b"+2.5"),
        RUN.replace(b"2.5", b"25E-1").replace(b"-3e-1", b"-.3"),
        gzip.compress(RUN, mtime=0),
        gzip.compress(RUN[:30], mtime=0) + gzip.compress(RUN[30:], mtime=0),
    ],
)
def test_every_spelling_of_a_run_is_read_alike(file, content):
    assert read_run(file(content)).to_dict() == EXPECTED_RUN


def test_a_run_is_named_by_its_first_tag_or_by_the_caller(file):
    assert read_run(file(RUN)).name == "tag"
    assert read_run(file(RUN), name="mine").name == "mine"
    assert read_run(file(RUN.replace(b" tag", b""))).name == ""


def test_order_is_by_score_whatever_the_ranks_say(file):
    run = read_run(file(b"q Q0 a 1 1 t\nq Q0 b 2 2 t\nq Q0 c 3 1 t\n"))
    assert run.documents.tolist() == ["b", "c", "a"]


def test_rows_of_a_query_need_not_stand_together(file):
    run = read_run(file(b"q1 Q0 a 1 1 t\nq2 Q0 a 1 1 t\nq1 Q0 b 1 3 t\n"))
    assert run.to_dict() == {"q1": {"b": 3, "a": 1}, "q2": {"a": 1}}


def test_ids_may_be_any_text_without_white_space(file):
    text = 'q"1 Q0 "d,1 1 2.5 t\nq\u00a0é Q0 #d 1 2 t\n'
    assert read_run(file(text.encode())).to_dict() == {'q"1': {'"d,1': 2.5}, "q\u00a0é": {"#d": 2.0}}


def test_floats_are_read_to_the_last_bit(file, tmp_path):
    scores = np.random.default_rng(0).normal(size=1000) * 10.0 ** np.arange(-500, 500).clip(-300, 300)
    run = Run.of(["q"] * 1000, [f"d{n}" for n in range(1000)], scores)
    write_run(run, tmp_path / "out.run")
    assert read_run(tmp_path / "out.run") == run


def test_blocks_do_not_show(file, monkeypatch):
    content = b"".join(b"q%d Q0 d%d 1 %d t\n" % (n // 7, n, n) for n in range(500))
    whole = read_run(file(content))
    monkeypatch.setattr(files.read_blocks, "__kwdefaults__", {"size": 64})
    assert read_run(file(content)) == whole
    error = refused(read_run, file(content + b"q Q0 d 1 x t\n"))
    assert error.line == 501


# Runs that are refused


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"", None, "empty"),
        (b"\n \n\t\n", None, "no rows"),
        (b"\xef\xbb\xbf", None, "no rows"),
        (RUN + b"q2 Q0 d2 2 high tag\n", 4, "score 'high' is not a finite number"),
        (RUN + b"q2 Q0 d2 2 nan tag\n", 4, "score 'nan' is not a finite number"),
        (RUN + b"q2 Q0 d2 2 inf tag\n", 4, "score 'inf' is not a finite number"),
        (RUN + b"q2 Q0 d2 2 1e999 tag\n", 4, "score '1e999' is not a finite number"),
        (RUN + b"q2 Q0 d2 2 1_0 tag\n", 4, "score '1_0' is not a finite number"),
        (RUN + b"q2 Q0 d2 2 0x1p3 tag\n", 4, "score '0x1p3' is not a finite number"),
        (RUN + b"q2 Q0 d2 2 tag\n", 4, "5 columns where there should be 6, as before"),
        (RUN + b"q2 Q0 d2 2 1 my tag\n", 4, "7 columns where there should be 6, as before"),
        (RUN + b"q2  Q0 d2 2 0.1\n", 4, "5 columns where there should be 6"),
        (RUN + b"q2 Q0 d2", 4, "the file ends in the middle of a line"),
        (b"q1 d1 2.5\n", 1, "3 columns where there should be 6 or 5"),
        (b"\n\nq1\n", 3, "1 column where there should be 6 or 5"),
        (b"q1 Q0 d1 1 t 2.5\n", 1, "score 't'"),
        (RUN + b"q2 Q0 d\xe9 2 1 tag\n", 4, "byte 0xe9 at offset 66 is not UTF-8"),
        (RUN + b"q2 Q0 d 2 1 t\xe9\n", 4, "is not UTF-8"),
        (b"\xff\xfe" + RUN.decode().encode("utf-16-le"), 1, "byte 0xff at offset 0 is not UTF-8"),
        (RUN.decode().encode("utf-16-le"), 1, "byte 0x00 at offset 1 is not UTF-8"),
        (RUN + b"\nq1 Q0 d2 3 0.5 tag\n", 5, "'d2' appears twice for query 'q1', first in line 2"),
        (RUN.replace(b"\n", b"\r"), 1, "columns where there should be"),
    ],
)
def test_a_bad_run_is_refused_with_its_line(file, content, line, words):
    error = refused(read_run, file(content))
    assert error.line == line
    assert words in str(error)
    assert error.cure


def test_the_offending_text_is_told(file):
    error = refused(read_run, file(RUN + b"q2 Q0 d2 2 high tag\n"))
    assert error.text == "q2 Q0 d2 2 high tag"
    assert "qid Q0 docid rank score tag" in error.cure


def test_compressed_data_that_end_early_or_are_damaged(file):
    packed = gzip.compress(RUN * 1000, mtime=0)
    assert "cut or damaged" in str(refused(read_run, file(packed[:-20])))
    assert "cut or damaged" in str(refused(read_run, file(packed[:20] + b"\xff" * 10 + packed[30:])))
    assert "cut or damaged" in str(refused(read_run, file(b"\x1f\x8bnothing")))


def test_what_cannot_be_opened(tmp_path):
    assert "No such file" in str(refused(read_run, tmp_path / "absent.run"))
    assert "directory" in str(refused(read_run, tmp_path))


def test_a_line_without_end_is_refused(file, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    monkeypatch.setattr(files.read_blocks, "__kwdefaults__", {"size": 100})
    assert "a line of more than" in str(refused(read_run, file(b"q" * 5000)))


def test_a_pipe_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(RUN))
    writer.start()
    run = read_run(pipe)
    writer.join()
    assert run.to_dict() == EXPECTED_RUN


# Judgements


@pytest.mark.parametrize(
    "content",
    [
        QRELS,
        QRELS.replace(b" 0 d", b" d"),
        QRELS.replace(b" ", b"\t").replace(b"\n", b"\r\n"),
        QRELS.replace(b" 0 d", b" Q0 d"),
        QRELS.replace(b" 2\n", b" 2.0\n"),
        QRELS.replace(b" 2\n", b" +2\n"),
        b"query-id\tcorpus-id\tscore\n" + QRELS.replace(b" 0 d", b" d"),
        b"\n\nquery-id corpus-id score\r\n" + QRELS.replace(b" 0 d", b" d"),
        QRELS.rstrip(b"\n"),
        gzip.compress(QRELS, mtime=0),
    ],
)
def test_every_spelling_of_judgements_is_read_alike(file, content):
    assert read_qrels(file(content)).to_dict() == EXPECTED_QRELS


def test_a_mark_of_byte_order_inside_a_file_is_text(file):
    qrels = read_qrels(file("query-id corpus-id score\n\ufeffq d 1\n".encode()))
    assert qrels.to_dict() == {"\ufeffq": {"d": 1}}


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"", None, "empty"),
        (b"query-id corpus-id score\n", None, "no rows"),
        (QRELS + b"q2 0 d2 0.5\n", 4, "grade '0.5' is not a whole number"),
        (QRELS + b"q2 0 d2 nan\n", 4, "grade 'nan' is not a whole number"),
        (QRELS + b"q2 0 d2 9999999999\n", 4, "grade '9999999999' is not a whole number of 32 bits"),
        (QRELS + b"q2 0 d2 -2147483648\n", 4, "is not a whole number of 32 bits"),
        (QRELS + b"q2 0 d2 yes\n", 4, "grade 'yes'"),
        (QRELS + b"q2 d2 1\n", 4, "3 columns where there should be 4, as before"),
        (QRELS + b"q2 0 d2", 4, "the file ends in the middle of a line"),
        (b"q1 d1\n", 1, "2 columns where there should be 4 or 3"),
        (QRELS + b"q1 0 d2 1\n", 4, "'d2' appears twice for query 'q1', first in line 2"),
        (b"query-id corpus-id score\nq1 d1 1\nq1 d1 1\n", 3, "first in line 2"),
        (QRELS + b"q2 0 d\xe9 1\n", 4, "is not UTF-8"),
    ],
)
def test_bad_judgements_are_refused_with_their_line(file, content, line, words):
    error = refused(read_qrels, file(content))
    assert error.line == line
    assert words in str(error)
    assert error.cure


# Writing


def test_what_was_written_is_read_again(tmp_path):
    run = Run.from_dict(EXPECTED_RUN, name="my run")
    for name in ("out.run", "out.run.gz"):
        write_run(run, tmp_path / name)
        again = read_run(tmp_path / name)
        assert again == run
        assert again.name == "my_run"
    assert (tmp_path / "out.run").read_text().splitlines()[0] == "q1 Q0 d1 1 2.5 my_run"
    assert (tmp_path / "out.run.gz").read_bytes().startswith(b"\x1f\x8b")
    qrels = Qrels.from_dict(EXPECTED_QRELS)
    write_qrels(qrels, tmp_path / "out.qrels")
    assert read_qrels(tmp_path / "out.qrels") == qrels
    assert (tmp_path / "out.qrels").read_text() == "q1 0 d1 2\nq1 0 d2 -1\nq2 0 d1 0\n"


def test_probabilities_are_written_when_asked_for(tmp_path):
    run = Run.from_dict({"q": {"a": 5.0, "b": 1.0}})
    with pytest.raises(DataError, match="no probabilities"):
        write_run(run, tmp_path / "out.run", probabilities=True)
    write_run(run.with_probabilities([0.75, 0.25]), tmp_path / "out.run", probabilities=True)
    assert read_run(tmp_path / "out.run").to_dict() == {"q": {"a": 0.75, "b": 0.25}}


def test_long_tables_are_written_in_pieces(tmp_path, monkeypatch):
    run = Run.of([f"q{n % 3}" for n in range(100)], [f"d{n}" for n in range(100)], np.arange(100))
    monkeypatch.setattr(trec, "_WRITTEN_AT_ONCE", 7)
    write_run(run, tmp_path / "out.run")
    assert read_run(tmp_path / "out.run") == run


@pytest.mark.parametrize("id", ["a b", "a\tb", "a\x0bb", "a\nb", "", "a\0b"])
def test_ids_that_a_column_cannot_hold_are_refused(tmp_path, id):
    with pytest.raises(DataError, match="cannot be written"):
        write_run(Run.from_dict({"q": {id: 1.0}}), tmp_path / "out")
    with pytest.raises(DataError, match="cannot be written"):
        write_qrels(Qrels.from_dict({id: {"d": 1}}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")

    def fail():
        with files.replacing(path) as stream:
            stream.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_written_through_and_stays_a_link(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_text("old")
    link.symlink_to(target)
    write_run(Run.from_dict({"q": {"d": 1.0}}), link)
    assert link.is_symlink()
    assert target.read_text() == "q Q0 d 1 1 isthmus\n"


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_run(Run.from_dict({"q": {"d": 1.0}}), pipe)
    reader.join()
    assert got == ["q Q0 d 1 1 isthmus\n"]
    assert pipe.is_fifo()


@pytest.mark.realdata
def test_the_real_runs_and_judgements(data_dir):
    folder = data_dir / "runs" / "trec-dl"
    bm25, colbert = (read_run(folder / f"{name}.dl19.run") for name in ("bm25", "colbert"))
    qrels = read_qrels(folder / "qrels.dl19-passage.txt")
    assert (bm25.rows, colbert.rows, qrels.rows) == (42_005, 21_500, 9_260)
    assert len(bm25) == len(colbert) == len(qrels) == 43
    assert colbert.name == "ColBERT"
    slowly = {}
    for line in (folder / "colbert.dl19.run").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        slowly.setdefault(query, {})[document] = float(score)
    assert colbert == Run.from_dict(slowly)


def test_equal_probabilities_keep_the_order_in_the_file(tmp_path):
    run = Run.from_dict(
        {"q1": {"a": 9.0, "c": 8.0, "b": 7.0, "e": 2.0, "d": 1.0}, "q2": {"a": 3.0, "z": 1.0}}
    )
    run = run.with_probabilities([0.5, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5])
    write_run(run, tmp_path / "p.run", probabilities=True)
    again = read_run(tmp_path / "p.run")
    assert [found for _, found, _ in again.lists()] == [found for _, found, _ in run.lists()]
    np.testing.assert_allclose(again.scores, run.probabilities, atol=1e-15)


def test_a_pipe_with_a_duplicate_is_told_without_its_lines(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("q1 Q0 d1 1 2.0 x\nq1 Q0 d1 2 1.0 x\n"))
    writer.start()
    with pytest.raises(DataError, match="twice"):
        read_run(pipe)
    writer.join()


def test_a_file_that_cannot_be_written_is_named_as_asked_for(tmp_path):
    run = Run.from_dict({"q1": {"a": 1.0}})
    with pytest.raises(FileNotFoundError) as told:
        write_run(run, tmp_path / "nowhere" / "o.run")
    assert told.value.filename == str(tmp_path / "nowhere" / "o.run")
    link = tmp_path / "link.run"
    link.symlink_to(tmp_path / "real.run")
    (tmp_path / "real.run").write_text("old")
    write_run(run, link)
    assert link.is_symlink()
    assert read_run(tmp_path / "real.run") == run
