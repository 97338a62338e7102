"""Other spellings of a query's words, from a silo's own vocabulary.

Spellings are proposed only for words in fewer than `FEW` documents, and never a word in fewer than `FEW`
documents: a typing error does not reveal a name that stands in one document. Proposals are words as documents
spell them, not their stems.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus.languages import tokeniser_of
from isthmus.retrieval import TEXT
from isthmus.service.candidates import Snapshot
from isthmus.service.stores import DocumentStore
from isthmus.text import ENGLISH, Tokeniser

FEW = 3
"""A word in fewer documents than this is rare."""
MOST_WORDS, MOST_LIKE = 3, 3
"""Most words of a query that are examined, and most spellings proposed for each."""
LEAST_LENGTH = 4
"""Fewest characters of a word that has other spellings; from twice as many on, two edits are allowed."""
LOOKED_AT = 6
"""Most terms whose spellings are looked up."""
READ, CHARACTERS = 60, 20_000
"""Most documents in which the spelling of a term is looked up, and characters read of each."""
_WORD = re.compile(r"[^\W_]+")


def edits(one: str, other: str, most: int) -> int:
    """Count insertions, deletions, replacements and swaps of neighbours from one word to another. Returns
    most + 1 if there are more than `most`."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, sign in enumerate(one, 1):
        row = [i]
        for j, mark in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (sign != mark))
            if i > 1 and j > 1 and sign == other[j - 2] and one[i - 2] == mark:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > most and min(last) > most:
            return most + 1
        before, last = last, row
    return min(last[-1], most + 1)


def _may_be(one: str, other: str, most: int) -> bool:
    """Whether `most` edits may suffice between two words: each brings in at most one new character."""
    return len(set(one).difference(other)) <= most >= len(set(other).difference(one))


@dataclass(frozen=True, eq=False)
class Speller:
    """Spellings in the current documents of one silo."""

    snapshot: Snapshot
    store: DocumentStore

    def rare(self, words: str) -> list[str]:
        """The words of a query that fewer than `FEW` documents have in any of the silo's languages."""
        distinct = dict.fromkeys(_WORD.findall(words.lower()))
        terms = {word: self._terms(word) for word in distinct if len(word) >= LEAST_LENGTH}
        return [
            word
            for word, stems in terms.items()
            if stems and self.snapshot.reader.tables(stems)[TEXT].max() < FEW
        ][:MOST_WORDS]

    def like(self, word: str) -> list[str]:
        """Return words of at least `FEW` documents that are spelled like this one, the likeliest first: by
        fewest edits, then by most documents."""
        most = 1 if len(word) < 2 * LEAST_LENGTH else 2
        near: dict[str, tuple[int, int]] = {}
        forms = {word, *self._terms(word)}
        for term, count in self.snapshot.reader.beginning(word[0]):
            if count < FEW:
                break
            distance = min(
                (edits(form, term, most) for form in forms if _may_be(form, term, most)), default=9
            )
            if distance <= most:
                near[term] = (distance, -count)
        spelled: dict[str, tuple[int, int]] = {}
        for term in sorted(near, key=near.__getitem__)[:LOOKED_AT]:
            for spelling, count in self._spellings(term):
                distance = edits(word, spelling, most + 1)
                if 0 < distance <= most:
                    spelled[spelling] = (distance, -count)
        return sorted(spelled, key=spelled.__getitem__)[:MOST_LIKE]

    @property
    def _tokenisers(self) -> Sequence[Tokeniser]:
        return list(dict.fromkeys(map(tokeniser_of, sorted(self.snapshot.languages)))) or [ENGLISH]

    def _terms(self, word: str) -> list[str]:
        """Return the stems of a word; none for a stop word."""
        stems = [tokeniser([word]).words(0) for tokeniser in self._tokenisers]
        return [] if not all(stems) else list(dict.fromkeys(term for terms in stems for term in terms))

    def _spellings(self, term: str) -> Iterable[tuple[str, int]]:
        """Return the spellings of a term in at least `FEW` of the examined documents, with counts."""
        reader = self.snapshot.reader
        if reader.tables([term])[TEXT][0] < FEW:  # an engine's counts by prefix may be outdated
            return []
        ids = reader.ids(reader.matching({term: 1.0}, READ)[:READ])
        counts: Counter[str] = Counter()
        for text in self.store.get(ids).values():
            words = set(_WORD.findall(f"{text.title} {text.body[:CHARACTERS]}".lower()))
            counts.update(word for word in words if word[:1] == term[:1])
        frequent = [word for word, count in counts.items() if count >= FEW]
        readings = [tokeniser(frequent) for tokeniser in self._tokenisers]
        return [
            (word, counts[word])
            for at, word in enumerate(frequent)
            if any(tokens.words(at) == [term] for tokens in readings)
        ]
