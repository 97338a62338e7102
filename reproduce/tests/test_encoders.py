"""Encoders of the fusion experiments: posts without markup, vectors looked up, a map learned from pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from isthmus.encoders import Encoder, Lsa
from isthmus_reproduce.fusion.encoders import Projected, Remembered, Unmarked, _contrast, unmarked

TEXTS = [
    "the cat sat on the mat",
    "a cat and a kitten on a mat",
    "stock markets fell sharply today",
    "shares and markets recovered",
    "the kitten slept",
]


def test_posts_are_read_without_their_markup() -> None:
    plain = "USA Softball for life! Team Mates"
    post = "{@USA Softball@} for life! #TeamMates {{URL}} https://example.org/x"
    assert unmarked(post) == plain
    assert unmarked("{{URL}}") == "{{URL}}", "a text never becomes empty"
    lsa = Lsa.fit(["softball team mates", "USA for life", "a kitchen"], dimensions=2)
    found = Unmarked(lsa)
    np.testing.assert_array_equal(found.encode([post]), lsa.encode([plain]))
    assert found.fingerprint != lsa.fingerprint


def test_remembered_vectors_are_looked_up_and_strange_texts_encoded_alone() -> None:
    @dataclass
    class Counting:
        fingerprint: str = "counting"
        seen: list[int] = field(default_factory=list)

        def encode(self, texts: Sequence[str]) -> np.ndarray:
            self.seen.append(len(texts))
            return np.array([[len(text), 1.0] for text in texts], dtype=np.float32)

    counting = Counting()
    known = Remembered.of(counting, TEXTS)
    asked = [TEXTS[3], "strange", TEXTS[0], "strange"]
    assert known.encode(asked)[:, 0].tolist() == [len(text) for text in asked]
    assert counting.seen == [len(TEXTS), 1]


def test_a_projection_learns_pairs_that_share_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    left = [f"colour{i} thing{i} alpha{i}" for i in range(12)] * 3
    right = [f"hue{i} object{i} beta{i}" for i in range(12)] * 3
    plain = Lsa.fit(left + right, dimensions=24)
    learned = Projected.fit(plain, (left, right), epochs=200, rate=0.02)

    def hits(encoder: Encoder) -> float:
        near = encoder.encode(left[:12]) @ encoder.encode(right[:12]).T
        return float((near.argmax(axis=1) == np.arange(12)).mean())

    assert hits(learned) == 1.0 > hits(plain)
    assert learned.fingerprint != plain.fingerprint


def test_the_contrastive_gradient_is_the_derivative() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(6, 4)), rng.normal(size=(6, 4))
    same = np.eye(6, dtype=bool)
    same[0, 3] = same[3, 0] = True
    matrix = rng.normal(size=(4, 4))

    def loss(p: np.ndarray) -> float:
        a, b = (rows @ p / np.linalg.norm(rows @ p, axis=1, keepdims=True) for rows in (left, right))
        logits = a @ b.T / 0.5
        logits[same & ~np.eye(6, dtype=bool)] = -np.inf
        both = [m - np.log(np.exp(m).sum(axis=1, keepdims=True)) for m in (logits, logits.T)]
        return -float(sum(np.diag(m).mean() for m in both)) / 2

    gradient = _contrast(matrix, left, right, same, 0.5)
    for i, j in ((0, 0), (1, 2), (3, 1)):
        bump = np.zeros_like(matrix)
        bump[i, j] = 1e-6
        slope = (loss(matrix + bump) - loss(matrix - bump)) / 2e-6
        assert gradient[i, j] == pytest.approx(slope, rel=1e-3, abs=1e-6)
