"""A search model: weights over the columns of a candidate, and the probability of a displayed hit.

    margin = start + Σ weights·(column − centre)/scale                       a column that is missing adds 0
    z = open(u)·slope·bent(margin − mean) + between·mean + share·u(profile)
    open(u) = 1/(1 + exp((gate − u)/width))
    logit p = start + curve(z)                                        in pieces between knots, falling in none
    p → base + likeness·(p − base)       drawn down to the base rate for a query unlike those that were judged

A query's profile is the shape of its list over all silos (`columns.PROFILE`): margins fall more slowly if
nothing stands out. u is the log-odds that a list is whole rather than one whose relevant hits were left out.
Hits of one list differ in probability only to the extent open(u) that it looks whole, because in a list whose
relevant hits are missing other hits stand out as much. The mean is that of the first ten margins. Deviations
from it are `bent`, since a hit that stands out twice as much is not twice as sure, and those above it are
multiplied by `above`.
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
"""Kinds of models, by their number of parameters."""
MOST_BYTES = 1 << 20
KNOTS = 5
"""Number of values of z at which the curve to log-odds may bend."""
LARGEST = 1e12
"""Largest absolute number in a model, and largest reciprocal of a scale: margins are then finite."""
SURE = 1e-15
"""Probabilities below this, or above one minus this, count as this sure when log-odds are mixed."""
MOST_COMMON = 3.0
"""Deviations below the mean idf of judged queries' words at which unlike queries begin."""
_RISING, _IDF = np.isin(COLUMNS, RISING), PROFILE.index("idf")


@dataclass(frozen=True, eq=False)
class Weights:
    """A linear score of the columns."""

    centre: FloatArray
    scale: FloatArray
    weights: FloatArray
    start: float = 0.0

    def standardised(self, table: FloatArray) -> FloatArray:
        """Return (column − centre)/scale of every row; 0 where a column is missing."""
        return standardised(table, self.centre, self.scale)

    def parts(self, table: FloatArray) -> FloatArray:
        """Return the contribution of every column to the margin, row by row."""
        return self.standardised(table) * self.weights

    def __call__(self, table: FloatArray) -> FloatArray:
        """Return the margin of every row."""
        return np.asarray(self.start + self.parts(table).sum(axis=1))


def standardised(values: FloatArray, centre: FloatArray, scale: FloatArray) -> FloatArray:
    """Return (value − centre)/scale; 0 where a value is not finite."""
    return np.where(np.isfinite(values), (values - centre) / scale, 0.0)


def bent(deviation: FloatArray, reach: float, above: float) -> FloatArray:
    """Return d/(1 + |d|/reach), about d if small and never beyond the reach; times `above` if positive."""
    own = deviation / (1 + np.abs(deviation) / reach)
    return np.asarray(np.minimum(own, above * own))


def pieces(z: FloatArray, knots: FloatArray) -> FloatArray:
    """Return the part of the way from 0 to every z that lies between two knots: (pieces, z)."""
    edges = np.concatenate(([-np.inf], knots, [np.inf]))[:, None]
    return np.asarray(np.clip(z, edges[:-1], edges[1:]) - np.clip(0.0, edges[:-1], edges[1:]))


@dataclass(frozen=True, eq=False)
class HitCalibration:
    """Maps margins and the query's profile to probabilities; fitted on hits that would be shown.

    The log-odds u that a list has relevant hits follow from its profile: `centre`, `scale`, `weights` and
    `bias`. Below `low` a query is unlike those that were judged, the more so the further u is below it in
    units of `spread`.
    """

    slope: float
    """Slope within a list."""
    reach: float
    """Reach of a hit's deviation, see `bent`."""
    between: float
    start: float
    above: float
    share: float
    """Weight of u."""
    base: float
    """Share of relevant hits among those shown."""
    bias: float
    low: float
    spread: float
    centre: FloatArray
    scale: FloatArray
    weights: FloatArray
    gate: float = -LARGEST
    """u of lists whose hits differ half as much as they could."""
    width: float = 1.0
    knots: FloatArray = field(default_factory=lambda: np.arange(float(KNOTS)))
    slopes: FloatArray = field(default_factory=lambda: np.ones(KNOTS + 1))
    """Slopes of the curve, piece by piece; 0 or more."""

    @property
    def rise(self) -> float:
        """Average rise of log-odds with the margin, in a list that is surely whole."""
        return float(self.slopes.mean()) * self.slope

    def answerable(self, profiles: FloatArray) -> FloatArray:
        """Return u of every row of profiles."""
        return np.asarray(standardised(profiles, self.centre, self.scale) @ self.weights + self.bias)

    def likeness(self, profiles: FloatArray) -> FloatArray:
        """Return how similar every row of profiles is to those of judged queries, between 0 and 1.

        It is low for a list in which nothing stands out, and for words far more common than those of judged
        queries.
        """
        below = np.maximum((self.low - self.answerable(profiles)) / self.spread, 0.0)
        rarity = standardised(profiles, self.centre, self.scale)[..., _IDF]
        common = np.maximum(-MOST_COMMON - rarity, 0.0)
        return np.asarray(np.exp(-0.5 * (below**2 + common**2)))

    def odds(self, margins: FloatArray, profiles: FloatArray) -> FloatArray:
        """Return logit p before it is drawn to the base rate; −inf where a margin is not finite."""
        z = self.evidence(margins, profiles)
        odds = self.start + self.slopes @ pieces(z.reshape(-1), self.knots)
        return np.asarray(np.where(np.isfinite(margins), odds.reshape(z.shape), -np.inf))

    def evidence(self, margins: FloatArray, profiles: FloatArray) -> FloatArray:
        """Return z of every margin."""
        from scipy.special import expit

        u, mean = self.answerable(profiles), profiles[..., MEAN]
        own = bent(np.clip(margins, -LARGEST, LARGEST) - mean, self.reach, self.above)
        within = self.slope * expit((u - self.gate) / self.width) * own
        return np.asarray(within + self.between * mean + self.share * u)

    def __call__(self, margins: FloatArray, profiles: FloatArray) -> FloatArray:
        """Return the probability of every margin; `profiles` has a row for each, or one for all."""
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
    """A model of one of `KINDS`, with its calibration once hits have been judged.

    `encoder` is the fingerprint of the encoder whose cosines it reads; empty for none. Queries of fewer words
    than `least_words` are left to the baseline: hardly any so short was judged.
    """

    kind: str
    score: Weights
    calibration: HitCalibration | None = None
    encoder: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    baseline: Self | None = None
    """The replaced baseline, calibrated on the same queries, for hits of silos without this model."""
    least_words: float = 0.0
    single: HitCalibration | None = None
    """Calibration for one silo's own list: its relevant hits are more often in other silos."""
    silos: int = 1
    """Number of silos with lists merged for `calibration`."""

    def of_query(self, ln_words: float) -> Self:
        """Return the model for a query, by the logarithm of its number of words in `columns.OF_QUERY`."""
        short = self.baseline is not None and ln_words < np.log(max(self.least_words, 1e-9)) - 1e-9
        return self.baseline if self.baseline is not None and short else self

    def probabilities(
        self, margins: FloatArray, profile: FloatArray, silos: int | None = None
    ) -> FloatArray | None:
        """Return the probabilities of a query's hits, from its profile over so many silos, by default all;
        None before anything was judged.

        Between one silo and all, log-odds are interpolated between those of one and of all.
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
        of_one, of_all = (logit(np.clip(each, SURE, 1 - SURE)) for each in (single, whole))
        return np.asarray(expit(missing * of_one + (1 - missing) * of_all))

    def likeness(self, profile: FloatArray, silos: int | None = None) -> float:
        """Return the similarity (0 to 1) of a query's list over so many silos to those of judged queries."""
        missing = self._missing(silos)
        lines = ((self.calibration, 1 - missing), (self.single, missing))
        return sum(share * float(line.likeness(profile)) if line else share for line, share in lines)

    def _missing(self, silos: int | None) -> float:
        """Return the share of silos that were not searched, of all but one."""
        if silos is None or self.silos < 2:
            return 0.0
        return min(max((self.silos - silos) / (self.silos - 1), 0.0), 1.0)

    def evidence(self, table: FloatArray) -> Mapping[str, FloatArray]:
        """Return the contribution of each retriever's columns to the margin of every row."""
        parts = self.score.parts(table)
        return {name: parts[:, list(columns)].sum(axis=1) for name, columns in GROUPS.items()}

    def to_bytes(self) -> bytes:
        """Serialise the model."""
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
        """Read a model's file; DataError if it was learned from other columns."""
        return SavedModel.restore(path, cls._of)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a model from the network; ProtocolError if it is invalid."""
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
    """Return kind, score and calibrations of a saved model; ValueError if they are invalid."""
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
    """Return one of a saved model's calibrations, None if it has none; ValueError if it is invalid."""
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
    if (knots.shape, slopes.shape) != ((KNOTS,), (KNOTS + 1,)) or not (np.diff(knots) >= 0).all():
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
