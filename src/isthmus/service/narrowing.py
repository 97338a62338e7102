"""What narrows a search, in the terms of a silo: a phrase as a person wrote it becomes terms in the language
of documents that may have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from unicodedata import normalize

from isthmus.engines import STOP, Constraints, EngineReader
from isthmus.languages import tokeniser_of
from isthmus.service.wire import Narrowing
from isthmus.text import ENGLISH

EXPANDED = 10
"""Words that a prefix stands for where a query has no others to rank by, the most frequent."""

Phrase = tuple[str, ...]


def constraints_of(only: Narrowing, reader: EngineReader, languages: Iterable[str] = ()) -> Constraints:
    """Texts as constraints: a phrase in one of the languages that documents are in, what must not be there in
    all of them. A text without a word is left out."""
    codes = sorted(languages)

    def likeliest(readings: list[Phrase]) -> Phrase:
        """The reading whose rarest term most documents have."""
        return max(readings, key=lambda terms: float(reader.tables(terms)["text.having"].min()))

    phrases = [readings for text in only.phrases if (readings := readings_of(text, codes))]
    return Constraints(
        phrases=tuple(map(likeliest, phrases)),
        prefixes=tuple(_prefix(text, codes) for text in only.prefixes),
        without=tuple(reading for text in only.without for reading in readings_of(text, codes)),
        types=tuple(only.types),
        other_types=tuple(only.other_types),
        since=only.since,
        until=only.until,
    )


def readings_of(text: str, languages: Iterable[str]) -> list[Phrase]:
    """A text's terms in each language, stop words marked; none of a text without a word."""
    readings: dict[Phrase, None] = {}
    for tokeniser in dict.fromkeys(map(tokeniser_of, languages)) or [ENGLISH]:
        tokens = tokeniser.in_place([text])
        assert tokens.stopped is not None
        terms = zip(tokens.words(0), tokens.stopped.tolist(), strict=True)
        readings[tuple(STOP + word if is_stop else word for word, is_stop in terms)] = None
    return [reading for reading in readings if reading]


def _prefix(text: str, languages: Iterable[str]) -> str:
    """What terms begin with, which are stems: no longer than what stemming leaves of it."""
    lower = normalize("NFKC", text).lower()
    stems = [reading[0].removeprefix(STOP) for reading in readings_of(lower, languages)]
    return min((_common(lower, stem) for stem in stems), key=len, default=lower) or lower


def _common(one: str, other: str) -> str:
    """The beginning of both."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (sign, mark) in pairs if sign != mark), min(len(one), len(other)))]


def expanded(prefixes: Iterable[str], reader: EngineReader) -> list[str]:
    """Terms to rank by, for a query that has none but prefixes."""
    terms = (term for prefix in prefixes for term, _ in reader.beginning(prefix, EXPANDED))
    return list(dict.fromkeys(terms))
