"""Hide which words a question is about: real words among decoys.

The owner of documents knows the hash functions and can look up any word, so this is anonymity among few words
and no more. It is of use only if a word always comes with the same decoys (otherwise repeated questions could
be intersected), and if decoys are about as frequent as the word. So decoys are a function of the word, of a
secret of the asker and of the asker's own words, from which they are chosen; when these change, some decoys
do.

- cells and scalars: every word comes with m decoy words, in an order that reveals nothing;
- obfuscated vectors (eq. 4 of the CS-F-LTR paper): a word stands in z₁ rows of z. The other rows go to decoys
  in groups of z₁ − b, each decoy colliding with the word in **the same** b rows, so that word and decoys all
  stand in z₁ rows. If each decoy had b rows of its own, the word would be the only one that shares rows with
  all others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import Ids, IntArray
from isthmus.errors import ConfigError
from isthmus.private.sketch import HashFamily

_TRIES = 64


@dataclass(frozen=True, eq=False)
class Vector:
    """A column for every row, the rows in which the real word stands, and the number of words that fit the
    vector."""

    columns: IntArray
    used: IntArray
    anonymity: int


@dataclass(frozen=True, eq=False)
class Decoys:
    """Chooses decoys from the asker's own vocabulary; `occurrences` says how often each of its words
    occurs."""

    words: Ids
    occurrences: IntArray
    secret: bytes = field(repr=False)
    count: int = 2

    def __post_init__(self) -> None:
        if len(self.occurrences) != len(self.words.vocabulary):
            raise ConfigError("decoys need to know how often each word occurs", key="occurrences")
        if self.count < 0 or len(self.secret) < 16:
            raise ConfigError("decoys need a secret of 16 bytes and a count from 0", key="decoys")

    @cached_property
    def _by_frequency(self) -> IntArray:
        return np.argsort(-self.occurrences, kind="stable")

    @cached_property
    def _rank(self) -> IntArray:
        ranks = np.empty(len(self._by_frequency), dtype=np.int64)
        ranks[self._by_frequency] = np.arange(len(ranks))
        return ranks

    @cached_property
    def _place(self) -> dict[str, int]:
        return {word: at for at, word in enumerate(self.words.words)}

    def beside(self, words: Ids) -> list[IntArray]:
        """For every word of the asked vocabulary, the positions of its decoys in the asker's own
        vocabulary."""
        return [self._near(word, self._place.get(word, -1)) for word in words.words]

    def named(self, positions: IntArray) -> Ids:
        """The words at these positions; the vocabulary has each of them once."""
        words = self.words.words
        return Ids.of([words[at] for at in positions.tolist()])

    def _near(self, word: str, at: int) -> IntArray:
        """Positions of decoys of about the same frequency rank; a word outside the vocabulary counts as the
        rarest."""
        size = len(self._rank)
        if not size or not self.count:
            return np.empty(0, dtype=np.int64)
        rank = int(self._rank[at]) if at >= 0 else size - 1
        reach = max(4 * self.count, size // 20)
        window = self._by_frequency[max(0, rank - reach) : rank + reach + 1]
        window = window[window != at]
        order = np.argsort(self._dice(word, len(window)))[: self.count]
        chosen: IntArray = window[order]
        return chosen

    def _dice(self, word: str, count: int, turn: int = 0) -> NDArray[np.uint64]:
        """Pseudorandom numbers that depend on the secret, the word and the turn."""
        seed = self.secret + turn.to_bytes(4, "little") + word.encode()
        return np.frombuffer(hashlib.shake_256(seed).digest(8 * count), dtype="<u8").astype(np.uint64)

    def vectors(
        self, words: Ids, family: HashFamily, *, real_rows: int = 10, shared_rows: int = 1
    ) -> list[Vector]:
        """A vector for every word of the asked vocabulary, with z₁ = `real_rows` and b = `shared_rows`.

        Each has ⌊(z − z₁)/(z₁ − b)⌋ decoys, or fewer where the vocabulary has too few words with these
        collisions.
        """
        if not 0 < shared_rows < real_rows <= family.rows:
            raise ConfigError(
                f"{shared_rows} shared of {real_rows} real rows out of {family.rows}",
                key="real_rows",
                expected="shared < real ≤ all rows",
            )
        base = np.arange(family.rows)[:, None] * family.width
        ours = family.of_vocabulary(self.words).cells - base
        theirs = family.of_vocabulary(words).cells - base
        shape = _Shape(family.rows, family.width, real_rows, shared_rows)
        return [self._vector(word, theirs[:, at], ours, shape) for at, word in enumerate(words.words)]

    def _vector(self, word: str, mine: IntArray, ours: IntArray, shape: _Shape) -> Vector:
        """The vector with the most decoys out of several attempts; as a rule the first attempt has all of
        them."""
        best: Vector | None = None
        alike = ours == mine[:, None]
        for turn in range(_TRIES if ours.shape[1] else 1):
            vector = self._try(word, turn, mine, ours, alike, shape)
            if best is None or vector.anonymity > best.anonymity:
                best = vector
            if best.anonymity == shape.decoys + 1:
                break
        if best is None:
            raise ConfigError("no vector was tried", key="decoys")
        return best

    def _try(
        self, word: str, turn: int, mine: IntArray, ours: IntArray, alike: NDArray[np.bool_], shape: _Shape
    ) -> Vector:
        dice = self._dice(word, 2 * shape.rows + ours.shape[1], turn)
        order = np.argsort(dice[: shape.rows])
        used, rest = order[: shape.real], order[shape.real :]
        shared, own = used[: shape.shared], used[shape.shared :]
        fits = alike[shared].all(axis=0) & ~alike[own].any(axis=0) & ~alike[rest].any(axis=0)
        candidates = np.flatnonzero(fits)
        candidates = candidates[np.argsort(dice[2 * shape.rows :][candidates])]
        columns = mine.copy()
        chosen: list[int] = []
        for group in shape.groups(rest):
            decoy = next((at for at in candidates.tolist() if _apart(ours[rest], at, chosen)), None)
            if decoy is None:
                break
            chosen.append(decoy)
            columns[group] = ours[group, decoy]
        spare = rest[len(chosen) * shape.group :]
        occupied = np.concatenate([mine[spare, None], ours[spare][:, chosen]], axis=1)
        columns[spare] = _free(dice[shape.rows : shape.rows + len(spare)], occupied, shape.width)
        return Vector(columns, np.sort(used), len(chosen) + 1)


@dataclass(frozen=True)
class _Shape:
    """The shape of obfuscated vectors: z rows of some width, z₁ of them real, b of these shared with the
    decoys."""

    rows: int
    width: int
    real: int
    shared: int

    @property
    def group(self) -> int:
        return self.real - self.shared

    @property
    def decoys(self) -> int:
        return (self.rows - self.real) // self.group

    def groups(self, rest: IntArray) -> list[IntArray]:
        """The rows of every decoy."""
        return [rest[at * self.group : (at + 1) * self.group] for at in range(self.decoys)]


def _apart(columns: IntArray, at: int, chosen: list[int]) -> bool:
    """Whether a candidate has no column in common with any chosen decoy, nor is one itself."""
    return not (columns[:, [at]] == columns[:, chosen]).any()


def _free(dice: NDArray[np.uint64], occupied: IntArray, width: int) -> IntArray:
    """A random column for every spare row, different from the columns that the words have in that row."""
    columns = (dice % np.uint64(width)).astype(np.int64)
    for _ in range(occupied.shape[1] + 1):
        columns = np.where((columns[:, None] == occupied).any(axis=1), (columns + 1) % width, columns)
    return columns
