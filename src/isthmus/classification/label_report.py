"""Evaluates ranked labels with sparse probabilities: precision, propensity-scored measures, calibration by
label frequency, and the expected number of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.classification.label_fusion import FIRST, CandidateTable
from isthmus.classification.sparse import Sparse
from isthmus.evaluation import Propensity, ece, sampling_floor
from isthmus.report import Table

DEPTHS = (1, 5)


@dataclass(frozen=True, eq=False)
class LabelReport:
    """Measures over texts, and a row per band of label frequency."""

    measures: Mapping[str, float]
    by_band: Sequence[Mapping[str, Any]]

    def table(self) -> Table:
        """A table with a row per band."""
        return Table.of(self.by_band, title="By training texts of a label", digits=3)

    def record(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {"measures": dict(self.measures), "bands": list(self.by_band)}


def label_report(
    probabilities: Sparse,
    labels: Sparse,
    *,
    counts: IntArray,
    instances: int,
    bands: NDArray[Any],
    names: Sequence[str],
    expected: FloatArray | None = None,
) -> LabelReport:
    """Evaluate probabilities of texts × labels against the right labels.

    `counts` has the training texts of every label among `instances` texts, `bands` the band of every stored
    probability, and `names` the name of every band. psP and psnDCG are means over texts divided by the means
    of ideal lists (Jain et al. 2016).
    """
    table = CandidateTable.rows_of(probabilities)
    values = probabilities.data.astype(np.float64)
    hits, ranks = table.hits(labels), table.ranks(values)
    texts = labels.shape[0]
    measures: dict[str, float] = {"texts": float(texts), "labels a text": labels.nnz / max(texts, 1)}
    for depth in DEPTHS:
        measures[f"P@{depth}"] = float((hits & (ranks <= depth)).sum() / (depth * max(texts, 1)))
    scored = Propensity(Ids.of([]), np.zeros(0), max(instances, 3))
    inverse = np.asarray(1.0 + scored.c * (counts + scored.b) ** -scored.a, dtype=np.float64)
    measures |= _propensity_scored(table, ranks, hits, labels, inverse)
    top = ranks <= FIRST
    measures |= _calibration(values[top], hits[top])
    measures["listed"] = float(hits.sum() / max(labels.nnz, 1))
    if expected is not None:
        actual = np.diff(labels.indptr)
        measures |= {
            "expected labels": float(expected.mean()),
            "error of expected labels": float(np.abs(expected - actual).mean()),
        }
    rows = []
    for band, name in enumerate(names):
        first = top & (bands == band)
        if first.any():
            row = {"band": name, "answers": int(first.sum()), "right": float(hits[first].mean())}
            rows.append(
                {**row, "said": float(values[first].mean()), **_calibration(values[first], hits[first])}
            )
    return LabelReport(measures, rows)


def _calibration(values: FloatArray, hits: NDArray[np.bool_]) -> dict[str, float]:
    if not len(values):
        return {}
    floor = sampling_floor(values)
    return {"ECE": ece(values, hits), "ECE floor": floor.mean, "ECE floor 95%": floor.high}


def _propensity_scored(
    table: CandidateTable,
    ranks: IntArray,
    hits: NDArray[np.bool_],
    labels: Sparse,
    inverse: FloatArray,
) -> dict[str, float]:
    """psP and psnDCG at 5."""
    ideal = CandidateTable.rows_of(labels)
    worth = inverse[ideal.label]
    best = ideal.ranks(worth)
    first, good = hits & (ranks <= FIRST), best <= FIRST
    gain, most = inverse[table.label[first]], worth[good]
    sizes = np.clip(np.bincount(ideal.text, minlength=labels.shape[0]), 1, FIRST)
    sums = np.cumsum(1 / np.log2(np.arange(2, FIRST + 2)))[sizes - 1]
    discounted = gain / np.log2(ranks[first] + 1) / sums[table.text[first]]
    highest = most / np.log2(best[good] + 1) / sums[ideal.text[good]]
    ratios = {"psP": (gain.sum(), most.sum()), "psnDCG": (discounted.sum(), highest.sum())}
    return {f"{name}@{FIRST}": float(one / two) if two else 0.0 for name, (one, two) in ratios.items()}
