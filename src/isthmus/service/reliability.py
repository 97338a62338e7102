"""How honest a silo's probabilities are, for the Calibration view: from validation, and from feedback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from isthmus.errors import DataError
from isthmus.evaluation import reliability
from isthmus.randomness import Streams
from isthmus.service.stores import Judgement
from isthmus.service.wire import Bin, Calibration, Reliability, Threshold
from isthmus.tables.files import replacing
from isthmus.tables.ids import FloatArray

SHOWN = "shown"
"""The name of the probabilities that people see, beside those of single retrievers."""
BINS = 10
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))
DRAWS = 100


def reliability_curve(
    probabilities: ArrayLike,
    relevant: ArrayLike,
    *,
    silo: str,
    retriever: str = SHOWN,
    source: Literal["validation", "feedback"] = "validation",
) -> Reliability:
    """One curve, with what thresholds keep and the error that a perfect model would show at this size."""
    chance = np.asarray(probabilities, dtype=np.float64)
    truth = np.asarray(relevant, dtype=np.float64)
    found = reliability(chance, truth, bins=BINS)
    full = np.flatnonzero(found.count)
    bins = [
        Bin(
            low=float(found.edges[at]),
            high=float(found.edges[at + 1]),
            predicted=_share(found.promised[at], found.count[at]),
            observed=_share(found.came_true[at], found.count[at]),
            count=int(found.count[at]),
        )
        for at in full.tolist()
    ]
    return Reliability(
        silo=silo,
        retriever=retriever,
        source=source,
        count=len(chance),
        relevant=int(truth.sum()),
        ece=found.ece,
        floor=sampling_floor(chance),
        bins=bins,
        thresholds=_thresholds(chance, truth),
    )


def sampling_floor(chance: FloatArray) -> float:
    """The mean ECE of outcomes drawn from the probabilities themselves."""
    draws = Streams(0)("floor").random((DRAWS, len(chance))) < chance
    return float(np.mean([reliability(chance, row, bins=BINS).ece for row in draws]))


def _share(part: float, whole: float) -> float:
    return float(np.clip(part / whole, 0.0, 1.0))


def _thresholds(chance: FloatArray, truth: FloatArray) -> list[Threshold]:
    from isthmus.calibration import ThresholdCurve

    curve = ThresholdCurve.of(chance, truth)
    told = []
    for wanted in THRESHOLDS:
        kept = np.flatnonzero(curve.thresholds >= wanted)
        if len(kept):
            at = int(kept[-1])
            told.append(
                Threshold(
                    threshold=wanted,
                    precision=_share(curve.relevant[at], curve.kept[at]),
                    recall=_share(curve.relevant[at], max(curve.total, 1.0)),
                    kept=int(curve.kept[at]),
                )
            )
    return told


def curves_of(silo: str, judgements: Sequence[Judgement]) -> list[Reliability]:
    """By what people said: of the probabilities shown to them, and of every retriever's."""
    pairs: dict[str, list[tuple[float, bool]]] = {}
    for said in judgements:
        named = {SHOWN: said.probability, **said.evidence}
        for retriever, chance in named.items():
            if chance is not None:
                pairs.setdefault(retriever, []).append((chance, said.relevant))
    return [
        reliability_curve(*zip(*held, strict=True), silo=silo, retriever=name, source="feedback")
        for name, held in pairs.items()
    ]


def save_curves(curves: Sequence[Reliability], path: str | PathLike[str]) -> None:
    """Write curves for `models.reliability`."""
    with replacing(path) as stream:
        stream.write(Calibration(curves=list(curves)).model_dump_json(indent=1).encode())


def validation_curves(path: Path | None, silo: str) -> list[Reliability]:
    """The curves of this silo in a file that `save_curves` wrote; none while there is no file."""
    if path is None or not path.exists():
        return []
    try:
        told = Calibration.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise DataError("is not a file of reliability curves", file=path) from error
    return [curve for curve in told.curves if curve.silo == silo]
