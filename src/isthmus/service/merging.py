"""What a broker does with the model in use: it sends it to silos that lack it, and puts all hits on one
scale.

A silo that searches with the model sends margins, and how well it covers the query; the broker takes the
query's profile over all silos and computes the probabilities. Hits of a silo without the model, or with
another, get theirs from the baseline's calibration, which every model carries: on the same scale, so that
they are not just put last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.errors import IsthmusError
from isthmus.learning import COLUMNS, LARGEST, LIST, OF_QUERY, SearchModel, profile_of
from isthmus.service import wire
from isthmus.service.columns import OF_PROFILE, START, log_odds
from isthmus.service.scoring import evidence
from isthmus.service.statistics import Talks, hand_out, take_back
from isthmus.service.versions import NONE, ModelVersions

UNLIKE = 0.5
"""Likeness to judged queries below which an answer says that the query is unlike them."""
LOOK_EVERY = 1.0
"""Seconds between two checks which version is in use."""
_RETRIEVERS = [COLUMNS.index(name) for name in ("bm25", "dense")]
_LN_WORDS = OF_QUERY.index("ln words")

_log = logging.getLogger("isthmus.service")


class ModelExchange:
    """The model in use, and the silos that have it; see `statistics.SumExchange`."""

    def __init__(self, silos: Sequence[Talks], versions: ModelVersions) -> None:
        self._silos, self.versions = silos, versions
        self._names = tuple(silo.name for silo in silos)
        self._holders: set[str] = set()
        self._content = b""
        self.model: SearchModel | None = None
        self.version = ""
        self.by_silo: dict[str, str] = {}
        """The version that each silo last searched with."""
        self.changed = False
        self._looked = 0.0
        self.reload()

    @property
    def settled(self) -> bool:
        """Whether every silo has been handed the model in use, or has given it up if none is to be used."""
        return not self.version or self._holders >= set(self._names)

    def refresh(self) -> None:
        """Check whether another process has put another version in use, once in `LOOK_EVERY` seconds."""
        if time.monotonic() - self._looked > LOOK_EVERY:
            self.reload()

    def reload(self) -> None:
        """Load the version that is in use now; if it cannot be read, nothing changes."""
        self._looked = time.monotonic()
        version = self.versions.current
        if version == self.version:
            return
        try:
            content = b"" if version in ("", NONE) else self.versions.model(version)
            self.model = SearchModel.from_bytes(content) if content else None
        except IsthmusError as error:
            _log.warning("the version %s of the model cannot be used: %s", version, error)
            return
        self.version, self._content, self.changed = version, content, True
        self._holders.clear()

    def remark(self, silo: str, answer: wire.NodeAnswer) -> str:
        """Return a remark on a silo that searched without the model in use, to which it is then sent again;
        else ""."""
        if answer.model != self.by_silo.get(silo, "") and answer.model == self.version:
            _log.info("%s searches with the model %s", silo, self.version)
        self.by_silo[silo] = answer.model
        if self.model is None or answer.model == self.version or not is_merged(answer):
            return ""
        if silo in self._holders:
            _log.warning("%s has not the current model %s, and is sent it again", silo, self.version)
        self._holders.discard(silo)
        return "searched without the current model, which it is being sent"

    def lacking(self, silo: str, version: str) -> str:
        """Return a remark on a silo that states another version than the one in use, which it is then sent;
        else ""."""
        self.by_silo[silo] = version
        if self.model is None or version == self.version:
            return ""
        self._holders.discard(silo)
        return "has not the current model, which it is being sent"

    def lackers(self) -> dict[tuple[str, ...], float]:
        """Return, as a metric, 1 for every silo that last searched without the model in use, and 0 for the
        others."""
        used = self.version if self.model is not None else None
        return {(silo,): float(used is not None and has != used) for silo, has in self.by_silo.items()}

    async def once(self) -> None:
        """Send the model in use to every silo that does not have it; if none is in use, have silos give
        theirs up."""
        self.reload()
        missing = [name for name in self._names if name not in self._holders]
        if not self.version or not missing:
            return
        if self._content:
            accepted = await hand_out(self._silos, missing, "/learning", self._content, wire.BUNDLE_TYPE)
        else:
            accepted = await take_back(self._silos, missing, "/learning")
        self._holders |= accepted


def is_merged(answer: wire.NodeAnswer) -> bool:
    """Whether a silo's hits can be put on the model's scale; those of its own ranker or fuser cannot."""
    return answer.scorer in ("learned", "hybrid", "bm25")


@dataclass(frozen=True, eq=False)
class Merger:
    """The model in use, for the hits of one query. `profile` is the query's profile over the silos with the
    model, `fallback` its baseline's over the silos without. `used` is the model, or its baseline for a
    query that is too short for the model."""

    model: SearchModel
    used: SearchModel
    version: str
    profile: FloatArray
    fallback: FloatArray
    silos: int
    """Number of silos whose lists make up the profile; relevant hits may be in others."""
    answered: int

    @classmethod
    def of(cls, model: SearchModel, version: str, answers: Mapping[str, wire.NodeAnswer]) -> Merger:
        """Compute the profiles from the silos' answers."""
        of_query = np.zeros(len(OF_QUERY))
        for answer in answers.values():
            if len(answer.of_query) == len(OF_QUERY):
                of_query = np.maximum(of_query, answer.of_query)
        current = [answer for answer in answers.values() if answer.model == version]
        others = [answer for answer in answers.values() if answer.retrieved]
        lists = [np.sort(answer.margins)[::-1] for answer in current]
        lower = [np.sort(_baseline_margins(model, answer)[:LIST])[::-1] for answer in others]
        none = [np.empty(0)]
        own, fallback = (profile_of(margins or none, of_query) for margins in (lists, lower))
        used = model.of_query(of_query[_LN_WORDS])
        return cls(model, used, version, own, fallback, len(current), len(answers))

    @property
    def unlike(self) -> bool:
        """Whether the query is unlike all judged ones."""
        return self.used.likeness(self.profile, self.silos) < UNLIKE

    def overrated(self, silos: int) -> bool:
        """Whether hits have too high probabilities because fewer than `silos` have answered, and the model is
        of an earlier release, which learned only from the lists of all silos together."""
        return self.answered < silos and self.used.calibration is not None and self.used.single is None

    def hits(self, answer: wire.NodeAnswer) -> list[wire.Hit]:
        """Return a silo's hits with probabilities on the scale of all silos, or unchanged if they cannot be
        put on it."""
        if not answer.hits or not is_merged(answer):
            return answer.hits
        if answer.model == self.version:
            margins = np.clip([hit.score for hit in answer.hits], -LARGEST, LARGEST)
            return self._rated(answer.hits, self.used.probabilities(margins, self.profile, self.silos))
        baseline = self.model.baseline
        if baseline is None or len(answer.retrieved) < len(answer.hits):
            return answer.hits
        margins = _baseline_margins(self.model, answer)[: len(answer.hits)]
        return self._rated(answer.hits, baseline.probabilities(margins, self.fallback, self.answered))

    def _rated(self, hits: list[wire.Hit], probabilities: FloatArray | None) -> list[wire.Hit]:
        if probabilities is None:
            return hits
        rated = zip(hits, np.clip(probabilities, 0.0, 1.0).tolist(), strict=True)
        return [hit.model_copy(update={"probability": p, "explanation": _mended(hit, p)}) for hit, p in rated]


def _baseline_margins(model: SearchModel, answer: wire.NodeAnswer) -> FloatArray:
    """Return the baseline's margins of a silo's best hits, from its retrievers' scores."""
    table = np.full((len(answer.retrieved), len(COLUMNS)), np.nan)
    table[:, _RETRIEVERS] = [
        [np.nan if value is None else value for value in pair] for pair in answer.retrieved
    ]
    return np.empty(0) if model.baseline is None else model.baseline.score(table)


def _mended(hit: wire.Hit, probability: float) -> list[wire.Evidence] | None:
    """Return the explanation of a hit, adjusted to add up to another probability: the difference goes to the
    query's profile."""
    if hit.explanation is None:
        return None
    parts = [part for part in hit.explanation if part.retriever != OF_PROFILE]
    if not any(part.retriever == START for part in parts):
        parts.append(evidence(START, None, None, None, 0.0))
    rest = log_odds(probability) - sum(part.contribution for part in parts)
    if not np.isfinite(rest):  # the silo's numbers add up to none
        return None
    return [*parts, evidence(OF_PROFILE, None, None, None, rest)]
