"""Plots of the effect of sketches and noise on counts and features.

- the measured error of a count beside the bounds of the paper's Theorems 2 and 3;
- the paper's Figure 7: feature vectors of some pairs, embedded in the plane by t-SNE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import Ids, IntArray
from isthmus.corpora import available, load
from isthmus.features import ExactCounts, Pairs
from isthmus.features import compute as features
from isthmus.private import CountMin, CountSketch, HashFamily, Sketch
from isthmus.randomness import Streams
from isthmus.report import Plot, Section, Series, line_plot
from isthmus.retrieval import Statistics
from isthmus.tables import Corpus
from isthmus.text import Tokens, tokenise
from isthmus_reproduce import synthetic_text
from isthmus_reproduce.notebook import Notebook, Unit
from isthmus_reproduce.prose import Prose

PROSE = Prose("private.j2")
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
PANELS: dict[str, tuple[str, int, int]] = {
    "a: exact": ("exact", 0, 0),
    "b: Count Sketch w=120 z=10": ("signed", 120, 10),
    "c: w=60": ("signed", 60, 10),
    "d: w=10": ("signed", 10, 10),
    "e: Count-Min w=120": ("plain", 120, 10),
    "f: z=5": ("signed", 120, 5),
    "g: z=3": ("signed", 120, 3),
    "h: z=1": ("signed", 120, 1),
}
"""Panels of Figure 7: the kind of sketch, its width and its rows."""
PAIRS = 400
EPSILON, ROWS, WORDS = 0.5, 10, 5
"""ε, number of rows, and number of words of a query for the theorems."""


@dataclass(frozen=True, eq=False)
class SketchedCounts(ExactCounts):
    """Counts read from noiseless sketches, with exact totals."""

    sketch: Sketch

    @classmethod
    def through(cls, tokens: Tokens, kind: type[Sketch], family: HashFamily) -> SketchedCounts:
        """Sketch the texts by a sketch of this kind."""
        return cls(tokens, Statistics.of(tokens), kind.of(tokens, family))

    def counts(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """Return the sketch's estimates, negative ones as 0."""
        counts: NDArray[Any] = np.maximum(self.sketch.at(documents, words), 0)
        return counts


@dataclass(frozen=True)
class Picture:
    """A unit of work: a width of the sketches, or a panel of Figure 7."""

    kind: Literal["theorems", "panel"]
    width: int | None = None
    panel: str = ""


def compute(notebook: Notebook, *, seed: int, workers: int | None) -> dict[Picture, Any]:
    """Return the data of all plots."""
    units = [Unit(Picture("theorems", width), {"width": width, "seed": seed}) for width in WIDTHS]
    results = notebook.compute(theorems, units, label="errors and bounds", workers=workers)
    units = [Unit(Picture("panel", panel=name), {"panel": name, "seed": seed}) for name in PANELS]
    return results | notebook.compute(panel, units, label="embedding feature vectors", workers=workers)


def sections(results: Mapping[Picture, Any]) -> tuple[Section, ...]:
    """Return the report's sections with plots."""
    return (
        Section("Errors and the paper's bounds", (_theorem_plot(results, 2), _theorem_plot(results, 3))),
        Section("Feature vectors in the plane", (_panels_plot(results),)),
    )


def error_bound(epsilon: float, rest: float, width: int, words: int = 1) -> float:
    """Return the bound of Theorems 2 and 3 as printed, √(l·(16/ε² + 64F/w)).

    F is the second moment beyond the heaviest words.
    """
    return float((words * (16 / epsilon**2 + 64 * rest / width)) ** 0.5)


def unsafe_corollary1(epsilon: float, width: int) -> float:
    """Return ε' = ln(w(e^ε − 1 + 1/w)): Corollary 1 claims wrongly that noise for ε' suffices for ε."""
    return float(np.log(width * (np.exp(epsilon) - 1 + 1 / width)))


def theorems(*, width: int, seed: int) -> dict[str, float]:
    """Return 99.5 % quantiles of errors, for one word and for queries of five, beside the printed bounds."""
    rng = Streams(seed)("theorems", width)
    ranks = np.minimum(rng.zipf(1.3, size=(300, 1000)), 20_000)
    errors: dict[str, list[float]] = {}
    for row in ranks:
        tokens = _text(row)
        truth = np.bincount(tokens.terms.codes).astype(np.float64)
        family = HashFamily(rng.bytes(32), ROWS, width)
        hashed = family.of_vocabulary(tokens.terms)
        cells = CountSketch.of(tokens, family).dense()[0][hashed.cells] * hashed.signs
        shared = rng.laplace(0, 1 / EPSILON, size=truth.shape) * hashed.signs  # one draw a word for all rows
        own = rng.laplace(0, 1 / EPSILON, size=cells.shape) * hashed.signs
        chosen = rng.integers(len(truth), size=(20, WORDS))
        for name, noise in (("shared noise", shared), ("noise a cell", own)):
            noisy = cells + noise
            one = np.median(noisy, axis=0) - truth
            several = np.median(noisy[:, chosen].sum(axis=2), axis=0) - truth[chosen].sum(axis=1)
            errors.setdefault(f"{name} 2", []).extend(np.abs(one).tolist())
            errors.setdefault(f"{name} 3", []).extend(np.abs(several).tolist())
        rest = float((np.sort(truth)[::-1][width // 8 :] ** 2).sum())
        for name, words in (("bound 2", 1), ("bound 3", WORDS)):
            errors.setdefault(name, []).append(error_bound(EPSILON, rest, width, words))
    return {
        name: float(np.mean(values) if name.startswith("bound") else np.quantile(values, 0.995))
        for name, values in errors.items()
    }


def panel(*, panel: str, seed: int) -> dict[str, list[float]]:
    """Return the positions of sampled pairs in the plane, and their grades."""
    from sklearn.manifold import TSNE

    corpus = load("cran") if available().get("cran") else synthetic_text.text(400, 60, seed=seed, words=200)
    rng = Streams(seed)("panels")
    queries, title, body = _tokens(corpus)
    pairs, grades = _sampled(corpus, rng)
    kind, width, rows = PANELS[panel]
    counts: list[ExactCounts] = [ExactCounts.of(tokens) for tokens in (title, body)]
    if kind != "exact":
        family = HashFamily(rng.bytes(32), rows, width)
        sketch = CountSketch if kind == "signed" else CountMin
        counts = [SketchedCounts.through(tokens, sketch, family) for tokens in (title, body)]
    table = features(queries, pairs, title=counts[0], body=counts[1])
    table = (table - table.mean(axis=0)) / (table.std(axis=0) + 1e-9)
    placed = TSNE(init="pca", random_state=seed, perplexity=30).fit_transform(table.astype(np.float32))
    return {"x": placed[:, 0].tolist(), "y": placed[:, 1].tolist(), "grade": grades.tolist()}


def _sampled(corpus: Corpus, rng: np.random.Generator) -> tuple[Pairs, IntArray]:
    """Sample pairs: half of them judged relevant, half at random."""
    place = {query: at for at, query in enumerate(corpus.queries.ids)}
    judged = np.flatnonzero(corpus.qrels.grades > 0)
    judged = rng.permutation(judged)[: PAIRS // 2]
    judged_queries = np.array([place[query] for query in corpus.qrels.queries])[
        corpus.qrels.query_of_row[judged]
    ]
    judged_documents = [corpus.row_of_document[corpus.qrels.documents.word(row)] for row in judged.tolist()]
    others = PAIRS - len(judged)
    queries = np.concatenate([judged_queries, rng.integers(len(corpus.queries), size=others)])
    documents = np.concatenate([judged_documents, rng.integers(len(corpus.documents), size=others)]).astype(
        np.int64
    )
    grades = np.concatenate([corpus.qrels.grades[judged], np.zeros(others)]).astype(np.int64)
    order = np.argsort(queries, kind="stable")
    return Pairs(queries[order], documents[order]), grades[order]


def _tokens(corpus: Corpus) -> tuple[Tokens, Tokens, Tokens]:
    fields = (corpus.queries.texts, corpus.documents.titles, corpus.documents.bodies)
    queries, title, body = (tokenise(texts) for texts in fields)
    return queries, title, body


def _text(ranks: IntArray) -> Tokens:
    names, codes = np.unique(ranks, return_inverse=True)
    words = Ids.of([f"w{rank:06d}" for rank in names.tolist()])
    return Tokens(Ids(codes, words.vocabulary), np.array([0, len(codes)]))


def _theorem_plot(results: Mapping[Picture, Any], number: int) -> Plot:
    at = [results[Picture("theorems", width)] for width in WIDTHS]
    names = {
        "bound": f"bound of Theorem {number}",
        "shared noise": "shared noise, as the paper has it",
        "noise a cell": "noise of its own for every cell",
    }
    lines = {label: Series(WIDTHS, [one[f"{name} {number}"] for one in at]) for name, label in names.items()}
    broken = sum(one[f"shared noise {number}"] > one[f"bound {number}"] for one in at)
    facts = {"words": WORDS, "epsilon": EPSILON, "rows": ROWS, "broken": broken, "widths": len(at)}
    caption = PROSE("theorem_caption", number=number, **facts)
    return _on_log_axes(line_plot(lines, x="cells a row", y="error in words"), caption)


def _on_log_axes(plot: Plot, caption: str) -> Plot:
    def draw(axes: Any) -> None:
        plot.draw(axes)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        low, high = axes.get_xlim()
        axes.set_xticks([width for width in WIDTHS[::2] if low <= width <= high])
        axes.xaxis.set_major_formatter(_plainly)
        axes.yaxis.set_major_formatter(_plainly)
        low, high = axes.get_ylim()
        if high / low < 100:  # label minor ticks too if the axis spans less than two decades
            axes.yaxis.set_minor_formatter(
                lambda value, at: _plainly(value, at) if f"{value:.0e}"[0] in "25" else ""
            )

    return Plot(draw, caption)


def _plainly(value: float, _: object) -> str:
    return f"{value:,g}"


def _panels_plot(results: Mapping[Picture, Any]) -> Plot:
    def draw(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        for own, name in zip(figure.subplots(2, 4).ravel(), PANELS, strict=True):
            places = results[Picture("panel", panel=name)]
            own.scatter(places["x"], places["y"], c=np.array(places["grade"]) > 0, s=4, cmap="coolwarm")
            own.set_title(name, fontsize=9)
            own.set_xticks([])
            own.set_yticks([])

    caption = PROSE("panels_caption", pairs=PAIRS)
    return Plot(draw, caption, (9.6, 5.0))
