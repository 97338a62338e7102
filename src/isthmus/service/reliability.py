"""Reliability curves of a silo's probabilities for the Calibration view, from validation or feedback."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray
from isthmus.errors import DataError
from isthmus.service.stores import Judgement
from isthmus.service.wire import Bin, Calibration, ReliabilityCurve, ThresholdRow
from isthmus.tables import replacing

SHOWN = "shown"
"""Name under which the probabilities that people see are listed, beside the retrievers' names."""
EVERY_SILO = "all silos"
BINS = 10
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))
DRAWS = 100
LEAST_HITS = 10
"""Fewest hits of a bin, and between two thresholds, so that single judgements cannot be read off."""


def reliability_curve(
    probabilities: ArrayLike,
    relevant: ArrayLike,
    *,
    silo: str,
    retriever: str = SHOWN,
    source: Literal["validation", "feedback"] = "validation",
    least: int = 1,
) -> ReliabilityCurve:
    """Compute one curve, with precision and recall by threshold, and the ECE of a perfect model at this size.

    Neighbouring bins are joined until each has `least` hits.
    """
    predicted = np.asarray(probabilities, dtype=np.float64)
    truth = np.asarray(relevant, dtype=np.float64)
    from isthmus.evaluation import reliability, sampling_floor

    curve = reliability(predicted, truth, bins=BINS)
    bins = [
        Bin(
            low=float(curve.edges[first]),
            high=float(curve.edges[last]),
            predicted=_share(curve.promised[first:last].sum(), curve.count[first:last].sum()),
            observed=_share(curve.came_true[first:last].sum(), curve.count[first:last].sum()),
            count=int(curve.count[first:last].sum()),
        )
        for first, last in _spans(curve.count, least)
    ]
    return ReliabilityCurve(
        silo=silo,
        retriever=retriever,
        source=source,
        count=len(predicted),
        relevant=int(truth.sum()),
        ece=curve.ece,
        floor=sampling_floor(predicted, bins=BINS, draws=DRAWS).mean,
        bins=bins,
        thresholds=_thresholds(predicted, truth, least),
    )


def _share(part: float, whole: float) -> float:
    return float(np.clip(part / whole, 0.0, 1.0))


def _spans(count: NDArray[Any], least: int) -> list[tuple[int, int]]:
    """Return ranges of non-empty bins, joined until each has `least` hits; the last takes the rest."""
    spans: list[tuple[int, int]] = []
    for at in np.flatnonzero(count).tolist():
        if spans and count[slice(*spans[-1])].sum() < least:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            spans.append((at, at + 1))
    if len(spans) > 1 and count[slice(*spans[-1])].sum() < least:
        spans[-2:] = [(spans[-2][0], spans[-1][1])]
    return spans


def _thresholds(probabilities: FloatArray, truth: FloatArray, least: int) -> list[ThresholdRow]:
    from isthmus.calibration import ThresholdCurve

    curve = ThresholdCurve.of(probabilities, truth)
    thresholds: list[ThresholdRow] = []
    for wanted in THRESHOLDS:
        above = np.flatnonzero(curve.thresholds >= wanted)
        if len(above):
            at = int(above[-1])
            fewer = (thresholds[-1].kept if thresholds else len(probabilities)) - int(curve.kept[at])
            if curve.kept[at] < least or 0 < fewer < least:
                continue
            thresholds.append(
                ThresholdRow(
                    threshold=wanted,
                    precision=_share(curve.relevant[at], curve.kept[at]),
                    recall=_share(curve.relevant[at], max(curve.total, 1.0)),
                    kept=int(curve.kept[at]),
                )
            )
    return thresholds


def curves_of(silo: str, judgements: Sequence[Judgement]) -> list[ReliabilityCurve]:
    """Compute curves from people's judgements: of the probabilities they saw, and of every retriever's."""
    pairs: dict[str, list[tuple[float, bool]]] = {}
    for judgement in judgements:
        named = {SHOWN: judgement.probability, **judgement.evidence}
        for retriever, probability in named.items():
            if probability is not None:
                pairs.setdefault(retriever, []).append((probability, judgement.relevant))
    return [
        reliability_curve(
            *zip(*outcomes, strict=True), silo=silo, retriever=name, source="feedback", least=LEAST_HITS
        )
        for name, outcomes in pairs.items()
    ]


def learned_curve(record: Mapping[str, Any]) -> ReliabilityCurve | None:
    """Return the curve of shown hits over all silos from the record of a learning run; None if it has none.

    Its bins come from folds on which the calibration was not fitted.
    """
    after = record.get("calibration", {}).get("after", {})
    if not (groups := after.get("groups")):
        return None
    low, high, predicted, observed, hits = np.clip(np.array(groups, dtype=np.float64).T, 0, None)
    above, right = np.cumsum(hits), np.cumsum(observed * hits)
    found = max(float(right[-1]), 1e-9)
    return ReliabilityCurve(
        silo=EVERY_SILO,
        retriever=SHOWN,
        source="validation",
        count=round(above[-1]),
        relevant=round(right[-1]),
        ece=after["ece"],
        floor=after["floor"],
        bins=[
            Bin(low=start, high=end, predicted=mean, observed=min(share, 1.0), count=round(size))
            for start, end, mean, share, size in zip(low, high, predicted, observed, hits, strict=True)
        ][::-1],
        thresholds=[
            ThresholdRow(
                threshold=least, precision=min(so_far / size, 1.0), recall=so_far / found, kept=round(size)
            )
            for least, size, so_far in zip(low, above, right, strict=True)
            if size > 0
        ][::-1],
    )


def save_curves(curves: Sequence[ReliabilityCurve], path: str | PathLike[str]) -> None:
    """Write curves to a file for the setting `models.reliability`."""
    with replacing(path) as stream:
        stream.write(Calibration(curves=list(curves)).model_dump_json(indent=1).encode())


def validation_curves(path: Path | None, silo: str) -> list[ReliabilityCurve]:
    """Read this silo's curves from a file that `save_curves` wrote; none if there is no file."""
    if path is None or not path.exists():
        return []
    try:
        calibration = Calibration.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise DataError("is not a file of reliability curves", file=path) from error
    return [curve for curve in calibration.curves if curve.silo == silo]
