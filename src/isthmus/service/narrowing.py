"""Translation of what narrows a search into the terms of a silo: a phrase as a person wrote it becomes terms
in the language of documents that may have it."""

from __future__ import annotations

from collections.abc import Iterable
from unicodedata import normalize

from isthmus.engines import STOP, Constraints, EngineReader
from isthmus.languages import tokeniser_of
from isthmus.service.wire import Narrowing
from isthmus.text import ENGLISH

EXPANDED = 10
"""Number of terms, the most frequent ones, that stand for a prefix in a query without other words
to rank by."""

Phrase = tuple[str, ...]


def constraints_of(only: Narrowing, reader: EngineReader, languages: Iterable[str] = ()) -> Constraints:
    """Convert texts into constraints: a phrase must be there in one of the languages of documents, an
    excluded text must not be there in any of them. A text without a word is left out."""
    codes = sorted(languages)

    def likeliest(readings: list[Phrase]) -> Phrase:
        """Return the reading whose rarest term is in the most documents."""
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
    """Return a text's terms in each language, with stop words marked; nothing for a text without a word."""
    readings: dict[Phrase, None] = {}
    for tokeniser in dict.fromkeys(map(tokeniser_of, languages)) or [ENGLISH]:
        tokens = tokeniser.in_place([text])
        assert tokens.stopped is not None
        terms = zip(tokens.words(0), tokens.stopped.tolist(), strict=True)
        readings[tuple(STOP + word if is_stop else word for word, is_stop in terms)] = None
    return [reading for reading in readings if reading]


def _prefix(text: str, languages: Iterable[str]) -> str:
    """Return a prefix shortened to what stemming leaves of it, since terms are stems."""
    lower = normalize("NFKC", text).lower()
    stems = [reading[0].removeprefix(STOP) for reading in readings_of(lower, languages)]
    return min((_common(lower, stem) for stem in stems), key=len, default=lower) or lower


def _common(one: str, other: str) -> str:
    """Return the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (sign, mark) in pairs if sign != mark), min(len(one), len(other)))]


def expanded(prefixes: Iterable[str], reader: EngineReader) -> list[str]:
    """Return terms to rank by, for a query that has only prefixes."""
    terms = (term for prefix in prefixes for term, _ in reader.beginning(prefix, EXPANDED))
    return list(dict.fromkeys(terms))
