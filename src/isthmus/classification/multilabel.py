"""Classifies texts under any number of very many labels: retrieved, fused, with calibrated probabilities.

It has two stages, as xCoRetriev: rankers list some dozens of labels each, from training texts, from the
labels' own words and from vectors; then their lists are fused. Curves and weights are fitted on texts held
out from the rankers of each fold; if there are many texts, only as many folds are used as give enough of
them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration import ThresholdCurve
from isthmus.classification.label_fusion import FEATURES, CandidateTable, LabelFusion, cross_fitted
from isthmus.classification.label_report import LabelReport, label_report
from isthmus.classification.linear import FittedLinear, SparseLinear
from isthmus.classification.space import LATENT, TextSpace
from isthmus.classification.sparse import (
    BATCH,
    Bands,
    FittedLabelRanker,
    Sparse,
    SparseLabelRanker,
    TextRows,
    check_sides,
    label_counts,
    read_arrays,
    sparse_arrays,
    sparse_of,
    without_own,
    write_arrays,
)
from isthmus.classification.sparse_rankers import (
    FittedLabelBm25,
    FittedLabelVectors,
    FittedNeighbours,
    LabelBm25,
    LabelVectors,
    SparseNeighbours,
)
from isthmus.classification.texts import LabelledTexts, same_text
from isthmus.encoders import load_encoder
from isthmus.errors import ConfigError, DataError
from isthmus.files import write_whole
from isthmus.partition import folds
from isthmus.randomness import Streams
from isthmus.report import progress

DEPTH = 64
"""The number of labels that a ranker lists."""
ENOUGH = 5_000
"""The number of texts on which curves and weights are fitted, if there are so many."""
MOST_LINEAR = 10_000
"""The largest number of labels for which linear classifiers are a default ranker."""
FORMAT = 1
PRESETS = ("default", "xcoretriev")
Texts = Sequence[str] | Sparse
"""Texts, or rows of feature weights if the training data were such rows."""
T = TypeVar("T", bound="Kept")

_STAGE = re.compile(r"stage-\d+-\d+|model-(space|fusion|held-out|ranker-\d+)")
_FITTED: dict[str, type[FittedLabelRanker]] = {
    kind.__name__: kind for kind in (FittedLabelBm25, FittedLabelVectors, FittedLinear, FittedNeighbours)
}


def preset_rankers(preset: str, documents: TextRows) -> dict[str, SparseLabelRanker]:
    """Return the rankers of a preset; labels without words are not searched by words.

    `xcoretriev` has the rank-fusion paper's two: the best of 64 neighbours by BM25, and label vectors.
    """
    if preset not in PRESETS:
        raise ConfigError(f"no preset {preset!r}", key="preset", value=preset, known=PRESETS)
    if preset == "xcoretriev":
        return {"sparse": SparseNeighbours(pool="max"), "dense": LabelVectors()}
    rankers: dict[str, SparseLabelRanker] = {
        "neighbours": SparseNeighbours(),
        "latent neighbours": SparseNeighbours("vectors"),
        "label vectors": LabelVectors(),
    }
    if len(documents) <= MOST_LINEAR:
        rankers["linear"] = SparseLinear()
    return {**rankers, "label text": LabelBm25()} if documents.terms.nnz else rankers


class Kept(Protocol):
    """The result of a stage of fitting, which can be saved."""

    def save(self, folder: Path) -> None:
        """Write the stage's files into a folder."""


@dataclass(frozen=True, eq=False)
class HeldOutLabels:
    """Probabilities of held-out texts, by models fitted without them, and the right labels."""

    probabilities: Sparse
    labels: Sparse
    bands: IntArray
    """The band of every stored entry, by the number of training texts in its fold."""
    names: tuple[str, ...]

    @cached_property
    def hits(self) -> NDArray[np.bool_]:
        """Whether each stored entry is right."""
        return CandidateTable.rows_of(self.probabilities).hits(self.labels)

    @property
    def unlisted(self) -> float:
        """The mean number of right labels of a text that no ranker lists."""
        return float((self.labels.nnz - self.hits.sum()) / max(self.labels.shape[0], 1))

    def thresholds(self, precision: float) -> FloatArray:
        """Return the lowest probability per band at which labels had this precision; infinite if there is
        none.

        A band with too few right labels has the threshold of all bands together.
        """
        hits, stated = self.hits, self.probabilities.data
        text = CandidateTable.rows_of(self.probabilities).text

        def lowest(rows: NDArray[np.bool_]) -> float:
            return ThresholdCurve.of(stated[rows], hits[rows], text[rows]).threshold_for(precision)

        try:
            pooled = lowest(np.ones(len(hits), dtype=bool))
        except DataError:
            pooled = np.inf
        values = np.full(len(self.names), pooled)
        for band in range(len(self.names)):
            rows = self.bands == band
            if hits[rows].sum() >= 10:
                try:
                    values[band] = lowest(rows)
                except DataError:
                    values[band] = np.inf
        return values

    def decision(self, precision: float, thresholds: FloatArray | None = None) -> dict[str, Any]:
        """Return the effect of thresholds for a wanted precision, by band and on the whole.

        That is how often labels at or above them were right, and the share of texts that have none. The
        thresholds are those of these texts unless others are given.
        """
        thresholds, hits = self.thresholds(precision) if thresholds is None else thresholds, self.hits
        passing = self.probabilities.data >= thresholds[self.bands]
        rows = [
            {
                "band": name,
                "threshold": float(thresholds[band]) if np.isfinite(thresholds[band]) else None,
                "labels": int((passing & (self.bands == band)).sum()),
                "right": float(hits[passing & (self.bands == band)].mean())
                if (passing & (self.bands == band)).any()
                else None,
            }
            for band, name in enumerate(self.names)
        ]
        texts = np.unique(CandidateTable.rows_of(self.probabilities).text[passing])
        return {
            "wanted": precision,
            "precision": float(hits[passing].mean()) if passing.any() else None,
            "recall": float(hits[passing].sum() / max(self.labels.nnz, 1)),
            "abstained": 1 - len(texts) / max(self.labels.shape[0], 1),
            "bands": rows,
        }

    def save(self, folder: Path) -> None:
        """Write `held_out.npz`."""
        arrays = sparse_arrays("probabilities", self.probabilities) | sparse_arrays("labels", self.labels)
        write_arrays(folder / "held_out.npz", bands=self.bands, names=np.array(self.names), **arrays)

    @classmethod
    def load(cls, folder: Path) -> HeldOutLabels:
        """Read what `save` wrote."""
        arrays = read_arrays(folder / "held_out.npz")
        probabilities, labels = (sparse_of(name, arrays) for name in ("probabilities", "labels"))
        return cls(probabilities, labels, arrays["bands"], tuple(arrays["names"].tolist()))


@dataclass(frozen=True, eq=False)
class _Stored:
    """Candidates of a stage (texts × labels) in the form in which they are saved."""

    matrix: Sparse

    def save(self, folder: Path) -> None:
        write_arrays(folder / "candidates.npz", **sparse_arrays("candidates", self.matrix))

    @classmethod
    def load(cls, folder: Path) -> _Stored:
        return cls(sparse_of("candidates", read_arrays(folder / "candidates.npz")))


@dataclass(frozen=True)
class Stages:
    """The stages of a fit that are complete, in a folder; an interrupted fit continues after the last one."""

    folder: Path | None

    def begin(self, fingerprint: str) -> None:
        """Drop stored stages unless they are of an unfinished fit of the same data and settings.

        Raises DataError if the folder has a classifier of another kind.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        mark, model = self.folder / "fit.json", self.folder / "classifier.json"
        if model.exists() and not is_multilabel(self.folder):
            cure = "give a folder of its own, or remove the other classifier"
            raise DataError("is a classifier of another kind", file=model, cure=cure)
        try:
            begun = json.loads(mark.read_bytes())["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            begun = None
        if begun != fingerprint or model.exists():
            model.unlink(missing_ok=True)
            if begun is not None:  # without a mark, folders of these names are not ours to delete
                self._drop("stage-", "model-")
            write_whole(mark, json.dumps({"fingerprint": fingerprint}).encode())

    def _drop(self, *beginnings: str) -> None:
        """Remove stages, deleting first the file that marks each as complete."""
        for old in self.folder.iterdir() if self.folder else ():
            if _STAGE.fullmatch(old.name) and old.name.startswith(beginnings):
                if old.is_symlink():
                    raise DataError("is a link, which is not followed", file=old, cure="take it away")
                (old / "done").unlink(missing_ok=True)
                shutil.rmtree(old)

    def get(self, name: str, make: Callable[[], T], load: Callable[[Path], T]) -> T:
        """Load the stage if it is complete; otherwise call `make`, save its result and return it."""
        if self.folder is None:
            return make()
        home = self.folder / name
        if (home / "done").exists():
            return load(home)
        result = make()
        home.mkdir(exist_ok=True)
        result.save(home)
        write_whole(home / "done", type(result).__name__.encode())
        return result

    def end(self) -> None:
        """Drop the stages that only fitting needed."""
        self._drop("stage-")


class MultiLabelClassifier:
    """Classifies texts under any number of labels.

    `fit(data)` learns; `predict(texts)` returns probabilities of the labels that rankers list, a sparse
    matrix texts × labels. `held_out_` has those of training texts by models fitted without them.

    `encoder` is `latent` (latent semantics of the training texts) or the name of an added encoder. `bands_`
    are the ranges of label frequency with curves of their own; the preset `xcoretriev` has head and tail.
    With `links`, labels are pages to which texts link: a text whose id is a label's name never has that
    label.
    """

    def __init__(
        self,
        *,
        preset: str = "default",
        encoder: str = LATENT,
        depth: int = DEPTH,
        folds: int = 5,
        seed: int = 0,
        enough: int = ENOUGH,
        links: bool = False,
    ) -> None:
        self.preset, self.encoder, self.depth = preset, encoder, depth
        self.folds, self.seed, self.enough, self.links = folds, seed, enough, links

    def fit(self, data: LabelledTexts, folder: str | PathLike[str] | None = None) -> Self:
        """Learn from labelled texts; texts without a label are skipped.

        With a folder, every stage is saved there, and an interrupted fit continues from it; in the end
        `load_multilabel` can read the folder.
        """
        data = data.take(data.labelled)
        stages = Stages(None if folder is None else Path(folder))
        stages.begin(self._fingerprint(data))
        self.__dict__.pop("label_bands_", None)
        self.names_, self.counts_ = data.names, label_counts(data.labels)
        self.texts_ = len(data)
        self.bands_ = Bands.head_and_tail(self.counts_) if self.preset == "xcoretriev" else Bands()
        source = data.texts if data.features is None else data.features
        documents: Sequence[str] = () if data.features is not None else data.documents.texts
        self.space_ = stages.get("model-space", lambda: self._space(source, documents), TextSpace.load)
        texts = self.space_.rows(source)
        labels_as_texts = self._documents(documents, len(data.names))
        rankers = preset_rankers(self.preset, labels_as_texts)
        self._fuse(stages, data, texts, labels_as_texts, rankers)
        self.rankers_ = {}
        for at, (name, ranker) in enumerate(progress(rankers.items(), total=len(rankers), label="learning")):
            learn = _Learner(ranker, texts, data.labels, labels_as_texts)
            self.rankers_[name] = stages.get(f"model-ranker-{at}", learn, _load_ranker)
        if stages.folder is not None:
            self._describe(stages.folder)
        stages.end()
        return self

    def _space(self, source: Texts, documents: Sequence[str]) -> TextSpace:
        return TextSpace.fit(source, documents, encoder=self.encoder, seed=self.seed)

    def _documents(self, documents: Sequence[str], count: int) -> TextRows:
        """Return the labels as texts; rows without terms or vectors if the data have no texts."""
        if documents:
            return self.space_.rows(documents)
        return TextRows(csr_array((count, self.space_.width), dtype=np.float32), None, counted=False)

    def _fuse(
        self,
        stages: Stages,
        data: LabelledTexts,
        texts: TextRows,
        documents: TextRows,
        rankers: Mapping[str, SparseLabelRanker],
    ) -> None:
        """Find candidates of held-out texts, learn the fusion from them, and compute their held-out
        probabilities."""
        parts, chosen = self._parts(data)
        scored = [np.flatnonzero((parts == part) & chosen) for part in np.unique(parts[chosen]).tolist()]
        listed: list[list[Sparse]] = []
        itself = self._own(data.ids)
        bands = []
        for at, inside in enumerate(progress(scored, label="cross-fitting")):
            learned = parts != parts[inside[0]]
            space = self.space_.directed(texts.take(learned), seed=self.seed)
            queries, known, own = map(space.turned, (texts.take(inside), texts.take(learned), documents))
            bands.append(self._bands_of(label_counts(data.labels[learned])))
            fold = []
            for number, ranker in enumerate(rankers.values()):
                learner = _Learner(ranker, known, data.labels[learned], own)
                search = _Searcher(learner, queries, self.depth)
                matrix = stages.get(f"stage-{at}-{number}", search, _Stored.load).matrix
                fold.append(without_own(matrix, itself[inside]) if self.links else matrix)
            listed.append(fold)
        self.share_ = float(np.mean([(parts != parts[inside[0]]).mean() for inside in scored]))
        table = CandidateTable.of([vstack(each, format="csr") for each in zip(*listed, strict=True)])
        fold_of = np.repeat(np.arange(len(scored)), [len(inside) for inside in scored])[table.text]
        band = np.stack(bands)[fold_of, table.label].astype(np.int64)
        right = data.labels[np.concatenate(scored)]
        spread = Streams(self.seed)("fusion folds").permutation(right.shape[0]) % self.folds
        fused = cache(lambda: cross_fitted(table, right, band, len(self.bands_), spread[table.text]))
        self.fusion_ = stages.get("model-fusion", lambda: fused()[0], LabelFusion.load)
        names = self.bands_.names
        self.held_out_ = stages.get(
            "model-held-out",
            lambda: HeldOutLabels(table.filled(fused()[1]), right, band, names),
            HeldOutLabels.load,
        )

    def _parts(self, data: LabelledTexts) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the fold of every text, and the mask of texts to score, from as many folds as give enough
        texts."""
        rng = Streams(self.seed)("multi-label folds")
        if data.folds is not None:
            parts = np.unique(data.folds, return_inverse=True)[1]
        else:
            groups = same_text(data.texts) if data.features is None else np.arange(len(data))
            count = min(self.folds, int(groups.max(initial=-1)) + 1)
            if count < 2:
                raise DataError(f"{len(data)} texts with a label, of which {count} differ", cure="label more")
            parts = folds(len(data), count, rng, groups=groups)
        fresh = np.ones(len(data), dtype=bool)
        if self.encoder != LATENT:
            fresh = ~load_encoder(self.encoder).was_tuned_on(data.texts)
        order = rng.permutation(len(data))
        order = order[np.argsort(parts[order], kind="stable")]
        chosen = np.zeros(len(data), dtype=bool)
        chosen[order[fresh[order]][: self.enough]] = True
        if not chosen.any():
            cure = "add labelled texts that it has not learned from"
            raise DataError("the encoder was tuned on all of these texts", cure=cure)
        return np.asarray(parts, dtype=np.int64), chosen

    def _fingerprint(self, data: LabelledTexts) -> str:
        digest = hashlib.blake2b(json.dumps([FORMAT, self._settings()]).encode(), digest_size=16)
        for text in (*data.ids, *data.texts, *data.names, *data.descriptions):
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
        if self.encoder != LATENT:
            digest.update(load_encoder(self.encoder).fingerprint.encode())
        matrices = [data.labels, *([] if data.features is None else [data.features])]
        arrays = [part for each in matrices for part in (each.indptr, each.indices, each.data)]
        for array in [*arrays, *([] if data.folds is None else [data.folds])]:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _settings(self) -> dict[str, Any]:
        names = ("preset", "encoder", "depth", "folds", "seed", "enough", "links")
        return {name: getattr(self, name) for name in names}

    def predict(self, texts: Texts, ids: Sequence[str] | None = None) -> Sparse:
        """Return probabilities of the labels that rankers list, texts × labels; an entry not stored is not
        listed.

        The texts' `ids` are needed, and used, only with `links`. Raises DataError without texts.
        """
        self._check()
        if self.links and ids is None:
            raise DataError("links without the texts' ids", cure="give the ids, as to fit")
        own = self._own(ids or ())
        batches = enumerate(_batches(texts))
        parts = [self._predicted(batch, own[at * BATCH : (at + 1) * BATCH]) for at, batch in batches]
        if not parts:
            raise DataError("no texts to label")
        return vstack(parts, format="csr")

    def _own(self, ids: Sequence[str]) -> IntArray:
        """Return the number of the label that stands for each text itself, or −1."""
        number = {name: at for at, name in enumerate(self.names_)} if self.links else {}
        return np.array([number.get(name, -1) for name in ids], dtype=np.int64)

    def _predicted(self, texts: Texts, own: IntArray) -> Sparse:
        rows = self.space_.rows(texts)
        lists = [each.candidates(rows, self.depth) for each in self.rankers_.values()]
        table = CandidateTable.of([without_own(each, own) for each in lists] if self.links else lists)
        bands = self.label_bands_[table.label]
        return table.filled(self.fusion_.probabilities(table, bands))

    def report(self, probabilities: Sparse | None = None, labels: Sparse | None = None) -> LabelReport:
        """Evaluate probabilities of texts with these labels; without arguments, those of held-out texts."""
        if probabilities is None or labels is None:
            probabilities, labels, bands = (
                self.held_out_.probabilities,
                self.held_out_.labels,
                self.held_out_.bands,
            )
        else:
            bands = self.label_bands_[probabilities.indices]
        return label_report(
            probabilities,
            labels,
            counts=self.counts_,
            instances=self.texts_,
            bands=bands,
            names=self.bands_.names,
            expected=self.expected_labels(probabilities),
        )

    def matched(self, data: LabelledTexts) -> Sparse:
        """Return the labels of other texts in this classifier's order. Raises DataError for an
        unknown label."""
        place = {name: at for at, name in enumerate(self.names_)}
        if strange := next((name for name in data.names if name not in place), None):
            raise DataError(f"the classifier does not know the label {strange!r}", cure="fit it anew")
        columns = np.array([place[name] for name in data.names], dtype=np.int64)
        parts = (data.labels.data, columns[data.labels.indices], data.labels.indptr)
        return csr_array(parts, shape=(len(data), len(self.names_)))

    def expected_labels(self, probabilities: Sparse) -> FloatArray:
        """Return the expected number of labels of every text, including labels that no ranker lists."""
        sums = np.asarray(probabilities.sum(axis=1), dtype=np.float64).ravel()
        return np.asarray(sums + self.held_out_.unlisted)

    def decided(self, probabilities: Sparse, precision: float) -> Sparse:
        """Keep only labels whose probability reaches their band's threshold for this precision; a text may
        have none left."""
        least = self.held_out_.thresholds(precision)[self.label_bands_]
        table = CandidateTable.rows_of(probabilities)
        passing = probabilities.data >= least[table.label]
        return table.take(passing).filled(probabilities.data[passing])

    def decision(self, probabilities: Sparse, labels: Sparse, precision: float) -> dict[str, Any]:
        """Apply the thresholds of held-out texts to other texts; see `HeldOutLabels.decision`."""
        bands = self.label_bands_[probabilities.indices]
        judged = HeldOutLabels(probabilities, labels, bands, self.bands_.names)
        return judged.decision(precision, self.held_out_.thresholds(precision))

    @cached_property
    def label_bands_(self) -> IntArray:
        """The band of every label, from its number of training texts scaled to the share on which curves were
        learned."""
        return self._bands_of(np.ceil(self.counts_ * self.share_)).astype(np.int64)

    def _bands_of(self, counts: IntArray) -> NDArray[np.int8]:
        """Return the bands of labels with these counts; xCoRetriev splits once, by all training texts."""
        return self.bands_.of(self.counts_ if self.preset == "xcoretriev" else counts)

    def _check_parts(self) -> None:
        """Check that loaded parts belong together; else answers would be wrong, or read beyond the arrays.
        Raises DataError."""
        fusion, held_out, rankers = self.fusion_, self.held_out_, self.rankers_.values()
        labels, space = len(self.names_), self.space_
        known = {"T": space.width, "L": labels, "B": len(self.bands_), "R": len(rankers)}
        if space.encoder == LATENT:
            known["D"] = space.components.shape[1]
        for ranker in rankers:
            check_sides(ranker.sides(), known)
        bands, names = held_out.bands, np.array(held_out.names)
        apart = [(held_out.probabilities, "HL"), (held_out.labels, "HL"), (names, "B")]
        own = [(self.counts_, "L"), (space.rarity, "T"), (space.components, "TD"), (fusion.weights, "W")]
        entries = {"E": held_out.probabilities.nnz, "W": FEATURES * len(rankers) + len(self.bands_)}
        check_sides([*apart, *own, (bands, "E"), (np.zeros(len(fusion.curves)), "R")], known | entries)
        if space.terms is not None and len(space.terms.vocabulary) != space.width:
            raise DataError(f"{len(space.terms.vocabulary):,} words where there are {space.width:,}")
        if len(set(self.names_)) < labels or (bands < 0).any() or (bands >= len(self.bands_)).any():
            raise DataError("a label twice, or a band that is none", cure="fit again")

    def _check(self) -> None:
        if not hasattr(self, "rankers_"):
            raise DataError("the classifier is not fitted", cure="call fit, or load a saved one")

    def _describe(self, folder: Path) -> None:
        """Write the files that make the folder a classifier; `classifier.json` comes last."""
        about = {
            "format": FORMAT,
            "kind": "multi-label",
            "settings": self._settings(),
            "rankers": list(self.rankers_),
            "texts": self.texts_,
            "share": self.share_,
            "bands": asdict(self.bands_)["edges"],
        }
        write_arrays(folder / "labels.npz", counts=self.counts_)
        write_whole(folder / "labels.json", json.dumps(self.names_, ensure_ascii=False).encode())
        write_whole(folder / "classifier.json", json.dumps(about, indent=1).encode())


@dataclass(frozen=True, eq=False)
class _Learner:
    """A ranker with its training data, which learns when it is called."""

    ranker: SparseLabelRanker
    texts: TextRows
    labels: Sparse
    documents: TextRows

    def __call__(self) -> FittedLabelRanker:
        return self.ranker.fit(self.texts, self.labels, self.documents)


@dataclass(frozen=True, eq=False)
class _Searcher:
    """A ranker with training data and queries, which learns and searches when it is called."""

    learner: _Learner
    queries: TextRows
    depth: int

    def __call__(self) -> _Stored:
        return _Stored(self.learner().candidates(self.queries, self.depth))


def _batches(texts: Texts) -> Iterator[Texts]:
    count = texts.shape[0] if hasattr(texts, "shape") else len(texts)
    for start in range(0, count, BATCH):
        yield texts[start : start + BATCH]


def _load_ranker(folder: Path) -> FittedLabelRanker:
    return _FITTED[(folder / "done").read_text()].load(folder)


def is_multilabel(folder: str | PathLike[str]) -> bool:
    """Whether a folder has a multi-label classifier or an unfinished fit of one."""
    try:
        return bool(json.loads((Path(folder) / "classifier.json").read_bytes()).get("kind") == "multi-label")
    except (OSError, ValueError, AttributeError, RecursionError):
        return (Path(folder) / "fit.json").exists()


def load_multilabel(folder: str | PathLike[str]) -> MultiLabelClassifier:
    """Read a classifier that `fit` wrote to a folder. Raises DataError if there is none."""
    home = Path(folder)
    try:
        about = json.loads((home / "classifier.json").read_bytes())
        if about["format"] != FORMAT or about.get("kind") != "multi-label":
            raise ConfigError(f"format {about['format']}", key="format", expected=f"{FORMAT}, multi-label")
        classifier = MultiLabelClassifier(**about["settings"])
        names = json.loads((home / "labels.json").read_bytes())
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("labels.json is no list of names")
        classifier.names_ = tuple(names)
        classifier.counts_ = read_arrays(home / "labels.npz")["counts"]
        classifier.share_ = float(about["share"])
        classifier.texts_, classifier.bands_ = int(about["texts"]), Bands(tuple(about["bands"]))
        classifier.rankers_ = {
            name: _load_ranker(home / f"model-ranker-{at}") for at, name in enumerate(about["rankers"])
        }
        classifier.space_ = TextSpace.load(home / "model-space")
        classifier.fusion_ = LabelFusion.load(home / "model-fusion")
        classifier.held_out_ = HeldOutLabels.load(home / "model-held-out")
        classifier._check_parts()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, (ConfigError, DataError)):
            raise
        cure = "give the folder that isthmus classify fit wrote"
        raise DataError(f"no classifier: {error}", file=home / "classifier.json", cure=cure) from None
    return classifier
