"""Encoding documents of 65 and of 154 words, beside sentence-transformers on torch: milliseconds of one core.

Isthmus's encoders are bge-small, which computes in int8 and has twelve layers, and MiniLM, with six, in int8
and in float32. The peer, in the interpreter that ISTHMUS_TORCH_PYTHON names, has the same shapes in float32
with random weights, which cost as much time. Without that interpreter the peer of a graph in int8 is MiniLM's
graph in float32. Texts are pieces of pydocs. Every figure is processor time per document on one thread, the
least of three; the last row is the speed-up of two threads by the wall clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._rows import row
from isthmus.corpora import load
from isthmus.encoders import Encoder, add_encoder, encoders_folder, load_encoder

WORDS = (65, 154)
DOCUMENTS = 32
TIMES = 3
PEER = Path(__file__).with_name("_sentence_transformers.py")
SHAPES = {
    "bge-small": ("bge-small, int8", 12),
    "minilm-int8": ("MiniLM, int8", 6),
    "minilm": ("MiniLM, float32", 6),
}


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    for name in SHAPES:
        add_encoder(name.removesuffix("-int8"), int8=name.endswith("-int8"))
    rows = []
    for words in WORDS:
        texts = pieces(words)
        peers = {layers: _peer(texts, layers) for layers in (12, 6)}
        for name, (title, layers) in SHAPES.items():
            ours = processor(load_encoder(name, workers=1), texts)
            peer, peer_name = peers[layers], "sentence-transformers, torch"
            if peer is None:
                other = name.endswith("-int8")
                peer = processor(load_encoder("minilm", workers=1), texts) if other else None
                peer_name = "the graph in float32" if other else "no ISTHMUS_TORCH_PYTHON"
            rows.append(row(f"encoding {words} words, {title} (ms of a core)", ours, peer, peer_name, goal=1))
    texts = pieces(WORDS[0])
    two, one = (_least(partial(load_encoder("bge-small", workers=count).encode, texts)) for count in (2, 1))
    rows.append(row("… two threads beside one, by the clock (ms)", two, one, "one thread", goal=1.5))
    return rows


def pieces(words: int) -> list[str]:
    """Return documents of `words` words each, cut from pydocs."""
    flow = " ".join(load("pydocs").documents.texts).split()
    return [" ".join(flow[at * words : (at + 1) * words]) for at in range(DOCUMENTS)]


def processor(encoder: Encoder, texts: list[str]) -> float:
    """Return processor milliseconds per document."""
    encoder.encode(texts[:4])
    return _least(partial(encoder.encode, texts), time.process_time)


def _least(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    spans = []
    for _ in range(TIMES):
        began = clock()
        work()
        spans.append(clock() - began)
    return 1000 * min(spans) / DOCUMENTS


def _peer(texts: list[str], layers: int) -> float | None:
    python = os.environ.get("ISTHMUS_TORCH_PYTHON")
    if not python:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        tokenizer = str(encoders_folder() / "bge-small" / "tokenizer.json")
        file.write_text(json.dumps([texts, tokenizer, layers, TIMES]), encoding="utf-8")
        done = subprocess.run([python, str(PEER), str(file)], stdout=subprocess.PIPE, text=True, check=True)
    return 1000 * float(done.stdout.splitlines()[-1]) / len(texts)
