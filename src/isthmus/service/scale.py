"""One scale for the scores of two retrievers in all silos, from sums that silos add up, without judgements.

    silo     makes queries of its own documents (a title, or the beginning of the text), searches itself
             without the document, and sums the scores of the candidates, retriever by retriever
    broker   adds the sums of all silos with the same encoder and sends the total back
    silo     scores by the total's means and deviations: `scoring.HybridScorer`

Deviations are within queries, since only those order a list. BM25 enters as a share of the query's Σ idf; its
deviation depends little on the length of queries, so synthetic queries can stand for those of people.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from isthmus.arrays import FloatArray
from isthmus.asking import Silos
from isthmus.errors import ProtocolError, Refused
from isthmus.service.candidates import Snapshot
from isthmus.service.encoding import prevailing
from isthmus.service.http_client import HttpReply
from isthmus.service.scoring import bm25_shares
from isthmus.service.statistics import PATIENCE, Nodes, Talks, hand_out
from isthmus.service.stores import Change, DocumentStore
from isthmus.service.wire import LEAST_DEVIATION, ScoreScale, ScoreSums, SiloScores, Standard

if TYPE_CHECKING:
    from isthmus.learning import BaselineScale

QUERIES, WORDS, DEPTH = 64, 12, 100
"""Queries that a silo makes of its documents, most words of each, and candidates per retriever."""
LEAST_QUERIES = 10
"""Fewest queries: a silo with fewer gives no sums."""
MOST_SCORES = QUERIES * 2 * DEPTH
"""Most scores in the sums of one silo; a silo that claims more would have more than its share of weight."""
MOST_APART = 2.0
"""Factor by which one silo's deviation may differ from the median of silos' deviations."""
JSON = "application/json"

_log = logging.getLogger("isthmus.service")


def measure(silo: str, snapshot: Snapshot, store: DocumentStore) -> SiloScores:
    """Compute the silo's score sums over queries made of its own documents; empty sums if it has too few."""
    lists: dict[str, list[FloatArray]] = {"bm25": [], "dense": []}
    pretrained = snapshot.encoder.pretrained
    for change in store.spread(QUERIES):
        candidates = snapshot.find(_query(change), DEPTH)
        others = np.array([document != change.id for document in candidates.documents], dtype=bool)
        scores = {"bm25": bm25_shares(candidates)}
        if pretrained and "dense" in candidates.scores:
            scores["dense"] = candidates.scores["dense"]
        for name, values in scores.items():
            if (some := values[others & np.isfinite(values)]).size > 1:
                lists[name].append(np.clip(some, -1, 1))  # rounding may exceed 1 for equal texts
    sums = {
        name: _summed(each) if len(each) >= LEAST_QUERIES else ScoreSums() for name, each in lists.items()
    }
    encoder = snapshot.encoder.fingerprint if sums["dense"].count else ""
    return SiloScores(silo=silo, encoder=encoder, **sums)


def _query(change: Change) -> str:
    """Make a query of a document: its title, or the beginning of its text."""
    return " ".join((change.title.strip() or change.body[:1_000]).split()[:WORDS])


def _summed(lists: Sequence[FloatArray]) -> ScoreSums:
    """Sum up lists of scores, one list per query."""
    return ScoreSums(
        count=sum(map(len, lists)),
        total=float(sum(each.sum() for each in lists)),
        squares=float(sum(((each - each.mean()) ** 2).sum() for each in lists)),
    )


def common_scale(silos: Sequence[SiloScores]) -> ScoreScale | None:
    """Compute the scale from all silos' sums; None unless they agree on an encoder.

    Cosines are used of the silos with that encoder, BM25 shares of all.
    """
    encoder = prevailing((silo.encoder or "none", silo.dense.count) for silo in silos)
    if encoder in ("", "none"):
        return None
    dense = [silo.dense for silo in silos if silo.encoder == encoder]
    return ScoreScale(encoder=encoder, bm25=_standard([silo.bm25 for silo in silos]), dense=_standard(dense))


def _standard(sums: Sequence[ScoreSums]) -> Standard:
    """Compute mean and deviation over all silos. A silo's deviation is limited to within `MOST_APART` times
    the median of silos, so one of three or more silos cannot almost switch a retriever off."""
    total = reduce(add, sums)
    counts = np.array([each.count for each in sums if each.count], dtype=np.float64)
    deviations = np.sqrt([each.squares / each.count for each in sums if each.count])
    middle = float(np.median(deviations))
    limited = np.clip(deviations, middle / MOST_APART, middle * MOST_APART)
    deviation = float(np.sqrt(counts @ limited**2 / total.count))
    return Standard(mean=total.total / total.count, deviation=max(deviation, LEAST_DEVIATION))


def baseline_of(scale: ScoreScale | None) -> BaselineScale:
    """Return the baseline that learning must beat: the hybrid on this scale, or BM25 alone without one."""
    from isthmus.learning import BaselineScale

    if scale is None:
        return BaselineScale()
    bm25, dense = ((each.mean, each.deviation) for each in (scale.bm25, scale.dense))
    return BaselineScale(bm25, dense, scale.encoder)


class ScaleExchange:
    """Collects score sums by silo and hands back their scale; without a scale, silos score by BM25 alone."""

    def __init__(self, silos: Sequence[Talks]) -> None:
        self._silos, self._names = silos, tuple(silo.name for silo in silos)
        self._sums: dict[str, SiloScores] = {}
        self._holders: set[str] = set()
        self._refused: dict[str, str] = {}
        self._measuring: set[str] = set()
        self._scale: ScoreScale | None = None
        self.changed = False

    @property
    def scale(self) -> ScoreScale | None:
        """Scale of all silos; None until they have agreed on an encoder."""
        return self._scale

    @property
    def version(self) -> str:
        """Version of the scale; empty without one."""
        return "" if self._scale is None else self._scale.version

    @property
    def settled(self) -> bool:
        """Whether every silo has measured its scores, and every silo that gave sums has the scale."""
        return not self._measuring and (self._scale is None or self._holders >= set(self._sums))

    def remark(self, silo: str, scorer: str, version: str) -> str:
        """Return a remark on a silo that scored with this version of the scale; empty for the current
        version, and for scorers that use none."""
        if not self.version or version == self.version or scorer not in ("bm25", "hybrid"):
            return ""
        self._holders.discard(silo)
        return "scored on another scale than the rest"

    async def once(self) -> None:
        """Collect sums, add them up, and hand back the scale."""
        await self._collect()
        scale = common_scale(list(self._sums.values()))
        if scale is not None and scale != self._scale:
            self._scale, self.changed = scale, True
            self._holders.clear()
        if self._scale is not None:
            await self._hand_out(self._scale.model_dump_json().encode())

    async def _collect(self) -> None:
        def request(silo: Talks) -> Awaitable[HttpReply]:
            return silo.ask("GET", "/scale")

        nodes = Silos(self._names, Nodes(self._silos), PATIENCE, least=0)
        shows = "sums of its retrievers' scores for queries made of its documents"
        answers = await asyncio.to_thread(nodes.collect, request, self._read, shows=shows)
        for name, error in answers.failed.items():
            if isinstance(error, (ProtocolError, Refused)) and self._refused.get(name) != str(error):
                self._refused[name] = str(error)
                _log.warning("the score sums of %s are left out: %s", name, error)

    def _read(self, name: str, reply: HttpReply) -> None:
        self._measuring.discard(name)
        if reply.status == 503:
            self._measuring.add(name)
        if reply.status in (401, 403, 404):  # a silo may decline to share
            self._sums.pop(name, None)
        if reply.status != 200:
            return
        try:
            sums = SiloScores.model_validate_json(reply.body)
        except ValidationError:
            raise ProtocolError("not score sums of the documented form") from None
        if sums.silo != name:
            raise ProtocolError("score sums of another silo")
        if max(sums.bm25.count, sums.dense.count) > MOST_SCORES:
            raise ProtocolError(f"score sums over more than {MOST_SCORES:,} scores")
        if not sums.bm25.count or bool(sums.dense.count) != bool(sums.encoder):
            self._sums.pop(name, None)  # too few documents, or none any more
            return
        self._refused.pop(name, None)
        self._sums[name] = sums

    async def _hand_out(self, content: bytes) -> None:
        """Send the scale to every silo that does not have it."""
        missing = tuple(name for name in self._names if name not in self._holders)

        self._holders |= await hand_out(self._silos, missing, "/scale", content, JSON)
