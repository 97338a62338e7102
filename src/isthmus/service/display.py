"""Hits as they are shown to a caller: names, snippets around the query's words, digests of texts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from unicodedata import normalize

from isthmus.encoders import Span
from isthmus.engines import STOP
from isthmus.languages import tokeniser_of
from isthmus.service.stores import Draft, type_of
from isthmus.service.wire import Hit
from isthmus.text import STOP_WORDS

LONGEST_SNIPPET = 240
READ_FOR_SNIPPET = 20_000
_WORD = re.compile(r"\w+")
_ASCII_WORDS = bytes(
    ord(chr(code).lower()) if _WORD.match(chr(code)) else 0x20 for code in range(128)
) + bytes(128)
"""A table of bytes: letters in lower case, blanks for characters that are in no word."""
_ACCENTS = {signs[0]: f"[{signs}]" for signs in ("aàáâãäå", "cç", "eèéêë", "iìíîï", "nñ", "oòóôõö", "uùúûü")}


@dataclass(frozen=True)
class Extras:
    """What a peer may receive besides hits, if its search asks for it."""

    matches: bool = False
    suggestions: bool = False
    key: bytes = b""
    """Key of the digests of hits' texts; without it they have none."""


@dataclass(frozen=True)
class Display:
    """How hits are shown to the caller: see `Searcher.search`."""

    snippets: bool
    name: Callable[[str], str]
    token: Callable[[str], str] | None
    key: bytes = b""
    """Key of digests; without it hits have none."""
    principals: frozenset[str] | None = None

    def hit(
        self,
        silo: str,
        document: str,
        text: Draft | None,
        words: QueryWords,
        *,
        passage: Span | None = None,
        **evidence: Any,
    ) -> Hit:
        """Return a hit. It has title, snippet, type, date and digest only if the document's text
        was fetched."""
        visible: dict[str, Any] = {}
        if text is not None:
            body = text.body if passage is None else text.body[slice(*passage)]
            visible = {
                "title": text.title[:300],
                "snippet": snippet(body, words),
                "type": (text.type or type_of(document))[:100],
                "date": "" if text.date is None else day_of(text.date),
                "digest": digest_of(text, self.key) if self.key else "",
            }
        token = "" if self.token is None else self.token(document)
        # empty lists are passed because pydantic copies defaults slowly
        return Hit(
            document=self.name(document), silo=silo, token=token, also=[], access=[], **evidence, **visible
        )


def day_of(date: int) -> str:
    """Return the day of a Unix time, in UTC; empty for one beyond the calendar."""
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=date)).date().isoformat()
    except OverflowError:
        return ""


def digest_of(text: Draft, key: bytes) -> str:
    """Return a keyed digest of a text's words without case and punctuation: equal for the same words in the
    same order, empty for a text without words. Without the key nobody can tell whether a text has it."""
    whole = f"{text.title}\n{text.body}"
    if whole.isascii():
        content = b" ".join(whole.encode().translate(_ASCII_WORDS).split())
    else:
        words = _WORD.findall(normalize("NFKC", whole).lower())
        content = " ".join(words).encode("utf-8", "surrogatepass")
    if not content:  # all withheld, or only marks: such texts are not copies of each other
        return ""
    return hashlib.blake2b(content, key=key, digest_size=16, person=b"isthmus doubles").hexdigest()


@dataclass(frozen=True, eq=False)
class QueryWords:
    """The words that a snippet looks for, the longest first. They match words that begin with a word of the
    query or with its stem, with any accents; in scripts without spaces they match anywhere."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, query: str, stems: Iterable[str], languages: Iterable[str] = ()) -> QueryWords:
        """Collect a query's words without stop words, and its stems in the engine's form."""
        stops = STOP_WORDS.union(*(tokeniser_of(code).stop_words for code in languages))
        words = {word for word in _WORD.findall(query.lower()) if word not in stops}
        words |= {stem.removeprefix(STOP) for stem in stems}
        return cls(tuple(sorted(filter(None, words), key=len, reverse=True)[:50]))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        spelled = "|".join(map(_spellings, self.words))
        return re.compile(spelled, re.IGNORECASE) if spelled else re.compile(r"(?!)")

    @cached_property
    def _are_plain(self) -> bool:
        return all(word.isascii() for word in self.words)

    def places(self, text: str) -> list[tuple[int, str]]:
        """Return the positions of these words in a text, each with its spelling there in lower case."""
        if not (self._are_plain and text.isascii()):
            return [(match.start(), match.group().lower()) for match in self._pattern.finditer(text)]
        lower, places = text.lower(), dict[int, str]()
        find = lower.find
        for word in reversed(self.words):  # shortest first: at one place the longest word remains
            at, size = find(word), len(word)
            while at >= 0:
                if not at or (before := lower[at - 1]) == " " or not (before.isalnum() or before == "_"):
                    places[at] = word
                at = find(word, at + size)
        return sorted(places.items())


def _spellings(word: str) -> str:
    """Return a pattern of a word with or without accents, since a stem may have lost some of them."""
    if word >= "\u3000":
        return re.escape(word)
    bare = (normalize("NFD", sign)[0] for sign in word)
    signs = (_ACCENTS.get(base, re.escape(sign)) for base, sign in zip(bare, word, strict=True))
    return r"\b" + "".join(signs).replace("ss", "(?:ss|ß)")


def snippet(body: str, wanted: QueryWords) -> str:
    """Return the passage of a text with the most different words of the query, cut between words."""
    text = " ".join(body[:READ_FOR_SNIPPET].split())
    if len(text) <= LONGEST_SNIPPET:
        return text
    start = max(0, _densest(wanted.places(text)) - 40)
    if start:
        start = text.find(" ", start, start + 40) + 1 or start  # not all scripts have blanks
    end = start + LONGEST_SNIPPET
    if end < len(text):
        end = max(text.rfind(" ", start, end), start + LONGEST_SNIPPET // 2)
    return ("…" if start else "") + text[start:end].strip() + ("…" if end < len(text) else "")


def _densest(matches: Sequence[tuple[int, str]]) -> int:
    """Return where the passage with the most different words begins, by sliding a window over the matches
    once."""
    within: dict[str, int] = {}
    distinct, size = len({word for _, word in matches}), len(matches)
    if distinct < 2 or matches[-1][0] < matches[0][0] + LONGEST_SNIPPET - 60:
        return matches[0][0] if matches else 0
    start, best, end = 0, 0, 0
    for at, word in matches:
        while end < size and matches[end][0] < at + LONGEST_SNIPPET - 60:
            within[matches[end][1]] = within.get(matches[end][1], 0) + 1
            end += 1
        if len(within) > best:
            start, best = at, len(within)
        if best == distinct:
            break
        within[word] -= 1
        if not within[word]:
            del within[word]
    return start
