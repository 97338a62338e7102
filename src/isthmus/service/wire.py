"""What travels between clients, the broker and nodes: version 1, JSON over HTTP.

    POST /v1/search        Search           broker: Answer        node: NodeAnswer
    POST /v1/search/stream Search          server-sent events: silo (SiloProgress), answer, error; GET too
    POST /v1/noised-counts CountQuestion    how many documents answer it, with noise, silo by silo
    POST /v1/feedback      Feedback         204: it stays with the hit's silo; node: AttributedFeedback
    POST /v1/judged        ShownHits        what the caller judged of them (broker); node: ShownTokens
    POST /v1/judgements    many by document id, each to the silo that has the document
    GET  /v1/judgements    those that came through the asking peer, page by page
    POST /v1/judgements/places    which documents, by digests of their ids, a silo has (node)
    GET  /v1/release       what a silo has released, to whom, and what is left of its budgets
    GET  /v1/calibration   reliability of its probabilities, and what thresholds keep
    GET  /v1/training      the rounds of a training run (broker)
    GET  /v1/silos         every silo's state (broker)
    GET  /v1/learning      broker: how learning goes, and every version; node: the queries judged there
    POST /v1/learning      let the silos learn, /v1/learning/rollback: use another version (broker)
    POST /v1/learning/session, /v1/learning/{session}/{number}    masks are agreed, a question (node)
    PUT  /v1/learning      the model to search with, DELETE: none (node)
    GET  /v1/statistics    a silo's collection statistics, exact or private (node)
    PUT  /v1/statistics    the sum of all silos' statistics, to score with from now on (node)
    GET  /v1/scale         sums of a silo's scores (node); PUT: the scale of all silos', to score on
    GET  /v1/documents/{silo}/{id}    a whole document, by the ticket of a hit or what the owner allowed
    POST /v1/requests      ask the owner for a document, GET: what became of it
    POST /v1/requests/{silo}/{number}    the owner's answer; at a node without the silo
    POST /v1/documents/erase    remove all that is known of documents; a receipt: the operator (node)
    PUT  /v1/documents     add or change documents, DELETE /v1/documents/{id}: the operator (node)
    GET  /v1/documents     documents by their words, POST /v1/sources: read them again; the operator
    GET  /v1/health, /v1/ready, /metrics

A request with a key that is not known is refused; an answer may hold more than a reader knows. Errors are
problem details (RFC 9457) under `application/problem+json` and never echo a query, a term or an id.
"""

from __future__ import annotations

import hashlib
import time
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

VERSION = 1
PREFIX = f"/v{VERSION}"
PROBLEM_TYPE = "application/problem+json"
SEEN = "urn:isthmus:seen"
"""The type of a problem: the caller has seen as much of a silo as its policy shows."""
KEY_EXPIRES = "isthmus-key-expires"
"""The header of answers to somebody whose key ends soon: when, ISO 8601."""
ENCODER = "isthmus-encoder"
"""The header of a broker's search in a silo: the encoder that its silos agree on, by fingerprint, or "none".
A silo with another encoder leaves its vectors out of scores that are compared with other silos'."""
MODEL = "isthmus-model"
"""The header of a broker's search in a silo: the version of the model by which it merges."""
STATISTICS_TYPE = "application/vnd.isthmus.statistics"
BUNDLE_TYPE = "application/vnd.isthmus.bundle"
LINES_TYPE = "application/x-ndjson"

LONGEST_QUERY = 2_000
MOST_HITS = 100
MOST_NARROWING = 20
"""Phrases, prefixes, exclusions or types of one search."""
MOST_FACETS = 50
"""Types, and years, that matches are counted by."""
SEARCH_LEVEL = 1
"""What a node says it knows of `NodeSearch`; the release before says nothing."""
LONGEST_ID = 1_000
MOST_JUDGED, MOST_ROWS = 100_000, 10_000
"""Queries that a silo may name to learn from, and rows of any table in an answer."""
MOST_JUDGEMENTS = 1_000
"""Of one message that brings judgements by document id."""
LONGEST_TOKEN = 6_000
LONGEST_OPENED = 1_000_000
"""Characters of a document that is opened; of a longer one, the beginning."""
LONGEST_REASON = 1_000
MOST_REQUESTS = 1_000
LEAST_DEVIATION = 1e-3
"""Of scores that lie between −1 and 1: no scale makes large numbers of them."""

Count = Annotated[int, Field(ge=0, le=10**12)]
Text = Annotated[str, Field(max_length=2_000)]
"""A text of somebody else's: short enough to show."""
Probability = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=100)]
DocumentId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID, pattern=r"^[^\x00-\x1f\x7f]+$")]
# Dialects of patterns differ in what is white: all that any of them calls so is named.
_NOT_WHITE = r"[^\s\u001c-\u001f\u0085\ufeff]"
_VISIBLE = _NOT_WHITE[:-1] + r"\x00-\x1f\x7f]"
Principal = Annotated[
    str, Field(pattern=rf"^(everyone|(user|group):{_VISIBLE}[^\x00-\x1f\x7f]{{0,298}})$", max_length=306)
]
HitToken = Annotated[str, Field(max_length=LONGEST_TOKEN, pattern=r"^[A-Za-z0-9_-]*$")]
QueryText = Annotated[str, Field(min_length=1, max_length=LONGEST_QUERY, pattern=_NOT_WHITE)]
Fingerprint = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9._-]*$")]
"""Names an encoder's vectors: equal ones encode equal texts alike. It travels in a header."""
Cursor = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]
"""Where a page of a list ends."""
MODEL_VERSION = r"^[A-Za-z0-9-]{0,40}$"
Version = Annotated[str, Field(pattern=MODEL_VERSION)]
"""Of a model: when it was learned."""
Margin = Annotated[float, Field(ge=-1e12, le=1e12)]
"""What a model makes of numbers within its own bounds."""
Link = Annotated[str, Field(max_length=20_000, pattern=r"^(https?://[!-~]+)?$")]
"""An address for people, percent-encoded."""
Access = Literal["open", "ask", "name"]
"""What can be done with a hit's document: open it, ask its owner for it, ask by one's name only."""
RequestNumber = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Status = Literal["answered", "late", "refused", "down", "broken"]


def moment(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class RequestModel(BaseModel):
    """Base of requests: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ResponseModel(BaseModel):
    """Base of responses: unknown keys are ignored, so that a newer server may add some."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Problem(ResponseModel):
    """Why a request failed, in a form that programs and people can read."""

    type: str = "about:blank"
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str = ""


class SearchLimits(RequestModel):
    """How much is searched for. The deadline is counted from when the request arrives."""

    k: Annotated[int, Field(ge=1, le=MOST_HITS)] = 10
    deadline_ms: Annotated[int, Field(ge=10, le=60_000)] | None = None
    explain: bool = False
    threshold: Probability = 0.0
    silos: list[Name] | None = None
    """Only these silos; for the broker."""


class Search(SearchLimits):
    """A search request; what its query may say is in `query_language`."""

    query: QueryText
    offset: Annotated[int, Field(ge=0, lt=MOST_HITS)] = 0
    """Hits to pass over: those of the pages before. Pages end with the first 100 hits."""
    facets: bool = False
    """Whether to count matches by silo, type and year, where silos allow it."""
    suggest: bool = False
    """Whether to look for other spellings of words that hardly any document has, where silos allow it."""


Texts = Annotated[list[QueryText], Field(max_length=MOST_NARROWING)]
UnixTime = Annotated[int, Field(ge=-(10**11), le=10**12)]


class Narrowing(RequestModel):
    """What documents must have, and must not have, as a person wrote it; see `engines.Constraints`."""

    phrases: Texts = []
    prefixes: Texts = []
    without: Texts = []
    types: Texts = []
    other_types: Texts = []
    since: UnixTime | None = None
    until: UnixTime | None = None


class NodeSearch(SearchLimits):
    """A search as the broker passes it on. Fields that a node of the release before refuses are sent where
    they are needed, or where the node says that it knows them."""

    query: Annotated[str, Field(max_length=LONGEST_QUERY)]
    """Words to rank by; without any, all that meets `only` is listed by date."""
    only: Narrowing | None = None
    matches: bool = False
    """Whether to count all that match."""
    suggest: bool = False
    fold: bool = False
    """Whether hits are to have digests of their texts, by which the broker folds duplicates."""


class Evidence(ResponseModel):
    """One retriever's share in a hit: raw score → probability → weight → contribution.

    Contributions add up to the log-odds of the hit's probability, or to its score where it has none. "start"
    is what every hit has, "profile" what the query's list as a whole says, "calibration" what a calibrator
    does to the sum. A document that the retriever did not return has no raw score.
    """

    retriever: Name
    raw: float | None
    probability: Probability | None
    weight: float | None
    """Of the log-odds of `probability`; without one, of `contribution / weight`: what a model, or the scale
    of all silos, makes of the retriever's scores."""
    contribution: float


class HitCopy(ResponseModel):
    """The same text in another silo, to be opened or asked for there as any hit."""

    silo: Name
    document: DocumentId
    probability: Probability | None
    score: float
    title: Text = ""
    ticket: HitToken = ""
    access: Annotated[list[Access], Field(max_length=3)] = []
    link: Link = ""


class Hit(ResponseModel):
    """A document of the result: a probability if the silo has a calibrator, a snippet if it allows them."""

    document: DocumentId
    silo: Name
    probability: Probability | None
    score: float
    title: Text = ""
    snippet: Text | None = None
    explanation: Annotated[list[Evidence], Field(fail_fast=True, max_length=100)] | None = None
    token: HitToken = ""
    """What feedback on it must bring; only its silo can read it."""
    type: Annotated[str, Field(max_length=100)] = ""
    date: Annotated[str, Field(max_length=40)] = ""
    """ISO 8601; empty where it is not known, as the type."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    """Of its text under a key that silos share, for the broker alone: equal where the texts are."""
    also: Annotated[list[HitCopy], Field(fail_fast=True, max_length=MOST_ROWS)] = []
    """Where the same text was found too."""
    ticket: HitToken = ""
    """What opening it, or asking its owner for it, must bring."""
    access: Annotated[list[Access], Field(max_length=3)] = []
    """What its silo lets the broker's people do with the document."""
    link: Link = ""
    """Where the document is shown, if its owner says."""


ShortText = Annotated[str, Field(max_length=100)]
Year = Annotated[int, Field(ge=-9_999, le=99_999)]


class MatchCounts(ResponseModel):
    """Documents of one silo that match: in all, by type and by year, the most frequent ones."""

    count: Count
    types: Annotated[dict[Annotated[str, Field(max_length=100)], Count], Field(max_length=MOST_FACETS)] = {}
    years: Annotated[
        dict[Annotated[int, Field(ge=-9999, le=99999)], Count], Field(max_length=MOST_FACETS)
    ] = {}


class Spelling(ResponseModel):
    """A word of the query that fewer than three of a silo's documents have, and words like it that more
    have, the likeliest first."""

    word: Annotated[str, Field(max_length=100)]
    like: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=3)] = []


class ScoreSums(ResponseModel):
    """Sums over scores of one retriever that lie between −1 and 1: how many there are, their sum, and the
    sum of squared distances from the mean of each query's scores."""

    count: Count = 0
    total: float = 0.0
    squares: float = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if abs(self.total) > self.count or not 0 <= self.squares <= self.count:
            raise ValueError("sums that no scores between -1 and 1 have")
        return self

    def __add__(self, other: ScoreSums) -> ScoreSums:
        return ScoreSums(
            count=self.count + other.count,
            total=self.total + other.total,
            squares=self.squares + other.squares,
        )


class SiloScores(ResponseModel):
    """A silo's score sums: BM25's shares of a query's Σ idf, and its encoder's cosines."""

    silo: Name
    encoder: Fingerprint = ""
    """The encoder's fingerprint; empty where there are no cosines."""
    bm25: ScoreSums
    dense: ScoreSums


class Standard(RequestModel):
    """Mean and deviation of scores that lie between −1 and 1."""

    mean: Annotated[float, Field(ge=-1, le=1, strict=True)]
    deviation: Annotated[float, Field(ge=LEAST_DEVIATION, le=1, strict=True)]


class ScoreScale(RequestModel):
    """What brings BM25's shares of a query's Σ idf and the cosines of one encoder to one scale."""

    encoder: Annotated[Fingerprint, Field(min_length=1)]
    bm25: Standard
    dense: Standard

    @property
    def version(self) -> str:
        """Changes whenever a score would."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class NodeAnswer(ResponseModel):
    """The hits of one silo, best first."""

    silo: Name
    hits: Annotated[list[Hit], Field(fail_fast=True, max_length=MOST_HITS)]
    documents: Count
    """How many it searched."""
    statistics: Text
    """The version of the shared statistics it scored with; empty for its own."""
    encoder: Fingerprint = ""
    """The fingerprint of its dense retriever's encoder."""
    scorer: Text = ""
    """What put its hits in order: bm25, hybrid, learned, fuser or ranker."""
    scale: Text = ""
    """The version of the scale that a hybrid scored with."""
    model: Version = ""
    """The version of the learned model it scored with."""
    margins: Annotated[list[Margin], Field(max_length=100)] = []
    """Its best ones by that model, where it is the broker's."""
    retrieved: Annotated[list[tuple[Margin | None, Margin | None]], Field(max_length=MOST_HITS)] = []
    """BM25's share and the cosine of its best hits, in their order, where it has not the broker's model."""
    of_query: Annotated[list[Margin], Field(max_length=10)] = []
    """The query's number of words and their rarity."""
    detail: Text = ""
    """What was missing: its encoder, where that did not answer."""
    search_level: Count = 0
    """What it knows of `NodeSearch`."""
    matches: MatchCounts | None = None
    """Where the broker asked, and its policy allows them."""
    spellings: Annotated[list[Spelling], Field(max_length=10)] | None = None
    """Likewise; None where it says nothing of spellings."""
    took_ms: float


class SiloStatus(ResponseModel):
    """The outcome of a search in one silo."""

    silo: Name
    status: Status
    detail: str = ""
    took_ms: float | None = None
    documents: int | None = None
    scorer: str = ""
    """What put its hits in order: bm25, hybrid, learned, fuser or ranker."""
    model: str = ""
    """The version of the learned model it scored with."""
    matches: int | None = None
    """Its documents that match, where that was asked and its policy allows it: those that have any of the
    words and all that narrows. A threshold is not part of it."""


class SiloProgress(SiloStatus):
    """One silo's outcome while others are still awaited: an event of a streamed search."""

    count: int = 0
    """Its hits, those below the threshold and those of other pages included."""
    hits: list[Hit] | None = None
    """The best of all silos so far; None where there are no new ones or the whole answer follows at once, and
    for most of very many silos."""


class QueryPart(ResponseModel):
    """Something that narrows the search, and where it stands in the query, in characters."""

    kind: str
    """phrase, without, prefix, silo, other_silo, type, other_type, after or before."""
    value: str
    start: int
    end: int


class Understood(ResponseModel):
    """What a query was understood as."""

    words: str
    """What hits are ranked by."""
    parts: list[QueryPart] = []
    hints: list[str] = []
    """What may have been meant otherwise."""
    marked: list[str] = []
    """Words to mark in texts, in lower case: those of the query but stop words."""


class Facets(ResponseModel):
    """Documents that match, by silo, type and year, most frequent first, and how many in all; of the silos
    that count. A document in two silos counts twice, and a threshold is not part of it."""

    matches: int
    silos: dict[str, int]
    types: dict[str, int]
    years: dict[str, int]


class Suggestion(ResponseModel):
    """Another spelling that more documents have; it is never searched by itself."""

    query: str
    """The whole query so spelled."""
    words: dict[str, str]
    """What would be instead of what."""
    silos: list[str]
    """Whose documents have it so."""


class Answer(ResponseModel):
    """The hits of all silos, best first, at or above the threshold; and the outcome in each silo."""

    hits: list[Hit]
    silos: list[SiloStatus]
    threshold: Probability
    below: int = 0
    """Hits that were left out because of the threshold."""
    without_probability: int = 0
    """Those of them that have no probability, since their silo has no calibrator yet."""
    model: str = ""
    """The version of the learned model that merged them."""
    unlike: bool = False
    """Whether no judged query was like this one: probabilities are drawn to the base rate."""
    overrated: bool = False
    """Whether probabilities are too high: fewer silos have answered than an older model knows of."""
    understood: Understood | None = None
    offset: int = 0
    more: bool = False
    """Whether there may be another page."""
    facets: Facets | None = None
    suggestion: Suggestion | None = None
    took_ms: float


LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Probabilities from which a noised count counts: few, so that nobody asks between two of them."""
USUAL_LEVEL = 0.2
"""High enough that few documents count which share a word alone, low enough that counts exceed the noise."""
BUDGET_SPENT = "the privacy budget for this peer is spent"
"""The detail of the problem (403) with which a silo refuses what its ledger has no room for."""


def _a_level(value: float) -> float:
    if value not in LEVELS:
        raise ValueError(f"one of {', '.join(map(str, LEVELS))}")
    return value


Level = Annotated[float, AfterValidator(_a_level), Field(json_schema_extra={"enum": list(LEVELS)})]


class CountQuestion(RequestModel):
    """How many documents answer a query: that are at least so probable; in a silo that has learned nothing,
    that have all of its words. The order, case and number of the words make no other question."""

    query: QueryText
    threshold: Level = USUAL_LEVEL
    silos: list[Name] | None = None
    """Only these silos; for the broker."""


class NoisedCount(ResponseModel):
    """A silo's count with two-sided geometric noise; the true one lies from `low` to `high` in 95 % of
    draws."""

    silo: Name
    by: Literal["probability", "words"]
    count: Count
    low: Count
    high: Count
    epsilon: Annotated[float, Field(gt=0)]
    """Charged to every unit of the silo, for one more, less or replaced."""
    unit: Annotated[str, Field(max_length=40)] = "document"
    """What is counted: documents, or subjects (patient) that have one which answers."""
    repeated: bool = False
    """Whether it was drawn before, and cost nothing now."""


class SiloCount(ResponseModel):
    """The outcome of a question in one silo."""

    silo: Name
    status: Status
    detail: str = ""
    answer: NoisedCount | None = None


class CountAnswer(ResponseModel):
    """How many documents every silo says that answer a question."""

    silos: list[SiloCount]
    threshold: Probability
    took_ms: float


class Feedback(RequestModel):
    """Whether a hit was right, by the token that it came with; good for a day after the search.

    The broker takes it to the silo, which alone keeps it. None takes a judgement back.
    """

    query: QueryText
    silo: Name
    token: HitToken
    relevant: bool | None


class AttributedFeedback(Feedback):
    """Feedback as the broker passes it on: `person` is who gave it, by a name that only the broker knows."""

    person: Annotated[str, Field(max_length=100)] = ""


class Opening(RequestModel):
    """By which a document is opened: the ticket of a hit, or a request that its owner has allowed."""

    ticket: HitToken = ""
    request: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""


class AttributedOpening(Opening):
    """The same as the broker passes it on, with its name for the person."""

    person: Annotated[str, Field(max_length=100)] = ""


class OpenedDocument(ResponseModel):
    """A document that somebody opened."""

    silo: Name
    document: DocumentId
    title: Annotated[str, Field(max_length=10_000)] = ""
    body: Annotated[str, Field(max_length=LONGEST_OPENED)] = ""
    characters: Count = 0
    """Of the whole body; more than `body` has where it was cut."""
    link: Link = ""


class Ask(RequestModel):
    """Ask the owner of a hit's document for it."""

    ticket: HitToken
    query: QueryText
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""


class AskSilo(Ask):
    """The same for the broker. With `named` the owner sees the name of one's API key, else a pseudonym."""

    silo: Name
    named: bool = False


class AttributedAsk(Ask):
    """The same as the broker passes it on: its pseudonym for the person, and their name if they give it."""

    person: Annotated[str, Field(max_length=100)] = ""
    name: Annotated[str, Field(max_length=100)] = ""


class DocumentRequest(ResponseModel):
    """What somebody asked an owner for, and what became of it."""

    number: RequestNumber
    silo: Name
    document: DocumentId
    query: Text
    reason: Text = ""
    state: Literal["waiting", "allowed", "denied", "opened", "expired"]
    word: Text = ""
    """The owner's."""
    at: Text
    """When it was asked, ISO 8601."""
    answered: Text | None = None
    person: Text = ""
    """Who asks: for the owner."""


class RequestList(ResponseModel):
    """Requests, the latest first; and silos that did not answer, with the reason."""

    requests: Annotated[list[DocumentRequest], Field(fail_fast=True, max_length=MOST_ROWS)]
    unanswered: dict[str, str] = {}


class RequestsOf(RequestModel):
    """Whose requests a broker asks a silo for: one person's, or with "" all that came through it."""

    person: Annotated[str, Field(max_length=100)] = ""


class EveryRequest(RequestModel):
    """One's own requests, or for administrators all."""

    all: bool = False


class RequestAnswer(RequestModel):
    """The owner's answer: the document may be opened once, or not."""

    allow: bool
    word: Annotated[str, Field(max_length=LONGEST_REASON)] = ""


class HitReference(RequestModel):
    """A hit by its silo and the token that it came with."""

    silo: Name
    token: HitToken


class ShownHits(RequestModel):
    """Hits of a query, to learn what one judged of them."""

    query: QueryText
    hits: Annotated[list[HitReference], Field(max_length=MOST_HITS)]


class OwnJudgements(ResponseModel):
    """What the caller judged of the hits, in their order; None for nothing, and where the silo is silent."""

    relevant: list[bool | None]


class ShownTokens(RequestModel):
    """Hits of one silo. Who wants to know is not said: the broker picks what is theirs."""

    query: QueryText
    tokens: Annotated[list[HitToken], Field(max_length=MOST_HITS)]


class Verdicts(ResponseModel):
    """For each hit what people judged through the asking peer, by the names it has for them."""

    verdicts: Annotated[
        list[Annotated[dict[str, bool], Field(max_length=MOST_JUDGEMENTS)]], Field(max_length=MOST_HITS)
    ]


class NamedJudgement(RequestModel):
    """Whether a document is right for a query, by the id under which the caller sees it."""

    query: QueryText
    document: DocumentId
    relevant: bool
    silo: Name | None = None
    """The silo that has the document; the broker asks all where none is named."""


class JudgementBatch(RequestModel):
    """Judgements by document id, for silos whose policy has `judgements`."""

    judgements: Annotated[list[NamedJudgement], Field(min_length=1, max_length=MOST_JUDGEMENTS)]


class AttributedBatch(JudgementBatch):
    """Judgements as the broker passes them on: `person` is who brought them, as in feedback."""

    person: Annotated[str, Field(max_length=100)] = ""


class Imported(ResponseModel):
    """What became of a batch of judgements; the lists hold places in it, from 0."""

    added: Count = 0
    changed: Count = 0
    unchanged: Count = 0
    unknown: list[Count] = []
    """No silo has the document."""
    ambiguous: dict[Count, list[str]] = {}
    """Several silos have a document of that id: these."""
    unplaced: list[Count] = []
    """A silo that may have the document did not answer: send these again."""
    unanswered: dict[str, str] = {}
    """Silos that did not answer, and why."""


class DocumentDigests(RequestModel):
    """Documents by digests of their ids under a key drawn for this message: a silo recognises its own."""

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    digests: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]], Field(max_length=2 * MOST_JUDGEMENTS)
    ]


class PresentDocuments(ResponseModel):
    """The places, from 0, of the digests whose documents a silo has."""

    present: Annotated[list[Count], Field(fail_fast=True, max_length=2 * MOST_JUDGEMENTS)]


class JudgementPage(ResponseModel):
    """Some of the judgements that came through a peer, by the majority of its people."""

    judgements: Annotated[list[NamedJudgement], Field(fail_fast=True, max_length=MOST_ROWS)]
    next: Cursor = ""
    """What to ask for the next page with; empty on the last."""


class Judged(ResponseModel):
    """Queries that somebody judged a hit of, and into how many folds they may be dealt.

    None, and 0 folds, while a silo has too few to take part.
    """

    queries: Annotated[list[QueryText], Field(fail_fast=True, max_length=MOST_JUDGED)]
    folds: Annotated[int, Field(ge=0, le=8)] = 0
    consent: Literal["", "two"] = ""
    """Whether the owner agrees to sums of two silos."""
    least: Annotated[int, Field(ge=1, le=10**6)] = 10
    """Judged queries that every sum must cover here."""
    alone: bool = False
    """Whether its scores are its engine's own: no sum has them, and it calibrates them by itself."""


Hex = Annotated[str, Field(max_length=256, pattern=r"^([0-9a-f]{2})*$")]
SessionName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Mode = Literal["masked", "fedrisk"]
"""How silos learn: from totals alone, or weighed by reports of each (FedRisk)."""


class LearningSession(RequestModel):
    """A session that a broker begins in a silo; with the keys of all members, that they are settled."""

    session: SessionName
    mode: Mode = "masked"
    encoder: Fingerprint = ""
    """The encoder whose cosines count; empty for none."""
    adverts: Annotated[dict[Name, Hex], Field(max_length=1_000)] = {}


class LearningKey(ResponseModel):
    """A silo's key for the masks of a session, signed by the identity on its card."""

    advert: Hex


class LearningRequest(RequestModel):
    """How the silos are to learn."""

    mode: Mode = "masked"


class RollbackRequest(RequestModel):
    """The version to search with: empty for the one before the current one, "none" for nothing learned."""

    version: Version = ""


class LearnedVersion(ResponseModel):
    """One learning run: what came of it, and whether its model is in use."""

    version: Version
    learned: str
    """When, ISO 8601."""
    mode: Mode = "masked"
    by: str = ""
    """Who had it run: a person's name, or the schedule."""
    current: bool = False
    usable: bool = False
    """Whether there is a model to search with."""
    problem: str = ""
    """Why there is none, and the cure."""
    record: dict[str, Any] | None = None
    """What was compared, chosen and measured."""


class LearningView(ResponseModel):
    """How learning goes, and all its runs, the latest first."""

    state: Literal["idle", "running"] = "idle"
    stage: str = ""
    done: int = 0
    """Stages so far."""
    started: str | None = None
    mode: Mode = "masked"
    problem: str = ""
    """Why the last run failed, and the cure."""
    judged: int | None = None
    """Judged queries at the last run."""
    every: str = ""
    next: str | None = None
    current: Version = ""
    """The version in use; empty before anything was learned, "none" where all was rolled back."""
    versions: list[LearnedVersion] = []
    silos: dict[str, str] = {}
    """The version that each silo has searched with last."""


class Document(RequestModel):
    """A document as its operator gives it."""

    id: DocumentId
    title: Annotated[str, Field(max_length=10_000)] = ""
    body: Annotated[str, Field(max_length=10_000_000)] = ""
    allow: Annotated[list[Principal], Field(max_length=1_000)] = []
    """Who may see it: user:ID, group:NAME or everyone; all whom the silo's policy lets in where none is."""
    subject: Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """Whom it is about, a patient or a customer."""


class DocumentBatch(RequestModel):
    """Documents to add, or to put in the place of those with the same ids."""

    documents: Annotated[list[Document], Field(min_length=1, max_length=10_000)]


class Changed(ResponseModel):
    """How many documents an operator's request added, changed and removed; the rest were as given already."""

    added: int = 0
    changed: int = 0
    removed: int = 0


class JudgementsAfter(RequestModel):
    """Which page of judgements is asked for: the one after another's `next`."""

    after: Cursor = ""


class JudgementsOf(JudgementsAfter):
    """The same of one silo, for the broker."""

    silo: Name


class EntriesAfter(RequestModel):
    """Which entries of an audit log are asked for."""

    after: Count = 0
    k: Annotated[int, Field(ge=1, le=10_000)] = 1_000


class Find(RequestModel):
    """What an operator looks for in the store."""

    find: Annotated[str, Field(min_length=1, max_length=LONGEST_QUERY)]
    k: Annotated[int, Field(ge=1, le=1000)] = 20


class Titled(ResponseModel):
    """A document by its id and title."""

    id: DocumentId
    title: str


class Listed(ResponseModel):
    """Documents that an operator looked for."""

    documents: list[Titled]


class Reread(ResponseModel):
    """What could not be read when sources were read again."""

    errors: list[str]
    sources: list[SourceState] = []


class SourceState(ResponseModel):
    """What became of a source when it was read last."""

    source: Text
    documents: Count = 0
    unread: Count = 0
    """Files or rows that could not be read."""
    errors: Annotated[list[Text], Field(max_length=100)] = []
    """The first of them, with the reason."""
    skipped: Annotated[dict[str, Count], Field(max_length=1_000)] = {}
    """Files of kinds that are not read, by suffix."""
    erased: Count = 0
    """Documents that were erased and are in the source still: left out."""
    failed: Text = ""
    """Why nothing of it could be read."""


class Erase(RequestModel):
    """Documents to erase, by their ids or by whom they are about."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["ids"]}, {"required": ["subject"]}]})

    ids: Annotated[list[DocumentId], Field(min_length=1, max_length=10_000)] = []
    subject: Annotated[str, Field(min_length=1, max_length=300)] = ""


class ErasedDocument(ResponseModel):
    """One document of a receipt."""

    id: DocumentId
    removed: bool
    """Whether it was stored; False for one that was not there, or gone already."""
    hidden: bool = False
    """Whether it is shown no more, and stays where it is: in an engine elsewhere."""
    released: list[dict[str, Any]] = []
    """Statistics and sketches with noise that covered it: peer, mechanism, ε and when."""


class ErasureReceipt(ResponseModel):
    """What was erased, what was written anew, what is known still, and what cannot be undone."""

    silo: Name
    at: Text
    why: Text = ""
    subject: Text = ""
    documents: list[ErasedDocument]
    judgements: Count = 0
    requests: Count = 0
    rewritten: list[Text]
    """What was written anew without them."""
    exports: list[Text] = []
    """Files outside the node's folder that were written anew."""
    relearn: list[Text] = []
    """Models that were learned with them, and what becomes of each."""
    remains: list[Text]
    """What is still known of them here."""
    not_undone: list[Text]
    """What has left before."""


class SourceRetention(ResponseModel):
    """How long documents and judgements of a source are stored, and how many are older."""

    source: Text
    keep_days: Count | None = None
    keep_judgements_days: Count | None = None
    documents: Count = 0
    judgements: Count = 0


class RetentionReport(ResponseModel):
    """What a silo's rules of retention erased, or would erase."""

    silo: Name
    at: Text
    sources: list[SourceRetention] = []
    ids: list[DocumentId] = []
    """The first of the documents."""
    waits: Text = ""
    """Why nothing is erased until the operator confirms it."""
    done: bool = False
    receipt: ErasureReceipt | None = None


class SourceStates(ResponseModel):
    """Every source of a silo."""

    sources: Annotated[list[SourceState], Field(fail_fast=True, max_length=MOST_ROWS)]


class Health(ResponseModel):
    """The server is up: its name, role and version."""

    status: Literal["ok"] = "ok"
    name: Name
    role: Literal["node", "broker"]
    version: str


Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]
"""Seconds since 1970, to the end of the year 9999: what a calendar has."""


class Machine(ResponseModel):
    """What a server says of itself to those who operate the federation; times in seconds since 1970."""

    version: Text = ""
    """Of Isthmus."""
    time: Moment | None = None
    """By its clock, when it answered."""
    certificate_ends: Moment | None = None
    revocations: Moment | None = None
    """When its list of revoked certificates was signed; none where it has no list."""
    disk_free: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of the disk with its folder."""
    disk_free_bytes: Annotated[int, Field(ge=0, le=10**18)] | None = None


class Ready(ResponseModel):
    """Whether searches can be answered, and if not, why."""

    ready: bool
    detail: Text = ""
    documents: Count = 0
    indexed: Count = 0
    statistics: Text = ""
    encoder: Fingerprint = ""
    """The fingerprint of a silo's encoder; of a broker, the one that its silos agree on."""
    encoder_name: Text = ""
    """What the silo calls it."""
    model: Text = ""
    """The version of the learned model that a silo searches with; of a broker, the one in use."""
    engine: Text = ""
    """What has a silo's documents, where that is not its own index."""
    level: Literal["", "full", "scores"] = ""
    """What such a silo takes part in: all, or only with its engine's own scores, once they are calibrated."""
    search_level: Count = 0
    """What a silo knows of `NodeSearch`."""
    unread: Count = 0
    """Files or rows of a silo's sources that could not be read."""
    machine: Machine | None = None
    """Where a silo tells this peer."""


class Departure(ResponseModel):
    """One kind of thing that left a silo: how often, to whom, at what ε or with the words for none."""

    kind: Text
    peer: Text
    guarantee: Text
    mechanism: Text = ""
    unit: Text = ""
    times: Count
    items: Count
    last: Text


RIGHTS = ("search", "snippets", "counts", "noised_counts", "matches", "suggestions", "open")
"""Of a peer, as the Silos view shows them."""


class PeerBudget(ResponseModel):
    """What a peer may do, and what is left of its budget for the dearest document."""

    peer: Text
    search: bool
    snippets: bool
    counts: bool
    noised_counts: bool = False
    matches: bool = False
    suggestions: bool = False
    open: bool = False
    budget: float | None = None
    left: float | None = None
    seen: float | None = None
    """The share of the silo's documents that it has seen in a year, by estimate."""


class SiloRelease(ResponseModel):
    """What a silo has released and what it may still release: for the Silos view.

    Towards a peer that may search no ε is claimed: scores and explanations are exact.
    """

    silo: Name
    documents: Count
    budget: Text = ""
    unit: Annotated[str, Field(max_length=40)] = "document"
    """Whose ε it is: a document's, or that of all documents of a subject (patient)."""
    most_spent: float = 0.0
    least_left: float | None = None
    meaning: Text = ""
    departures: Annotated[list[Departure], Field(fail_fast=True, max_length=MOST_ROWS)] = []
    peers: Annotated[list[PeerBudget], Field(fail_fast=True, max_length=MOST_ROWS)] = []
    last_training: Text | None = None
    outdated_model: bool = False
    """Whether its model was learned with judgements of documents that were erased since."""


class SiloState(ResponseModel):
    """A silo as the broker sees it."""

    silo: Name
    url: str
    """Where the broker reaches it; empty unless an administrator asks."""
    about: str = ""
    """What it has, as the broker's operator says."""
    status: Status
    detail: str = ""
    ready: Ready | None = None
    release: SiloRelease | None = None
    sources: list[SourceState] = []
    """What became of its sources: for administrators, where the silo lets them manage."""
    skew: float | None = None
    """Seconds that its clock is ahead of the broker's."""


class SiloList(ResponseModel):
    """Every silo, the version of the statistics they share, and the encoder they agree on."""

    silos: list[SiloState]
    statistics: str = ""
    encoder: str = ""
    about: str = ""
    """When a document is right in this federation, for people."""
    queries: list[str] = []
    """To try."""
    machine: Machine | None = None
    """The broker's own: for administrators."""


class Session(RequestModel):
    """A person's API key, to sign in with."""

    key: Annotated[str, Field(min_length=1, max_length=200)]


class WaysIn(ResponseModel):
    """How people sign in: with an API key, or at a provider of identities, by its host's name."""

    key: bool
    provider: str = ""


class OpenSession(ResponseModel):
    """One session of the page: whose, since when, and when it was used last, ISO 8601."""

    person: str
    name: str
    scopes: list[str]
    since: str
    used: str


class SessionList(ResponseModel):
    """Every session of the page."""

    sessions: list[OpenSession]


class SessionsOf(RequestModel):
    """Whose sessions are meant: the name of an API key's owner, or a person's id at the provider."""

    person: Annotated[str, Field(min_length=1, max_length=200)]


class EndedSessions(ResponseModel):
    """How many sessions were ended."""

    ended: Count


KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class ListedKey(ResponseModel):
    """An API key without its secret; times are ISO 8601, `expires` None for one that does not end."""

    id: KeyId
    name: str
    scopes: list[str]
    groups: list[str] = []
    created: str
    expires: str | None = None


class KeyList(ResponseModel):
    """Every API key of a broker, the oldest first."""

    keys: list[ListedKey]


class Me(ResponseModel):
    """The caller's name, what the page calls them, and their scopes and groups."""

    name: str
    label: str = ""
    scopes: list[str]
    groups: list[str] = []
    expires: str | None = None
    """When the key ends, ISO 8601; None if it does not."""


class Bin(ResponseModel):
    """Hits whose probability lay between `low` and `high`: mean probability, and share relevant."""

    low: Probability
    high: Probability
    predicted: Probability
    observed: Probability
    count: Count


class ThresholdRow(ResponseModel):
    """Precision, recall and number of hits at or above a threshold."""

    threshold: Probability
    precision: Probability
    recall: Probability
    kept: Count


class ReliabilityCurve(ResponseModel):
    """The reliability of one retriever's probabilities, or of those shown (retriever "shown")."""

    silo: Name
    retriever: Name
    source: Literal["validation", "feedback"]
    count: Count
    relevant: Count
    ece: float
    floor: float | None = None
    """The error that a perfect model would show at this size."""
    bins: Annotated[list[Bin], Field(fail_fast=True, max_length=MOST_ROWS)]
    thresholds: Annotated[list[ThresholdRow], Field(fail_fast=True, max_length=MOST_ROWS)] = []


class Calibration(ResponseModel):
    """Reliability curves by silo and retriever."""

    curves: Annotated[list[ReliabilityCurve], Field(fail_fast=True, max_length=MOST_ROWS)]


class Round(ResponseModel):
    """One round of training."""

    round: int
    measure: float | None = None
    loss: float | None = None
    asked: list[str] = []
    weights: dict[str, float] = {}
    risks: dict[str, float | None] = {}
    rejected: dict[str, str] = {}
    seconds: float = 0.0


class TrainingView(ResponseModel):
    """A training run up to its latest round."""

    run: str
    strategy: str = ""
    finished: bool = False
    final: dict[str, float | None] = {}
    rounds: list[Round] = []
