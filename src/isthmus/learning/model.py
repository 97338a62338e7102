"""A search model: weights over the columns of a candidate, and the probability of a hit that is shown.

    margin = start + Σ weights·(column − centre)/scale                       a column that is missing adds 0
    z = open(u)·slope·bent(margin − mean) + between·mean + share·u(profile)
    logit p = start + curve(z)                                        in pieces between knots, falling in none
    p → base + likeness·(p − base)       drawn down to the base rate for a query unlike those that were judged

A query's profile is the shape of its list over all silos (`columns.PROFILE`): margins fall more slowly where
nothing stands out. u are the log-odds that a list is whole rather than one whose relevant hits were left out.
Hits of one list differ in probability as far as it looks whole, open(u) = 1/(1 + exp((gate − u)/width)): what
stands out where the relevant hits are missing stands out as much. The mean is that of the first ten margins.
Deviations from it are `bent`, since a hit that stands out twice as much is not twice as sure, and those above
it count `above` times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Self

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.errors import DataError
from isthmus.learning.columns import COLUMNS, GROUPS, MEAN, PROFILE, RISING
from isthmus.tables import Bundle

KINDS = ("baseline", "weight", "stack", "linear")
"""Of models, by their number of parameters."""
MOST_BYTES = 1 << 20
KNOTS = 5
"""Of z, where the curve to log-odds may bend."""
LARGEST = 1e12
"""The largest number of a model, and of one divided by a scale: margins of such are still numbers."""
MOST_COMMON = 3.0
"""Deviations below the mean idf of judged queries' words where unlike queries begin."""
_RISING, _IDF = np.isin(COLUMNS, RISING), PROFILE.index("idf")


@dataclass(frozen=True, eq=False)
class Weights:
    """A linear score of the columns."""

    centre: FloatArray
    scale: FloatArray
    weights: FloatArray
    start: float = 0.0

    def standardised(self, table: FloatArray) -> FloatArray:
        """(column − centre)/scale of every row; 0 where it is missing."""
        return standardised(table, self.centre, self.scale)

    def parts(self, table: FloatArray) -> FloatArray:
        """What every column adds to the margin, row by row."""
        return self.standardised(table) * self.weights

    def __call__(self, table: FloatArray) -> FloatArray:
        """The margin of every row."""
        return np.asarray(self.start + self.parts(table).sum(axis=1))


def standardised(values: FloatArray, centre: FloatArray, scale: FloatArray) -> FloatArray:
    """(value − centre)/scale; 0 where a value is not finite."""
    return np.where(np.isfinite(values), (values - centre) / scale, 0.0)


def bent(deviation: FloatArray, reach: float, above: float) -> FloatArray:
    """d/(1 + |d|/reach): about d where it is small, and never beyond the reach; above 0 so many times."""
    own = deviation / (1 + np.abs(deviation) / reach)
    return np.asarray(np.minimum(own, above * own))


def pieces(z: FloatArray, knots: FloatArray) -> FloatArray:
    """How much of the way from 0 to every z lies between two knots: (pieces, z)."""
    edges = np.concatenate(([-np.inf], knots, [np.inf]))[:, None]
    return np.asarray(np.clip(z, edges[:-1], edges[1:]) - np.clip(0.0, edges[:-1], edges[1:]))


@dataclass(frozen=True, eq=False)
class HitCalibration:
    """From margins and the query's profile to probabilities; fitted on hits that would be shown.

    The log-odds u that a list has something relevant come from its profile: `centre`, `scale`, `weights` and
    `bias`. Below `low` a query is unlike those that were judged, the more the more `spread` it is below.
    """

    slope: float
    """Within a list."""
    reach: float
    """Of what a hit stands out by, see `bent`."""
    between: float
    start: float
    above: float
    share: float
    """What u counts for."""
    base: float
    """The share of hits shown that are relevant."""
    bias: float
    low: float
    spread: float
    centre: FloatArray
    scale: FloatArray
    weights: FloatArray
    gate: float = -LARGEST
    """The u of lists whose hits differ half as much as they could."""
    width: float = 1.0
    knots: FloatArray = field(default_factory=lambda: np.arange(float(KNOTS)))
    slopes: FloatArray = field(default_factory=lambda: np.ones(KNOTS + 1))
    """Of the curve, piece by piece; 0 or more."""

    @property
    def rise(self) -> float:
        """By which log-odds rise with a margin in a list that is surely whole, on the whole."""
        return float(self.slopes.mean()) * self.slope

    def answerable(self, profiles: FloatArray) -> FloatArray:
        """u of every row of profiles."""
        return np.asarray(standardised(profiles, self.centre, self.scale) @ self.weights + self.bias)

    def likeness(self, profiles: FloatArray) -> FloatArray:
        """Between 0 and 1 for every row of profiles: how much like those of judged queries it is.

        Neither a list in which nothing stands out nor words far more common than theirs are like them.
        """
        below = np.maximum((self.low - self.answerable(profiles)) / self.spread, 0.0)
        rarity = standardised(profiles, self.centre, self.scale)[..., _IDF]
        common = np.maximum(-MOST_COMMON - rarity, 0.0)
        return np.asarray(np.exp(-0.5 * (below**2 + common**2)))

    def odds(self, margins: FloatArray, profiles: FloatArray) -> FloatArray:
        """logit p before it is drawn to the base rate; lowest where a margin is not finite."""
        z = self.evidence(margins, profiles)
        odds = self.start + self.slopes @ pieces(z.reshape(-1), self.knots)
        return np.asarray(np.where(np.isfinite(margins), odds.reshape(z.shape), -np.inf))

    def evidence(self, margins: FloatArray, profiles: FloatArray) -> FloatArray:
        """z of every margin."""
        from scipy.special import expit

        u, mean = self.answerable(profiles), profiles[..., MEAN]
        own = bent(np.clip(margins, -LARGEST, LARGEST) - mean, self.reach, self.above)
        within = self.slope * expit((u - self.gate) / self.width) * own
        return np.asarray(within + self.between * mean + self.share * u)

    def __call__(self, margins: FloatArray, profiles: FloatArray) -> FloatArray:
        """The probability of every margin; `profiles` has a row for each, or is one for all."""
        from scipy.special import expit

        probabilities = expit(self.odds(margins, profiles))
        drawn = self.base + self.likeness(profiles) * (probabilities - self.base)
        return np.asarray(np.minimum(probabilities, np.where(probabilities > self.base, drawn, 1.0)))


class SavedModel(Bundle):
    """A search model on disk or on the wire."""

    noun = "search model"
    version = 4
    most = MOST_BYTES


@dataclass(frozen=True, eq=False)
class SearchModel:
    """One of `KINDS`, with its calibration once hits have been judged.

    `encoder` is the fingerprint of the encoder whose cosines it reads; empty for none. Queries of fewer words
    than `least_words` are the baseline's: hardly any so short was judged.
    """

    kind: str
    score: Weights
    calibration: HitCalibration | None = None
    encoder: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    baseline: Self | None = None
    """What it replaces, calibrated on the same queries: for hits of silos that have not this model."""
    least_words: float = 0.0
    single: HitCalibration | None = None
    """Of the hits of one silo's own list: relevant ones are elsewhere more often."""
    silos: int = 1
    """Whose merged lists `calibration` is of."""

    def of_query(self, ln_words: float) -> Self:
        """The model for a query of so many words, by the logarithm that `columns.OF_QUERY` has of them."""
        short = self.baseline is not None and ln_words < np.log(max(self.least_words, 1e-9)) - 1e-9
        return self.baseline if self.baseline is not None and short else self

    def probabilities(
        self, margins: FloatArray, profile: FloatArray, silos: int | None = None
    ) -> FloatArray | None:
        """Of a query's hits, from its profile over so many silos, or all; None before anything was judged.

        Between one silo and all, log-odds are between those of one and of all.
        """
        from scipy.special import expit, logit

        if self.calibration is None:
            return None
        whole, missing = self.calibration(margins, profile), self._missing(silos)
        if self.single is None or not missing:
            return whole
        single = self.single(margins, profile)
        if missing == 1:
            return single
        return np.asarray(expit(missing * logit(single) + (1 - missing) * logit(whole)))

    def likeness(self, profile: FloatArray, silos: int | None = None) -> float:
        """How much like those of judged queries a query's list over so many silos is, between 0 and 1."""
        missing = self._missing(silos)
        lines = ((self.calibration, 1 - missing), (self.single, missing))
        return sum(share * float(line.likeness(profile)) if line else share for line, share in lines)

    def _missing(self, silos: int | None) -> float:
        """The share of silos that were not searched, of all but one."""
        if silos is None or self.silos < 2:
            return 0.0
        return min(max((self.silos - silos) / (self.silos - 1), 0.0), 1.0)

    def evidence(self, table: FloatArray) -> Mapping[str, FloatArray]:
        """What each retriever's columns add to the margin of every row."""
        parts = self.score.parts(table)
        return {name: parts[:, list(columns)].sum(axis=1) for name, columns in GROUPS.items()}

    def to_bytes(self) -> bytes:
        """The model as the bytes of its file."""
        return self._saved().to_bytes()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the model's file."""
        self._saved().write(path)

    def _saved(self) -> SavedModel:
        header: dict[str, Any] = {
            "columns": list(COLUMNS),
            "profile": list(PROFILE),
            "encoder": self.encoder,
            "about": dict(self.about),
            "least words": self.least_words,
        }
        arrays: dict[str, FloatArray] = {}
        for prefix, model in (("", self), ("baseline.", self.baseline)):
            if model is None:
                continue
            header |= {f"{prefix}kind": model.kind, f"{prefix}start": model.score.start}
            header |= {f"{prefix}silos": model.silos}
            arrays |= {f"{prefix}score.{name}": getattr(model.score, name) for name in _ARRAYS}
            for part, line in ((prefix, model.calibration), (f"{prefix}single.", model.single)):
                if line is not None:
                    header[f"{part}calibration"] = {name: getattr(line, name) for name in _REALS}
                    arrays |= {f"{part}profile.{name}": getattr(line, name) for name in _ARRAYS}
                    arrays |= {f"{part}{name}": getattr(line, name) for name in _CURVE}
        return SavedModel(header, arrays)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read it back; a DataError if it is not one of these columns."""
        return SavedModel.restore(path, cls._of)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What came over the wire; anything else is a ProtocolError."""
        return SavedModel.receive(data, cls._of)

    @classmethod
    def _of(cls, saved: SavedModel) -> Self:
        header = saved.header
        if header["columns"] != list(COLUMNS) or header["profile"] != list(PROFILE):
            raise DataError("was learned from other columns", cure="learn again")
        baseline = cls(**_parts(saved, "baseline.")) if "baseline.kind" in header else None
        about: dict[str, Any] = {"encoder": str(header["encoder"]), "about": dict(header["about"])}
        least_words = _real(header["least words"])
        return cls(**_parts(saved, ""), **about, baseline=baseline, least_words=least_words)


def _parts(saved: SavedModel, prefix: str) -> dict[str, Any]:
    """Kind, score and calibrations of a saved model, checked."""
    header, arrays = saved.header, saved.arrays
    if header[f"{prefix}kind"] not in KINDS:
        raise ValueError("a model of an unknown kind")
    score = Weights(start=_real(header[f"{prefix}start"]), **_columns(arrays, f"{prefix}score", len(COLUMNS)))
    if (score.weights[_RISING] < 0).any():
        raise ValueError("a model whose score falls where a document has more of the query's words")
    calibrated = {"calibration": _line(saved, prefix), "single": _line(saved, f"{prefix}single.")}
    silos = int(_real(header.get(f"{prefix}silos", 1)))
    return {"kind": str(header[f"{prefix}kind"]), "score": score, "silos": silos, **calibrated}


def _line(saved: SavedModel, part: str) -> HitCalibration | None:
    """One of a saved model's calibrations, checked."""
    header, arrays = saved.header, saved.arrays
    if f"{part}calibration" not in header:
        return None
    numbers: dict[str, Any] = {name: _real(header[f"{part}calibration"][name]) for name in _REALS}
    shares = [numbers[name] for name in ("base", "above")]
    if min(numbers["slope"], numbers["share"]) < 0 or not 0 <= min(shares) <= max(shares) <= 1:
        raise ValueError("a calibration that is none")
    if not min(numbers[name] for name in ("spread", "reach", "width")) >= 1 / LARGEST:
        raise ValueError("a calibration that is none")
    knots, slopes = (np.asarray(arrays[f"{part}{name}"], dtype=np.float64) for name in _CURVE)
    if (len(knots), len(slopes)) != (KNOTS, KNOTS + 1) or not (np.diff(knots) >= 0).all():
        raise ValueError("a curve that is none")
    if not (np.abs(knots) <= LARGEST).all() or not ((slopes >= 0) & (slopes <= LARGEST)).all():
        raise ValueError("a curve that falls where evidence rises")
    numbers |= {"knots": knots, "slopes": slopes, **_columns(arrays, f"{part}profile", len(PROFILE))}
    return HitCalibration(**numbers)


_ARRAYS, _CURVE = ("centre", "scale", "weights"), ("knots", "slopes")
_REALS = (
    *("slope", "reach", "between", "start", "above", "share", "base", "bias", "low", "spread"),
    *("gate", "width"),
)


def _columns(arrays: Mapping[str, Any], name: str, size: int) -> dict[str, FloatArray]:
    columns = {part: np.asarray(arrays[f"{name}.{part}"], dtype=np.float64) for part in _ARRAYS}
    if not all(values.shape == (size,) and np.isfinite(values).all() for values in columns.values()):
        raise ValueError("columns of another number")
    bounded = max(np.abs(values).max() for values in columns.values()) <= LARGEST
    if not bounded or columns["scale"].min() < 1 / LARGEST:
        raise ValueError("columns that no margin can be worked out from")
    return columns


def _real(number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= LARGEST:
        raise ValueError("a number that is none")
    return float(number)
