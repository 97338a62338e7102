"""Damaged files of every format: parsed, or one DataError; never anything else, never a hang.

Each input is a valid file with a few random mutations. Where a fast and a plain way of parsing exist, both
must agree on every damaged input: the same table, or a refusal.
"""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import DataError
from isthmus.randomness import Streams
from isthmus.tables import letor_blocks, read_corpus_beir, read_letor, read_qrels, read_run, trec

SECONDS = 20
TOKENS = [
    *(b"\0 \xff \xc3 \xef\xbb\xbf \x1f\x8b # : :: 0:1 qid: qid:1 1:1 2:nan 1:1e39 65537:1 999999999:1").split(
        b" "
    ),
    *(
        b"nan inf -inf 1e999 -1 0.5 +1 1_0 0x1 99999999999999999999 -2147483648 Q0 d1 q1 ' \" \\ , { } [ null"
    ).split(b" "),
    *("\u2028 \u00a0 \ufeff é 𝔸 １".encode()).split(b" "),
    *(b" ", b"  ", b"\t", b"\r", b"\n", b"\r\n", b"\x0b", b"\x0c", b"\x1c", b"\n\n", b'"_id": ', b"\\ud800"),
]


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """The content after one to four random changes."""
    for _ in range(rng.integers(1, 5)):
        start, end = sorted(rng.integers(0, len(content) + 1, 2).tolist())
        end = min(end, start + int(rng.integers(1, 40)))
        token = TOKENS[rng.integers(len(TOKENS))]
        change = rng.integers(10)
        if change == 0:
            content = content[:start] + bytes(rng.integers(0, 256, 1, dtype=np.uint8)) + content[start + 1 :]
        elif change == 1:
            content = content[:start] + content[end:]
        elif change == 2:
            content = content[:end] + content[start:end] + content[end:]
        elif change == 3:
            content = content[:start]
        elif change == 4:
            content = content[:start] + token + content[end:]
        elif change == 5:
            parts = content.split(b" ")
            parts[rng.integers(len(parts))] = token
            content = b" ".join(parts)
        elif change == 6:
            lines = content.split(b"\n")
            lines[rng.integers(len(lines))] = lines[rng.integers(len(lines))]
            content = b"\n".join(lines)
        elif change in (7, 8):
            marks = [at for at, symbol in enumerate(content) if symbol in b" :\t\n"] or [0]
            at = marks[rng.integers(len(marks))]
            content = content[:at] + [b" ", b":", b"\t", b"\n", b""][rng.integers(5)] + content[at + 1 :]
        else:
            content = content[:start] + token + content[start:]
    return content


def letor_file(rng: np.random.Generator) -> bytes:
    rows, width = int(rng.integers(1, 12)), int(rng.integers(1, 6))
    dense, named, commented = rng.random(3) < (0.6, 0.8, 0.3)
    lines = []
    for row in range(rows):
        told = [f"{rng.integers(0, 5)}", *([f"qid:{row // 4}"] if named else [])]
        told += [f"{n}:{rng.normal():.4g}" for n in range(1, width + 1) if dense or rng.random() < 0.5]
        lines.append(" ".join(told) + (f" #docid = D{row}" if commented else ""))
    return ending(lines, rng)


def run_file(rng: np.random.Generator) -> bytes:
    tag = " tag" if rng.random() < 0.8 else ""
    rows = int(rng.integers(1, 12))
    return ending([f"q{row // 4} Q0 d{row} {row} {rng.normal():.6g}{tag}" for row in range(rows)], rng)


def qrels_file(rng: np.random.Generator) -> bytes:
    middle = " 0" if rng.random() < 0.6 else ""
    head = ["query-id corpus-id score"] if rng.random() < 0.3 else []
    rows = [f"q{row // 4}{middle} d{row} {rng.integers(-1, 4)}" for row in range(int(rng.integers(1, 12)))]
    return ending(head + rows, rng)


def ending(lines: list[str], rng: np.random.Generator) -> bytes:
    text = ["\n", "\r\n", " \r\n"][rng.integers(3)].join([*lines, ""])
    return (text.replace(" ", "\t") if rng.random() < 0.2 else text).encode()


@contextmanager
def no_hang() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(read: Callable[[Path], object], path: Path) -> object:
    """What was read, or None for a refusal; a refusal is one line and names a file."""
    refusal = None
    with no_hang():
        try:
            return read(path)
        except DataError as error:
            refusal = error
    assert refusal.file
    assert "\n" not in str(refusal)
    return None


def damaged(make: Callable[[np.random.Generator], bytes], count: int) -> Iterator[tuple[int, bytes]]:
    for trial in range(count):
        rng = Streams(2026)(make.__name__, trial)
        content = mutated(make(rng), rng)
        yield trial, gzip.compress(content) if trial % 50 == 0 else content


@pytest.mark.soak
def test_damaged_letor_files(tmp_path, soak_count, monkeypatch):
    path = tmp_path / "train.txt"
    (tmp_path / "train.txt.query").write_text("4\n4\n")
    parsed = 0
    for trial, content in damaged(letor_file, soak_count(300, 10_000)):
        path.write_bytes(content)
        table = outcome(lambda path: read_letor(path, cache=False), path)
        with monkeypatch.context() as slow:
            slow.setattr(letor_blocks, "_dense", lambda data: None)
            slow.setattr(letor_blocks, "_sparse", lambda data, missing: None)
            assert outcome(lambda path: read_letor(path, cache=False), path) == table, (trial, content)
        parsed += table is not None
    assert parsed, "some mutations do no harm"


@pytest.mark.soak
@pytest.mark.parametrize(("make", "read"), [(run_file, read_run), (qrels_file, read_qrels)])
def test_damaged_trec_files(tmp_path, soak_count, monkeypatch, make, read):
    path = tmp_path / "file"
    parsed = 0
    for trial, content in damaged(make, soak_count(300, 10_000)):
        path.write_bytes(content)
        table = outcome(read, path)
        with monkeypatch.context() as slow:
            slow.setattr(trec, "_cut_at_once", lambda block, layout, width: None)
            assert outcome(read, path) == table, (trial, content)
        parsed += table is not None
    assert parsed, "some mutations do no harm"


def beir_file(rng: np.random.Generator) -> bytes:
    return b"".join(
        json.dumps({"_id": f"d{n}", "title": "é", "text": "x y"}).encode() + b"\n" for n in range(4)
    )


def queries_file(rng: np.random.Generator) -> bytes:
    return b"".join(json.dumps({"_id": f"q{n}", "text": "x"}).encode() + b"\n" for n in range(3))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "make"),
    [("corpus.jsonl", beir_file), ("queries.jsonl", queries_file), ("qrels/test.tsv", qrels_file)],
)
def test_damaged_beir_folders(tmp_path, soak_count, name, make):
    (tmp_path / "qrels").mkdir()
    whole = {"corpus.jsonl": beir_file, "queries.jsonl": queries_file, "qrels/test.tsv": qrels_file}
    for part, write in whole.items():
        (tmp_path / part).write_bytes(write(np.random.default_rng(0)))
    parsed = 0
    for _, content in damaged(make, soak_count(100, 3_400)):
        (tmp_path / name).write_bytes(content)
        parsed += outcome(read_corpus_beir, tmp_path) is not None
    assert parsed, "some mutations do no harm"
