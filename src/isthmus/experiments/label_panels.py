"""Which label rankers take part: the paper's two, and the panels the product's default stacks."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.encoders import Encoder, Lsa, Remembered, Transformer
from isthmus.errors import MissingExtra
from isthmus.retrieval.bm25 import BM25
from isthmus.retrieval.labels import (
    Beside,
    Bm25Neighbours,
    Centroid,
    Characters,
    Encoded,
    LabelRanker,
    LabelText,
    NaiveBayes,
    Neighbours,
    OneVsRest,
    Words,
)
from isthmus.text import Tokeniser

MAX_TOKENS = 128
"""Of a text, what the transformer reads: as the paper has it for tweets, and enough for a topic."""

SPARSE, DENSE = "BM25", "dense"
LINEAR = "words + dense, linear"
"""The plain linear model that every fusion has to beat."""


def encoder(texts: Iterable[str], *, label: str | None = None) -> tuple[Encoder, str]:
    """all-MiniLM-L6-v2 where it is installed, else latent semantics of the texts; and its name.

    The texts, all of a data set, are encoded once and kept; `label` names the progress bar.
    """
    known = sorted(set(texts))
    try:
        found: Encoder = Transformer(max_tokens=MAX_TOKENS)
        found.fingerprint  # noqa: B018  # raises where package or weights are missing
        name = "all-MiniLM-L6-v2"
    except MissingExtra:
        found, name = Lsa.fit(known, dimensions=256), "LSA (no transformer installed)"
    return Remembered.of(found, known, label=label), name


def paper_panel(view: Encoded) -> dict[str, LabelRanker]:
    """The paper's two retrievers: BM25 over 64 neighbours with the best score per label, and a dense one.

    The paper fine-tunes a transformer; ours is a frozen one under a head fitted on the training texts.
    """
    return {SPARSE: Bm25Neighbours(k=64, pool="max"), DENSE: OneVsRest(view, cost=10.0, loss="log")}


def default_panel(view: Encoded, *, single: bool) -> dict[str, LabelRanker]:
    """What the default stacks: a few quick rankers where a text may have several of many labels."""
    every_word = BM25(tokeniser=Tokeniser(stop_words=frozenset()))
    bigrams = Words(2)
    few: dict[str, LabelRanker] = {
        "BM25 max": Bm25Neighbours(pool="max", bm25=every_word),
        "BM25 sum": Bm25Neighbours(pool="sum", bm25=every_word),
        "words": OneVsRest(Words()),
        "dense": OneVsRest(view, cost=10.0, loss="log"),
        "dense neighbours": Neighbours(view, k=50, sharpness=10.0),
        LINEAR: OneVsRest(Beside((bigrams, view), (1.0, 1.0))),
        "label text": LabelText(view),
    }
    if not single:
        return few
    return {
        **few,
        "content words": OneVsRest(Words(stop=True)),
        "bigrams": OneVsRest(bigrams),
        "trigrams and marks": OneVsRest(Words(3, least=2, marks=True)),
        "bigrams, ratio": OneVsRest(bigrams, ratio=True),
        "letters, ratio": OneVsRest(Characters(), cost=0.3, ratio=True),
        "dense, hinge": OneVsRest(view, cost=1.0),
        "naive Bayes": NaiveBayes(bigrams),
        "dense neighbours, ten": Neighbours(view, k=10, sharpness=10.0),
        "dense neighbours, max": Neighbours(view, pool="max"),
        "word neighbours": Neighbours(Words(), k=30),
        "centroid": Centroid(view),
    }
