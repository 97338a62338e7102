"""Messages between clients, the broker and nodes: version 1, JSON over HTTP.

    POST /v1/search        Search           broker: Answer        node: NodeAnswer
    POST /v1/search/stream Search          server-sent events: silo (SiloProgress), answer, error; GET too
    POST /v1/noised-counts CountQuestion    how many documents answer it, with noise, silo by silo
    POST /v1/feedback      Feedback         204: stored only in the hit's silo; node: AttributedFeedback
    POST /v1/judged        ShownHits        the caller's judgements of them (broker); node: ShownTokens
    POST /v1/judgements    many by document id, each to the silo that has the document
    GET  /v1/judgements    those that came through the asking peer, page by page
    POST /v1/judgements/places    which documents, by digests of their ids, a silo has (node)
    GET  /v1/release       what a silo has released, to whom, and what is left of its budgets
    GET  /v1/calibration   reliability of its probabilities, and precision and recall by threshold
    GET  /v1/training      the rounds of a training run (broker)
    GET  /v1/silos         every silo's state (broker)
    GET  /v1/learning      broker: state of learning, and every version; node: the queries judged there
    POST /v1/learning      start a learning run, /v1/learning/rollback: use another version (broker)
    POST /v1/learning/session, /v1/learning/{session}/{number}    agree on masks, ask a question (node)
    PUT  /v1/learning      the model to search with, DELETE: none (node)
    GET  /v1/statistics    a silo's collection statistics, exact or private (node)
    PUT  /v1/statistics    the sum of all silos' statistics, to score with from now on (node)
    GET  /v1/scale         sums of a silo's scores (node); PUT: the scale of all silos, to score on
    GET  /v1/documents/{silo}/{id}    a whole document, by a hit's ticket or a request that was allowed
    POST /v1/requests      ask the owner for a document, GET: the requests and their state
    POST /v1/requests/{silo}/{number}    the owner's answer; at a node without the silo
    POST /v1/documents/erase    delete all data about documents, with a receipt: the operator (node)
    PUT  /v1/documents     add or change documents, DELETE /v1/documents/{id}: the operator (node)
    GET  /v1/documents     documents by their words, POST /v1/sources: read sources again; the operator
    GET  /v1/health, /v1/ready, /metrics

A request with unknown keys is refused; an answer may contain more than its reader understands. Errors are
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
"""Type of the problem that the caller has seen as much of a silo as its policy allows."""
KEY_EXPIRES = "isthmus-key-expires"
"""Header of answers to a caller whose key expires soon, with the time, ISO 8601."""
ENCODER = "isthmus-encoder"
"""Header of a broker's search in a silo: the fingerprint of the encoder on which its silos agree, or "none".
A silo with another encoder leaves its vectors out of scores that are compared with other silos'."""
MODEL = "isthmus-model"
"""Header of a broker's search in a silo: the version of the model by which it merges."""
STATISTICS_TYPE = "application/vnd.isthmus.statistics"
BUNDLE_TYPE = "application/vnd.isthmus.bundle"
LINES_TYPE = "application/x-ndjson"

LONGEST_QUERY = 2_000
MOST_HITS = 100
MOST_NARROWING = 20
"""Most phrases, prefixes, exclusions or types of one search."""
MOST_FACETS = 50
"""Most types, and most years, by which matches are counted."""
SEARCH_LEVEL = 1
"""Level of `NodeSearch` that a node reports to support; the previous release reports none."""
LONGEST_ID = 1_000
MOST_JUDGED, MOST_ROWS = 100_000, 10_000
"""Most queries that a silo may name to learn from, and most rows of any table in an answer."""
MOST_JUDGEMENTS = 1_000
"""Most judgements in one message that brings them by document id."""
LONGEST_TOKEN = 6_000
LONGEST_OPENED = 1_000_000
"""Most characters of a document that is opened; of a longer one, the beginning is sent."""
LONGEST_REASON = 1_000
MOST_REQUESTS = 1_000
LEAST_DEVIATION = 1e-3
"""Least deviation of scores that lie between −1 and 1, so that no scale makes large numbers of them."""

Count = Annotated[int, Field(ge=0, le=10**12)]
Text = Annotated[str, Field(max_length=2_000)]
"""A text from another party, short enough to show."""
Probability = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=100)]
DocumentId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID, pattern=r"^[^\x00-\x1f\x7f]+$")]
# Regular expression dialects differ in white space: name all characters that any of them includes.
_NOT_WHITE = r"[^\s\u001c-\u001f\u0085\ufeff]"
_VISIBLE = _NOT_WHITE[:-1] + r"\x00-\x1f\x7f]"
Principal = Annotated[
    str, Field(pattern=rf"^(everyone|(user|group):{_VISIBLE}[^\x00-\x1f\x7f]{{0,298}})$", max_length=306)
]
HitToken = Annotated[str, Field(max_length=LONGEST_TOKEN, pattern=r"^[A-Za-z0-9_-]*$")]
QueryText = Annotated[str, Field(min_length=1, max_length=LONGEST_QUERY, pattern=_NOT_WHITE)]
Fingerprint = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9._-]*$")]
"""Fingerprint of an encoder: with equal ones, equal texts have equal vectors. It is sent in a header."""
Cursor = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]
"""Place where a page of a list ends."""
MODEL_VERSION = r"^[A-Za-z0-9-]{0,40}$"
Version = Annotated[str, Field(pattern=MODEL_VERSION)]
"""Version of a model: when it was learned."""
Margin = Annotated[float, Field(ge=-1e12, le=1e12)]
"""Input or output of a model, within fixed bounds."""
Link = Annotated[str, Field(max_length=20_000, pattern=r"^(https?://[!-~]+)?$")]
"""An address for people, percent-encoded."""
Access = Literal["open", "ask", "name"]
"""What can be done with a hit's document: open it, ask its owner for it, ask by name only."""
RequestNumber = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Status = Literal["answered", "late", "refused", "down", "broken"]


def moment(seconds: float) -> str:
    """Format seconds since 1970 as ISO 8601."""
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
    """Extent of a search. The deadline is counted from the arrival of the request."""

    k: Annotated[int, Field(ge=1, le=MOST_HITS)] = 10
    deadline_ms: Annotated[int, Field(ge=10, le=60_000)] | None = None
    explain: bool = False
    threshold: Probability = 0.0
    silos: list[Name] | None = None
    """The silos to search; for the broker."""


class Search(SearchLimits):
    """A search request; the syntax of its query is in `query_language`."""

    query: QueryText
    offset: Annotated[int, Field(ge=0, lt=MOST_HITS)] = 0
    """Hits to skip: those of earlier pages. Pages end with the first 100 hits."""
    facets: bool = False
    """Whether to count matches by silo, type and year, where silos allow it."""
    suggest: bool = False
    """Whether to propose other spellings of words that hardly any document has, where silos allow it."""


Texts = Annotated[list[QueryText], Field(max_length=MOST_NARROWING)]
UnixTime = Annotated[int, Field(ge=-(10**11), le=10**12)]


class Narrowing(RequestModel):
    """Filters of a person's query: what documents must have, and must not have; see `engines.Constraints`."""

    phrases: Texts = []
    prefixes: Texts = []
    without: Texts = []
    types: Texts = []
    other_types: Texts = []
    since: UnixTime | None = None
    until: UnixTime | None = None


class NodeSearch(SearchLimits):
    """A search as the broker passes it on. Fields that a node of the previous release refuses are sent only
    if they are needed, or if the node states that it supports them."""

    query: Annotated[str, Field(max_length=LONGEST_QUERY)]
    """Words to rank by; if empty, all documents that meet `only` are listed by date."""
    only: Narrowing | None = None
    matches: bool = False
    """Whether to count all documents that match."""
    suggest: bool = False
    fold: bool = False
    """Whether hits get digests of their texts, by which the broker folds duplicates."""


class Evidence(ResponseModel):
    """One retriever's share in a hit: raw score → probability → weight → contribution.

    Contributions add up to the log-odds of the hit's probability, or to its score where it has none. "start"
    is the share that every hit has, "profile" that of the query's list as a whole, "calibration" the effect
    of a calibrator on the sum. A document that the retriever did not return has no raw score.
    """

    retriever: Name
    raw: float | None
    probability: Probability | None
    weight: float | None
    """Weight of the log-odds of `probability`; without one, of `contribution / weight`, to which a model, or
    the scale of all silos, converts the retriever's scores."""
    contribution: float


class HitCopy(ResponseModel):
    """The same text in another silo, which can be opened or asked for there like any hit."""

    silo: Name
    document: DocumentId
    probability: Probability | None
    score: float
    title: Text = ""
    ticket: HitToken = ""
    access: Annotated[list[Access], Field(max_length=3)] = []
    link: Link = ""


class Hit(ResponseModel):
    """A document in the result, with a probability and a snippet if the silo provides them."""

    document: DocumentId
    silo: Name
    probability: Probability | None
    score: float
    title: Text = ""
    snippet: Text | None = None
    explanation: Annotated[list[Evidence], Field(fail_fast=True, max_length=100)] | None = None
    token: HitToken = ""
    """Token that feedback on the hit must include; only its silo can read it."""
    type: Annotated[str, Field(max_length=100)] = ""
    date: Annotated[str, Field(max_length=40)] = ""
    """ISO 8601; empty if it is not known, as for the type."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    """Digest of its text under a key that silos share, for the broker; equal for equal texts."""
    also: Annotated[list[HitCopy], Field(fail_fast=True, max_length=MOST_ROWS)] = []
    """The same text in other silos."""
    ticket: HitToken = ""
    """Ticket that is needed to open the document, or to ask its owner for it."""
    access: Annotated[list[Access], Field(max_length=3)] = []
    """What the silo lets the broker's people do with the document."""
    link: Link = ""
    """Address at which the document is shown, if its owner states one."""


ShortText = Annotated[str, Field(max_length=100)]
Year = Annotated[int, Field(ge=-9_999, le=99_999)]


class MatchCounts(ResponseModel):
    """Number of documents of one silo that match: in all, and for the most frequent types and years."""

    count: Count
    types: Annotated[dict[Annotated[str, Field(max_length=100)], Count], Field(max_length=MOST_FACETS)] = {}
    years: Annotated[
        dict[Annotated[int, Field(ge=-9999, le=99999)], Count], Field(max_length=MOST_FACETS)
    ] = {}


class Spelling(ResponseModel):
    """A word of the query that fewer than three documents of a silo have, and more frequent words like it,
    the likeliest first."""

    word: Annotated[str, Field(max_length=100)]
    like: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=3)] = []


class ScoreSums(ResponseModel):
    """Sums over scores of one retriever that lie between −1 and 1: their number, their sum, and the sum of
    squared distances from the mean of each query's scores."""

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
    """A silo's score sums: of BM25 as shares of a query's Σ idf, and of its encoder's cosines."""

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
    """Common scale for BM25's shares of a query's Σ idf and the cosines of one encoder."""

    encoder: Annotated[Fingerprint, Field(min_length=1)]
    bm25: Standard
    dense: Standard

    @property
    def version(self) -> str:
        """Version of the scale, which changes whenever a score would."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class NodeAnswer(ResponseModel):
    """The hits of one silo, best first."""

    silo: Name
    hits: Annotated[list[Hit], Field(fail_fast=True, max_length=MOST_HITS)]
    documents: Count
    """Number of documents that were searched."""
    statistics: Text
    """Version of the shared statistics used for scoring; empty for the silo's own."""
    encoder: Fingerprint = ""
    """Fingerprint of the dense retriever's encoder."""
    scorer: Text = ""
    """Scorer that ordered the hits: bm25, hybrid, learned, fuser or ranker; date for a list by date."""
    scale: Text = ""
    """Version of the scale that a hybrid used."""
    model: Version = ""
    """Version of the learned model used for scoring."""
    margins: Annotated[list[Margin], Field(max_length=100)] = []
    """Best margins by that model, if it is the broker's."""
    retrieved: Annotated[list[tuple[Margin | None, Margin | None]], Field(max_length=MOST_HITS)] = []
    """BM25's share and the cosine of the best hits, in their order, if the silo lacks the broker's model."""
    of_query: Annotated[list[Margin], Field(max_length=10)] = []
    """Number of the query's words, and their rarity."""
    detail: Text = ""
    """What was missing, such as an encoder that did not answer."""
    search_level: Count = 0
    """Level of `NodeSearch` that the node supports."""
    matches: MatchCounts | None = None
    """Matches, if the broker requested them and its policy allows them."""
    spellings: Annotated[list[Spelling], Field(max_length=10)] | None = None
    """Spellings, under the same conditions; None if the silo reports none."""
    took_ms: float


class SiloStatus(ResponseModel):
    """The outcome of a search in one silo."""

    silo: Name
    status: Status
    detail: str = ""
    took_ms: float | None = None
    documents: int | None = None
    scorer: str = ""
    """Scorer that ordered the hits: bm25, hybrid, learned, fuser or ranker; date for a list by date."""
    model: str = ""
    """Version of the learned model used for scoring."""
    matches: int | None = None
    """Number of documents that match, if it was requested and the silo's policy allows it: those with any of
    the words that meet all filters. A threshold has no effect on it."""


class SiloProgress(SiloStatus):
    """One silo's outcome while others are still awaited: an event of a streamed search."""

    count: int = 0
    """Number of hits, including those below the threshold and those of other pages."""
    hits: list[Hit] | None = None
    """Best hits of all silos so far; None if there are no new ones, if the whole answer follows at once, and
    for most silos if there are very many."""


class QueryPart(ResponseModel):
    """A filter of the query, and its place in the query, in characters."""

    kind: str
    """One of phrase, without, prefix, silo, other_silo, type, other_type, after or before."""
    value: str
    start: int
    end: int


class Understood(ResponseModel):
    """How a query was understood."""

    words: str
    """Words by which hits are ranked."""
    parts: list[QueryPart] = []
    hints: list[str] = []
    """Hints about parts that may have been meant otherwise."""
    marked: list[str] = []
    """Words to highlight in texts, in lower case: those of the query except stop words."""


class Facets(ResponseModel):
    """Number of documents that match: in all, by silo, by type (most frequent first) and by year (latest
    first), over the silos that count. A document in two silos counts twice, and a threshold has no effect."""

    matches: int
    silos: dict[str, int]
    types: dict[str, int]
    years: dict[str, int]


class Suggestion(ResponseModel):
    """Another spelling that more documents have; it is never searched automatically."""

    query: str
    """The whole query in this spelling."""
    words: dict[str, str]
    """Replacements, by the word that each replaces."""
    silos: list[str]
    """Silos with documents that have this spelling."""


class Answer(ResponseModel):
    """The hits of all silos, best first, at or above the threshold; and the outcome in each silo."""

    hits: list[Hit]
    silos: list[SiloStatus]
    threshold: Probability
    below: int = 0
    """Number of hits left out because of the threshold."""
    without_probability: int = 0
    """Number of those without a probability, because their silo has no calibrator yet."""
    model: str = ""
    """Version of the learned model that merged the hits."""
    unlike: bool = False
    """Whether no judged query resembles this one: probabilities are then drawn to the base rate."""
    overrated: bool = False
    """Whether probabilities are too high, because an older model expects answers of more silos."""
    understood: Understood | None = None
    offset: int = 0
    more: bool = False
    """Whether there may be another page."""
    facets: Facets | None = None
    suggestion: Suggestion | None = None
    took_ms: float


LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Allowed thresholds on the probability for a noised count; few, so that nobody asks between two of them."""
USUAL_LEVEL = 0.2
"""Default: so high that few documents count which share a word alone, so low that counts exceed the noise."""
BUDGET_SPENT = "the privacy budget for this peer is spent"
"""Detail of the problem (403) with which a silo refuses a question for which its ledger has no room."""


def _a_level(value: float) -> float:
    if value not in LEVELS:
        raise ValueError(f"one of {', '.join(map(str, LEVELS))}")
    return value


Level = Annotated[float, AfterValidator(_a_level), Field(json_schema_extra={"enum": list(LEVELS)})]


class CountQuestion(RequestModel):
    """Asks how many documents answer a query: those at least as probable as the threshold or, in a silo
    that has learned nothing, those with all of its words. Order, case and number of the words make no
    difference."""

    query: QueryText
    threshold: Level = USUAL_LEVEL
    silos: list[Name] | None = None
    """The silos to ask; for the broker."""


class NoisedCount(ResponseModel):
    """A silo's count with two-sided geometric noise; `low` to `high` has the true one in 95 % of draws."""

    silo: Name
    by: Literal["probability", "words"]
    count: Count
    low: Count
    high: Count
    epsilon: Annotated[float, Field(gt=0)]
    """ε charged to every unit of the silo, for one unit more, less or replaced."""
    unit: Annotated[str, Field(max_length=40)] = "document"
    """Unit that is counted: documents, or subjects (patient) with at least one document that answers."""
    repeated: bool = False
    """Whether the count was drawn before, and cost nothing now."""


class SiloCount(ResponseModel):
    """The outcome of a question in one silo."""

    silo: Name
    status: Status
    detail: str = ""
    answer: NoisedCount | None = None


class CountAnswer(ResponseModel):
    """The noised counts of all silos for one question."""

    silos: list[SiloCount]
    threshold: Probability
    took_ms: float


class Feedback(RequestModel):
    """Whether a hit was right, by the token that came with it; accepted for a day after the search.

    The broker passes it to the silo, which alone stores it. None withdraws a judgement.
    """

    query: QueryText
    silo: Name
    token: HitToken
    relevant: bool | None


class AttributedFeedback(Feedback):
    """Feedback as the broker passes it on; only the broker can resolve the name in `person`."""

    person: Annotated[str, Field(max_length=100)] = ""


class Opening(RequestModel):
    """The right to open a document: the ticket of a hit, or a request that its owner has allowed."""

    ticket: HitToken = ""
    request: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""


class AttributedOpening(Opening):
    """An `Opening` as the broker passes it on, with its name for the person."""

    person: Annotated[str, Field(max_length=100)] = ""


class OpenedDocument(ResponseModel):
    """A document that was opened."""

    silo: Name
    document: DocumentId
    title: Annotated[str, Field(max_length=10_000)] = ""
    body: Annotated[str, Field(max_length=LONGEST_OPENED)] = ""
    characters: Count = 0
    """Characters of the whole body; more than in `body` if that was cut."""
    link: Link = ""


class Ask(RequestModel):
    """A request to the owner of a hit's document."""

    ticket: HitToken
    query: QueryText
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""


class AskSilo(Ask):
    """An `Ask` to the broker. With `named` the owner sees the API key's name, else a pseudonym."""

    silo: Name
    named: bool = False


class AttributedAsk(Ask):
    """An `Ask` as the broker passes it on: its pseudonym for the person, and their name if they give it."""

    person: Annotated[str, Field(max_length=100)] = ""
    name: Annotated[str, Field(max_length=100)] = ""


class DocumentRequest(ResponseModel):
    """A person's request to an owner, and its state."""

    number: RequestNumber
    silo: Name
    document: DocumentId
    query: Text
    reason: Text = ""
    state: Literal["waiting", "allowed", "denied", "opened", "expired"]
    word: Text = ""
    """The owner's comment."""
    at: Text
    """Time of the request, ISO 8601."""
    answered: Text | None = None
    person: Text = ""
    """The person who asks; for the owner."""


class RequestList(ResponseModel):
    """Requests, the latest first, and silos that did not answer, with the reason."""

    requests: Annotated[list[DocumentRequest], Field(fail_fast=True, max_length=MOST_ROWS)]
    unanswered: dict[str, str] = {}


class RequestsOf(RequestModel):
    """Selects requests that a broker fetches from a silo: one person's or, with "", all through it."""

    person: Annotated[str, Field(max_length=100)] = ""


class EveryRequest(RequestModel):
    """Selects the caller's own requests or, for administrators, all."""

    all: bool = False


class RequestAnswer(RequestModel):
    """The owner's answer: whether the document may be opened, once."""

    allow: bool
    word: Annotated[str, Field(max_length=LONGEST_REASON)] = ""


class HitReference(RequestModel):
    """A hit by its silo and the token that it came with."""

    silo: Name
    token: HitToken


class ShownHits(RequestModel):
    """Hits of a query, to fetch the caller's own judgements of them."""

    query: QueryText
    hits: Annotated[list[HitReference], Field(max_length=MOST_HITS)]


class OwnJudgements(ResponseModel):
    """The caller's judgements of the hits, in order; None without one, or without the silo's answer."""

    relevant: list[bool | None]


class ShownTokens(RequestModel):
    """Hits of one silo. The request does not name a person: the broker selects that person's judgements."""

    query: QueryText
    tokens: Annotated[list[HitToken], Field(max_length=MOST_HITS)]


class Verdicts(ResponseModel):
    """People's judgements of each hit through the asking peer, by the names it has for them."""

    verdicts: Annotated[
        list[Annotated[dict[str, bool], Field(max_length=MOST_JUDGEMENTS)]], Field(max_length=MOST_HITS)
    ]


class NamedJudgement(RequestModel):
    """Whether a document is right for a query, by the id under which the caller sees it."""

    query: QueryText
    document: DocumentId
    relevant: bool
    silo: Name | None = None
    """The silo that has the document; without it, the broker asks all."""


class JudgementBatch(RequestModel):
    """Judgements by document id, for silos whose policy has `judgements`."""

    judgements: Annotated[list[NamedJudgement], Field(min_length=1, max_length=MOST_JUDGEMENTS)]


class AttributedBatch(JudgementBatch):
    """Judgements as the broker passes them on; `person` is who brought them, as in feedback."""

    person: Annotated[str, Field(max_length=100)] = ""


class Imported(ResponseModel):
    """Result of a batch of judgements; the lists have positions in it, from 0."""

    added: Count = 0
    changed: Count = 0
    unchanged: Count = 0
    unknown: list[Count] = []
    """Judgements of documents that no silo has."""
    ambiguous: dict[Count, list[str]] = {}
    """Judgements whose document id occurs in several silos, with these silos."""
    unplaced: list[Count] = []
    """Judgements to send again: a silo that may have the document did not answer."""
    unanswered: dict[str, str] = {}
    """Silos that did not answer, with the reason."""


class DocumentDigests(RequestModel):
    """Documents by digests of their ids under a key drawn for this message; a silo recognises its own."""

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    digests: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]], Field(max_length=2 * MOST_JUDGEMENTS)
    ]


class PresentDocuments(ResponseModel):
    """Positions, from 0, of the digests whose documents a silo has."""

    present: Annotated[list[Count], Field(fail_fast=True, max_length=2 * MOST_JUDGEMENTS)]


class JudgementPage(ResponseModel):
    """One page of the judgements that came through a peer, by the majority of its people."""

    judgements: Annotated[list[NamedJudgement], Field(fail_fast=True, max_length=MOST_ROWS)]
    next: Cursor = ""
    """Cursor for the next page; empty on the last."""


class Judged(ResponseModel):
    """Queries with a judged hit, and the number of folds into which they may be dealt.

    No queries, and 0 folds, while a silo has too few to take part.
    """

    queries: Annotated[list[QueryText], Field(fail_fast=True, max_length=MOST_JUDGED)]
    folds: Annotated[int, Field(ge=0, le=8)] = 0
    consent: Literal["", "two"] = ""
    """Whether the owner agrees to sums of two silos."""
    least: Annotated[int, Field(ge=1, le=10**6)] = 10
    """Fewest judged queries that a sum of this silo must cover."""
    alone: bool = False
    """Whether its scores are those of its own engine: they enter no sum, and it calibrates them by itself."""


Hex = Annotated[str, Field(max_length=256, pattern=r"^([0-9a-f]{2})*$")]
SessionName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Mode = Literal["masked", "fedrisk"]
"""How silos learn: from totals alone (masked), or weighed by reports of each silo (fedrisk)."""


class LearningSession(RequestModel):
    """A session that a broker begins in a silo; with the keys of all members, it settles the members."""

    session: SessionName
    mode: Mode = "masked"
    encoder: Fingerprint = ""
    """Encoder whose cosines are used; empty for none."""
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
    """One learning run: its results, and whether its model is in use."""

    version: Version
    learned: str
    """When it was learned, ISO 8601."""
    mode: Mode = "masked"
    by: str = ""
    """Who started the run: a person's name, or the schedule."""
    current: bool = False
    usable: bool = False
    """Whether there is a model to search with."""
    problem: str = ""
    """Why there is no model, and the cure."""
    record: dict[str, Any] | None = None
    """What was compared, chosen and measured."""


class LearningView(ResponseModel):
    """State of learning, and all its runs, the latest first."""

    state: Literal["idle", "running"] = "idle"
    stage: str = ""
    done: int = 0
    """Number of stages completed."""
    started: str | None = None
    mode: Mode = "masked"
    problem: str = ""
    """Why the last run failed, and the cure."""
    judged: int | None = None
    """Number of judged queries at the last run."""
    every: str = ""
    next: str | None = None
    current: Version = ""
    """The version in use; empty before anything was learned, "none" where all was rolled back."""
    versions: list[LearnedVersion] = []
    silos: dict[str, str] = {}
    """The version with which each silo searched last."""


class Document(RequestModel):
    """A document as its operator provides it."""

    id: DocumentId
    title: Annotated[str, Field(max_length=10_000)] = ""
    body: Annotated[str, Field(max_length=10_000_000)] = ""
    allow: Annotated[list[Principal], Field(max_length=1_000)] = []
    """Who may see it: user:ID, group:NAME or everyone; if empty, all whom the silo's policy admits."""
    subject: Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """The person it is about, a patient or a customer."""


class DocumentBatch(RequestModel):
    """Documents to add, or to replace those with the same ids."""

    documents: Annotated[list[Document], Field(min_length=1, max_length=10_000)]


class Changed(ResponseModel):
    """Number of documents that an operator's request added, changed and removed, without unchanged ones."""

    added: int = 0
    changed: int = 0
    removed: int = 0


class JudgementsAfter(RequestModel):
    """Selects a page of judgements: the one after another page's `next`."""

    after: Cursor = ""


class JudgementsOf(JudgementsAfter):
    """Selects a page of judgements of one silo, for the broker."""

    silo: Name


class EntriesAfter(RequestModel):
    """Selects entries of an audit log."""

    after: Count = 0
    k: Annotated[int, Field(ge=1, le=10_000)] = 1_000


class Find(RequestModel):
    """An operator's search in the store."""

    find: Annotated[str, Field(min_length=1, max_length=LONGEST_QUERY)]
    k: Annotated[int, Field(ge=1, le=1000)] = 20


class Titled(ResponseModel):
    """A document by its id and title."""

    id: DocumentId
    title: str


class Listed(ResponseModel):
    """Documents that an operator's search returned."""

    documents: list[Titled]


class Reread(ResponseModel):
    """Errors and states of sources after they were read again."""

    errors: list[str]
    sources: list[SourceState] = []


class SourceState(ResponseModel):
    """Result of the last reading of a source."""

    source: Text
    documents: Count = 0
    unread: Count = 0
    """Files or rows that could not be read."""
    errors: Annotated[list[Text], Field(max_length=100)] = []
    """The first of these errors, with the reason."""
    skipped: Annotated[dict[str, Count], Field(max_length=1_000)] = {}
    """Files of kinds that are not read, by suffix."""
    erased: Count = 0
    """Documents left out because they were erased, although the source still has them."""
    failed: Text = ""
    """Why nothing of the source could be read."""


class Erase(RequestModel):
    """Documents to erase, by their ids or by the person they are about."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["ids"]}, {"required": ["subject"]}]})

    ids: Annotated[list[DocumentId], Field(min_length=1, max_length=10_000)] = []
    subject: Annotated[str, Field(min_length=1, max_length=300)] = ""


class ErasedDocument(ResponseModel):
    """One document of a receipt."""

    id: DocumentId
    removed: bool
    """Whether it was stored; False for a document that was unknown or gone already."""
    hidden: bool = False
    """Whether it is no longer shown but stays where it is, in an external engine."""
    released: list[dict[str, Any]] = []
    """Noised statistics and sketches that covered it: peer, mechanism, ε and time."""


class ErasureReceipt(ResponseModel):
    """Record of an erasure: data erased, rewritten and still known, and what cannot be undone."""

    silo: Name
    at: Text
    why: Text = ""
    subject: Text = ""
    documents: list[ErasedDocument]
    judgements: Count = 0
    requests: Count = 0
    rewritten: list[Text]
    """Data that were rewritten without the documents."""
    exports: list[Text] = []
    """Files outside the node's folder that were rewritten."""
    relearn: list[Text] = []
    """Models that were learned with the documents, and the treatment of each."""
    remains: list[Text]
    """Data about the documents that are still stored here."""
    not_undone: list[Text]
    """Data about the documents that left the silo before."""


class SourceRetention(ResponseModel):
    """Retention of a source's documents and judgements, and how many are older."""

    source: Text
    keep_days: Count | None = None
    keep_judgements_days: Count | None = None
    documents: Count = 0
    judgements: Count = 0


class RetentionReport(ResponseModel):
    """Documents and judgements that a silo's retention rules erased, or would erase."""

    silo: Name
    at: Text
    sources: list[SourceRetention] = []
    ids: list[DocumentId] = []
    """Ids of the first of the documents."""
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
"""Seconds since 1970, to the end of the year 9999, where calendars end."""


class Machine(ResponseModel):
    """State of a server, for the operators of the federation; times in seconds since 1970."""

    version: Text = ""
    """Version of Isthmus."""
    time: Moment | None = None
    """The server's clock when it answered."""
    certificate_ends: Moment | None = None
    revocations: Moment | None = None
    """When its list of revoked certificates was signed; None if it has no list."""
    disk_free: Annotated[float, Field(ge=0, le=1)] | None = None
    """Free share of the disk with its folder."""
    disk_free_bytes: Annotated[int, Field(ge=0, le=10**18)] | None = None


class Ready(ResponseModel):
    """Whether searches can be answered, and if not, why."""

    ready: bool
    detail: Text = ""
    documents: Count = 0
    indexed: Count = 0
    statistics: Text = ""
    encoder: Fingerprint = ""
    """Fingerprint of a silo's encoder; for a broker, of the one on which its silos agree."""
    encoder_name: Text = ""
    """The silo's name for its encoder."""
    model: Text = ""
    """Version of the learned model with which a silo searches; for a broker, the one in use."""
    engine: Text = ""
    """Engine that has a silo's documents, if that is not its own index."""
    level: Literal["", "full", "scores"] = ""
    """Whether such a silo takes part fully, or only with its engine's own scores once calibrated."""
    search_level: Count = 0
    """Level of `NodeSearch` that a silo supports."""
    unread: Count = 0
    """Files or rows of a silo's sources that could not be read."""
    machine: Machine | None = None
    """State of a silo's machine, if the silo shows it to this peer."""


class Departure(ResponseModel):
    """One kind of data that left a silo: how often, to whom, and with which ε or without a guarantee."""

    kind: Text
    peer: Text
    guarantee: Text
    mechanism: Text = ""
    unit: Text = ""
    times: Count
    items: Count
    last: Text


RIGHTS = (
    *("search", "snippets", "counts", "noised_counts", "matches", "suggestions", "open"),
    *("feedback", "learning", "judgements", "manage", "operate"),
)
"""Rights of a peer, as the Silos view shows them."""


class PeerBudget(ResponseModel):
    """Rights of a peer, and what is left of its budget for the document that has spent most."""

    peer: Text
    search: bool
    snippets: bool
    counts: bool
    noised_counts: bool = False
    matches: bool = False
    suggestions: bool = False
    open: bool = False
    feedback: bool = False
    learning: bool = False
    judgements: bool = False
    manage: bool = False
    operate: bool = False
    budget: float | None = None
    left: float | None = None
    seen: float | None = None
    """Estimated share of the silo's documents that the peer has seen in a year."""


class SiloRelease(ResponseModel):
    """Releases of a silo and what is left of its budgets, for the Silos view.

    For a peer that may search no ε is claimed: scores and explanations are exact.
    """

    silo: Name
    documents: Count
    budget: Text = ""
    unit: Annotated[str, Field(max_length=40)] = "document"
    """Unit for which ε is stated: a document, or all documents of a subject (patient)."""
    most_spent: float = 0.0
    least_left: float | None = None
    meaning: Text = ""
    departures: Annotated[list[Departure], Field(fail_fast=True, max_length=MOST_ROWS)] = []
    peers: Annotated[list[PeerBudget], Field(fail_fast=True, max_length=MOST_ROWS)] = []
    last_training: Text | None = None
    outdated_model: bool = False
    """Whether its model was learned with judgements of documents that have been erased since."""


class SiloState(ResponseModel):
    """A silo as the broker sees it."""

    silo: Name
    url: str
    """Address at which the broker reaches the silo; empty unless an administrator asks."""
    about: str = ""
    """What the silo contains, in the words of the broker's operator."""
    status: Status
    detail: str = ""
    ready: Ready | None = None
    release: SiloRelease | None = None
    sources: list[SourceState] = []
    """State of its sources: for administrators, if the silo lets them manage."""
    skew: float | None = None
    """Seconds by which its clock is ahead of the broker's."""


class SiloList(ResponseModel):
    """All silos, the version of the statistics that they share, and the encoder on which they agree."""

    silos: list[SiloState]
    statistics: str = ""
    encoder: str = ""
    about: str = ""
    """Text for people: when a document is right in this federation."""
    queries: list[str] = []
    """Example queries."""
    machine: Machine | None = None
    """State of the broker's own machine: for administrators."""


class Session(RequestModel):
    """A person's API key, to sign in with."""

    key: Annotated[str, Field(min_length=1, max_length=200)]


class WaysIn(ResponseModel):
    """Ways to sign in: with an API key, or at an identity provider, given by its host name."""

    key: bool
    provider: str = ""


class OpenSession(ResponseModel):
    """One session of the page: its person, its beginning, and its last use, ISO 8601."""

    person: str
    name: str
    scopes: list[str]
    since: str
    used: str


class SessionList(ResponseModel):
    """Every session of the page."""

    sessions: list[OpenSession]


class SessionsOf(RequestModel):
    """Selects the sessions of a person: by the name of an API key's owner, or an id at the provider."""

    person: Annotated[str, Field(min_length=1, max_length=200)]


class EndedSessions(ResponseModel):
    """How many sessions were ended."""

    ended: Count


KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class ListedKey(ResponseModel):
    """An API key without its secret; times are ISO 8601, and `expires` is None if it never expires."""

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
    """The caller's name, their name on the page, and their scopes and groups."""

    name: str
    label: str = ""
    scopes: list[str]
    groups: list[str] = []
    expires: str | None = None
    """When the key expires, ISO 8601; None if it does not."""


class Bin(ResponseModel):
    """Hits with a probability from `low` to `high`: its mean, and the share of relevant ones."""

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
    """The ECE that a perfect model would show at this size."""
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
