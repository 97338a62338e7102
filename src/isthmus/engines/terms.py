"""Documents as terms: which stand in title, body and the beginning of the body, and how often.

Every text is cut once. A body is its lead, which ends at white space, and the rest; so the tokens of both
are those of the body.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.arrays import IntArray
from isthmus.engines.engine import Change
from isthmus.languages import analyse
from isthmus.text import Tokens

LEAD_WORDS = 50
"""A document begins with its first paragraph, or so many words of it."""
LEAD_READ = 2_000
STOP = "="
"""Stands before a stop word, so that it is not taken for the stem of another: no token has it."""
COUNTS = np.dtype([("title", "<u2"), ("lead", "<u2"), ("body", "<i4")])
"""How often a document has a term; a title counts to 65,535 at most."""
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
_NO_WORD = re.compile(r"\W")
_BLANK = pa.scalar(" ", pa.large_string())
_PARTS = 3  # title, lead, rest of the body


def lead_end(body: str) -> int:
    """Where the beginning of a document ends: before white space, or with the text."""
    end = len(body)
    if end > LEAD_READ:  # at a blank, or in a text without any after a punctuation mark
        end = body.rfind(" ", 0, LEAD_READ)
        if end < 0:
            end = max((mark.end() for mark in _NO_WORD.finditer(body, 0, LEAD_READ)), default=0)
    start = len(body) - len(body.lstrip()) if body[:1].isspace() else 0
    if (blank := _PARAGRAPHS.search(body, start, end)) is not None:
        end = blank.start()
    words = body[start:end].split(None, LEAD_WORDS)
    return end - len(words[LEAD_WORDS]) if len(words) > LEAD_WORDS else end


@dataclass(frozen=True, eq=False)
class TermBatch:
    """The tokens of documents, in order: title, lead and rest of each."""

    tokens: Tokens
    stopped: NDArray[np.bool_]

    @classmethod
    def of(cls, changes: Sequence[Change]) -> TermBatch:
        """Of documents' titles and bodies, each in its language."""
        parts: list[str] = []
        for each in changes:
            end = lead_end(each.body)
            parts += (each.title, each.body[:end], each.body[end:])
        tokens = analyse(parts, [each.language for each in changes for _ in range(_PARTS)], in_place=True)
        assert tokens.stopped is not None
        return cls(tokens, tokens.stopped)

    def words(self) -> tuple[list[str], IntArray]:
        """The distinct terms, stop words marked, and the place of every token's among them."""
        size = len(self.tokens.terms.vocabulary)
        codes = self.tokens.terms.codes + size * self.stopped
        used = np.flatnonzero(np.bincount(codes, minlength=2 * size))
        place = np.zeros(2 * size, dtype=np.int64)
        place[used] = np.arange(len(used))
        plain = np.searchsorted(used, size)
        content = self.tokens.terms.vocabulary.take(pa.array(used[:plain])).to_pylist()
        stops = self.tokens.terms.vocabulary.take(pa.array(used[plain:] - size)).to_pylist()
        return [*content, *(STOP + word for word in stops)], place[codes]

    def texts(self) -> tuple[list[str], ...]:
        """Content terms of every title, those of every body, then stop words of both, joined by blanks."""
        content, stops = self._joined(~self.stopped), self._joined(self.stopped)
        return content[::2], content[1::2], stops[::2], stops[1::2]

    def _joined(self, mask: NDArray[np.bool_]) -> list[str]:
        """Some of the tokens of every title and body, one after the other."""
        bounds = self._bounds(mask)
        ends = np.append(np.column_stack((bounds[:-1:_PARTS], bounds[1::_PARTS])), bounds[-1])
        terms = self.tokens.terms.vocabulary.take(pa.array(self.tokens.terms.codes[mask]))
        joined: list[str] = pc.binary_join(
            pa.LargeListArray.from_arrays(pa.array(ends), terms), _BLANK
        ).to_pylist()
        return joined

    def _bounds(self, mask: NDArray[np.bool_]) -> IntArray:
        """The offsets of the texts among some of the tokens."""
        return _passed(mask)[self.tokens.offsets]

    def lengths(self) -> IntArray:
        """Content terms of title and body, of shape (documents, 2)."""
        sizes = np.diff(self._bounds(~self.stopped)).reshape(-1, _PARTS)
        return np.column_stack((sizes[:, 0], sizes[:, 1] + sizes[:, 2]))

    def entries(self, codes: IntArray) -> tuple[IntArray, IntArray, NDArray[np.void]]:
        """For a code of every token: the document of every entry, its code, and its counts, in this order."""
        width = int(codes.max(initial=0)).bit_length()
        text = np.arange(len(self.tokens))
        keys = np.repeat((text // _PARTS << (width + 2)) + text % _PARTS, self.tokens.lengths)
        keys += codes << 2
        keys.sort()  # by document, then code, then part
        part = (keys & 3).astype(np.int8)
        keys >>= 2
        is_first = np.ones(len(keys), dtype=bool)
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        bounds, keys = np.append(starts, len(keys)), keys[starts]
        title, lead = (np.diff(_passed(part == number)[bounds]) for number in (0, 1))
        counts = np.zeros(len(starts), dtype=COUNTS)
        counts["title"], counts["lead"] = np.minimum(title, 65_535), lead
        counts["body"] = np.diff(bounds) - title
        return keys >> width, keys & ((1 << width) - 1), counts


def _passed(mask: NDArray[np.bool_]) -> IntArray:
    """How many are true before every position, and in all."""
    return np.concatenate(([0], np.cumsum(mask)))
