"""Long documents as passages that an encoder can read whole.

A passage ends with a sentence if one ends in its second half. The next one begins with a sentence shortly
before that end, so that neighbours overlap a little. The title is put in front of every passage. The same
text and encoder always give the same spans.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from isthmus.arrays import IntArray
from isthmus.encoders.vectors import Encoder

Span = tuple[int, int]

_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n\s*\n\s*")
_TITLE = 4  # a title takes at most a fourth of the encoder's limit
_OVERLAP = 8  # a passage repeats about an eighth of the one before it


def split_passages(encoder: Encoder, title: str, body: str) -> list[Span]:
    """Spans of the body, in characters, ascending; a single span of everything if the encoder can read it at
    once."""
    limit = encoder.limit
    if limit is None or len(title) + len(body) < limit:  # a token has at least one character
        return [(0, len(body))]
    tokens = encoder.token_spans(body)
    room = limit - min(len(encoder.token_spans(title)) + 1, limit // _TITLE)
    if len(tokens) <= room:
        return [(0, len(body))]
    starts = tokens[:, 0]
    sentences = np.unique(
        np.searchsorted(starts, [match.end() for match in _SENTENCE_END.finditer(body)], side="left")
    )
    cuts = _cuts(len(tokens), room, sentences)
    ends = [len(body) if end == len(tokens) else int(starts[end]) for _, end in cuts]
    return [(int(starts[start]) if start else 0, end) for (start, _), end in zip(cuts, ends, strict=True)]


def _cuts(count: int, room: int, sentences: IntArray) -> list[Span]:
    """Spans of at most `room` tokens, cut at ends of sentences or, without any, anywhere."""
    cuts: list[Span] = []
    start = 0
    while start + room < count:
        end = _last(sentences, start + room // 2, start + room) or start + room
        cuts.append((start, end))
        first = max(end - room // _OVERLAP, start + 1)
        after = int(np.searchsorted(sentences, first))
        start = int(sentences[after]) if after < len(sentences) and sentences[after] <= end else first
    cuts.append((start, count))
    return cuts


def _last(sentences: IntArray, least: int, most: int) -> int:
    """The last end of a sentence in (least, most]; 0 if there is none."""
    at = int(np.searchsorted(sentences, most, side="right")) - 1
    return int(sentences[at]) if at >= 0 and sentences[at] > least else 0


def passage_texts(encoder: Encoder, title: str, body: str, spans: Sequence[Span]) -> list[str]:
    """The texts to encode for these spans: the title, cut to its share of the limit, and the passage."""
    if title and encoder.limit is not None and len(title) >= encoder.limit // _TITLE:
        tokens = encoder.token_spans(title)[: encoder.limit // _TITLE]
        title = title[: int(tokens[-1][1])] if len(tokens) else ""
    return [f"{title}\n{body[start:end]}" if title else body[start:end] for start, end in spans]
