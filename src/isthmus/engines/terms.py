"""Documents as terms: which terms title, body and the beginning of the body have, and how often.

Every text is tokenised once. A body is split into its lead, which ends at white space, and the rest, so that
the tokens of both together are those of the body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.arrays import IntArray
from isthmus.engines.engine import Change
from isthmus.languages import by_tokeniser
from isthmus.text import Cut, Tokeniser

LEAD_WORDS = 50
"""Maximum number of words in the lead, the beginning of a document; it is at most its first paragraph."""
LEAD_READ = 2_000
STOP = "="
"""Prefix of a stop word that keeps it apart from an equal stem of another word; no token contains it."""
COUNTS = np.dtype([("title", "<u2"), ("lead", "<u2"), ("body", "<i4")])
"""How often a document has a term; counts in a title stop at 65,535."""
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
_NO_WORD = re.compile(r"\W")
_BLANK = pa.scalar(" ", pa.large_string())
_PARTS = 3  # title, lead, rest of the body


def lead_end(body: str) -> int:
    """Where the lead of a body ends: before white space, or at the end of the text."""
    end = len(body)
    if end > LEAD_READ:  # cut at a blank or, in a text without blanks, after punctuation
        end = body.rfind(" ", 0, LEAD_READ)
        if end < 0:
            end = max((mark.end() for mark in _NO_WORD.finditer(body, 0, LEAD_READ)), default=0)
    start = len(body) - len(body.lstrip()) if body[:1].isspace() else 0
    has_lines = body.find("\n", start, end) >= 0
    if has_lines and (blank := _PARAGRAPHS.search(body, start, end)) is not None:
        end = blank.start()
    words = body[start:end].split(None, LEAD_WORDS)
    return end - len(words[LEAD_WORDS]) if len(words) > LEAD_WORDS else end


def _parts(document: Change) -> tuple[str, str, str]:
    """Title, lead, and the rest of the body."""
    end = lead_end(document.body)
    return document.title, document.body[:end], document.body[end:]


Read = tuple[NDArray[np.int32], pa.LargeStringArray, NDArray[np.bool_]]
"""Codes of words, the terms that they are reduced to, and a mask of stop words."""


def stemmed(tokeniser: Tokeniser, words: list[str]) -> Read:
    """Words as a tokeniser reduces them, with consecutive numbers as codes."""
    stops = np.fromiter(map(tokeniser.is_stop, words), dtype=bool, count=len(words))
    return np.arange(len(words), dtype=np.int32), pa.array(tokeniser.stems(words), pa.large_string()), stops


@dataclass(frozen=True, eq=False)
class TermBatch:
    """The tokens of documents, in order: title, lead and rest of the body of each.

    `codes`, `terms` and `stops` are those of the distinct words; `places` has the position of every token
    among these, and `offsets` the beginning of each text among the tokens.
    """

    codes: NDArray[np.int32]
    terms: pa.LargeStringArray
    stops: NDArray[np.bool_]
    places: NDArray[np.integer]
    offsets: IntArray

    @classmethod
    def of(
        cls, changes: Sequence[Change], read: Callable[[Tokeniser, list[str]], Read] = stemmed
    ) -> TermBatch:
        """Tokenise documents' titles and bodies, each in its language; `read` assigns codes to words."""
        cut = Cut.of(part for each in changes for part in _parts(each))
        groups, places = by_tokeniser(cut, [each.language for each in changes for _ in range(_PARTS)])
        codes, terms, stops = zip(*(read(*group) for group in groups), strict=True)
        return cls(np.concatenate(codes), pa.concat_arrays(terms), np.concatenate(stops), places, cut.offsets)

    def blocks(self, size: int) -> Iterator[TermBatch]:
        """Split the batch into batches of `size` documents."""
        for first in range(0, len(self.offsets) - 1, _PARTS * size):
            offsets = self.offsets[first : first + _PARTS * size + 1]
            places = self.places[offsets[0] : offsets[-1]]
            yield replace(self, places=places, offsets=offsets - offsets[0])

    @cached_property
    def stopped(self) -> NDArray[np.bool_]:
        """Which tokens are stop words."""
        stopped: NDArray[np.bool_] = self.stops[self.places]
        return stopped

    def words(self) -> tuple[list[str], IntArray]:
        """The distinct terms, stop words marked with `STOP`, and the position of every token among them."""
        place: dict[str, int] = {}
        marked = (
            STOP + term if stop else term
            for term, stop in zip(self.terms.to_pylist(), self.stops, strict=True)
        )
        codes = np.array([place.setdefault(term, len(place)) for term in marked], dtype=np.int64)
        return list(place), codes[self.places]

    def texts(self) -> tuple[list[str], ...]:
        """Content terms of every title and of every body, then stop words of both, each text joined by
        blanks."""
        content, stops = self._joined(~self.stopped), self._joined(self.stopped)
        return content[::2], content[1::2], stops[::2], stops[1::2]

    def _joined(self, mask: NDArray[np.bool_]) -> list[str]:
        """The selected tokens of every title and body in turn, joined by blanks."""
        bounds = self._bounds(mask)
        ends = np.append(np.column_stack((bounds[:-1:_PARTS], bounds[1::_PARTS])), bounds[-1])
        terms = self.terms.take(pa.array(self.places[mask]))
        joined: list[str] = pc.binary_join(
            pa.LargeListArray.from_arrays(pa.array(ends), terms), _BLANK
        ).to_pylist()
        return joined

    def _bounds(self, mask: NDArray[np.bool_]) -> IntArray:
        """The offsets of the texts among the selected tokens."""
        return _passed(mask)[self.offsets]

    def lengths(self) -> IntArray:
        """Numbers of content terms in title and body, of shape (documents, 2)."""
        sizes = np.diff(self._bounds(~self.stopped)).reshape(-1, _PARTS)
        return np.column_stack((sizes[:, 0], sizes[:, 1] + sizes[:, 2]))

    def entries(self, codes: IntArray) -> tuple[IntArray, IntArray, NDArray[np.void]]:
        """Count tokens by document and code; `codes` has one code a token. Returns the document, the code and
        the counts of every entry, ordered by document and code."""
        width = int(codes.max(initial=0)).bit_length()
        text = np.arange(len(self.offsets) - 1)
        of_text = (text // _PARTS << (width + 2)) + text % _PARTS
        # 32-bit keys, enough for a few thousand documents, take two thirds of the time
        size = "i4" if (len(text) // _PARTS).bit_length() + width + 2 < 32 else "i8"
        keys: NDArray[np.int64] = np.repeat(of_text.astype(size), np.diff(self.offsets))
        keys += codes.astype(size) << 2
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
    """The number of true values before every position, then their total."""
    return np.concatenate(([0], np.cumsum(mask)))
