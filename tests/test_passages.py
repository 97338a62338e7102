"""Passages: every character is in one, none is longer than the encoder reads, sentences stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.encoders import Encoder, Vectors, passage_texts, split_passages


class Words(Encoder):
    """Reads so many words."""

    fingerprint = "words"

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    @property
    def limit(self) -> int | None:
        return self._limit

    def encode(self, texts: Sequence[str]) -> Vectors:
        return np.ones((len(texts), 2), dtype=np.float32)


SENTENCES = " ".join(f"Sentence {at} has just six words." for at in range(60))


def test_a_text_that_is_read_whole_is_one_passage():
    assert split_passages(Words(None), "", SENTENCES) == [(0, len(SENTENCES))]
    assert split_passages(Words(500), "a title", SENTENCES) == [(0, len(SENTENCES))]
    assert split_passages(Words(20), "", "") == [(0, 0)]


def test_passages_are_whole_sentences_and_overlap_by_one():
    spans = split_passages(Words(51), "", SENTENCES)
    assert len(spans) == 9
    for start, end in spans:
        text = SENTENCES[start:end].strip()
        assert text.startswith("Sentence")
        assert text.endswith("words.")
    overlaps = [before[1] - after[0] for before, after in pairwise(spans)]
    assert all(20 < overlap < 40 for overlap in overlaps)


def test_the_title_stands_before_every_passage_and_is_cut_where_it_is_long():
    spans = split_passages(Words(40), "red apples", SENTENCES)
    texts = passage_texts(Words(40), "red apples", SENTENCES, spans)
    assert all(text.startswith("red apples\nSentence") for text in texts)
    assert all(len(text.split()) <= 40 for text in texts)
    long = "very " * 100
    spans = split_passages(Words(40), long, SENTENCES)
    texts = passage_texts(Words(40), long, SENTENCES, spans)
    assert all(text.split().count("very") == 10 for text in texts)
    assert all(len(text.split()) <= 40 for text in texts)


def test_paragraphs_and_chinese_sentences_end_passages():
    text = "\n\n".join(" ".join(f"w{at}" for at in range(12)) for _ in range(5))
    assert all(text[start:].startswith("w0") for start, _ in split_passages(Words(17), "", text))
    chinese = "这 是 一 句 话。 " * 20
    assert all(chinese[start:].startswith("这") for start, _ in split_passages(Words(17), "", chinese))


@given(
    st.lists(st.sampled_from(["word", "end.", "what?", "\n\n", "。", "…)"]), max_size=200),
    st.integers(2, 40),
    st.sampled_from(["", "title", "a title of some words"]),
)
def test_passages_cover_the_text_in_order_within_the_limit(words: list[str], limit: int, title: str) -> None:
    """A law for all texts: nothing is left out, every passage advances, none is cut by the encoder."""
    body, encoder = " ".join(words), Words(limit)
    spans = split_passages(encoder, title, body)
    assert spans == split_passages(encoder, title, body)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(body)
    for before, after in pairwise(spans):
        assert before[0] < after[0] <= before[1] < after[1]
    if len(spans) > 1:
        texts = passage_texts(encoder, title, body, spans)
        assert all(len(text.split()) <= limit for text in texts)
