"""From a query to hits with probabilities: candidates, then a scorer, then the fields that the peer may see.

    Bm25Scorer     BM25 alone; with shared statistics, all silos rank as one central index; no probability
    HybridScorer   BM25 and an encoder on which silos agree, equal shares, nothing learned; no probability
    ModelScorer    the model that silos have learned together (`isthmus learn`), with probabilities
    FuserScorer    a fuser (`isthmus fuse --save`) joins the retrievers' lists
    RankerScorer   a ranker (`isthmus train`) reads features of every candidate

The silo's own calibrator, if it has one, turns the scores of the last two into probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.encoders import CrossEncoder, load_cross_encoder
from isthmus.engines import ANY, ANYBODY, CannotNarrow, Constraints, Matches, may_see
from isthmus.errors import DataError
from isthmus.features import NAMES
from isthmus.learning import LIST, SearchModel
from isthmus.retrieval import FIRST
from isthmus.service.candidates import QueryCandidates, Snapshot
from isthmus.service.columns import CALIBRATION, START, ModelScorer, log_odds, query_columns
from isthmus.service.display import Display, Extras, QueryWords
from isthmus.service.index import Index
from isthmus.service.narrowing import constraints_of, expanded
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
from isthmus.service.spelling import Speller
from isthmus.service.stores import DocumentStore, Draft
from isthmus.service.wire import (
    SEARCH_LEVEL,
    Evidence,
    Hit,
    MatchCounts,
    NodeAnswer,
    NodeSearch,
    ScoreScale,
    Search,
    SearchLimits,
    Spelling,
)
from isthmus.tables import Letor, Run

if TYPE_CHECKING:
    from isthmus.calibration import Calibrator
    from isthmus.fusion import Fuser
    from isthmus.rankers import Ranker

FEATURES = (*NAMES, "text.BM25", "dense.cosine")
"""Features that a ranker reads, in the order of its columns."""
RETRIEVERS = ("bm25", "dense")
CROSS = "cross"
"""Name of a cross-encoder's list, where a fuser joins it."""
BY_DATE = "date"
"""Name in answers of the order by date, for a query without anything to rank by."""
DAY = 86_400
UNDATED = -1e12
"""Score of documents without a date in that order."""
_QUERY = "q"
_NOTHING_MERGED: Mapping[str, Any] = {"margins": [], "retrieved": [], "of_query": []}
"""Empty values, passed explicitly because pydantic copies the default of a list by a slow path."""
_SURE = 1e-9


@dataclass(frozen=True, eq=False)
class FuserScorer:
    """A fitted fuser over the retrievers on which it was fitted."""

    name: ClassVar[str] = "fuser"
    comparable: ClassVar[bool] = False

    fuser: Fuser
    calibrator: Calibrator | None = None
    cross: CrossEncoder | None = None
    """Cross-encoder, if the fuser joins its list too."""

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """Return the fuser's scores, with the probabilities of the calibrator or else of the fuser."""
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
        """Explain a score by retriever, as the fuser accounts for it; the start and the effect of the
        calibration make up the rest."""
        if not len(scored.order):
            return []
        runs, reasons = _runs(candidates, self.fuser.retrievers_), []
        for at, explained in zip(scored.order, self.fuser.explain(runs, _QUERY, depth=depth), strict=False):
            shares = [
                evidence(part.retriever, part.score, part.probability, part.weight, part.contribution)
                for part in explained.parts
            ]
            shares.append(evidence(START, None, None, None, explained.start))
            if scored.probabilities is not None:
                rest = log_odds(float(scored.probabilities[at])) - sum(each.contribution for each in shares)
                if abs(rest) > _SURE:
                    shares.append(evidence(CALIBRATION, None, None, None, rest))
            reasons.append(shares)
        return reasons


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
        """Make a scorer of a ranker that reads the sixteen features, or those and the retrievers' scores;
        raises DataError for any other."""
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
        """Return the ranker's scores, with probabilities if the silo has a calibrator."""
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
        """Return what each retriever's features add to the log-odds (or score) of a candidate without
        either's.

        A candidate without features has the lowest value of any candidate in each. A retriever's share is the
        mean of what its features add first and what they add last (Shapley's value), so the shares and the
        start, which all candidates have in common, add up to the whole.
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
            + [evidence(START, None, None, None, float(start[at]))]
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
    """Load the scorer of a silo's model files; without any, that of the model learned with other silos;
    without a model, the hybrid on the scale of all silos, or BM25 alone."""
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
    """Return every retriever's list as a run of one query."""
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
    """Return the positions among the candidates of the rows of a run."""
    place = {document: at for at, document in enumerate(candidates.documents)}
    return np.array([place[document] for document in run.documents.tolist()], dtype=np.int64)


def _as_sent(request: Search | NodeSearch) -> NodeSearch:
    """Return a search as a broker would pass it on, also if somebody asks the searcher directly."""
    if isinstance(request, NodeSearch):
        return request
    shared = request.model_dump(include=set(SearchLimits.model_fields))
    return NodeSearch(query=request.query, **shared)


def _prefixes(only: Constraints | None) -> tuple[str, ...]:
    return () if only is None else only.prefixes


@dataclass(frozen=True, eq=False)
class Searcher:
    """Answers searches over an index that may change in the meantime."""

    silo: str
    index: Index
    store: DocumentStore
    scorer: Scorer
    depth: int = 100

    def search(
        self,
        request: Search | NodeSearch,
        *,
        snippets: bool,
        token: Callable[[str], str] | None = None,
        name: Callable[[str], str] = str,
        check: Callable[[], None] = lambda: None,
        encoder: str = "",
        model: str = "",
        extras: Extras | None = None,
        principals: frozenset[str] | None = None,
    ) -> NodeAnswer:
        """Return the best hits, with titles and snippets if they may be seen and tokens if hits may be
        judged.

        The search covers the documents that `principals` may see, as if there were no others; None is the
        owner, who sees all.

        `name` gives a document's name for the peer. `check` is called before each stage, and raises when
        nobody waits for the answer any more. `encoder` is the fingerprint on which the peer's silos agree;
        empty where nothing is merged. `model` is the version of the model by which the peer merges; empty for
        none.
        """
        check()
        began = time.perf_counter()
        snapshot, wanted = self._seen(principals), _as_sent(request)
        only, answer = None, partial(self._answer, snapshot, began)
        key = extras.key if extras is not None and snippets and wanted.fold else b""
        display = Display(snippets, name, token, key, principals)
        try:
            if wanted.only is not None:
                only = constraints_of(wanted.only, snapshot.reader, snapshot.languages)
            if not wanted.query.strip() and not _prefixes(only):
                hits = self._newest(snapshot, wanted, only or ANY, display)
                return answer(hits, scorer=BY_DATE, **self._extras(snapshot, wanted, only or ANY, (), extras))
            candidates = self._candidates(snapshot, wanted.query, only)
        except CannotNarrow as error:
            return answer([], detail=str(error))
        if self.scorer.comparable and encoder not in ("", snapshot.encoder.fingerprint):
            candidates = candidates.without("dense")
        check()
        scored = self.scorer.score(snapshot, candidates)
        check()
        selected = self._select(scored, wanted)
        reasons = self.scorer.explain(snapshot, candidates, scored, len(selected)) if wanted.explain else None
        check()
        words = QueryWords.of(wanted.query, (*candidates.words, *_prefixes(only)), snapshot.languages)
        documents = candidates.names(np.array(selected, dtype=np.int64))
        texts = self._texts(documents, display)
        hidden = _hidden(texts, principals)
        hits = [
            display.hit(
                self.silo,
                documents[place],
                texts.get(documents[place]),
                words,
                passage=snapshot.passage(candidates, at),
                probability=None if scored.probabilities is None else float(scored.probabilities[at]),
                score=float(scored.scores[at]),
                explanation=None if reasons is None else reasons[place],
            )
            for place, at in enumerate(selected)
            if documents[place] not in hidden
        ]
        check()
        return answer(
            hits,
            **self._merging(snapshot, candidates, scored, selected, model),
            **self._extras(snapshot, wanted, only, candidates.terms, extras),
        )

    def _seen(self, principals: frozenset[str] | None) -> Snapshot:
        """Return the snapshot of the documents that the principals may see."""
        snapshot = self.index.snapshot
        if principals is None or (principals == ANYBODY and not snapshot.reader.has_rules):
            return snapshot
        return snapshot.seen_by(principals, self.index.languages(principals))

    def _answer(
        self,
        snapshot: Snapshot,
        began: float,
        hits: list[Hit],
        *,
        detail: str = "",
        scorer: str = "",
        **more: Any,
    ) -> NodeAnswer:
        missing = "its encoder does not answer: searched by words alone" if snapshot.encoder.problem else ""
        return NodeAnswer(
            silo=self.silo,
            hits=hits,
            documents=len(snapshot),
            statistics="" if snapshot.shared is None else snapshot.shared.version,
            encoder=snapshot.encoder.fingerprint,
            scorer=scorer or self.scorer.name,
            scale=self.scorer.scale.version if isinstance(self.scorer, HybridScorer) else "",
            detail=detail or missing,
            search_level=SEARCH_LEVEL,
            **{**_NOTHING_MERGED, **more},
            took_ms=round((time.perf_counter() - began) * 1000, 3),
        )

    def _texts(self, documents: list[str], display: Display) -> dict[str, Draft]:
        return self.store.get(documents) if display.snippets and documents else {}

    def _newest(
        self, snapshot: Snapshot, wanted: NodeSearch, only: Constraints, display: Display
    ) -> list[Hit]:
        """Return documents that meet constraints by date, for a query without anything to rank by. The score
        is the day that the hit shows, or its negative place if it shows none. These hits have no tokens for
        judgements."""
        if wanted.threshold > 0:
            return []
        documents = snapshot.reader.ids(snapshot.reader.newest(wanted.k, only))
        drafts, bare = self.store.get(documents), replace(display, token=None)
        hidden = _hidden(drafts, display.principals)
        documents = [id for id in documents if id not in hidden]
        phrases = wanted.only.phrases if wanted.only is not None else []
        words = QueryWords.of(" ".join(phrases), (), snapshot.languages)
        dates = [drafts[id].date if id in drafts else None for id in documents]
        scores: list[float] = [UNDATED if date is None else date // DAY * DAY for date in dates]
        if not display.snippets:
            scores = [-place for place in range(len(documents))]
        return [
            bare.hit(
                self.silo,
                id,
                drafts.get(id) if display.snippets else None,
                words,
                probability=None,
                score=float(score),
            )
            for id, score in zip(documents, scores, strict=True)
        ]

    def _extras(
        self,
        snapshot: Snapshot,
        wanted: NodeSearch,
        only: Constraints | None,
        terms: Sequence[str],
        extras: Extras | None,
    ) -> dict[str, Any]:
        """Return matches and spellings, if the request asks for them and they are allowed."""
        answers: dict[str, Any] = {}
        if extras is not None and extras.matches and wanted.matches:
            with suppress(CannotNarrow):
                counted = Matches(0, {}, {})
                if terms or only:
                    counted = snapshot.matches(wanted.query, terms, only)
                answers["matches"] = MatchCounts(**vars(counted))
        may_spell = extras is not None and extras.suggestions and snapshot.reader.is_own
        if may_spell and wanted.suggest and wanted.query.strip():
            speller = Speller(snapshot, self.store)
            rare = speller.rare(wanted.query)
            answers["spellings"] = [Spelling(word=word[:100], like=speller.like(word)) for word in rare]
        return answers

    def _merging(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, selected: list[int], model: str
    ) -> dict[str, Any]:
        """Return the data by which a broker with a learned model merges: the version of the model here with
        its best margins, or, if that is another one, the retrievers' scores of the best hits."""
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

    def _candidates(self, snapshot: Snapshot, query: str, only: Constraints | None = None) -> QueryCandidates:
        """Return the best candidates of every retriever, and of a cross-encoder if it is joined."""
        instead = () if only is None or query.strip() else expanded(only.prefixes, snapshot.reader)
        candidates = snapshot.find(query, self.depth, only, instead=instead)
        cross = self.scorer.cross if isinstance(self.scorer, FuserScorer) else None
        if cross is None or not len(candidates):
            return candidates
        first = _first(candidates)
        documents = candidates.names(first)
        drafts = self.store.get(documents)
        texts = [drafts.get(document) for document in documents]
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

    def _select(self, scored: Scored, request: SearchLimits) -> list[int]:
        best: list[int] = scored.order[: request.k].tolist()
        if request.threshold <= 0:
            return best
        probabilities = scored.probabilities
        return [] if probabilities is None else [at for at in best if probabilities[at] >= request.threshold]

    def evidence(
        self, query: str, document: str, principals: frozenset[str] | None = None
    ) -> tuple[float | None, Mapping[str, float | None]]:
        """Return a document's probability for a query, and each retriever's, as these principals saw them;
        (None, {}) if it is no candidate or has none."""
        snapshot = self._seen(principals)
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


def _hidden(texts: Mapping[str, Draft], principals: frozenset[str] | None) -> set[str]:
    """Return the documents that these principals may no longer see according to the store: the index may be
    behind, and the new text may be for other people than the old one."""
    if principals is None:
        return set()
    return {id for id, each in texts.items() if not may_see(each.allow, principals)}


def _of_query(snapshot: Snapshot, candidates: QueryCandidates) -> dict[str, list[float]]:
    return {"of_query": query_columns(snapshot, candidates).tolist()}


def _first(candidates: QueryCandidates) -> IntArray:
    """Return the rows of the first candidates, by the best place that any list gives them."""
    places = np.full(len(candidates), len(candidates))
    for name, mask in candidates.listed.items():
        rows = np.flatnonzero(mask)
        order = rows[np.argsort(-candidates.scores[name][rows], kind="stable")]
        places[order] = np.minimum(places[order], np.arange(len(order)))
    return np.argsort(places, kind="stable")[:FIRST]
