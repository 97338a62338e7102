"""A single-label text classifier: a panel of label rankers, calibrated and stacked.

Every training text is scored by rankers that were trained without it and its copies. The stack of those
scores and the map from its margins to probabilities are cross-fitted too, so that results reported on
training texts are those to expect on new texts like them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration import ThresholdCurve
from isthmus.classification.label_rankers import (
    Bm25Neighbours,
    Centroid,
    FittedPanel,
    LabelRanker,
    Labels,
    LabelText,
    NaiveBayes,
    OneVsRest,
    Panel,
    TextNeighbours,
    as_run,
)
from isthmus.classification.texts import LabelledTexts, read_labelled, same_text
from isthmus.classification.views import Beside, Characters, CountedGrams, Encoded, Words
from isthmus.encoders import Encoder, Lsa, load_encoder
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import calibration_of, evaluate
from isthmus.fusion import Stacked, load_fuser, save_fuser
from isthmus.partition import folds
from isthmus.randomness import Streams
from isthmus.report import Table, progress
from isthmus.tables import Documents, Qrels, Run

LEAST_FRESH = 30
"""The least number of texts, outside the encoder's tuning, on which a stack and its probabilities
are fitted."""
FORMAT = 1
FILES = ("classifier.json", "texts.jsonl", "stack.fuser")


def out_of_fold(
    panel: Panel, texts: Sequence[str], labels: Labels, documents: Documents, parts: IntArray
) -> dict[str, FloatArray]:
    """Return every ranker's scores (texts × labels), each text's learned from the texts of the other
    parts."""
    scores = {name: np.full(labels.shape, np.nan) for name in panel.rankers}
    for part in progress(range(int(parts.max()) + 1), label="cross-fitting"):
        inside = parts == part
        queries, learned = (
            [texts[row] for row in np.flatnonzero(mask).tolist()] for mask in (inside, ~inside)
        )
        fitted = panel.fit(learned, labels[~inside], documents)
        for name, values in fitted.scores(queries).items():
            scores[name][inside] = values
    return scores


def default_rankers(encoder: Encoder, texts: Sequence[str], *, described: bool) -> dict[str, LabelRanker]:
    """Return ten quick rankers that err in different ways, and one more if labels have descriptions."""
    words, bigrams, letters = (CountedGrams.of(grams, texts) for grams in (Words(), Words(2), Characters()))
    view = Encoded(encoder)
    rankers: dict[str, LabelRanker] = {
        "BM25 neighbours": Bm25Neighbours(),
        "words": OneVsRest(words),
        "bigrams": OneVsRest(bigrams),
        "letters": OneVsRest(letters),
        "bigrams, ratio": OneVsRest(bigrams, ratio=True),
        "naive Bayes": NaiveBayes(bigrams),
        "dense": OneVsRest(view, cost=10.0, loss="log"),
        "dense neighbours": TextNeighbours(view, k=50, sharpness=10.0),
        "words + dense": OneVsRest(Beside((bigrams, view), (1.0, 1.0))),
        "centroid": Centroid(view),
    }
    return {**rankers, "label text": LabelText(view)} if described else rankers


class TextClassifier:
    """Classifies texts under one label each: `fit(texts)` learns, `predict(texts)` ranks labels with
    probabilities.

    `held_out_` is the run of the training texts by models fitted without them. `encoder` is the name of an
    added encoder, or `lsa`: latent semantics of the training texts.
    """

    def __init__(self, *, encoder: str = "lsa", folds: int = 5, seed: int = 0) -> None:
        self.encoder, self.folds, self.seed = encoder, folds, seed

    def fit(self, data: LabelledTexts) -> Self:
        """Learn from labelled texts; texts without a label are skipped. Raises DataError if a text has
        several."""
        data = data.take(data.labelled)
        if not data.single:
            cure = "learn them with MultiLabelClassifier, isthmus classify --multi"
            raise DataError("a text has several labels", cure=cure)
        parts = self._parts(data)
        panel = self._panel(data)
        scores = out_of_fold(panel, data.texts, data.dense, data.documents, parts)
        fresh = self._fresh(data)
        judged = data.take(fresh)
        runs = [
            as_run(judged.ids, data.names, scores[name][fresh], len(data.names), name)
            for name in panel.rankers
        ]
        curve = "softmax-noise"
        self.stack_ = Stacked(calibrator=curve, single_label=True, final=curve)
        self.held_out_ = self.stack_.fit_fuse(runs, judged.qrels, name="held out")
        self.data_ = data
        for name in ("panel_", "curve_"):  # of an earlier fit
            self.__dict__.pop(name, None)
        return self

    @cached_property
    def panel_(self) -> FittedPanel:
        """The rankers, learned from all texts when they are first needed."""
        data = self._fitted()
        return self._panel(data).fit(data.texts, data.dense, data.documents)

    def predict(self, texts: Sequence[str], ids: Sequence[str] | None = None) -> Run:
        """Return a run of every text's labels, the most probable first, with probabilities."""
        data = self._fitted()
        names = tuple(ids) if ids is not None else tuple(str(at) for at in range(len(texts)))
        if len(set(names)) < len(names):
            raise DataError("two texts have the same id", cure="leave the ids out, or make them differ")
        scores = self.panel_.scores(list(texts))
        runs = [as_run(names, data.names, scores[name], len(data.names), name) for name in scores]
        return self.stack_.fuse(runs, name="predicted")

    def save(self, folder: str | PathLike[str]) -> list[Path]:
        """Write the settings, the training texts and the stack to a folder; rankers learn again after
        loading. Returns the files."""
        data, home = self._fitted(), Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        settings, texts, stack = (home / name for name in FILES)
        about = {
            "format": FORMAT,
            "encoder": self.encoder,
            "folds": self.folds,
            "seed": self.seed,
            "descriptions": dict(zip(data.names, data.descriptions, strict=True)),
            "first answers": {
                name: getattr(self.curve_, name).tolist() for name in ("thresholds", "kept", "relevant")
            },
        }
        settings.write_text(json.dumps(about, ensure_ascii=False, indent=1), encoding="utf-8")
        rows = zip(data.ids, data.texts, data.label_lists, strict=True)
        lines = (
            {"id": name, "text": text, "labels": [data.names[at] for at in row]} for name, text, row in rows
        )
        texts.write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
        )
        save_fuser(self.stack_, stack)
        return [settings, texts, stack]

    def threshold_for(self, precision: float) -> float:
        """Return the lowest probability at which first answers had this precision on held-out texts."""
        return self.curve_.threshold_for(precision)

    @cached_property
    def curve_(self) -> ThresholdCurve:
        """Precision of first answers by threshold, on held-out texts."""
        data = self._fitted()
        return report_of(self.held_out_, data.qrels, data.names).curve

    def _fitted(self) -> LabelledTexts:
        if not hasattr(self, "data_"):
            raise DataError("the classifier is not fitted", cure="call fit, or load a saved one")
        return self.data_

    def _parts(self, data: LabelledTexts) -> IntArray:
        """Return the owner's folds or, without these, new folds that keep equal texts together."""
        if data.folds is not None:
            return np.unique(data.folds, return_inverse=True)[1]
        groups = same_text(data.texts)
        count = min(self.folds, int(groups.max(initial=-1)) + 1)
        if count < 2:
            raise DataError(f"{len(data)} texts with a label, of which {count} differ", cure="label more")
        return folds(len(data), count, Streams(self.seed)("classifier folds"), groups=groups)

    def _fresh(self, data: LabelledTexts) -> NDArray[np.bool_]:
        """Return the mask of texts outside the encoder's tuning: only on these can its answers be
        evaluated."""
        if self.encoder == "lsa":
            return np.ones(len(data), dtype=bool)
        fresh = ~load_encoder(self.encoder).was_tuned_on(data.texts)
        if not fresh.all() and fresh.sum() < LEAST_FRESH:
            problem = f"the encoder was tuned on {len(data) - int(fresh.sum())} of these {len(data)} texts"
            cure = (
                f"add {LEAST_FRESH} labelled texts that it has not learned from, as those it was validated on"
            )
            raise DataError(problem, cure=cure)
        return np.asarray(fresh)

    def _panel(self, data: LabelledTexts) -> Panel:
        known = sorted(set(data.texts))
        dimensions = max(2, min(256, len(known) // 4))
        encoder = (
            Lsa.fit(known, dimensions=dimensions) if self.encoder == "lsa" else load_encoder(self.encoder)
        )
        return Panel(default_rankers(encoder, known, described=any(data.descriptions)))


def load_classifier(folder: str | PathLike[str]) -> TextClassifier:
    """Read a saved classifier; its rankers learn again from the texts that were saved with it."""
    home = Path(folder)
    settings, texts, stack = (home / name for name in FILES)
    try:
        about: Mapping[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ConfigError(f"a classifier of format {about['format']}", key="format", expected=str(FORMAT))
        classifier = TextClassifier(encoder=about["encoder"], folds=about["folds"], seed=about["seed"])
        columns = {name: np.array(values, float) for name, values in about["first answers"].items()}
        total = float(columns["relevant"].max(initial=0.0))
        classifier.__dict__["curve_"] = ThresholdCurve(**columns, total=total)
        classifier.data_ = read_labelled(texts).of(about["descriptions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        cure = "give the folder that isthmus classify fit wrote"
        raise DataError(f"no classifier: {error}", file=settings, cure=cure) from None
    fuser = load_fuser(stack)
    if not isinstance(fuser, Stacked):
        raise DataError(f"a fuser of the kind {fuser.label!r}, not a stack", file=stack)
    classifier.stack_ = fuser
    return classifier


@dataclass(frozen=True, eq=False)
class ClassificationReport:
    """How good first answers are: measures, a row per label, the confusion matrix, and a threshold curve."""

    measures: Mapping[str, float]
    by_label: Sequence[Mapping[str, Any]]
    confusion: IntArray
    """True label × first answer. For a text with several labels the true one is the answer if right, else the
    first label."""
    names: tuple[str, ...]
    curve: ThresholdCurve

    def table(self) -> Table:
        """A table with a row per label."""
        return Table.of(self.by_label, title="By label", digits=3)

    def confusions(self, most: int = 10) -> list[dict[str, Any]]:
        """Return the most frequent mistakes: true label, answer, number of texts."""
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        pairs = np.argsort(-wrong, axis=None, kind="stable")[:most]
        rows = (np.unravel_index(pair, wrong.shape) for pair in pairs)
        return [
            {"label": self.names[true], "taken for": self.names[answer], "texts": int(wrong[true, answer])}
            for true, answer in rows
            if wrong[true, answer]
        ]

    def decision(self, precision: float) -> dict[str, float]:
        """Return the threshold for a wanted precision, its support in validation texts, and the share of
        texts without an answer."""
        threshold = self.curve.threshold_for(precision)
        support = self.curve.support(threshold)
        answered = support.rows / self.measures["texts"]
        return {"threshold": threshold, **asdict(support), "abstained": 1.0 - answered}

    def record(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        matrix = {"labels": list(self.names), "counts": self.confusion.tolist()}
        return {"measures": dict(self.measures), "labels": list(self.by_label), "confusion": matrix}


def report_of(run: Run, qrels: Qrels, names: Sequence[str]) -> ClassificationReport:
    """Evaluate first answers to the run's texts; its probabilities have to be by models fitted
    without them."""
    qrels = qrels[[query for query in run.queries if query in qrels]]
    column = {name: at for at, name in enumerate(names)}
    first = run.keep(run.ranks == 1)
    truth = qrels.to_dict()
    answers = {query: first.documents.word(at) for at, query in enumerate(_queries(first)) if query in truth}
    confusion = np.zeros((len(names), len(names)), dtype=np.int64)
    for query, answer in answers.items():
        true = answer if answer in truth[query] else next(iter(truth[query]))
        confusion[column[true], column[answer]] += 1
    right = confusion.diagonal()
    texts, answered = confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall = right / np.maximum(answered, 1), right / np.maximum(texts, 1)
    f1 = 2 * right / np.maximum(answered + texts, 1)
    judged = first[[query for query in first.queries if query in truth]]
    hits = judged.grades(qrels) > 0
    calibration = calibration_of(qrels, judged, top=1)
    measures = {
        "texts": float(len(answers)),
        "P@1": evaluate(qrels, run, ["P@1"])["P@1"],
        "macro F1": float(f1[texts > 0].mean()) if texts.any() else 0.0,
        **{name: calibration[name] for name in ("ECE@1", "ECE@1 floor", "ECE@1 floor 95%", "log-loss@1")},
    }
    rows = [
        {"label": name, "texts": int(count), "precision": float(one), "recall": float(two), "F1": float(both)}
        for name, count, one, two, both in zip(names, texts, precision, recall, f1, strict=True)
    ]
    curve = ThresholdCurve.of(judged.required_probabilities, hits)
    return ClassificationReport(measures, rows, confusion, tuple(names), curve)


def _queries(run: Run) -> list[str]:
    """The query of every row."""
    return [run.queries[at] for at in run.query_of_row.tolist()]
