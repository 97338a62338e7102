"""Other spellings of a query's words, from a silo's own vocabulary.

Only for words that fewer than `FEW` documents have, and never a word that fewer than `FEW` documents have: a
name that stands in one document is not given away by a slip of the pen. What is proposed is a word as
documents spell it, not its stem.
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
"""Documents that have a word."""
MOST_WORDS, MOST_LIKE = 3, 3
"""Words of a query that are looked at, and spellings proposed for each."""
LEAST_LENGTH = 4
"""Characters of a word that has other spellings; from twice as many on two edits are allowed."""
LOOKED_AT = 6
"""Terms whose spelling is looked up."""
READ, CHARACTERS = 60, 20_000
"""Documents in which the spelling of a term is looked up, and how much of each."""
_WORD = re.compile(r"[^\W_]+")


def edits(one: str, other: str, most: int) -> int:
    """Insertions, deletions, replacements and swaps of neighbours from one word to another; most + 1 where
    there are more than `most`."""
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
    """Whether so few edits may lead from one word to another: each brings in one character at most."""
    return len(set(one).difference(other)) <= most >= len(set(other).difference(one))


@dataclass(frozen=True, eq=False)
class Speller:
    """Spellings in one silo, as it is now."""

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
        """Words that at least `FEW` documents have and that are spelled like this one, the likeliest
        first: the fewest edits, then the most documents."""
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
        """Its stems; none of a stop word."""
        stems = [tokeniser([word]).words(0) for tokeniser in self._tokenisers]
        return [] if not all(stems) else list(dict.fromkeys(term for terms in stems for term in terms))

    def _spellings(self, term: str) -> Iterable[tuple[str, int]]:
        """How documents spell a term, each spelling that at least `FEW` of those looked at have."""
        reader = self.snapshot.reader
        if reader.tables([term])[TEXT][0] < FEW:  # what an engine counts by beginnings may be out of date
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
