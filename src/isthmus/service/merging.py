"""What a broker does with the model in use: silos that lack it get it, and all hits get one probability.

A silo that searches with the model sends margins, and how well it covers the query; the broker takes the
query's profile over all silos and works out the probabilities. A hit of a silo without the model, or with
another, stands by the baseline's calibration, which every model carries: on the same scale, never last.
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
"""The likeness to judged queries below which an answer says so."""
LOOK_EVERY = 1.0
"""Seconds between two looks at which version is in use."""
_RETRIEVERS = [COLUMNS.index(name) for name in ("bm25", "dense")]
_LN_WORDS = OF_QUERY.index("ln words")

_log = logging.getLogger("isthmus.service")


class ModelExchange:
    """The model in use, and who holds it; see `statistics.SumExchange`."""

    def __init__(self, silos: Sequence[Talks], versions: ModelVersions) -> None:
        self._silos, self.versions = silos, versions
        self._names = tuple(silo.name for silo in silos)
        self._holders: set[str] = set()
        self._content = b""
        self.model: SearchModel | None = None
        self.version = ""
        self.by_silo: dict[str, str] = {}
        """The version that each silo has searched with last."""
        self.changed = False
        self._looked = 0.0
        self.reload()

    @property
    def settled(self) -> bool:
        """Whether every silo has the model, or none where none is used."""
        return not self.version or self._holders >= set(self._names)

    def refresh(self) -> None:
        """Look whether another process has put another version in use, once in `LOOK_EVERY` seconds."""
        if time.monotonic() - self._looked > LOOK_EVERY:
            self.reload()

    def reload(self) -> None:
        """Take the version that is in use now; one that cannot be read leaves things as they are."""
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
        """A remark on a silo that has searched without the model in use; empty for one that has."""
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
        """A remark on a silo that says it has this version; empty where it is the one in use."""
        self.by_silo[silo] = version
        if self.model is None or version == self.version:
            return ""
        self._holders.discard(silo)
        return "has not the current model, which it is being sent"

    def lackers(self) -> dict[tuple[str, ...], float]:
        """1 for every silo that has searched without the model in use, as a metric; else 0."""
        used = self.version if self.model is not None else None
        return {(silo,): float(used is not None and has != used) for silo, has in self.by_silo.items()}

    async def once(self) -> None:
        """Hand the model in use to every silo that does not have it."""
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
    """Whether a silo's hits can be put on the scale of the model: not those of its own ranker or fuser."""
    return answer.scorer in ("learned", "hybrid", "bm25")


@dataclass(frozen=True, eq=False)
class Merger:
    """The model in use, for the hits of one query: its profile over all silos, and its baseline's over those
    that have not the model. `used` is the model, or its baseline for a query that is too short for it."""

    model: SearchModel
    used: SearchModel
    version: str
    profile: FloatArray
    fallback: FloatArray
    silos: int
    """Whose lists the profile is of: relevant hits may be in others."""
    answered: int

    @classmethod
    def of(cls, model: SearchModel, version: str, answers: Mapping[str, wire.NodeAnswer]) -> Merger:
        """From what silos say of the query."""
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
        """Whether no judged query was like this one."""
        return self.used.likeness(self.profile, self.silos) < UNLIKE

    def overrated(self, silos: int) -> bool:
        """Whether hits are more probable than they should be, as fewer of so many silos have answered: the
        model is of a release that learned from all silos' lists alone."""
        return self.answered < silos and self.used.calibration is not None and self.used.single is None

    def hits(self, answer: wire.NodeAnswer) -> list[wire.Hit]:
        """A silo's hits with the probabilities of all silos' scale; as they are where they have no place
        there."""
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
    """The baseline's margins of a silo's best hits, from its retrievers' scores."""
    table = np.full((len(answer.retrieved), len(COLUMNS)), np.nan)
    table[:, _RETRIEVERS] = [
        [np.nan if value is None else value for value in pair] for pair in answer.retrieved
    ]
    return np.empty(0) if model.baseline is None else model.baseline.score(table)


def _mended(hit: wire.Hit, probability: float) -> list[wire.Evidence] | None:
    """The explanation of a hit, made to add up to another probability: the query's profile is the rest."""
    if hit.explanation is None:
        return None
    parts = [part for part in hit.explanation if part.retriever != OF_PROFILE]
    if not any(part.retriever == START for part in parts):
        parts.append(evidence(START, None, None, None, 0.0))
    rest = log_odds(probability) - sum(part.contribution for part in parts)
    return [*parts, evidence(OF_PROFILE, None, None, None, rest)]
