"""The paper's retrievers of labels that the product does not have, and the right labels of a corpus's texts.

Bm25LabelText  BM25 over the labels' names and descriptions
Trained        cosine to the label's text behind a linear map learned from training texts and their labels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.classification import Encoded, Labels, Sight, View, plain_queries
from isthmus.encoders import unit
from isthmus.retrieval import BM25, Score, shaped
from isthmus.tables import Corpus, Documents, Queries
from isthmus_reproduce.fusion.encoders import Projected


@dataclass(frozen=True)
class Bm25LabelText:
    """BM25 with the text as the query, over the labels' names and descriptions."""

    bm25: BM25 = field(default_factory=BM25)

    @property
    def views(self) -> tuple[View, ...]:
        return ()

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        index = self.bm25.index(documents)
        column = {label: at for at, label in enumerate(documents.ids)}

        def scores(queries: Sight) -> FloatArray:
            run = index.search(plain_queries(queries.texts), len(documents))
            values = np.full((len(run), len(documents)), np.nan)
            columns = np.array([column[word] for word in run.documents.words], dtype=np.int64)
            values[run.query_of_row, columns[run.documents.codes]] = run.scores
            return values

        return scores


@dataclass(frozen=True)
class Trained:
    """Cosine to the label's text after a map that moves training texts towards their labels (`Projected`).

    `score` is that of `Dense`. A label without training texts is ranked too: its text is mapped like any
    other.
    """

    view: Encoded
    score: Score = "cosine"
    epochs: int = 10

    @property
    def views(self) -> tuple[View, ...]:
        return (self.view,)

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        rows, columns = np.nonzero(labels)
        named = documents.texts
        pairs = [sight.texts[row] for row in rows.tolist()], [named[at] for at in columns.tolist()]
        learned = Projected.fit(self.view.encoder, pairs, epochs=self.epochs)
        towards = unit(self.view.encoder.encode(named) @ learned.matrix).T

        def scores(queries: Sight) -> FloatArray:
            cosines = np.clip(unit(queries[self.view] @ learned.matrix) @ towards, -1, 1)
            return shaped(cosines.astype(np.float64), self.score)

        return scores


def labels_of(corpus: Corpus, queries: Queries) -> Labels:
    """Return a mask of texts × labels that marks the right ones."""
    column = {label: at for at, label in enumerate(corpus.documents.ids)}
    row = {query: at for at, query in enumerate(queries.ids)}
    right = np.zeros((len(queries), len(corpus.documents)), dtype=bool)
    judged = corpus.qrels[[query for query in queries.ids if query in corpus.qrels]]
    relevant = judged.keep(judged.grades > 0)
    where = np.array([row[query] for query in relevant.queries], dtype=np.int64)
    codes = np.array([column[label] for label in relevant.documents.words], dtype=np.int64)
    right[where[relevant.query_of_row], codes[relevant.documents.codes]] = True
    return right
