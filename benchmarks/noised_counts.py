"""Accuracy of noised counts against ε, on silos of Cranfield and NPL: a table, and a figure in docs/images.

    ISTHMUS_DATA=… python benchmarks/noised_counts.py

Documents are dealt into four silos by topic. A model learned from two thirds of the judged queries counts
documents for the other third; single words are counted without a model. A searcher would turn to the silo
with the largest count: measured is the number of relevant documents (or documents with the word) there, as a
share of those in the best silo.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from isthmus.arrays import IntArray
from isthmus.asking import Silos
from isthmus.corpora import load
from isthmus.learning import JudgedRows, learn
from isthmus.private import Geometric
from isthmus.report import Series, line_plot
from isthmus.retrieval import TEXT
from isthmus.service.columns import ModelScorer, silo_rows
from isthmus.service.node import Node
from isthmus.service.noised_counts import matching_documents, reach
from isthmus.service.scale import baseline_of
from isthmus.service.settings import EncoderSettings, NodeSettings, SharedStatistics
from isthmus.service.stores import Draft
from isthmus.service.wire import CountQuestion
from isthmus.tables import Corpus

SILOS, DRAWS, LEFT = 4, 400, 7.0
WORDS, LEAST, MOST = 200, 10, 500
"""Number of single words that are requested; each occurs in at least 10 and at most 500 documents."""
EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
IMAGE = Path(__file__).resolve().parent.parent / "docs" / "images" / "noised-counts.svg"


def by_topic(corpus: Corpus) -> IntArray:
    """Return the silo of every document."""
    texts = [
        f"{title} {body}"
        for title, body in zip(corpus.documents.titles, corpus.documents.bodies, strict=True)
    ]
    vectors = TruncatedSVD(40, random_state=0).fit_transform(
        TfidfVectorizer(stop_words="english").fit_transform(texts)
    )
    return KMeans(SILOS, n_init=3, random_state=0).fit_predict(vectors)


def opened(stack: ExitStack, folder: Path, name: str, corpus: Corpus, rows: IntArray) -> Node:
    """Open a node with some of the documents and index them."""
    settings = NodeSettings(
        silo=name,
        folder=folder / name,
        encoder=EncoderSettings("none"),
        statistics=SharedStatistics(form="exact"),
    )
    node = stack.enter_context(Node(settings).offline())
    documents = corpus.documents
    node.store.put([Draft(documents.ids[at], documents.titles[at], documents.bodies[at]) for at in rows])
    node.index.catch_up()
    return node


def learned(node: Node, corpus: Corpus, queries: list[int]) -> ModelScorer:
    """Learn a model from the judgements of some queries, as silos would learn it together."""
    node.share(node.index.snapshot.exact_statistics("all", (TEXT,)).to_bytes())
    judged = {
        corpus.queries.texts[at]: {id: grade > 0 for id, grade in right.items()}
        for at in queries
        if (right := corpus.qrels.to_dict().get(corpus.queries.ids[at]))
    }
    texts = sorted(judged)
    folds = [at % 5 for at in range(len(texts))]
    rows: JudgedRows = silo_rows(node.index.snapshot, texts, judged, folds=folds, encoder="", depth=100)
    model, _ = learn(Silos.in_memory({"all": rows.answer}), texts, folds=5, baseline=baseline_of(None))
    return ModelScorer(model)


def counted(name: str) -> dict[str, tuple[IntArray, IntArray]]:
    """Return, by kind of question, exact counts of every question in every silo and the true numbers sought.

    For judged queries documents are counted by probability, and the numbers sought are those of relevant
    documents. For single words documents are counted as before anything is learned, and the numbers sought
    are those of documents with the word.
    """
    corpus = load(name)
    silos, grades = by_topic(corpus), corpus.qrels.to_dict()
    home = dict(zip(corpus.documents.ids, silos.tolist(), strict=True))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        whole = opened(stack, Path(folder), "all", corpus, np.arange(len(silos)))
        model = learned(whole, corpus, [at for at in range(len(corpus.queries)) if at % 3])
        nodes = [
            opened(stack, Path(folder), f"silo{at}", corpus, np.flatnonzero(silos == at))
            for at in range(SILOS)
        ]
        own = [node.index.snapshot.exact_statistics(node.settings.silo, (TEXT,)) for node in nodes]
        snapshots = [replace(node.index.snapshot, shared=reduce(add, own)) for node in nodes]

        def counts(query: str, scorer: ModelScorer | None) -> list[int]:
            question = CountQuestion(query=query)
            each = (
                matching_documents(shot, shot.reader.handles(), question, scorer, dense=False)
                for shot in snapshots
            )
            return [int(mask.sum()) for mask in each]

        probable, relevant = [], []
        for at in range(0, len(corpus.queries), 3):
            right = [id for id, grade in grades.get(corpus.queries.ids[at], {}).items() if grade > 0]
            if right:
                probable.append(counts(corpus.queries.texts[at], model))
                relevant.append(np.bincount([home[id] for id in right if id in home], minlength=SILOS))
        terms, tables = whole.index.snapshot.reader.statistics((TEXT,))
        usual = np.flatnonzero((tables[TEXT] >= LEAST) & (tables[TEXT] <= MOST))
        some = np.random.default_rng(0).choice(usual, WORDS, replace=False)
        having = np.array([counts(terms.words[at], None) for at in some.tolist()])
    return {"judged queries": (np.array(probable), np.array(relevant)), "single words": (having, having)}


def share_first(counts: IntArray, sought: IntArray, rng: np.random.Generator) -> float:
    """Return the number sought in the silos with the largest counts, as a share of that in the best silos.

    Ties between counts are broken at random.
    """
    first = (counts + rng.random(counts.shape) * 0.5).argmax(axis=1)
    return float(sought[np.arange(len(first)), first].sum() / sought.max(axis=1).sum())


def main() -> None:
    """Print the table and draw the figure."""
    rng = np.random.default_rng(0)
    lines: dict[str, Series] = {}
    for name in ("cran", "npl"):
        for kind, (counts, sought) in counted(name).items():
            noised = [
                np.mean(
                    [
                        share_first(
                            counts + Geometric(each).draw(counts.size).reshape(counts.shape), sought, rng
                        )
                        for _ in range(DRAWS)
                    ]
                )
                for each in EPSILONS
            ]
            lines[f"{name}, {kind}"] = Series(EPSILONS, [float(each) for each in noised])
            exact = np.mean([share_first(counts, sought, rng) for _ in range(20)])
            lot = sought.mean(axis=1).sum() / sought.max(axis=1).sum()
            largest = counts.max(axis=1)
            print(
                f"{name}, {kind}: {len(counts)} questions, largest count {np.median(largest):.0f} (median),"
                f" exact {exact:.2f}, by lot {lot:.2f}"
            )
    print(f"| ε a question | noise within ± (95 %) | questions | {' | '.join(lines)} |")
    print("|" + "---|" * (3 + len(lines)))
    for at, epsilon in enumerate(EPSILONS):
        shares = " | ".join(f"{line.y[at]:.2f}" for line in lines.values())
        print(f"| {epsilon:g} | {reach(epsilon)} | {int(LEFT / epsilon + 1e-9)} | {shares} |")
    plot = line_plot(lines, x="ε of a question", y="of the best silo's documents")

    def draw(axes: Any) -> None:
        plot.draw(axes)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)

    replace(plot, draw=draw).save(IMAGE)


if __name__ == "__main__":
    main()
