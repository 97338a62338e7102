"""From a query to hits with probabilities: candidates, then a scorer, then the fields that the peer may see.

    Bm25Scorer     BM25 alone; with shared statistics, all silos rank as one central index; no probability
    HybridScorer   BM25 and an encoder that silos agree on, equal shares, nothing learned; no probability
    ModelScorer    what the silos have learned together (`isthmus learn`), probabilities included
    FuserScorer    a fuser (`isthmus fuse --save`) joins the retrievers' lists
    RankerScorer   a ranker (`isthmus train`) reads features of every candidate

The silo's own calibrator, if it has one, turns the scores of the last two into probabilities.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.encoders import CrossEncoder, Span, load_cross_encoder
from isthmus.engines import STOP
from isthmus.errors import DataError
from isthmus.features import NAMES
from isthmus.languages import tokeniser_of
from isthmus.learning import LIST, SearchModel
from isthmus.retrieval import FIRST
from isthmus.service.candidates import QueryCandidates, Snapshot
from isthmus.service.columns import ModelScorer, query_columns
from isthmus.service.index import Index
from isthmus.service.scoring import (
    Bm25Scorer,
    HybridScorer,
    Scored,
    Scorer,
    best_first,
    bm25_shares,
    evidence,
    finite,
    raw_score,
)
from isthmus.service.settings import Models
from isthmus.service.stores import DocumentStore, Draft
from isthmus.service.wire import Evidence, Hit, NodeAnswer, ScoreScale, Search
from isthmus.tables import Letor, Run
from isthmus.text import STOP_WORDS

if TYPE_CHECKING:
    from isthmus.calibration import Calibrator
    from isthmus.fusion import Fuser
    from isthmus.rankers import Ranker

FEATURES = (*NAMES, "text.BM25", "dense.cosine")
"""What a ranker reads, in the order of its columns."""
RETRIEVERS = ("bm25", "dense")
CROSS = "cross"
"""What a cross-encoder's list is called, where a fuser joins it."""
LONGEST_SNIPPET = 240
READ_FOR_SNIPPET = 20_000
_QUERY = "q"
_WORD = re.compile(r"\w+")
_SURE = 1e-9
_ACCENTS = {signs[0]: f"[{signs}]" for signs in ("aàáâãäå", "cç", "eèéêë", "iìíîï", "nñ", "oòóôõö", "uùúûü")}


@dataclass(frozen=True, eq=False)
class FuserScorer:
    """A fitted fuser over the retrievers it was fitted on."""

    name: ClassVar[str] = "fuser"
    comparable: ClassVar[bool] = False

    fuser: Fuser
    calibrator: Calibrator | None = None
    cross: CrossEncoder | None = None
    """Of a fuser that joins its list too."""

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """The fuser's scores and probabilities; or the calibrator's."""
        run = self.fuser.fuse(_runs(candidates, self.fuser.retrievers_))
        order = _places(candidates, run)
        scores = np.full(len(candidates), -np.inf)
        scores[order] = run.scores
        fused_probabilities = run.probabilities
        if self.calibrator is not None:
            fused_probabilities = _calibrated(self.calibrator, run.scores)
        if fused_probabilities is None:
            return Scored(order, scores, None)
        probabilities = np.zeros(len(candidates))
        probabilities[order] = fused_probabilities
        return Scored(order, scores, probabilities)

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """Retriever by retriever, as the fuser accounts for its score."""
        if not len(scored.order):
            return []
        return [
            [
                evidence(part.retriever, part.score, part.probability, part.weight, part.contribution)
                for part in explained.parts
            ]
            for explained in self.fuser.explain(
                _runs(candidates, self.fuser.retrievers_), _QUERY, depth=depth
            )
        ]


@dataclass(frozen=True, eq=False)
class RankerScorer:
    """A ranker over the candidates' features."""

    name: ClassVar[str] = "ranker"
    comparable: ClassVar[bool] = False

    ranker: Ranker
    width: int
    calibrator: Calibrator | None = None

    @classmethod
    def of(cls, ranker: Ranker, calibrator: Calibrator | None) -> RankerScorer:
        """A ranker of the sixteen features, or of those and the retrievers' scores."""
        for width in (len(FEATURES), len(NAMES)):
            try:
                ranker.score(_letor(np.zeros((1, width))))
            except (DataError, ValueError):
                continue
            return cls(ranker, width, calibrator)
        raise DataError(
            f"the ranker does not take the {len(NAMES)} or {len(FEATURES)} features of a node",
            cure="train it on rows that a node or `isthmus.features` made",
        )

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """The ranker's scores; probabilities if the silo has a calibrator."""
        if not len(candidates):
            return Scored(np.empty(0, np.int64), np.empty(0), None)
        scores, probabilities = self._scored(snapshot.features(candidates))
        return Scored(best_first(candidates, scores), scores, probabilities)

    def _scored(self, table: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        scores = np.asarray(self.ranker.score(_letor(table[:, : self.width])), dtype=np.float64)
        return scores, None if self.calibrator is None else _calibrated(self.calibrator, scores)

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """What each retriever's features add to the log-odds (or score) of a candidate that has neither's.

        Without features means at the lowest value that any candidate has. A retriever's share is the mean of
        what its features add first and what they add last (Shapley's value), so that shares and the start,
        which all candidates have in common, make up the whole.
        """
        if not len(candidates):
            return []
        table = snapshot.features(candidates)
        groups = {"bm25": slice(0, len(NAMES) + 1), "dense": slice(len(NAMES) + 1, None)}
        bare = np.broadcast_to(table.min(axis=0), table.shape)
        whole, start = self._margin(table), self._margin(bare)
        added = {}
        for name, columns in groups.items():
            alone, without = bare.copy(), table.copy()
            alone[:, columns], without[:, columns] = table[:, columns], bare[:, columns]
            added[name] = (whole - self._margin(without) + self._margin(alone) - start) / 2
        return [
            [
                evidence(name, raw_score(candidates, name, at), None, None, float(added[name][at]))
                for name in groups
                if name in candidates.scores
            ]
            for at in scored.order[:depth].tolist()
        ]

    def _margin(self, table: FloatArray) -> FloatArray:
        scores, probabilities = self._scored(table)
        if probabilities is None:
            return scores
        sure = np.clip(probabilities, _SURE, 1 - _SURE)
        return np.asarray(np.log(sure) - np.log1p(-sure))


def load_scorer(
    models: Models, learned: SearchModel | None = None, scale: ScoreScale | None = None
) -> Scorer:
    """The scorer of a silo's model files; where it names none, of what it has learned with others; without
    either the hybrid on the scale of all silos, or BM25 alone."""
    calibrator = None
    if models.calibrator is not None:
        from isthmus.calibration import load_calibrator

        calibrator = load_calibrator(models.calibrator)
    if models.ranker is not None:
        from isthmus.rankers import load_ranker

        return RankerScorer.of(load_ranker(models.ranker), calibrator)
    if models.fuser is not None:
        from isthmus.fusion import load_fuser

        fuser = load_fuser(models.fuser)
        available = (*RETRIEVERS, CROSS) if models.reranker else RETRIEVERS
        if set(fuser.retrievers_) not in (set(RETRIEVERS), set(available)):
            cure = f"a node has {', '.join(RETRIEVERS)}, and {CROSS} with models.reranker"
            raise DataError(f"joins {', '.join(fuser.retrievers_)}", file=models.fuser, cure=cure)
        cross = load_cross_encoder(models.reranker) if CROSS in fuser.retrievers_ else None
        return FuserScorer(fuser, calibrator, cross)
    if learned is not None:
        return ModelScorer(learned)
    return Bm25Scorer() if scale is None else HybridScorer(scale)


def _calibrated(calibrator: Calibrator, scores: FloatArray) -> FloatArray:
    if not len(scores):
        return np.empty(0)
    groups = np.zeros(len(scores), dtype=np.int64) if calibrator.needs_lists else None
    return np.clip(np.asarray(calibrator.probabilities(scores, groups=groups)), 0.0, 1.0)


def _letor(table: NDArray[np.floating]) -> Letor:
    rows = len(table)
    features = np.asarray(table, dtype=np.float32)
    return Letor((_QUERY,), np.array([0, rows]), features, np.zeros(rows, dtype=np.int32))


def _runs(candidates: QueryCandidates, retrievers: Sequence[str]) -> list[Run]:
    """Every retriever's list as a run of one query."""
    names = Ids.of(candidates.documents)
    runs = []
    for retriever in retrievers:
        rows = (
            np.flatnonzero(candidates.listed[retriever])
            if retriever in candidates.listed
            else np.empty(0, np.int64)
        )
        scores = candidates.scores[retriever][rows] if len(rows) else np.empty(0)
        order = np.lexsort((-names.codes[rows], -scores))
        listed = (names[rows[order]], frozen(scores[order]))
        runs.append(Run((_QUERY,), np.array([0, len(rows)]), *listed, None, retriever))
    return runs


def _places(candidates: QueryCandidates, run: Run) -> IntArray:
    """Where the rows of a run of the candidates stand among them."""
    place = {document: at for at, document in enumerate(candidates.documents)}
    return np.array([place[document] for document in run.documents.tolist()], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Searcher:
    """Answers searches over an index that may change meanwhile."""

    silo: str
    index: Index
    store: DocumentStore
    scorer: Scorer
    depth: int = 100

    def search(
        self,
        request: Search,
        *,
        snippets: bool,
        token: Callable[[str], str] | None = None,
        name: Callable[[str], str] = str,
        check: Callable[[], None] = lambda: None,
        encoder: str = "",
        model: str = "",
    ) -> NodeAnswer:
        """The best hits; titles and snippets only where they may be seen, a token where it may be judged.

        `name` is what a document is called towards the asker.
        `check` is called before each stage, and raises when nobody waits for the answer any more.
        `encoder` is the fingerprint that the asker's silos agree on; empty where nothing is merged.
        `model` is the version of the model by which the asker merges; empty for none.
        """
        check()
        began = time.perf_counter()
        snapshot = self.index.snapshot
        candidates = self._candidates(snapshot, request.query)
        if self.scorer.comparable and encoder not in ("", snapshot.encoder.fingerprint):
            candidates = candidates.without("dense")
        check()
        scored = self.scorer.score(snapshot, candidates)
        check()
        selected = self._select(scored, request)
        reasons = (
            self.scorer.explain(snapshot, candidates, scored, len(selected)) if request.explain else None
        )
        check()
        texts = self.store.get([candidates.documents[at] for at in selected]) if snippets and selected else {}
        wanted = QueryWords.of(request.query, candidates.words, snapshot.languages)
        hits = [
            Hit(
                document=name(candidates.documents[at]),
                silo=self.silo,
                probability=None if scored.probabilities is None else float(scored.probabilities[at]),
                score=float(scored.scores[at]),
                explanation=None if reasons is None else reasons[place],
                token="" if token is None else token(candidates.documents[at]),
                **_display_fields(
                    texts.get(candidates.documents[at]), wanted, snapshot.passage(candidates, at)
                ),
            )
            for place, at in enumerate(selected)
        ]
        took = round((time.perf_counter() - began) * 1000, 3)
        version = "" if snapshot.shared is None else snapshot.shared.version
        return NodeAnswer(
            silo=self.silo,
            hits=hits,
            documents=len(snapshot),
            statistics=version,
            encoder=snapshot.encoder.fingerprint,
            scorer=self.scorer.name,
            scale=self.scorer.scale.version if isinstance(self.scorer, HybridScorer) else "",
            **self._merging(snapshot, candidates, scored, selected, model),
            detail="its encoder does not answer: searched by words alone" if snapshot.encoder.problem else "",
            took_ms=took,
        )

    def _merging(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, selected: list[int], model: str
    ) -> dict[str, Any]:
        """What a broker with a learned model merges by: the model here and its best margins, or the
        retrievers' scores of the best hits where it is another."""
        scorer, best = self.scorer, scored.order[: max(len(selected), LIST)]
        own = scorer.version if isinstance(scorer, ModelScorer) else ""
        if not model or not scorer.comparable:
            return {"model": own}
        if isinstance(scorer, ModelScorer) and own == model:
            margins = scored.scores[best[:LIST]].tolist()
            return {"model": own, "margins": margins, **_of_query(snapshot, candidates)}
        shares, none = bm25_shares(candidates), np.full(len(candidates), np.nan)
        cosines = candidates.scores.get("dense", none)
        pairs = [(finite(shares[at]), finite(cosines[at])) for at in best.tolist()]
        return {"model": own, "retrieved": pairs, **_of_query(snapshot, candidates)}

    def _candidates(self, snapshot: Snapshot, query: str) -> QueryCandidates:
        """The best of every retriever; of a cross-encoder too where the scorer joins its list."""
        candidates = snapshot.find(query, self.depth)
        cross = self.scorer.cross if isinstance(self.scorer, FuserScorer) else None
        if cross is None or not len(candidates):
            return candidates
        first = _first(candidates)
        drafts = self.store.get([candidates.documents[row] for row in first.tolist()])
        texts = [drafts.get(candidates.documents[row]) for row in first.tolist()]
        scores, listed = np.zeros(len(candidates)), np.zeros(len(candidates), dtype=bool)
        scores[first] = cross.score(
            query, ["" if text is None else f"{text.title}\n{text.body}" for text in texts]
        )
        listed[first] = True
        return replace(
            candidates,
            scores={**candidates.scores, CROSS: scores},
            listed={**candidates.listed, CROSS: listed},
        )

    def _select(self, scored: Scored, request: Search) -> list[int]:
        best: list[int] = scored.order[: request.k].tolist()
        if request.threshold <= 0:
            return best
        probabilities = scored.probabilities
        return [] if probabilities is None else [at for at in best if probabilities[at] >= request.threshold]

    def evidence(self, query: str, document: str) -> tuple[float | None, Mapping[str, float | None]]:
        """A document's probability for a query, and each retriever's; (None, {}) if it is no candidate."""
        snapshot = self.index.snapshot
        candidates = self._candidates(snapshot, query)
        if document not in candidates.documents:
            return None, {}
        scored = self.scorer.score(snapshot, candidates)
        at = candidates.documents.index(document)
        places = scored.order.tolist()
        if scored.probabilities is None or at not in places:
            return None, {}
        parts = self.scorer.explain(snapshot, candidates, scored, places.index(at) + 1)[-1]
        return float(scored.probabilities[at]), {part.retriever: part.probability for part in parts}


def _of_query(snapshot: Snapshot, candidates: QueryCandidates) -> dict[str, list[float]]:
    return {"of_query": query_columns(snapshot, candidates).tolist()}


def _first(candidates: QueryCandidates) -> IntArray:
    """The rows of the first candidates: by the best place that any list has them in."""
    places = np.full(len(candidates), len(candidates))
    for name, mask in candidates.listed.items():
        rows = np.flatnonzero(mask)
        order = rows[np.argsort(-candidates.scores[name][rows], kind="stable")]
        places[order] = np.minimum(places[order], np.arange(len(order)))
    return np.argsort(places, kind="stable")[:FIRST]


def _display_fields(text: Draft | None, wanted: QueryWords, passage: Span | None) -> dict[str, str]:
    if text is None:
        return {}
    body = text.body if passage is None else text.body[slice(*passage)]
    return {"title": text.title[:300], "snippet": snippet(body, wanted)}


@dataclass(frozen=True, eq=False)
class QueryWords:
    """What a snippet shows: words that begin like a word of the query or like its stem, with any accents;
    characters of scripts without spaces anywhere. The longest first."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, query: str, stems: Iterable[str], languages: Iterable[str] = ()) -> QueryWords:
        """A query's words, and its stems as the engine knows them."""
        stops = STOP_WORDS.union(*(tokeniser_of(code).stop_words for code in languages))
        words = {word for word in _WORD.findall(query.lower()) if word not in stops}
        words |= {stem.removeprefix(STOP) for stem in stems}
        return cls(tuple(sorted(filter(None, words), key=len, reverse=True)[:50]))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        spelled = "|".join(map(_spellings, self.words))
        return re.compile(spelled, re.IGNORECASE) if spelled else re.compile(r"(?!)")

    @cached_property
    def _are_plain(self) -> bool:
        return all(word.isascii() for word in self.words)

    def places(self, text: str) -> list[tuple[int, str]]:
        """Where they stand in a text, and how they are spelled there in lower case."""
        if not (self._are_plain and text.isascii()):
            return [(match.start(), match.group().lower()) for match in self._pattern.finditer(text)]
        lower, places = text.lower(), dict[int, str]()
        for word in reversed(self.words):  # of those that stand at one place the longest
            at = lower.find(word)
            while at >= 0:
                if not at or not (lower[at - 1].isalnum() or lower[at - 1] == "_"):
                    places[at] = word
                at = lower.find(word, at + len(word))
        return sorted(places.items())


def _spellings(word: str) -> str:
    """A pattern of a word with or without accents: a stem has lost some of its word's."""
    if word >= "\u3000":
        return re.escape(word)
    bare = (normalize("NFD", sign)[0] for sign in word)
    signs = (_ACCENTS.get(base, re.escape(sign)) for base, sign in zip(bare, word, strict=True))
    return r"\b" + "".join(signs).replace("ss", "(?:ss|ß)")


def snippet(body: str, wanted: QueryWords) -> str:
    """The stretch of a text with most different words of the query, cut between words."""
    text = " ".join(body[:READ_FOR_SNIPPET].split())
    if len(text) <= LONGEST_SNIPPET:
        return text
    start = max(0, _densest(wanted.places(text)) - 40)
    if start:
        start = text.find(" ", start, start + 40) + 1 or start  # not all scripts have blanks
    end = start + LONGEST_SNIPPET
    if end < len(text):
        end = max(text.rfind(" ", start, end), start + LONGEST_SNIPPET // 2)
    return ("…" if start else "") + text[start:end].strip() + ("…" if end < len(text) else "")


def _densest(matches: Sequence[tuple[int, str]]) -> int:
    """Where the stretch with most different words begins, in one pass: a window that slides over them."""
    within: dict[str, int] = {}
    distinct = len({word for _, word in matches})
    start, best, end = 0, 0, 0
    for at, word in matches:
        while end < len(matches) and matches[end][0] < at + LONGEST_SNIPPET - 60:
            within[matches[end][1]] = within.get(matches[end][1], 0) + 1
            end += 1
        if len(within) > best:
            start, best = at, len(within)
        if best == distinct:
            break
        within[word] -= 1
        if not within[word]:
            del within[word]
    return start
