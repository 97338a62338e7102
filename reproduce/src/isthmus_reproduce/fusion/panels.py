"""Panels of label rankers: the paper's two retrievers, and those that the product's default stacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.classification import (
    Beside,
    Bm25Neighbours,
    Centroid,
    Characters,
    CountedGrams,
    Encoded,
    LabelRanker,
    LabelText,
    NaiveBayes,
    OneVsRest,
    TextNeighbours,
    View,
    Words,
)
from isthmus.encoders import Encoder, Lsa, load_encoder
from isthmus.errors import ConfigError, MissingExtra
from isthmus.retrieval import BM25
from isthmus.text import Tokeniser
from isthmus_reproduce.fusion.encoders import Remembered, Unmarked, unmarked
from isthmus_reproduce.fusion.labels import Bm25LabelText, Trained

MAX_TOKENS = 128
"""Tokens of a text that the transformer reads: the paper's number for tweets, and enough for a topic."""

SPARSE, DENSE = "BM25", "dense"
PRINTED_SPARSE, OTHER_DENSE = "BM25 over label texts", "dense, other reading"
"""The paper's sparse retriever as printed, and its dense one with the score that a mode does not use."""
LINEAR = "words + dense, linear"
"""The plain linear model that every fusion has to beat."""


def encoder(texts: Iterable[str], *, label: str | None = None) -> tuple[Encoder, str]:
    """Return all-MiniLM-L6-v2 if it is installed, else latent semantics of the texts; and its name.

    The texts, all of a data set, are encoded once and stored; `label` names the progress bar.
    """
    known = sorted(set(texts))
    try:
        model = load_encoder("minilm", max_tokens=MAX_TOKENS)
        model.fingerprint  # noqa: B018  # raises where a library is missing
        name = "all-MiniLM-L6-v2"
    except (ConfigError, MissingExtra):
        model, name = Lsa.fit(known, dimensions=256), "LSA (minilm is not added)"
    return Remembered.of(model, known, label=label), name


def marked(texts: Sequence[str]) -> bool:
    """Whether more than a tenth of the texts are posts with markup."""
    return 10 * sum(unmarked(text) != " ".join(text.split()) for text in texts) > len(texts)


def _unmarked_panel(
    encoder: Encoder, texts: Sequence[str], words: View, letters: View
) -> dict[str, LabelRanker]:
    """Return the dense rankers again, reading posts without their markup."""
    inner = encoder.encoder if isinstance(encoder, Remembered) else encoder
    view = Encoded(Unmarked(Remembered.of(inner, {unmarked(text) for text in texts})))
    return {
        "dense, unmarked": OneVsRest(view, cost=10.0, loss="log"),
        "dense neighbours, unmarked": TextNeighbours(view, k=50, sharpness=10.0),
        "words + dense, unmarked": OneVsRest(Beside((words, view), (1.0, 1.0))),
        "words + letters + dense, unmarked": OneVsRest(
            Beside((words, letters, view), (1.0, 1.0, 1.5)), cost=0.3
        ),
        "label text, unmarked": LabelText(view),
    }


def paper_panel(view: Encoded) -> dict[str, LabelRanker]:
    """Return the paper's retrievers as in its authors' code, and the sparse one also as printed.

    In the code BM25 searches 64 training texts and a label has the best score among those that carry it; in
    print it searches the labels' texts. The paper fine-tunes a transformer on texts and labels; ours is a
    frozen one under a linear map trained with the same loss on the same pairs, compared by inner product.
    """
    return {SPARSE: Bm25Neighbours(k=64, pool="max"), PRINTED_SPARSE: Bm25LabelText(), DENSE: Trained(view)}


def default_panel(view: Encoded, texts: Iterable[str], *, single: bool) -> dict[str, LabelRanker]:
    """Return the rankers that the default stacks; only a few quick ones if a text may have several labels.

    `texts` are all texts of training and prediction; their n-grams are counted once.
    """
    known = sorted(set(texts))
    every_word = BM25(tokeniser=Tokeniser(stop_words=frozenset()))
    words, bigrams = CountedGrams.of(Words(), known), CountedGrams.of(Words(2), known)
    few: dict[str, LabelRanker] = {
        "BM25 max": Bm25Neighbours(pool="max", bm25=every_word),
        "BM25 sum": Bm25Neighbours(pool="sum", bm25=every_word),
        "words": OneVsRest(words),
        "dense": OneVsRest(view, cost=10.0, loss="log"),
        "dense neighbours": TextNeighbours(view, k=50, sharpness=10.0),
        LINEAR: OneVsRest(Beside((bigrams, view), (1.0, 1.0))),
        "label text": LabelText(view),
    }
    if not single:
        return few
    letters = CountedGrams.of(Characters(), known)
    return {
        **few,
        **(_unmarked_panel(view.encoder, known, bigrams, letters) if marked(known) else {}),
        "content words": OneVsRest(CountedGrams.of(Words(stop=True), known)),
        "bigrams": OneVsRest(bigrams),
        "trigrams and marks": OneVsRest(CountedGrams.of(Words(3, least=2, marks=True), known)),
        "bigrams, ratio": OneVsRest(bigrams, ratio=True),
        "letters": OneVsRest(letters),
        "letters, ratio": OneVsRest(letters, cost=0.3, ratio=True),
        "words + letters + dense": OneVsRest(Beside((bigrams, letters, view), (1.0, 1.0, 1.5)), cost=0.3),
        "dense, hinge": OneVsRest(view, cost=1.0),
        "naive Bayes": NaiveBayes(bigrams),
        "naive Bayes, letters": NaiveBayes(letters, smoothing=0.3),
        "dense neighbours, ten": TextNeighbours(view, k=10, sharpness=10.0),
        "dense neighbours, max": TextNeighbours(view, pool="max"),
        "word neighbours": TextNeighbours(words, k=30),
        "centroid": Centroid(view),
    }
